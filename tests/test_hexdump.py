"""Bytes from text, in every form that people paste."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import InputError
from tailrace.hexdump import parse

DATA = bytes(range(0x75, 0x75 + 40)) + b"  ab cd ef 12 | 34" + bytes(5)


def whole(text: str) -> list[bytes]:
    chunks = parse(text)
    assert all(chunk.whole for chunk in chunks)
    return [chunk.data for chunk in chunks]


def xxd(data: bytes, columns: int = 16) -> str:
    """As xxd writes: groups of two bytes, two blanks, the text."""
    lines = []
    for at in range(0, len(data), columns):
        row = data[at : at + columns]
        groups = " ".join(row[i : i + 2].hex() for i in range(0, len(row), 2))
        text = "".join(chr(c) if 32 <= c < 127 else "." for c in row)
        lines.append(f"{at:08x}: {groups:<{columns * 5 // 2 - 1}}  {text}")
    return "\n".join(lines) + "\n"


def canonical(data: bytes) -> str:
    """As hexdump -C writes: two halves, the text between bars, the size at the end."""
    lines = []
    for at in range(0, len(data), 16):
        row = data[at : at + 16]
        halves = "  ".join(" ".join(f"{c:02x}" for c in row[i : i + 8]) for i in (0, 8))
        text = "".join(chr(c) if 32 <= c < 127 else "." for c in row)
        lines.append(f"{at:08x}  {halves:<48}  |{text}|")
    return "\n".join([*lines, f"{len(data):08x}"]) + "\n"


def wireshark(data: bytes) -> str:
    """As Wireshark copies: four digits, single blanks, three blanks before the text."""
    lines = []
    for at in range(0, len(data), 16):
        row = data[at : at + 16]
        text = "".join(chr(c) if 32 <= c < 127 else "." for c in row)
        lines.append(f"{at:04x}  {' '.join(f'{c:02x}' for c in row):<47}   {text}")
    return "\n".join(lines)


def folded(dump: str) -> str:
    """As hexdump -C and xxd -a write repeated rows: one star for all of them."""
    lines: list[str] = []
    before = ""
    for line in dump.splitlines():
        _offset, _, row = line.partition(" ")
        if not row or row != before:
            lines.append(line)
        elif lines[-1] != "*":
            lines.append("*")
        before = row
    return "\n".join(lines) + "\n"


@given(
    st.lists(st.tuples(st.binary(min_size=16, max_size=16), st.integers(1, 4)), min_size=1),
    st.binary(max_size=15),
)
def test_rows_that_are_left_out_are_put_back(rows: list[tuple[bytes, int]], rest: bytes) -> None:
    data = b"".join(row * count for row, count in rows) + rest
    dump = folded(canonical(data))
    assert whole(dump) == [data]
    assert whole(dump + dump) == [data, data]


@pytest.mark.parametrize(
    "text",
    [
        "*\n00000000  80 5c\n",
        "00000000  80 5c\n*\n00000005  00 00\n",  # not a number of rows
        "00000000  80 5c\n*\n",  # how many?
        "00000000  80 5c\n*\n00000000  80 5c\n",
    ],
)
def test_a_star_that_says_nothing_is_no_dump(text: str) -> None:
    with pytest.raises(InputError):
        parse(text)


def test_a_star_can_not_be_made_to_fill_the_memory() -> None:
    with pytest.raises(InputError, match="larger than"):
        parse("00000000  80 5c\n*\nfffffffffffffff0  00 00\n")


@given(st.text("abcdef0123456789 |", min_size=1, max_size=100))
def test_text_that_looks_like_bytes_is_not_taken_for_them(text: str) -> None:
    for made in (xxd(text.encode()), canonical(text.encode()), wireshark(text.encode())):
        assert whole(made) == [text.encode()]


@given(st.binary(min_size=1, max_size=100))
def test_dumps_give_back_what_was_dumped(data: bytes) -> None:
    for made in (xxd(data), canonical(data), wireshark(data)):
        assert whole(made) == [data]
        assert whole(made + "\n" + made) == [data, data]  # offset 0 begins another buffer


@pytest.mark.parametrize("command", [["xxd"], ["xxd", "-a"], ["hexdump", "-C", "-v"], ["hexdump", "-C"]])
@pytest.mark.parametrize("data", [DATA, DATA + bytes(100) + DATA, DATA + bytes(99)])
def test_the_real_tools(command: list[str], data: bytes) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(command, input=data, capture_output=True, check=True)
    assert whole(done.stdout.decode()) == [data]


@given(st.binary(min_size=1, max_size=50), st.sampled_from(["", " ", ":", ", ", "0x", " 0x", "\\x", "-"]))
def test_plain_hex_with_any_separator(data: bytes, separator: str) -> None:
    text = separator.join(f"{c:02X}" for c in data)
    (chunk,) = parse(f"  {separator.strip()}{text}  # a remark\n")
    assert (chunk.data, chunk.whole, chunk.line) == (data, False, 1)


def test_lines_of_plain_hex_stay_apart() -> None:
    chunks = parse("# two\n8050\n\n 80 51\n")
    assert [(chunk.line, chunk.data) for chunk in chunks] == [(2, b"\x80\x50"), (4, b"\x80\x51")]


def test_drawings_are_found_in_a_document() -> None:
    text = """
      Words, and a layout that is no packet:
       0| by_seqno      |               |
      Byte/     0       |       1       |
        |0 1 2 3 4 5 6 7|0 1 2 3 4 5 6 7|
        +---------------+---------------+
       0|       80      |    41 ('A')   |
        +---------------+---------------+
       2| 0x00          | 0x7C ('|')    |
    """.replace("0x7C ('|')", "0x7c")
    assert whole(text + text) == [b"\x80\x41\x00\x7c"] * 2


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("8050\nhello", "line 2 is not hex"),
        ("805", "3 hex digits"),
        ("   4| 80 | 81 |", "does not follow"),
        ("   0| 80 | 81 |\n   4| 80 | 81 |", "does not follow"),
    ],
)
def test_what_is_no_hex_is_said(text: str, what: str) -> None:
    with pytest.raises(InputError, match=what):
        parse(text)


@given(st.text())
def test_any_text_gives_bytes_or_an_input_error(text: str) -> None:
    try:
        for chunk in parse(text):
            assert chunk.data
    except InputError:
        pass
