"""Greeting, login and whatever else a connection asks about itself and the server.

Rules: docs/spec/header.md#connection-commands.
"""

from __future__ import annotations

import json
import logging

from ... import __version__
from ...protocol.handshake import grant_features
from ...protocol.sasl import MECHANISMS
from ...wire import admin
from ...wire.codes import Datatype, Feature, Op, Status
from ...wire.header import MAX_NAME_BYTES
from .. import stats
from ..bucket import ServedBucket
from ..call import Call, Refused, Reply, command, encode_response
from ..errormap import error_map
from ..features import OFFERED

log = logging.getLogger("tailrace.server")

_COMPATIBLE = "7.6.0"
"""Clients read a server's version from the start of the text, and choose by it what they send."""


@command(admin.Hello, needs_bucket=False)
def hello(call: Call[admin.Hello]) -> Reply:
    """Clears the features of an earlier hello, then grants those asked for that we have."""
    request, session = call.request, call.session
    if session.unfinished and Feature.UNORDERED_EXECUTION in session.features:
        raise Refused(Status.NOT_SUPPORTED, "wait for the answers to the commands before")
    granted = grant_features(request.features, OFFERED)
    session.set_features(granted)
    session.name = _client_name(request.key)
    return call.success(value=b"".join(code.to_bytes(2, "big") for code in granted))


def _client_name(key: bytes) -> str:
    """The client's name for the log: as it was sent, or member ``a`` of a JSON object."""
    text = key.decode("utf-8", "backslashreplace")
    if text.startswith("{"):
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            content = {}
        agent = content.get("a", "") if isinstance(content, dict) else ""
        text = agent if isinstance(agent, str) else ""
    # one line, whatever the client sent
    return text[:MAX_NAME_BYTES].encode("unicode_escape").decode("ascii")


@command(admin.SaslListMechs, needs_bucket=False)
def list_mechanisms(call: Call[admin.SaslListMechs]) -> Reply:
    """The strongest first."""
    return call.success(value=" ".join(MECHANISMS).encode())


@command(admin.SaslAuth, admin.SaslStep, needs_bucket=False)
def login(call: Call[admin.SaslAuth]) -> Reply:
    """One step of a login; the answer says whether there is another."""
    request, session = call.request, call.session
    call.node.counters.auth_cmds += 1
    if session.handler is not None:
        raise Refused(Status.NOT_SUPPORTED, "a change stream belongs to the user who opened it")
    if (bucket := _bucket_of_old_tool(call)) is not None:
        session.bucket, session.known_map = bucket, None
        session.login_done(ok=True)
        return call.success()
    sasl = session.login.sasl
    step = sasl.step if request.OPCODE == Op.SASL_STEP else sasl.auth
    answer = step(request.key, request.value)
    if answer.status == Status.AUTH_CONTINUE:
        session.login_begun()
    else:
        session.login_done(ok=answer.status == Status.SUCCESS)
    return encode_response(request.OPCODE, request.opaque, answer.status, value=answer.value)


def _bucket_of_old_tool(call: Call[admin.SaslAuth]) -> ServedBucket | None:
    """Old tools log in with a bucket's name and an empty password, and are then in that bucket. A node with
    users does not support that: there a name is a user's.
    """
    request = call.request
    if call.node.needs_login or request.OPCODE != Op.SASL_AUTH or request.key != b"PLAIN":
        return None
    _, _, login = request.value.partition(b"\0")
    name, zero, password = login.partition(b"\0")
    return call.node.buckets.get(name.decode("utf-8", "replace")) if zero and not password else None


@command(admin.Quit, admin.QuitQ, needs_bucket=False)
def quit_(call: Call[admin.Quit]) -> Reply:
    """Answered, then the connection is closed."""
    call.session.finish("the peer quit")
    return call.success()


@command(admin.Noop, needs_bucket=False)
def noop(call: Call[admin.Noop]) -> Reply:
    return call.success()


@command(admin.Version, needs_bucket=False)
def version(call: Call[admin.Version]) -> Reply:
    return call.success(value=f"{_COMPATIBLE}-tailrace-{__version__}".encode())


@command(admin.Verbosity, needs_bucket=False)
def verbosity(call: Call[admin.Verbosity]) -> Reply:
    """Accepted and ignored: the node's log is its operator's."""
    return call.success()


@command(admin.GetErrorMap, needs_bucket=False)
def get_error_map(call: Call[admin.GetErrorMap]) -> Reply:
    text = error_map(call.request.version)
    if text is None:
        raise Refused(Status.KEY_ENOENT, "there is no version 0 of the error map")
    return call.success(value=text, datatype=Datatype.JSON & call.session.datatypes)


@command(admin.Stat, needs_bucket=False)
def stat(call: Call[admin.Stat]) -> Reply:
    """One packet per figure, then an empty one."""
    request = call.request
    text = request.key.decode("utf-8", "replace")
    packets = [
        encode_response(request.OPCODE, request.opaque, key=name.encode(), value=str(value).encode())
        for name, value in stats.group(call.node, call.session.bucket, text)
    ]
    packets.append(call.success())
    return b"".join(packets)


@command(admin.SelectBucket, needs_bucket=False)
def select_bucket(call: Call[admin.SelectBucket]) -> Reply:
    """Binds the connection to a bucket; ``@no bucket@`` unbinds it."""
    session = call.session
    if session.handler is not None:
        raise Refused(Status.NOT_SUPPORTED, "a change stream is bound to its bucket")
    if session.unfinished:
        raise Refused(Status.NOT_SUPPORTED, "wait for the answers to the commands before")
    name = call.request.key.decode("utf-8", "replace")
    if name == "@no bucket@":
        session.bucket = None
        session.bucket_selected = False
        return call.success()
    bucket = call.node.buckets.get(name)
    if bucket is None:
        # SDKs take "no access" for "no such bucket" and give up. They take "not found" for "not yet" and try
        # again until their timeout: docs/spec/bootstrap.md#answers-that-suit-everybody.
        extended = Feature.XERROR in session.features
        raise Refused(Status.EACCESS if extended else Status.KEY_ENOENT, "there is no such bucket")
    if session.bucket is not bucket:
        session.known_map = None
    session.bucket = bucket
    session.bucket_selected = True
    return call.success()
