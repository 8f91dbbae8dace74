"""Sub-document commands: paths in a document's body and in its xattrs.

Body and xattrs are edited as two JSON texts: the xattrs together are an object of their own, so that one
editor (`subdoc`) serves both. A command with several paths sees and makes one version of the document.

Rules: docs/spec/servers.md#sub-document-requests.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import MalformedMessage
from ...store.base import VBucket, Written
from ...store.format import StoredDocument
from ...wire import subdoc as wire
from ...wire.codes import Datatype, Op, Status
from ...wire.fields import join_xattrs
from ...wire.message import Message
from ..call import Call, Refused, Reply, command, encode_response
from ..document_values import checked_value, split_document, system_xattrs, too_large
from ..subdoc import LOOKUPS, MUTATIONS, Path, SubdocError, members, new_root, parse_path
from .macros import MACROS, document_facts, document_macro, expand, virtual_xattrs

_PARENTS, _XATTR, _EXPAND = 0x01, 0x04, 0x10
_PATH_FLAGS = _PARENTS | _XATTR | _EXPAND
_UPSERT, _ADD, _ACCESS_DELETED, _CREATE_AS_DELETED, _REVIVE, _REPLICA_READ = (
    0x01,
    0x02,
    0x04,
    0x08,
    0x10,
    0x20,
)
_DOC_FLAGS = _UPSERT | _ADD | _ACCESS_DELETED | _CREATE_AS_DELETED | _REVIVE | _REPLICA_READ
_WHOLE_GET, _WHOLE_SET, _WHOLE_DELETE = int(Op.GET), int(Op.SET), int(Op.DELETE)
_BODY_FROM_XATTR = int(Op.SUBDOC_REPLACE_BODY_WITH_XATTR)
_MAX_XATTR_NAME = 15


class _Spec(NamedTuple):
    """One path of a command."""

    opcode: int
    flags: int
    path: bytes
    value: bytes = b""

    @property
    def on_xattrs(self) -> bool:
        return bool(self.flags & _XATTR)


@dataclass(slots=True)
class _Content:
    """A document taken apart for editing."""

    document: StoredDocument | None  # None: it is being made
    xattrs: dict[str, bytes]
    body: bytes
    datatype: int  # of the body

    @property
    def deleted(self) -> bool:
        return self.document is not None and self.document.deleted

    def body_text(self) -> str:
        if not self.datatype & Datatype.JSON:
            raise SubdocError(Status.SUBDOC_DOC_NOT_JSON)
        return self.body.decode()

    def xattr_text(self) -> str:
        pairs = (f"{json.dumps(name)}:{text.decode()}" for name, text in self.xattrs.items())
        return "{" + ",".join(pairs) + "}"

    def set_xattr_text(self, text: str) -> None:
        self.xattrs = {name: text[start:end].encode() for name, _, (start, end) in members(text)}


def _open(call: Call[Message], vbucket: VBucket, key: bytes, doc_flags: int) -> _Content | None:
    """The document, a tombstone only if the flags ask for it; None if there is none."""
    frame = vbucket.get(key)
    if frame is None and doc_flags & _ACCESS_DELETED:
        frame = vbucket.get_any(key)
    if frame is None:
        return None
    document = StoredDocument.of(frame)
    xattrs, body, datatype = split_document(
        document.value, document.datatype, call.node.settings.max_inflated
    )
    return _Content(document, xattrs, body, datatype)


def _check_doc_flags(doc_flags: int) -> None:
    if doc_flags & ~_DOC_FLAGS or (doc_flags & _UPSERT and doc_flags & _ADD):
        raise Refused(Status.SUBDOC_XATTR_INVALID_FLAG_COMBO, f"document flags 0x{doc_flags:02x}")


def _check_order(specs: list[_Spec]) -> None:
    seen_body = False
    for spec in specs:
        if spec.opcode == _BODY_FROM_XATTR and (not spec.on_xattrs or spec.value):
            raise MalformedMessage("the body is replaced by the xattr at a path, and by no value")
        if spec.flags & ~_PATH_FLAGS:
            raise Refused(Status.SUBDOC_XATTR_INVALID_FLAG_COMBO, f"path flags 0x{spec.flags:02x}")
        if spec.flags & _EXPAND and not spec.on_xattrs:
            raise Refused(Status.SUBDOC_XATTR_INVALID_FLAG_COMBO, "macros are for xattrs")
        if spec.on_xattrs and seen_body:
            raise Refused(Status.SUBDOC_INVALID_XATTR_ORDER, "xattr paths come first")
        seen_body = seen_body or not spec.on_xattrs


# lookups


def _readable_vbucket(call: Call[Message], doc_flags: int) -> VBucket:
    """The request's vbucket: active, or with the flag for it a replica and nothing else."""
    return call.replica() if doc_flags & _REPLICA_READ else call.vbucket()


def _look_up(call: Call[Message], vbucket: VBucket, content: _Content, spec: _Spec) -> bytes:
    if spec.opcode == _WHOLE_GET:
        if spec.path or spec.on_xattrs:
            raise SubdocError(Status.SUBDOC_PATH_EINVAL, "the whole document has no path")
        return content.body
    path = parse_path(spec.path)
    if not spec.on_xattrs:
        return LOOKUPS[spec.opcode](content.body_text(), path).encode()
    name = _xattr_name(path)
    if not name.startswith("$"):
        return LOOKUPS[spec.opcode](content.xattr_text(), path).encode()
    assert content.document is not None
    now_s = call.node.clock.time_ns() // 1_000_000_000
    text = virtual_xattrs(name, vbucket, content.document, content.xattrs, content.body, now_s)
    if text is None:
        raise SubdocError(Status.SUBDOC_XATTR_UNKNOWN_VATTR)
    return LOOKUPS[spec.opcode](text, path).encode()


def _xattr_name(path: Path) -> str:
    if not path or not isinstance(path[0], str) or not 0 < len(path[0].encode()) <= _MAX_XATTR_NAME:
        raise SubdocError(Status.SUBDOC_PATH_EINVAL, "an xattr path begins with a name of up to 15 bytes")
    return path[0]


@command(wire.SubdocGet, wire.SubdocExists, wire.SubdocGetCount)
def look_up_one(call: Call[wire.SubdocGet]) -> Reply:
    request = call.request
    doc_flags = request.doc_flags or 0
    _check_doc_flags(doc_flags)
    spec = _Spec(request.OPCODE, request.subdoc_flags, request.path)
    _check_order([spec])
    if len(request.value) != request.path_length:
        raise MalformedMessage(f"{request.name()}: there is something behind the path")
    key, vbucket = call.key(), _readable_vbucket(call, doc_flags)
    content = _open(call, vbucket, key, doc_flags)
    if content is None or content.document is None:
        raise Refused(Status.KEY_ENOENT)
    value = _look_up(call, vbucket, content, spec)
    status = Status.SUBDOC_SUCCESS_DELETED if content.deleted else Status.SUCCESS
    return encode_response(request.OPCODE, request.opaque, status, content.document.cas, value=value)


@command(wire.SubdocMultiLookup)
def look_up(call: Call[wire.SubdocMultiLookup]) -> Reply:
    """Every path is answered, with a status of its own."""
    request = call.request
    doc_flags = request.doc_flags or 0
    _check_doc_flags(doc_flags)
    specs = [_Spec(*spec) for spec in request.specs()]
    for spec in specs:
        if spec.opcode not in LOOKUPS and spec.opcode != _WHOLE_GET:
            raise Refused(Status.SUBDOC_INVALID_COMBO, f"opcode 0x{spec.opcode:02x} is not a lookup")
    _check_order(specs)
    key, vbucket = call.key(), _readable_vbucket(call, doc_flags)
    content = _open(call, vbucket, key, doc_flags)
    if content is None or content.document is None:
        raise Refused(Status.KEY_ENOENT)
    out = bytearray()
    failed = False
    for spec in specs:
        try:
            status, value = Status.SUCCESS, _look_up(call, vbucket, content, spec)
        except SubdocError as error:
            status, value, failed = Status(error.status), b"", True
        out += wire.SUBDOC_LOOKUP_RESULT.pack(status, len(value)) + value
    if content.deleted:
        status = Status.SUBDOC_MULTI_PATH_FAILURE_DELETED if failed else Status.SUBDOC_SUCCESS_DELETED
    else:
        status = Status.SUBDOC_MULTI_PATH_FAILURE if failed else Status.SUCCESS
    return encode_response(request.OPCODE, request.opaque, status, content.document.cas, value=bytes(out))


# mutations


@command(
    wire.SubdocDictUpsert,
    wire.SubdocDictAdd,
    wire.SubdocReplace,
    wire.SubdocDelete,
    wire.SubdocArrayPushLast,
    wire.SubdocArrayPushFirst,
    wire.SubdocArrayInsert,
    wire.SubdocArrayAddUnique,
    wire.SubdocCounter,
    wire.SubdocReplaceBodyWithXattr,
    writes=True,
)
def mutate_one(call: Call[wire.SubdocDictUpsert]) -> Reply:
    request = call.request
    spec = _Spec(request.OPCODE, request.subdoc_flags, request.path, request.fragment)
    vbucket, edit = _begin(call, [spec], request.doc_flags or 0)
    result = edit.apply(spec)
    written = edit.write(request.expiry)
    return call.written(vbucket, written, result, edit.success)


@command(wire.SubdocMultiMutation, writes=True)
def mutate(call: Call[wire.SubdocMultiMutation]) -> Reply:
    """Applies all paths or none; the first that fails is named."""
    request = call.request
    specs = [_Spec(*spec) for spec in request.specs()]
    for spec in specs:
        if spec.opcode not in MUTATIONS and spec.opcode not in (_WHOLE_SET, _WHOLE_DELETE, _BODY_FROM_XATTR):
            raise Refused(Status.SUBDOC_INVALID_COMBO, f"opcode 0x{spec.opcode:02x} is not a mutation")
    vbucket, edit = _begin(call, specs, request.doc_flags or 0)
    out = bytearray()
    for at, spec in enumerate(specs):
        try:
            result = edit.apply(spec)
        except SubdocError as error:
            body = wire.SUBDOC_MUTATION_FAILURE.pack(at, error.status)
            status = (
                Status.SUBDOC_MULTI_PATH_FAILURE_DELETED
                if edit.content.deleted
                else Status.SUBDOC_MULTI_PATH_FAILURE
            )
            return encode_response(request.OPCODE, request.opaque, status, value=body)
        if result:
            out += wire.SUBDOC_MUTATION_RESULT.pack(at, Status.SUCCESS, len(result)) + result
    written = edit.write(request.expiry)
    return call.written(vbucket, written, bytes(out), edit.success)


def _begin(call: Call[Message], specs: list[_Spec], doc_flags: int) -> tuple[VBucket, _Edit]:
    _check_doc_flags(doc_flags)
    _check_order(specs)
    key, vbucket = call.key(), call.vbucket()
    content = _open(call, vbucket, key, doc_flags)
    if content is not None and not content.deleted and doc_flags & _REVIVE:
        raise Refused(Status.SUBDOC_CAN_ONLY_REVIVE_DELETED_DOCUMENTS)
    if content is not None and not content.deleted and doc_flags & (_ADD | _CREATE_AS_DELETED):
        raise Refused(Status.KEY_EEXISTS)
    if content is None:
        if not doc_flags & (_UPSERT | _ADD):
            raise Refused(Status.KEY_ENOENT)
        if call.request.cas:
            raise Refused(Status.KEY_ENOENT)
        content = _Content(None, {}, b"", Datatype.JSON)
    elif call.request.cas and content.document is not None and content.document.cas != call.request.cas:
        raise Refused(Status.KEY_EEXISTS)
    return vbucket, _Edit(call, vbucket, key, content, doc_flags)


class _Edit:
    """A new version of a document in the making."""

    def __init__(
        self, call: Call[Message], vbucket: VBucket, key: bytes, content: _Content, doc_flags: int
    ) -> None:
        self._call = call
        self._vbucket = vbucket
        self._key = key
        self.content = content
        self._doc_flags = doc_flags
        self._deletes = False
        self._macros = False
        self._body_before = content.body
        stays_deleted = content.deleted and not doc_flags & _REVIVE
        self._as_deleted = stays_deleted or bool(content.document is None and doc_flags & _CREATE_AS_DELETED)

    @property
    def success(self) -> int:
        """The status of a command that succeeds."""
        return Status.SUBDOC_SUCCESS_DELETED if self._as_deleted else Status.SUCCESS

    def apply(self, spec: _Spec) -> bytes:
        """Apply one path; return its result if it has one."""
        content = self.content
        if spec.opcode in (_WHOLE_SET, _WHOLE_DELETE):
            if spec.path or spec.on_xattrs:
                raise SubdocError(Status.SUBDOC_PATH_EINVAL, "the whole document has no path")
            if spec.opcode == _WHOLE_DELETE:
                if content.document is None:
                    raise Refused(Status.KEY_ENOENT)
                self._deletes = True
            else:
                content.body = spec.value
                _, content.datatype = checked_value(spec.value, Datatype.JSON, self._call.node.settings)
            return b""
        path = parse_path(spec.path)
        if spec.opcode == _BODY_FROM_XATTR:
            return self._replace_body(path)
        try:
            fragment = spec.value.decode()
        except UnicodeDecodeError:
            raise SubdocError(Status.SUBDOC_VALUE_CANTINSERT, "the value is not JSON") from None
        mutation, flags = MUTATIONS[spec.opcode], spec.flags
        if self._doc_flags & (_UPSERT | _ADD):
            flags |= _PARENTS  # docs/spec/servers.md#sub-document-requests: both imply it, on every path
        if spec.on_xattrs:
            if _xattr_name(path).startswith("$"):
                raise SubdocError(Status.SUBDOC_XATTR_CANT_MODIFY_VATTR)
            if spec.flags & _EXPAND:
                fragment = self._expanded(fragment)
            text, result = mutation(content.xattr_text(), path, fragment, flags)
            content.set_xattr_text(text)
        else:
            if self._as_deleted:
                raise SubdocError(Status.SUBDOC_DELETED_DOCUMENT_CANT_HAVE_VALUE)
            if not content.body and (content.document is None or content.deleted):
                content.body = new_root(path).encode()
                content.datatype = Datatype.JSON
            text, result = mutation(content.body_text(), path, fragment, flags)
            content.body = text.encode()
        return result.encode()

    def _replace_body(self, path: Path) -> bytes:
        """A transaction's staged value becomes the document."""
        if self._as_deleted:
            raise SubdocError(Status.SUBDOC_DELETED_DOCUMENT_CANT_HAVE_VALUE)
        if _xattr_name(path).startswith("$"):
            raise SubdocError(Status.SUBDOC_XATTR_CANT_MODIFY_VATTR)
        content = self.content
        content.body = LOOKUPS[Op.SUBDOC_GET](content.xattr_text(), path).encode()
        content.datatype = Datatype.JSON
        return b""

    def _expanded(self, macro: str) -> str:
        """What a macro stands for; one about the mutation itself is replaced when that is written."""
        if macro in MACROS:
            self._macros = True
            return macro
        if (name := document_macro(macro)) is None:
            raise SubdocError(Status.SUBDOC_XATTR_UNKNOWN_MACRO)
        facts = document_facts(self._vbucket, self.content.document, self._body_before)
        if name and name not in facts:
            raise SubdocError(Status.SUBDOC_XATTR_UNKNOWN_VATTR_MACRO)
        return json.dumps(facts[name] if name else facts)

    def write(self, expiry: int | None) -> Written:
        """Write the new version."""
        call, vbucket, key, content = self._call, self._vbucket, self._key, self.content
        old = content.document
        cas = 0
        if self._macros:
            cas = call.bucket.store.next_cas()
            expand(content.xattrs, vbucket, content.body, cas)
        if content.xattrs:
            call.bucket.xattrs_seen = True
        if self._deletes or self._as_deleted:
            kept = system_xattrs(content.xattrs) if self._deletes else content.xattrs
            return self._write_deleted(kept, cas)
        new_expiry = old.expiry if old is not None and not old.deleted else 0
        if expiry is not None and not (call.preserve_ttl and old is not None):
            new_expiry = call.expiry(expiry)
        if not content.body and (old is None or old.deleted):
            content.body, content.datatype = b"{}", Datatype.JSON
        value, datatype = content.body, content.datatype & Datatype.JSON
        if content.xattrs:
            value, datatype = join_xattrs(content.xattrs, content.body), datatype | Datatype.XATTR
        if len(content.body) > call.node.settings.max_value:
            raise Refused(Status.E2BIG, too_large(len(content.body), call.node.settings))
        if cas:
            flags, rev = (0, 0) if old is None else (old.flags, old.rev)
            wanted = call.request.cas
            return vbucket.set_with_meta(
                key, value, flags, new_expiry, rev + 1, cas, int(datatype), cas=wanted, resolve=False
            )
        if old is None or old.deleted:
            return vbucket.add(key, value, 0, new_expiry, int(datatype))
        return vbucket.replace(key, value, old.flags, new_expiry, int(datatype), call.request.cas)

    def _write_deleted(self, xattrs: dict[str, bytes], cas: int) -> Written:
        """Write a tombstone with these xattrs, and with this CAS if it is not 0."""
        call, old = self._call, self.content.document
        if self._vbucket.is_locked(self._key):
            raise Refused(Status.LOCKED)
        return self._vbucket.delete_with_meta(
            self._key,
            0,
            call.node.clock.time_ns() // 1_000_000_000,
            1 if old is None else old.rev + 1,
            cas,
            join_xattrs(xattrs, b"") if xattrs else b"",
            int(Datatype.XATTR) if xattrs else 0,
            cas=call.request.cas if old is not None and not old.deleted else 0,
            resolve=False,
            regenerate_cas=not cas,
        )
