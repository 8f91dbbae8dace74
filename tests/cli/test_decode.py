"""`tailrace decode`, as people run it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from captures import CLIENT, LINKS, SERVER, Talk, pcap_file, pcapng_file
from tailrace import pcap
from tailrace.cli import main
from tailrace.client.recording import MAGIC
from tailrace.wire import admin, dcp, upr
from vectors.corpus import vectors
from vectors.seed_drawings import DRAWN

NOOP = dcp.DcpNoop(opaque=0x989681).encode()
OPEN = dcp.DcpOpen(flags=1, key=b"test:1", opaque=1)


@pytest.fixture
def decode(capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command with bytes on stdin: (exit code, stdout, stderr)."""

    def run(data: bytes, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        code = main.main(["decode", *arguments])
        sys.stdout.flush()
        out, err = capfdbinary.readouterr()
        return code, out.decode(), err.decode()

    return run


def objects(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_as_a_user_runs_it(tmp_path: Path) -> None:
    path = tmp_path / "packet.bin"
    path.write_bytes(NOOP)
    for arguments, data in (
        (["decode", str(path)], b""),
        (["decode"], NOOP),
        (["decode", "-"], NOOP.hex().encode()),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "tailrace", *arguments],
            input=data,
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert done.stderr == b"" and done.returncode == 0
        assert (
            done.stdout.decode()
            == "dcp noop  to-consumer  dcp 0x80 0x5c  vbucket 0  opaque 0x00989681  24 bytes\n"
        )


def test_the_promised_members(decode: Any) -> None:
    code, out, err = decode(OPEN.encode().hex().encode(), "--json")
    assert (code, err) == (0, "")
    (said,) = objects(out)
    assert said == {
        "dialect": "dcp",
        "direction": "to-producer",
        "magic": 0x80,
        "opcode": 0x50,
        "name": "dcp open",
        "vbucket": 0,
        "opaque": 1,
        "cas": "0",
        "datatype": 0,
        "datatype_names": [],
        "extras": {"reserved": 0, "flags": 1, "flags_names": ["PRODUCER"]},
        "key": "test:1",
        "value_length": 0,
        "notes": [],
        "offset": 0,
    }


@pytest.mark.parametrize(
    "vector", [vector for vector in vectors("seed_*") if vector.form == "literal"], ids=str
)
def test_every_packet_of_the_seeds(vector: Any, decode: Any) -> None:
    code, out, err = decode(vector.data.hex().encode(), "--json", "--dialect", vector.dialect)
    assert (code, err) == (0, "")
    (said,) = objects(out)
    for erratum in vector.notes:
        assert any(note.startswith(f"erratum {erratum}: ") for note in said["notes"])


PROSE = "The packet below has 24 bytes, of which 0x80 is the first; see section 3 (page 12)."


@pytest.mark.parametrize(("document", "packets"), [("000", 15), ("001", 16), ("002", 16), ("003", 4)])
@pytest.mark.parametrize("between", ["", PROSE])
def test_whole_documents_with_drawings(
    decode: Any, tmp_path: Path, document: str, packets: int, between: str
) -> None:
    path = tmp_path / "document.txt"
    path.write_text("".join(f"{line or between}\n" for line in DRAWN[document].read_text().splitlines()))
    code, out, _ = decode(b"", "--json", str(path))
    assert (code, len(objects(out))) == (0, packets)


def test_a_document_without_drawings(decode: Any) -> None:
    assert decode(f"{PROSE}\n{PROSE}\n".encode())[0] == 1


# forms of input


def test_lines_are_one_stream_if_that_gives_frames(decode: Any) -> None:
    text = (OPEN.encode() + NOOP).hex()
    wrapped = "\n".join(text[at : at + 32] for at in range(0, len(text), 32))
    _, out, _ = decode(wrapped.encode(), "--json")
    assert [(frame["name"], frame["offset"]) for frame in objects(out)] == [("dcp open", 0), ("dcp noop", 38)]


def test_lines_are_packets_each_if_only_that_gives_frames(decode: Any) -> None:
    literal = [vector for vector in vectors("seed_upr_a") if vector.form == "literal"]
    text = "\n".join(f"{vector.data.hex()}  # {vector.id}" for vector in literal)
    code, out, _ = decode(text.encode(), "--json")
    assert code == 0 and len(objects(out)) == len(literal)


def test_raw_bytes_that_look_like_text_can_be_forced(decode: Any) -> None:
    code, _, err = decode(b"8050", "--format", "raw")
    assert code == 1 and "no frame starts with the byte 0x38" in err
    code, _, err = decode(b"\xff80", "--format", "hex")
    assert code == 1 and "is not text" in err


@pytest.mark.parametrize(
    ("data", "arguments", "code", "what"),
    [
        (b"", [], 1, "the input is empty"),
        (b"\n\n", [], 1, "there is no hex"),
        (b"hello", [], 1, "line 1 is not hex: 'hello'"),
        (b"805", [], 1, "3 hex digits, a byte needs two"),
        (b"\x1f\x8b\x08\0", [], 1, "compressed with gzip"),
        (MAGIC + b"{}\n\x80\0", [], 1, "a recording, serve it with 'tailrace replay'"),
        (b"8050", ["--port", "11210"], 2, "--port chooses conversations of a capture"),
        (b"8050", ["--port", "0"], 2, "0 is out of range"),
        (b"8050", ["--dialect", "dcp2"], 2, "'dcp2' is not one of"),
        (b"8050", ["/nonexistent/file"], 2, "the file '/nonexistent/file' is not there"),
        (b"nonsense", ["--format", "pcap"], 1, "not a capture"),
        (pcap_file([]), [], 1, "there are no frames in the capture"),
    ],
)
def test_bad_input_is_one_clear_line(
    data: bytes, arguments: list[str], code: int, what: str, decode: Any
) -> None:
    got, out, err = decode(data, *arguments)
    assert (got, out) == (code, "")
    assert err.startswith("tailrace: error: ") and err.count("\n") == 1 and what in err


def test_trailing_garbage_comes_after_the_frames(decode: Any) -> None:
    code, out, err = decode(NOOP + b"\xff garbage", "--json")
    assert code == 1 and len(objects(out)) == 1
    assert (
        err == "tailrace: error: 9 bytes at offset 24 are not a frame: no frame starts with the byte 0xff\n"
    )
    code, out, err = decode(f"{NOOP.hex()}\nffff\n".encode())
    assert code == 1 and out.startswith("dcp noop") and "2 bytes at offset 24" in err


def test_input_has_a_limit(decode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import tailrace.cli.decode as module

    monkeypatch.setattr(module, "MAX_INPUT", 40)
    code, _, err = decode(NOOP * 2)
    assert code == 1 and "larger than 40 B" in err


def test_given_dialect_and_direction_are_the_law(decode: Any) -> None:
    data = upr.UprBStreamStart().encode()
    _, out, _ = decode(data, "--json")
    assert objects(out)[0]["name"] == "dcp close stream"
    assert "say which --dialect" in objects(out)[0]["notes"][0]
    _, out, _ = decode(data, "--json", "--dialect", "upr-b")
    assert (objects(out)[0]["name"], objects(out)[0]["notes"]) == ("upr b stream start", [])
    _, out, _ = decode(data, "--json", "--dialect", "upr-b", "--direction", "to-producer")
    assert objects(out)[0]["name"] == "unknown 0x52"


# captures


def conversation() -> Talk:
    hello = admin.Hello(key=b"test", value=b"\0\x07").encode()
    request = dcp.DcpStreamRequest(vbucket=7, opaque=0x1000).encode()
    log = dcp.DcpStreamRequestResponse.ok([(1, 0)], opaque=0x1000).encode()
    changes = b"".join(
        dcp.DcpMutation(
            vbucket=7, opaque=0x1000, by_seqno=n, rev_seqno=1, key=b"k", value=b"v" * 900
        ).encode()
        for n in (1, 2, 3)
    )
    made = Talk().open().send(CLIENT, hello).send(CLIENT, OPEN.encode())
    made.send(SERVER, admin.HelloResponse(opcode=0x1F, value=b"\0\x07").encode())
    return made.send(CLIENT, request, 10).send(SERVER, log + changes, 700).close()


EXPECTED = [
    ("hello", "to-producer"),
    ("dcp open", "to-producer"),
    ("hello response", "to-consumer"),
    ("dcp stream request", "to-producer"),
    ("dcp stream request response", "to-consumer"),
    *[("dcp mutation", "to-consumer")] * 3,
]


@pytest.mark.parametrize("writer", [pcap_file, pcapng_file])
@pytest.mark.parametrize("link", LINKS)
def test_a_capture_of_both_directions(writer: Any, link: str, decode: Any) -> None:
    code, out, err = decode(writer(*conversation().wrapped(link)), "--json")
    assert (code, err) == (0, "")
    assert [(frame["name"], frame["direction"]) for frame in objects(out)] == EXPECTED
    last = objects(out)[-1]
    assert last["conversation"] == 1 and last["source"] == "127.0.0.1:11210"
    assert last["destination"] == "127.0.0.1:40112" and last["time"].startswith("2023-11-14T22:13:")


def test_segments_out_of_order_change_nothing(decode: Any) -> None:
    made = conversation()
    made.packets[-7:-3] = made.packets[-7:-3][::-1]
    made.packets.insert(8, made.packets[5])
    _, out, err = decode(pcap_file(*made.wrapped()), "--json")
    assert err == "" and [(frame["name"], frame["direction"]) for frame in objects(out)] == EXPECTED


def test_other_traffic_is_passed_over_and_counted(decode: Any) -> None:
    made = conversation()
    web = Talk(("127.0.0.1", 5), ("127.0.0.1", 80)).open().send(CLIENT, b"GET / HTTP/1.1\r\n\r\n").close()
    made.packets += web.packets
    code, out, err = decode(pcap_file(*made.wrapped()), "--json")
    assert code == 0 and len(objects(out)) == len(EXPECTED)
    assert err == "tailrace: conversations without a known frame: 1\n"
    _, out, err = decode(pcap_file(*made.wrapped()), "--json", "--port", "11210")
    assert len(objects(out)) == len(EXPECTED) and err == ""
    code, _, err = decode(pcap_file(*made.wrapped()), "--port", "80")
    assert code == 1 and "there are no frames in the capture" in err


def test_conversations_that_are_over_take_no_room(decode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import tailrace.cli.decode as module

    monkeypatch.setattr(pcap, "MAX_ENDED", 2)
    held: list[int] = []

    class Watched(module._Capture):
        def add(self, piece: Any) -> Any:
            yield from super().add(piece)
            held.append(len(self._talks))

    monkeypatch.setattr(module, "_Capture", Watched)
    web = b"GET / HTTP/1.1\r\n\r\n"
    packets = []
    for port in range(1000, 1020):
        talk = Talk(("127.0.0.1", port)).open()
        talk.send(CLIENT, dcp.DcpNoop(opaque=port).encode() if port % 2 else web).close()
        packets += talk.packets
    code, out, err = decode(pcap_file(packets, 101), "--json")
    assert code == 0 and [frame["opaque"] for frame in objects(out)] == list(range(1001, 1020, 2))
    assert err == "tailrace: conversations without a known frame: 10\n"
    assert max(held) <= 3


def test_what_gaps_have_cost_does_not_count_as_waiting(decode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import tailrace.cli.decode as module

    monkeypatch.setattr(module, "MAX_BUFFERED", 3000)
    monkeypatch.setattr(pcap, "MAX_WAITING_SEGMENTS", 2)
    made = Talk().open()
    large = dcp.DcpMutation(by_seqno=1, rev_seqno=1, key=b"k", value=bytes(900)).encode()
    for _ in range(10):
        made.send(SERVER, large, 500)
        del made.packets[-1]  # the half that is there is given up when the next frames come
        made.send(SERVER, NOOP * 5, len(NOOP))
    code, out, err = decode(pcap_file(*made.wrapped()), "--json")
    assert code == 0 and len(objects(out)) > 10
    assert "were not recorded" in err


def test_a_lost_segment_costs_its_frame_and_is_told(decode: Any) -> None:
    made = conversation()
    del made.packets[-7]
    code, out, err = decode(pcap_file(*made.wrapped()), "--json")
    assert code == 0
    assert [frame["name"] for frame in objects(out)].count("dcp mutation") == 1
    assert "were not recorded" in err


def test_a_capture_that_is_cut_off_shows_what_it_has(decode: Any) -> None:
    data = pcap_file(*conversation().wrapped())
    code, out, err = decode(data[:-1], "--json")
    assert code == 1 and len(objects(out)) == len(EXPECTED)
    assert err == "tailrace: error: the capture ends inside a packet, it was cut off\n"


def test_a_capture_in_text_names_both_ends(decode: Any) -> None:
    _, out, _ = decode(pcap_file(*conversation().wrapped()))
    assert out.splitlines()[0].startswith(
        "#1 2023-11-14T22:13:23.500000Z 127.0.0.1:40112 > 127.0.0.1:11210  hello  "
    )
    assert "\x1b" not in out
