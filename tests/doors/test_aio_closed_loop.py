"""A loop that is closed with tasks in it: what they have begun is given up by maintenance, and holds up nobody else."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
import qflow.aio
from calls import count
from doors import event_loop
from doors.event_loop import leave_no_reader_behind, leave_nothing_behind, run, turns
from qflow.aio.home import Home
from qflow.aio.loops import Waiter, homes_of
from qflow.aio.subscription import subscription_of
from qflow.queues.queue import parts_of
from unit.clocks import LONG_S, until

PATIENCE_S = 5.0

Act = Callable[[qflow.aio.AsyncBroker], Awaitable[Any]]


def close_with(act: Callable[[], Awaitable[Any]], waits: Callable[[], object]) -> list[asyncio.Task[Any]]:
    """Begin something in a loop, and close it when that waits; return the tasks in it."""

    async def begin() -> list[asyncio.Task[Any]]:
        task = asyncio.ensure_future(act())
        await event_loop.until(lambda: waits() or task.done())
        assert not task.done()
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    loop = asyncio.new_event_loop()
    tasks = loop.run_until_complete(begin())
    loop.close()
    return tasks


def forget(tasks: list[asyncio.Task[Any]]) -> None:
    """End tasks that are never run again, as the collector would, which might come in the middle of a call."""
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        with suppress(RuntimeError):  # it would await something
            task.get_coro().close()  # type: ignore[union-attr]


class Left:
    """A broker whose maintenance is the test's, and the tasks of loops that were closed."""

    def __init__(self, path: Path) -> None:
        self.broker = qflow.open(path)
        inside.still(self.broker)
        self.tasks = qflow.aio.AsyncBroker(self.broker)
        self.ended: list[asyncio.Task[Any]] = []

    def close_with(self, act: Act, waits: Callable[[], object]) -> None:
        """Begin something in a loop, and close it when that waits."""
        self.ended += close_with(lambda: act(self.tasks), waits)

    def tend(self) -> None:
        """Do what maintenance does each second."""
        inside.is_due(self.broker)
        inside.upkeep(self.broker).tick()


@pytest.fixture
def left(spool: Path) -> Iterator[Left]:
    """A broker that is closed at the end, with nothing left behind."""
    left = Left(spool)
    yield left
    forget(left.ended)
    run(leave_nothing_behind(left.tasks))
    run(leave_no_reader_behind(left.tasks))
    left.broker.close()


def in_line(queue: qflow.Queue) -> int:
    """Return how many puts wait at its limit."""
    return len(parts_of(queue).admission.line)


def getters(queue: qflow.Queue) -> int:
    """Return how many gets wait for messages."""
    return parts_of(queue).gate.getters


async def _put(broker: qflow.aio.AsyncBroker) -> None:
    await broker.queue("q").put(b"dead")


async def _put_many(broker: qflow.aio.AsyncBroker) -> None:
    await broker.queue("q").put_many([b"dead", b"dead"])


async def _put_with_time(broker: qflow.aio.AsyncBroker) -> None:
    await broker.queue("q").put(b"dead", timeout_s=LONG_S)


async def _publish(broker: qflow.aio.AsyncBroker) -> None:
    await broker.publish("t/1", b"dead", producer="p", number=1)


async def _submit(broker: qflow.aio.AsyncBroker) -> None:
    await broker.submit_publish("t/1", b"dead")


async def _commit(broker: qflow.aio.AsyncBroker) -> None:
    async with broker.transaction() as transaction:
        await transaction.put("other", b"dead")
        await transaction.put("q", b"dead")


PUTS = [_put, _put_many, _put_with_time, _publish, _submit, _commit]


@pytest.mark.parametrize("admitted", [False, True], ids=["in_line", "admitted"])
@pytest.mark.parametrize("durable", [False, True], ids=["transient", "durable"])
@pytest.mark.parametrize("act", PUTS, ids=lambda act: act.__name__.strip("_"))
def test_a_put_of_a_closed_loop_keeps_no_place(left: Left, act: Act, durable: bool, admitted: bool) -> None:
    """It waits at a limit, or was told that it may go on: the next one has its place, and what it had elsewhere is free."""
    broker = left.broker
    queue = broker.declare_queue("q", durable=durable, limit_messages=2)
    broker.declare_queue("other", durable=durable, limit_messages=1)
    broker.bind("q", "t/#")
    queue.put_many([b"old"] * 2)
    left.close_with(act, lambda: in_line(queue))
    if admitted:
        queue.get_many(2, timeout_s=0).ack()
    left.tend()
    assert not inside.left_behind(queue)
    assert not inside.left_behind(broker.queue("other"))
    broker.queue("other").put(b"other", timeout_s=0)
    if not admitted:
        queue.get_many(2, timeout_s=0).ack()
    queue.put(b"new", timeout_s=0)
    assert queue.stats().blocked_putters == 0
    assert not broker.publish("t/1", b"newer", producer="p", number=1).duplicate
    assert queue.get_many(2, timeout_s=0).bodies == [b"new", b"newer"]
    for name in ("q", "other"):
        broker.queue(name).purge()


def test_a_thread_in_line_behind_tasks_of_a_closed_loop_goes_on(left: Left) -> None:
    """Those that are given up admit it."""
    queue = left.broker.declare_queue("q", durable=False, limit_messages=1)
    queue.put(b"old")
    for number in range(1, 4):
        left.close_with(_put, lambda number=number: in_line(queue) == number)  # type: ignore[misc]
    thread = threading.Thread(target=queue.put, args=(b"new",))
    thread.start()
    until(lambda: in_line(queue) == 4)
    queue.get(0).ack()
    left.tend()
    thread.join(LONG_S)
    assert not thread.is_alive()
    with queue.get(0) as delivery:
        assert delivery.body == b"new"


async def _get(broker: qflow.aio.AsyncBroker) -> None:
    await broker.queue("q").get()


async def _get_many(broker: qflow.aio.AsyncBroker) -> None:
    await broker.queue("q").get_many(10)


async def _iterate(broker: qflow.aio.AsyncBroker) -> None:
    async for _ in broker.queue("q"):
        raise AssertionError("there is nothing")


async def _consume(broker: qflow.aio.AsyncBroker) -> None:
    async def take(delivery: qflow.aio.AsyncDelivery) -> None:
        raise AssertionError("there is nothing")

    async with broker.queue("q").consume(take, concurrency=3):
        await asyncio.Event().wait()


GETS = [_get, _get_many, _iterate, _consume]


@pytest.mark.parametrize("act", GETS, ids=lambda act: act.__name__.strip("_"))
def test_what_woke_a_get_of_a_closed_loop_wakes_another(left: Left, act: Act) -> None:
    """A thread that waits gets the message."""
    queue = left.broker.declare_queue("q", durable=False)
    left.close_with(act, lambda: getters(queue))
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(queue.get().body))
    thread.start()
    until(lambda: getters(queue) == 2)
    queue.put(b"new")
    left.tend()
    thread.join(LONG_S)
    assert got == [b"new"]
    assert not parts_of(queue).consumers.listed
    queue.purge()


@pytest.mark.parametrize("kind", ["iterate", "consume"])
def test_what_a_loop_or_a_consumer_had_at_hand_goes_back(left: Left, kind: str) -> None:
    """All but what was handed to a loop, which holds it; a callback that is running ends with its loop."""
    queue = left.broker.declare_queue("q", durable=False)
    queue.put_many([b"%d" % number for number in range(5)])
    held: list[qflow.aio.AsyncDelivery] = []

    async def hold(delivery: qflow.aio.AsyncDelivery) -> None:
        held.append(delivery)
        await asyncio.Event().wait()

    async def act(broker: qflow.aio.AsyncBroker) -> None:
        if kind == "consume":
            async with broker.queue("q").consume(hold, concurrency=2):
                await asyncio.Event().wait()
        async for delivery in broker.queue("q"):
            await hold(delivery)

    left.close_with(act, lambda: len(held) == (1 if kind == "iterate" else 2))
    assert queue.stats().acquired_messages == 5
    left.tend()
    assert queue.stats().acquired_messages == (1 if kind == "iterate" else 0)
    assert not parts_of(queue).consumers.listed
    got = [queue.get(0) for _ in range(4 if kind == "iterate" else 5)]
    assert [(one.body, one.delivery_count) for one in got] == (
        [(b"%d" % number, 1) for number in range(1, 5)]
        if kind == "iterate"
        else [(b"0", 2), (b"1", 2), (b"2", 1), (b"3", 1), (b"4", 1)]
    )
    for one in got:
        one.ack()
    if kind == "iterate":
        held[0].delivery.ack()


@pytest.mark.parametrize("iterates", [False, True], ids=["get", "iterate"])
def test_a_get_of_a_subscription_in_a_closed_loop_hands_its_turn_on(left: Left, iterates: bool) -> None:
    """Another member of the group gets what comes, and what a loop had at hand."""
    broker = left.broker
    broker.declare_stream("s", topics=["s/#"])
    members = [broker.subscribe("s", group="g") for _ in range(2)]
    returned: list[bytes] = []
    cursor = inside.cursor(members[0])

    async def act(_: qflow.aio.AsyncBroker) -> None:
        subscription = subscription_of(members[0], left.tasks._homes, left.tasks._worker)
        async for delivery in subscription:
            returned.append(delivery.body)
            await asyncio.Event().wait()

    if iterates:
        broker.publish_many([("s/1", b"first"), ("s/1", b"at hand")])
    left.close_with(act, lambda: returned or cursor._line.watching)
    if iterates:
        left.tend()
        assert [(one.body, one.delivery_count) for one in members[1].get_many(9)] == [(b"first", 2), (b"at hand", 1)]
    else:
        got: list[bytes] = []
        thread = threading.Thread(target=lambda: got.append(members[1].get().body))
        thread.start()
        until(lambda: cursor._line.watching == 2)
        broker.publish("s/1", b"new")
        left.tend()
        thread.join(LONG_S)
        assert got == [b"new"]
    for member in members:
        member.close()


def test_a_publish_of_a_closed_loop_leaves_the_line_for_memory(left: Left) -> None:
    """The number of its producer is free, too."""
    broker = left.broker
    broker.declare_stream("s", topics=["s/#"])
    room = broker.engine.streams.room
    held = 0
    while room.reserve_at_once(50_000):
        held += 50_000

    async def act(tasks: qflow.aio.AsyncBroker) -> None:
        await tasks.publish("s/1", bytes(100_000), producer="p", number=1)

    left.close_with(act, lambda: room._line)
    left.tend()
    assert not room._line
    room.arrived(held)
    assert broker.publish("s/1", b"new", producer="p", number=1).offsets


def test_a_key_of_a_closed_loop_is_free(left: Left) -> None:
    """Its put waited at a limit."""
    queue = left.broker.declare_queue("q", limit_messages=1, dedupe_window_s=60)
    queue.put(b"old")

    async def act(broker: qflow.aio.AsyncBroker) -> None:
        await broker.queue("q").put(b"dead", dedupe_key="k")

    left.close_with(act, lambda: in_line(queue))
    left.tend()
    queue.get(0).ack()
    assert queue.put(b"new", dedupe_key="k", timeout_s=0) == 1
    queue.purge()


class Opener:
    """Opens something in a thread, when it may."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._may_open = threading.Event()
        self.begun = False
        self.opened: list[Any] = []

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.begun = True
        assert self._may_open.wait(LONG_S)
        self.opened.append(self._make(*arguments, **named))
        return self.opened[0]

    def go_on(self) -> None:
        self._may_open.set()

    @property
    def is_closed(self) -> bool:
        return bool(self.opened) and self.opened[0].closed


@pytest.mark.parametrize("done", [False, True], ids=["before_it_is_open", "behind_that"])
def test_a_subscription_that_nobody_takes_is_closed(left: Left, monkeypatch: pytest.MonkeyPatch, done: bool) -> None:
    """The loop is closed while a thread opens it, or before the task goes on."""
    left.broker.declare_stream("s", topics=["s/#"])
    opener = Opener(left.broker.subscribe)
    monkeypatch.setattr(left.broker, "subscribe", opener)

    async def act(broker: qflow.aio.AsyncBroker) -> None:
        async with broker.subscribe("s"):
            raise AssertionError("its loop is closed")

    def waits() -> bool:
        if opener.begun and done:
            opener.go_on()
            until(lambda: not left.tasks._worker.begun())
        return opener.begun

    left.close_with(act, waits)
    left.tend()
    opener.go_on()
    until(lambda: opener.is_closed)


def test_a_broker_that_nobody_takes_is_closed(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is closed while a thread opens it: the spool can be opened again."""
    opener = Opener(qflow.open)
    monkeypatch.setattr("qflow.aio.broker.open_broker", opener)

    async def act() -> None:
        async with qflow.aio.open(spool):
            raise AssertionError("its loop is closed")

    tasks = close_with(act, lambda: opener.begun)
    opener.go_on()
    until(lambda: opener.opened and inside.is_released(opener.opened[0]))
    forget(tasks)
    qflow.open(spool).close()


def test_calls_of_a_closed_loop_do_not_pile_up(left: Left) -> None:
    """Events for a callback in it, before maintenance has seen that it is closed and after."""
    homes: list[Home] = []

    async def begin() -> None:
        left.tasks.on_event(lambda event: None)
        homes.append(left.tasks._homes.here())

    for late in (False, True):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(begin())
        if late:
            homes[-1].call(list)
        loop.close()
    queue = left.broker.declare_queue("q", durable=False, limit_messages=1)
    for _ in range(2):
        for _ in range(10):
            queue.put(b"", timeout_s=0)
            with suppress(qflow.QueueFull):
                queue.put(b"", timeout_s=0)
            queue.get(0).ack()
        left.broker.engine.listeners.tell_all()
        left.tend()
    assert [len(home._calls) for home in homes] == [0, 0]
    assert len(inside.upkeep(left.broker).jobs) == 1


def test_a_loop_that_is_open_is_left_alone(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tasks wait on, whatever becomes of others; and wrappers of one broker share what they know of a loop."""
    woken: Counter[str] = Counter()
    queue = left.broker.declare_queue("q", durable=False)
    left.close_with(_get, lambda: getters(queue))
    count(monkeypatch, woken, Waiter, "__call__", "tasks")

    async def scenario() -> None:
        getter = asyncio.create_task(qflow.aio.AsyncBroker(left.broker).queue("q").get())
        await turns()
        left.tend()
        assert getters(queue) == 1
        await left.tasks.queue("q").put(b"new")
        async with await getter as delivery:
            assert delivery.body == b"new"

    run(scenario())
    assert len(inside.upkeep(left.broker).jobs) == 2
    left.tend()
    assert len(inside.upkeep(left.broker).jobs) == 1


def test_what_cannot_be_given_up_keeps_nothing_else_from_it(left: Left) -> None:
    """Neither of its loop, nor of another one."""
    queue = left.broker.declare_queue("q", durable=False)
    homes = homes_of(left.broker.engine)._homes
    for _ in range(2):
        left.close_with(_get, lambda: getters(queue) > len(homes) - 1)
        next(reversed(homes.values())).unfinished[lambda: 1 // 0] = None
    assert (getters(queue), len(homes)) == (2, 2)
    with pytest.raises(ZeroDivisionError):
        left.tend()
    assert (getters(queue), len(homes)) == (0, 0)


@pytest.mark.parametrize("tended", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("act", [_get, _get_many, _put, _put_many, _publish, _commit], ids=lambda act: act.__name__)
def test_a_task_of_a_closed_loop_is_collected_without_a_lock(left: Left, act: Act, tended: bool) -> None:
    """The collector comes in the middle of any call, under whatever lock: before maintenance has given up, or after."""
    broker = left.broker
    queue = broker.declare_queue("q", durable=False, limit_messages=2)
    broker.declare_queue("other", durable=False)
    broker.bind("q", "t/#")
    waits = getters if act in (_get, _get_many) else in_line
    if waits is in_line:
        queue.put_many([b"old"] * 2)
    left.close_with(act, lambda: waits(queue))
    while left.ended:
        left.ended.pop()._log_destroy_pending = False  # type: ignore[attr-defined]
    if waits is getters:
        queue.put(b"new")  # wakes it, and nobody hears that
    else:
        queue.get_many(2, 0).ack()
    if tended:
        left.tend()
    collected = threading.Thread(target=gc.collect)
    with parts_of(queue).context.lock:
        collected.start()
        collected.join(PATIENCE_S)
        is_stuck = collected.is_alive()
    collected.join()
    left.tend()
    assert not is_stuck
    assert not inside.left_behind(queue)
    queue.purge()


@pytest.mark.parametrize("by_hand", [False, True], ids=["collected", "by hand"])
def test_what_a_thread_has_made_for_a_task_that_ends_is_undone(left: Left, by_hand: bool) -> None:
    """A subscription that its task was never told of is closed, so that another one may begin."""
    left.broker.declare_stream("s", topics=["s/#"])
    tasks = left.tasks

    async def subscribe() -> None:
        await tasks.subscribe("s", name="me", start="earliest")

    async def begin() -> Any:
        task = asyncio.ensure_future(subscribe())
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        await event_loop.until(lambda: homes_of(left.broker.engine).here().unfinished)
        wait(tasks._worker.begun())  # in which the loop does nothing
        return task.get_coro() if by_hand else None

    loop = asyncio.new_event_loop()
    coroutine = loop.run_until_complete(begin())
    if by_hand:
        coroutine.close()
    loop.close()
    gc.collect()
    left.tend()
    wait(tasks._worker.begun())
    left.broker.subscribe("s", name="me", start="earliest").close()


@pytest.mark.parametrize("act", [_get, _get_many], ids=lambda act: act.__name__)
def test_what_a_get_of_a_closed_loop_has_logged_goes_back(
    left: Left, act: Act, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its messages, and waits until the log holds that they are delivered once more."""
    queue = left.broker.declare_queue("q", max_deliveries=9)
    queue.put(b"")
    queue.get(0).nack()
    monkeypatch.setattr(Home, "confirmed", lambda home, *_: home.loop.create_future())
    left.close_with(act, lambda: queue.stats().acquired_messages)
    left.tend()
    assert not inside.left_behind(queue)
    queue.get(0).ack()
