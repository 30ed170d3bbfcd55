"""What a socket tells of its other side."""

from __future__ import annotations

import asyncio
import fcntl
import select
import socket
import sys
import termios
from contextlib import suppress
from typing import Any

_DROPPED_BYTES = 64 * 1024
"""Read at once at most, to be dropped."""


def has_hung_up(client: socket.socket) -> bool:
    """Tell whether the other side has closed, or died, also where there is something to read before its end."""
    if client.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(client.fileno(), getattr(select, "POLLRDHUP", 0))
    return bool(poll.poll(0))


def keep_alive(listening: Any) -> None:
    """Have the system look whether clients that say nothing for long are still there: what is accepted does as this.

    Linux begins after two hours of silence, and ends the connection eleven minutes later.
    """
    with socket.fromfd(listening.fileno(), listening.family, listening.type) as same:  # uvloop's has no options
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def on_its_way(sock: Any) -> int:
    """Return the bytes that the system has of what was sent, and the client has not taken yet; 0 if it does not say."""
    with suppress(OSError, ValueError):  # it is closed
        return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    return 0


async def hear_out(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, linger_s: float) -> None:
    """Send what is to be sent, and its end; drop what the other side still sends, up to its own end or `linger_s`.

    A socket that is closed with something unread is reset, and the other side may lose what was written to it last.
    """
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(linger_s):
            if writer.can_write_eof() and not writer.is_closing():
                writer.write_eof()
            while await reader.read(_DROPPED_BYTES):
                pass


async def gone(writer: asyncio.StreamWriter, linger_s: float) -> None:
    """Wait until all is sent and a writer that was closed is so; after `linger_s` what is left is dropped."""
    with suppress(OSError, TimeoutError):
        await asyncio.wait_for(writer.wait_closed(), linger_s)
    writer.transport.abort()


class Drain:
    """Waits until the other side has taken what was written, and tells whether it does."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._is_waiting = False
        self._unsent = 0

    async def wait(self) -> None:
        """Return when there is less to write."""
        self._is_waiting = True
        try:
            await self._writer.drain()
        finally:
            self._is_waiting = False

    def goes_on(self) -> bool:
        """Tell whether `wait` waits, and less is left than at the last call."""
        before, self._unsent = self._unsent, 0
        if self._is_waiting:
            transport = self._writer.transport
            self._unsent = transport.get_write_buffer_size() + on_its_way(transport.get_extra_info("socket"))
        return 0 < self._unsent < before
