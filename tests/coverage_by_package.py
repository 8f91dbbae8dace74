"""What the suite runs, by package: ``coverage_by_package.py COVERAGE.json``, from ``coverage json``.

Below the table are the functions that never ran.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any


def package(path: str) -> str:
    """The folder of a module below src, or the package itself."""
    parts = Path(path).parts
    inside = parts[parts.index("src") + 1 : -1] if "src" in parts else parts[:-1]
    return "/".join(inside[:3])


def table(report: dict[str, Any]) -> list[str]:
    """A line for each package, and one for all."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for path, file in report["files"].items():
        for name in (package(path), "all"):
            sums[name].update(
                {key: value for key, value in file["summary"].items() if isinstance(value, int)}
            )
    lines = [f"{'package':<28}{'lines':>8}{'not run':>9}{'branches':>10}{'not taken':>11}{'covered':>9}"]
    for name in sorted(sums, key=lambda name: (name == "all", name)):
        counts = sums[name]
        whole = counts["num_statements"] + counts["num_branches"]
        share = (counts["covered_lines"] + counts["covered_branches"]) / whole if whole else 1.0
        lines.append(
            f"{name:<28}{counts['num_statements']:>8}{counts['missing_lines']:>9}"
            f"{counts['num_branches']:>10}{counts['missing_branches']:>11}{share:>9.1%}"
        )
    return lines


def never_run(report: dict[str, Any]) -> list[str]:
    """The functions that no test calls."""
    return [
        f"{path}:{function['start_line']}: {name}"
        for path, file in sorted(report["files"].items())
        for name, function in file.get("functions", {}).items()
        if name and function["summary"]["num_statements"] and not function["summary"]["covered_lines"]
    ]


if __name__ == "__main__":
    report = json.loads(Path(sys.argv[1]).read_text())
    print("\n".join([*table(report), "", "never run:", *never_run(report)]))
