"""qflow for asyncio: the same surface, awaited.

import qflow.aio

async with qflow.aio.open("spool") as broker:
    jobs = await broker.declare_queue("jobs")
    await jobs.put(b"hello")             # returns once it is synced; one sync for all tasks that put meanwhile
    async with await jobs.get() as delivery:
        print(delivery.body)

No call blocks the event loop, and none takes a thread of its own: work in memory is done at once, a task that waits for
a commit, a message or room is woken by a callback, and two threads of the broker do the work on the disk.
"""

from __future__ import annotations

from qflow.aio.broker import AsyncBroker, open
from qflow.aio.consumer import AsyncConsumer
from qflow.aio.delivery import AsyncDeliveries, AsyncDelivery, AsyncStreamDeliveries, AsyncStreamDelivery
from qflow.aio.queue import AsyncQueue
from qflow.aio.stream import AsyncStream
from qflow.aio.subscription import AsyncSubscription
from qflow.aio.transaction import AsyncTransaction

TYPE_CHECKING = False
"""As type checkers know it: `typing` is not imported for them."""
if TYPE_CHECKING:
    from typing import Any

    from qflow.remote.client.task_broker import AsyncRemoteBroker, connect
    from qflow.remote.client.task_queue import AsyncRemoteQueue
    from qflow.remote.client.task_streams import AsyncRemoteStream, AsyncRemoteSubscription
    from qflow.remote.client.task_transaction import AsyncRemoteTransaction

__all__ = [
    "AsyncBroker",
    "AsyncConsumer",
    "AsyncDeliveries",
    "AsyncDelivery",
    "AsyncQueue",
    "AsyncRemoteBroker",
    "AsyncRemoteQueue",
    "AsyncRemoteStream",
    "AsyncRemoteSubscription",
    "AsyncRemoteTransaction",
    "AsyncStream",
    "AsyncStreamDeliveries",
    "AsyncStreamDelivery",
    "AsyncSubscription",
    "AsyncTransaction",
    "connect",
    "open",
]

_ROOMS = ("task_queue", "task_streams", "task_transaction", "task_broker")
"""Where the names are that are imported when they are asked for: who owns its spool needs none of them."""


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in __all__:
        modules = (import_module(f"qflow.remote.client.{room}") for room in _ROOMS)
        globals()[name] = found = next(vars(module)[name] for module in modules if name in vars(module))
        return found
    raise AttributeError(f"module 'qflow.aio' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
