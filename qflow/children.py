"""Python in a process of its own: it finds what this one finds, and runs no file of the directory it is started in."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from qflow.errors import NotFound

PACKAGE = str(Path(__file__).parent.parent)
"""Where this package is found."""


def check_there(path: str, what: str) -> None:
    """Refuse what needs a file, or a directory, of this package that is none, as in a zip file.

    Args:
        what: what needs it, as a sentence begins: "workers need".

    Raises:
        NotFound: it is not there.
    """
    if not os.path.exists(path):
        raise NotFound(
            f"{what} {path}, which is not there: qflow was imported from a zip file, or is installed in part; install "
            "it with pip, as files"
        )


def interpreter() -> str:
    """Return the interpreter: a program that embeds it has its own name in `sys.executable`."""
    if "python" in os.path.basename(sys.executable or ""):
        return sys.executable
    return os.path.join(sys.exec_prefix, "bin", "python3")


def command(module: str, *arguments: str) -> list[str]:
    """Return the words that run a module, which has to be found: see `environment`."""
    return [interpreter(), "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Return the environment of a process that looks for modules where this one does.

    The current directory, as an empty entry of `sys.path` or by `python -m`, may be anybody's: this package alone is
    looked for in its place.
    """
    here = {""}
    with suppress(OSError):  # it is gone
        here.add(os.getcwd())
    return {**os.environ, "PYTHONPATH": os.pathsep.join(PACKAGE if one in here else one for one in sys.path)}
