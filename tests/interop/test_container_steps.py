"""The image, as far as it can be tested without a container engine: it has its files and no others, its
commands are run, and what is installed then starts by its entry point and is healthy by its own check.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from interop.test_prometheus import PATIENCE_S, wait_for

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]


def test_the_steps_of_the_image_give_a_node_that_is_healthy(tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "container" / "Containerfile").read_text()
    source, home = tmp_path / "src", tmp_path / "opt"
    source.mkdir()
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.M):
        *files, target = line.split()
        for file in files:
            place = source / target / (file if (ROOT / file).is_file() else "")
            if (ROOT / file).is_dir():
                shutil.copytree(ROOT / file, place, ignore=shutil.ignore_patterns("__pycache__", "vendor"))
            else:
                shutil.copy(ROOT / file, place)
    (step,) = re.findall(r"^RUN (python -m venv.*?)$(?!\n &&)", text.replace("\\\n", ""), re.M)
    step = step.replace("/opt/tailrace", str(home)).replace("python -m", f"{sys.executable} -m", 1)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        ["sh", "-ec", step], cwd=source, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.M)
    (arguments,) = re.findall(r"^CMD (.*)$", text, re.M)
    (check,) = re.findall(r"^ +CMD (.*)$", text, re.M)
    ready, lib = tmp_path / "ready.json", tmp_path / "var"
    lib.mkdir()
    words = [word.replace("/opt/tailrace", str(home)) for word in json.loads(entry)] + json.loads(arguments)
    words[words.index("9210")] = "0"
    words += ["--port", "0", "--ready-file", str(ready)]
    with subprocess.Popen(words, cwd=lib, env=environment, stdout=subprocess.DEVNULL) as node:
        try:
            wait_for(ready.exists)
            port = json.loads(ready.read_text())["web_port"]
            check = check.replace("/opt/tailrace", str(home)).replace("9210", str(port))
            assert subprocess.run(json.loads(check), cwd=lib, env=environment, check=False).returncode == 0
        finally:
            node.terminate()
            assert node.wait(PATIENCE_S) == 0
    (installed,) = home.glob("lib/python*/site-packages/tailrace/web/vendor")
    assert {path.name for path in installed.iterdir()} == {"uPlot.iife.js", "uPlot.min.css"}
