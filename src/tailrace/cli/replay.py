"""``tailrace replay``: serves a recording as a producer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from ..connstr import Address
from .common import EXISTING_FILE, Integer, cant_listen, note, run
from .common import command as make_command


@make_command(
    "replay",
    example="""
tailrace replay stream.rec --port 11310
tailrace tail couchbase://127.0.0.1:11310 --to now
""",
)
@click.argument("file", type=EXISTING_FILE)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=Integer(0, 0xFFFF), default=11210, show_default=True, help="Port; 0 picks a free one."
)
def command(file: Path, host: str, port: int) -> None:
    """Serve a recording as a producer, byte for byte.

    Readers get the recorded streams. Nothing can be written, and nobody has to log in: listen on an address
    that only you can reach.
    """
    from ..client.recording import Recording

    run(_replay(Recording(file), host, port))


async def _replay(recording: object, host: str, port: int) -> None:
    from ..client.recording import Recording
    from ..client.replay import ReplayServer

    assert isinstance(recording, Recording)
    server = ReplayServer(recording)
    try:
        await server.start(host, port)
    except OSError as error:
        raise cant_listen(host, port, error) from None
    click.echo(f"tailrace: replaying {str(recording.path)!r} on {Address(host, server.port)}")
    note("stop it with Ctrl-C")
    try:
        await asyncio.Event().wait()
    finally:
        await server.stop()
