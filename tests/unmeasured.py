"""Programs that `make coverage` does not measure."""

from __future__ import annotations

import os


def unmeasured() -> dict[str, str]:
    """An environment for a program that can write no file, or no large one: a measured program writes one."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
