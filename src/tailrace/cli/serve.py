"""``tailrace serve``: a node in the foreground."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import json
import logging
import os
import shutil
import socket
import ssl
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .. import paths
from ..connstr import Address
from ..errors import StoreError, UsageError, reason_of
from ..units import format_size
from .common import DIRECTORY, EXISTING_FILE, FILE, SIZE, Integer, cant_listen
from .common import command as make_command
from .signals import HANGUP, STOPS, on_signal, run_loop

if TYPE_CHECKING:
    from ..server.aio import Server
    from ..server.allocator import FreeMemory
    from ..server.served_map import AlternateAddress
    from ..server.settings import Settings
    from ..store.base import StoreSettings
    from ..store.engine import Engine

_log = logging.getLogger(__name__)
_VBUCKETS = 1024
_GIVE_BACK_S = 5.0
_IDLE_BYTES = 64 << 10
"""A node that moves less than this in that interval is idle."""
_MAX_USERS = 10_000
_MAX_USERS_FILE = 1 << 20


@dataclass(frozen=True, slots=True)
class _ReloadedFiles:
    """What is read again on SIGHUP, with the users that the command line names itself."""

    users: tuple[str, ...]
    users_file: Path | None
    tls_cert: Path | None
    tls_key: Path | None


@dataclass(frozen=True, slots=True)
class _Options:
    """The options of the command line, parsed."""

    host: str
    port: int
    data: Path | None
    accept_loss: bool
    buckets: tuple[str, ...]
    vbuckets: int | None
    users: dict[str, str]
    files: _ReloadedFiles
    tls: ssl.SSLContext | None
    tls_port: int
    web_port: int | None
    alternates: tuple[AlternateAddress, ...]
    fault_token: str | None
    ready_file: Path | None
    fenced: bool
    settings: Settings


@make_command(
    "serve",
    example="""
tailrace serve
tailrace serve --memory --port 0 --vbuckets 64 --ready-file node.json
tailrace serve --host 0.0.0.0 --user app:secret --data /var/lib/tailrace --set idle_timeout=10m
""",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=Integer(0, 65535), default=11210, show_default=True, help="Port; 0 picks a free one."
)
@click.option(
    "--data",
    type=DIRECTORY,
    help="Directory for the documents.  [default: ./tailrace-data]",
)
@click.option("--memory", is_flag=True, help="Keep the documents in memory only.")
@click.option(
    "--accept-loss",
    is_flag=True,
    help="Start even if files in --data are missing or damaged, without the data they held.",
)
@click.option(
    "--bucket",
    "buckets",
    multiple=True,
    metavar="NAME",
    help="Bucket to serve; may be repeated.  [default: default]",
)
@click.option(
    "--vbuckets",
    type=Integer(1, 1024),
    help="Number of vbuckets of a new bucket, a power of two.  [default: 1024]",
)
@click.option(
    "--user", "users", multiple=True, metavar="NAME:PASSWORD", help="A user who may log in; may be repeated."
)
@click.option(
    "--users-file",
    type=EXISTING_FILE,
    help="A file with a NAME:PASSWORD on each line.",
)
@click.option("--tls-cert", type=EXISTING_FILE, help="Certificate chain, PEM.")
@click.option("--tls-key", type=EXISTING_FILE, help="Private key of --tls-cert, PEM.")
@click.option("--tls-port", type=Integer(0, 65535), help="Port for TLS.  [default: 11207 with --tls-cert]")
@click.option(
    "--http-port",
    "--web-port",
    "web_port",
    type=Integer(0, 65535),
    help="Serve web page, JSON, /metrics, /healthz and /readyz on this port, by HTTPS with --tls-cert; "
    "0 picks a free one.",
)
@click.option(
    "--alternate-address",
    "alternates",
    multiple=True,
    metavar="NETWORK=HOST[:PORT[:TLS_PORT]]",
    help="Where clients on another network reach the node; may be repeated.",
)
@click.option(
    "--fault-token",
    metavar="TOKEN",
    help="For tests: a client that sends this token to --http-port may rewind, delay and break the node.",
)
@click.option(
    "--memory-quota", type=SIZE, help="Memory for checkpoints, buffers and caches.  [default: 256m]"
)
@click.option(
    "--ready-file",
    type=FILE,
    help="Write port and pid here as JSON once the node accepts connections.",
)
@click.option("--fenced", is_flag=True, help="Serve nothing until a coordinator has sent a cluster map.")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set a limit or interval; '--set help' lists them.",
)
def command(  # the options, in the order of the help
    host: str,
    port: int,
    data: Path | None,
    memory: bool,
    accept_loss: bool,
    buckets: tuple[str, ...],
    vbuckets: int | None,
    users: tuple[str, ...],
    users_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_port: int | None,
    web_port: int | None,
    alternates: tuple[str, ...],
    fault_token: str | None,
    memory_quota: int | None,
    ready_file: Path | None,
    fenced: bool,
    assignments: tuple[str, ...],
) -> int | None:
    """Run a node: embedded store, key-value front end and change streams.

    Without users nobody has to log in, and the node listens on loopback only.
    """
    from ..server.settings import Settings, table
    from ..store.engine import check_bucket_name

    if "help" in assignments:
        for setting in table():
            click.echo(str(setting))
        return None
    settings = Settings.parse(assignments)
    if memory_quota is not None:
        settings.memory_quota = memory_quota
    if memory and data is not None:
        raise UsageError("--data and --memory exclude each other")
    if memory and accept_loss:
        raise UsageError("--accept-loss is about files, and --memory has none: leave one of them out")
    for name in buckets:
        check_bucket_name(name)
    if vbuckets is not None and vbuckets & (vbuckets - 1):
        raise UsageError(f"--vbuckets {vbuckets} is not a power of two, write one from 1 to 1024")
    if fault_token is not None and (web_port is None or not fault_token):
        raise UsageError("--fault-token needs --http-port, and must not be empty")
    who = users_from(users, users_file)
    if not who and not is_loopback(host):
        raise UsageError(f"--host {host} is open to others, so add users with --user NAME:PASSWORD")
    options = _Options(
        host=host,
        port=port,
        data=None if memory else data or paths.directory("tailrace-data"),
        accept_loss=accept_loss,
        buckets=tuple(dict.fromkeys(buckets)) or ("default",),
        vbuckets=vbuckets,
        users=who,
        files=_ReloadedFiles(users, users_file, tls_cert, tls_key),
        tls=_tls_context(tls_cert, tls_key, tls_port),
        tls_port=11207 if tls_port is None else tls_port,
        web_port=web_port,
        alternates=_alternates(alternates),
        fault_token=fault_token,
        ready_file=ready_file,
        fenced=fenced,
        settings=settings,
    )
    _raise_file_limit(settings.max_connections)
    _tune_interpreter()
    run_loop(_serve(options))
    return None


# options


def users_from(given: tuple[str, ...], file: Path | None, option: str = "--users-file") -> dict[str, str]:
    """Names and passwords, from the command line and from a file."""
    lines = [("", line) for line in given]
    if file is not None:
        if file.stat().st_size > _MAX_USERS_FILE:
            raise UsageError(f"{option} {str(file)!r} is too large, it has more than {_MAX_USERS_FILE} bytes")
        try:
            text = file.read_text("utf-8")
        except UnicodeDecodeError:
            raise UsageError(f"{option} {str(file)!r} is not UTF-8") from None
        lines += [
            (f"line {number} of {str(file)!r}: ", line)
            for number, line in enumerate(text.splitlines(), 1)
            if line.strip() and not line.startswith("#")
        ]
    users: dict[str, str] = {}
    for where, line in lines:
        name, colon, password = line.partition(":")
        # never the line itself: it may be a password
        if not colon or not name or not password or "\0" in line or len(line) > 1024:
            raise UsageError(f"{where}a user is written NAME:PASSWORD, both not empty")
        if users.setdefault(name, password) != password:
            raise UsageError(f"user {name!r} is given twice, with different passwords")
    if len(users) > _MAX_USERS:
        raise UsageError(f"there are more than {_MAX_USERS} users")
    return users


def is_loopback(host: str, option: str = "--host") -> bool:
    """Whether only this machine can reach the host; all addresses of a name must be loopback."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    if not host:
        return False
    try:
        resolved = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"{option} {host!r} is not an address of this machine: {reason_of(error)}") from None
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in resolved)


def _tls_context(cert: Path | None, key: Path | None, port: int | None) -> ssl.SSLContext | None:
    if cert is None and key is None and port is not None:
        raise UsageError("--tls-port needs --tls-cert and --tls-key")
    return tls_context(cert, key)


def tls_context(
    cert: Path | None, key: Path | None, names: tuple[str, str] = ("--tls-cert", "--tls-key")
) -> ssl.SSLContext | None:
    """A server's TLS context; None if neither file is given. ``names`` are the options' names."""
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        given, missing = names if key is None else names[::-1]
        what = "the certificate's private key" if key is None else "the certificate chain"
        raise UsageError(f"{given} needs {missing} FILE, {what} in PEM")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for file in (cert, key):
        file.open("rb").close()  # ssl does not say which file it can't read
    try:
        context.load_cert_chain(cert, key)
    except ssl.SSLError as error:
        raise UsageError(
            f"{names[0]} {str(cert)!r} and {names[1]} {str(key)!r} are not a certificate and its key in PEM: "
            f"{error.reason or error}"
        ) from None
    return context


def _alternates(texts: tuple[str, ...]) -> tuple[AlternateAddress, ...]:
    from ..server.served_map import AlternateAddress

    parsed = tuple(map(AlternateAddress.parse, texts))
    if len({address.network for address in parsed}) < len(parsed):
        raise UsageError("--alternate-address names a network twice; a node has one address on each")
    return parsed


def _raise_file_limit(connections: int) -> None:
    """Raise the limit on open files: every connection is one, and the soft limit is often 1,024."""
    try:
        import resource
    except ImportError:
        return  # Windows, where there is no such limit
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 1024
    if soft != resource.RLIM_INFINITY and soft < wanted:
        new = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (new, hard))


def _tune_interpreter() -> None:
    """Tune the interpreter for a server. By default, full garbage collections run and find nothing, the event
    loop waits 5 ms at every system call while a job computes on its thread, and each block that a stream
    reads takes new memory.

    The two younger generations are collected so often that each time takes a few milliseconds at most: the
    streams of a closed connection refer to each other, and freeing 50,000 objects at once holds up all
    connections for 40 ms and more.
    """
    from ..server.allocator import keep_buffers

    keep_buffers()
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 5, 5_000)
    sys.setswitchinterval(0.000_5)


# the node


async def _serve(options: _Options) -> None:
    from ..server.allocator import FreeMemory

    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as handlers:
        for number in STOPS:
            handlers.enter_context(on_signal(loop, number, stopped.set))
        server, web_port = await _start(options)
        _give_memory_back(loop, server, FreeMemory(), 0)
        if HANGUP is not None and (options.files.users_file is not None or options.tls is not None):
            reloading = _Reloading(server, options)
            handlers.enter_context(on_signal(loop, HANGUP, reloading.ask))
        try:
            _tell(options, server, web_port)
            await stopped.wait()
        finally:
            try:
                await server.stop()
            except StoreError as error:
                raise StoreError(
                    f"{error}; the node has stopped, and what was not on disk is lost"
                ) from error


class _Reloading:
    """Reads users and certificates from their files again; all take effect, or none if one is wrong."""

    def __init__(self, server: Server, options: _Options) -> None:
        self._node = server.node
        self._options = options
        self._task: asyncio.Task[None] | None = None
        self._is_asked = False

    def ask(self) -> None:
        """Reload; if a reload is under way, once more after it."""
        self._is_asked = True
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while self._is_asked:
            self._is_asked = False
            try:
                await self._reload()
            except (UsageError, OSError) as error:
                self._node.events.record("reload_failed", level=logging.ERROR, reason=str(error))

    async def _reload(self) -> None:
        files, node, context = self._options.files, self._node, self._options.tls
        names = users_from(files.users, files.users_file)
        if bool(names) != node.needs_login:
            raise UsageError("whether users have to log in is decided at the start: restart the node")
        tls_context(files.tls_cert, files.tls_key)  # check both before applying either: never half a change
        closed = 0
        if names:
            from ..protocol.sasl import Users

            users = Users(names, node.rng)
            await asyncio.to_thread(users.derive)
            closed = node.replace_users(users)
        if context is not None:
            assert files.tls_cert is not None
            context.load_cert_chain(files.tls_cert, files.tls_key)
        node.events.record(
            "reloaded",
            level=logging.INFO,
            users=len(names),
            certificate=str(context is not None).lower(),
            connections_closed=closed,
        )


def _give_memory_back(
    loop: asyncio.AbstractEventLoop, server: Server, free: FreeMemory, moved_before: int
) -> None:
    """Return free memory to the system now and then while the loop runs; all of it when the node is idle."""
    counters = server.node.counters
    moved = counters.bytes_read + counters.bytes_written
    is_idle = moved - moved_before < _IDLE_BYTES  # it may still be merging, which this holds up only briefly
    if is_idle:
        gc.collect(1)  # for closed connections; the oldest generation may be large, and is left alone
    free.give_back(everything=is_idle)
    loop.call_later(_GIVE_BACK_S, _give_memory_back, loop, server, free, moved)


async def _start(options: _Options) -> tuple[Server, int | None]:
    from ..server.aio import Server, listen
    from ..server.document_values import tombstone_value
    from ..server.fault_server import FaultServer
    from ..server.node import Node
    from ..store.engine import Engine

    sockets = _listen(listen, options.host, options.port)
    tls_sockets = None
    if options.tls is not None:
        tls_sockets = _listen(listen, options.host, options.tls_port, "--tls-port")
    store_settings = options.settings.for_store()
    store_settings.tombstone_value = tombstone_value
    engine = Engine(options.data, settings=store_settings, accept_loss=options.accept_loss)
    try:
        _make_buckets(engine, options)
        server = (Server if options.fault_token is None else FaultServer)(
            lambda run_job: Node(
                engine,
                users=options.users,
                settings=options.settings,
                run_job=run_job,
                fenced=options.fenced,
            )
        )
        if options.data is not None:
            _warn_of_a_small_disk(options.data, store_settings)
            server.watch_disk(options.data)
        server.node.address = replace(server.node.address, alternates=options.alternates)
        await server.start(sockets, tls_sockets, options.tls)
        web_port = None
        if options.web_port is not None:
            from ..web import ChartSamples, connection_handler, keep_samples, node_service

            web_sockets = _listen(listen, options.host, options.web_port, "--http-port")
            faults = None
            if isinstance(server, FaultServer):
                from ..web.faults import FaultKit

                assert options.fault_token is not None
                faults = FaultKit(server, options.fault_token)
            samples = ChartSamples()
            handle = connection_handler(node_service(server.node, server, faults, samples))
            web_port = await server.start_web(web_sockets, handle, options.tls)
            server.run_beside(keep_samples(server.node, samples))
    except BaseException:
        engine.close()
        raise
    return server, web_port


def _warn_of_a_small_disk(data: Path, settings: StoreSettings) -> None:
    size, least = shutil.disk_usage(data).total, settings.least_disk_bytes
    if size < least:
        _log.warning(
            "the disk of %r has %s, but a memory quota of %s needs %s: after the disk was full, writes may "
            "stay refused; give a smaller --memory-quota",
            str(data),
            format_size(size),
            format_size(settings.memory_quota),
            format_size(least),
        )


def _make_buckets(engine: Engine, options: _Options) -> None:
    """Create the buckets that do not exist yet; an existing one keeps its number of vbuckets for ever."""
    for name in options.buckets:
        bucket = engine.buckets.get(name)
        if bucket is None:
            engine.create_bucket(name, options.vbuckets or _VBUCKETS, active=not options.fenced)
        elif options.vbuckets not in (None, bucket.vbucket_count):
            raise UsageError(
                f"bucket {name!r} in {str(options.data)!r} has {bucket.vbucket_count} vbuckets, not "
                f"{options.vbuckets}: leave --vbuckets out, or choose another --data"
            )


def _listen(listen: object, host: str, port: int, option: str = "--port") -> list[socket.socket]:
    assert callable(listen)
    try:
        sockets: list[socket.socket] = listen(host, port)
    except OSError as error:
        raise cant_listen(host, port, error, option) from None
    return sockets


def _tell(options: _Options, server: Server, web_port: int | None) -> None:
    """Write the ready file, then the first line on stdout: whoever sees the line has the file too."""
    from ..files import atomic_write

    address = server.node.address
    first = server.node.buckets[options.buckets[0]]
    count = first.store.vbucket_count
    if options.ready_file is not None:
        content = {
            "pid": os.getpid(),
            "host": options.host,
            "port": address.port,
            "tls_port": address.tls_port,
            "web_port": web_port,
            "bucket": first.name,
            "vbuckets": count,
            "data": None if options.data is None else str(options.data.resolve()),
        }
        try:
            atomic_write(options.ready_file, json.dumps(content).encode() + b"\n")
        except OSError as error:
            raise StoreError(
                f"the ready file {str(options.ready_file)!r} can't be written ({reason_of(error)}), "
                "choose another --ready-file"
            ) from None
    at = Address(options.host, address.port)
    click.echo(f"tailrace: serving bucket '{first.name}' ({count} vbuckets) on {at}")
    sys.stdout.flush()
