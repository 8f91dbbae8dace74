"""The examples of docs/faults.md in other languages do what they say: each provokes a rollback."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "faults.md"
VBUCKETS = 4

# what surrounds an example: a program, its name, and the command that runs it
AROUND = {
    "go": (
        'package main\nimport (\n"fmt"\n"net/http"\n"os"\n"strings"\n)\n'
        "type T struct{}\nfunc (T) Fatal(what ...any) { fmt.Println(what...); os.Exit(1) }\n"
        "func main() {\nvar t T\nbase := os.Args[1]\n%s}\n",
        "main.go",
        ["go", "run"],
    ),
    "java": (
        "import java.net.URI;\nimport java.net.http.*;\nclass Main {\n"
        "static void assertEquals(Object a, Object b) { if (!a.equals(b)) throw new AssertionError(b); }\n"
        "public static void main(String[] args) throws Exception {\nvar base = args[0];\n%s}\n}\n",
        "Main.java",
        ["java"],
    ),
    "javascript": (
        'import assert from "node:assert";\nconst base = process.argv[2];\n%s',
        "main.mjs",
        ["node"],
    ),
}

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]


@pytest.fixture
def base(tmp_path: Path) -> Iterator[str]:
    """The base URL of a node with documents in every vbucket."""
    ready, log = tmp_path / "ready.json", tmp_path / "log"
    program = [sys.executable, "-m", "tailrace"]
    command = [*program, "serve", "--memory", "--vbuckets", str(VBUCKETS), "--port", "0", "--http-port", "0"]
    command += ["--fault-token", "letmein", "--ready-file", str(ready)]
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as node:
        try:
            while not ready.exists():
                assert node.poll() is None, log.read_text()
                time.sleep(0.02)
            told = json.loads(ready.read_text())
            load = [*program, "load", f"couchbase://127.0.0.1:{told['port']}", "--docs", "100"]
            subprocess.run(load, check=True, capture_output=True)
            yield f"http://127.0.0.1:{told['web_port']}"
        finally:
            node.terminate()
            node.wait(60)


@pytest.mark.parametrize("language", AROUND)
def test_an_example_provokes_a_rollback(language: str, base: str, tmp_path: Path) -> None:
    around, name, command = AROUND[language]
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}")
    (example,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    (tmp_path / name).write_text(around.replace("%s", example))
    done = subprocess.run([*command, name, base], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with urllib.request.urlopen(f"{base}/api/events", timeout=60) as answer:
        failover, fault = json.load(answer)["events"]
    assert (failover["event"], failover["lost_changes"]) == ("failover", VBUCKETS)
    assert fault["text"] == "fault kind=rewind lose=1 vbucket=all"
