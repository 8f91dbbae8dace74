"""Every message and flag of the documents of TAP and UPR, and the tests that send it over a real socket.

The rows come from the wire's own tables, the tests from the marker ``covers`` on them. The table of the docs
is made from `rows()`.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from syntax_trees import parse
from tailrace.wire import tap, upr
from tailrace.wire.codes import TapConnectFlag, TapFlag, TapOpaque

__all__ = ["Row", "covered", "implemented", "not_for_readers", "required", "rows"]

_TESTS = Path(__file__).resolve().parents[1]
_SOURCE = _TESTS.parent / "src" / "tailrace"

_UPR_A = {
    "UprAStreamRequest": "stream-request",
    "UprAFailoverLogRequest": "failover-log-request",
    "UprAOk": "response.ok",
    "UprANotMyVBucket": "response.not-my-vbucket",
    "UprAFailoverLog": "response.failover-log",
    "UprARollback": "response.rollback",
    "UprAStreamBegin": "stream-begin",
    "UprASnapshotStart": "snapshot-start",
    "UprASnapshotEnd": "snapshot-end",
    "UprAMutation": "mutation",
    "UprADeletion": "deletion",
    "UprAExpiration": "expiration",
    "UprAFlush": "flush",
    "UprAStreamEndOk": "stream-end.ok",
    "UprAStreamEndStateChanged": "stream-end.state-changed",
}
_UPR_B = {
    "UprBStreamRequest": "stream-request",
    "UprBFailoverLogRequest": "failover-log-request",
    "UprBStreamStart": "stream-start",
    "UprBStreamEndMessage": "stream-end.ok",
    "UprBSnapshotStart": "snapshot-start",
    "UprBSnapshotEnd": "snapshot-end",
    "UprBMutation": "mutation",
    "UprBDeletion": "deletion",
    "UprBExpiration": "expiration",
    "UprBFlush": "flush",
    "UprBSetVBucketState": "set-vbucket-state",
}
_UPR_B_ANSWERS = {
    "stream-request-response.ok": "UprBStreamRequestResponse",
    "stream-request-response.rollback": "UprBStreamRequestResponse",
    "stream-request-response.unknown-uuid": "UprBStreamRequestResponse",
    "not-my-vbucket": "UprBStreamRequestResponse",
    "failover-log-response": "DcpFailoverLogResponse",
    "stream-end.state-changed": "UprBStreamEndMessage",
}
_TAP = {
    "TapConnect": "connect",
    "TapMutation": "mutation",
    "TapDelete": "delete",
    "TapFlush": "flush",
    "TapOpaqueMessage": "opaque.0",
    "TapVBucketSet": "vbucket-set",
    "TapCheckpointStart": "checkpoint-start",
    "TapCheckpointEnd": "checkpoint-end",
    "TapNoop": "noop",
}
_TAP_MORE = {
    "ack": "TapAck",
    "ack.backoff": "TapAck",
    "ttl": "TAP_TTL",
    "deregister": "DeregisterTapClient",
    "change-vb-filter": "ChangeVbFilter",
}


_NOT_FOR_READERS = {
    "tap.connect.flag.0x08": "a reader takes nothing over; `tailrace takeover` does",
    "tap.connect.flag.0x40": "a reader is remembered by its name, it needs no checkpoints",
    "tap.ack.backoff": "a reader that is slow does not read",
    "tap.change-vb-filter": "a reader that wants other vbuckets connects again",
}


@dataclass(frozen=True)
class Row:
    """A message or flag, what declares it, and the tests that send it: of the node, and of our reader."""

    id: str
    declared: str
    node_tests: tuple[str, ...]
    reader_tests: tuple[str, ...]
    """The tests of `tests/client`: what our reader sends and receives."""
    why_no_reader: str
    """Why our reader has nothing to do with it; empty if it does."""


def required() -> dict[str, str]:
    """What has to be covered: id to the name of its declaration."""
    declarations: dict[str, str] = {}
    for dialect, names, messages in (
        ("upr-a", _UPR_A, upr.UPR_A_MESSAGES),
        ("upr-b", _UPR_B, upr.UPR_B_MESSAGES),
        ("tap", _TAP, tap.TAP_MESSAGES),
    ):
        for message in messages:
            declarations[f"{dialect}.{names[message.__name__]}"] = message.__name__
    declarations.update((f"upr-b.{name}", declared) for name, declared in _UPR_B_ANSWERS.items())
    declarations.update((f"tap.{name}", declared) for name, declared in _TAP_MORE.items())
    for flag in TapConnectFlag:
        declarations[f"tap.connect.flag.0x{flag.value:02x}"] = f"TapConnectFlag.{flag.name}"
    for message_flag in TapFlag:
        declarations[f"tap.flag.0x{message_flag.value:02x}"] = f"TapFlag.{message_flag.name}"
    for code in TapOpaque:
        declarations[f"tap.opaque.{code.value}"] = f"TapOpaque.{code.name}"
    return declarations


@cache
def covered() -> dict[str, list[str]]:
    """Ids and the tests that are marked with them, read from the sources: nothing has to be run."""
    tests: dict[str, list[str]] = {}
    for path in sorted(_TESTS.rglob("test_*.py")):
        for node in ast.walk(parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            for covered_id in _marked(node):
                name = f"{path.relative_to(_TESTS.parent).as_posix()}::{node.name}"
                if name not in tests.setdefault(covered_id, []):
                    tests[covered_id].append(name)
    return tests


def _marked(function: ast.FunctionDef) -> list[str]:
    ids = []
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.covers":
            ids += [ast.literal_eval(argument) for argument in decorator.args]
    return ids


def rows() -> list[Row]:
    """The table."""
    made = []
    for covered_id, declared in required().items():
        tests = covered().get(covered_id, [])
        of_reader = [name for name in tests if name.startswith("tests/client/")]
        of_node = [name for name in tests if name not in of_reader]
        made.append(
            Row(covered_id, declared, tuple(of_node), tuple(of_reader), _NOT_FOR_READERS.get(covered_id, ""))
        )
    return made


def not_for_readers() -> set[str]:
    """What our reader has nothing to do with."""
    return set(_NOT_FOR_READERS)


@cache
def _sources() -> dict[str, str]:
    return {
        path.relative_to(_SOURCE).as_posix(): path.read_text()
        for folder in ("protocol", "server")
        for path in sorted((_SOURCE / folder).rglob("*.py"))
    }


@cache
def implemented(declared: str) -> tuple[str, ...]:
    """The modules that act on a message or flag: those that name it, or else the table that it is in."""
    for name in (declared, declared.partition(".")[0]):
        pattern = re.compile(rf"\b{re.escape(name)}\b")
        if paths := tuple(path for path, text in _sources().items() if pattern.search(text)):
            return paths
    return ()
