"""A client that comes by TCP, with TLS or without."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

from qflow.mqtt.server.client import Client, Pipe

HIGH_BYTES = 256 * 1024
LOW_BYTES = 64 * 1024
"""Of what the network has not taken: above the one, nothing is written any more until it is below the other."""


class TcpPipe(asyncio.Protocol):
    """The network connection of a client; see `Pipe`.

    Args:
        connected: takes this when it is there, and gives the client; None: it is not taken.
    """

    __slots__ = ("_client", "_connected", "_transport", "certificate", "peer")

    def __init__(self, connected: Callable[[Pipe], Client | None]) -> None:
        self._connected = connected
        self._client: Client | None = None
        self._transport: Any = None
        self.peer = ""
        self.certificate: dict[str, Any] | None = None

    # Called by the loop ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        address = transport.get_extra_info("peername")
        self.peer = str(address[0]) if address else ""
        secured: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        self.certificate = None if secured is None else secured.getpeercert()
        transport.set_write_buffer_limits(high=HIGH_BYTES, low=LOW_BYTES)
        self._client = self._connected(self)
        if self._client is None:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._client is not None:
            self._client.received(data)

    def coming(self, size: int) -> None:
        """So many bytes have come of a frame of a WebSocket that is not whole."""
        if self._client is not None:
            self._client.coming(size)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        client, self._client = self._client, None
        self._transport = None  # with TLS it has large buffers, and the garbage collector comes to the client late
        if client is not None:
            client.gone()

    def pause_writing(self) -> None:
        if self._client is not None:
            self._client.paused()

    def resume_writing(self) -> None:
        if self._client is not None:
            self._client.resumed()

    # Called by the client --------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send bytes."""
        self._transport.write(data)

    def close(self) -> None:
        """Close, once all is sent and the client closes, too: with bytes unread, the last answer might not arrive."""
        if self._transport is None:
            return
        if self._transport.is_closing() or not self._transport.can_write_eof():
            self._transport.close()
            return
        self._transport.resume_reading()
        try:
            self._transport.write_eof()
        except OSError:  # the client has gone already
            self._transport.abort()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Read nothing for now."""
        self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        self._transport.resume_reading()
