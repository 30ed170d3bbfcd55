"""Callers let in through the socket of a spool, until its broker is closed. In the thread `qflow-door`."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from qflow.aio.broker import AsyncBroker, end_work
from qflow.broker import Broker
from qflow.door import PAUSE_S, Door
from qflow.loggers import get_logger
from qflow.remote.server.budget import Budget
from qflow.remote.server.connection import LAST_WORDS_S, Connection
from qflow.remote.server.lone import LoneThread
from qflow.serving.addresses import Address
from qflow.serving.doors import Opening

DRAIN_LOOK_S = 0.02
"""How often connections are looked at that are to end."""
_PEER = struct.Struct("3i")

_logger = get_logger("qflow")
_loop_logger = get_logger("asyncio")


def serve(broker: Broker, door: Door) -> None:
    """Serve callers until the door is told to end."""
    with asyncio.Runner() as runner:  # an event loop that cannot be made leaves nothing that is to be ended
        runner.get_loop().set_exception_handler(_tell_fault)
        runner.run(_Serving(broker, door).run())


def _tell_fault(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log a fault as the event loop does, which a handler of the program's that raises would end."""
    about = [f"{key}: {value!r}" for key, value in context.items() if key not in ("message", "exception")]
    _loop_logger.error("%s", "\n".join([context["message"], *about]), exc_info=context.get("exception"))


class _Serving:
    def __init__(self, broker: Broker, door: Door) -> None:
        self._broker = AsyncBroker(broker)
        self._door = door
        self._connections: set[Connection] = set()
        self._budget = Budget()
        self._thread = LoneThread(door.path)
        self._has_warned = False
        self._draining: asyncio.Task[None] | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        told = asyncio.Event()
        self._door.begin_drain = partial(self._begin_drain, loop)
        if self._door.is_draining:
            self._begin_drain(loop)
        loop.add_reader(self._door.told, told.set)
        self._listen()
        try:
            await told.wait()
        finally:
            loop.remove_reader(self._door.told)
            loop.remove_reader(self._door.listening.fileno())
            await self._end()

    def _listen(self) -> None:
        if not self._door.is_shut:
            asyncio.get_running_loop().add_reader(self._door.listening.fileno(), self._let_in)

    def _let_in(self) -> None:
        try:
            one = accept(self._door)
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._pause(error)
            return
        one.setblocking(False)
        self._door.sockets.add(one)
        connection = Connection(self._broker, self._budget, self._thread, refusal(one), partial(self._gone, one))
        self._connections.add(connection)
        connection.begin(one, peer(one)[0])
        if self._draining is not None:
            connection.drain(ends=True)

    def _pause(self, error: OSError) -> None:
        """Let nobody in for a while: the system is short of descriptors, or of memory; or the door is shut."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._door.listening.fileno())
        if self._door.is_shut:
            return
        if not self._has_warned:
            self._has_warned = True
            _logger.warning("%s: nobody else is let in for now: %s", self._door.path, error)
        loop.call_later(PAUSE_S, self._listen)

    def _gone(self, one: socket.socket, connection: Connection) -> None:
        self._door.sockets.discard(one)
        self._connections.discard(connection)

    def _begin_drain(self, loop: asyncio.AbstractEventLoop) -> None:
        def begin() -> None:
            self._draining = self._draining or loop.create_task(self._drain())

        with suppress(RuntimeError):  # the loop has ended, and so have all connections
            loop.call_soon_threadsafe(begin)

    async def _drain(self) -> None:
        """Those for lone puts end first: a caller whose other connection ends does not wait for their answers."""
        while True:
            has_lone = any(connection.lone for connection in self._connections)
            for connection in self._connections:
                connection.drain(ends=not has_lone or connection.lone is not None)
            await asyncio.sleep(DRAIN_LOOK_S)

    async def _end(self) -> None:
        """Have all calls answered, as far as callers take the answers, and end the connections."""
        ending = [asyncio.ensure_future(connection.end()) for connection in self._connections]
        if ending:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await asyncio.gather(*ending, return_exceptions=True)
        for connection in list(self._connections):
            connection.abort()
        self._thread.close()
        end_work(self._broker)


def accept(door: Door) -> socket.socket:
    """Return the connection of the next caller. Raises OSError: there is none, or the system is short of something."""
    return door.listening.accept()[0]


def refusal(one: socket.socket) -> str | None:
    """Return why a caller is not let in; None if it is."""
    _, uid = peer(one)
    if uid in (0, os.geteuid()):
        return None
    return f"this spool is of user {os.geteuid()}, and this process is of user {uid}: only its own user is let in"


def peer(one: socket.socket) -> tuple[int, int]:
    """Return which process is at the other end, 0 if it has no number here, and its user.

    So it is in the container of the owner: what a caller in another one takes for its number is another process here.
    """
    pid, uid, _ = _PEER.unpack(one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(pid), int(uid)


class SpoolDoor:
    """A `serving.doors.Door` that nobody is told of: whoever has the path of the spool finds it."""

    sockets: Sequence[Any] = ()

    def __init__(self, door: Door | None) -> None:
        self._door = door

    async def drain(self, grace_s: float) -> None:
        """Give callers no more messages, and return when all have ended, or after so many seconds; see `Door.drain`."""
        if self._door is None:
            return
        self._door.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._door.sockets:
                    await asyncio.sleep(DRAIN_LOOK_S)

    async def close(self) -> None:
        """Nothing: the broker ends the connections when it is closed."""

    def reload(self, **given: object) -> None:
        """Nothing: only processes of the owner's user come in."""


def opening_in_spool(broker: AsyncBroker) -> Opening:
    """Return the opening of the door in the spool of a broker, which is open already."""

    async def opened(*given: object) -> SpoolDoor:
        return SpoolDoor(broker.broker.engine.door)

    return Opening("door", Address("localhost", 0), opened)
