"""Every file of a data directory in turn is lost, damaged or put back as it was earlier: the start names a
file, or shows exactly what was persisted. It never shows an older state without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from store.crash_script import open_store
from store.helpers_store import values
from tailrace.errors import StoreError
from tailrace.files import MemoryFiles
from tailrace.store.engine import Engine
from tailrace.wire.codes import VBucketState

VBUCKETS = 4


def contents(files: MemoryFiles) -> dict[str, bytes]:
    return {path: bytes(data) for path, data in files.files.items()}


def opened(files: dict[str, bytes]) -> Engine:
    disk = MemoryFiles()
    disk.files = {path: bytearray(data) for path, data in files.items()}
    return open_store(disk, 9)


def state(engine: Engine) -> dict[str, Any]:
    """All that a client can ask a node for after a start, except the branches, which a kill renews."""
    return {
        name: (
            bucket.manifest,
            [(vb.state, vb.high_seqno, vb.purge_seqno, values(vb)) for vb in bucket],
        )
        for name, bucket in engine.buckets.items()
    }


class History:
    """A store that lives through everything that changes its files; its files after each step."""

    def __init__(self) -> None:
        self.files = MemoryFiles()
        self.moments: list[dict[str, bytes]] = []
        self.engine = open_store(self.files, 1)
        self._run()

    def moment(self) -> None:
        self.moments.append(contents(self.files))

    def _write(self, name: bytes, count: int) -> None:
        for number in range(count):
            self.bucket.vbuckets[number % 2].set(b"\0k%d" % number, name)
        self.bucket.flush()
        self.moment()

    def _start(self, seed: int) -> None:
        self.engine = open_store(self.files, seed)
        self.bucket = self.engine.buckets["default"]
        self.moment()

    def _run(self) -> None:
        self.moment()
        self.bucket = self.engine.create_bucket("default", VBUCKETS)
        self.moment()
        self._write(b"first", 20)
        self.bucket.seal()
        self.moment()
        self.bucket.set_state(3, VBucketState.REPLICA)
        self.bucket.flush()
        self.moment()
        self._write(b"second", 10)
        self.bucket.vbuckets[0].delete(b"\0k18")
        self.bucket.seal()
        self.moment()
        self.engine.create_bucket("other", VBUCKETS).vbuckets[0].set(b"\0a", b"of another one")
        self.engine.buckets["other"].flush()
        self.moment()
        self._write(b"third", 6)
        self.engine.close()
        self.moment()
        self._start(2)
        self._write(b"fourth", 4)
        self.bucket.compact()
        self.moment()
        self._write(b"fifth", 20)
        self.bucket.seal()
        self.moment()
        self.bucket.vbuckets[1].delete(b"\0k19")
        self.bucket.flush()
        self.moment()
        self.engine.crash()
        self._start(3)
        self._write(b"sixth", 3)
        self.bucket.vbuckets[0].set(b"\0last", b"last batch")
        self.bucket.flush()
        self.moment()


@pytest.fixture(scope="module", params=["stopped", "killed"])
def history(request: pytest.FixtureRequest) -> History:
    made = History()
    (made.engine.close if request.param == "stopped" else made.engine.crash)()
    return made


def damages(history: History) -> Iterator[tuple[str, str, dict[str, bytes]]]:
    """A file, what happened to it, and all files then."""
    whole = contents(history.files)
    for path, data in whole.items():
        without = {other: there for other, there in whole.items() if other != path}
        yield path, "removed", without
        yield path, "renamed", {**without, path + ".bak": data}
        for end in {0, 1, len(data) // 2, len(data) - 1} - {len(data), -1}:
            yield path, f"cut to {end} bytes", {**whole, path: data[:end]}
        for at in {*range(0, len(data), max(len(data) // 30, 1)), len(data) - 1} - {-1}:
            flipped = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
            yield path, f"byte {at} of {len(data)} flipped", {**whole, path: flipped}
        for number, moment in enumerate(history.moments):
            if moment.get(path, data) != data:
                yield path, f"as after step {number}", {**whole, path: moment[path]}


def test_each_file_in_turn(history: History) -> None:
    expected = state(opened(contents(history.files)))
    refused = 0
    wrong = []
    for path, what, files in damages(history):
        try:
            seen = state(opened(files))
        except StoreError as error:
            refused += 1
            # an older list of files names one that is gone since
            named = path.removesuffix("MANIFEST")
            if not str(error).startswith(named) and "the data directory" not in str(error):
                wrong.append(f"{path} {what}: {error}")
        except Exception as error:  # noqa: BLE001 - what it is, is what is wanted
            wrong.append(f"{path} {what}: {error!r}")
        else:
            if seen != expected:
                wrong.append(f"{path} {what}: another state, without a word")
    assert not wrong, "\n".join(wrong)
    assert refused > 100
