"""Tasks beside those of the connections."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from qflow.errors import BrokerClosed
from qflow.loggers import Logger


class Tasks:
    """Tasks that somebody owns: kept until they are done, cancelled when the owner ends."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Have a task do something; what it raises is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, BrokerClosed):
            self._logger.error("a task of the server failed", exc_info=error)

    async def close(self) -> None:
        """Cancel all, and return when they have ended."""
        while self._tasks:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
