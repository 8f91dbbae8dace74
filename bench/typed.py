"""Typed tables against untyped ones, and `ts.table` against Spark's own Parquet scan of the same rows.

    python bench/typed.py [--docs N] [--vbuckets N] [--runs N]

A `tailrace serve` process holds documents of about 1 KiB of JSON with 30 fields, some nested, as a shop might
have them; Spark runs on this machine (`local[*]`). Untyped and typed mirrors alternate, `--runs` times.

- mirror: a first load into a new table, untyped and with `schema="infer"`. Target: the typed one keeps at
  least 0.5 of the untyped one's rows a second.
- scan: three queries over the typed rows (a sum over two columns, a filter on a nested field, all columns)
  by `ts.table` and by `spark.read.parquet` of a plain folder with the same rows. Target: at least 0.5 of the
  latter's rate.

The figures of 1 M documents: `python bench/typed.py --docs 1000000`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tailrace.spark as ts
from stream import node

_CITIES = ("Wien", "Graz", "Linz", "Salzburg", "Innsbruck", "Bregenz", "Villach", "Wels")
_WORDS = (
    "harbour",
    "lantern",
    "meadow",
    "copper",
    "violet",
    "granite",
    "willow",
    "ember",
    "saffron",
    "cobalt",
)


def document(number: int, rng: random.Random) -> bytes:
    """An order of a shop: 30 fields at the top, objects and arrays below, about 1 KiB."""
    words = rng.choices(_WORDS, k=12)
    lines = [
        {
            "sku": f"SKU-{rng.randrange(5000):05d}",
            "count": rng.randrange(1, 9),
            "price": rng.randrange(10000) / 100,
        }
        for _ in range(3)
    ]
    fields: dict[str, Any] = {
        "id": number,
        "type": "order",
        "status": rng.choice(("new", "paid", "sent", "returned")),
        "customer": f"customer::{rng.randrange(100_000)}",
        "name": f"{words[0].title()} {words[1].title()}",
        "email": f"{words[0]}.{words[1]}{number}@example.com",
        "phone": f"+43 1 {rng.randrange(10**7):07d}",
        "age": rng.randrange(18, 90),
        "vip": rng.random() < 0.05,
        "score": round(rng.random() * 5, 3),
        "created": f"2026-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}T10:00:00Z",
        "updated": f"2026-11-{rng.randrange(1, 29):02d}T12:{rng.randrange(60):02d}:00Z",
        "currency": "EUR",
        "total": rng.randrange(100_000) / 100,
        "tax": rng.randrange(20_000) / 100,
        "discount": None if rng.random() < 0.7 else rng.randrange(50),
        "channel": rng.choice(("web", "shop", "phone")),
        "language": rng.choice(("de", "en", "it")),
        "note": " ".join(words[2:9]),
        "tags": rng.sample(_WORDS, 3),
        "address": {
            "street": f"{words[9].title()} street {rng.randrange(200)}",
            "city": rng.choice(_CITIES),
            "zip": f"{rng.randrange(1000, 9999)}",
            "geo": {"lat": round(46 + rng.random() * 3, 5), "lon": round(9 + rng.random() * 8, 5)},
        },
        "lines": lines,
        "carrier": rng.choice(("post", "bike", "van")),
        "weight": rng.randrange(100, 20_000),
        "parcel": f"{rng.randrange(1 << 60):016x}",
        "gift": rng.random() < 0.1,
        "store": rng.randrange(200),
        "campaign": rng.choice(("spring", "autumn", "none")),
        "device": rng.choice(("ios", "android", "desktop")),
        "version": 3,
    }
    return json.dumps(fields).encode()


def write_documents(url: str, docs: int, folder: Path) -> int:
    """Write the documents; the bytes of their values."""
    rng = random.Random(18)
    size = 0
    file = folder / "documents.jsonl"
    with file.open("wb") as lines:
        for number in range(docs):
            value = document(number, rng)
            size += len(value)
            lines.write(b'{"key":"order::%08d","value":%b}\n' % (number, value))
    command = [sys.executable, "-m", "tailrace", "load", url, "--from", str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    file.unlink()
    return size


def mirror_rate(spark: Any, url: str, path: Path, docs: int, **settings: Any) -> float:
    """Rows a second of a first load into a new table."""
    shutil.rmtree(path, ignore_errors=True)
    began = time.perf_counter()
    ts.mirror(spark, url, path, once=True, maintenance=False, **settings).awaitTermination()
    return docs / (time.perf_counter() - began)


def scan_seconds(frame: Any) -> dict[str, float]:
    """How long each query takes."""
    queries: dict[str, Callable[[], object]] = {
        "two columns": lambda: frame.selectExpr("sum(total)", "avg(age)").collect(),
        "nested filter": lambda: frame.where("address.city = 'Wien' and total > 500").count(),
        "all columns": lambda: frame.write.format("noop").mode("overwrite").save(),
    }
    seconds: dict[str, float] = {}
    for name, run in queries.items():
        began = time.perf_counter()
        run()
        seconds[name] = time.perf_counter() - began
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--docs", type=int, default=100_000)
    parser.add_argument("--vbuckets", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=3)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, node(Path(folder), chosen.vbuckets) as port:
        url = f"couchbase://127.0.0.1:{port}"
        size = write_documents(url, chosen.docs, Path(folder))
        print(f"{chosen.docs:,} documents, {size / chosen.docs:,.0f} bytes each", flush=True)
        spark = ts.session("bench typed", **{"spark.ui.enabled": "false", "spark.log.level": "ERROR"})
        typed, untyped, plain = (Path(folder) / name for name in ("typed", "untyped", "plain"))
        mirror_rate(spark, url, untyped, chosen.docs)  # warms up workers and code
        rates: dict[str, list[float]] = {"untyped": [], "typed": []}
        for _ in range(chosen.runs):
            rates["untyped"].append(mirror_rate(spark, url, untyped, chosen.docs))
            rates["typed"].append(
                mirror_rate(spark, url, typed, chosen.docs, schema="infer", on_schema=lambda _: None)
            )
        medians = {name: statistics.median(measured) for name, measured in rates.items()}
        for name, rate in medians.items():
            print(f"mirror {name:<10} {rate:>10,.0f} rows/s", flush=True)
        share = medians["typed"] / medians["untyped"]
        print(f"typed / untyped   {share:>10.2f}            target: at least 0.5", flush=True)
        ts.table(spark, typed).write.mode("overwrite").parquet(str(plain))
        times: dict[str, dict[str, list[float]]] = {}
        for _ in range(chosen.runs + 1):
            for side, frame in (
                ("parquet", spark.read.parquet(str(plain))),
                ("table", ts.table(spark, typed)),
            ):
                for name, seconds in scan_seconds(frame).items():
                    times.setdefault(name, {}).setdefault(side, []).append(seconds)
        for name, sides in times.items():
            own, other = (statistics.median(sides[side][1:]) for side in ("table", "parquet"))
            print(
                f"scan {name:<14} {chosen.docs / own:>10,.0f} rows/s, Parquet {chosen.docs / other:>12,.0f}; "
                f"ratio {other / own:.2f}, target: at least 0.5",
                flush=True,
            )
        spark.stop()


if __name__ == "__main__":
    main()
