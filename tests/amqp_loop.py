"""A server in the loop of a test, and clients of it that send frames by hand and read what comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pamqp import body, commands, exceptions, frame, header

import qflow.aio
from amqp_client import PROTOCOL_HEADER, method
from qflow.amqp import Server, serve

Basic, Channels, Connections, Queue = commands.Basic, commands.Channel, commands.Connection, commands.Queue
T = TypeVar("T")
_CLIENTS: list[Raw] = []


class Raw:
    """A connection; `expect` skips what it is not asked for."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._data = b""

    def send(self, *values: Any, channel: int = 1) -> None:
        """Send methods, or bytes as they are."""
        self.writer.write(b"".join(one if isinstance(one, bytes) else method(channel, one) for one in values))

    def publish(self, queue: str, content: bytes = b"x", *, channel: int = 1, **options: Any) -> None:
        """Publish to a queue by its name; options of `basic.publish`."""
        self.send(
            Basic.Publish(0, options.pop("exchange", ""), queue, **options),
            header.ContentHeader(0, len(content), Basic.Properties(delivery_mode=2)),
            *([body.ContentBody(content)] if content else []),
            channel=channel,
        )

    async def next(self) -> tuple[int, Any]:
        """Return the next frame, as (channel, frame of pamqp); raises `EOFError` when the connection is closed."""
        while True:
            try:
                if self._data:
                    used, channel, value = frame.unmarshal(self._data)
                    self._data = self._data[used:]
                    return channel, value
            except exceptions.UnmarshalingException:
                pass
            data = await self.reader.read(65_536)
            if not data:
                raise EOFError
            self._data += data

    async def expect(self, kind: type[T]) -> T:
        """Return the next frame of a kind."""
        while True:
            _, value = await self.next()
            if isinstance(value, kind):
                return value

    async def ask(self, value: Any, answer: type[T], channel: int = 1) -> T:
        """Send a method; return its answer."""
        self.send(value, channel=channel)
        return await self.expect(answer)

    async def open_channel(self, number: int = 1) -> None:
        await self.ask(Channels.Open(), Channels.OpenOk, number)

    def kill(self) -> None:
        """End the connection as the death of its process does."""
        self.writer.transport.abort()


async def connected(
    server: Server, *, heartbeat_s: int = 0, channels: int = 1, consumer_cancel_notify: bool = True
) -> Raw:
    """Open a connection with channels 1, 2 ..."""
    client = Raw(*await asyncio.open_connection("127.0.0.1", server.port))
    _CLIENTS.append(client)
    can = {"capabilities": {"consumer_cancel_notify": consumer_cancel_notify, "connection.blocked": True}}
    client.send(PROTOCOL_HEADER)
    await client.ask(Connections.StartOk(can, "PLAIN", "\0guest\0guest"), Connections.Tune, 0)
    client.send(Connections.TuneOk(2047, 131_072, heartbeat_s), channel=0)
    await client.ask(Connections.Open("/"), Connections.OpenOk, 0)
    for number in range(1, channels + 1):
        await client.open_channel(number)
    return client


@contextmanager
def ending_clients() -> Iterator[None]:
    """The clients that are connected in here end with it."""
    try:
        yield
    finally:
        while _CLIENTS:
            _CLIENTS.pop().kill()


@asynccontextmanager
async def serving(spool: Path, **settings: Any) -> AsyncIterator[Server]:
    """Serve a spool on a port that is free; its clients end with it."""
    async with qflow.aio.open(spool, **settings) as broker, await serve(broker, port=0) as server:
        with ending_clients():
            yield server


@asynccontextmanager
async def turns_noted(owner: type, name: str) -> AsyncIterator[list[int]]:
    """Note in which turn of the loop each call of a method comes."""
    turn, noted = 0, list[int]()
    called = getattr(owner, name)

    def note(*args: Any) -> Any:
        noted.append(turn)
        return called(*args)

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, note)
        counting = asyncio.create_task(count())
        try:
            yield noted
        finally:
            counting.cancel()
