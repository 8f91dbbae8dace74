"""How fast changes become columns, against memcpy of the same bytes and a decoder that goes by message.

    python bench/decode.py                 a table for people
    python bench/decode.py --json          the same figures for scripts

All three run over the same received buffers, one after the other in every round, so that other load on the
machine affects all of them; each goes over them once before it is timed, because the one before has filled
the processor's caches with other things. A figure is the median over the rounds; *at best* is the time
without disturbance: the best round of memcpy, and the best of all rounds for each buffer. See bench/README.md
for how to read it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pyarrow as pa

from tailrace.columns import SCHEMA, Names, scan, to_batch
from tailrace.wire.codes import DcpOpcode, Magic
from tailrace.wire.dcp import MUTATION
from tailrace.wire.header import HEADER, HEADER_SIZE

VALUE_SIZES = (64, 256, 1024)
REACH = {64: 12.0, 256: 5.5, 1024: 3.0}
"""How long the columns may take, as a multiple of memcpy's time."""

MIB = 1024 * 1024
NAMES = Names("default")
_MESSAGE = struct.Struct(HEADER.format + MUTATION.struct.format.removeprefix(">"))


def mutations(value_size: int, total_bytes: int, rng: np.random.Generator) -> bytes:
    """Mutations of 1,024 vbuckets, all different: keys of 7 to 14 bytes, random values."""
    count = total_bytes // (_MESSAGE.size + value_size + 12)
    values = rng.bytes(count * value_size)
    numbers = (10 ** rng.uniform(0, 8, count)).astype(int).tolist()
    cas = (time.time_ns() & ~0xFFFF) + np.arange(count)
    parts = []
    for index, (number, one_cas) in enumerate(zip(numbers, cas.tolist(), strict=True)):
        key = b"user::%d" % number
        vbucket = index // 64 % 1024
        header = (Magic.REQUEST, DcpOpcode.MUTATION, len(key), MUTATION.size, 1, vbucket)
        body = MUTATION.size + len(key) + value_size
        extras = (index + 1, 1, 0x0200_0006, 0, 0, 0, 0)
        parts.append(_MESSAGE.pack(*header, body, vbucket, one_cas, *extras))
        parts.append(key)
        parts.append(values[index * value_size : (index + 1) * value_size])
    return b"".join(parts)


def columnar(received: memoryview) -> pa.RecordBatch:
    """As the product does it."""
    frames = scan(received)
    if frames.error is not None:
        raise frames.error
    return to_batch(frames, names=NAMES, vb_uuid=1, snapshot_start=1, snapshot_end=1 << 40)


def per_message(received: memoryview) -> pa.RecordBatch:
    """The same columns by a plain loop over the messages, made as fast as such a loop can be."""
    rows = []
    at, end = 0, len(received)
    unpack_from, size = _MESSAGE.unpack_from, _MESSAGE.size
    while at < end:
        (_, opcode, keys, _, datatype, vbucket, body, _, cas, seqno, rev, flags, expiry, *_) = unpack_from(
            received, at
        )
        if opcode != DcpOpcode.MUTATION:
            raise NotImplementedError("the yardstick only knows mutations")
        key_end, frame_end = at + size + keys, at + HEADER_SIZE + body
        key, value = bytes(received[at + size : key_end]), bytes(received[key_end:frame_end])
        rows.append((key, value, datatype, vbucket, cas, seqno, rev, flags, expiry))
        at = frame_end
    return _batch(rows)


def _batch(rows: list[tuple[bytes, bytes, int, int, int, int, int, int, int]]) -> pa.RecordBatch:
    keys, values, datatypes, vbuckets, cas, seqnos, revs, flags, expiries = zip(*rows, strict=True)
    count = len(rows)
    columns = {
        "op": pa.repeat("mutation", count),
        "key": keys,
        "value": values,
        "bucket": pa.repeat("default", count),
        "scope": pa.repeat("_default", count),
        "collection": pa.repeat("_default", count),
        "vbucket": vbuckets,
        "vb_uuid": pa.repeat(1, count),
        "seqno": seqnos,
        "rev": revs,
        "cas": cas,
        "flags": flags,
        "expiry": expiries,
        "datatype": ["json" if datatype & 1 else "raw" for datatype in datatypes],
        "xattrs": pa.nulls(count, pa.string()),
        "event_time": [(stamp & ~0xFFFF) // 1000 for stamp in cas],
        "snapshot_start": pa.repeat(1, count),
        "snapshot_end": pa.repeat(1 << 40, count),
    }
    arrays = [
        made if isinstance(made := columns[field.name], pa.Array) else pa.array(made, field.type)
        for field in SCHEMA
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def measure(options: argparse.Namespace, value_size: int) -> dict[str, float]:
    """The figures for one size of values."""
    data = memoryview(mutations(value_size, options.mib * MIB, np.random.default_rng(options.seed)))
    buffer_bytes = int(options.buffer_mib * MIB)
    cuts = [0]
    while cuts[-1] < len(data):
        cuts.append(cuts[-1] + scan(data[cuts[-1] : cuts[-1] + buffer_bytes]).used)
    stretches = [data[start:end] for start, end in pairwise(cuts)]
    count = sum(len(scan(stretch)) for stretch in stretches)
    if not columnar(stretches[0]).equals(per_message(stretches[0])):
        raise AssertionError("the two decoders differ")

    clock = time.process_time if options.cpu else time.perf_counter
    buffer = memoryview(bytearray(buffer_bytes))
    target = memoryview(bytearray(data))

    def memcpy() -> list[float]:
        began = clock()
        target[:] = data
        return [clock() - began]

    def decoding(decoder: Callable[[memoryview], pa.RecordBatch]) -> list[float]:
        seconds = []
        for stretch in stretches:
            received = stretch
            if not options.cold:
                received = buffer[: len(stretch)]
                received[:] = stretch
            began = clock()
            decoder(received)
            seconds.append(clock() - began)
        return seconds

    contenders: dict[str, Callable[[], list[float]]] = {
        "memcpy": memcpy,
        "columnar": lambda: decoding(columnar),
        "per_message": lambda: decoding(per_message),
    }
    rounds: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, contender in contenders.items():
            contender()
            rounds[name].append(contender())
    median = {name: statistics.median(map(sum, times)) for name, times in rounds.items()}
    best = {name: sum(map(min, zip(*times, strict=True))) for name, times in rounds.items()}
    return {
        "value_bytes": value_size,
        "messages": count,
        "bytes": len(data),
        **{f"{name}_messages_per_s": round(count / seconds) for name, seconds in median.items()},
        "memcpy_gb_per_s": round(len(data) / median["memcpy"] / 1e9, 2),
        "columnar_times_memcpy": round(median["columnar"] / median["memcpy"], 2),
        "columnar_times_memcpy_at_best": round(best["columnar"] / best["memcpy"], 2),
        "reach_times_memcpy": REACH.get(value_size, float("nan")),
        "columnar_times_faster_than_per_message": round(median["per_message"] / median["columnar"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="figures as one JSON object a line")
    parser.add_argument("--sizes", type=int, nargs="+", default=VALUE_SIZES, metavar="BYTES")
    parser.add_argument("--mib", type=int, default=64, help="data for each size (default 64)")
    parser.add_argument("--buffer-mib", type=float, default=4, help="size of the receive buffer (default 4)")
    parser.add_argument("--cold", action="store_true", help="decode from memory, not from the receive buffer")
    parser.add_argument("--cpu", action="store_true", help="CPU time, for a machine that is busy")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if not options.json:
        print(f"{'value':>6} {'memcpy':>9} {'columnar':>12} {'per message':>12}   columnar takes")
    for size in options.sizes:
        figures = measure(options, size)
        if options.json:
            print(json.dumps(figures), flush=True)
            continue
        print(
            f"{size:>4} B {figures['memcpy_gb_per_s']:>5.1f} GB/s"
            f" {figures['columnar_messages_per_s'] / 1e6:>8.2f} M/s"
            f" {figures['per_message_messages_per_s'] / 1e6:>8.2f} M/s  "
            f" {figures['columnar_times_memcpy']:.1f} times memcpy, at best"
            f" {figures['columnar_times_memcpy_at_best']:.1f} (reach {figures['reach_times_memcpy']:g}),"
            f" 1/{figures['columnar_times_faster_than_per_message']:.1f} of per message",
            flush=True,
        )


if __name__ == "__main__":
    main()
