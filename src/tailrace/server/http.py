"""HTTP, as much of it as is needed: one parsed request per connection, and one response, which may have no
end.

Sans-IO: an `HttpRequestBuffer` takes what comes and an `HttpService` answers it, on the node's own port (see
`management`), on the port of the page, and beside commands that have no node (`tailrace.web`).
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import ipaddress
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import parse_qs

__all__ = [
    "HTTP_STARTS",
    "LAST_CHUNK",
    "STREAM_POLL_S",
    "STREAM_UNREAD_BYTES",
    "HttpAnswer",
    "HttpContent",
    "HttpRequest",
    "HttpRequestBuffer",
    "HttpService",
    "HttpStream",
    "HttpStreaming",
    "basic_login",
    "http_error",
    "is_address",
    "response",
    "stream_head",
]

STREAM_POLL_S = 0.25
"""How often `HttpStreaming` is asked for its next part."""
STREAM_UNREAD_BYTES = 1 << 20
"""A peer that leaves this much of a stream unread is not waited for."""
LAST_CHUNK = b"0\r\n\r\n"
_SEPARATOR = b"\n\n\n\n"
HTTP_STARTS = frozenset(b"GPHDO")
"""First letters of HTTP methods; no frame of ours begins with one."""
MAX_HEAD_BYTES = 8 << 10
MAX_BODY_BYTES = 64 << 10
_MAX_FIELDS = 20
# The page brings all that it needs, and nothing that a peer has sent can make it fetch more.
_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; "
    "script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'"
)
_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    409: "Conflict",
    413: "Content Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class HttpContent(NamedTuple):
    """The content of an answer."""

    kind: str
    body: bytes
    status: int = 200

    @classmethod
    def of_json(cls, content: Any, status: int = 200) -> HttpContent:
        return cls("application/json", json.dumps(content).encode() + b"\n", status)


class HttpStream(NamedTuple):
    """An answer without an end: JSON now, and again whenever it changes."""

    text: Callable[[], bytes | None]
    """The JSON as it is now; None: there is no more."""
    heartbeat_s: float = 0.0
    """After this long without anything new, a sign of life; 0: none."""
    with_body: bool = True


class HttpStreaming:
    """The chunks of one such answer; four newlines after each text: docs/spec/servers.md#management-http."""

    __slots__ = ("_last", "_said_at", "_stream")

    def __init__(self, stream: HttpStream) -> None:
        self._stream = stream
        self._last: bytes | None = None
        self._said_at = 0.0

    def next_part(self, now: float) -> bytes | None:
        """What to send now, if anything; None when it is over and `LAST_CHUNK` is to be sent."""
        text = self._stream.text()
        if text is None:
            return None
        if text != self._last:
            self._last, self._said_at = text, now
            return _chunk(text) + _chunk(_SEPARATOR)
        if self._stream.heartbeat_s and now - self._said_at >= self._stream.heartbeat_s:
            self._said_at = now
            return _chunk(_SEPARATOR)
        return b""


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A parsed request."""

    method: str
    """GET for HEAD, too."""
    path: str
    user: str
    form: dict[str, str]
    """The fields of a body that is a form."""
    query: dict[str, str]
    """The fields after the question mark."""
    body: bytes
    authorization: str
    with_body: bool = True
    """Whether the response has one."""


HttpAnswer: TypeAlias = "HttpContent | HttpStream | Awaitable[HttpContent] | None"
"""None: there is nothing at the path."""


@dataclass(frozen=True, slots=True)
class HttpService:
    """What answers requests."""

    serve: Callable[[HttpRequest], HttpAnswer]
    login: Callable[[str], str | None]
    """The user who sends this ``Authorization``; None: it is refused."""
    is_open: Callable[[str], bool] = lambda _path: False
    """Whether a path needs no login."""
    is_host: Callable[[str], bool] = lambda _name: True
    """Whether the service may be reached under this name; see `is_address`."""


def basic_login(check_password: Callable[[str, str], bool], authorization: str) -> str | None:
    """The user who logs in with Basic authentication; None if that fails."""
    scheme, _, encoded = authorization.partition(" ")
    try:
        text = base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    user, _, password = text.partition(":")
    return user if scheme.lower() == "basic" and check_password(user, password) else None


class HttpRequestBuffer:
    """A request that arrives in pieces."""

    __slots__ = ("_data", "_need")

    def __init__(self) -> None:
        self._data = b""
        self._need: int | None = None

    def add(self, data: bytes) -> bool:
        """Take more data; return whether the request is complete, or as much of it as is looked at."""
        self._data += data
        if self._need is None:
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return len(self._data) > MAX_HEAD_BYTES
            self._need = end + 4 + min(_body_bytes(self._data[:end]), MAX_BODY_BYTES + 1)
        return len(self._data) >= self._need

    def understood(self, service: HttpService) -> HttpRequest | HttpContent | None:
        """The request, or the error that answers it; None if its head does not end."""
        if self._need is None:
            return None
        head, _, body = self._data[: self._need].partition(b"\r\n\r\n")
        return _understood(head, body, service)

    def answer(self, service: HttpService) -> bytes | HttpStream:
        """The whole response of a service that answers at once; empty if the request's head does not end."""
        request = self.understood(service)
        if request is None:
            return b""
        if isinstance(request, HttpContent):
            return response(request)
        content = service.serve(request)
        if isinstance(content, HttpStream):
            return content._replace(with_body=request.with_body)
        assert content is None or isinstance(content, HttpContent)
        return response(content, with_body=request.with_body)


def _understood(head: bytes, body: bytes, service: HttpService) -> HttpRequest | HttpContent:
    text = head.decode("latin-1")
    words = text.partition("\r\n")[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return http_error(400, "this is not an HTTP request")
    if len(body) > MAX_BODY_BYTES:
        return http_error(413, f"a body of more than {MAX_BODY_BYTES} bytes")
    method, target, _ = words
    path, _, query = target.partition("?")
    authorization = _header(text, "authorization")
    host = _host_name(_header(text, "host"))
    if not service.is_host(host):
        return http_error(
            403, f"{host[:100]!r} is not served here: use an address or localhost, or configure users"
        )
    user = "" if service.is_open(path) else service.login(authorization)
    if user is None:
        return http_error(401, "log in with Basic authentication")
    if method not in ("GET", "HEAD") and _is_cross_site(text):
        return http_error(403, "a page of another site may not change anything here")
    try:
        form, asked = _fields(body.decode("utf-8", "replace")), _fields(query)
    except ValueError:
        return http_error(400, f"a form of more than {_MAX_FIELDS} fields")
    is_head = method == "HEAD"
    return HttpRequest(
        "GET" if is_head else method, path, user, form, asked, body, authorization, with_body=not is_head
    )


def _host_name(header: str) -> str:
    """The name or address in a Host header, without the port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()


def is_address(host: str) -> bool:
    """Whether a name in a Host header can only mean this machine's address. Where nobody logs in, others are
    refused: another site can make its own name resolve to this address (DNS rebinding), and its page would be
    let in as if it were ours. Programs that send no Host at all are not browsers.
    """
    if not host or host == "localhost" or host.endswith(".localhost"):
        return True
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False


def _is_cross_site(head: str) -> bool:
    """Whether a browser sends this for a page that is not ours: it would send the user's login along. Other
    clients send neither header.
    """
    if site := _header(head, "sec-fetch-site"):
        return site not in ("same-origin", "none")
    origin = _header(head, "origin")
    return bool(origin) and origin.partition("://")[2].lower() != _header(head, "host").lower()


def _fields(text: str) -> dict[str, str]:
    fields = parse_qs(text, keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    return {name: values[-1] for name, values in fields.items()}


def _body_bytes(head: bytes) -> int:
    text = _header(head.decode("latin-1"), "content-length")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def _header(head: str, wanted: str) -> str:
    for line in head.split("\r\n")[1:]:
        name, _, value = line.partition(":")
        if name.lower() == wanted:
            return value.strip()
    return ""


def http_error(status: int, text: str) -> HttpContent:
    """An error, in the one shape that they have."""
    return HttpContent.of_json({"error": text}, status)


def stream_head() -> bytes:
    """What goes out before the chunks of an `HttpStream`."""
    return _head(200, "application/json", "Transfer-Encoding: chunked").encode()


def response(content: HttpContent | None, *, with_body: bool = True) -> bytes:
    """The response as bytes."""
    if content is None:
        content = http_error(404, "there is nothing here")
    head = _head(content.status, content.kind, f"Content-Length: {len(content.body)}")
    return head.encode() + (content.body if with_body else b"")


def _head(status: int, kind: str, length: str) -> str:
    return (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\n"
        f"Content-Type: {kind}\r\n"
        f"{length}\r\n"
        "Cache-Control: no-store\r\n"
        f"Content-Security-Policy: {_POLICY}\r\n"
        "X-Content-Type-Options: nosniff\r\n"
        + ('WWW-Authenticate: Basic realm="tailrace"\r\n' if status == 401 else "")
        + "Connection: close\r\n\r\n"
    )
