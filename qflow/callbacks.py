"""Functions that users give, to be called for messages and events: some only seem to have run when they return."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from functools import partial
from typing import Any

from qflow.errors import InvalidArgument

UNRUN = (Awaitable, Generator, AsyncGenerator)


def check_callback(callback: Any, what: str = "callback", *, awaited: bool = False) -> None:
    """Raise if a call would do nothing; `awaited`: what it returns is awaited.

    Raises:
        InvalidArgument: it cannot be called, is a generator function, or async where nobody awaits it.
    """
    import inspect  # a dear import

    if not callable(callback):
        raise InvalidArgument(f"{what} must be callable, not {type(callback).__name__}")
    if inspect.isgeneratorfunction(_body(callback)) or inspect.isasyncgenfunction(_body(callback)):
        raise InvalidArgument(f"{what} must not be a generator function, which does nothing when it is called")
    if not awaited and is_async(callback):
        raise InvalidArgument(f"{what} must not be async: nobody would await it; qflow.aio awaits what consumers call")


def is_async(function: Any) -> bool:
    """Tell whether a call of a function, also a partial or an object that is called, returns a coroutine."""
    import inspect  # a dear import

    return inspect.iscoroutinefunction(_body(function))


def _body(function: Any) -> Any:
    """Return the function in which a call of one ends, if that can be told."""
    import inspect  # a dear import

    while isinstance(function, partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def check_ran(result: object) -> None:
    """Raise if what a callback returned has still to run: nobody would see to that. Cost: 0.1 µs for None.

    Raises:
        InvalidArgument: it is a coroutine or anything else to be awaited, or a generator.
    """
    if result is not None and isinstance(result, UNRUN):
        close: Callable[[], object] | None = getattr(result, "close", None)
        if close is not None:
            close()  # Python need not warn
        what = type(result).__name__
        raise InvalidArgument(f"the function returned a {what} and has not run: nobody awaits or iterates that")
