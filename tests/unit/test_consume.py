"""Push: a thread that hands messages to a callback, its back-pressure and its end."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
from faults.seams import Faults, faulty_broker
from qflow.config import SlowConsumer
from qflow.events import EventKind
from qflow.queues.queue import parts_of
from unit.clocks import LONG_S, Clock, until

pytestmark = pytest.mark.two_drivers

Open = Callable[..., qflow.Broker]


@pytest.fixture(params=[True, False], ids=["durable", "transient"])
def queue(open_spool: Open, request: pytest.FixtureRequest) -> qflow.Queue:
    """A queue with ten messages."""
    queue = open_spool().declare_queue("q", durable=request.param)
    queue.put_many([b"%d" % number for number in range(10)])
    return queue


def test_each_message_is_handed_over_in_order_and_acked(queue: qflow.Queue) -> None:
    """What waits, and what comes later; the callback may settle it itself."""
    received: list[bytes] = []

    def work(delivery: qflow.Delivery) -> None:
        received.append(delivery.body)
        if len(received) % 2:
            delivery.ack()

    with queue.consume(work) as consumer:
        queue.put(b"10")
        until(lambda: len(queue) == 0)
        assert consumer.running
    assert received == [b"%d" % number for number in range(11)]
    assert not consumer.running
    assert "closed" in repr(consumer)


def test_no_more_is_acquired_than_was_asked_for(queue: qflow.Queue) -> None:
    """Back-pressure: what a slow callback holds is bounded, the rest waits for others."""
    entered, go_on = threading.Event(), threading.Event()

    def work(_: qflow.Delivery) -> None:
        entered.set()
        assert go_on.wait(LONG_S)

    consumer = queue.consume(work, prefetch=3)
    assert entered.wait(LONG_S)
    assert queue.stats().acquired_messages == 3
    assert queue.get(0).body == b"3"
    go_on.set()
    until(lambda: len(queue) == 1)
    assert consumer.close(LONG_S)


def test_what_was_prefetched_and_not_handed_out_goes_back_uncounted(queue: qflow.Queue) -> None:
    """Closed in the midst of a batch: the one that runs is acked, the others come first time again, in order."""
    entered, go_on = threading.Event(), threading.Event()

    def work(_: qflow.Delivery) -> None:
        entered.set()
        assert go_on.wait(LONG_S)

    consumer = queue.consume(work, prefetch=5)
    assert entered.wait(LONG_S)
    assert not consumer.close(0.01)
    go_on.set()
    assert consumer.close(LONG_S)
    batch = queue.get_many(20)
    assert batch.bodies == [b"%d" % number for number in range(1, 10)]
    assert {delivery.delivery_count for delivery in batch} == {1}
    assert not any(delivery.redelivered for delivery in batch)


@pytest.mark.owner_only
def test_an_exception_gives_the_message_back_and_is_told(open_spool: Open, caplog: pytest.LogCaptureFixture) -> None:
    """It comes again, counted; the consumer goes on; with `max_deliveries` it ends as a dead letter."""
    broker = open_spool()
    queue = broker.declare_queue("q", max_deliveries=3, dead_letter="dead")
    events: list[Any] = []
    broker.on_event(events.append)
    received: list[tuple[bytes, int]] = []

    def work(delivery: qflow.Delivery) -> None:
        received.append((delivery.body, delivery.delivery_count))
        if delivery.body == b"bad":
            raise ValueError("no")

    queue.put_many([b"bad", b"good"])
    with queue.consume(work, prefetch=1):
        until(lambda: len(queue) == 0)
    assert received == [(b"bad", 1), (b"bad", 2), (b"bad", 3), (b"good", 1)]
    letter = broker.queue("dead").get(LONG_S)
    assert (letter.body, letter.headers["dead_letter_nack_reason"]) == (b"bad", "ValueError: no")
    until(lambda: len(events) >= 4)
    assert {event.kind for event in events} == {EventKind.CONSUMER_FAILED, EventKind.DEAD_LETTERED}
    assert "ValueError" in events[0].detail
    assert "ValueError" in caplog.text


def test_a_get_that_fails_is_told_once_and_tried_again(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor is left for what lies on disk: the consumer says so, and goes on when there are some again."""
    monkeypatch.setattr("qflow.queues.consumer.AGAIN_S", 0.001)
    faults = Faults()
    with faulty_broker(spool, faults, capacity_bytes=0) as broker:
        queue = broker.declare_queue("q", durable=False, max_deliveries=1)
        queue.put_many([b"1", b"2"])
        events: list[Any] = []
        broker.on_event(events.append)
        received: list[tuple[bytes, int]] = []
        faults.fail("open", errno.EMFILE)
        with queue.consume(lambda delivery: received.append((delivery.body, delivery.delivery_count))) as consumer:
            until(lambda: faults.calls.get("open", 0) > 20 and events)
            assert consumer.running
            assert not received
            faults.heal()
            until(lambda: len(queue) == 0)
        assert received == [(b"1", 1), (b"2", 1)]
        assert [event.kind for event in events] == [EventKind.CONSUMER_FAILED]
        assert "tries again" in events[0].detail


@pytest.mark.owner_only
def test_what_is_left_of_a_batch_that_failed_goes_back(queue: qflow.Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else would let go of it: it comes again, not counted as delivered."""
    consumers, received = parts_of(queue).consumers, list[tuple[bytes, int]]()
    leave_batch, failures = consumers.leave_batch, [None, MemoryError("no memory")]

    def leave(*arguments: Any) -> Any:
        if failures and (failure := failures.pop(0)) is not None:
            raise failure
        return leave_batch(*arguments)

    monkeypatch.setattr("qflow.queues.consumer.AGAIN_S", 0.0)
    monkeypatch.setattr(consumers, "leave_batch", leave)
    with queue.consume(lambda delivery: received.append((delivery.body, delivery.delivery_count))):
        until(lambda: len(queue) == 0)
    assert received == [(b"%d" % number, 1) for number in range(10)]


def test_a_consumer_that_rests_is_closed_at_once(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a get that failed, it does not look before an hour is over; closing it, or the broker, ends that."""
    monkeypatch.setattr("qflow.queues.consumer.AGAIN_S", 3600)
    faults = Faults()
    with faulty_broker(spool, faults, capacity_bytes=0) as broker:
        queue = broker.declare_queue("q", durable=False)
        queue.put_many([b"1", b"2"])
        events: list[Any] = []
        broker.on_event(events.append)
        faults.fail("open", errno.EMFILE)
        first, second = queue.consume(print), queue.consume(print)
        until(lambda: len(events) == 2)
        assert first.close(LONG_S)
        faults.heal()
        broker.close()
        assert second.close(LONG_S)


@pytest.mark.parametrize("retry", [None, qflow.Backoff(0.0)])
@pytest.mark.parametrize(
    "kind", [SystemExit, asyncio.CancelledError, KeyboardInterrupt, qflow.QueueDeleted, qflow.BrokerClosed]
)
def test_a_callback_that_would_end_its_thread_has_failed(
    queue: qflow.Queue, kind: type[BaseException], retry: qflow.Backoff | None, caplog: pytest.LogCaptureFixture
) -> None:
    """As with any other error, also of another queue or broker: the message goes back, and the consumer goes on."""
    found: list[tuple[bytes, int]] = []

    def leave(delivery: qflow.Delivery) -> None:
        found.append((delivery.body, delivery.delivery_count))
        if len(found) == 1:
            raise kind

    with queue.consume(leave, prefetch=4, retry=retry) as consumer:
        until(lambda: len(found) == 11 or not consumer.running)
        assert consumer.running
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [kind]
    assert sorted(found) == sorted([(b"0", 2), *((b"%d" % number, 1) for number in range(10))])


@pytest.mark.owner_only
@pytest.mark.parametrize("end", ["close", "delete"])
def test_the_end_of_the_queue_ends_the_consumer(open_spool: Open, end: str) -> None:
    """Waiting or working: no callback begins afterwards, and nobody hangs; what was not handed out is not counted."""
    broker = open_spool()
    queue = broker.declare_queue("q")
    idle = broker.declare_queue("idle")
    queue.put_many([b"%d" % number for number in range(5)])
    entered, go_on = threading.Event(), threading.Event()
    calls: list[bytes] = []

    def work(delivery: qflow.Delivery) -> None:
        calls.append(delivery.body)
        entered.set()
        assert go_on.wait(LONG_S)

    working, waiting = queue.consume(work), idle.consume(work)
    assert entered.wait(LONG_S)
    if end == "close":
        broker.close()
    else:
        broker.delete_queue("q")
        broker.delete_queue("idle")
    go_on.set()
    for consumer in (working, waiting):
        assert consumer.close(LONG_S)
    assert calls == [b"0"]
    if end == "close":
        batch = open_spool().queue("q").get_many(10)
        assert [(delivery.body, delivery.delivery_count) for delivery in batch] == [
            (b"0", 2),
            (b"1", 1),
            (b"2", 1),
            (b"3", 1),
            (b"4", 1),
        ]


@pytest.mark.owner_only
def test_a_callback_may_close_its_consumer(queue: qflow.Queue) -> None:
    """It is the last one then; from inside, nobody is waited for."""
    consumers: list[Any] = []
    entered, ready = threading.Event(), threading.Event()
    calls: list[bytes] = []

    def work(delivery: qflow.Delivery) -> None:
        entered.set()
        assert ready.wait(LONG_S)
        calls.append(delivery.body)
        assert not consumers[0].close()

    consumers.append(queue.consume(work))
    assert entered.wait(LONG_S)
    ready.set()
    assert consumers[0].close(LONG_S)
    assert calls == [b"0"]
    assert len(queue) == 9


def test_several_consumers_share_a_queue(queue: qflow.Queue) -> None:
    """Each message goes to one of them."""
    received: list[bytes] = []
    consumers = [queue.consume(lambda delivery: received.append(delivery.body), prefetch=2) for _ in range(3)]
    queue.put_many([b"%d" % number for number in range(10, 200)])
    until(lambda: len(queue) == 0)
    for consumer in consumers:
        consumer.close(LONG_S)
    assert sorted(received, key=int) == [b"%d" % number for number in range(200)]


@pytest.mark.owner_only
def test_a_purge_under_a_consumer_is_no_trouble(queue: qflow.Queue) -> None:
    """What it holds is purged; it goes on with what comes later."""
    entered, go_on = threading.Event(), threading.Event()
    received: list[bytes] = []

    def work(delivery: qflow.Delivery) -> None:
        received.append(delivery.body)
        entered.set()
        assert go_on.wait(LONG_S)

    with queue.consume(work, prefetch=4):
        assert entered.wait(LONG_S)
        assert queue.purge() == 10
        go_on.set()
        queue.put(b"after")
        until(lambda: received[-1] == b"after" and len(queue) == 0)
    assert received == [b"0", b"after"]


@pytest.mark.owner_only
def test_a_slow_consumer_is_closed(open_at: Open, clock: Clock) -> None:
    """All it holds goes back; its late ack does not count; the next one gets it."""
    queue = open_at().declare_queue("q")
    queue.put_many([b"1", b"2", b"3"])
    queue.on_slow_consumer(10, SlowConsumer.CLOSE)
    entered, go_on = threading.Event(), threading.Event()

    def work(_: qflow.Delivery) -> None:
        entered.set()
        assert go_on.wait(LONG_S)

    consumer = queue.consume(work)
    assert entered.wait(LONG_S)
    clock.advance(11)
    inside.tick(queue)
    assert not consumer.running
    go_on.set()
    assert consumer.close(LONG_S)
    assert queue.get_many(5, timeout_s=0).bodies == [b"1", b"2", b"3"]


@pytest.mark.owner_only
@pytest.mark.parametrize(
    ("arguments", "options"),
    [((None,), {}), (("x",), {}), ((print,), {"prefetch": 0}), ((print,), {"prefetch": 1.5})],
    ids=repr,
)
def test_a_bad_consumer_is_refused(queue: qflow.Queue, arguments: Any, options: Any) -> None:
    """Nothing is started."""
    with pytest.raises(qflow.InvalidArgument):
        queue.consume(*arguments, **options)
    assert len(queue) == 10
    assert not parts_of(queue).consumers.listed


async def awaits(delivery: qflow.Delivery) -> None:
    """Nobody awaits it."""


async def yields_later(delivery: qflow.Delivery) -> AsyncIterator[int]:
    yield 1


def yields(delivery: qflow.Delivery) -> Iterator[int]:
    yield 1


class Awaits:
    async def __call__(self, delivery: qflow.Delivery) -> None:
        """Nor this."""


@pytest.mark.parametrize("callback", [awaits, partial(awaits), Awaits(), yields, partial(yields), yields_later])
def test_a_callback_that_would_not_run_is_refused(queue: qflow.Queue, callback: Any) -> None:
    """A call of it does nothing; the message would be acked all the same."""
    with pytest.raises(qflow.InvalidArgument, match="callback must not be "):
        queue.consume(callback)
    assert len(queue) == 10


@pytest.mark.parametrize("retry", [None, qflow.Backoff(first_s=0, max_attempts=2)])
@pytest.mark.parametrize("inner", [awaits, yields, yields_later])
def test_a_callback_that_has_not_run_when_it_returns_has_failed(
    open_spool: Open, inner: Any, retry: qflow.Backoff | None
) -> None:
    """A decorator hides what it is; nothing is acked."""
    broker = open_spool()
    queue, dead = broker.declare_queue("q", max_deliveries=2, dead_letter="dead"), broker.declare_queue("dead")
    queue.put(b"x")
    with queue.consume(lambda delivery: inner(delivery), retry=retry):
        letter = dead.get(LONG_S)
    assert letter.body == b"x"
    if retry is not None:
        assert "has not run" in str(letter.headers["dead_letter_nack_reason"])


class Handle:
    """What another library gives for work that goes on: to be awaited, or not."""

    def __await__(self) -> Iterator[None]:
        yield


def test_a_callback_may_return_what_runs_by_itself(open_spool: Open) -> None:
    """A future: nobody needs to await it."""
    queue = open_spool().declare_queue("q")
    queue.put(b"x")
    with queue.consume(lambda delivery: Handle()):
        until(lambda: len(queue) == 0)
    assert queue.stats().redelivered_total == 0


def test_a_callback_for_events_that_has_not_run_has_failed(open_spool: Open, caplog: pytest.LogCaptureFixture) -> None:
    """The log has it, as with any that raises."""
    broker = open_spool()
    broker.on_event(lambda event: awaits(event))
    broker.declare_queue("dead")
    broker.declare_queue("q", max_deliveries=1, dead_letter="dead").put(b"x")
    broker.queue("q").get(LONG_S).nack()
    until(lambda: "has not run" in caplog.text)


def test_a_callback_for_events_that_would_not_run_is_refused(open_spool: Open) -> None:
    with pytest.raises(qflow.InvalidArgument, match="an event callback must not be async"):
        open_spool().on_event(awaits)


def test_a_consumer_that_gets_no_thread_says_what_to_do_and_does_not_stay(
    queue: qflow.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do those of its threads that have begun."""
    begun: list[threading.Thread] = []
    start = threading.Thread.start

    def start_one(thread: threading.Thread) -> None:
        if thread.name.startswith("qflow-consumer"):
            begun.append(thread)
            if len(begun) > 1:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(qflow.QflowError, match=r"starts no more threads.*ulimit -u"):
        queue.consume(lambda _: None, concurrency=3)
    begun[0].join(LONG_S)
    until(lambda: queue.stats().consumers_total == 0)


def test_an_option_that_consume_does_not_have_is_refused_by_those_it_has(queue: qflow.Queue) -> None:
    """Else one that is misspelt would be without effect, and nobody would know."""
    with pytest.raises(TypeError, match="no option 'threads'; there are concurrency, name, prefetch, retry"):
        queue.consume(lambda _: None, threads=2)  # type: ignore[call-arg]
