"""A process that reads a bucket to its end and reports, again and again, how much memory it holds.

python flat_reader.py URL changes|batches STATE_FILE CHANGES_A_LINE
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import tailrace
from tailrace import Mutation


def main(url: str, how: str, state: str, step: int) -> None:
    read = 0
    with tailrace.connect_sync(url, state=state, flow_control_buffer=4 << 20) as source:
        counts = (
            changes(source) if how == "changes" else (batch.num_rows for batch in source.batches(end="now"))
        )
        for count in counts:
            read += count
            if read % step < count:
                print(read, rss_bytes(), flush=True)


def changes(source: tailrace.BlockingSource) -> Iterator[int]:
    return (isinstance(event, Mutation) for event in source.changes(end="now"))


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
