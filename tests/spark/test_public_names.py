"""The names of ``tailrace.spark`` are what it declares, even if its modules are loaded already."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any, get_type_hints

import pytest

import tailrace.spark
from tailrace.errors import UsageError
from tailrace.spark.rounds.setup import MirrorKeywords, build_mirror


def test_no_module_takes_the_place_of_a_name() -> None:
    for module in pkgutil.iter_modules(tailrace.spark.__path__):
        importlib.import_module(f"tailrace.spark.{module.name}")
    for name in tailrace.spark.__all__:
        assert callable(getattr(tailrace.spark, name)), name


def test_a_setting_that_a_mirror_does_not_have_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="there is no setting 'onec'; did you mean 'once'"):
        tailrace.spark.mirror(None, "couchbase://127.0.0.1", "t", onec=True)  # type: ignore[arg-type,call-arg]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"once": "no"}, "once must be true or false, not 'no' (str)"),
        ({"trigger_s": "5"}, "trigger_s must be a number or None, not '5' (str)"),
        ({"undo_bytes": 1.5}, "undo_bytes must be a whole number or None, not '1.5' (float)"),
        ({"changes": 5}, "changes must be text or a path or None, not '5' (int)"),
        ({"options": "retryFor=5"}, "options must be a dictionary of texts or None, not 'retryFor=5' (str)"),
        ({"on_trouble": None}, "on_trouble must be a function, not 'None' (NoneType)"),
        ({"start_over": "0-7"}, "start_over must be a list, not '0-7' (str)"),
        ({"policy": 1}, "policy must be a CompactionPolicy or None, not '1' (int)"),
    ],
)
def test_a_setting_of_the_wrong_type_is_said_in_one_line(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        tailrace.spark.mirror(None, "couchbase://127.0.0.1", "t", **given)  # type: ignore[arg-type]
    assert str(raised.value) == says


def test_settings_are_shown_with_their_defaults() -> None:
    shown = inspect.signature(tailrace.spark.mirror).parameters
    assert list(shown) == ["spark", "url", "tables", *MirrorKeywords.__annotations__]
    assert (shown["once"].default, shown["maintenance"].default) == (False, True)
    declared = inspect.signature(build_mirror).parameters
    assert {name: parameter.annotation for name, parameter in shown.items() if name in declared} == {
        name: declared[name].annotation for name in shown if name in declared
    }


def test_the_keywords_are_those_of_the_mirror_that_is_built() -> None:
    hints, own = get_type_hints(MirrorKeywords), get_type_hints(build_mirror)
    assert hints == {name: own[name] for name in hints}
    assert own.keys() - hints.keys() == {"jobs", "url", "tables", "clock", "in_background", "return"}
