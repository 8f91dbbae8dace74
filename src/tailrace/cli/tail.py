"""``tailrace tail``: shows changes as they come."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import paths
from ..connstr import ConnectionString
from ..errors import UsageError, reason_of
from ..units import parse_vbuckets
from .client_options import (
    dialect_option,
    end_option,
    every_version_option,
    group_options,
    left_out_options,
    persisted_options,
    remembered,
    retry_option,
    source_options,
    start_option,
    state_option,
    sync_replication_option,
    tap_name_option,
    tls_options,
)
from .common import command as make_command
from .common import json_option, run, url_argument, use_colour
from .http_options import http_options, reading_over_http

if TYPE_CHECKING:
    from ..client.events import Event
    from ..client.progress import SavedPosition
    from ..client.state_store import FileState

_GROUP_EVENTS = 1_000


@make_command(
    "tail",
    example="""
tailrace tail couchbase://127.0.0.1
tailrace tail couchbase://127.0.0.1/default --from now --json --changes-only
tailrace tail couchbase://127.0.0.1 --to now --state positions.json --json > changes.jsonl
tailrace tail couchbase://127.0.0.1 --group billing --group-store /shared/groups --json
""",
)
@url_argument
@start_option(files=True)
@end_option()
@dialect_option
@state_option("Save positions here after each whole snapshot, and resume from them.")
@retry_option
@tap_name_option
@click.option(
    "--tap-forget",
    is_flag=True,
    help="With --tap-name: make the node forget the reader at the end.",
)
@click.option("--vbucket", "vbuckets", metavar="V", help="Read only these: 7, 0-7 or 0,3,8-15.")
@click.option("--verbose", is_flag=True, help="Show snapshots too.")
@click.option(
    "--changes-only", is_flag=True, help="Show only changes of documents: lines with a key, and no rollbacks."
)
@json_option("Write one JSON object per line.")
@group_options
@source_options
@left_out_options
@persisted_options
@every_version_option
@sync_replication_option
@tls_options
@http_options
def command(
    url: ConnectionString,
    start: str,
    end: str,
    dialect: str,
    state: Path | None,
    retry_for: float,
    tap_name: str | None,
    tap_forget: bool,
    vbuckets: str | None,
    verbose: bool,
    changes_only: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Show changes as they come.

    Prints text for people, or with --json one object per line for scripts. Output is flushed before the
    position is saved: after a kill only changes of snapshots that were open or being saved may come again.
    The older dialects are for old servers. tap has no seqnos and no positions: instead of --state, the node
    remembers a reader by its --tap-name. With --group and --group-store several processes share the
    vbuckets, and the group keeps the positions.
    """
    from ..client.text_lines import TextLines
    from .client_options import connect_options, group_from

    line: Callable[[Event], bytes] | None = None
    if not as_json:
        on_terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if on_terminal else 0
        line = TextLines(colour=use_colour(sys.stdout), width=width, verbose=verbose).line
    chosen = None if vbuckets is None else parse_vbuckets(vbuckets)
    given = connect_options(
        url, options, purpose="tail", dialect=dialect, retry_for_s=retry_for, **group_from(options)
    )
    if tap_name is not None:
        given["tap_settings"] = remembered(tap_name, dialect)
    elif tap_forget:
        raise UsageError("--tap-forget is for a reader with a name; give --tap-name too")
    positions = None
    if given["group_store"] is not None:
        if state is not None or start not in ("beginning", "now"):
            raise UsageError("a group keeps the positions itself; leave out --state, and --from FILE")
    elif dialect != "tap" or state is not None or start not in ("beginning", "now"):
        positions = _Positions(state, start, url.bucket)
        start = positions.start
    with reading_over_http(options, "tail", url.bucket) as watched:
        run(
            _tail(
                url,
                given | watched,
                positions,
                start,
                end,
                chosen,
                line,
                changes_only=changes_only,
                forget=tap_forget,
            )
        )


class _Positions:
    """Where to start: the state file if there is one, then the file or the word of ``--from``."""

    def __init__(self, state: Path | None, start: str, bucket: str) -> None:
        from ..client.state_store import FileState, parse_state

        self.file: FileState | None = None if state is None else FileState(state, bucket=bucket)
        self.start = start if start in ("beginning", "now") else "beginning"
        self._given: dict[int, SavedPosition] = {}
        if start != self.start:
            try:
                self._given = parse_state(paths.file(start, "the file of --from").read_bytes())[-1]
            except OSError as error:
                raise UsageError(
                    f"--from must be beginning, now or a file; {start!r}: {reason_of(error)}"
                ) from None
            except UsageError as error:
                raise UsageError(f"{start!r} has no positions: {error}") from None

    @property
    def bucket_uuid(self) -> str:
        """The bucket's uuid, for the state file."""
        return "" if self.file is None else self.file.bucket_uuid

    @bucket_uuid.setter
    def bucket_uuid(self, uuid: str) -> None:
        if self.file is not None:
            self.file.bucket_uuid = uuid

    def load(self) -> dict[int, SavedPosition]:
        """The positions of the state file, otherwise those of ``--from``."""
        saved = {} if self.file is None else self.file.load()
        return saved or self._given

    def save(self, positions: Mapping[int, SavedPosition]) -> None:
        """Save positions, if there is a state file."""
        if self.file is not None:
            self.file.save(positions)


async def _tail(
    url: ConnectionString,
    options: dict[str, Any],
    positions: _Positions | None,
    start: str,
    end: str,
    vbuckets: list[int] | None,
    line: Callable[[Event], bytes] | None,
    *,
    changes_only: bool,
    forget: bool,
) -> None:
    """Write the changes as lines: JSON, or what ``line`` makes of them."""
    from ..client.aio import connect
    from ..client.events import Deletion, Expiration, Mutation
    from ..client.jsonlines import json_line

    out = sys.stdout.buffer
    async with connect(url, state=positions, autosave=False, **options) as source:
        line = line or partial(json_line, names=source.collection_names, no_value=options["no_value"])
        async for portion in source.portions(start, end, vbuckets=vbuckets):
            lines: list[bytes] = []
            for event in portion.events():
                if changes_only and not isinstance(event, Mutation | Deletion | Expiration):
                    continue
                lines.append(line(event))
                if len(lines) >= _GROUP_EVENTS:
                    out.write(b"".join(lines))
                    lines.clear()
            out.write(b"".join(lines))
            out.flush()
            # the whole portion is written: its position may be saved
            await source.save()
        if forget:
            await source.deregister()
