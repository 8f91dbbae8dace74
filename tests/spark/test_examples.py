"""The examples run as they are."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

import tailrace.testing
from spark.test_wrong_uses import TRY_ALL, all_wrong, assert_all_told, guarded_node
from spark.too_slow import PATIENT
from tailrace.spark.spark_session import prepare_environment

pytestmark = pytest.mark.spark
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.xdist_group("spark-programs")
def test_the_notebook_in_a_real_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what a wrong use looks like there."""
    prepare_environment()
    settings = " ".join(f"--conf {name}={value}" for name, value in PATIENT.items())
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", f"{settings} --conf spark.ui.enabled=false pyspark-shell")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    source = 'ts.mirror(spark, NODE, table, options={"bucket": "nope"})'
    wrong = nbformat.v4.new_code_cell(source)  # type: ignore[no-untyped-call]
    wrong.metadata["tags"] = ["raises-exception"]
    every_wrong = nbformat.v4.new_code_cell(TRY_ALL)  # type: ignore[no-untyped-call]
    notebook.cells += [every_wrong, wrong]
    with tailrace.testing.node(vbuckets=4) as node, guarded_node() as guarded:
        monkeypatch.setenv("WRONG_USES", all_wrong(guarded))
        for number in range(20):
            node.set(f"k{number}", {"name": f"n{number}", "age": number})
        monkeypatch.setenv("NODE", node.url)
        nbclient.NotebookClient(
            notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}
        ).execute()
    shown = [
        "".join(
            output.get("text", "") or output.get("data", {}).get("text/html", "")
            for output in cell.get("outputs", ())
            if output.get("name") != "stderr"
        )
        for cell in notebook.cells
    ]
    page = "\n".join(shown)
    assert "|mutation|   20|" in page
    assert "|-- age: long" in page
    assert '|notebook::1|{"from": "a notebook"}|' in page
    handles = [text for text in shown if "<caption>tailrace mirror of default</caption>" in text]
    assert len(handles) == 2 and "True" in handles[1] and "21 in " in handles[1]
    assert "False" in shown[-5]
    assert "21 changes; in the table are 21 documents" in page
    assert_all_told(shown[-2])
    (error,) = wrong.outputs
    assert (error.ename, error.evalue) == (
        "NoSuchBucket",
        "the server has no bucket 'nope', or requires a login for it; check the name, or give user name and "
        "password",
    )


@pytest.mark.xdist_group("spark")
def test_the_job(spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tailrace.testing.node(vbuckets=4) as node:
        for number in range(20):
            node.set(f"k{number}", {"name": f"n{number}", "age": number})
        job = runpy.run_path(str(EXAMPLES / "job.py"))
        assert job["main"](node.url, str(tmp_path / "table")) == 0
        assert "20 documents, 20 rows, 0 differences" in capsys.readouterr().out


@pytest.mark.xdist_group("spark")
def test_the_typed_session_is_as_recorded(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("couchbase")
    runpy.run_path(str(EXAMPLES / "typed_session.py"))["main"](spark, tmp_path)
    page = (EXAMPLES.parent / "docs" / "typed.md").read_text()
    recorded = page.partition("## A session")[2].partition("```text\n")[2].partition("```")[0]
    assert capsys.readouterr().out.split() == recorded.split()


@pytest.mark.xdist_group("spark-programs")
def test_the_job_by_spark_submit(tmp_path: Path) -> None:
    import pyspark

    prepare_environment()
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "SPARK_LOCAL_IP": "127.0.0.1"}
    settings = [f"--conf={name}={value}" for name, value in PATIENT.items()]
    settings += ["--conf=spark.ui.enabled=false"]
    with tailrace.testing.node(vbuckets=4) as node:
        for number in range(20):
            node.set(f"k{number}", {"n": number})
        job = [str(EXAMPLES / "job.py"), node.url, str(tmp_path / "table")]
        command = [str(submit), "--master", "local[2]", *settings, *job]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "20 documents, 20 rows, 0 differences" in done.stdout
