"""Tasks beside those of the connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from qflow.errors import QflowError

T = TypeVar("T")

_logger = logging.getLogger("qflow.amqp")


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
