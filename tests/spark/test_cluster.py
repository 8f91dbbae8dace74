"""A standalone Spark cluster, a master and two workers on loopback, runs the same test as local mode.

The driver is a process that spark-submit starts: this one may have a local session already.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

import quick_java
from spark.too_slow import PATIENT
from tailrace.spark.spark_session import prepare_environment

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark-programs"), pytest.mark.timeout(900)]

_PATIENCE_S = 120.0


@contextmanager
def cluster(directory: Path, hidden: Sequence[Path] | None = None) -> Iterator[str]:
    """The URL of a master with two workers of one core each, whose working directory and PATH differ from the
    driver's.

    With ``hidden`` they have no module of ours, and see nothing in these folders.
    """
    prepare_environment()
    import pyspark

    home = Path(pyspark.__file__).parent
    environment = os.environ | {
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_WORKER_DIR": str(directory / "workers"),
        "HOME": str(directory),
        "PATH": os.defpath,
        "SPARK_SCALA_VERSION": next(home.glob("jars/spark-core_*.jar")).name.split("_")[1].split("-")[0],
    }
    environment = {
        name: value
        for name, value in environment.items()
        if name not in ("PYSPARK_PYTHON", "PYTHONPATH", "TMPDIR")
    }
    if hidden is None:
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    home_of_java = environment.get("JAVA_HOME") or str(Path(shutil.which("java") or "").resolve().parents[1])
    environment["JAVA_HOME"] = home_of_java
    java = Path(home_of_java) / "bin" / "java"
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str) -> Path:
        log = directory / f"{name}.log"
        command = [
            *_hiding(hidden or ()),
            str(java),
            "-cp",
            f"{next(home.glob('jars/slf4j-api-*.jar'))}:{home}/jars/*",  # in the order of Spark's own scripts
            "-Xmx256m",
            *quick_java.OPTIONS,
            *OPENED,
            *arguments,
        ]
        with log.open("wb") as out:
            started.append(subprocess.Popen(command, env=environment, cwd=directory, stdout=out, stderr=out))
        return log

    try:
        ports = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        log = start("master", "org.apache.spark.deploy.master.Master", *ports)
        url = _waited_for(log, r"Starting Spark master at (spark://\S+)")
        for number in range(2):
            limits = ["--cores", "1", "--memory", "1g"]
            start(f"worker-{number}", "org.apache.spark.deploy.worker.Worker", *ports, *limits, url)
        for number in range(2):
            _waited_for(directory / f"worker-{number}.log", r"(Successfully registered) with master")
        yield url
    finally:
        for process in started:
            process.kill()
            process.wait()


def _hiding(folders: Sequence[Path]) -> list[str]:
    """The beginning of a command that is to see these folders empty."""
    if not folders:
        return []
    mounts = " && ".join(f"mount -t tmpfs none {shlex.quote(str(folder))}" for folder in folders)
    return ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh"]


SETTINGS = [
    "--conf=spark.ui.enabled=false",
    "--conf=spark.log.level=ERROR",
    "--conf=spark.executor.memory=512m",
    f"--conf=spark.driver.extraJavaOptions={shlex.join(quick_java.OPTIONS)}",
    f"--conf=spark.executor.extraJavaOptions={shlex.join(quick_java.OPTIONS)}",
    *(f"--conf={name}={value}" for name, value in PATIENT.items()),
]
OPENED = [
    f"--add-opens=java.base/{package}=ALL-UNNAMED"
    for package in ("java.lang", "java.nio", "java.util", "sun.nio.ch", "java.net", "java.util.concurrent")
]


def _waited_for(log: Path, pattern: str) -> str:
    patience = time.monotonic() + _PATIENCE_S
    while time.monotonic() < patience:
        match = re.search(pattern, log.read_text(errors="replace"))
        if match:
            return match[1]
        time.sleep(0.1)
    raise AssertionError(f"{log.name} does not say {pattern!r}:\n{log.read_text(errors='replace')[-3000:]}")


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with cluster(tmp_path_factory.mktemp("cluster")) as url:
        yield url


def submit(master: str, job: str, directory: Path) -> str:
    """Run a job of this folder; what it printed last."""
    import pyspark

    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "SPARK_LOCAL_IP": "127.0.0.1"}
    program = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    command = [str(program), "--master", master, *SETTINGS, str(Path(__file__).parent / job), str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()[-1]


def test_mirror_rollback_and_verify_on_a_cluster(master: str, tmp_path: Path) -> None:
    assert submit(master, "core_scenario.py", tmp_path) == "2", "not on two executors"


def test_an_executor_is_killed_in_mid_batch(master: str, tmp_path: Path) -> None:
    assert submit(master, "executor_kill.py", tmp_path) == "killed"
