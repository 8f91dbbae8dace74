"""The norm (docs/spec) and the declarations in the code agree, and the norm's own examples are true."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import IntEnum, IntFlag
from pathlib import Path

import pytest

from tailrace.history import FailoverLog, rollback_seqno
from tailrace.model import Position
from tailrace.protocol.extended_errors import status_for_peer
from tailrace.protocol.states import STREAM_TRANSITIONS
from tailrace.wire import codes
from tailrace.wire.dialect import DCP, TAP, UPR_A, UPR_B, Dialect
from tailrace.wire.header import HEADER_SIZE, Frame
from tailrace.wire.message import Direction

SPEC = Path(__file__).resolve().parents[1] / "docs" / "spec"
PAGES = sorted(SPEC.glob("*.md"))


def section(page: str, heading: str) -> str:
    text = (SPEC / f"{page}.md").read_text()
    return re.split(r"^#+ ", text.split(f"\n## {heading}\n")[1], maxsplit=1, flags=re.M)[0]


def rows(text: str) -> list[list[str]]:
    """The rows of all tables in a text, without their heads and without anchors."""
    table_rows = [
        [cell.strip() for cell in re.sub(r"<a id=[^>]*></a>", "", line).strip("|").split(" | ")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    rules = [number for number, row in enumerate(table_rows) if set("".join(row)) <= set("-| ")]
    heads = {*rules, *(number - 1 for number in rules)}
    return [row for number, row in enumerate(table_rows) if number not in heads]


def numbers(cells: Iterable[str]) -> set[int]:
    """The hexadecimal numbers of cells: one, several, or `0x30 to 0x33`."""
    listed: set[int] = set()
    for cell in cells:
        if match := re.fullmatch(r"(0x[0-9a-f]+) to (0x[0-9a-f]+)", cell):
            listed.update(range(int(match[1], 16), int(match[2], 16) + 1))
        else:
            listed.update(int(number, 16) for number in re.findall(r"0x[0-9a-f]+", cell))
    return listed


def values(enum: type[IntEnum | IntFlag]) -> set[int]:
    return {int(member) for member in enum}


def test_status_codes() -> None:
    listed = numbers(row[0] for row in rows(section("header", "Status codes")) if "ff00" not in row[0])
    assert listed == values(codes.Status)


def test_features() -> None:
    table = rows(section("header", "HELLO"))
    assert numbers(cell for row in table for cell in (row[0], row[2])) == values(codes.Feature)


def test_magic() -> None:
    assert numbers(row[0] for row in rows(section("header", "Magic"))) == values(codes.Magic)


def test_every_command_is_in_the_norm() -> None:
    headings = (
        *("Document commands", "Connection commands", "Vbucket commands", "With meta commands"),
        *("Collection commands", "Other commands"),
    )
    listed = numbers(row[0] for heading in headings for row in rows(section("header", heading)))
    for row in (*rows(section("servers", "Sub document requests")), *rows(section("servers", "Range scans"))):
        listed.update(int(opcode, 16) for opcode in re.findall(r"\b([cd][0-9a-f])\b", row[0]))
    assert {opcode for opcode in codes.Op if opcode not in listed} == set()


@pytest.mark.parametrize(
    ("page", "heading", "enum", "left_out"),
    [
        ("dcp", "Stream Request message", codes.AddStreamFlag, set()),
        ("dcp", "Open", codes.OpenFlag, {0x02, 0x10, 0x80}),  # must be clear
        ("dcp", "Snapshot Marker", codes.MarkerFlag, set()),
        ("tap", "Connect", codes.TapConnectFlag, set()),
        ("tap", "Frame", codes.TapFlag, set()),
    ],
)
def test_flags(page: str, heading: str, enum: type[IntFlag], left_out: set[int]) -> None:
    listed = {
        int(row[0], 16): row[1] for row in rows(section(page, heading)) if re.fullmatch("0x[0-9a-f]+", row[0])
    }
    assert listed.keys() == values(enum) - left_out
    for value, name in listed.items():
        word = re.sub(r"\(.*", "", name)  # without the target of a link, or a remark
        assert re.sub(r"[\W_]", "", word).lower() == _plain(enum(value).name)


def _plain(name: str | None) -> str:
    return (name or "").replace("_", "").lower()


def test_stream_end() -> None:
    listed = {int(row[0]): row[1].lower() for row in rows(section("dcp", "Stream End"))}
    assert listed == {int(status): _plain(status.name) for status in codes.StreamEndStatus}


def test_control_keys() -> None:
    listed = {name for row in rows(section("dcp", "Control keys")) for name in re.findall(r"`(\w+)`", row[0])}
    declared = {value.decode() for name, value in vars(codes.ControlKey).items() if name.isupper()}
    assert listed == declared


def test_peers_without_extended_errors() -> None:
    for codes_cell, told in rows(section("header", "Error bodies")):
        for status in numbers([codes_cell]):
            if told.startswith("as they are"):
                expected: int | None = status
            else:
                expected = int(told[:4], 16) if told.startswith("0x") else None
            assert status_for_peer(status, codes.Op.GET, frozenset()) == expected, hex(status)
    assert status_for_peer(codes.Status.LOCKED, codes.Op.UNLOCK_KEY, frozenset()) == codes.Status.ETMPFAIL


MESSAGES = {message.OPCODE: message for message in DCP.messages if message.MAGIC == codes.Magic.REQUEST}


def test_dcp_messages() -> None:
    table = rows(section("dcp", "Messages"))
    assert numbers(row[0] for row in table) == MESSAGES.keys() == values(codes.DcpOpcode)
    for row in table:
        for opcode in numbers([row[0]]):
            sizes = {int(size) for size in re.findall(r"\d+", row[3])} or {0}
            assert {layout.size for layout in MESSAGES[opcode].LAYOUTS} == sizes, row


@pytest.mark.parametrize(("dialect", "heading"), [(UPR_A, "Draft A"), (UPR_B, "Draft B")], ids=str)
def test_upr_messages(dialect: Dialect, heading: str) -> None:
    listed = numbers(row[0] for row in rows(section("upr", heading)) if re.fullmatch("0x[0-9a-f]{2}", row[0]))
    assert listed == {message.OPCODE for message in dialect.messages}


def test_tap_messages() -> None:
    text = (SPEC / "tap.md").read_text()
    listed = {int(number, 16) for number in re.findall(r"^(0x4[0-9a-f])\b", text, re.M)} | {0x47}
    assert listed == {message.OPCODE for message in TAP.messages if message.OPCODE >= 0x40}


def test_counted_bytes() -> None:
    """What flow control counts is the frame, except for Prepare, where two bytes more are counted."""
    text = section("dcp", "Flow control")
    listed = {row[0]: [int(number) for number in re.findall(r"\d+", row[1])] for row in rows(text)}

    def framed(opcode: int) -> set[int]:
        return {HEADER_SIZE + layout.size for layout in MESSAGES[opcode].LAYOUTS}

    opcodes = codes.DcpOpcode
    assert {listed["Mutation"][0]} == framed(opcodes.MUTATION)
    assert set(listed["Deletion V1, V2"]) == framed(opcodes.DELETION)
    assert {listed["Expiration"][0]} == framed(opcodes.EXPIRATION)
    assert {listed["System Event"][0]} == framed(opcodes.SYSTEM_EVENT)
    assert {listed["Commit, Abort"][0]} == framed(opcodes.COMMIT) == framed(opcodes.ABORT)
    assert {listed["Seqno Advanced"][0]} == framed(opcodes.SEQNO_ADVANCED)
    assert (
        {listed["Stream End, OSO Snapshot"][0]} == framed(opcodes.STREAM_END) == framed(opcodes.OSO_SNAPSHOT)
    )
    assert {listed["Set VBucket State"][0]} == framed(opcodes.SET_VBUCKET_STATE)
    assert {listed["Prepare"][0] - 2} == framed(opcodes.PREPARE)
    assert listed["Snapshot Marker V1, V2.0, V2.2"] == [44, 24 + 1 + 36, 24 + 1 + 52]


def test_states_of_a_stream() -> None:
    listed = {
        (row[0], target)
        for row in rows(section("dcp", "States of a stream"))
        for target in re.sub(r"\(.*?\)", "", row[1]).replace("\N{EN DASH}", "").split(", ")
        if target.strip()
    }
    declared = {(state.value, target.value) for (state, _), target in STREAM_TRANSITIONS.items()}
    assert {(state, target.strip()) for state, target in listed} == {
        (state, target) for state, target in declared if state != target
    }


def test_the_worked_rollbacks() -> None:
    """docs/spec/dcp.md#rollback-decision: its cases, decided by the function that the node uses."""
    cases = rows(section("dcp", "Rollback decision"))
    assert len(cases) == 10
    for asked, answer in cases:
        log = [(1111, 0)] if asked.startswith("one;") else [(2222, 3), (1111, 0)]
        vb_uuid, start, end, seqno = map(int, re.findall(r"\d+", asked)[:4])
        purge = 5 if "P = " in asked else 0
        decision = rollback_seqno(
            Position(vb_uuid, seqno, start, end),
            FailoverLog.of(log),
            high_seqno=10,
            purge_seqno=purge,
            client_purge_seqno=purge if "Q" in asked else 0,
        )
        expected = None if answer == "accepted" else int(answer.removeprefix("back to "))
        assert decision == expected, asked


PACKETS = [
    (page.name, packet)
    for page in PAGES
    for packet in re.findall(r"`((?:[0-9a-f]{2}){24,})`", page.read_text())
]


@pytest.mark.parametrize(("page", "packet"), PACKETS, ids=lambda value: value[:24])
def test_packets_of_the_norm_are_what_they_say(page: str, packet: str) -> None:
    data = bytes.fromhex(packet)
    frame = Frame.parse(data)
    to_producer = frame.magic in (codes.Magic.REQUEST, codes.Magic.FLEX_REQUEST) and not (
        frame.opcode in MESSAGES and MESSAGES[frame.opcode].DIRECTION is Direction.TO_RECEIVER
    )
    message = DCP.decode(frame, Direction.TO_PRODUCER if to_producer else Direction.TO_RECEIVER)
    assert message.encode() == data


def test_there_are_packets() -> None:
    assert len(PACKETS) >= 10
