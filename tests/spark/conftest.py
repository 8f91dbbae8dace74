"""One Spark session for all tests of a worker process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

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


_TOO_SLOW = ("failed to connect back", "CANNOT_OPEN_SOCKET")
_STARTS = 3


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test once more, with new fixtures, if Spark gave up on a Python process that was slow to start.

    Spark waits ten seconds for one, and nothing can be set about it. A machine that is busy with other things
    may need longer; that says nothing about what the test is about.
    """
    if item.get_closest_marker("spark") is None:
        return None
    for start in range(_STARTS):
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        if start:
            item._initrequest()  # type: ignore[attr-defined]  # as pytest-rerunfailures does it
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        failures = [str(report.longrepr) for report in reports if report.failed]
        if not any(word in text for word in _TOO_SLOW for text in failures):
            break
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
