"""What a connection has answered: sent once a turn of the loop, and how much of it its caller may leave unread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from qflow.errors import QflowError
from qflow.remote.wire.errors import encode_error
from qflow.remote.wire.frames import WireError, encode_frame

UNREAD_BYTES = 4 * 2**20
"""Of answers that the caller has not read: beyond that nothing is read, and no message acquired."""


class Answers:
    """See the module; `Flow` of a session, too. In one event loop."""

    def __init__(self, look: Callable[[], object]) -> None:
        """`look` is called when there is room again, or none any more."""
        self._look = look
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._out: list[bytes] = []
        self._unread = 0
        """Bytes of answers that the transport does not have yet."""
        self._is_paused = False
        self._room = asyncio.Event()
        self._room.set()
        self.lost = asyncio.Event()
        """Set when the connection has ended, and holds nothing any more."""
        self.is_draining = False
        """The caller is given no more messages."""

    def begin(self, transport: Any) -> None:
        """Send by this from now on."""
        self._transport = transport
        transport.set_write_buffer_limits(high=UNREAD_BYTES)

    def end(self) -> None:
        """Nothing more is sent: nobody waits for room."""
        self._room.set()

    @property
    def has_room(self) -> bool:
        """The caller reads what it is sent."""
        return self._room.is_set()

    @property
    def are_sent(self) -> bool:
        """The transport has all of them, and is not full."""
        return not self._out and not self._is_paused

    def pause(self) -> None:
        """The transport is full."""
        self._is_paused = True
        self._room.clear()
        self._look()

    def resume(self) -> None:
        """It is not any longer."""
        self._is_paused = False
        self._room.set()
        self._look()

    def write(self, number: int, head: dict[str, Any] | bytes, columns: list[Any]) -> None:
        """Send an answer, or a notice, with the others of this turn of the loop."""
        if not self._out:
            self._loop.call_soon(self.flush)
        try:
            parts = encode_frame(number, head, columns)
        except WireError as error:
            text = f"what was asked for is done, but the answer is too long: {error}; ask for less at once"
            parts = encode_frame(number, encode_error(QflowError(text)))
        self._out += parts
        self._unread += sum(map(len, parts))
        if self._unread > UNREAD_BYTES:
            self._room.clear()  # before the transport has seen any of it

    def flush(self) -> None:
        """Send what was answered in this turn of the loop."""
        out, self._out, self._unread = self._out, [], 0
        if out and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(out))  # `writelines` of CPython 3.12 and later may pause nobody
            if not self._is_paused and not self._room.is_set():
                self._room.set()
                self._look()

    # `Flow` ----------------------------------------------------------------------------------------------------------

    def is_open(self) -> bool:
        return self._room.is_set() and not self.is_draining

    async def opened(self, timeout_s: float | None) -> bool:
        while not self.is_draining and not self._room.is_set():
            await self._room.wait()
        if self.is_draining:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.lost.wait()
        return self.is_open()
