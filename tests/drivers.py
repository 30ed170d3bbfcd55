"""Two ways to a broker: to own it, and to be connected to who owns it. Tests of the surface run with both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import qflow
import qflow.aio
from qflow.opening import with_door

OWNER, DOOR = "owner", "door"
_owners: WeakKeyDictionary[Any, qflow.aio.AsyncBroker] = WeakKeyDictionary()
"""By what is connected to them."""


@contextmanager
def opening(access: str, open_owner: Callable[..., qflow.Broker]) -> Iterator[Callable[..., Any]]:
    """Provide a function that opens a spool with some settings, and returns its owner, or what is connected to that.

    Whatever is open at the end must pass its own check, and is closed. To close what is connected is, for the test, to
    close the spool: it can be opened again.
    """
    opened: list[tuple[qflow.Broker, Any]] = []

    def open_it(**settings: Any) -> Any:
        for owner, broker in opened:
            if broker.closed:
                owner.close()
        owner = open_owner(**settings)
        broker = owner
        opened.append((owner, owner))
        if access == DOOR:
            if owner.engine.door is None:
                with_door(owner)
            broker = qflow.connect(owner.path)
            opened[-1] = owner, broker
        return broker

    yield open_it
    for owner, broker in opened:
        if not owner.closed:
            broker.close() if broker is not owner else None
            assert owner.check() == []
            owner.close()


@asynccontextmanager
async def joining(access: str, owner: qflow.aio.AsyncBroker) -> AsyncIterator[Any]:
    """Provide a broker for tasks: the owner itself, or what is connected to it until the end; see `owner_of`."""
    if access == OWNER:
        yield owner
        return
    if owner.broker.engine.door is None:
        with_door(owner.broker)
    async with qflow.aio.connect(owner.path) as broker:
        _owners[broker] = owner
        yield broker


@asynccontextmanager
async def opening_tasks(access: str, open_owner: Callable[[], qflow.Broker]) -> AsyncIterator[Any]:
    """Open a spool, and provide a broker for tasks; see `joining`.

    At the end it is closed. Its owner must pass its own check, and a connection must have left nothing there.
    """
    async with qflow.aio.AsyncBroker(open_owner()) as owner:
        async with joining(access, owner) as broker:
            yield broker
        while access == DOOR and not owner.closed and _is_held(owner):
            await asyncio.sleep(0)
        if not owner.closed:
            owner.broker.engine.log.drain()
            assert await owner.check() == []


@asynccontextmanager
async def beside(broker: Any) -> AsyncIterator[Any]:
    """Provide for tasks what a test has opened for threads, by `opening`: its owner, or a connection of their own."""
    if isinstance(broker, qflow.Broker):
        yield qflow.aio.AsyncBroker(broker)
    else:
        async with qflow.aio.connect(broker.path) as tasks:
            yield tasks


def owner_of(broker: Any) -> qflow.aio.AsyncBroker:
    """Return the owner of a spool that a test has opened for tasks."""
    return _owners.get(broker, broker)


def _is_held(owner: qflow.aio.AsyncBroker) -> bool:
    """Tell whether somebody holds messages, or has a subscription open."""
    queues = any(owner.broker.queue(name).stats().acquired_messages for name in owner.queues())
    return queues or any(stream.open_cursors() for stream in owner.broker.engine.streams.all())
