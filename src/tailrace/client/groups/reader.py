"""A member of a group and what it reads: vbuckets come, are handed over at snapshot ends, or are lost.

Whatever touches the record blocks and runs in another thread, one call at a time. Whatever touches the
reading runs in the loop: vbuckets are added whenever they are taken, and leave only between two portions,
when the application has everything that was handed out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ...errors import ConnectError, StoreError, TailraceError, UsageError
from ...rng import unique_name
from ..autosave import Autosave
from ..progress import SavedPosition
from .member import GroupMember, check_name
from .record import Slot
from .stores import open_group_store

__all__ = ["GroupAutosave", "GroupReader", "SharedReading"]

T = TypeVar("T")

_BEATS = 4
"""How many signs of life a member gives in the time after which it is given up."""
_AGAIN_S = 0.2
_LOOK_S = 1.0
"""The longest pause between two looks for something to take or to hand over."""


class SharedReading(Protocol):
    """What a group asks of a reading."""

    def admit(self, positions: Mapping[int, SavedPosition | None]) -> None:
        """Read these vbuckets too, each from its position, or from where the reading starts."""
        ...

    def known_starts(self, vbuckets: Iterable[int]) -> dict[int, SavedPosition]:
        """Where those that start "now" begin, as far as that is known."""
        ...

    def can_leave(self, vbucket: int, *, is_urgent: bool) -> bool:
        """Whether all that was handed out of it ends with a whole snapshot; if urgent, it need not."""
        ...

    def dismiss(self, vbuckets: Iterable[int]) -> None:
        """Stop reading these."""
        ...

    def to_save(self) -> dict[int, SavedPosition]:
        """The last whole state of every vbucket."""
        ...


class GroupReader:
    """The part of a source that belongs to a group."""

    def __init__(
        self,
        group: str,
        where: str | Path,
        bucket: str,
        *,
        slot: Slot | None,
        timeout_s: float,
        retry_for_s: float,
        on_change: Callable[[], object],
        on_error: Callable[[Exception], object],
    ) -> None:
        self._group, self._where, self._bucket = check_name(group), where, bucket
        self._name, self._slot = "", slot
        self._timeout_s, self._retry_for_s = timeout_s, retry_for_s
        self._on_change, self._on_error = on_change, on_error
        self._lock = asyncio.Lock()
        self._member: GroupMember | None = None
        self._is_from_now = False
        self._beating: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._reading: SharedReading | None = None
        self.owned: frozenset[int] = frozenset()
        """The vbuckets that this member has."""
        self._surplus: frozenset[int] = frozenset()
        self._unsaved_starts: set[int] = set()
        """VBuckets that start "now": where that is must be saved before anything of them is handed out and
        before they are handed over, so it is the same for their next reader."""
        self._wanted_since: dict[int, float] = {}
        """By vbucket: since when others should have it. After a while one goes even inside a snapshot, at its
        last whole one."""
        self._members = 0

    async def begin(
        self, reading: SharedReading, vbucket_count: int, *, bucket_uuid: str = "", is_from_now: bool
    ) -> None:
        """Take part with a new reading."""
        await self.leave()
        self._is_from_now = is_from_now
        self._unsaved_starts = set()
        host = "".join(letter if letter.isalnum() else "-" for letter in socket.gethostname())
        self._name = f"{host[:60]}-{os.getpid()}-{unique_name()[:8]}"
        self._member = await self._call(self._join, vbucket_count, bucket_uuid)
        self._reading = reading
        await self._turn()
        self._beating = asyncio.create_task(self._beat())

    def _join(self, vbucket_count: int, bucket_uuid: str) -> GroupMember:
        store = open_group_store(self._where, self._group, self._bucket)
        return GroupMember(
            store,
            bucket=self._bucket,
            bucket_uuid=bucket_uuid,
            vbucket_count=vbucket_count,
            name=self._name,
            slot=self._slot,
            timeout_s=self._timeout_s,
        )

    def stop(self) -> None:
        """Stop taking part; what was not saved is read again by others."""
        member, self._member = self._member, None
        beating, self._beating = self._beating, None
        self._reading, self.owned, self._surplus = None, frozenset(), frozenset()
        if beating is not None:
            beating.cancel()
        if member is not None:
            self._leaving = asyncio.create_task(self._leave(member))

    async def leave(self) -> None:
        """Do what `stop` does, and return when the others know of it."""
        self.stop()
        if self._leaving is not None:
            await self._leaving

    async def _leave(self, member: GroupMember) -> None:
        async with self._lock:
            with contextlib.suppress(TailraceError):  # then it is given up after a while
                await self._call(member.leave)

    async def between_portions(self) -> bool:
        """Hand over what others should have, now that the application has everything that was handed out.

        False if nothing may be handed out yet, because the others may have given this member up, or because
        something may have changed while the store was asked: the caller comes again.
        """
        member, reading = self._member, self._reading
        if member is None or reading is None:
            raise UsageError("the reading has ended")
        if member.is_in_doubt:
            try:
                await self._turn()
            except (StoreError, ConnectError):  # `_beat` keeps track of how long
                await asyncio.sleep(_AGAIN_S)
            return False
        starts = reading.known_starts(self._unsaved_starts) if self._unsaved_starts else {}
        if starts:
            async with self._lock:
                try:
                    await self._call(lambda: member.save(starts))
                except (StoreError, ConnectError):
                    await asyncio.sleep(_AGAIN_S)
                    return False
                self._unsaved_starts -= starts.keys()
            return False
        now = asyncio.get_running_loop().time()
        self._wanted_since = {v: self._wanted_since.get(v, now) for v in self._surplus & self.owned}
        ready = [
            vbucket
            for vbucket, since in self._wanted_since.items()
            if vbucket not in self._unsaved_starts
            and reading.can_leave(vbucket, is_urgent=now - since >= self._timeout_s)
        ]
        if ready:
            async with self._lock:
                positions = self._own(reading.to_save())
                # before the release, which may succeed though its answer is lost, and then others read them;
                # if it fails, the next `_turn` finds that this member has them, and reads from what was saved
                reading.dismiss(ready)
                self.owned -= frozenset(ready)
                self._surplus -= frozenset(ready)
                try:
                    await self._call(lambda: member.save(positions, release=ready))
                except (StoreError, ConnectError):
                    await asyncio.sleep(_AGAIN_S)
            return False
        return True

    async def save(self, positions: Mapping[int, SavedPosition]) -> None:
        """Save positions; `GroupFenced` if the others have given this member up."""
        if (member := self._member) is None:
            raise UsageError("the reading has ended, and others may have its vbuckets: save before that")
        async with self._lock:
            own_positions = self._own(positions)
            await self._call(lambda: member.save(own_positions))

    def stats(self) -> dict[str, Any]:
        """Figures of this member."""
        return {
            "group": self._group,
            "member": self._name,
            "members": self._members,
            "vbuckets": len(self.owned),
            "to_hand_over": len(self._surplus),
        }

    def _own(self, positions: Mapping[int, SavedPosition]) -> dict[int, SavedPosition]:
        return {vbucket: position for vbucket, position in positions.items() if vbucket in self.owned}

    async def _beat(self) -> None:
        """Show that this member lives, and see what changed, until cancelled."""
        pause_s = min(_LOOK_S, self._timeout_s / _BEATS)
        failing_since: float | None = None
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self._turn()
                failing_since = None
            except (StoreError, ConnectError) as error:
                failing_since = loop.time() if failing_since is None else failing_since
                if loop.time() - failing_since >= self._retry_for_s:
                    self._on_error(error)
                    return
            except Exception as error:  # noqa: BLE001 - whatever it is, the application gets it
                self._on_error(error)
                return

    async def _turn(self) -> None:
        async with self._lock:
            member, reading = self._member, self._reading
            if member is None or reading is None:
                return
            held = await self._call(member.turn)
            self._surplus, self._members = held.surplus, held.members
            new = sorted(held.owned - self.owned)
            if new:
                saved = await self._call(lambda: member.load(new))
                reading.admit({vbucket: saved.get(vbucket) for vbucket in new})
                self.owned = held.owned
                if self._is_from_now:
                    self._unsaved_starts.update(vbucket for vbucket in new if vbucket not in saved)
            if new or held.surplus:
                self._on_change()

    async def _call(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call the store in a thread. If cancelled, wait for it first: the next call must not overlap."""
        working = asyncio.get_running_loop().run_in_executor(None, work, *arguments)
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.wait([working])
            if not working.cancelled():
                working.exception()  # nobody is left to handle it
            raise


class GroupAutosave(Autosave):
    """Saves what a member has to its group."""

    def __init__(self, group: GroupReader, *, is_automatic: bool) -> None:
        super().__init__(None, is_automatic=is_automatic)
        self._group = group

    @property
    def is_wanted(self) -> bool:
        return self._has_more and self._is_automatic

    async def save(self, positions: Mapping[int, SavedPosition], now: float) -> None:
        self._has_more = False
        self._saved_at = now
        if any(self._last_saved.get(vbucket) is not position for vbucket, position in positions.items()):
            await self._group.save(positions)
            self._last_saved = positions
