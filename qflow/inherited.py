"""What users see of a class: methods it has from another by its own name, and none that only other rooms call."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from types import FunctionType
from typing import TypeVar

C = TypeVar("C", bound=type)


def called_after(kind: C) -> C:
    """Give a class copies of the public methods that it inherits, so that errors and `help` name the class itself."""
    for base in kind.__mro__[1:]:
        for name, one in vars(base).items():
            is_own = isinstance(one, FunctionType) and base.__module__.startswith("qflow.")
            if is_own and not name.startswith("_") and name not in vars(kind):
                setattr(kind, name, _copied(one, f"{kind.__qualname__}.{name}"))
    return kind


def _copied(one: FunctionType, called: str) -> FunctionType:
    copy = FunctionType(one.__code__, one.__globals__, one.__name__, one.__defaults__, one.__closure__)
    copy.__kwdefaults__ = one.__kwdefaults__
    update_wrapper(copy, one).__qualname__ = called
    return copy


def shows(names: str) -> Callable[[C], C]:
    """Have `dir` of an object, and so completion, tell these names beside those with an underscore, and no others."""
    shown = frozenset(names.split())

    def listed(one: object) -> list[str]:
        return [name for name in object.__dir__(one) if name in shown or name.startswith("_")]

    def apply(kind: C) -> C:
        kind.__dir__ = listed  # type: ignore[method-assign, assignment]
        return kind

    return apply
