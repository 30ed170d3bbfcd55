"""Which tasks are woken: as many as there is something for, in their order, and none of it is lost."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
import qflow.aio
from calls import count
from doors.event_loop import count_wake_ups, leave_nothing_behind, plain, run, turns, until
from drivers import opening_tasks
from qflow.aio import home as home_module
from qflow.aio.home import Home
from qflow.aio.loops import Step, Steps, Waiter, Worker, attend
from qflow.memory.gate import LINE
from qflow.memory.line import FOREVER, WORK
from qflow.memory.waiting import in_place
from qflow.queues import tending
from qflow.queues.admission import Admission
from qflow.queues.gets import Getting
from qflow.queues.putting import Putting, putting_of
from qflow.queues.queue import parts_of
from unit.clocks import LONG_S, Clock, open_still

pytestmark = pytest.mark.two_drivers
Scenario = Callable[[Any], Awaitable[Any]]
On = Callable[[Scenario], None]


@pytest.fixture
def woken(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often tasks were woken."""
    counts: Counter[str] = Counter()
    count(monkeypatch, counts, Waiter, "__call__", "tasks")
    return counts


@pytest.fixture
def on(spool: Path, access: str) -> Callable[[Scenario], None]:
    """Run a scenario that leaves nothing behind."""

    def run_it(scenario: Scenario) -> None:
        async def whole() -> None:
            async with opening_tasks(access, partial(qflow.open, spool)) as broker:
                await scenario(broker)
                await leave_nothing_behind(broker)

        run(whole())

    return run_it


@pytest.mark.owner_only(reason="it counts wake-ups of the owner's tasks")
def test_what_leaves_wakes_as_many_tasks_as_there_is_room_for(on: On, woken: Counter[str]) -> None:
    """2,000 wait at a limit of 10: nobody is woken above the mark, then two at a time, in their order."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=False, limit_messages=10)
        await queue.put_many([b"old"] * 10)
        admission = parts_of(plain(broker)).admission
        putters = [asyncio.create_task(queue.put(b"%d" % number)) for number in range(2_000)]
        await until(lambda: len(admission.line) == 2_000)
        woken.clear()
        await (await queue.get()).ack()
        assert not woken["tasks"]
        await (await queue.get()).ack()
        assert woken["tasks"] == 2
        while woken["tasks"] < 2_000:
            await turns()
            assert sum(putter.done() for putter in putters) == woken["tasks"]
            await (await queue.get_many(2)).ack()
        await asyncio.gather(*putters)
        assert woken["tasks"] == 2_000
        assert [putter.result() for putter in putters] == list(range(10, 2_010))

    on(scenario)


@pytest.mark.owner_only(reason="at the door its turn comes before the owner hears of its end")
def test_a_task_that_was_admitted_and_is_cancelled_hands_its_place_on(on: On) -> None:
    """Cancelled before its turn in the loop came, its put did not happen; the next one's does."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=False, limit_messages=2, resume_ratio=1)
        await queue.put_many([b"old"] * 2)
        admission = parts_of(plain(broker)).admission
        putters = [asyncio.create_task(queue.put(b"%d" % number)) for number in range(6)]
        await until(lambda: len(admission.line) == 6)
        await (await queue.get_many(2)).ack()
        assert len(admission.line) == 4
        putters[0].cancel()
        putters[4].cancel()
        await turns()
        got = [delivery.body async for delivery in take(queue, 2)]
        await turns()
        got += [delivery.body async for delivery in take(queue, 2)]
        assert got == [b"1", b"2", b"3", b"5"]
        outcomes = await asyncio.gather(*putters, return_exceptions=True)
        assert [isinstance(outcome, asyncio.CancelledError) for outcome in outcomes] == [
            number in (0, 4) for number in range(6)
        ]

    on(scenario)


def test_a_put_behind_tasks_that_were_admitted_does_not_pass_them(on: On) -> None:
    """They have their places, and have not put yet."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=False, limit_messages=4, resume_ratio=0)
        await queue.put_many([b"old"] * 4)
        first = [queue.submit(b"1"), queue.submit(b"2")]
        await until(lambda: len(parts_of(plain(broker)).admission.line) == 2)
        await (await queue.get_many(4)).ack()
        last = queue.submit(b"3")
        assert not first[0].done()
        await asyncio.gather(*first, last)
        assert [delivery.body async for delivery in take(queue, 3)] == [b"1", b"2", b"3"]

    on(scenario)


@pytest.mark.owner_only(reason="it counts wake-ups of the owner's tasks")
def test_a_message_wakes_one_task_and_the_next_if_that_is_cancelled(on: On, woken: Counter[str]) -> None:
    """2,000 wait for messages."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=False)
        getters = [asyncio.create_task(queue.get()) for _ in range(2_000)]
        await until(lambda: parts_of(plain(broker)).gate.getters == 2_000)
        woken.clear()
        await queue.put(b"1")
        assert woken["tasks"] == 1
        getters[0].cancel()
        await turns()
        assert woken["tasks"] == 2
        assert getters[1].done()
        await (await getters[1]).ack()
        for number in range(2, 1_000):
            await queue.put(b"%d" % number)
            await turns()
            await (await getters[number]).ack()
        assert woken["tasks"] == 1_000
        for getter in getters:
            getter.cancel()
        await asyncio.gather(*getters, return_exceptions=True)
        assert not inside.left_behind(queue.queue)

    on(scenario)


def test_many_that_lacked_room_are_served_when_there_is_some(on: On) -> None:
    """More than calls may be nested: each that is served has the next one woken."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=False, capacity_bytes="20MiB")
        await queue.put_many([b""] * 600)
        held = [await queue.get() for _ in range(100)]
        await broker.alter_queue("q", capacity_bytes=1_000)  # less than what is held
        getters = [asyncio.create_task(queue.get()) for _ in range(500)]
        await until(lambda: parts_of(plain(broker)).gate.starved == 500)
        await broker.alter_queue("q", capacity_bytes="20MiB")
        for delivery in [*held, *await asyncio.gather(*getters)]:
            await delivery.ack()

    on(scenario)


@pytest.mark.owner_only(reason="it counts wake-ups of the owner's tasks")
@pytest.mark.parametrize("tasks", [100, 1_000])
def test_a_wait_is_two_tries_or_none_and_a_wake_up_without_a_timer(
    on: On, woken: Counter[str], tasks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A get tries as it comes and when it is woken; a put behind others at a limit never does; however many wait."""
    count(monkeypatch, woken, Getting, "step", "gets")
    count(monkeypatch, woken, Putting, "step", "puts")
    count(monkeypatch, woken, asyncio.SelectorEventLoop, "call_later", "timers")

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=False, limit_messages=10, resume_ratio=1)
        woken.clear()
        getters = [asyncio.create_task(queue.get()) for _ in range(tasks)]
        await turns()
        for getter in getters:
            await queue.put(b"")
            await (await getter).ack()
        assert (woken["gets"], woken["tasks"], woken["timers"]) == (2 * tasks, tasks, 0)
        await queue.put_many([b""] * 10)
        woken.clear()
        putters = [asyncio.create_task(queue.put(b"")) for _ in range(tasks)]
        await turns()
        for putter in putters:
            await (await queue.get(0)).ack()
            await putter
        assert (woken["puts"], woken["tasks"], woken["timers"]) == (2, tasks, 0)  # of the first, with nobody before it
        assert not parts_of(queue.queue).gate.shut & LINE
        await (await queue.get_many(10)).ack()

    on(scenario)


@pytest.mark.owner_only(reason="it counts wake-ups of the owner's tasks")
def test_tasks_that_a_thread_wakes_are_called_together(on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand wait in get; a thread puts a message for each, and the loop is called once."""
    calls: Counter[str] = Counter()

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=False)
        getters = [asyncio.create_task(queue.get()) for _ in range(1_000)]
        await turns()
        count_wake_ups(monkeypatch, calls, "calls")
        thread = threading.Thread(target=queue.queue.put_many, args=([b""] * 1_000,))
        thread.start()
        thread.join()
        assert calls["calls"] == 1
        for delivery in await asyncio.gather(*getters):
            await delivery.ack()

    on(scenario)


def test_a_consumer_of_many_tasks_hands_a_batch_over_and_not_each_message(
    on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand tasks: one whose callback does not wait takes the next message, and no other is woken for that."""
    turn: Counter[str] = Counter()

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=False)
        await queue.put_many([b"%d" % number for number in range(1_000)])
        taken: list[bytes] = []

        async def take_one(delivery: qflow.aio.AsyncDelivery) -> None:
            taken.append(delivery.body)

        count(monkeypatch, turn, asyncio.Lock, "acquire", "taken")
        async with queue.consume(take_one, prefetch=100, concurrency=1_000):
            await until(lambda: len(taken) == 1_000)
        assert taken == [b"%d" % number for number in range(1_000)]

    on(scenario)
    assert turn["taken"] <= 1_000 + 2 * 10  # each comes once, and twice a batch one comes back


def standing(queue: Any, number: int) -> list[asyncio.Task[Any]]:
    """Return tasks that put messages of their number and 1,000 bytes, from 1 on."""
    return [asyncio.create_task(queue.put(b"%d" % one + bytes(999))) for one in range(1, number + 1)]


@pytest.mark.owner_only(reason="it counts calls of the owner's loop")
def test_putters_are_admitted_together_and_called_by_one_call_of_the_loop(
    on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread acks a hundred messages, and a hundred of a thousand tasks have their places: all at once."""
    calls: Counter[str] = Counter()

    async def scenario(broker: Any) -> None:
        limits = {"limit_messages": 100, "limit_bytes": 1_000_000, "resume_ratio": 0}
        queue = await broker.declare_queue("q", durable=False, **limits)
        await queue.put_many([b""] * 100)
        putters = standing(queue, 1_000)
        await until(lambda: len(parts_of(queue.queue).admission.line) == 1_000)
        admission = parts_of(queue.queue).admission
        waiting, _, what = admission.told_blocked()
        assert (waiting, what) == (1_000, "limit_messages")
        assert sorted(admission.blocked.values()) == list(admission.blocked.values())
        count_wake_ups(monkeypatch, calls, "loop")
        count(monkeypatch, calls, Admission, "admit_line", "looks")
        thread = threading.Thread(target=lambda: queue.queue.get_many(100).ack())
        thread.start()
        thread.join()
        assert calls["loop"] == 1
        assert calls["looks"] <= 2
        await turns()
        assert [putter.result() for putter in putters[:100]] == list(range(100, 200))
        for putter in putters[100:]:
            putter.cancel()
        await asyncio.gather(*putters, return_exceptions=True)
        assert parts_of(queue.queue).lanes.message_bytes == sum(len(b"%d" % one) + 999 for one in range(1, 101))
        await (await queue.get_many(100)).ack()

    on(scenario)


@pytest.mark.owner_only(reason="puts go on one by one, as if of several loops")
def test_a_message_of_a_task_in_line_wakes_who_waits_for_it_though_others_have_not_gone_on(on: On) -> None:
    """Tasks of two loops have their places, and one loop is held up."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=False, limit_messages=2, resume_ratio=0)
        await queue.put_many([b"old"] * 2)
        puts = parts_of(queue.queue).puts
        held_up, other = (putting_of(puts, puts.draft_one(body)) for body in (b"held up", b"other"))
        assert in_place(partial(held_up.step, list, may_work=False)) == FOREVER
        assert other.stand(list)
        await (await queue.get_many(2)).ack()
        getter = asyncio.create_task(queue.get())
        await turns()
        assert other.go_on()
        async with await getter as delivery:
            assert delivery.body == b"other"
        held_up.give_up()

    on(scenario)


def test_tasks_in_line_go_on_where_memory_is_short(on: On) -> None:
    """Each place takes a spill: no place comes with the wake-up, and they pass in their order all the same."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=False, limit_messages=20, resume_ratio=1, capacity_bytes=3_000)
        for _ in range(20):
            await queue.put(bytes(1_000))
        putters = standing(queue, 10)
        await until(lambda: len(parts_of(plain(broker)).admission.line) == 10)
        bodies = [delivery.body[:2].rstrip(b"\0") async for delivery in take(queue, 30)]
        assert bodies == [b""] * 20 + [b"%d" % number for number in range(1, 11)]
        assert await asyncio.gather(*putters) == list(range(20, 30))

    on(scenario)


@pytest.mark.parametrize("end", ["dropped", "deleted", "closed"])
def test_tasks_in_line_find_what_becomes_of_their_queue(spool: Path, end: str) -> None:
    """Other settings, or its end: every one of them is woken for that, and goes the long way."""

    async def whole() -> list[Any]:
        async with qflow.aio.open(spool) as broker:
            queue = await broker.declare_queue("q", durable=False, limit_messages=1)
            await queue.put(b"old")
            putters = standing(queue, 5)
            await until(lambda: len(parts_of(queue.queue).admission.line) == 5)
            if end == "dropped":
                await broker.alter_queue("q", on_overflow=qflow.Overflow.DROP_NEWEST)
            elif end == "deleted":
                await broker.delete_queue("q")
            if end != "closed":
                await asyncio.wait(putters)
                assert not inside.left_behind(queue.queue)
        return await asyncio.gather(*putters, return_exceptions=True)

    found = run(whole())
    kinds = {"dropped": type(None), "deleted": qflow.QueueDeleted, "closed": qflow.BrokerClosed}
    assert [type(outcome) for outcome in found] == [kinds[end]] * 5


@pytest.mark.owner_only(reason="its settings change beside it")
def test_a_task_that_is_to_be_turned_away_does_not_wait_behind_those_in_line(on: On) -> None:
    """The policy is another by then, and those who were in line have not looked yet."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=False, limit_messages=1)
        await queue.put(b"old")
        putters = standing(queue, 2)
        await until(lambda: len(parts_of(queue.queue).admission.line) == 2)
        dropping = queue.settings.changed(on_overflow=qflow.Overflow.DROP_NEWEST)
        tending.alter(parts_of(queue.queue), dropping)
        with pytest.raises(StopIteration) as returned:
            queue.put(b"new").send(None)
        assert returned.value.value is None
        assert await asyncio.gather(*putters) == [None, None]
        await (await queue.get()).ack()

    on(scenario)


@pytest.mark.owner_only(reason="at the door its turn comes before the owner hears of its end")
def test_what_a_task_was_admitted_with_is_given_back_whatever_the_queue_takes_by_then(on: On) -> None:
    """Cancelled before its turn came, when the queue would not take its message any more."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=False, limit_messages=3, resume_ratio=1)
        await queue.put_many([b"old"] * 3)
        putters = standing(queue, 3)
        await until(lambda: len(parts_of(queue.queue).admission.line) == 3)
        await (await queue.get_many(3)).ack()
        tending.alter(parts_of(queue.queue), queue.settings.changed(max_message_bytes=10))
        for putter in putters:
            putter.cancel()
        await asyncio.wait(putters)
        assert not inside.left_behind(queue.queue)
        assert len(queue) == 0

    on(scenario)


@pytest.mark.owner_only(reason="a step of a thread stands beside it")
def test_a_task_does_not_pass_a_thread_that_was_admitted_before(on: On) -> None:
    """Its message waits for its thread, and is put by the task first."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=False, limit_messages=2, resume_ratio=0)
        await queue.put_many([b"old"] * 2)
        puts = parts_of(queue.queue).puts
        thread = puts.begin([puts.draft([b"thread"], True, 0)], None)
        thread.alone = thread.in_turn = True
        assert in_place(partial(thread.step, list, may_work=False)) == FOREVER
        task = asyncio.create_task(queue.put(b"task"))
        await until(lambda: len(parts_of(queue.queue).admission.line) == 2)
        await (await queue.get_many(2)).ack()
        await task
        assert [delivery.body async for delivery in take(queue, 2)] == [b"thread", b"task"]
        assert in_place(partial(thread.step, list, may_work=False)) is None

    on(scenario)


async def take(queue: qflow.aio.AsyncQueue, messages: int) -> Any:
    """Yield so many messages, settled."""
    for _ in range(messages):
        async with await queue.get() as delivery:
            yield delivery


async def attended(step: Step) -> None:
    """Have a step tried until it is done, with a thread of its own."""
    worker = Worker("here")
    try:
        await attend(Home(asyncio.get_running_loop(), None), worker, Steps(step, list))
    finally:
        worker.end()


def test_a_step_is_not_tried_while_a_thread_tries_it() -> None:
    """Whatever woke its task before may wake it once more: a put would stand in line that has its room."""
    asked: list[str] = []
    woken, may_end = threading.Event(), threading.Event()
    wakes: list[Callable[[], object]] = []

    def step(wake: Callable[[], object] | None, may_work: bool) -> float | None:
        assert wake is not None
        asked.append("thread" if may_work else "loop")
        if not may_work:
            wakes.append(wake)
            return FOREVER if len(asked) == 1 else WORK
        woken.set()
        assert may_end.wait(LONG_S)
        asked.append("end")
        return None

    async def scenario() -> None:
        task = asyncio.create_task(attended(step))
        await until(lambda: asked)
        wakes[0]()
        await until(woken.is_set)
        wakes[0]()
        wakes[1]()
        await turns()
        may_end.set()
        await task
        assert asked == ["loop", "loop", "thread", "end"]

    run(scenario())


def test_what_wakes_a_task_while_a_thread_tries_its_step_is_not_lost() -> None:
    """The thread has found nothing; meanwhile something came."""
    asked: list[bool] = []

    def step(wake: Callable[[], object] | None, may_work: bool) -> float | None:
        asked.append(may_work)
        if len(asked) == 3:
            return None
        if may_work:
            assert wake is not None
            wake()
            return FOREVER
        return WORK

    run(attended(step))
    assert asked == [False, True, False]


def test_a_thread_that_seems_to_run_the_loop_wakes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under gevent all that it calls threads are one of the system's, for which asyncio has one loop that runs."""
    woken: list[object] = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        home = Home(loop, None)
        monkeypatch.setattr(loop, "call_soon_threadsafe", woken.append)

        def call() -> None:
            asyncio._set_running_loop(loop)
            home.call(list)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert len(woken) == 1
        monkeypatch.undo()

    asyncio.run(scenario())


def test_few_tasks_are_passed_while_they_wait_for_their_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes memory that no queue is charged for; one beyond a bound is waited for until it ends."""
    monkeypatch.setattr(home_module, "MOST_AHEAD", 2)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        home, synced = Home(loop, None), loop.create_future()

        async def put() -> None:
            home.has_room()
            await synced

        tasks = [loop.create_task(put()) for _ in range(3)]
        rooms = [home.room_of(task) for task in tasks]
        await turns()
        assert [room.done() for room in rooms] == [True, True, False]
        synced.set_result(None)
        assert await asyncio.gather(*rooms) == [True, True, False]
        later = loop.create_task(put())
        assert await home.room_of(later)
        await later

    asyncio.run(scenario())


@pytest.mark.owner_only
def test_a_ring_admits_who_waits_once_it_may_drop_what_was_on_its_way(spool: Path) -> None:
    """As many more than its limit that put at once waited for maintenance: a limit's worth of them went on in a second."""

    async def scenario() -> None:
        broker = qflow.aio.AsyncBroker(open_still(spool, Clock()))
        ring = await broker.declare_queue("ring", limit_messages=2, on_overflow=qflow.Overflow.DROP_OLDEST)
        await broker.bind("ring", "t")
        for number, put in enumerate((ring.put, ring.submit, partial(broker.publish, "t"))):
            await asyncio.wait_for(asyncio.gather(*(put(b"%d" % place) for place in range(20))), LONG_S)
            assert (await ring.stats()).dropped_total == 20 * (number + 1) - 2
        assert (await ring.get_many(2)).bodies == [b"18", b"19"]
        await broker.close()

    run(scenario())
