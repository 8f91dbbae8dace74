"""What ``tailrace.spark`` gives is what it says, also when its modules are loaded already."""

from __future__ import annotations

import importlib
import pkgutil

import tailrace.spark


def test_no_module_takes_the_place_of_a_name() -> None:
    for module in pkgutil.iter_modules(tailrace.spark.__path__):
        importlib.import_module(f"tailrace.spark.{module.name}")
    for name in tailrace.spark.__all__:
        assert callable(getattr(tailrace.spark, name)), name
