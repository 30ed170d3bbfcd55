"""A door of `qflow serve` for Prometheus: `/metrics`, in a thread of its own, and one for each connection.

Whoever reaches it may connect, so connections are bounded in number and in time: one more is closed at once, and so is
one whose request or answer takes too long.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl as tls
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

from qflow.aio import AsyncBroker
from qflow.loggers import get_logger
from qflow.metrics.collecting import SpoolCollector, understood
from qflow.metrics.sources import source_of
from qflow.serving.addresses import Address, resolved
from qflow.serving.users import Users
from qflow.starting import start

MOST_CONNECTIONS = 32
LONGEST_S = 10.0
"""From a connection to the end of its answer; Prometheus, too, waits no longer unless it is told to."""
NO_MORE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
PAUSE_S = 0.5
"""After a connection that could not be taken for want of descriptors or memory."""
_logger = get_logger("qflow.metrics")


async def open_door(
    broker: AsyncBroker, *, host: str, port: int, ssl: tls.SSLContext | None, users: Users | None, named: int = 100
) -> MetricsDoor:
    """Return the door when it listens. Whoever reaches it reads: it knows no users.

    Raises:
        OSError: it cannot listen there. InvalidArgument: that is no address.
    """
    registry = CollectorRegistry()
    registry.register(SpoolCollector(source_of(broker), named=named))
    ProcessCollector(registry=registry)
    return await asyncio.to_thread(MetricsDoor, Address(host, port), registry)


def _answer(app: Any, environ: dict[str, Any], start_response: Any) -> Any:
    return app({**environ, "HTTP_ACCEPT": understood(environ.get("HTTP_ACCEPT", ""))}, start_response)


class _Handler(WSGIRequestHandler):
    """Says nothing of what is asked."""

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, which is asked one thing."""

    daemon_threads = True

    def __init__(self, address: Address) -> None:
        self.address_family, _, _, _, (host, *_) = resolved(address)[0]
        self._open: dict[socket.socket, float] = {}
        """Connections, and when each began, on the monotonic clock."""
        self._lock = threading.Lock()
        super().__init__((str(host), address.port), _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in NO_MORE:
                time.sleep(PAUSE_S)  # it would be tried again at once, by a whole processor
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Tell whether there is room for a connection, and give it a place."""
        with self._lock:
            is_taken = len(self._open) < MOST_CONNECTIONS
            if is_taken:
                self._open[request] = time.monotonic()
            return is_taken

    def close_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
            super().close_request(request)

    def service_actions(self) -> None:
        """End connections that are too old; called twice a second."""
        self.end_older(LONGEST_S)

    def end_older(self, seconds: float) -> None:
        """Have those who read from or write to connections of that age find them ended."""
        now = time.monotonic()
        with self._lock:
            for request, began_s in self._open.items():
                if now - began_s >= seconds:
                    with suppress(OSError):
                        request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tell the log, unless it is the client who has gone, or was cut off."""
        if not isinstance(sys.exception(), OSError):
            _logger.exception("a request for metrics was not answered")


class MetricsDoor:
    """See the module. Blocks as it is made, while a name is looked up."""

    def __init__(self, address: Address, registry: CollectorRegistry) -> None:
        self._server = _Server(address)
        self._server.set_app(partial(_answer, make_wsgi_app(registry)))
        self._thread = threading.Thread(target=self._server.serve_forever, name="qflow-metrics", daemon=True)
        start(self._thread)
        self._ends = False

    @property
    def sockets(self) -> Sequence[Any]:
        """Where it listens."""
        return [self._server.socket]

    async def drain(self, grace_s: float) -> None:
        """Go on: how the other doors end may be watched."""

    async def close(self) -> None:
        """End it. Calling it again does nothing."""
        if not self._ends:
            self._ends = True
            await asyncio.to_thread(self._end)

    def _end(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._server.end_older(0.0)
        self._thread.join()

    def reload(self, *, users: Users | None, ssl: tls.SSLContext | None) -> None:
        """It has neither."""
