"""Async functions: each message is a task of one event loop, which also runs while the next message is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

from qflow.aio.delivery import AnyDeliveries, AsyncDelivery
from qflow.delivery import Delivery, Return
from qflow.workers.targets import Function

T = TypeVar("T")


class FunctionCancelled(Exception):
    """An async function was cancelled, by itself or by what it awaits."""


class _InPlace:
    """Settles for tasks by a request to the owner, for whose answer the loop waits."""

    async def settle(self, held: Delivery | AnyDeliveries, wait: bool) -> None:
        held.ack(wait)

    async def give_back(self, held: Delivery | AnyDeliveries, how: Return) -> None:
        held.nack(*how)

    async def extend(self, held: Delivery | AnyDeliveries, seconds: float) -> None:
        held.extend(seconds)


def awaited(function: Any, runner: asyncio.Runner) -> Function:
    """Return a function that calls an async one, and returns when that has."""

    async def call(delivery: Delivery) -> None:
        try:
            await function(AsyncDelivery(delivery, _InPlace()))
        except asyncio.CancelledError as error:
            raise FunctionCancelled("the function was cancelled") from error

    return lambda delivery: runner.run(call(delivery))


def beside(work: Callable[[], T], runner: asyncio.Runner, thread: Executor) -> T:
    """Return what is waited for in another thread, while the event loop runs: tasks that a function began go on.

    That thread is for nothing else: those of the event loop may all hang in what functions have left.
    """

    async def wait() -> T:
        return await asyncio.get_running_loop().run_in_executor(thread, work)

    return runner.run(wait())
