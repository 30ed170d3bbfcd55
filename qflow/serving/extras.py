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
    """Import a module, of whose imports one package is not a dependency of all.

    Args:
        module: its dotted name.
        needs: the name of the package, to import.
        what: what the package is needed for, as the subject of a sentence.
        install: what to install, where that is not the package by the same name.

    Raises:
        NotFound: the package is not installed; any other import that fails is a fault, and raised as it is.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != needs:
            raise
        remedy = f"pip install {install or needs}"
        raise NotFound(f"{what} needs the package {needs}, which is not installed: {remedy}") from error
