"""What the doors in an event loop have alike: sockets, certificates, and an end."""

from __future__ import annotations

import asyncio
import ssl as tls
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

from qflow.serving.certificates import Renewable
from qflow.serving.sockets import keep_alive

HANDSHAKE_S = 10.0
"""A client has so long for the handshake of TLS."""
ACCEPTING_TURNS = 4
"""Of the loop: so many are behind a connection that it accepts until the protocol has it, and has refused it."""


class Listening(ABC):
    """A door that listens in an event loop, with TLS or without; `async with` closes it."""

    def __init__(self, ssl: tls.SSLContext | None) -> None:
        self._tls = None if ssl is None else Renewable(ssl)
        self._server: asyncio.Server | None = None
        self._is_closed = False
        self._closing: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """End all connections at once; what was confirmed, or answered, is done.

        Cancelled, it is done all the same; calling it again waits for that.
        """
        if self._closing is None and not self._is_closed:
            self._is_closed = True
            self._closing = asyncio.get_running_loop().create_task(self._close())
        if self._closing is not None:
            await asyncio.shield(self._closing)

    @abstractmethod
    async def _close(self) -> None:
        """Do what closing takes. Called once, in a task of its own; nobody is taken any more."""

    async def _listen(self, make: Callable[[], asyncio.BaseProtocol], host: str, port: int, backlog: int) -> None:
        """Listen, with a protocol for each connection. Raises OSError: the address cannot be listened on."""
        context = None if self._tls is None else self._tls.listening
        self._server = await asyncio.get_running_loop().create_server(
            make,
            host,
            port,
            ssl=context,
            ssl_handshake_timeout=None if context is None else HANDSHAKE_S,
            backlog=backlog,
        )
        for one in self._server.sockets:
            keep_alive(one)

    async def _end_listening(self) -> None:
        """Listen no more; return when protocols have the connections that were accepted before.

        One whose transport is made when the server is closed would be lost in the loop: neither answered nor closed.
        """
        if self._server is None:
            return
        loop = asyncio.get_running_loop()
        for one in self._server.sockets:
            loop.remove_reader(one)
        try:
            for _ in range(ACCEPTING_TURNS):
                await asyncio.sleep(0)
        finally:
            self._server.close()

    def _renew(self, ssl: tls.SSLContext | None) -> None:
        """Use the certificates of this context for the handshakes to come."""
        if self._tls is not None and ssl is not None:
            self._tls.renew(ssl)

    @property
    def sockets(self) -> Sequence[Any]:
        """Where it listens."""
        return self._server.sockets if self._server is not None else ()

    @property
    def port(self) -> int:
        """The port of the first socket it listens on."""
        return int(self.sockets[0].getsockname()[1])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
