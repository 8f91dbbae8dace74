"""Set-up for every test, however the suite is started and however busy the machine is."""

from __future__ import annotations

import logging
import os
import shlex
import signal
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

import quick_java

# Properties are about what is true, not about how fast a busy machine checks it.
settings.register_profile("tailrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tailrace")

# A shell without job control ignores Ctrl-C in what it starts with "&", and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("SPARK_SUBMIT_OPTS", shlex.join(quick_java.OPTIONS))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start slow tests first, keeping their order: one that starts last runs alone at the end, and the other
    workers have nothing to do. (pytest-xdist itself hands out groups before single tests.)
    """
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    _name_groups(config, items)


def _name_groups(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of a group on one worker (``--dist loadgroup``), which their ids tell: pytest 9.2 does
    not see the ids that pytest-xdist up to 3.8 gives them.
    """
    if not getattr(config.option, "loadgroup", False) or not hasattr(pytest.Item, "id"):
        return  # nobody asks for groups, or this pytest sees them
    for item in items:
        group = item.get_closest_marker("xdist_group")
        if group is not None and not item.nodeid.endswith(f"@{group.args[0]}"):
            item._id = type(item.id).parse(f"{item.nodeid}@{group.args[0]}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Restore logging after a test: a command that it calls logs to a stream that ends with the test."""
    root, package = logging.getLogger(), logging.getLogger("tailrace")
    handlers, levels = root.handlers[:], (root.level, package.level)
    try:
        return (yield)
    finally:
        root.handlers[:] = handlers
        root.setLevel(levels[0])
        package.setLevel(levels[1])
