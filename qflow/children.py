"""Python in a process of its own: it finds what this one finds, and runs no file of the directory it is started in."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PACKAGE = str(Path(__file__).parent.parent)
"""Where this package is found."""


def command(module: str, *arguments: str) -> list[str]:
    """Return the words that run a module; they go with `environment`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Return the environment of a process that looks for modules where this one does.

    An empty entry of `sys.path` stands for the current directory, which may be anybody's: this package alone is looked
    for in its place.
    """
    return {**os.environ, "PYTHONPATH": os.pathsep.join(one or PACKAGE for one in sys.path)}
