"""What ``tailrace.spark`` gives is what it says, also when its modules are loaded already."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import tailrace.spark
from tailrace.errors import UsageError


def test_no_module_takes_the_place_of_a_name() -> None:
    for module in pkgutil.iter_modules(tailrace.spark.__path__):
        importlib.import_module(f"tailrace.spark.{module.name}")
    for name in tailrace.spark.__all__:
        assert callable(getattr(tailrace.spark, name)), name


def test_a_setting_that_a_mirror_does_not_have_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="there is no setting 'onec'; did you mean 'once'"):
        tailrace.spark.mirror(None, "couchbase://127.0.0.1", "t", onec=True)  # type: ignore[arg-type,call-arg]
