"""HTTP, as much of it as is needed: one request a connection, understood, and one response.

Sans-IO: a `HttpRequestBuffer` takes what comes and an `HttpService` answers it, on the node's own port (see
`management`), on the port of the page, and beside commands that have no node (`tailrace.web`).
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import parse_qs

__all__ = [
    "HTTP_STARTS",
    "HttpAnswer",
    "HttpContent",
    "HttpRequest",
    "HttpRequestBuffer",
    "HttpService",
    "basic_login",
    "http_error",
    "respond_to",
    "response",
]

HTTP_STARTS = frozenset(b"GPHDO")
"""First letters of HTTP's methods; no frame of ours begins with one."""
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
    """What is answered."""

    kind: str
    body: bytes
    status: int = 200

    @classmethod
    def of_json(cls, content: Any, status: int = 200) -> HttpContent:
        return cls("application/json", json.dumps(content).encode() + b"\n", status)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request, understood."""

    method: str
    """GET where it was HEAD, too."""
    path: str
    user: str
    form: dict[str, str]
    """The fields of a body that is a form."""
    query: dict[str, str]
    """The fields behind the question mark."""
    body: bytes
    authorization: str
    with_body: bool = True
    """Whether the response has one."""


HttpAnswer: TypeAlias = "HttpContent | Awaitable[HttpContent] | None"
"""None: there is nothing at the path."""


@dataclass(frozen=True, slots=True)
class HttpService:
    """Who answers."""

    serve: Callable[[HttpRequest], HttpAnswer]
    login: Callable[[str], str | None]
    """Who it is that sends this ``Authorization``; None: nobody who may."""
    is_open: Callable[[str], bool] = lambda _path: False
    """Whether a path needs no login."""


def basic_login(check_password: Callable[[str, str], bool], authorization: str) -> str | None:
    """Who logs in with Basic authentication."""
    scheme, _, encoded = authorization.partition(" ")
    try:
        text = base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    user, _, password = text.partition(":")
    return user if scheme.lower() == "basic" and check_password(user, password) else None


class HttpRequestBuffer:
    """A request that comes in pieces."""

    __slots__ = ("_data", "_need")

    def __init__(self) -> None:
        self._data = b""
        self._need: int | None = None

    def add(self, data: bytes) -> bool:
        """More has come; whether all of the request is there, or as much as is looked at."""
        self._data += data
        if self._need is None:
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return len(self._data) > MAX_HEAD_BYTES
            self._need = end + 4 + min(_body_bytes(self._data[:end]), MAX_BODY_BYTES + 1)
        return len(self._data) >= self._need

    def understood(self, service: HttpService) -> HttpRequest | HttpContent | None:
        """The request, or what is wrong with it; None for one without end."""
        if self._need is None:
            return None
        head, _, body = self._data[: self._need].partition(b"\r\n\r\n")
        return _understood(head, body, service)

    def answer(self, service: HttpService) -> bytes:
        """The whole response, where nothing takes time; nothing for a request without end."""
        if self._need is None:
            return b""
        head, _, body = self._data[: self._need].partition(b"\r\n\r\n")
        return respond_to(head, body, service)


def respond_to(head: bytes, body: bytes, service: HttpService) -> bytes:
    """The response to a request, where nothing takes time."""
    request = _understood(head, body, service)
    if isinstance(request, HttpContent):
        return response(request)
    content = service.serve(request)
    assert content is None or isinstance(content, HttpContent)
    return response(content, with_body=request.with_body)


def _understood(head: bytes, body: bytes, service: HttpService) -> HttpRequest | HttpContent:
    text = head.decode("latin-1")
    words = text.partition("\r\n")[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return http_error(400, "this is no HTTP request")
    if len(body) > MAX_BODY_BYTES:
        return http_error(413, f"a body of more than {MAX_BODY_BYTES} bytes")
    method, target, _ = words
    path, _, query = target.partition("?")
    authorization = _header(text, "authorization")
    user = "" if service.is_open(path) else service.login(authorization)
    if user is None:
        return http_error(401, "log in with Basic authentication")
    if method not in ("GET", "HEAD") and _is_cross_site(text):
        return http_error(403, "a page of somebody else may not change anything here")
    try:
        form, asked = _fields(body.decode("utf-8", "replace")), _fields(query)
    except ValueError:
        return http_error(400, f"a form of more than {_MAX_FIELDS} fields")
    is_head = method == "HEAD"
    return HttpRequest(
        "GET" if is_head else method, path, user, form, asked, body, authorization, with_body=not is_head
    )


def _is_cross_site(head: str) -> bool:
    """Whether a browser sends this for a page that is not ours: it would send the user's login along. Others
    have neither header.
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
    """The one shape of errors."""
    return HttpContent.of_json({"error": text}, status)


def response(content: HttpContent | None, *, with_body: bool = True) -> bytes:
    """What goes out."""
    if content is None:
        content = http_error(404, "there is nothing here")
    status = content.status
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\n"
        f"Content-Type: {content.kind}\r\n"
        f"Content-Length: {len(content.body)}\r\n"
        "Cache-Control: no-store\r\n"
        f"Content-Security-Policy: {_POLICY}\r\n"
        "X-Content-Type-Options: nosniff\r\n"
        + ('WWW-Authenticate: Basic realm="tailrace"\r\n' if status == 401 else "")
        + "Connection: close\r\n\r\n"
    )
    return head.encode() + (content.body if with_body else b"")
