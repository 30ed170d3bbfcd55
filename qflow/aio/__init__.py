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

from qflow.aio.broker import AsyncBroker, open
from qflow.aio.consumer import AsyncConsumer
from qflow.aio.delivery import AsyncDeliveries, AsyncDelivery, AsyncStreamDeliveries, AsyncStreamDelivery
from qflow.aio.queue import AsyncQueue
from qflow.aio.stream import AsyncStream
from qflow.aio.subscription import AsyncSubscription
from qflow.aio.transaction import AsyncTransaction

__all__ = [
    "AsyncBroker",
    "AsyncConsumer",
    "AsyncDeliveries",
    "AsyncDelivery",
    "AsyncQueue",
    "AsyncStream",
    "AsyncStreamDeliveries",
    "AsyncStreamDelivery",
    "AsyncSubscription",
    "AsyncTransaction",
    "open",
]


def __dir__() -> list[str]:
    return __all__
