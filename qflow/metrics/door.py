"""A door of `qflow serve` for Prometheus: `/metrics`, by the server of prometheus-client, in a thread of its own."""

from __future__ import annotations

import asyncio
import ssl as tls
import threading
from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

from qflow.aio import AsyncBroker
from qflow.metrics.collecting import SpoolCollector
from qflow.metrics.sources import source_of
from qflow.serving.users import Users


async def open_door(
    broker: AsyncBroker, *, host: str, port: int, ssl: tls.SSLContext | None, users: Users | None, named: int = 100
) -> MetricsDoor:
    """Return the door when it listens. Whoever reaches it reads: it knows no users.

    Raises:
        OSError: it cannot listen there.
    """
    registry = CollectorRegistry()
    registry.register(SpoolCollector(source_of(broker), named=named))
    ProcessCollector(registry=registry)
    server, thread = await asyncio.to_thread(start_http_server, port, host, registry)
    return MetricsDoor(server, thread)


class MetricsDoor:
    """See the module."""

    def __init__(self, server: Any, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread
        self._ends = False

    @property
    def sockets(self) -> Sequence[Any]:
        """Where it listens."""
        return [self._server.socket]

    async def drain(self, grace_s: float) -> None:
        """Go on: how the other doors end may be watched."""

    async def close(self) -> None:
        """End it. Twice is fine."""
        if not self._ends:
            self._ends = True
            await asyncio.to_thread(self._end)

    def _end(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def reload(self, *, users: Users | None, ssl: tls.SSLContext | None) -> None:
        """It has neither."""
