"""Frames without a connection are named and described, even the documents' own impossible packets."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import FramingError
from tailrace.wire import admin, dcp, kv, tap, upr
from tailrace.wire.describe import Description, describe
from tailrace.wire.dialect import DCP, DIALECTS, KV, TAP, UPR_A, UPR_B, Dialect
from tailrace.wire.drawn_packets import mend
from tailrace.wire.header import Frame
from tailrace.wire.message import Direction
from tailrace.wire.observer import Observer, Tape, frame_start, is_whole, read
from vectors.corpus import Vector, vectors

ALL = vectors()
FRAMABLE = [vector for vector in ALL if vector.framable]


def only(data: bytes, observer: Observer) -> Description:
    (description,) = read(data, observer)
    return description


def knowing(vector: Vector) -> Observer:
    return Observer(DIALECTS[vector.dialect], Direction(vector.direction))


# every golden packet


@pytest.mark.parametrize("vector", ALL, ids=str)
def test_a_packet_is_described_as_its_document_says(vector: Vector) -> None:
    description = only(vector.data, knowing(vector))
    said = description.to_json()
    assert said["direction"] == vector.direction
    assert (said["magic"], said["opcode"]) == (vector.data[0], vector.data[1])
    assert said["opaque"] == vector.header["opaque"]
    assert said["cas"] == str(vector.header["cas"])
    for name in ("vbucket", "status", "subtype", "datatype"):
        if name in vector.header and (name != "subtype" or vector.error is None):
            assert said[name] == vector.header[name], name
    if vector.error is not None:
        assert any(note.startswith("malformed: ") for note in said["notes"])
        return
    assert said["dialect"] in (vector.dialect, "kv")
    assert not any(note.startswith(("malformed", "ambiguous")) for note in said["notes"])
    if "key_base64" not in said:
        assert said["key"].encode() == vector.key
    if vector.value is not None:
        assert said["value_length"] == len(vector.value)
    shown = {**said["extras"], **said.get("value", {})}
    for name, value in vector.fields.items():
        if name in shown and isinstance(value, int):
            assert int(shown[name]) == value, name
    named = vector.notes + vector.remarks
    for erratum in named:
        assert any(note.startswith(f"erratum {erratum}: ") for note in said["notes"]), said["notes"]
    assert len([note for note in said["notes"] if note.startswith("erratum")]) == len(named)


def test_text_and_json_can_be_written_and_hold_nothing_that_a_terminal_obeys() -> None:
    for vector in ALL:
        description = only(vector.data, Observer())
        assert json.loads(json.dumps(description.to_json(), allow_nan=False)) == description.to_json()
        kinds = [kind for kind, _ in description.to_text()]
        assert kinds[0] == "head" and "head" not in kinds[1:]
        for _, line in description.to_text():
            assert line.isprintable(), line


@pytest.mark.parametrize("vector", [vector for vector in ALL if vector.error is None], ids=str)
def test_dialect_and_direction_are_found_out_or_called_ambiguous(vector: Vector) -> None:
    known = only(vector.data, knowing(vector))
    guessed = only(vector.data, Observer())
    if (guessed.name, guessed.table, guessed.direction) == (known.name, known.table, known.direction):
        return
    if (guessed.name, guessed.table) == (known.name, known.table):
        # noop and close stream go both ways, and so do their answers
        assert known.kind is guessed.kind
        return
    (note,) = [note for note in guessed.notes if note.startswith("ambiguous")]
    assert f"{known.name} ({known.table})" in note


def test_few_packets_are_ambiguous() -> None:
    """The rule for single packets is useful: only these few can't be told apart."""
    names = set()
    for vector in ALL:
        description = only(vector.data, Observer())
        if any(note.startswith("ambiguous") for note in description.notes):
            names.add(description.name)
    assert names == {
        "noop",
        "noop response",
        "dcp open response",
        "dcp add stream response",
        "dcp close stream",
        "dcp get failover log",
    }


# the drawings


def test_a_drawing_is_mended_only_if_it_is_exactly_that_drawing() -> None:
    literal = {vector.id: vector for vector in ALL if not vector.framable}
    assert len(literal) == 10
    for vector in literal.values():
        mended = mend(vector.data)
        assert mended is not None and mended.dialect.name == vector.dialect
        assert mend(vector.data + b"\0") is None or vector.id == "upr-a.response.failover-log"
        for length in range(len(vector.data)):
            # a log with fewer entries is a log too
            if (vector.id, length) != ("upr-a.response.failover-log", 40):
                assert mend(vector.data[:length]) is None, (vector.id, length)
        for other in (DCP, UPR_A, UPR_B, TAP):
            assert (mend(vector.data, other) is None) == (other.name != vector.dialect)


def test_a_packet_that_can_be_carried_is_never_mended() -> None:
    assert [vector.id for vector in FRAMABLE if mend(vector.data) is not None] == []


def test_a_drawing_behind_whole_frames_is_understood_too() -> None:
    noop = dcp.DcpNoop(opaque=1).encode()
    for vector in ALL:
        if not vector.framable:
            first, second = read(noop + vector.data, Observer())
            assert first.name == "dcp noop"
            assert second.name == only(vector.data, Observer()).name
            assert second.offset == len(noop)


# buffers


def test_frames_before_garbage_are_shown_and_the_garbage_is_named() -> None:
    data = dcp.DcpNoop(opaque=1).encode() + dcp.DcpNoop(opaque=2).encode() + b"garbage"
    descriptions = read(data, Observer())
    assert [next(descriptions).frame.opaque, next(descriptions).frame.opaque] == [1, 2]
    with pytest.raises(
        FramingError, match="7 bytes at offset 48 are not a frame: no frame starts with the byte 0x67"
    ):
        next(descriptions)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"\x80", "1 bytes at offset 0 are the start of a header, 23 are missing"),
        (dcp.DcpNoop().encode()[:-1], "23 bytes at offset 0 are the start of a header, 1 are missing"),
        (b"\x80" + b"\xff" * 23, "the limit is"),
        (dcp.DcpControl(key=b"a", value=b"bc").encode()[:-1], "needs 27 bytes, 1 are missing"),
        (b"\x80\0\xff\xff" + bytes(20), "need 65535 bytes, the body has 0"),
    ],
)
def test_what_is_missing_is_said(data: bytes, what: str) -> None:
    with pytest.raises(FramingError, match=what):
        list(read(data, Observer()))
    assert not is_whole(data)


@given(st.binary(max_size=200))
def test_any_bytes_give_descriptions_and_then_a_framing_error_at_most(data: bytes) -> None:
    try:
        for description in read(data, Observer()):
            json.dumps(description.to_json())
            assert description.to_text()
    except FramingError:
        pass


@given(
    st.sampled_from([0x80, 0x81, 0x08, 0x18, 0x82, 0x83]),
    st.integers(0, 255),
    st.integers(0, 0xFFFF),
    st.binary(max_size=60),
    st.data(),
)
def test_any_frame_can_be_described_in_every_dialect(
    magic: int, opcode: int, vbucket: int, body: bytes, data: st.DataObject
) -> None:
    extras = data.draw(st.integers(0, len(body)))
    key = data.draw(st.integers(0, len(body) - extras))
    datatype = data.draw(st.integers(0, 7))
    frame = Frame(magic, opcode, key, extras, datatype, vbucket, 1, 2, body=body)
    for dialect in DIALECTS.values():
        for direction in Direction:
            description = describe(frame, dialect, direction)
            json.dumps(description.to_json())
            assert all(line.isprintable() for _, line in description.to_text())
            assert description.value_length >= 0


@pytest.mark.parametrize("seconds", [2_592_001, 253_402_300_799, 253_402_300_800, 2**64 - 2, 2**64 - 1])
def test_a_time_that_no_calendar_has_is_shown_as_its_number(seconds: int) -> None:
    (said,) = (
        line
        for _, line in only(admin.Compact(purge_before_s=seconds).encode(), Observer()).to_text()
        if line.startswith("purge_before_s ")
    )
    assert (str(seconds) in said) or (hex(seconds) in said)
    assert ("UTC" in said) == (seconds < 253_402_300_800)


def test_a_password_is_not_shown() -> None:
    packet = Frame(0x80, 0x21, 5, 0, body=b"PLAIN\0eve\0hunter2").encode()
    description = only(packet, Observer())
    shown = json.dumps(description.to_json()) + "".join(line for _, line in description.to_text())
    assert "hunter2" not in shown
    assert description.to_json()["value_length"] == 12


# conversations


def test_the_first_request_binds_and_ends_all_doubt() -> None:
    observer = Observer()
    request = upr.UprBStreamRequest(vbucket=3, opaque=7).encode()
    start = upr.UprBStreamStart(vbucket=3, opaque=7).encode()
    names = [description.name for description in read(request + start, observer)]
    assert names == ["upr b stream request", "upr b stream start"]
    assert only(start, observer).notes == []
    assert only(start, Observer()).notes != []


def test_a_frame_that_only_one_dialect_has_ends_doubt_too() -> None:
    """A recording may begin after the request that binds."""
    start, end = upr.UprBSnapshotStart().encode(), upr.UprBSnapshotEnd().encode()
    change = upr.UprBMutation(by_seqno=1, rev_seqno=1, key=b"k").encode()
    descriptions = list(read(start + change + end + start, Observer()))
    assert [description.name for description in descriptions] == [
        "dcp get failover log",
        "upr b mutation",
        "upr b snapshot end",
        "upr b snapshot start",
    ]
    assert descriptions[0].notes[0].startswith("ambiguous") and not descriptions[3].notes


def test_key_value_traffic_is_never_taken_for_draft_a() -> None:
    """Its pushes have the opcodes and the magic of answers to writes, so no answer may settle the dialect."""
    answers = [
        kv.MutationResponse(opcode=opcode, status=status, datatype=int(bool(value)), value=value, cas=cas)
        for opcode in (0x02, 0x03, 0x04, 0x05)
        for status, value, cas in ((0, b"", 7), (1, b"", 0), (2, b'{"a":"16 bytes"}', 0), (0x86, b"", 0))
        if opcode != 0x05 or status
    ]
    observer = Observer()
    odd = kv.MutationResponse(opcode=0x03, status=0xA1)  # looks like a Stream Begin of vbucket 161
    before = only(odd.encode(), observer)
    assert before.name == "upr a stream begin"
    descriptions = list(read(b"".join(answer.encode() for answer in answers), observer))
    assert {description.table for description in descriptions} == {"kv"}
    assert only(dcp.DcpNoop().encode(), observer).notes == []


def test_a_known_dialect_has_its_own_noop() -> None:
    """TAP's keep-alive has the opcode of the key-value command, which goes the other way."""
    bound = Observer()
    only(tap.TapConnect(key=b"n").encode(), bound)
    for observer in (Observer(TAP), bound):
        noop = only(tap.TapNoop().encode(), observer)
        assert (noop.name, noop.direction, noop.notes) == ("tap noop", Direction.TO_RECEIVER, [])
        answer = only(tap.TapAck(opcode=0x0A).encode(), observer)
        assert (answer.name, answer.direction, answer.notes) == (
            "tap noop response",
            Direction.TO_PRODUCER,
            [],
        )
    client = only(tap.TapNoop().encode(), Observer(TAP, Direction.TO_PRODUCER))
    assert (client.name, client.table) == ("noop", "kv")


def test_a_frame_of_another_dialect_has_a_note() -> None:
    observer = Observer()
    only(upr.UprBStreamRequest().encode(), observer)
    mutation = dcp.DcpMutation(by_seqno=1, rev_seqno=1, key=b"k").encode()
    description = only(mutation, observer)
    assert (description.name, description.notes) == (
        "dcp mutation",
        ["not upr-b, which the bytes before it are"],
    )
    assert only(mutation, Observer(UPR_B)).notes[0].startswith("malformed: upr b deletion")


def test_a_client_that_opens_the_server_as_consumer_pushes_to_it() -> None:
    observer = Observer()
    opened = dcp.DcpOpen(flags=0, key=b"replication").to_frame()
    assert observer.see(opened, from_client=True).direction is Direction.TO_PRODUCER
    add = dcp.DcpAddStream().to_frame()
    assert observer.see(add, from_client=True).name == "dcp add stream"
    mutation = dcp.DcpMutation(by_seqno=1, rev_seqno=1, key=b"k").to_frame()
    description = observer.see(mutation, from_client=True)
    assert (description.name, description.direction) == ("dcp mutation", Direction.TO_RECEIVER)
    control = dcp.DcpControl(key=b"enable_noop", value=b"true").to_frame()
    assert observer.see(control, from_client=False).direction is Direction.TO_PRODUCER


def test_a_client_that_pushes_by_tap_makes_the_server_a_consumer() -> None:
    observer = Observer()
    push = tap.TapMutation(key=b"k", value=b"v", opaque=1).to_frame()
    description = observer.see(push, from_client=True)
    assert (description.name, description.direction, description.notes) == (
        "tap mutation",
        Direction.TO_RECEIVER,
        [],
    )
    ack = observer.see(tap.TapAck(opcode=0x41, opaque=1).to_frame(), from_client=False)
    assert (ack.name, ack.direction, ack.notes) == ("tap mutation response", Direction.TO_PRODUCER, [])
    stat = observer.see(admin.Stat(key=b"tap").to_frame(), from_client=True)
    assert (stat.name, stat.direction) == ("stat", Direction.TO_PRODUCER)


@pytest.mark.parametrize("known", [None, DCP])
def test_a_push_to_a_server_is_known_without_its_beginning(known: Dialect | None) -> None:
    """The recording lacks the open that made the server a consumer."""
    observer = Observer(known)
    mutation = dcp.DcpMutation(by_seqno=1, rev_seqno=1, key=b"k").to_frame()
    description = observer.see(mutation, from_client=True)
    assert (description.name, description.direction) == ("dcp mutation", Direction.TO_RECEIVER)
    assert description.notes == ["it goes in the unusual direction"]
    control = observer.see(dcp.DcpControl(key=b"a", value=b"b").to_frame(), from_client=False)
    assert (control.name, control.direction) == ("dcp control", Direction.TO_PRODUCER)
    unknown = observer.see(Frame(0x80, 0xEE), from_client=True)
    assert (unknown.name, unknown.direction, unknown.notes) == ("unknown 0xee", Direction.TO_PRODUCER, [])
    law = Observer(known, Direction.TO_PRODUCER).see(mutation, from_client=True)
    assert law.direction is Direction.TO_PRODUCER and law.name != "dcp mutation"


def test_answers_have_the_name_of_their_request_and_of_their_status() -> None:
    response = dcp.DcpStreamRequestResponse.rollback(12, opaque=1).to_frame()
    description = describe(response, DCP, Direction.TO_RECEIVER)
    said = description.to_json()
    assert (said["name"], said["status"], said["status_name"]) == (
        "dcp stream request response",
        0x23,
        "ROLLBACK",
    )
    assert said["value"] == {"rollback_seqno": 12}
    unknown = Frame(0x81, 0xEE, vbucket=0x7777)
    said = describe(unknown, KV, Direction.TO_RECEIVER).to_json()
    assert (said["name"], said["status_name"]) == ("unknown 0xee", "UNKNOWN_STATUS")


def test_ids_are_strings_and_seqnos_are_integers() -> None:
    log = [(2**64 - 1, 7), (5, 2**53 + 1)]
    said = describe(
        dcp.DcpStreamRequestResponse.ok(log, opaque=1).to_frame(), DCP, Direction.TO_RECEIVER
    ).to_json()
    assert said["value"]["failover_log"] == [
        {"vb_uuid": str(2**64 - 1), "seqno": 7},
        {"vb_uuid": "5", "seqno": 2**53 + 1},
    ]
    request = dcp.DcpStreamRequest(vb_uuid=2**63, flags=0x21).to_frame()
    extras = describe(request, DCP, Direction.TO_PRODUCER).to_json()["extras"]
    assert extras["vb_uuid"] == str(2**63)
    assert extras["flags_names"] == ["TAKE_OVER", "STRICT_VB_UUID"]
    assert extras["end_seqno"] == 2**64 - 1


def test_a_key_that_is_no_text_comes_as_base64() -> None:
    frame = dcp.DcpDeletion(by_seqno=1, rev_seqno=1, nmeta=0, key=b"\xff\0").to_frame()
    said = describe(frame, DCP, Direction.TO_RECEIVER).to_json()
    assert "key" not in said and said["key_base64"] == "/wA="


def test_a_stream_id_that_is_not_counted_is_shown_with_a_note() -> None:
    deletion = dcp.DcpDeletion(by_seqno=5, rev_seqno=1, delete_time=1, key=b"hello", framing=b"\x22\0\x47")
    packet = bytearray(deletion.encode())
    packet[2] = 0
    description = only(bytes(packet), Observer())
    said = description.to_json()
    assert (said["name"], said["key"], said["value_length"]) == ("dcp deletion", "hello", 0)
    assert said["frame_info"] == [{"id": 2, "id_name": "DCP_STREAM_ID", "data": 0x47}]
    assert said["notes"] == ["the stream id is there, though the framing length is 0"]
    assert description.frame.size == len(packet)


@pytest.mark.parametrize(
    ("magic", "framing", "said", "shown"),
    [
        (
            0x08,
            "1101",
            {"id": 1, "id_name": "DURABILITY", "data": 1, "level": 1, "level_name": "MAJORITY"},
            "DURABILITY MAJORITY",
        ),
        (
            0x08,
            "13030bb8",
            {
                "id": 1,
                "id_name": "DURABILITY",
                "data": "030bb8",
                "level": 3,
                "level_name": "PERSIST_TO_MAJORITY",
                "timeout_ms": 3000,
            },
            "DURABILITY PERSIST_TO_MAJORITY 3000 ms",
        ),
        (0x08, "1109", {"id": 1, "id_name": "DURABILITY", "data": 9}, "DURABILITY 9"),
        (
            0x18,
            "021388",
            {"id": 0, "id_name": "SERVER_DURATION", "data": 5000, "duration_us": 1_365_142},
            "SERVER_DURATION 1365142 us",
        ),
        (
            0x18,
            "320000",
            {"id": 3, "id_name": "THROTTLE_DURATION", "data": 0, "duration_us": 0},
            "THROTTLE_DURATION 0 us",
        ),
        (0x18, "120007", {"id": 1, "id_name": "READ_UNITS", "data": 7}, "READ_UNITS 7"),
        (0x18, "0107", {"id": 0, "id_name": "SERVER_DURATION", "data": 7}, "SERVER_DURATION 7"),
    ],
)
def test_framing_extras_say_what_they_mean(magic: int, framing: str, said: object, shown: str) -> None:
    frame = Frame(magic, 0x0A, framing=bytes.fromhex(framing))
    description = describe(frame, KV, Direction.TO_PRODUCER if magic == 0x08 else Direction.TO_RECEIVER)
    assert description.to_json()["frame_info"] == [said]
    assert [line for _, line in description.to_text()][1] == f"frame info  {shown}"


# tapes


def stream(count: int, rng: random.Random) -> bytes:
    return b"".join(
        dcp.DcpMutation(
            by_seqno=seqno, rev_seqno=1, key=b"k%d" % seqno, value=rng.randbytes(rng.randrange(300))
        ).encode()
        for seqno in range(1, count + 1)
    )


@given(st.integers(0, 2**32))
def test_a_tape_gives_all_frames_whatever_the_pieces(seed: int) -> None:
    rng = random.Random(seed)
    data = stream(20, rng)
    tape = Tape(Observer(DCP), from_client=False, from_start=True)
    descriptions: list[Description] = []
    at = 0
    while at < len(data):
        size = rng.randrange(1, 400)
        descriptions += tape.feed(data[at : at + size])
        at += size
    assert [description.frame.extras[7] for description in descriptions] == list(range(1, 21))
    assert not tape.problems and tape.buffered == 0
    assert [description.offset for description in descriptions] == [
        description.offset for description in read(data, Observer(DCP))
    ]


@given(st.integers(0, 2**32), st.integers(1, 100), st.integers(0, 3000))
def test_a_tape_finds_its_step_again_after_a_gap(seed: int, lost: int, at: int) -> None:
    rng = random.Random(seed)
    data = stream(40, rng)
    tape = Tape(Observer(DCP), from_client=False, from_start=True)
    descriptions = list(tape.feed(data[:at]))
    tape.gap(lost)
    descriptions += tape.feed(data[at + lost :])
    descriptions += tape.finish()
    seqnos = [int.from_bytes(description.frame.extras[:8], "big") for description in descriptions]
    assert seqnos == sorted(set(seqnos)) and seqnos[-1] == 40
    assert len(seqnos) >= 40 - 1 - lost // 56 - 1


def test_a_recording_that_begins_in_the_middle_says_what_it_passed_over() -> None:
    data = stream(10, random.Random(1))
    tape = Tape(Observer(DCP), from_client=False, from_start=False)
    descriptions = [*tape.feed(data[100:]), *tape.finish()]
    assert "passed over" in descriptions[0].notes[0]
    assert len(descriptions) >= 8


def test_a_stream_that_is_not_ours_gives_nothing_and_takes_no_room() -> None:
    tape = Tape(Observer(), from_client=True, from_start=True)
    for _ in range(50):
        assert list(tape.feed(b"GET / HTTP/1.1\r\nHost: example\r\n" * 1000)) == []
    assert tape.frames == 0 and tape.buffered <= 2 << 20
    assert list(tape.finish()) == []


@given(st.binary(max_size=300))
def test_a_frame_is_found_behind_any_bytes(before: bytes) -> None:
    data = before + dcp.DcpNoop(opaque=1).encode() * 3
    start = frame_start(data)
    assert start is not None and start <= len(before)
