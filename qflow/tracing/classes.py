"""Classes that trace, made of those that do not: an object becomes one of them where its program asks for that.

Objects with slots can be given another class of the same layout, so each stays what it is, also for what holds it; and
classes whose objects nobody traces are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

Methods = Callable[[Any], Mapping[str, Any]]
"""Given a class, returns methods that do more than those of that class."""


class Traced:
    """What every class that traces is, too."""

    __slots__ = ()


@cache
def _traced(kind: type, methods: Methods) -> type:
    own: dict[str, Any] = {
        "__slots__": (),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (kind, Traced), {**own, **methods(kind)})


def become(one: Any, methods: Methods) -> Any:
    """Give an object the class that traces, if it has not; return it."""
    if not isinstance(one, Traced):
        kind: Any = type(one)
        one.__class__ = _traced(kind, methods)
    return one
