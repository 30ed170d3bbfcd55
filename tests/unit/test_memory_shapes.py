"""Shapes that once took far more memory than they were charged: each stays near its capacity, and is all there after.

What the interpreter is asked for is counted, not what the allocator takes for it; `bench.memory_shapes` has the whole
processes.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import random
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import qflow
import qflow.aio
from qflow.memory import run_list
from qflow.message import BATCH_BYTES, OVERHEAD_BYTES, SINGLE_BYTES
from qflow.queues.looking import hides_attempts
from qflow.queues.queue import parts_of
from qflow.streams.room import HELD_BYTES

Open = Callable[..., qflow.Broker]
MIB = 2**20
NUMBERS = count()


class Traced:
    """How much more was allocated at most, in bytes."""

    peak = 0


@contextmanager
def traced() -> Iterator[Traced]:
    found = Traced()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield found
        found.peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def test_a_range_that_was_settled_takes_no_memory_however_wide_it_is(open_spool: Open) -> None:
    """A block from an unacked message over 100,000 that were not logged: each of those once was a number in a set."""
    with open_spool() as broker:
        queue = broker.declare_queue("q")
        queue.put(b"first")
        held = queue.get()
        for _ in range(10):
            queue.put_many([b""] * 10_000, durable=False)
            queue.get_many(10_000).ack()
        queue.put(b"last")
        assert held.body == b"first"
    queue = open_spool().declare_queue("q")
    with traced() as found:
        assert queue.get(0).body == b"first"
        assert queue.get(0).body == b"last"
    assert found.peak < MIB
    with pytest.raises(qflow.QueueEmpty):
        queue.get(0)


def numbers(batch: qflow.Deliveries) -> list[int]:
    return [int(body) for body in batch.bodies]


def all_numbers(queue: qflow.Queue) -> list[int]:
    found: list[int] = []
    while batch := queue.get_many(1000, timeout_s=0):
        found += numbers(batch)
        batch.ack()
    return found


def test_single_messages_that_come_back_are_charged_for_what_they_take(open_spool: Open) -> None:
    """Every other one of 10,000 small messages; they come again in order, and what exceeds the capacity is spilled."""
    broker = open_spool(capacity_bytes=MIB)
    queue = broker.declare_queue("q", durable=False)
    with traced() as found:
        for first in range(0, 10_000, 1_000):
            queue.put_many([b"%020d" % number for number in range(first, first + 1_000)])
        batches = [queue.get_many(1_000, timeout_s=0) for _ in range(10)]
        while batches:
            for delivery in batches.pop(0):
                if int(delivery.body) % 2:
                    delivery.nack()
                else:
                    delivery.ack()
    assert found.peak < 3 * MIB
    assert broker.check() == []
    assert queue.stats().spilled_messages > 0
    assert all_numbers(queue) == list(range(1, 10_000, 2))


@pytest.mark.parametrize("durable", [True, False], ids=["durable", "transient"])
def test_scattered_messages_keep_their_place(open_spool: Open, durable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given back in any order, as singles and in batches, with others that wait and others that are delayed."""
    monkeypatch.setattr(run_list, "SMALL_RUNS", 8)
    broker = open_spool(capacity_bytes="256KiB")
    queue = broker.declare_queue("q", durable=durable)
    generator = random.Random(1)
    queue.put_many([b"%d" % number for number in range(1_500)])
    queue.put(b"9999", delay_s=3600)
    held = list(queue.get_many(1_000))
    generator.shuffle(held)
    acked = {int(delivery.body) for delivery in held[:300]}
    kept = held[300:400]
    for delivery in held[:300]:
        delivery.ack()
    for delivery in held[400:]:
        delivery.nack()
    left = sorted(set(range(1_500)) - acked - {int(delivery.body) for delivery in kept})
    stats = queue.stats()
    assert (stats.delayed_messages, stats.acquired_messages, stats.messages) == (1, 100, 1_201)
    entries = list(queue.browse())
    assert [entry.sequence for entry in entries[:-1]] == left
    for entry in entries[:-1:50]:
        entry.spill()
        entry.restore()
        assert entry.state in ("resident", "spilled")
    assert broker.check() == []

    first, rest = queue.get_many(50), queue.get_many(50)
    assert numbers(first) + numbers(rest) == left[:100]
    assert all(delivery.delivery_count == 2 for delivery in first)
    for delivery in kept:
        delivery.nack()
    rest.nack()
    first.ack()
    again = sorted([*left[50:], *(int(delivery.body) for delivery in kept)])
    assert [int(queue.get(0).body) for _ in range(20)] == again[:20]
    assert queue.purge() == len(again) + 1
    assert broker.check() == []


def test_scattered_messages_are_found_again_with_their_counts(
    open_spool: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some were spilled: what they were delivered before is in the log, and they are there after a reopen."""
    monkeypatch.setattr(run_list, "SMALL_RUNS", 8)
    broker = open_spool(capacity_bytes="64KiB")
    queue = broker.declare_queue("q")
    queue.put_many([b"%0100d" % number for number in range(900)])
    held: list[qflow.Delivery] = []
    while len(held) < 350 and (batch := queue.get_many(350 - len(held), timeout_s=0)):
        held += batch
    count = len(held)
    for delivery in held[::-1]:
        if int(delivery.body) % 2:
            delivery.nack()
    for delivery in held:
        if not int(delivery.body) % 2:
            delivery.ack()
    found: list[tuple[int, int]] = []
    assert hides_attempts(parts_of(queue))
    broker.close()
    queue = open_spool(capacity_bytes="64KiB").declare_queue("q")
    while batch := queue.get_many(100, timeout_s=0):
        found += [(int(delivery.body), delivery.delivery_count) for delivery in batch]
        batch.ack()
    odd = [(number, 2) for number in range(count) if number % 2]
    assert found == [*odd, *((number, 1) for number in range(count, 900))]


def test_deliveries_that_were_taken_one_by_one_are_charged_for_what_they_take(open_spool: Open) -> None:
    """Held until memory is full: charges are what was allocated, or more; what does not fit was spilled meanwhile."""
    broker = open_spool(capacity_bytes=MIB)
    queue = broker.declare_queue("q", durable=False)
    held: list[qflow.Delivery] = []
    with traced() as found:
        for first in range(0, 5_000, 1_000):
            queue.put_many([b"%0100d" % number for number in range(first, first + 1_000)])
        with pytest.raises(qflow.QueueEmpty):
            while True:
                held.append(queue.get(0))
    assert 3_000 < len(held) < 5_000
    assert found.peak < 1.3 * MIB
    assert broker.check() == []
    size = sum(len(delivery.body) for delivery in held)
    stats = queue.stats()
    assert (stats.acquired_bytes, stats.bytes) == (size, 5_000 * 100)
    assert stats.resident_bytes == size + len(held) * (OVERHEAD_BYTES + SINGLE_BYTES)
    held[0].nack()
    for delivery in held[1:]:
        delivery.ack()
    assert all_numbers(queue) == [0, *range(len(held), 5_000)]
    assert queue.stats().resident_bytes == 0


@pytest.mark.parametrize("size", [1, 2, 10])
def test_small_batches_are_charged_for_what_they_take(open_spool: Open, size: int) -> None:
    """Held until memory is full, as single ones: charges are what was allocated, or more."""
    broker = open_spool(capacity_bytes=MIB)
    queue = broker.declare_queue("q", durable=False)
    held: list[qflow.Deliveries] = []
    with traced() as found:
        for first in range(0, 12_000, 1_000):
            queue.put_many([b"%d" % number for number in range(first, first + 1_000)])
        while batch := queue.get_many(size, timeout_s=0):
            held.append(batch)
    assert 900 < sum(map(len, held)) < 12_000
    assert found.peak < 1.3 * MIB
    assert broker.check() == []
    stats = queue.stats()
    charged = stats.acquired_bytes + stats.acquired_messages * OVERHEAD_BYTES + len(held) * BATCH_BYTES
    assert stats.resident_bytes == charged
    held[0].nack()
    for batch in held[1:]:
        batch.ack()
    assert all_numbers(queue) == [*range(size), *range(sum(map(len, held)), 12_000)]
    assert queue.stats().resident_bytes == 0


def test_a_batch_is_charged_until_nothing_of_it_is_held(open_spool: Open) -> None:
    """Settled, returned, or taken apart, in a commit or one that is refused, or when the queue is purged."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=False, ack_timeout_s=60)

    def charged() -> int:
        assert broker.check() == []
        stats = queue.stats()
        return stats.resident_bytes - stats.messages * OVERHEAD_BYTES

    queue.put_many([b""] * 10)
    whole = queue.get_many(10)
    assert charged() == BATCH_BYTES
    whole.nack()
    assert charged() == 0
    batches = [queue.get_many(2) for _ in range(4)]
    assert charged() == 4 * BATCH_BYTES
    batches[0].ack()
    batches[1][0].ack()
    assert charged() == 3 * BATCH_BYTES
    batches[1][1].nack()
    batches[2].extend(100)
    assert charged() == 2 * BATCH_BYTES
    claims = parts_of(queue).claims
    leaving = claims.begin_leaving([*batches[2], batches[3].held])
    assert charged() == 0
    leaving.give_up()
    assert charged() == 2 * BATCH_BYTES
    claims.give_up(batches[3].held)
    assert queue.get_many(1, timeout_s=0).held.left_count == 1
    assert charged() == 2 * BATCH_BYTES
    queue.purge()
    assert charged() == 0
    batches[2].ack()
    assert not queue.get_many(1, timeout_s=0)
    assert charged() == 0


@pytest.mark.parametrize("single", [True, False], ids=["get", "get_many"])
def test_messages_of_a_stream_that_are_taken_one_by_one_are_charged_for_what_they_take(
    open_spool: Open, single: bool
) -> None:
    """Held until memory is full; what is settled makes room for as many, in order, and nothing stays."""
    broker = open_spool(capacity_bytes=MIB)
    broker.declare_stream("s", topics=["#"])
    for first in range(0, 6_000, 1_000):
        broker.publish_many([("t", b"%d" % number) for number in range(first, first + 1_000)])
    numbers_got: list[int] = []

    def take(subscription: qflow.Subscription) -> qflow.Delivery | qflow.Deliveries:
        got = subscription.get(0) if single else subscription.get_many(1)
        numbers_got.append(int(got.body if isinstance(got, qflow.Delivery) else got.bodies[0]))
        return got

    with broker.subscribe("s", "#", start="earliest", name="n", follow=False) as subscription:
        held = [take(subscription)]
        with traced() as found, pytest.raises(qflow.TooManyUnsettled):
            while True:
                held.append(take(subscription))
        assert 300 < len(held) < 1_200
        assert found.peak < 1.5 * MIB
        assert broker.check() == []
        for one in held[:100]:
            one.ack()
        held = held[100:] + [take(subscription) for _ in range(100)]
        for one in held:
            one.ack()
        assert numbers_got == list(range(len(numbers_got)))
        assert broker.check() == []


def test_one_of_a_batch_is_charged_as_a_single_one_only_while_it_is_one(open_spool: Open) -> None:
    """Settled or returned on its own, or in a commit that is refused, or dropped by a purge: nothing stays."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=False)
    queue.put_many([b""] * 8)
    queue.get(0).nack()
    batch = queue.get_many(6)
    single = queue.get(0)
    assert queue.stats().resident_bytes == 8 * OVERHEAD_BYTES + SINGLE_BYTES + BATCH_BYTES
    batch[0].ack()
    batch[1].nack()
    leaving = parts_of(queue).claims.begin_leaving([batch[2], single])
    assert queue.stats().resident_bytes == 7 * OVERHEAD_BYTES + BATCH_BYTES
    leaving.give_up()
    assert queue.stats().resident_bytes == 7 * OVERHEAD_BYTES + SINGLE_BYTES + BATCH_BYTES
    assert broker.check() == []
    with broker.transaction() as tx:
        tx.ack(batch[2])
        tx.ack(single)
    assert queue.stats().resident_bytes == 5 * OVERHEAD_BYTES + BATCH_BYTES
    held = queue.get(0)
    assert queue.stats().resident_bytes == 5 * OVERHEAD_BYTES + SINGLE_BYTES + BATCH_BYTES
    queue.purge()
    held.ack()
    assert queue.stats().resident_bytes == 0
    assert broker.check() == []


@pytest.mark.parametrize("letter", ["t", "\N{GREEK SMALL LETTER TAU}"], ids=["ASCII", "Greek"])
def test_long_topics_are_charged_for_what_they_take(open_spool: Open, letter: str) -> None:
    """1,500 topics of 2,000 letters, published and then held by a subscriber as far as memory has room."""
    broker = open_spool(capacity_bytes=MIB)
    broker.declare_stream("s", topics=["#"])
    subscription = broker.subscribe("s", name="d")
    held: list[qflow.StreamDeliveries] = []
    with traced() as found:
        for first in range(0, 1_500, 50):
            broker.publish_many([(f"{number}/".ljust(2_000, letter), b"") for number in range(first, first + 50)])
        with pytest.raises(qflow.TooManyUnsettled):
            while batch := subscription.get_many(1_000, timeout_s=0):
                held.append(batch)
    assert found.peak < 2.2 * MIB
    assert 100 < sum(map(len, held)) < 600
    for batch in held:
        batch.ack()
    left = 1_500 - sum(map(len, held))
    while batch := subscription.get_many(1_000, timeout_s=0):
        left -= len(batch)
        batch.ack()
    assert left == 0
    assert broker.check() == []
    assert broker.stats().resident_bytes <= MIB // 4


def _moved(broker: qflow.Broker, body: bytes) -> None:
    queue = broker.queue("q")
    queue.put(body)
    with broker.transaction() as tx:
        delivery = queue.get()
        tx.put("other", delivery.body)
        tx.ack(delivery)
    broker.queue("other").get().ack(wait=True)


def _buried(broker: qflow.Broker, body: bytes) -> None:
    broker.queue("q").put(body)
    broker.queue("q").get().nack(requeue=False)
    broker.queue("dead").get().ack(wait=True)


def _published(broker: qflow.Broker, body: bytes) -> None:
    broker.publish("t", body)
    broker.publish_many([("t", body), ("t", b"")])
    broker.publish("t", body, producer="p", number=next(NUMBERS))
    broker.queue("q").put(body, dedupe_key=str(next(NUMBERS)))
    for _ in range(5):
        broker.queue("q").get().ack(wait=True)


def _submitted(broker: qflow.Broker, body: bytes) -> None:
    assert broker.queue("q").submit(body).result() is not None
    broker.queue("q").get().ack(wait=True)
    broker.publish("stream", body, producer="p", number=next(NUMBERS))


async def _put(broker: qflow.aio.AsyncBroker, body: bytes) -> None:
    await broker.queue("q").put(body)
    await broker.queue("q").put_many([body])
    for _ in range(2):
        await (await broker.queue("q").get()).ack(wait=True)


async def _published_by_tasks(broker: qflow.aio.AsyncBroker, body: bytes) -> None:
    await broker.publish("t", body)
    await (await broker.queue("q").get()).ack(wait=True)
    await broker.publish("stream", body, producer="p", number=next(NUMBERS))
    async with broker.transaction() as tx:
        await tx.put("q", body)
    await (await broker.queue("q").get()).ack(wait=True)


@pytest.mark.parametrize("work", [_moved, _buried, _published, _submitted, _put, _published_by_tasks])
def test_bodies_that_are_settled_do_not_wait_for_the_collector(open_spool: Open, work: Callable[..., Any]) -> None:
    """It comes by how many objects there are, not by how large they are: nothing that holds a body leads to itself."""
    broker = open_spool()
    broker.declare_queue("dead")
    broker.declare_stream("s", topics=["stream"])
    queue = broker.declare_queue("q", dead_letter="dead", dedupe_window_s=60)
    broker.declare_queue("other")
    broker.bind(queue, "t")

    async def by_tasks() -> None:
        async with asyncio.timeout(60):
            for _ in range(10):
                await work(qflow.aio.AsyncBroker(broker), bytes(MIB))

    gc.collect()
    gc.disable()
    try:
        with traced() as found:
            if inspect.iscoroutinefunction(work):
                asyncio.run(by_tasks())
            else:
                for _ in range(10):
                    work(broker, bytes(MIB))
            left = tracemalloc.get_traced_memory()[0]
    finally:
        gc.enable()
    assert left < 4 * MIB
    assert found.peak < 10 * MIB


@pytest.mark.parametrize("queues", [1, 3])
@pytest.mark.parametrize("durable", [True, False])
def test_a_publish_of_many_small_messages_takes_what_they_are_charged(
    open_spool: Open, queues: int, durable: bool
) -> None:
    """What says where each of them went included, and kept."""
    broker = open_spool()
    for number in range(queues):
        broker.bind(broker.declare_queue(f"q{number}", durable=durable), "t")
    messages = [("t", b"%d" % number) for number in range(10_000)]
    with traced() as found:
        results = broker.publish_many(messages)
    assert results[-1].sequences == {f"q{number}": 9_999 for number in range(queues)}
    assert found.peak < 10_000 * (queues + 1) * (6 + OVERHEAD_BYTES)


def test_subscriptions_that_find_no_room_pass_with_one_message_each(open_at: Callable[..., qflow.Broker]) -> None:
    """Not with a block each: what many of them hold beyond the capacity is one message a subscription, in order."""
    broker = open_at(capacity_bytes=2**20)
    stream = broker.declare_stream("s", topics=["t"])
    broker.publish_many([("t", b"%4d" % number * 50) for number in range(1_000)])
    subscriptions = [broker.subscribe(stream, start="earliest") for _ in range(100)]
    room = broker.engine.streams.room
    held = [subscription.get_nowait() for subscription in subscriptions]
    assert {one.offset for one in held} == {0}
    assert 0 < room._slack < 100 * (1_000 + HELD_BYTES)
    assert room.used <= 2**20
    for number in range(1, 20):
        held = [subscription.get_nowait() for subscription in subscriptions]
        assert {one.offset for one in held} == {number}
    assert room._slack < 100 * (1_000 + HELD_BYTES)
    for subscription in subscriptions[1:]:
        subscription.close()
    offsets: list[int] = []
    while batch := subscriptions[0].get_many(300, 0):
        offsets += [one.offset for one in batch]
    assert offsets == list(range(20, 1_000))
    assert broker.check() == []


def test_an_opening_allocates_what_it_needs(tmp_path: Path) -> None:
    """What has malloc keep memory at hand is given once a process; each opening filled 4 MiB for that."""
    qflow.open(tmp_path / "first").close()
    with traced() as found:
        qflow.open(tmp_path / "second").close()
    assert found.peak < MIB
