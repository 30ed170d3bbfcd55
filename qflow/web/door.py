"""The door: it listens, hands connections to uvicorn's protocol, and closes those that keep it waiting for long."""

from __future__ import annotations

import asyncio
import logging
import ssl as tls
from collections.abc import Sequence
from typing import Any

from h11 import IDLE, SEND_BODY
from starlette.routing import BaseRoute
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from qflow.aio.broker import AsyncBroker
from qflow.broker import Broker
from qflow.loggers import get_logger
from qflow.serving.addresses import check_port
from qflow.serving.listening import Listening
from qflow.serving.sockets import on_its_way
from qflow.serving.tasks import Tasks
from qflow.serving.users import Users, check_users
from qflow.web.app import application
from qflow.web.site import Site

PORT = 7480
MOST_CONNECTIONS = 200
"""A request of one more is answered by 503."""
MOST_REFUSED = 50
"""Connections beyond those; others are closed at once."""
KEEP_ALIVE_S = 60
LOOK_S = 5.0
PATIENCE_LOOKS = 6
"""A connection that waits for the rest of a request, or to have an answer read, in more looks than that is closed."""
DRAINING_S = 0.02

_logger = get_logger("qflow.web")
_faults = logging.getLogger("qflow.web.faults")
"""In place of `uvicorn.error`, which is one of the program's: it may have another server of uvicorn."""
_faults.setLevel(logging.ERROR)  # else it has a line for each request that makes no sense, which anybody can send


class Server(Listening):
    """A page and a JSON API on a broker. Made by `serve`; `async with` closes it."""

    def __init__(
        self,
        broker: AsyncBroker,
        users: Users | None,
        ssl: tls.SSLContext | None,
        routes: Sequence[BaseRoute] = (),
    ) -> None:
        super().__init__(ssl)
        self.site = Site(broker, users)
        self._config = Config(
            application(self.site, routes), http=H11Protocol, ws="none", lifespan="off", log_config=None,
            access_log=False, proxy_headers=False, server_header=False, date_header=False,
            limit_concurrency=MOST_CONNECTIONS, timeout_keep_alive=KEEP_ALIVE_S,
        )  # fmt: skip
        self._state = ServerState()
        self._waiting: dict[H11Protocol, tuple[object, int]] = {}
        """What connections wait for, and in how many looks they have."""
        self._tasks = Tasks(_logger)

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises OSError: the address cannot be listened on."""
        self._config.load()
        await self._listen(self._protocol, host, port, backlog=100)
        secure = "__Host-" if self._tls is not None else ""
        self.site.cookie, self.site.is_secure = f"{secure}qflow-{self.port}", bool(secure)
        self.site.begin()
        self._tasks.spawn(self._look_after())

    def _protocol(self) -> H11Protocol:
        return _Connection(self._config, self._state, {})

    def reload(self, *, users: Users | None, ssl: tls.SSLContext | None) -> None:
        """Use these users, and the certificates of this context, from now on; who is no user any more is logged out."""
        self.site.logins.users = users
        self._renew(ssl)

    async def _look_after(self) -> None:
        """Close connections whose clients keep them waiting."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.look()
            except Exception:
                _logger.exception("connections were not looked after")

    def look(self) -> None:
        """Count the looks at which a connection has waited for the same of its client; once in `LOOK_S`."""
        waiting: dict[H11Protocol, tuple[object, int]] = {}
        for one in self._state.connections:
            if isinstance(one, H11Protocol) and (awaited := _awaited(one)) is not None:
                before, looks = self._waiting.get(one, (None, 0))
                waiting[one] = awaited, looks + 1 if before == awaited else 1
        self._waiting = waiting
        for one, (_, looks) in list(waiting.items()):
            if looks > PATIENCE_LOOKS:
                one.transport.abort()

    async def drain(self, grace_s: float) -> None:
        """Take no more connections, answer what was asked, and return then, or after so many seconds."""
        await self._end_listening()
        for protocol in list(self._state.connections):
            if not protocol.transport.is_closing():  # by TLS, one that is closed twice can be asked nothing more
                protocol.shutdown()
        loop = asyncio.get_running_loop()
        end = loop.time() + grace_s
        while (self._state.connections or self._state.tasks) and loop.time() < end:
            await asyncio.sleep(DRAINING_S)

    async def _close(self) -> None:
        await self._end_listening()
        for protocol in list(self._state.connections):
            protocol.transport.abort()
        tasks = list(self._state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._tasks.close()
        self.site.close()


class _Connection(H11Protocol):
    """One that is freed when it has ended, with the buffers of TLS: uvicorn has a timer that keeps it for a minute.

    Where there are too many, it is closed at once: one that asks nothing would keep a descriptor from spill files.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.logger = _faults

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS + MOST_REFUSED:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()


def _awaited(one: H11Protocol) -> object:
    """Return what a connection waits for: the head or the body of a request, or that an answer is read; else None.

    One that is idle between requests is closed by uvicorn.
    """
    if one.conn.their_state in (IDLE, SEND_BODY) and one.timeout_keep_alive_task is None:
        return one.cycle, one.conn.their_state
    unsent = one.transport.get_write_buffer_size()
    return (unsent, on_its_way(one.transport.get_extra_info("socket"))) if unsent else None


async def serve(
    broker: AsyncBroker | Broker,
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    ssl: tls.SSLContext | None = None,
    users: Users | None = None,
    routes: Sequence[BaseRoute] = (),
) -> Server:
    """Listen for browsers and for programs that use the JSON API; see `Server`.

    Args:
        port: 0 = any that is free; see `Server.port`.
        ssl: the certificate of the server.
        users: who may log in, and what they may do, as `qflow.serving.users.Users.load` reads them; None = whoever
            comes from this machine may look, and nobody may change anything.
        routes: of Starlette, which this door has besides; see `qflow.web.app`.

    Raises:
        OSError: the address cannot be listened on.
        InvalidArgument: another address than one of this machine alone, without users; no port.
    """
    check_port(port)
    await check_users(users, host)
    around = broker if isinstance(broker, AsyncBroker) else AsyncBroker(broker)
    server = Server(around, users, ssl, routes)
    try:
        await server.start(host, port)
    except BaseException:
        await server.close()
        raise
    return server
