"""What clients do to a broker, with aio-pika and with pika: the same code for every broker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

from bench.amqp_brokers import url
from bench.brokers import Broker
from bench.errors import CannotRun

QUEUE = "bench"
BODY = bytes(1024)
WINDOW = 500
ACK_EVERY = 100
PREFETCH = 1000
CONNECTIONS = 50
PATIENCE_S = 120.0


@contextmanager
def control(broker: Broker) -> Iterator[Any]:
    """A channel of pika's with the durable queue of the bench declared, for what is not timed."""
    try:
        import pika
    except ImportError as error:
        raise CannotRun(f"pika is not installed: {error}") from error
    with pika.BlockingConnection(pika.URLParameters(url(broker))) as connection:
        channel = connection.channel()
        channel.queue_declare(QUEUE, durable=True)
        yield channel


def waiting(channel: Any) -> int:
    """Return how many messages are ready."""
    return int(channel.queue_declare(QUEUE, durable=True, passive=True).method.message_count)


class AioPika:
    """aio-pika on a loop that runs only in its turn; `connections` besides the first one, for many publishers."""

    name = "aio-pika"

    def __init__(self, broker: Broker, stack: ExitStack, connections: int = 0) -> None:
        try:
            import aio_pika
        except ImportError as error:
            raise CannotRun(f"aio-pika is not installed: {error}") from error
        self._library = aio_pika
        self._runner = stack.enter_context(asyncio.Runner())
        self._channels: list[Any] = [self._runner.run(self._open(broker)) for _ in range(1 + connections)]
        stack.callback(self._runner.run, self._close())

    async def _open(self, broker: Broker) -> Any:
        connection = await self._library.connect(url(broker))
        return connection, await connection.channel(publisher_confirms=True)

    async def _close(self) -> None:
        for connection, _ in self._channels:
            await connection.close()

    def publish(self, number: int, window: int) -> float:
        """Publish so many messages, at most `window` of them unconfirmed; return the seconds to the last one."""
        return self._runner.run(self._publish(number, window))

    async def _publish(self, number: int, window: int) -> float:
        start = perf_counter()
        for first in range(0, number, window):
            await asyncio.gather(*(self._put(self._channels[0][1]) for _ in range(min(window, number - first))))
        return perf_counter() - start

    def publish_at_once(self, times: int) -> float:
        """Let each connection but the first publish one message, all at once, so many times; return the seconds."""
        return self._runner.run(self._publish_at_once(times))

    async def _publish_at_once(self, times: int) -> float:
        start = perf_counter()
        for _ in range(times):
            await asyncio.gather(*(self._put(channel) for _, channel in self._channels[1:]))
        return perf_counter() - start

    async def _put(self, channel: Any) -> None:
        message = self._library.Message(BODY, delivery_mode=self._library.DeliveryMode.PERSISTENT)
        await channel.default_exchange.publish(message, QUEUE)

    def consume(self, number: int) -> float:
        """Take so many messages, which wait, with an ack for every hundred; return the seconds to the last one."""
        return self._runner.run(asyncio.wait_for(self._consume(number), PATIENCE_S))

    async def _consume(self, number: int) -> float:
        channel = await self._channels[0][0].channel()
        await channel.set_qos(prefetch_count=PREFETCH)
        queue = await channel.get_queue(QUEUE, ensure=False)
        taken = 0
        done = asyncio.get_running_loop().create_future()

        async def take(message: Any) -> None:
            nonlocal taken
            taken += 1
            if taken % ACK_EVERY == 0 or taken == number:
                await message.ack(multiple=True)
            if taken == number:
                done.set_result(perf_counter())

        start = perf_counter()
        await queue.consume(take)
        end: float = await done
        await channel.close()
        return end - start


class Pika:
    """pika: publishing on its select loop, whose confirms come in windows; taking by its blocking connection."""

    name = "pika"

    def __init__(self, broker: Broker, stack: ExitStack) -> None:
        try:
            import pika
        except ImportError as error:
            raise CannotRun(f"pika is not installed: {error}") from error
        self._properties = pika.BasicProperties(delivery_mode=2)
        self._channel: Any = None
        self._problem: object = None
        self._unconfirmed: set[int] = set()
        self._last = self._settled = 0
        self._blocking: Any = stack.enter_context(control(broker))
        self._connection = pika.SelectConnection(
            pika.URLParameters(url(broker)), self._opened, self._failed, self._closed
        )
        stack.callback(self._close)
        self._run()

    def _opened(self, connection: Any) -> None:
        connection.channel(on_open_callback=self._has_channel)

    def _has_channel(self, channel: Any) -> None:
        self._channel = channel
        channel.confirm_delivery(self._told, callback=lambda _: self._stop())

    def _failed(self, _: Any, error: object) -> None:
        self._problem = error
        self._stop()

    def _closed(self, _: Any, error: object) -> None:
        self._problem = error
        self._stop()

    def _told(self, frame: Any) -> None:
        method = frame.method
        if method.NAME != "Basic.Ack":
            self._problem = "a publish was not confirmed"
        self._unconfirmed.discard(method.delivery_tag)
        if method.multiple:
            self._unconfirmed.difference_update(range(self._settled + 1, method.delivery_tag))
            self._settled = method.delivery_tag
        if self._problem or not self._unconfirmed:
            self._stop()

    def _run(self) -> None:
        self._connection.ioloop.start()
        if self._problem is not None:
            raise CannotRun(f"pika: {self._problem!r}")

    def _stop(self) -> None:
        self._connection.ioloop.stop()

    def _close(self) -> None:
        if not self._connection.is_closed:
            self._connection.close()
            self._connection.ioloop.start()

    def publish(self, number: int, window: int) -> float:
        """Publish so many messages, at most `window` of them unconfirmed; return the seconds to the last one."""
        publish, properties = self._channel.basic_publish, self._properties
        start = perf_counter()
        for first in range(0, number, window):
            some = min(window, number - first)
            self._unconfirmed.update(range(self._last + 1, self._last + some + 1))
            self._last += some
            for _ in range(some):
                publish("", QUEUE, BODY, properties)
            self._run()
        return perf_counter() - start

    def consume(self, number: int) -> float:
        """Take so many messages, which wait, with an ack for every hundred; return the seconds to the last one."""
        channel = self._blocking
        channel.basic_qos(prefetch_count=PREFETCH)
        start = perf_counter()
        for taken, (method, _, _) in enumerate(channel.consume(QUEUE, inactivity_timeout=PATIENCE_S), 1):
            if method is None:
                raise CannotRun(f"pika: {taken - 1} of {number} messages came")
            if taken % ACK_EVERY == 0 or taken == number:
                channel.basic_ack(method.delivery_tag, multiple=True)
            if taken == number:
                break
        seconds = perf_counter() - start
        channel.cancel()
        return seconds
