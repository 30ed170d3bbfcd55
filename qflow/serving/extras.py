"""Packages that only some have installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from qflow.errors import NotFound


def named_in(
    package: str, module: str, names: Sequence[str], *, needs: str = "", what: str = ""
) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package: it imports these names when one is asked for; see `load`."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(load(module, needs=needs, what=what), name)

    return find


def load(module: str, *, needs: str, what: str, install: str = "") -> Any:
    """Import a module, of whose imports some packages are not a dependency of all.

    Args:
        module: its dotted name.
        needs: the names of the packages, to import, with spaces between them.
        what: what they are needed for, as the subject of a sentence.
        install: what to install, where those are not packages by the same names.

    Raises:
        NotFound: one of them is not installed; any other import that fails is a fault, and raised as it is.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missed = (error.name or "").partition(".")[0]
        if missed not in needs.split():
            raise
        remedy = f"pip install {install or needs}"
        raise NotFound(f"{what} needs the package {missed}, which is not installed: {remedy}") from error
