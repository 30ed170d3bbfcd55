"""A consumer between its queue and a channel that may end at any moment: nothing spins, nothing is kept."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import qflow.aio
from doors.event_loop import run, until
from qflow.amqp.model.queues import Queue
from qflow.amqp.server.client import MOST_IN_A_TURN
from qflow.amqp.server.consuming import AT_ONCE, BUFFER_BYTES, Consumer, give_back
from qflow.amqp.server.hosted import HostedQueue
from qflow.amqp.server.stores import QueueStore
from qflow.message import OVERHEAD_BYTES, SINGLE_BYTES
from qflow.serving.tasks import Turns


class Outlet:
    """A channel that takes so many messages, and is closed then."""

    def __init__(self, takes: int) -> None:
        self.takes = takes
        self.credit = 1000
        self.is_full = False
        self.turns = Turns(MOST_IN_A_TURN)
        self.client = self
        self.delivered: list[Any] = []
        self.refused = 0
        self.errors: list[Any] = []
        self.gone: list[Consumer] = []

    async def drain(self) -> None:
        raise AssertionError("nothing is to be written")

    def deliver(self, consumer: Consumer, delivery: Any, content: Any) -> bool:
        if len(self.delivered) < self.takes:
            self.delivered.append(delivery)
            consumer.unacked += 1
            return True
        self.refused += 1
        assert self.refused < 5, "it asks a closed channel again and again"
        return False

    def consumer_gone(self, consumer: Consumer) -> None:
        self.gone.append(consumer)

    def fail_channel(self, error: Any) -> None:
        self.errors.append(error)

    fail = fail_channel


async def consuming(broker: Any, outlet: Outlet, **settings: Any) -> tuple[Any, HostedQueue, Consumer]:
    """A consumer of a queue with three messages."""
    queue = await broker.declare_queue("q")
    await queue.put_many([b"a", b"b", b"c"])
    hosted = HostedQueue(Queue(name="q", durable=True), "queue 'q'", QueueStore("q", queue, counts=False))
    consumer = Consumer(outlet, hosted, "tag", no_ack=False, exclusive=False, **({"prefetch": 0} | settings))
    hosted.add(consumer)
    await consumer.open({})
    consumer.start()
    return queue, hosted, consumer


def test_a_consumer_of_a_channel_that_is_closed_takes_no_more(tmp_path: Path) -> None:
    """It gives back what it took and ends: to ask again would never let another task run."""

    async def scenario() -> None:
        async with qflow.aio.open(tmp_path / "spool") as broker:
            outlet = Outlet(takes=1)
            queue, _, consumer = await consuming(broker, outlet)
            await until(lambda: outlet.refused)
            await consumer.stop()
            assert (outlet.refused, outlet.errors) == (1, [])
            assert (await queue.stats()).acquired_messages == 1

    run(scenario())


def test_what_a_client_holds_is_charged_as_single_deliveries(tmp_path: Path) -> None:
    """Until it is acked, or goes back; the batches it came in are not, once all of them was sent."""

    async def scenario() -> None:
        async with qflow.aio.open(tmp_path / "spool") as broker:
            outlet = Outlet(takes=3)
            queue, hosted, consumer = await consuming(broker, outlet)
            await until(lambda: len(outlet.delivered) == 3)
            assert queue.queue.stats().resident_bytes == 3 * (1 + OVERHEAD_BYTES + SINGLE_BYTES)
            await outlet.delivered[0].ack()
            await give_back(outlet.delivered[1])
            await until(lambda: outlet.refused)
            await consumer.stop()
            assert queue.queue.stats().resident_bytes == 2 * (1 + OVERHEAD_BYTES) + SINGLE_BYTES
            hosted.store.settle([outlet.delivered[2].delivery])
            assert queue.queue.stats().acquired_messages == 0

    run(scenario())


def test_what_a_consumer_took_and_may_not_send_is_there_for_others(tmp_path: Path) -> None:
    """Another consumer of its channel has used up what both may have; nothing counts as delivered."""

    class Shared(Outlet):
        def deliver(self, consumer: Consumer, delivery: Any, content: Any) -> bool:
            self.credit = 0
            return super().deliver(consumer, delivery, content)

    async def scenario() -> None:
        async with qflow.aio.open(tmp_path / "spool") as broker:
            outlet = Shared(takes=9)
            queue, _, consumer = await consuming(broker, outlet)
            consumer._average = 1  # it takes all of them at once
            await until(lambda: outlet.delivered)
            async with await queue.get(0) as other:
                assert (other.body, other.redelivered) == (b"b", False)
            await consumer.stop()

    run(scenario())


def test_while_a_client_does_not_read_those_after_it_are_served(tmp_path: Path) -> None:
    """One of a higher priority has its turn again as soon as it does."""

    class Slow(Outlet):
        def __init__(self) -> None:
            super().__init__(takes=9)
            self.reads = asyncio.Event()

        @property
        def is_full(self) -> bool:  # type: ignore[override]
            return bool(self.delivered) and not self.reads.is_set()

        @is_full.setter
        def is_full(self, _: bool) -> None: ...

        async def drain(self) -> None:
            await self.reads.wait()

    async def scenario() -> None:
        async with qflow.aio.open(tmp_path / "spool") as broker:
            above, below = Slow(), Outlet(takes=9)
            queue, hosted, first = await consuming(broker, above, priority=5)
            second = Consumer(below, hosted, "other", no_ack=False, exclusive=False, prefetch=0)
            hosted.add(second)
            await second.open({})
            second.start()
            await until(lambda: len(above.delivered) == 1)
            await queue.put_many([b"d", b"e"])
            await until(lambda: len(above.delivered) + len(below.delivered) == 5)
            assert len(above.delivered) == 1
            above.reads.set()
            await until(lambda: not hosted.is_served(second))
            await queue.put(b"f")
            await until(lambda: len(above.delivered) == 2)
            for one in (first, second):
                await one.stop()

    run(scenario())


def test_other_tasks_run_between_the_batches_of_a_deep_queue(tmp_path: Path) -> None:
    """A client that reads as fast as it is sent to holds up nobody else."""

    async def scenario() -> None:
        async with qflow.aio.open(tmp_path / "spool") as broker:
            outlet = Outlet(takes=10_000)
            outlet.credit = 10_000
            queue = await broker.declare_queue("q", durable=False)
            await queue.put_many([b"x"] * 1000)
            hosted = HostedQueue(Queue(name="q", durable=False), "queue 'q'", QueueStore("q", queue, counts=False))
            consumer = Consumer(outlet, hosted, "tag", no_ack=False, exclusive=False, prefetch=0)
            consumer._average = 1
            hosted.add(consumer)
            await consumer.open({})
            consumer.start()
            turns = 0
            while len(outlet.delivered) < 1000:
                turns += 1
                await asyncio.sleep(0)
            assert turns > 1000 // AT_ONCE
            await consumer.stop()

    run(scenario())


def test_a_consumer_without_credit_is_told_that_its_queue_is_deleted(tmp_path: Path) -> None:
    """Its client waits for nothing else."""

    async def scenario() -> None:
        async with qflow.aio.open(tmp_path / "spool") as broker:
            outlet = Outlet(takes=9)
            _, hosted, consumer = await consuming(broker, outlet, prefetch=1)
            await until(lambda: outlet.delivered)
            await broker.delete_queue("q")
            hosted.ended()
            await until(lambda: outlet.gone)
            assert outlet.gone == [consumer]

    run(scenario())


def test_a_message_that_cannot_be_delivered_ends_the_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that ended in silence would have its client wait for ever."""

    def fail(*_: object) -> Any:
        raise ValueError("for the test")

    monkeypatch.setattr(QueueStore, "content_of", fail)

    async def scenario() -> None:
        async with qflow.aio.open(tmp_path / "spool") as broker:
            outlet = Outlet(takes=9)
            queue = await broker.declare_queue("q")
            await queue.put(b"poison")
            queue, _, consumer = await consuming(broker, outlet)
            await until(lambda: outlet.errors)
            await consumer.stop()
            assert (await queue.stats()).acquired_messages == 0

    run(scenario())


@pytest.mark.parametrize("size", [BUFFER_BYTES, BUFFER_BYTES + 1])
def test_a_full_buffer_is_one_that_the_transport_has_writers_wait_for(size: int) -> None:
    """`drain` returns at once up to the limit itself: who waited for less then would spin."""
    from qflow.amqp.server.session import Session

    session: Any = object.__new__(Session)
    session._writer = SimpleNamespace(transport=SimpleNamespace(get_write_buffer_size=lambda: size))
    session.machine = SimpleNamespace(pending_bytes=lambda: 0)
    assert session.is_full is (size > BUFFER_BYTES)


def test_a_number_that_no_client_can_read_is_delivered_as_text(tmp_path: Path) -> None:
    """Headers of a program hold any integer; those of AMQP have 64 bits."""
    from qflow.amqp.server.content import content_of
    from qflow.amqp.wire.methods import decode_properties

    content = content_of({"n": 2**63, "m": -(2**63)}, "q", b"")
    assert decode_properties(content.properties).headers == {"n": str(2**63), "m": -(2**63)}


@pytest.mark.parametrize(
    ("properties", "exchange", "key"),
    [
        ("!!!", "", "q"),
        ("", "", "q"),
        ("//8=", "", "q"),
        ("IAAAAAAQAWs=", "", "q"),
        ("AAA=", "x" * 256, "q"),
        ("AAA=", "", "x" * 256),
        (5, "", "q"),
    ],
)
def test_what_a_program_says_of_a_message_that_is_no_amqp_is_but_headers(
    properties: object, exchange: str, key: str
) -> None:
    """Whoever may put a message wrote frames for its consumers that ended their connections, again and again."""
    from qflow.amqp.server.content import content_of
    from qflow.amqp.wire.methods import decode_properties

    said: Any = {"amqp.properties": properties, "amqp.exchange": exchange, "amqp.routing_key": key}
    found, routing_key, raw, _ = content_of(said, "q", b"")
    assert (found, routing_key, decode_properties(raw).headers) == ("", "q", said)


def test_a_consumer_is_told_by_its_tag_until_it_stops(tmp_path: Path) -> None:
    """Statistics name it, and what it holds that its client has not settled."""

    async def scenario() -> None:
        async with qflow.aio.open(tmp_path / "spool") as broker:
            outlet = Outlet(takes=1)
            queue, _, consumer = await consuming(broker, outlet)
            await until(lambda: outlet.refused)
            stats = await queue.stats()
            assert [(one.name, one.pid, one.kind) for one in stats.consumers] == [(consumer.tag, 0, "amqp")]
            assert [(one.consumer, one.pid, one.messages) for one in stats.holders] == [(consumer.tag, 0, 1)]
            await consumer.stop()
            assert (await queue.stats()).consumers == ()

    run(scenario())
