"""Options of commands that also serve HTTP while they work: figures, metrics and health."""

from __future__ import annotations

import contextlib
import logging
import ssl
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..connstr import Address
from ..errors import UsageError
from ..logs import log_event
from .common import EXISTING_FILE, Integer, cant_listen, note
from .signals import on_hangup

if TYPE_CHECKING:
    from ..web import HttpFigures
    from ..web.reader_figures import ReaderFigures

__all__ = ["http_options", "reading_over_http", "serving_http"]

_log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])

_PARAMETERS = ("http_port", "http_host", "http_users", "http_users_file", "http_cert", "http_key")


def http_options(function: F) -> F:
    """The options; they go into ``**options``, see `serving_http`."""
    for option in (
        click.option("--http-key", type=EXISTING_FILE, help="Private key of --http-cert, PEM."),
        click.option("--http-cert", type=EXISTING_FILE, help="Certificate chain, PEM; turns HTTPS on."),
        click.option(
            "--http-users-file", type=EXISTING_FILE, help="A file with a NAME:PASSWORD on each line."
        ),
        click.option(
            "--http-user",
            "http_users",
            multiple=True,
            metavar="NAME:PASSWORD",
            help="A user who may read figures here; may be repeated.  [default: everybody on this machine]",
        ),
        click.option("--http-host", default="127.0.0.1", show_default=True, help="Address of --http-port."),
        click.option(
            "--http-port",
            type=Integer(0, 65535),
            help="Serve web page, JSON, /metrics, /healthz and /readyz on this port; 0 picks a free one.",
        ),
    ):
        function = option(function)
    return function


@contextlib.contextmanager
def serving_http(options: dict[str, Any], figures: HttpFigures) -> Iterator[None]:
    """Serve HTTP while the block runs, if asked to."""
    from .serve import is_loopback, tls_context, users_from

    port, host, users, users_file, cert, key = (options.pop(name) for name in _PARAMETERS)
    if port is None:
        yield
        return
    from ..web import HttpOptions, HttpThread

    who = users_from(users, users_file, option="--http-users-file")
    if not who and not is_loopback(host, option="--http-host"):
        raise UsageError(f"--http-host {host} is open to others, so add users with --http-user NAME:PASSWORD")
    context: ssl.SSLContext | None = tls_context(cert, key, names=("--http-cert", "--http-key"))
    try:
        beside = HttpThread(HttpOptions(port, host, who, context), figures)
    except OSError as error:
        raise cant_listen(host, port, error, "--http-port") from None

    def reload() -> None:
        try:
            again = users_from(users, users_file, option="--http-users-file")
            if bool(again) != bool(who):
                raise UsageError("whether users have to log in is decided at the start: restart the command")
            tls_context(cert, key, names=("--http-cert", "--http-key"))
        except (UsageError, OSError) as error:
            log_event(_log, logging.ERROR, "reload_failed", reason=str(error))
            return
        beside.replace(again, None if cert is None else (cert, key))
        log_event(_log, logging.INFO, "reloaded", users=len(again), certificate=str(cert is not None).lower())

    has_files = users_file is not None or cert is not None
    with beside, on_hangup(reload) if has_files else contextlib.nullcontext():
        note(f"figures on http{'s' if context else ''}://{Address(host, beside.port)}")
        yield


def chosen(options: dict[str, Any]) -> bool:
    """Whether HTTP was asked for."""
    return options["http_port"] is not None


@contextlib.contextmanager
def reading_over_http(options: dict[str, Any], name: str, bucket: str) -> Iterator[dict[str, Any]]:
    """Serve the figures of a command that reads a bucket; yields the arguments that `connect` needs."""
    if not chosen(options):
        for parameter in _PARAMETERS:
            del options[parameter]
        yield {}
        return
    from ..web import HttpFigures
    from ..web.reader_figures import ReaderFigures

    reader: ReaderFigures = ReaderFigures(name, bucket)
    figures = HttpFigures("reader", reader.stats, reader.metrics, reader.why_not_ready, reader.sample)
    with serving_http(options, figures):
        yield {"on_open": reader.watch}
