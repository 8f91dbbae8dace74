"""Faults over HTTP, for tests in any language, behind a token.

POST /faults/rewind     {"vbucket": "0-3", "to_seqno": 100} or {"vbucket": "all", "lose": 10}
POST /faults/failover   {"vbucket": 7}: a new branch; with "lose": 10 one that lost changes
POST /faults/delay      {"ms": 200, "for_s": 5}: delay everything that the node sends; 0 ends it
POST /faults/drop       {"name": "part of a stream's name"} or {"all": true}: break connections
POST /faults/disk-full  {"on": true, "for_s": 5}: nothing gets to disk
POST /faults/purge      {"vbucket": "all"}: tombstones go, and the purge seqno rises
GET  /faults            what is on
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from ..errors import RollbackImpossible, StoreError, TailraceError, UsageError
from ..server.http import HttpContent, HttpRequest, http_error
from ..store.base import Compaction
from ..units import parse_integer, parse_vbuckets
from ..wire.codes import VBucketState

if TYPE_CHECKING:
    from ..server.bucket import ServedBucket
    from ..server.fault_server import FaultServer

__all__ = ["FaultKit"]

PREFIX = "/faults"
_TRUE, _FALSE = ("true", "1", "on", "yes"), ("false", "0", "off", "no")
_MAX_S = 3600


class FaultKit:
    """The faults that a holder of the token may cause in a node."""

    def __init__(self, server: FaultServer, token: str) -> None:
        self._server = server
        self._node = server.node
        self._token = token
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._faults: dict[str, Callable[[dict[str, str]], Awaitable[Any]]] = {
            "rewind": self._rewind,
            "failover": self._failover,
            "delay": self._delay,
            "drop": self._drop,
            "disk-full": self._fill_disk,
            "purge": self._purge,
        }

    async def serve(self, request: HttpRequest) -> HttpContent:
        """Do what a request says."""
        scheme, _, token = request.authorization.partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.encode(), self._token.encode()):
            return http_error(403, "send the node's --fault-token: Authorization: Bearer TOKEN")
        if request.path == PREFIX and request.method == "GET":
            return HttpContent.of_json(self._state())
        name = request.path.removeprefix(f"{PREFIX}/")
        fault = self._faults.get(name)
        if fault is None:
            return http_error(404, f"there is no such fault; there are {', '.join(self._faults)}")
        if request.method != "POST":
            return http_error(405, "only POST")
        try:
            fields = _fields(request)
            done = await fault(fields)
        except UsageError as error:
            return http_error(400, str(error))
        except (RollbackImpossible, StoreError) as error:
            return http_error(409, str(error))
        except TailraceError as error:
            return http_error(500, str(error))
        facts: dict[str, Any] = dict(sorted(fields.items()))
        self._node.events.record("fault", kind=name, **facts)
        return HttpContent.of_json(done)

    def _state(self) -> dict[str, Any]:
        return {
            "delay_ms": round(self._server.delay_s * 1000),
            "disk_full": [bucket.name for bucket in self._node.buckets.values() if bucket.work.disk_is_full],
        }

    # history

    async def _rewind(self, fields: dict[str, str]) -> dict[str, int]:
        if ("to_seqno" in fields) == ("lose" in fields):
            raise UsageError("say either to_seqno or lose")
        return await self._branch(fields, "rewind")

    async def _failover(self, fields: dict[str, str]) -> dict[str, int]:
        if "to_seqno" in fields:
            raise UsageError("a failover has no to_seqno; use rewind, or lose")
        return await self._branch({"lose": "0", **fields}, "failover")

    async def _branch(self, fields: dict[str, str], why: str) -> dict[str, int]:
        """Begin new branches, all or none; durable when this returns."""
        bucket, chosen = self._bucket(fields), _vbuckets(fields)
        done: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()

        def act() -> None:
            try:
                targets = self._targets(bucket, chosen, fields)
                with self._node.watching_history(bucket, targets, "failover", why=why):
                    bucket.store.rollback(targets, branch=True)
            except TailraceError as error:
                if not done.done():  # the peer may be gone
                    done.set_exception(error)
                return
            for number in targets:
                bucket.vbucket_changed(number)
            if not done.done():
                done.set_result({str(number): seqno for number, seqno in targets.items()})

        bucket.work.exclusively(act)
        return await done

    def _targets(
        self, bucket: ServedBucket, chosen: list[int] | None, fields: dict[str, str]
    ) -> dict[int, int]:
        active = {vbucket.id: vbucket for vbucket in bucket.store if vbucket.state == VBucketState.ACTIVE}
        numbers = list(active) if chosen is None else chosen
        missing = [number for number in numbers if number not in active]
        if missing:
            raise UsageError(f"vbucket {missing[0]} is not active here")
        if "lose" in fields:
            lose = parse_integer(fields["lose"])
            return {number: max(0, active[number].high_seqno - lose) for number in numbers}
        return dict.fromkeys(numbers, parse_integer(fields["to_seqno"]))

    async def _purge(self, fields: dict[str, str]) -> dict[str, int]:
        bucket, chosen = self._bucket(fields), _vbuckets(fields)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def finished(error: StoreError | None) -> None:
            if done.done():
                return  # the peer is gone
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        bucket.work.compact(Compaction(vbuckets=chosen, drop_tombstones=True), finished)
        await done
        return {
            str(vbucket.id): vbucket.purge_seqno
            for vbucket in bucket.store
            if chosen is None or vbucket.id in chosen
        }

    # network and disk

    async def _delay(self, fields: dict[str, str]) -> dict[str, Any]:
        if "ms" not in fields:
            raise UsageError("say how long: ms")
        milliseconds = parse_integer(fields["ms"], maximum=_MAX_S * 1000)
        self._later("delay", fields, lambda: setattr(self._server, "delay_s", 0.0))
        self._server.delay_s = milliseconds / 1000
        return self._state()

    async def _drop(self, fields: dict[str, str]) -> dict[str, int]:
        everybody = _is_true(fields.get("all", "false"), "all")
        name = fields.get("name", "")
        dropped = 0
        for connection in list(self._server.connections):
            stream_name = connection.stream_name
            if everybody or (stream_name is not None and name in stream_name):
                connection.abort()
                dropped += 1
        return {"dropped": dropped}

    async def _fill_disk(self, fields: dict[str, str]) -> dict[str, Any]:
        bucket = self._bucket(fields)
        is_full = _is_true(fields.get("on", "true"), "on")
        self._later(f"disk-full {bucket.name}", fields, lambda: setattr(bucket.work, "disk_is_full", False))
        bucket.work.disk_is_full = is_full
        return self._state()

    def _later(self, name: str, fields: dict[str, str], end: Callable[[], None]) -> None:
        """End a fault after ``for_s``, if that is given; to be called before the fault begins."""
        after_s = parse_integer(fields["for_s"], maximum=_MAX_S) if "for_s" in fields else None
        if (before := self._timers.pop(name, None)) is not None:
            before.cancel()
        if after_s is not None:
            self._timers[name] = asyncio.get_running_loop().call_later(after_s, end)

    def _bucket(self, fields: dict[str, str]) -> ServedBucket:
        name = fields.get("bucket", "default")
        if len(self._node.buckets) == 1 and "bucket" not in fields:
            return next(iter(self._node.buckets.values()))
        bucket = self._node.buckets.get(name)
        if bucket is None:
            raise UsageError(f"there is no bucket {name!r}")
        return bucket


_KNOWN = frozenset({"bucket", "vbucket", "to_seqno", "lose", "ms", "for_s", "name", "all", "on"})


def _fields(request: HttpRequest) -> dict[str, str]:
    """The fields of a request: from a JSON object, a form, or the query of the URL."""
    fields = dict(request.query)
    if request.body.lstrip().startswith(b"{"):
        try:
            content = json.loads(request.body)
        except (ValueError, RecursionError):
            raise UsageError("the body is not JSON") from None
        fields |= {
            name: value if isinstance(value, str) else json.dumps(value) for name, value in content.items()
        }
    else:
        fields |= request.form
    if unknown := sorted(set(fields) - _KNOWN):
        raise UsageError(f"{unknown[0]!r} is unknown; there are {', '.join(sorted(_KNOWN))}")
    return fields


def _vbuckets(fields: dict[str, str]) -> list[int] | None:
    if "vbucket" not in fields:
        raise UsageError("say which: vbucket is 7, 0-7 or all")
    return parse_vbuckets(fields["vbucket"])


def _is_true(text: str, name: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise UsageError(f"{name} must be true or false")
    return text.lower() in _TRUE
