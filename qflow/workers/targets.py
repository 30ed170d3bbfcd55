"""Functions by name: what a worker process is to call, said so that another process finds it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from qflow.callbacks import check_callback
from qflow.delivery import reason_of
from qflow.errors import InvalidArgument
from qflow.named_tuples import NamedTuple

_AS_MODULE = "__qflow_work__"
"""What a file is imported as: not `__main__`, so that it begins nothing."""
Function = Callable[[Any], object]


class Target(NamedTuple):
    """Where a function is."""

    where: str
    """A dotted module, or the path of a file that ends in `.py`."""
    name: str
    """Its name there; of a method of a class, dotted."""

    def __str__(self) -> str:
        return f"{self.where}:{self.name}"


def parse(text: str) -> Target:
    """Return what `module:function` or `file.py:function` names. Raises InvalidArgument: it names neither."""
    where, colon, name = text.rpartition(":")
    dotted = [name] if where.endswith(".py") else [name, where]
    if not colon or not all(part.isidentifier() for words in dotted for part in words.split(".")):
        raise InvalidArgument(f"say what to call as module:function or file.py:function, not {text!r}")
    return Target(os.path.abspath(where) if where.endswith(".py") else where, name)


def of(function: Function | str) -> Target:
    """Return where a function is; of a text, as `parse`. Raises InvalidArgument: another process would not find it."""
    if isinstance(function, str):
        return parse(function)
    where, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not callable(function) or not isinstance(where, str) or not isinstance(name, str):
        raise InvalidArgument(f"{function!r} is no function: give a function of a module, or 'module:function'")
    if "<" in name:
        raise InvalidArgument(
            f"{name} of {where} cannot be found by another process: give a function that stands in a module by itself"
        )
    return Target(_main() if where == "__main__" else where, name)


def _main() -> str:
    """Return where the program that runs is: by its module with `python -m`, else by its file."""
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return str(spec.name)
    if path is None or not os.path.isfile(path):
        raise InvalidArgument(
            "another process cannot find a function that was typed in: write it into a file, and say 'file.py:function'"
        )
    return str(os.path.abspath(path))


def load(target: Target) -> Function:
    """Import a function. Raises InvalidArgument: it is not there, or cannot be called with a delivery."""
    found: Any = _import(target.where)
    for part in target.name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise InvalidArgument(f"{target}: there is no {target.name!r} in {target.where}") from None
    check_callback(found, str(target), awaited=True)
    try:
        inspect.signature(found).bind(None)
    except TypeError as error:
        raise InvalidArgument(f"{target} cannot be called with a delivery alone: {error}") from error
    except ValueError:
        pass  # one in C that does not say what it takes
    return found  # type: ignore[no-any-return]


def _import(where: str) -> ModuleType:
    try:
        return _import_file(where) if where.endswith(".py") else importlib.import_module(where)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{where}.".startswith(f"{error.name}."):
            looked = ", ".join(repr(path) for path in sys.path[:1])
            raise InvalidArgument(f"there is no module {error.name!r}, neither in {looked} nor installed") from error
        if isinstance(error, FileNotFoundError) and error.filename == where:
            raise InvalidArgument(f"there is no file {where}") from error
        raise InvalidArgument(f"{where} cannot be imported: {reason_of(error)}") from error


def _import_file(path: str) -> ModuleType:
    directory = os.path.dirname(path)
    if directory not in sys.path:
        sys.path.insert(0, directory)
    spec = importlib.util.spec_from_file_location(_AS_MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[_AS_MODULE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
