"""What was really written in the simulated cluster, and what a copy or a reader may therefore hold.

A change becomes true on the node that serves its vbucket as active, and nowhere else: there it is noted under
its name (vbucket, vb_uuid, seqno). Whatever a copy or a reader has later is compared with these notes, so a
state that the bucket never had is seen where it first appears, whatever made it up.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from cluster.sim_nodes import Machine
from tailrace.frames import OPCODE_AT
from tailrace.history import FailoverLog
from tailrace.store.format import UNSEEN, StoredDocument, aborted, frame_key, rev_of
from tailrace.store.vbucket_history import History
from tailrace.wire.codes import DcpOpcode, VBucketState

VBUCKETS = 4
KEYS = [b"key-%d" % number for number in range(16)]

_Mark = tuple[History, FailoverLog, int, bool]


class Wrong(AssertionError):
    """Something that must hold does not."""


class Truth:
    """The history of every branch of every vbucket."""

    def __init__(self, machines: Mapping[str, Machine]) -> None:
        self._machines = machines
        self._changes: dict[tuple[int, int, int], bytes] = {}
        self._lineages: dict[tuple[int, int], FailoverLog] = {}
        """By vbucket and branch: the failover log with which the branch was begun."""
        self._marks: dict[tuple[str, int], _Mark] = {}
        """How each copy was when it was last looked at."""

    def digest(self, trace: list[str]) -> str:
        """A digest of everything that happened: two runs of a seed have the same."""
        digest = sha256("\n".join(trace).encode())
        for name, frame in self._changes.items():
            digest.update(repr(name).encode() + frame)
        return digest.hexdigest()

    def forget(self, name: str | None = None) -> None:
        """A node (or every one) has ended: look at everything anew when it is back."""
        self._marks = {key: mark for key, mark in self._marks.items() if name is not None and key[0] != name}

    # what nodes have

    def observe(self, name: str) -> None:
        """Look at what a node has that it did not have before."""
        machine = self._machines[name]
        if machine.node is None:
            return
        fenced = machine.node.fenced
        for number in range(VBUCKETS):
            vbucket = machine.vbucket(number)
            mark = self._marks.get((name, number))
            if vbucket is None:
                if mark is not None:
                    del self._marks[name, number]
                continue
            log, high = vbucket.failover_log, vbucket.high_seqno
            serves = not fenced and vbucket.state == VBucketState.ACTIVE
            same = mark is not None and mark[0] is vbucket and mark[1] is log
            if same and mark is not None and mark[2] == high and mark[3] == serves:
                continue
            self._marks[name, number] = vbucket, log, high, serves
            self._look_at(machine, vbucket, mark if same else None, serves=serves)

    def _look_at(self, machine: Machine, vbucket: History, mark: _Mark | None, *, serves: bool) -> None:
        """A copy has changed since ``mark``, which is of the same branch."""
        number, log, high = vbucket.id, vbucket.failover_log, vbucket.high_seqno
        is_active = vbucket.state == VBucketState.ACTIVE
        if is_active:
            self._lineages.setdefault((number, vbucket.uuid), log)
        # a copy that has just stopped serving may have had a last change, and a fenced node may find expired
        # documents
        served = mark is not None and mark[3]
        may_be_new = served or is_active
        seen = mark[2] if mark is not None and mark[2] <= high else 0
        for seqno in range(seen + 1, high + 1):
            self._check_change(machine, vbucket, seqno, may_be_new=may_be_new)
        if serves and not served:
            what = f"{machine.name} becomes active with"
            self.check_state(what, number, vbucket.uuid, high, documents(vbucket))
            self.check_one_active(number)

    def _check_change(self, machine: Machine, vbucket: History, seqno: int, *, may_be_new: bool) -> None:
        frame = vbucket.frame_at(seqno)
        branch = vbucket.failover_log.branch_of(seqno)
        if frame is None or not branch:
            return
        if frame[OPCODE_AT] == DcpOpcode.ABORT:  # the time when it was made is not sent to others
            frame = aborted(vbucket.id, frame_key(frame), seqno, rev_of(frame), 0)
        name = vbucket.id, branch, seqno
        if may_be_new:
            self._changes.setdefault(name, frame)
        if self._changes.get(name) != frame:
            known = "another" if name in self._changes else "no"
            raise Wrong(
                f"{machine.name} has {StoredDocument.of(frame).key!r} as "
                f"(vbucket {name[0]}, {name[1]:#x}, {seqno}), which names {known} change; "
                f"its log is {vbucket.failover_log.to_json()}"
            )

    def check_one_active(self, number: int) -> None:
        """Check that at most one node serves a vbucket."""
        serving = [
            name
            for name, machine in self._machines.items()
            if machine.node is not None
            and not machine.node.fenced
            and (vbucket := machine.vbucket(number)) is not None
            and vbucket.state == VBucketState.ACTIVE
        ]
        if len(serving) > 1:
            raise Wrong(f"vbucket {number} is active on {serving}")

    # histories and states

    def lineage(self, number: int, vb_uuid: int) -> FailoverLog | None:
        """The log with which a branch of a vbucket was begun; None if nobody has."""
        return self._lineages.get((number, vb_uuid))

    def newest_change(self, number: int, log: FailoverLog, seqno: int) -> tuple[int, int] | None:
        """Branch and seqno of the last change, up to a seqno of a lineage, that readers see."""
        for at in range(seqno, 0, -1):
            branch = log.branch_of(at)
            frame = self._changes.get((number, branch, at))
            if frame is not None and frame[OPCODE_AT] not in UNSEEN:
                return branch, at
        return None

    def state(self, number: int, log: FailoverLog, seqno: int) -> dict[bytes, bytes]:
        """The documents that a vbucket had at a seqno of a lineage."""
        state: dict[bytes, bytes] = {}
        for at in range(1, seqno + 1):
            frame = self._changes.get((number, log.branch_of(at), at))
            if frame is not None and frame[OPCODE_AT] not in UNSEEN:
                document = StoredDocument.of(frame)
                if document.deleted:
                    state.pop(document.key, None)
                else:
                    state[document.key] = document.value
        return state

    def check_state(self, what: str, number: int, vb_uuid: int, seqno: int, held: dict[bytes, bytes]) -> None:
        """A state must be one that the vbucket had at that place of its history: no part of a snapshot."""
        log = self._lineages.get((number, vb_uuid))
        if log is None and seqno:  # a new copy has a branch of its own until it gets its active's
            raise Wrong(f"{what} branch {vb_uuid:#x} of vbucket {number}, which nobody began")
        expected = {} if log is None else self.state(number, log, seqno)
        if held != expected:
            differ = {key for key in {*held, *expected} if held.get(key) != expected.get(key)}
            rows = {key: (held.get(key), expected.get(key)) for key in sorted(differ)}
            raise Wrong(
                f"{what} a state that vbucket {number} did not have at {seqno} of {vb_uuid:#x}: {rows}"
            )


def documents(vbucket: History) -> dict[bytes, bytes]:
    """The live documents of a copy, including expired ones for which there is no expiration yet."""
    state = {}
    for key in KEYS:
        frame = vbucket.get_any(b"\0" + key)  # type: ignore[attr-defined]
        if frame is not None and not (document := StoredDocument.of(frame)).deleted:
            state[document.key] = document.value
    return state
