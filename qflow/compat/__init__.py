"""Drop-ins for `queue.Queue` and `asyncio.Queue`, whose items lie in a queue of qflow: in bounded memory, else on disk.

    from qflow.compat import Queue            # as queue.Queue
    from qflow.compat import AsyncQueue       # as asyncio.Queue

Exceptions are those of the standard library; `ShutDown` is its own from Python 3.13 on, and ours before.
"""

from __future__ import annotations

from qflow.compat.aio import AsyncQueue, QueueShutDown
from qflow.compat.items import Serializer
from qflow.compat.threads import Queue, ShutDown

__all__ = ["AsyncQueue", "Queue", "QueueShutDown", "Serializer", "ShutDown"]
