"""Other clients against ours, on one node, in one run: documents/s, CPU, memory, time to the first change.

    python bench/peers/run.py [--docs 1000000,5000000] [--sizes 64,256,1024,65536] [--vbuckets 64,1024]
                              [--over plain,snappy,tls] [--rounds 5] [--readers NAME;…] [--json FILE]
                              [--markdown docs/benchmarks.md]

The node is a `tailrace serve` of its own whose documents are on disk and in no memory but the page cache.
Every reader is a small program (`in_python.py`, `java/`, `go/`) that stays running, so that a JVM is warm:
a line on its stdin asks for a reading of the whole bucket, from the dial to the last document, and a line
of JSON answers. The first reading of each is a warm-up and is compared by content: a sum of checksums over
keys and values. Then all read in turns, and each reading must have the same count, value bytes, seqnos and
CAS as the others'. A figure is the median of the rounds; a ratio is the median of the ratios within a
round.

The node's own CPU time is taken from the system, for each reading. "bytes only" is not a reader: it takes the
bytes and acknowledges them, so it shows what the node can send. "raw loopback" does not even have a node: a
process sends as many bytes from its memory, which shows what the system can move.

With snappy the documents are compressed in the bucket; every reader receives them compressed and gives them
to the application as they were written, which is compared too.

java-dcp-client comes from Maven, gocbcore and go-dcp from Go. What a machine lacks is left out, with a
message. go-dcp asks for compressed values in any case, finds its node by HTTP, and is left out with TLS.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import re
import shlex
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from tailrace import __version__
from tailrace.snappy import deflate
from tailrace.store.engine import Engine
from tailrace.wire.codes import Datatype, Feature, Op
from tailrace.wire.header import HEADER, Frame

HERE = Path(__file__).parent
USER, PASSWORD = "Administrator", "password"
SAME = ("documents", "value_bytes", "seqnos", "cas")
JAVA_LOW, JAVA_HIGH = "java-dcp-client, low level", "java-dcp-client, high level"
GO, GO_DCP = "gocbcore", "go-dcp"
BATCHES, CHANGES, ASYNC, FLOOR = "batches", "changes", "changes, async", "one message at a time"
BYTES, LOOPBACK = "bytes only", "raw loopback"
NO_READERS = (BYTES, LOOPBACK)
AT_MOST = ("CPU", "first change")
TARGETS = [
    ("documents/s", BATCHES, JAVA_LOW, 1.8),
    ("documents/s", BATCHES, JAVA_HIGH, 2.5),
    ("documents/s", BATCHES, GO, 4.0),
    ("documents/s", CHANGES, JAVA_HIGH, 1.2),
    ("CPU", BATCHES, JAVA_LOW, 0.6),
    *(("first change", BATCHES, theirs, 1.0) for theirs in (JAVA_LOW, JAVA_HIGH, GO, GO_DCP)),
]
"""What is compared, our reader, the other one, and the ratio to reach (CPU and first change: at most)."""
LOOPBACK_SHARES = {64: 0.35, 256: 0.45, 1024: 0.6}
"""By the size of a document: the rate from the node's disk into Arrow, as a share of loopback's."""
MANY_VBUCKETS_SHARE = 0.8
"""The rate with 1,024 vbuckets, as a share of that with 64."""
_COMPRESSED_JSON = int(Datatype.JSON | Datatype.SNAPPY)
_LOADED_AT_ONCE = 500
COLUMNS = ("reader", "documents/s", "its CPU a million", "the node's", "first change", "peak memory")
BEGIN, END = "<!-- begin: peers -->", "<!-- end: peers -->"

Case: TypeAlias = tuple[str, list[dict[str, Any]], list[str]]
"""What was measured, the rows of the readers, and our ratios."""


@dataclass
class Reader:
    """A program that reads the bucket on demand."""

    name: str
    process: subprocess.Popen[str]
    errors: Path
    answers: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, word: str, docs: int) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{word} {docs}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended: {self.errors.read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def programs(build: Path, wanted: set[str]) -> dict[str, list[str]]:
    """The readers that this machine can run, by name, and the commands that start them."""
    python = [sys.executable, str(HERE / "in_python.py")]
    commands = {
        BATCHES: [*python, "batches"],
        CHANGES: [*python, "changes"],
        ASYNC: [*python, "async"],
        FLOOR: [*python, "floor"],
        BYTES: [*python, "bytes"],
        LOOPBACK: [*python, "loopback"],
    }
    if missing := [tool for tool in ("java", "mvn") if shutil.which(tool) is None]:
        print(f"left out: java-dcp-client, for want of {' and '.join(missing)}")
    else:
        pom = ["mvn", "-q", "-B", "-f", str(HERE / "java" / "pom.xml"), f"-Dtarget={build}"]
        subprocess.run(
            [*pom, "package", "dependency:copy-dependencies"], check=True, stdout=subprocess.DEVNULL
        )
        java = ["java", "-Xmx2g", "-cp", f"{build}/classes:{build}/dependency/*", "tailrace.Peer"]
        commands |= {JAVA_LOW: [*java, "low"], JAVA_HIGH: [*java, "high"]}
    if shutil.which("go") is None:
        print("left out: gocbcore and go-dcp, for want of go")
    else:
        for name, folder in ((GO, "go"), (GO_DCP, "go-dcp")):
            if not wanted or name in wanted:
                command = ["go", "build", "-o", str(build / name), "."]
                subprocess.run(command, cwd=HERE / folder, check=True)
            commands[name] = [str(build / name)]
    if unknown := wanted - set(commands):
        raise SystemExit(f"no such reader: {', '.join(sorted(unknown))}; there are {', '.join(commands)}")
    return {name: command for name, command in commands.items() if not wanted or name in wanted}


@contextlib.contextmanager
def node(
    directory: Path, vbuckets: int, certificate: tuple[Path, Path] | None = None
) -> Iterator[dict[str, int]]:
    """A node in a process of its own; its ports."""
    ready = directory / "ready.json"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tailrace", "serve", "--port", "0", "--vbuckets", str(vbuckets)]
    command += ["--data", str(directory / "data"), "--ready-file", str(ready), "--user", f"{USER}:{PASSWORD}"]
    if certificate is not None:
        command += ["--tls-cert", str(certificate[0]), "--tls-key", str(certificate[1]), "--tls-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while not ready.exists():
                if process.poll() is not None:
                    raise SystemExit("the node did not start")
                time.sleep(0.05)
            yield json.loads(ready.read_text()) | {"pid": process.pid}
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def fill(directory: Path, docs: int, size: int, vbuckets: int, *, is_compressed: bool = False) -> None:
    with node(directory, vbuckets) as ports:
        if is_compressed:
            load_compressed(ports["port"], docs, size, vbuckets)
            docs = 0
        url = f"couchbase://{USER}:{PASSWORD}@127.0.0.1:{ports['port']}"
        command = [sys.executable, "-m", "tailrace", "load", url, "--docs", str(docs), "--size", str(size)]
        if docs:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    engine = Engine(directory / "data")
    engine.buckets["default"].compact()
    engine.close()


def load_compressed(port: int, docs: int, size: int, vbuckets: int) -> None:
    """Load JSON of repetitive words, like that of documents, compressed by the writer."""
    rng = random.Random(1)
    words = ["amount", "city", "customer", "order", "paid", "street", "total", "2024-05-01", "12.50", "Main"]

    def store(number: int) -> Frame:
        key = b"doc-%08d" % number
        text = " ".join(rng.choices(words, k=size // 4))[: size - len('{"d":""}')]
        value = deflate(f'{{"d":"{text}"}}'.encode())
        vbucket = (zlib.crc32(key) >> 16 & 0x7FFF) % vbuckets
        return Frame(0x80, Op.SET, len(key), 8, _COMPRESSED_JSON, vbucket, body=bytes(8) + key + value)

    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rb") as stream:

        def exchange(frames: list[Frame]) -> None:
            connection.sendall(b"".join(frame.encode() for frame in frames))
            for frame in frames:
                fields = HEADER.unpack(stream.read(HEADER.size))
                stream.read(fields[6])
                if fields[5]:
                    raise SystemExit(f"opcode 0x{frame.opcode:02x} is answered with status 0x{fields[5]:02x}")

        features = struct.pack(">3H", Feature.XERROR, Feature.SNAPPY, Feature.JSON)
        login = f"PLAIN\0{USER}\0{PASSWORD}".encode()
        exchange([Frame(0x80, Op.HELLO, body=features)])
        exchange([Frame(0x80, Op.SASL_AUTH, key_length=len("PLAIN"), body=login)])
        exchange([Frame(0x80, Op.SELECT_BUCKET, key_length=len("default"), body=b"default")])
        for begin in range(0, docs, _LOADED_AT_ONCE):
            exchange([store(number) for number in range(begin, min(begin + _LOADED_AT_ONCE, docs))])


def certificate(directory: Path) -> tuple[Path, Path]:
    """A self-signed certificate for loopback."""
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=127.0.0.1",
    ]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return cert, key


def measure(
    commands: dict[str, list[str]], directory: Path, docs: int, *, vbuckets: int, over: str, rounds: int
) -> list[Reader]:
    secured = certificate(directory) if over == "tls" else None
    with node(directory, vbuckets, secured) as ports, contextlib.ExitStack() as stack:
        port = ports["tls_port"] if secured else ports["port"]
        words = [f"127.0.0.1:{port}", "default", USER, PASSWORD, str(secured[0]) if secured else "-"]
        words.append("snappy" if over == "snappy" else "plain")
        readers: list[Reader] = []
        for name, command in commands.items():
            if (name in (FLOOR, *NO_READERS) and over != "plain") or (name == GO_DCP and secured):
                continue
            errors = directory / f"{len(readers)}.err"
            with errors.open("w") as file:
                process = subprocess.Popen(
                    [*command, *words],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    text=True,
                )
            reader = Reader(name, process, errors)
            stack.callback(reader.close)
            readers.append(reader)
        checks = {reader.name: reader.ask("check", docs) for reader in readers}
        agree(checks, (*SAME, "contents"))
        for number in range(rounds):
            for reader in readers if number % 2 else reversed(readers):
                before = node_cpu_s(ports["pid"])
                answer = reader.ask("read", docs)
                answer["node_cpu_s"] = answer.get("sender_cpu_s") or node_cpu_s(ports["pid"]) - before
                reader.answers.append(answer)
            agree({reader.name: reader.answers[-1] for reader in readers}, SAME)
    return readers


def node_cpu_s(pid: int) -> float:
    """CPU time of a process so far; 0 if the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def agree(answers: dict[str, dict[str, Any]], names: tuple[str, ...]) -> None:
    seen = {
        name: tuple(answer[column] for column in names)
        for name, answer in answers.items()
        if name not in NO_READERS
    }
    if len(set(seen.values())) > 1:
        raise SystemExit(f"the readers do not agree on {names}: {seen}")


def median(reader: Reader, name: str) -> float:
    return float(statistics.median(answer[name] for answer in reader.answers))


def ratio(what: str, ours: Reader, theirs: Reader) -> float:
    pairs = zip(ours.answers, theirs.answers, strict=True)
    if what == "CPU":
        return float(statistics.median(mine["cpu_s"] / other["cpu_s"] for mine, other in pairs))
    if what == "first change":
        return float(statistics.median(mine["first_s"] / other["first_s"] for mine, other in pairs))
    return float(statistics.median(other["seconds"] / mine["seconds"] for mine, other in pairs))


def show(readers: list[Reader], docs: int, ratios: list[str]) -> list[dict[str, Any]]:
    rows = []
    for reader in readers:
        row = {
            "reader": reader.name,
            "documents_per_s": round(docs / median(reader, "seconds")),
            "cpu_s_per_million": round(median(reader, "cpu_s") / docs * 1e6, 3),
            "node_cpu_s_per_million": round(median(reader, "node_cpu_s") / docs * 1e6, 3),
            "first_change_s": round(median(reader, "first_s"), 4),
            "peak_mib": round(max(answer["peak_kib"] for answer in reader.answers) / 1024),
        }
        rows.append(row)
        print(
            f"  {reader.name:<28}{row['documents_per_s']:>12,} documents/s{row['cpu_s_per_million']:>8.2f} s"
            f" CPU a million, the node {row['node_cpu_s_per_million']:.2f} s,"
            f" first change {row['first_change_s'] * 1000:6.0f} ms, peak {row['peak_mib']:>5} MiB",
            flush=True,
        )
    for line in ratios:
        print(f"  {line}", flush=True)
    return rows


def verdicts(readers: list[Reader], size: int) -> list[str]:
    """Our ratios, with their targets."""
    by_name = {reader.name: reader for reader in readers}
    share = LOOPBACK_SHARES.get(size)
    targets = [*TARGETS, *([("documents/s", BATCHES, LOOPBACK, share)] if share else [])]
    return [
        verdict(f"{what} of {ours}", ratio(what, by_name[ours], by_name[theirs]), theirs, what, target)
        for what, ours, theirs, target in targets
        if ours in by_name and theirs in by_name
    ]


def verdict(whose: str, reached: float, theirs: str, what: str, target: float) -> str:
    met = reached <= target if what in AT_MOST else reached >= target
    wanted = f"{'at most ' if what in AT_MOST else ''}{target}"
    return f"{whose}: {reached:.2f} of {theirs} (target {wanted}: {'ok' if met else 'MISSED'})"


def many_vbuckets(results: list[dict[str, Any]], case: dict[str, Any]) -> list[str]:
    """The rate with many vbuckets relative to that with few, which was measured before."""
    few = {**case, "reader": BATCHES, "vbuckets": 64}
    rates = [
        row["documents_per_s"]
        for wanted in ({**few, "vbuckets": case["vbuckets"]}, few)
        for row in results
        if all(row[name] == value for name, value in wanted.items())
    ]
    if case["vbuckets"] == few["vbuckets"] or len(rates) < 2:
        return []
    whose = f"documents/s of {BATCHES} with {case['vbuckets']:,} vbuckets"
    return [verdict(whose, rates[0] / rates[-1], "that with 64", "documents/s", MANY_VBUCKETS_SHARE)]


def machine() -> str:
    """The machine, in one line."""
    model, memory = platform.machine(), 0
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} cores ({model}), {memory} GiB, {platform.system()} {platform.release()}; "
        f"{load:.1f} processes ran on it already when this began"
    )


def versions() -> str:
    """The versions of what ran, in one line."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=HERE, check=False, capture_output=True, text=True
    ).stdout.strip()
    java = re.search(r"<version>([\d.]+\.\d+)</version>", (HERE / "java" / "pom.xml").read_text())
    go = re.search(r"gocbcore/v10 v(\S+)", (HERE / "go" / "go.mod").read_text())
    go_dcp = re.search(r"go-dcp v(\S+)", (HERE / "go-dcp" / "go.mod").read_text())
    assert java is not None and go is not None and go_dcp is not None
    return (
        f"Tailrace {__version__} (commit {commit or 'unknown'}), Python {platform.python_version()}; "
        f"java-dcp-client {java[1]}, gocbcore {go[1]}, go-dcp {go_dcp[1]}"
    )


def write_markdown(page: Path, ran_on: str, cases: list[Case]) -> None:
    """Put the tables into a page, between the two comments that mark their place."""
    options = shlex.join(sys.argv[1:])
    lines = ["", f"Made by `python bench/peers/run.py {options}`.", "", f"- {ran_on}", f"- {versions()}"]
    for title, rows, ratios in cases:
        lines += ["", f"**{title}**", "", f"| {' | '.join(COLUMNS)} |", "|---" + "|---:" * 5 + "|"]
        for row in rows:
            lines.append(
                f"| {row['reader']} | {row['documents_per_s']:,} | {row['cpu_s_per_million']:.2f} s |"
                f" {row['node_cpu_s_per_million']:.2f} s | {row['first_change_s'] * 1000:.0f} ms |"
                f" {row['peak_mib']} MiB |"
            )
        lines += ["", *(f"- {line}" for line in ratios)]
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, behind = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} has no place for the tables: {BEGIN} … {END}")
    page.write_text(before + begin + "\n".join(lines) + "\n\n" + end + behind)


def shapes(options: argparse.Namespace) -> list[tuple[int, int, int]]:
    """Number of documents, their size and vbuckets of each bucket to measure, each once."""
    wanted = [
        (min(docs, (options.most_mib << 20) // size), size, vbuckets)
        for docs in map(int, options.docs.split(","))
        for size in map(int, options.sizes.split(","))
        for vbuckets in map(int, options.vbuckets.split(","))
    ]
    return list(dict.fromkeys(wanted))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--docs", default="1000000", help="several with commas")
    parser.add_argument("--sizes", default="64,256,1024,65536")
    parser.add_argument("--vbuckets", default="64,1024")
    parser.add_argument("--over", default="plain", help="plain, snappy, tls; several with commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--readers", default="", help="only these, by name, separated by semicolons")
    parser.add_argument(
        "--most-mib", type=int, default=2048, help="fewer documents where they would be larger"
    )
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--markdown", type=Path, help="put the tables into this page, docs/benchmarks.md")
    options = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", str(HERE.parents[1] / "src"))
    ran_on = machine()
    print(f"{versions()}\n{ran_on}")
    results: list[dict[str, Any]] = []
    cases: list[Case] = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        commands = programs(scratch, {word for word in options.readers.split(";") if word})
        for docs, size, vbuckets in shapes(options):
            for is_compressed in (False, True):
                words = [over for over in options.over.split(",") if (over == "snappy") == is_compressed]
                if not words:
                    continue
                directory = Path(tempfile.mkdtemp(dir=scratch))
                fill(directory, docs, size, vbuckets, is_compressed=is_compressed)
                for over in words:
                    title = f"{docs:,} documents of {size} B in {vbuckets} vbuckets, {over}"
                    print(f"{title}:", flush=True)
                    readers = measure(
                        commands, directory, docs, vbuckets=vbuckets, over=over, rounds=options.rounds
                    )
                    case = {"documents": docs, "size": size, "vbuckets": vbuckets, "over": over}
                    ratios = verdicts(readers, size)
                    rows = show(readers, docs, ratios)
                    results += [case | row for row in rows]
                    for line in many_vbuckets(results, case):
                        print(f"  {line}", flush=True)
                        ratios.append(line)
                    cases.append((title, rows, ratios))
                shutil.rmtree(directory)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    if options.markdown:
        write_markdown(options.markdown, ran_on, cases)


if __name__ == "__main__":
    main()
