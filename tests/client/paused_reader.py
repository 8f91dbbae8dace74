"""A process that takes one piece of a bucket and then no more, and reports the memory that this takes.

python paused_reader.py URL changes|batches WINDOW_BYTES
"""

from __future__ import annotations

import sys
import time

import tailrace
from client.flat_reader import rss_bytes


def main(url: str, how: str, window_bytes: int) -> None:
    with tailrace.connect_sync(url, flow_control_buffer=window_bytes) as source:
        source.high_seqnos()
        before = rss_bytes()  # with all modules that a connected reader needs
        pieces = source.changes(end="now") if how == "changes" else source.batches(end="now")
        next(pieces)
        queued, still = -1, 0
        while still < 10:  # a second in which no more has come: the window is full
            time.sleep(0.1)
            now = source.stats()["queued_bytes"]
            queued, still = now, still + 1 if now == queued > 0 else 0
        print(queued, rss_bytes() - before, flush=True)
        rest = sum(1 for _ in pieces) if how == "changes" else sum(piece.num_rows for piece in pieces)
        print(rest)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
