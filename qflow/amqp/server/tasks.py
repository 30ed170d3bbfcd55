"""Tasks beside those of the connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from qflow.errors import QflowError

P = ParamSpec("P")
T = TypeVar("T")


def ending(work: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return a coroutine function whose calls are done to their end; see `to_its_end`."""

    @wraps(work)
    async def done(*args: P.args, **kwargs: P.kwargs) -> T:
        return await to_its_end(work(*args, **kwargs))

    return done


async def attempt(work: Coroutine[Any, Any, None], warn: Callable[[str, object], None]) -> None:
    """Do something whose failure must not keep others from being done: it is warned of."""
    try:
        await work
    except QflowError as error:
        warn("something is left of a connection that ended: %s", error)


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Return what work returns, which is done to its end even if this task is cancelled; it is cancelled then."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result
