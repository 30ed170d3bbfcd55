"""Functions that users give, to be called for messages and events: some only seem to have run when they return."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from functools import partial
from typing import Any

from qflow.errors import InvalidArgument
from qflow.importing import imported

UNRUN = (Coroutine, Generator, AsyncGenerator)
"""What is returned in place of what it would have done. A task or a future, also of another library, runs by itself."""


def check_callback(callback: Any, what: str = "callback", *, awaited: bool = False) -> None:
    """Raise if a call would do nothing; `awaited`: what it returns is awaited.

    Raises:
        InvalidArgument: it cannot be called, is a generator function, or async where nobody awaits it.
    """
    if not callable(callback):
        raise InvalidArgument(f"{what} must be callable, not {type(callback).__name__}")
    inspect, body = imported("inspect"), _body(callback)
    if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
        raise InvalidArgument(f"{what} must not be a generator function, which does nothing when it is called")
    if not awaited and is_async(callback):
        raise InvalidArgument(f"{what} must not be async: nobody would await it; qflow.aio awaits what consumers call")


def is_async(function: Any) -> bool:
    """Tell whether a call of a function, also a partial or an object that is called, returns a coroutine."""
    return bool(imported("inspect").iscoroutinefunction(_body(function)))


def _body(function: Any) -> Any:
    """Return the function in which a call of one ends, if that can be told."""
    while isinstance(function, partial):
        function = function.func
    return function if imported("inspect").isroutine(function) else type(function).__call__


def check_ran(result: object) -> None:
    """Raise if what a callback returned has still to run: nobody would see to that. Cost: 0.1 µs for None.

    Raises:
        InvalidArgument: it is a coroutine or a generator.
    """
    if result is not None and isinstance(result, UNRUN):
        if isinstance(result, Coroutine):
            result.close()  # Python need not warn
        what = type(result).__name__
        raise InvalidArgument(f"the function returned a {what} and has not run: nobody awaits or iterates that")


async def run(callback: Callable[[Any], object], argument: Any) -> None:
    """Call a callback of a task, and await what it returns; a plain function has run when it returns something else.

    Raises:
        InvalidArgument: it returned a generator. All that the callback raises.
    """
    result = callback(argument)
    import inspect  # `check_callback` has, before

    if inspect.isawaitable(result):
        await result
    else:
        check_ran(result)


def is_failure(error: BaseException, task: Any) -> bool:
    """Tell whether an error in a task is that of what it does; not if it is cancelled, or its loop or process ends."""
    if isinstance(error, Exception):
        return True
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return False
    import asyncio  # which who has no tasks does not need

    try:
        is_running = asyncio.current_task() is task  # else its coroutine is closed: by its loop, or as garbage
    except RuntimeError:
        return False
    return is_running and not (isinstance(error, asyncio.CancelledError) and task.cancelling())


def call(callback: Callable[[Any], object], argument: Any) -> None:
    """Call a callback from an event loop, which tells of an error. Raises InvalidArgument: see `check_ran`."""
    check_ran(callback(argument))
