"""Files in a directory that nobody is to run."""

from __future__ import annotations

from pathlib import Path

MODULES = ("attrs", "base64", "json", "select", "sitecustomize", "subprocess")
"""Of which each process of the package needs some."""


def plant(directory: Path) -> Path:
    """Return a directory with files that end whoever imports them, named as modules that all import."""
    for name in MODULES:
        (directory / f"{name}.py").write_text("import os\nos._exit(99)\n")
    return directory
