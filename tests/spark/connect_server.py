"""A Spark Connect server in a process of its own, on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ports import ReservedPort
from spark.too_slow import PATIENT

PATIENCE_S = 180.0


@contextmanager
def connect_server(directory: Path, python: str = sys.executable) -> Iterator[str]:
    """The ``sc://`` address of a server of the Spark that ``python`` has.

    Its workers run the `tailrace-python` beside ``python``, as the workers of a server should.
    """
    reserved = ReservedPort()
    programs = Path(python).parent
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(reserved.number),
        "spark.ui.enabled": "false",
        "spark.log.level": "ERROR",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        **PATIENT,
    }
    command = [str(programs / "spark-submit"), "--master", "local[2,3]"]
    command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    command += [f"--conf={name}={value}" for name, value in settings.items()]
    command += ["spark-internal"]
    environment = os.environ | {
        "PYSPARK_PYTHON": str(programs / "tailrace-python"),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    environment.pop("SPARK_HOME", None)
    log = directory / "connect.log"
    with log.open("wb") as out:
        server = subprocess.Popen(command, env=environment, cwd=directory, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", reserved.number), timeout=1).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")
                time.sleep(0.1)
        yield f"sc://127.0.0.1:{reserved.number}"
    finally:
        server.kill()
        server.wait()
        reserved.close()
