"""One Spark session for all tests of a worker process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailrace.spark.session import session


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    warehouse: Path = tmp_path_factory.mktemp("warehouse")
    found = session(
        "tailrace tests",
        master="local[2,3]",
        **{
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(warehouse),
            "spark.sql.streaming.noDataProgressEventInterval": "1s",
            "spark.driver.memory": "2g",
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -Duser.timezone=UTC",
            "spark.sql.session.timeZone": "UTC",
        },
    )
    found.sparkContext.setLogLevel("ERROR")
    yield found
    found.stop()


@pytest.fixture(autouse=True)
def no_leaked_queries(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that forgets its query must not disturb the next one."""
    yield
    if "spark" in request.fixturenames:
        for query in request.getfixturevalue("spark").streams.active:
            query.stop()
