"""One Spark session for all tests of a worker process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_timeout
from _pytest.runner import runtestprotocol

from spark.too_slow import PATIENT, PYTHON_WAS_TOO_SLOW, STARTS
from tailrace.spark.spark_session import session

_STARTED_AGAIN = "started again"


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    warehouse: Path = tmp_path_factory.mktemp("warehouse")
    spark = session(
        "tailrace tests",
        master="local[2,3]",
        **{
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(warehouse),
            "spark.sql.streaming.noDataProgressEventInterval": "1s",
            "spark.driver.memory": "2g",
            **PATIENT,
            "spark.driver.extraJavaOptions": "-Duser.timezone=UTC",
            "spark.sql.session.timeZone": "UTC",
        },
    )
    spark.sparkContext.setLogLevel("ERROR")
    yield spark
    spark.stop()


@pytest.fixture(autouse=True)
def no_leaked_queries(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that forgets its query must not disturb the next one."""
    if "spark" in request.fixturenames:
        group = request.node.get_closest_marker("xdist_group")
        assert group is not None and group.args == ("spark",), "each worker would start a Java of its own"
    yield
    if "spark" in request.fixturenames:
        for query in request.getfixturevalue("spark").streams.active:
            query.stop()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test once more, with new fixtures and its full time, if Spark gave up on a Python process that
    was slow to start. The summary names these tests.
    """
    if item.get_closest_marker("spark") is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for start in range(1, STARTS + 1):
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        failures = [str(report.longrepr) for report in reports if report.failed]
        if start == STARTS or not any(PYTHON_WAS_TOO_SLOW in text for text in failures):
            break
        _give_all_its_time(item)
    for report in reports:
        if report.when == "call" and start > 1:
            report.user_properties.append((_STARTED_AGAIN, start))
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _give_all_its_time(item: pytest.Item) -> None:
    """Restart the timer of pytest-timeout, which a failure ends."""
    settings = pytest_timeout._get_item_settings(item)
    if settings.timeout and not settings.func_only:
        item.config.hook.pytest_timeout_set_timer(item=item, settings=settings)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in (entry for entries in terminalreporter.stats.values() for entry in entries):
        for name, starts in getattr(report, "user_properties", ()):
            if name == _STARTED_AGAIN:
                terminalreporter.write_line(
                    f"{report.nodeid}: start {starts}, Spark did not wait for a Python process before"
                )
