"""Documents for `tailrace load`: made up from a seed, or read from JSON lines, as batches of requests.

Made-up documents all have the same length, so a batch is one numpy array with one request per row: the frame
is written once, and only key, vbucket, opaque, expiry and text differ between rows.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from .. import rng
from ..errors import InputError
from ..wire.codes import Datatype
from ..wire.fields import encode_leb128, join_xattrs
from ..wire.header import HEADER_LAYOUT
from ..wire.kv import Delete, Set
from ..wire.layout import numpy_code
from ..wire.message import MAX_KEY, Message
from .cluster_map import vbucket_of
from .write_batches import BATCH_BYTES, BATCH_REQUESTS, FrameBatch, RowsBatch, batched

__all__ = ["MadeUp", "from_json_lines"]

POOL_BYTES = 1 << 20
MAX_LINE = 32 << 20
_SET = HEADER_LAYOUT + Set.LAYOUTS[0]
_EXPIRY = _SET.field("expiry")
_VBUCKET = HEADER_LAYOUT.field("vbucket")
_DEFAULT = "_default._default"
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .", dtype=np.uint8)
assert len(_LETTERS) == 64


@dataclass(frozen=True)
class MadeUp:
    """Made-up JSON documents; the same seed makes the same ones."""

    docs: int
    size: int = 256
    """The size of a value in bytes."""
    deletes: float = 0.0
    """The share that is deleted again at the end."""
    expiry: float = 0.0
    """The share that gets an expiry."""
    expires_at_s: int = 0
    prefix: str = "doc::"
    seed: int = 0

    def key(self, number: int) -> bytes:
        """The key of a document; all are equally long."""
        return f"{self.prefix}{number:0{self._digits}d}".encode()

    @cached_property
    def _digits(self) -> int:
        return max(8, len(str(max(self.docs - 1, 0))))

    @property
    def deleted(self) -> NDArray[np.intp]:
        """The numbers of the documents that are deleted at the end."""
        return np.flatnonzero(self._generator(1).random(self.docs) < self.deletes)

    @property
    def writes(self) -> int:
        """How many requests there are in all."""
        return self.docs + len(self.deleted)

    def batches(
        self, vbucket_count: int, *, collections: bool, json_type: bool, most: int
    ) -> Iterator[RowsBatch]:
        """All requests, sets before deletions, up to ``most`` in a batch."""
        kind = int(Datatype.JSON) if json_type and self.size else 0
        yield from self._sets(vbucket_count, kind, b"\0" if collections else b"", most)
        yield from self._deletions(vbucket_count, b"\0" if collections else b"", most)

    def _generator(self, purpose: int) -> np.random.Generator:
        return np.random.default_rng([purpose, rng.source(self.seed).getrandbits(64)])

    def _vbuckets(self, numbers: NDArray[np.intp], count: int) -> list[int]:
        """The vbuckets of documents, a batch at a time, so the first write need not wait for all."""
        return [vbucket_of(self.key(number), count) for number in numbers.tolist()]

    def _sets(self, vbucket_count: int, kind: int, prefix: bytes, most: int) -> Iterator[RowsBatch]:
        head, tail = self._around()
        text_bytes = self.size - len(head) - len(tail)
        template = Set(
            key=prefix + self.key(0), value=head + b" " * text_bytes + tail, datatype=kind
        ).encode()
        number_at = _SET.size + len(prefix) + len(self.prefix.encode())
        value_at = number_at + self._digits
        text_at = value_at + len(head)
        expires = self._generator(2).random(self.docs) < self.expiry
        generator = self._generator(3)
        # each text is cut out of one long random one: copying is far cheaper than making random letters
        letters = _LETTERS[generator.integers(0, 64, POOL_BYTES + text_bytes, dtype=np.uint8)]
        texts = sliding_window_view(letters, max(text_bytes, 1))
        step = max(1, min(most, BATCH_REQUESTS, BATCH_BYTES // len(template)))
        for first in range(0, self.docs, step):
            last = min(first + step, self.docs)
            numbers = np.arange(first, last)
            vbuckets = self._vbuckets(numbers, vbucket_count)
            rows = self._rows(template, numbers, vbuckets, number_at)
            if self._has_id:
                id_at = value_at + head.index(b'"id":"') + 6
                rows[:, id_at : id_at + self._digits] = rows[:, number_at : number_at + self._digits]
            if text_bytes:
                rows[:, text_at : text_at + text_bytes] = texts[
                    generator.integers(0, len(texts), last - first)
                ]
            expiring = np.flatnonzero(expires[first:last])
            if len(expiring):
                rows[expiring, _EXPIRY.place] = _octets(self.expires_at_s, _EXPIRY.size)
            yield RowsBatch(rows, vbuckets, numbers)

    def _deletions(self, vbucket_count: int, prefix: bytes, most: int) -> Iterator[RowsBatch]:
        if not self.docs:
            return
        template = Delete(key=prefix + self.key(0)).encode()
        number_at = len(template) - self._digits
        numbers = self.deleted
        step = max(1, min(most, BATCH_REQUESTS))
        for first in range(0, len(numbers), step):
            step_numbers = numbers[first : first + step]
            vbuckets = self._vbuckets(step_numbers, vbucket_count)
            yield RowsBatch(self._rows(template, step_numbers, vbuckets, number_at), vbuckets, step_numbers)

    def _rows(
        self,
        template: bytes,
        numbers: NDArray[np.intp],
        vbuckets: list[int],
        number_at: int,
    ) -> NDArray[np.uint8]:
        """The template once for each number, with its own vbucket and key."""
        count = len(numbers)
        rows = np.tile(np.frombuffer(template, dtype=np.uint8), (count, 1))
        stamps = np.array(vbuckets, dtype=numpy_code(_VBUCKET))
        rows[:, _VBUCKET.place] = stamps.view(np.uint8).reshape(count, _VBUCKET.size)
        digits_left = numbers.copy()
        for place in reversed(range(self._digits)):
            digits_left, digit = np.divmod(digits_left, 10)
            rows[:, number_at + place] = digit + ord("0")
        return rows

    @property
    def _has_id(self) -> bool:
        return self.size >= self._digits + len('{"id":"","text":""}')

    def _around(self) -> tuple[bytes, bytes]:
        """The parts of a value before and after the made-up text; small values have shorter ones."""
        if self._has_id:
            return b'{"id":"' + b"0" * self._digits + b'","text":"', b'"}'
        return (b'"', b'"') if self.size >= 2 else (b"7" * self.size, b"")


class _Parser:
    """Parses lines that are JSON objects, and finds the value's text as it was written."""

    def __init__(self) -> None:
        self._decoder = json.JSONDecoder(parse_float=self._float, parse_constant=self._refuse)
        self._line = ""
        self._has_floats = False

    def parse(self, line: str) -> Any:
        self._line, self._has_floats = line, False
        return self._decoder.decode(line)

    def _float(self, text: str) -> float:
        self._has_floats = True
        return float(text)

    def _refuse(self, name: str) -> Any:
        raise ValueError(f"it has {name}, which is not JSON")

    def value_text(self, value: Any) -> str:
        """The member ``value`` of the line. Floats would lose digits if they were written again, so a value
        that has some is cut out of the line unchanged.
        """
        if not self._has_floats:
            return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        text, line = "", self._line
        at = _after_space(line, line.index("{") + 1)
        while line[at] != "}":
            name, at = self._decoder.raw_decode(line, at)
            begin = _after_space(line, _after_space(line, at) + 1)  # behind the colon
            _, end = self._decoder.raw_decode(line, begin)
            if name == "value":
                text = line[begin:end]
            at = _after_space(line, end)
            if line[at] == ",":
                at = _after_space(line, at + 1)
        return text


def _after_space(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


def from_json_lines(
    lines: Iterable[bytes],
    vbucket_count: int,
    *,
    collections: bool,
    json_type: bool,
    xattrs: bool = False,
    most: int,
    collection_ids: Mapping[str, int] = MappingProxyType({}),
    pack: Callable[[bytes, int], tuple[bytes, int]] = lambda value, datatype: (value, datatype),
) -> Iterator[FrameBatch]:
    """Writes from lines ``{"key":…,"value":…}``, and from what `tail --json` and `dump` write.

    ``key_base64`` and ``value_base64`` stand for bytes that are not text; flags and expiry are taken over,
    and so are xattrs if the server takes ``xattrs``, replacing the document's. An op ``deletion`` or
    ``expiration`` deletes; ops other than these and ``mutation`` are passed over. A line that names a
    collection goes there; ``collection_ids`` has the target's, by ``scope.name``. ``pack`` may compress.
    """
    parser = _Parser()
    ids = {_DEFAULT: 0, **collection_ids} if collections else {}
    prefixes = {path: encode_leb128(number) for path, number in ids.items()} or {_DEFAULT: b""}

    def requests() -> Iterator[Message]:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                made = _request(line, parser, prefixes, json_type=json_type, takes_xattrs=xattrs)
            except (ValueError, struct.error) as error:
                raise InputError(
                    f"line {number} can't be loaded: {error}; fix it and load again, "
                    "the lines before it may be stored"
                ) from None
            if made is not None:
                request, key = made
                request.vbucket = vbucket_of(key, vbucket_count)
                if isinstance(request, Set):
                    request.value, request.datatype = pack(request.value, request.datatype)
                yield request

    return batched(requests(), most)


def _request(
    line: bytes, parser: _Parser, prefixes: Mapping[str, bytes], *, json_type: bool, takes_xattrs: bool
) -> tuple[Set | Delete, bytes] | None:
    if len(line) > MAX_LINE:
        raise ValueError(f"it has more than {MAX_LINE} bytes")
    try:
        text_line = line.decode("utf-8-sig")  # given bytes, json guesses at other encodings
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    try:
        document = parser.parse(text_line)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    op = document.get("op", "mutation")
    if op not in ("mutation", "deletion", "expiration"):
        return None
    key = _member(document, "key")
    if not isinstance(key, str | bytes):
        raise ValueError("it has no key that is text")
    raw_key = key.encode() if isinstance(key, str) else key
    if not 1 <= len(raw_key) <= MAX_KEY - 5:
        raise ValueError(f"its key has {len(raw_key)} bytes, not 1 to {MAX_KEY - 5}")
    wire_key = _prefix(document, prefixes) + raw_key
    if op != "mutation":
        return Delete(key=wire_key), raw_key
    if "value" not in document and "value_base64" not in document:
        raise ValueError("it has no value")
    value = _member(document, "value")
    is_text = isinstance(value, str) and document.get("datatype") == "raw"  # and not a JSON string
    is_json = not is_text and not isinstance(value, bytes)
    body = value.encode() if is_text else parser.value_text(value).encode() if is_json else value
    kind = int(Datatype.JSON) if json_type and is_json else 0
    if xattrs := _xattrs(document):
        if not takes_xattrs:
            raise ValueError("it has xattrs, and the server takes none (without them, dump has no --xattrs)")
        body, kind = join_xattrs(xattrs, body), kind | int(Datatype.XATTR)
    flags, expiry = (_u32(document.get(name, 0), name) for name in ("flags", "expiry"))
    return Set(key=wire_key, value=body, flags=flags, expiry=expiry, datatype=kind), raw_key


def _prefix(document: dict[str, Any], prefixes: Mapping[str, bytes]) -> bytes:
    """The prefix of a document's key on the wire: its collection."""
    scope, name = document.get("scope", "_default"), document.get("collection")
    if name is None and document.get("collection_id"):
        raise ValueError(f"it is of collection {document['collection_id']!r} but does not name it")
    path = f"{scope}.{name or '_default'}"
    if path not in prefixes:
        raise ValueError(f"its collection {path!r} does not exist (create it with 'tailrace collections')")
    return prefixes[path]


def _xattrs(document: dict[str, Any]) -> dict[str, bytes]:
    """The texts of a document's xattrs."""
    xattrs = document.get("xattrs", {})
    if not isinstance(xattrs, dict) or not all(name and "\0" not in name for name in xattrs):
        raise ValueError("its xattrs are not an object with names")
    try:
        return {
            name: json.dumps(xattr, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
            for name, xattr in xattrs.items()
        }
    except ValueError:
        raise ValueError("its xattrs have a number that is too large") from None


def _member(document: dict[str, Any], name: str) -> Any:
    """A member, or the bytes that its ``_base64`` twin stands for."""
    encoded = document.get(f"{name}_base64")
    if encoded is None:
        return document.get(name)
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise ValueError(f"its {name}_base64 is not base64") from None


def _u32(value: object, name: str) -> int:
    if type(value) is not int or not 0 <= value <= 0xFFFF_FFFF:
        raise ValueError(f"its {name} is not a 32-bit number")
    return value


def _octets(number: int, size: int) -> NDArray[np.uint8]:
    return np.frombuffer(number.to_bytes(size, "big"), dtype=np.uint8)
