"""The examples run as they are."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tailrace.testing
from spark.too_slow import PATIENT
from tailrace.spark.spark_session import prepare_environment

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_examples(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with tailrace.testing.node(vbuckets=4) as node:
        for number in range(20):
            node.set(f"k{number}", {"name": f"n{number}", "age": number})
        monkeypatch.setenv("NODE", node.url)
        runpy.run_path(str(EXAMPLES / "notebook.py"), run_name="__main__")
        assert "|mutation|   20|" in capsys.readouterr().out
        job = runpy.run_path(str(EXAMPLES / "job.py"))
        assert job["main"](node.url, str(tmp_path / "table")) == 0
        assert "20 documents, 20 rows, 0 differences" in capsys.readouterr().out


def test_the_job_by_spark_submit(tmp_path: Path) -> None:
    import pyspark

    prepare_environment()
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "SPARK_LOCAL_IP": "127.0.0.1"}
    settings = ["--conf=spark.ui.enabled=false", "--driver-java-options", "-XX:TieredStopAtLevel=1"]
    settings += [f"--conf={name}={value}" for name, value in PATIENT.items()]
    with tailrace.testing.node(vbuckets=4) as node:
        for number in range(20):
            node.set(f"k{number}", {"n": number})
        job = [str(EXAMPLES / "job.py"), node.url, str(tmp_path / "table")]
        command = [str(submit), "--master", "local[2]", *settings, *job]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "20 documents, 20 rows, 0 differences" in done.stdout
