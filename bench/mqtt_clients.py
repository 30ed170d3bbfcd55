"""What clients do to a broker of MQTT 3.1.1: many connections in one loop, with packets that are made beforehand.

The same code for every broker. A client of a library would take longer for a message than the brokers do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from bench.brokers import HOST, Broker
from bench.errors import CannotRun

WINDOW = 20
"""Publishes of a connection with QoS 1 that are not acknowledged."""
PATIENCE_S = 600.0
CONNACK_OK = b"\x20\x02\x00\x00"
PRESENT = b"\x20\x02\x01\x00"
_ID_BYTES = 2
_MOST_ID = 60_000
OPENED_AT_ONCE = 100


def connect(client_id: str, clean: bool = True) -> bytes:
    return packet(0x10, text("MQTT") + bytes((4, clean << 1, 0, 0)) + text(client_id))


def subscribe(topic_filter: str, qos: int) -> bytes:
    return packet(0x82, b"\x00\x01" + text(topic_filter) + bytes((qos,)))


def text(value: str) -> bytes:
    data = value.encode()
    return len(data).to_bytes(2, "big") + data


def packet(first: int, body: bytes) -> bytes:
    size, length = len(body), bytearray()
    while True:
        size, low = divmod(size, 128)
        length.append(low | (128 if size else 0))
        if not size:
            return bytes((first,)) + bytes(length) + body


def publishes(topic: str, body: bytes, qos: int, retain: bool = False) -> tuple[bytes, bytes]:
    """Return what goes before the packet id of a PUBLISH, and what goes behind it; all of it is before with QoS 0."""
    whole = packet(0x30 | qos << 1 | retain, text(topic) + bytes(_ID_BYTES if qos else 0) + body)
    at = len(whole) - len(body)
    return (whole[: at - _ID_BYTES], whole[at:]) if qos else (whole, b"")


class Connection(asyncio.Protocol):
    """One client, which has said CONNECT when it is made."""

    def __init__(self, hello: bytes) -> None:
        self._hello = hello
        self._loop = asyncio.get_running_loop()
        self._got = b""
        self.transport: asyncio.Transport
        self.waiting: asyncio.Future[None] | None = None
        self._awaited = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._hello)

    def data_received(self, data: bytes) -> None:
        self._got += data
        if self.waiting is not None and len(self._got) >= self._awaited and not self.waiting.done():
            self.waiting.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_exception(CannotRun(f"the broker has closed a connection: {error!r}"))

    async def answer(self, size: int) -> bytes:
        """Return the next bytes that come, so many."""
        if len(self._got) < size:
            self._awaited, self.waiting = size, self._loop.create_future()
            async with asyncio.timeout(PATIENCE_S):
                await self.waiting
        found, self._got = self._got[:size], self._got[size:]
        return found

    async def leave(self) -> None:
        """Say DISCONNECT, and close."""
        self.transport.write(b"\xe0\x00")
        self.transport.close()


class Publisher(Connection):
    """Publishes with QoS 1, `WINDOW` at a time."""

    def begin(self, parts: Iterator[tuple[bytes, bytes]], number: int) -> asyncio.Future[None]:
        """Publish so many messages; return what is done when all are acknowledged."""
        self._parts, self._left, self._unacknowledged, self._next = parts, number, 0, 1
        self._rest = 0
        self.waiting = self._loop.create_future()
        self._send(min(WINDOW, number))
        self.data_received = self._acknowledged  # type: ignore[method-assign]
        return self.waiting

    def _send(self, number: int) -> None:
        packets = []
        for _ in range(number):
            head, tail = next(self._parts)
            packets += (head, self._next.to_bytes(2, "big"), tail)
            self._next = self._next % _MOST_ID + 1
        self._left -= number
        self._unacknowledged += number
        self.transport.write(b"".join(packets))

    def _acknowledged(self, data: bytes) -> None:
        found, self._rest = divmod(self._rest + len(data), 4)
        self._unacknowledged -= found
        if self._left:
            self._send(min(found, self._left))
        elif not self._unacknowledged and self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(None)


class Subscriber(Connection):
    """Takes messages that are all of one length, and acknowledges them."""

    def begin(self, size: int, id_at: int, number: int) -> asyncio.Future[None]:
        """Take so many messages of so many bytes, with the packet id at a place in each; 0 for those with QoS 0."""
        self._size, self._id_at, self._left = size, id_at, number
        self.waiting = self._loop.create_future()
        self.data_received = self._taken  # type: ignore[method-assign]
        self._taken(b"")
        return self.waiting

    def _taken(self, data: bytes) -> None:
        got = self._got + data if self._got else data
        size, at = self._size, self._id_at
        number = len(got) // size
        if at:
            ids = [got[start + at : start + at + 2] for start in range(0, number * size, size)]
            if ids:
                self.transport.write(b"\x40\x02" + b"\x40\x02".join(ids))
        self._got = got[number * size :]
        self._left -= number
        if self._left <= 0 and self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(None)


class Clients:
    """Clients of a broker, on a loop that runs only in their turn."""

    def __init__(self, broker: Broker, runner: asyncio.Runner) -> None:
        self._broker = broker
        self._runner = runner

    async def _open(self, kind: type[Connection], client_id: str, clean: bool, present: bool = False) -> Connection:
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(lambda: kind(connect(client_id, clean)), HOST, self._broker.port)
        said = await client.answer(4)
        if said != (PRESENT if present else CONNACK_OK):
            raise CannotRun(f"{self._broker.name} answers CONNECT with {said.hex()}")
        return client

    async def _subscribed(self, client_id: str, topic: str, qos: int, clean: bool) -> Connection:
        client = await self._open(Subscriber, client_id, clean)
        client.transport.write(subscribe(topic, qos))
        if (await client.answer(5))[4] != qos:
            raise CannotRun(f"{self._broker.name} refuses a subscription")
        return client

    def publish(self, connections: int, number: int, body: bytes, topic: str = "bench/publish") -> float:
        """Have each of so many connections publish so many messages with QoS 1; return the seconds."""
        parts = publishes(topic, body, 1)

        async def turn() -> float:
            clients = [await self._open(Publisher, f"p{index}", True) for index in range(connections)]
            begun = perf_counter()
            await _all(client.begin(_again(parts), number) for client in clients)  # type: ignore[attr-defined]
            seconds = perf_counter() - begun
            await _leave(clients)
            return seconds

        return self._runner.run(turn())

    def retain(self, connections: int, number: int, body: bytes) -> None:
        """Have so many connections retain messages, each under so many topics of its own."""

        def parts(client: int) -> Iterator[tuple[bytes, bytes]]:
            for index in range(number):
                yield publishes(f"bench/retained/{client}/{index}", body, 1, retain=True)

        async def turn() -> None:
            clients = [await self._open(Publisher, f"r{index}", True) for index in range(connections)]
            await _all(client.begin(parts(index), number) for index, client in enumerate(clients))  # type: ignore[attr-defined]
            await _leave(clients)

        self._runner.run(turn())

    def fan_out(self, subscribers: int, number: int, batch: int, body: bytes, qos: int) -> float:
        """Publish messages, a batch at a time, each when all subscribers have the one before; return the seconds."""
        head, tail = publishes("bench/fan", body, qos)
        size = len(head) + len(tail) + (_ID_BYTES if qos else 0)
        source = [head + (index + 1).to_bytes(2, "big") + tail if qos else head for index in range(batch)]

        async def turn() -> float:
            clients = [await self._subscribed(f"s{index}", "bench/fan", qos, True) for index in range(subscribers)]
            publisher = await self._open(Connection, "source", True)
            begun = perf_counter()
            for _ in range(number // batch):
                taken = [client.begin(size, len(head) if qos else 0, batch) for client in clients]  # type: ignore[attr-defined]
                publisher.transport.write(b"".join(source))
                await _all(taken)
                if qos:
                    await publisher.answer(4 * batch)
            seconds = perf_counter() - begun
            await _leave([*clients, publisher])
            return seconds

        return self._runner.run(turn())

    def fall_asleep(self, sessions: int, topic: str) -> None:
        """Make so many sessions with a subscription of QoS 1, whose clients leave."""

        async def one(index: int) -> None:
            client = await self._subscribed(f"sleeper-{index}", topic, 1, False)
            await client.leave()

        async def turn() -> None:
            for first in range(0, sessions, OPENED_AT_ONCE):
                await _all(one(index) for index in range(first, min(sessions, first + OPENED_AT_ONCE)))

        self._runner.run(turn())

    def wake(self, index: int, topic: str, body: bytes, number: int) -> float:
        """Connect as one of the sleepers, and take so many messages; return the seconds."""
        head, tail = publishes(topic, body, 1)

        async def turn() -> float:
            begun = perf_counter()
            client = await self._open(Subscriber, f"sleeper-{index}", False, present=True)
            assert isinstance(client, Subscriber)
            await _all([client.begin(len(head) + _ID_BYTES + len(tail), len(head), number)])
            seconds = perf_counter() - begun
            await client.leave()
            return seconds

        return self._runner.run(turn())

    def answer(self) -> None:
        """Connect, be answered, and leave."""

        async def turn() -> None:
            client = await self._open(Connection, "first", True)
            await client.leave()

        self._runner.run(turn())


@contextmanager
def clients(broker: Broker) -> Iterator[Clients]:
    with asyncio.Runner() as runner:
        yield Clients(broker, runner)


def _again(parts: tuple[bytes, bytes]) -> Iterator[tuple[bytes, bytes]]:
    while True:
        yield parts


async def _all(awaited: object) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*awaited)  # type: ignore[misc]


async def _leave(clients: list[Connection]) -> None:
    for client in clients:
        await client.leave()
    await asyncio.sleep(0)
