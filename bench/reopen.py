"""A million documents: how long `tailrace load` takes, and how long the node takes to be ready again.

    python bench/reopen.py [--docs N] [--size BYTES]

A `tailrace serve` process is loaded by a `tailrace load` process, which shows a bar in a terminal, then
stopped and started again three times on the same directory: twice after a clean stop, once after a kill. It
is ready when the ready file is there, so the interpreter's start and all imports count; modules are compiled
to bytecode as in any installation, even if the environment forbids writing it.

Target: ready in less than 1 s, each time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TARGET_S = 1.0


def start(directory: Path) -> tuple[subprocess.Popen[bytes], int, float]:
    """Start a node: the process, its port, and the seconds until it was ready."""
    ready = directory / "ready.json"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tailrace", "serve", "--port", "0"]
    command += ["--data", str(directory / "data"), "--ready-file", str(ready)]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not ready.exists():
        if process.poll() is not None:
            raise SystemExit("the node did not start")
        time.sleep(0.002)
    return process, json.loads(ready.read_text())["port"], time.perf_counter() - began


def rss_mib(process: subprocess.Popen[bytes]) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) // 1024


def cpu_s(process: subprocess.Popen[bytes]) -> float:
    """CPU time of the process so far, which a busy machine distorts less than elapsed time."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docs", type=int, default=1_000_000)
    parser.add_argument("--size", type=int, default=256)
    options = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parent.parent / "src"))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(directory / "bytecode")
        node, port, _ = start(directory)
        try:
            began = time.perf_counter()
            command = [sys.executable, "-m", "tailrace", "load", f"couchbase://127.0.0.1:{port}"]
            subprocess.run(
                [*command, "--docs", str(options.docs), "--size", str(options.size)],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            taken = time.perf_counter() - began
            print(
                f"load of {options.docs:,} documents of {options.size} B: {taken:.1f} s, "
                f"largest RSS of the node {rss_mib(node)} MiB",
                flush=True,
            )
            for how in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
                node.send_signal(how)
                node.wait()
                node, _, seconds = start(directory)
                print(
                    f"ready after {how.name}: {seconds:.2f} s (CPU {cpu_s(node):.2f} s)  "
                    f"target {TARGET_S:.0f} s: {'ok' if seconds < TARGET_S else 'MISSED'}",
                    flush=True,
                )
        finally:
            node.terminate()
            node.wait()


if __name__ == "__main__":
    main()
