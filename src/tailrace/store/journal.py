"""Group commits: the chain of logs that a bucket writes, the jobs that write them, and the clock that
numbers versions.
"""

from __future__ import annotations

import contextlib
import random
import threading
from typing import TYPE_CHECKING, Any

from ..clock import Clock
from ..errors import StoreError, reason_of
from ..files import Files
from ..model import MAX_CLOCK_CAS
from .format import LOG
from .log import LogBatch, LogHeader, LogWriter, log_name
from .synced_file import Mark, SyncedFile

if TYPE_CHECKING:
    from .bucket import EngineBucket
    from .vbucket_history import History

__all__ = ["BaseJob", "CommitJob", "HybridClock", "Journal"]

CAS_MARGIN_NS = 5_000_000_000
_TIME = ~0xFFFF


class HybridClock:
    """CAS values: wall-clock nanoseconds with a counter in the low 16 bits; it never goes back.

    Each batch has a ceiling some seconds ahead, and after a crash values continue above it. So none comes
    twice, whatever the wall clock does meanwhile, unless nothing was committed for longer than that.
    """

    def __init__(self, clock: Clock) -> None:
        self.last = 0
        self.monotonic = clock.monotonic
        self._time_ns = clock.time_ns

    def next(self) -> int:
        """A value above all that were given out or observed."""
        time_ns, last = self._time_ns, self.last
        cas = time_ns() & _TIME
        if cas <= last:
            cas = last + 1
        self.last = cas
        return cas

    def observe(self, cas: int) -> None:
        """Note a CAS that another node made."""
        if self.last < cas <= MAX_CLOCK_CAS:
            self.last = cas

    def now_s(self) -> int:
        return self._time_ns() // 1_000_000_000

    def ceiling(self) -> int:
        """What is given out within the next few seconds stays below this."""
        return max(self.last, self._time_ns()) + CAS_MARGIN_NS


class Journal:
    """The logs of a bucket, in a chain; only the newest is written. Used by one job at a time."""

    def __init__(self, files: Files, directory: str, rng: random.Random) -> None:
        self.number = 0  # of the newest log
        self.valid_bytes = 0
        self.next_batch = 1
        self.commits = 0
        self.failures = 0
        self._highest = 0  # number of a log file that was ever tried
        self._files = files
        self._directory = directory
        self._rng = rng
        self._writer: LogWriter | None = None
        self._before = 0, 0  # number and valid bytes of the log before the newest
        self._unused = 0  # number of a log that the next one replaces
        self.synced = SyncedFile(files, directory)

    def follow(self, number: int, valid_bytes: int, next_batch: int, highest: int) -> None:
        """Continue after the logs that recovery has read."""
        self.number, self.valid_bytes, self.next_batch = number, valid_bytes, next_batch
        self._highest = max(highest, number)

    def commit(self, batch: LogBatch) -> None:
        """Make a batch durable, or raise OSError; then the next batch goes to a new log."""
        try:
            writer = self._writer or self._start()
            writer.commit(batch)
        except OSError:
            self.failures += 1
            self._give_up()
            raise
        self.commits += 1
        self.valid_bytes, self.next_batch = writer.valid_bytes, writer.next_batch
        self.synced.write(Mark(self.number, self.valid_bytes, self.next_batch))

    def rotate(self) -> None:
        """The next batch begins a new log."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self.synced.close()

    def _give_up(self) -> None:
        """Stop using the newest log. If none of its batches counts, the next log follows the one before it,
        and this one is removed: on a full disk each attempt would otherwise leave a file behind and use up
        the space that is freed. It is removed only when the next log is durable, because that log's header
        may make a batch of this one void.
        """
        if self._writer is not None and self.valid_bytes == LOG.size:
            self._unused = self.number
            self.number, self.valid_bytes = self._before
        self.rotate()

    def disown(self) -> None:
        """Make a failed batch void: it may be whole on disk all the same, and a start after a crash would
        take it for a committed one. The next log says how many bytes of this one count. If the disk refuses
        that log too, the batch stays in doubt until the next commit.
        """
        with contextlib.suppress(OSError):
            if self._writer is None:
                self._start()

    def close(self) -> None:
        """A clean stop: the last mark is durable, too."""
        self.synced.close(sync=True)
        self.rotate()

    def _start(self) -> LogWriter:
        self._highest += 1
        salt = self._rng.getrandbits(32)
        header = LogHeader(self._highest, self.number, self.valid_bytes, self.next_batch, salt)
        try:
            self._writer = LogWriter(self._files, self._directory, header)
        except OSError:
            self._remove(self._highest)
            raise
        if self._unused:
            self._remove(self._unused)
            self._unused = 0
        self._before = self.number, self.valid_bytes
        self.number, self.valid_bytes = self._writer.number, self._writer.valid_bytes
        return self._writer

    def _remove(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._files.unlink(f"{self._directory}/{log_name(number)}")


class BaseJob:
    """Work in two halves. `run` and `settle` may be called more than once, `run` on several threads; each
    half is done once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ran = False
        self._settled = False
        self._error: Exception | None = None

    def run(self) -> None:
        with self._lock:
            if not self._ran:
                try:
                    self._work()
                except (OSError, StoreError) as error:
                    self._error = error
                except BaseException as error:
                    self._error = StoreError(f"{type(self).__name__} failed: {error!r}")
                    raise
                finally:
                    self._ran = True

    def settle(self) -> None:
        """Do what is left of the job; an error is kept for `finish`."""
        self.run()
        if not self._settled:
            self._settled = True
            if self._error is None:
                self._take_over()
            else:
                self._undo()

    def finish(self) -> None:
        self.settle()
        error, self._error = self._error, None
        if isinstance(error, OSError):
            raise StoreError(f"{reason_of(error)}: {self}") from error
        if error is not None:
            raise error

    def _work(self) -> None:
        raise NotImplementedError

    def _take_over(self) -> None:
        raise NotImplementedError

    def _undo(self) -> None:
        raise NotImplementedError


class CommitJob(BaseJob):
    """A group commit. It has its own copy of everything, so that writers can go on meanwhile."""

    def __init__(
        self, bucket: EngineBucket, batch: LogBatch, meta_of: list[History], rotate: dict[str, Any] | None
    ) -> None:
        super().__init__()
        self.batch = batch
        self.meta_of = meta_of
        self.rotate = rotate  # the bucket's state after this batch, if it is the last of its log
        self.growing_bytes = bucket.generations.growing_bytes
        self._bucket = bucket

    def __str__(self) -> str:
        return f"changes of bucket {self._bucket.name} could not be written"

    def _work(self) -> None:
        self._bucket.journal.commit(self.batch)

    def _take_over(self) -> None:
        self._bucket.committed(self)

    def _undo(self) -> None:
        self._bucket.not_committed(self)
