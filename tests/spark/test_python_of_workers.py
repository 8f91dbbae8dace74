"""Spark's Python processes use the compiled modules of the installed pyspark, if they are the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyspark
import pytest

from tailrace.spark.spark_session import prepare_environment, python_of_workers
from tailrace.spark.worker_python import COMMAND, path_without_archive

PACKAGES = str(Path(pyspark.__file__).parents[1])
ARCHIVE = os.path.join(PACKAGES, "pyspark", "python", "lib", "pyspark.zip")


def test_the_archive_of_this_environment_is_taken_off_the_path() -> None:
    path = os.pathsep.join(["/first", ARCHIVE, "/last"])
    assert path_without_archive(path, ["/usr/lib", PACKAGES]) == "/first:/last"


def test_the_same_folder_by_another_name_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "lib64").symlink_to(PACKAGES)
    assert path_without_archive(ARCHIVE, [str(tmp_path / "lib64")]) == ""


@pytest.mark.parametrize(
    "entry",
    [
        "/opt/spark/python/lib/pyspark.zip",
        "/elsewhere/pyspark/python/lib/pyspark.zip",
        ARCHIVE + "/more",
        "pyspark.zip",
        "",
    ],
)
def test_every_other_entry_stays(entry: str) -> None:
    path = os.pathsep.join([entry, "/last"])
    assert path_without_archive(path, [PACKAGES]) == path


def test_the_command_is_this_python_without_the_archive() -> None:
    """As Spark starts it: the archive is first on the path."""
    show = "import sys, pyspark; print(sys.prefix, pyspark.__file__, sys.argv[1:])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([ARCHIVE, os.environ.get("PYTHONPATH", "")])}
    told = subprocess.run(
        [python_of_workers(), "-c", show, "a b"], env=environment, check=True, capture_output=True, text=True
    )
    assert told.stdout.split() == [sys.prefix, pyspark.__file__, "['a", "b']"]


def test_it_is_what_spark_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    monkeypatch.delenv("PYSPARK_DRIVER_PYTHON", raising=False)
    prepare_environment()
    quick = str(Path(sys.executable).with_name(COMMAND))
    assert os.environ["PYSPARK_PYTHON"] == quick
    assert os.environ["PYSPARK_DRIVER_PYTHON"] == quick, "the one of sources that Spark found by itself"


def test_where_the_command_is_missing_this_python_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert python_of_workers() == str(tmp_path / "python")


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_workers_of_a_session_do_not_know_the_archive(spark: Any) -> None:
    def seen(_: int) -> list[str]:
        import sys

        import pyspark

        return [pyspark.__file__, *sys.path]

    path = spark.sparkContext.parallelize([0], 1).map(seen).collect()[0]
    assert path[0] == pyspark.__file__
    assert not [entry for entry in path if entry.endswith("pyspark.zip")]
