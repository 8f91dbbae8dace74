"""Puts the pages' chart library into the package: uPlot's built file, which comes with a build requirement.

It is not in the repository, which holds no third-party code; a wheel has it, and so does a source tree after
``pip install -e .`` (in ``src/tailrace/web/vendor``, which git ignores). So pages need no network for it.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FILES = {
    "uPlot.iife.js": "655bc8aa33781e8721c5af6b59f1699c03c9bda951aa74a6ab518ac20cc4326d",
    "uPlot.min.css": "3f121cd4a997b634e07a887658850018e475c26f0bddd874109a8d382c19de87",
}
"""uPlot 1.6.16 by SHA-256, as it is in uplot-python 1.1.1: only the reviewed files are shipped."""
_FOLDER = "src/tailrace/web/vendor"


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Called for wheels, editable ones too."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Copy the files."""
        found = importlib.util.find_spec("uplot")  # not imported: that would need many more packages
        if found is None or found.origin is None:
            raise RuntimeError("the pages need a chart library: pip install uplot-python==1.1.1")
        target = Path(self.root, _FOLDER)
        target.mkdir(exist_ok=True)
        for name, digest in _FILES.items():
            data = Path(found.origin).with_name("static").joinpath(name).read_bytes()
            if hashlib.sha256(data).hexdigest() != digest:
                raise RuntimeError(f"{name} of uplot-python is not the file that was reviewed")
            target.joinpath(name).write_bytes(data)
        build_data["artifacts"].append(f"/{_FOLDER}/*")
