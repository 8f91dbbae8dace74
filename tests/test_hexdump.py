"""Bytes out of text, in every form that people paste."""

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


@given(st.binary(min_size=1, max_size=100))
def test_dumps_give_back_what_was_dumped(data: bytes) -> None:
    for made in (xxd(data), canonical(data), wireshark(data)):
        assert whole(made) == [data]
        assert whole(made + "\n" + made) == [data, data]  # offset 0 begins another buffer


@pytest.mark.parametrize("command", [["xxd"], ["hexdump", "-C", "-v"]])
def test_the_real_tools(command: list[str]) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(command, input=DATA, capture_output=True, check=True)
    assert whole(done.stdout.decode()) == [DATA]


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
        ("8050\nhello", "line 2 is no hex"),
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
