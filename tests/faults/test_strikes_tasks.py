"""A signal handler ends a program in the middle of what its tasks do, at every place where one can: `sys.exit()`.

The event loop ends then as `asyncio.run` ends it: tasks are cancelled. The broker is closed, quickly, and when the spool
is opened again each call is done or not done, and all books agree.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

import qflow
import qflow.aio
from faults.seams import in_thread
from faults.strikes import TORTURE, Strike, places, reach
from faults.test_strikes_queues import Round, World
from qflow.memory.ledger import Ledger
from qflow.memory.run_list import OWN_RUN
from qflow.memory.waiting import in_place
from qflow.queues.queue import parts_of
from qflow.streams.room import Asking

MOST = 2
"""Places of each call, on each kind of queue, that are struck in a normal run."""
NEVER = 2**60
KINDS = ("transient", "durable", "ranked")


class Exit(SystemExit):
    """What the handler raises."""


def leave() -> None:
    raise Exit


class Tasks:
    """The queue of a round as tasks have it."""

    def __init__(self, here: Round) -> None:
        self.here = here
        self.broker = qflow.aio.AsyncBroker(here.broker)
        self.queue = self.broker.queue("q")


Act = Callable[[Round, Tasks], Awaitable[object]]
CALLS: dict[str, tuple[Act, Callable[[Round, Tasks], Awaitable[object]] | None]] = {}


def call(name: str, before: Act | None = None) -> Callable[[Act], Act]:
    """Have a call struck, after what comes before it."""

    def note(act: Act) -> Act:
        CALLS[name] = act, before
        return act

    return note


async def hold_one(here: Round, tasks: Tasks) -> None:
    here.held = [await tasks.queue.get(0)]


async def hold_batch(here: Round, tasks: Tasks) -> None:
    here.batch = await tasks.queue.get_many(3, 0)


@call("put")
async def _put(here: Round, tasks: Tasks) -> None:
    await tasks.queue.put(here.new(1)[0])


@call("put with headers")
async def _put_headers(here: Round, tasks: Tasks) -> None:
    await tasks.queue.put(here.new(1)[0], headers={"a": 1})


@call("put_many")
async def _put_many(here: Round, tasks: Tasks) -> None:
    await tasks.queue.put_many(here.new(3))


@call("submit")
async def _submit(here: Round, tasks: Tasks) -> None:
    await tasks.queue.submit(here.new(1)[0])


@call("get")
async def _get(here: Round, tasks: Tasks) -> None:
    await hold_one(here, tasks)


@call("get_many")
async def _get_many(here: Round, tasks: Tasks) -> None:
    await hold_batch(here, tasks)


@call("ack", hold_one)
async def _ack(here: Round, tasks: Tasks) -> None:
    here.acked = here.base[:1]
    await here.held[0].ack(wait=True)


@call("ack of a batch", hold_batch)
async def _ack_batch(here: Round, tasks: Tasks) -> None:
    here.acked = here.base[:3]
    await here.batch.ack(wait=True)


@call("nack", hold_one)
async def _nack(here: Round, tasks: Tasks) -> None:
    await here.held[0].nack()


async def choose(here: Round, tasks: Tasks) -> None:
    here.batch, *_ = [entry.sequence async for entry in tasks.queue.browse()]


@call("delete", choose)
async def _delete(here: Round, tasks: Tasks) -> None:
    here.acked = here.base[:1]
    assert await tasks.queue.delete(here.batch)


@call("transaction", hold_one)
async def _transaction(here: Round, tasks: Tasks) -> None:
    here.acked = here.base[:1]
    async with tasks.broker.transaction() as transaction:
        await transaction.ack(here.held[0])
        await transaction.put(tasks.queue, here.new(1)[0])


@call("waiting get that is served")
async def _served(here: Round, tasks: Tasks) -> None:
    here.maybe = here.base  # one after the other
    async with asyncio.timeout(30):
        async for delivery in tasks.queue:
            await delivery.ack(wait=True)
            if delivery.body == here.base[-1]:
                break


async def hold_all(here: Round, tasks: Tasks) -> None:
    here.batch = await tasks.queue.get_many(100, 0)


@call("put that a get waits for", hold_all)
async def _awaited(here: Round, tasks: Tasks) -> None:
    getter = asyncio.create_task(tasks.queue.get(30))
    await asyncio.sleep(0)
    await tasks.queue.put(here.new(1)[0])
    await getter


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, World]]:
    found = {kind: World(tmp_path_factory.mktemp("tasks"), kind) for kind in KINDS}
    yield found
    for world in found.values():
        world.broker.close()


@pytest.fixture(scope="module")
def seed() -> int:
    """Which places are struck this time; printed with a failure."""
    return random.SystemRandom().randrange(2**32)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_that_exits_finds_a_call_done_or_not_done(
    worlds: dict[str, World], kind: str, name: str, seed: int
) -> None:
    """At any place: closing does not hang, and nothing is lost or doubled."""
    world = worlds[kind]
    for _ in range(2):
        number = strike_once(world, name, NEVER)[0].seen
    struck = 0
    for at in places(number, MOST, seed):
        strike, _ = reach(at, lambda at: strike_once(world, name, at))
        struck += strike.where is not None
    if TORTURE:
        print(f"{kind} queue, {name} by a task: a handler exits at {struck} of {number} places")
    assert struck


def test_a_get_that_is_cancelled_leaves_its_place_in_line(tmp_path: Path) -> None:
    """At whatever place of that a handler exits: what comes next wakes somebody else."""
    with qflow.open(tmp_path / "spool") as broker:
        queue = broker.declare_queue("q", durable=False)
        tasks, gate = qflow.aio.AsyncBroker(broker).queue("q"), parts_of(queue).gate

        def struck(at: int) -> Strike:
            strike, loop = Strike(at, leave), asyncio.new_event_loop()
            getter = loop.create_task(tasks.get())
            loop.run_until_complete(asyncio.sleep(0))
            getter.cancel()
            with suppress(asyncio.CancelledError, Exit):
                strike.run(lambda: loop.run_until_complete(getter))
            end(loop, str(strike.where))
            return strike

        number = struck(NEVER).seen
        for at in range(1, number):  # at the first one the cancellation comes in: no handler runs there
            strike = struck(at)
            assert (gate.arrived.watching, gate.getters) == (0, 0), f"struck at place {at}: {strike.where}"


def strike_once(world: World, name: str, at: int) -> tuple[Strike, bool]:
    """Strike one call of a task; check what is left."""
    act, before = CALLS[name]
    world.rounds += 1
    here = Round(world, world.rounds)
    world.queue.put_many(here.base)
    tasks = Tasks(here)
    strike = Strike(at, leave)
    ended = False
    try:
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda loop, context: None)
        try:
            if before is not None:
                loop.run_until_complete(before(here, tasks))  # type: ignore[arg-type]
            with suppress(asyncio.CancelledError):
                strike.run(lambda: loop.run_until_complete(act(here, tasks)))  # type: ignore[arg-type]
        except Exit:
            ended = True
        except RuntimeError:
            ended = True
            assert "threading.py" in str(strike.where), "Python's own locks do not outlast that, while a thread begins"
        finally:
            end(loop, str(strike.where))
        gc.collect(0)
        in_thread(lambda: verify(world, here, ended))
    except BaseException as error:
        error.add_note(f"struck at place {at}: {strike.where}")
        world.renew()
        raise
    return strike, ended


def end(loop: asyncio.AbstractEventLoop, where: str) -> None:
    """End a loop as `asyncio.run` does."""
    tasks = asyncio.all_tasks(loop)
    is_asyncio = "asyncio" in where  # a future of its own wakes nobody any more if it is struck where it does
    for task in tasks:
        task.cancel()

    async def ending() -> None:
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=1 if is_asyncio else 60)
            assert is_asyncio or not late
        await loop.shutdown_asyncgens()

    for _ in range(3):
        with suppress(Exit):  # once more, of a task that awaits the one that was struck
            loop.run_until_complete(ending())
            break
    loop.close()


def verify(world: World, here: Round, struck: bool) -> None:
    """What was confirmed is there once, and what the call was to do is done, or not."""
    world.reopen()
    if not world.durable:
        here.base = here.acked = here.bodies = []
    world.check_contents(here, struck)
    world.check_books()


@pytest.mark.parametrize("admitted", [False, True], ids=["in line", "admitted"])
@pytest.mark.parametrize("which", range(3))
def test_a_put_that_is_cancelled_leaves_its_place_in_line(tmp_path: Path, which: int, admitted: bool) -> None:
    """As a get does: the others are admitted in its place."""
    with qflow.open(tmp_path / "spool") as broker:
        queue = broker.declare_queue("q", durable=False, limit_messages=1)
        tasks, gate, admission = (
            qflow.aio.AsyncBroker(broker).queue("q"),
            parts_of(queue).gate,
            parts_of(queue).admission,
        )

        def struck(at: int) -> Strike:
            loop = asyncio.new_event_loop()
            queue.put(b"1", timeout_s=0)
            putters = [loop.create_task(tasks.put(b"2", timeout_s=timeout_s)) for timeout_s in (None, None, 60)]
            for _ in range(3):
                loop.run_until_complete(asyncio.sleep(0))
            assert len(admission.blocked) == 3
            if admitted:
                queue.get(timeout_s=0).ack()
                assert len(admission.admitted) == 1
            leaving = putters.pop(which)
            leaving.cancel()
            # Not where the loop wakes tasks: it drops that, and ends.
            strike = Strike(at, lambda: asyncio.current_task(loop) is leaving and leave())
            with suppress(asyncio.CancelledError, Exit):
                strike.run(lambda: loop.run_until_complete(leaving))
            for putter in putters:
                if len(queue):
                    queue.get(timeout_s=0).ack()
                for _ in range(3):  # again, of the task that was struck, whose end may stop the loop, too
                    with suppress(TimeoutError, Exit, asyncio.CancelledError, RuntimeError):
                        loop.run_until_complete(asyncio.wait({putter}, timeout=60))
                        break
                assert putter.done(), f"struck at place {at}: {strike.where}"
            if len(queue):
                queue.get(timeout_s=0).ack()
            end(loop, str(strike.where))
            return strike

        number = struck(NEVER).seen
        assert number > 1
        for at in range(number):
            strike = struck(at)
            left = (len(admission.line), len(admission.blocked), len(admission.admitted), admission.pending)
            memory = (gate.room.watching, gate.incoming, gate.used)
            assert (left, memory) == ((0, 0, 0, 0), (0, 0, 0)), f"struck at place {at}: {strike.where}"


@pytest.mark.parametrize("which", range(3))
def test_a_publish_that_gives_up_leaves_its_place_in_line(tmp_path: Path, which: int) -> None:
    """The first has what all of memory is, and the others wait for it: at whatever place of that a handler exits."""
    with qflow.open(tmp_path / "spool", capacity_bytes=2**20) as broker:
        broker.declare_stream("s", topics=["#"])
        room = broker.engine.streams.room

        def struck(at: int) -> Strike:
            strike, woken = Strike(at, leave), []
            asked = [Asking(2**20) for _ in range(3)]
            for asking in asked:
                in_place(partial(room.try_reserve, asking, partial(woken.append, asking), may_work=False))
            assert asked[0].granted
            leaving = asked.pop(which)
            with suppress(Exit):
                strike.run(lambda: in_place(partial(room.give_up, leaving)))
            room.give_up(Asking(0))  # others come and go
            in_place(partial(room.give_up, leaving))
            for asking in asked:
                in_place(partial(room.try_reserve, asking, partial(woken.append, asking), may_work=True))
                assert asking.granted, f"struck at place {at}: {strike.where}"
                in_place(partial(room.give_up, asking))
            return strike

        for at in range(struck(NEVER).seen):
            strike = struck(at)
            assert (room.used, room.problems()) == (0, []), f"struck at place {at}: {strike.where}"


def test_a_publish_that_is_struck_as_it_asks_leaves_its_place_in_line(tmp_path: Path) -> None:
    """Before it has one, or with it."""
    with qflow.open(tmp_path / "spool", capacity_bytes=2**20) as broker:
        broker.declare_stream("s", topics=["#"])
        room = broker.engine.streams.room

        def struck(at: int) -> Strike:
            strike, asking = Strike(at, leave), Asking(2**20)
            with suppress(Exit):
                strike.run(lambda: in_place(partial(room.try_reserve, asking, None, may_work=True)))
            in_place(partial(room.give_up, asking))
            return strike

        for at in range(struck(NEVER).seen):
            strike = struck(at)
            assert (room.used, room.problems()) == (0, []), f"struck at place {at}: {strike.where}"


def test_the_ledger_ranks_its_accounts_anew_after_an_interrupt() -> None:
    """At whatever place of a change a handler exits: what comes later changes what others have, and finds the heaviest."""

    def struck(at: int) -> Strike:
        ledger, strike = Ledger(2**20), Strike(at, leave)
        accounts = [ledger.open(number, f"q{number}", None) for number in range(1, 4)]
        for account in accounts:
            account.give_way = lambda missing, spills: False
            assert ledger.borrow_exactly(account, 1000 * account.number)
        with suppress(Exit):
            strike.run(lambda: ledger.borrow_exactly(accounts[1], 5000))
        for account in accounts:
            assert ledger.borrow_exactly(account, 10_000), f"struck at place {at}: {strike.where}"
        assert ledger.problems() == [], f"struck at place {at}: {strike.where}"
        for account in accounts:
            ledger.close(account)
        assert (ledger.borrowed, ledger.problems()) == (0, [])
        return strike

    for at in range(struck(NEVER).seen):
        struck(at)


@pytest.mark.parametrize("headers", [None, {"a": 1}], ids=["plain", "headers"])
@pytest.mark.parametrize("durable", [False, True], ids=["transient", "durable"])
def test_a_put_of_a_task_that_borrows_is_charged_while_it_is_there(
    tmp_path: Path, durable: bool, headers: dict[str, int] | None
) -> None:
    """And no longer, wherever a handler exits; and a get that waits is woken if it is there."""
    with qflow.open(tmp_path / "spool", capacity_bytes=2**20) as broker:
        tasks = qflow.aio.AsyncBroker(broker)

        def struck(at: int) -> Strike:
            queue, strike, woken = broker.declare_queue("q", durable=durable), Strike(at, leave), []
            parts = parts_of(queue)
            queue.put(b"x" * 30_000)  # less than what is borrowed at once
            with parts.context.lock:
                watcher, parts.gate.getters = parts.gate.arrived.watch(lambda: woken.append(1)), 1
            loop = asyncio.new_event_loop()
            with suppress(Exit, asyncio.CancelledError):
                strike.run(lambda: loop.run_until_complete(tasks.queue("q").put(b"y" * 40_000, headers)))
            end(loop, str(strike.where))
            broker.engine.log.drain()
            with parts.context.lock:
                parts.gate.arrived.unwatch(watcher)
                parts.gate.getters = 0
            where = f"struck at place {at}: {strike.where}"
            assert (parts.gate.incoming, parts.admission.pending, broker.check()) == (0, 0, []), where
            assert bool(woken) == (len(queue) > 1), where
            broker.delete_queue("q")
            return strike

        number = struck(NEVER).seen
        assert number > 50
        for at in range(number):
            struck(at)


async def _publish(broker: qflow.aio.AsyncBroker) -> None:
    await broker.publish("s/1", b"x")


async def _publish_both(broker: qflow.aio.AsyncBroker) -> None:
    await broker.publish("both/1", b"x")


async def _submit_publish(broker: qflow.aio.AsyncBroker) -> None:
    await broker.submit_publish("s/1", b"x")


@pytest.mark.parametrize("act", [_publish, _publish_both, _submit_publish], ids=lambda act: act.__name__.strip("_"))
def test_a_publish_of_a_task_keeps_no_memory(
    tmp_path: Path, act: Callable[[qflow.aio.AsyncBroker], Awaitable[object]]
) -> None:
    """Wherever a handler exits: as it has reserved some, and the log has nothing yet; in a stream, or a queue as well."""
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_stream("s", topics=["s/#", "both/#"])
        queue = broker.declare_queue("q")
        broker.bind(queue, "both/#")
        room, parts, tasks = broker.engine.streams.room, parts_of(queue), qflow.aio.AsyncBroker(broker)

        def struck(at: int) -> Strike:
            strike, loop = Strike(at, leave), asyncio.new_event_loop()
            with suppress(Exit, asyncio.CancelledError):
                strike.run(lambda: loop.run_until_complete(act(tasks)))  # type: ignore[arg-type]
            end(loop, str(strike.where))
            broker.engine.log.drain()
            left = room.busy, parts.gate.incoming, parts.admission.pending
            assert left == (False, 0, 0), f"struck at place {at}: {strike.where}"
            return strike

        struck(NEVER)  # which borrows
        for at in range(struck(NEVER).seen):
            struck(at)
        assert broker.check() == []


def test_a_get_of_a_subscription_keeps_no_memory(tmp_path: Path) -> None:
    """Wherever a handler exits: as it has reserved some for what it is about to read, or gives some back."""
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_stream("s", topics=["s/#"])
        room, tasks = broker.engine.streams.room, qflow.aio.AsyncBroker(broker)
        broker.publish_many([("s/1", b"x")] * 3)

        def struck(at: int) -> Strike:
            strike, loop = Strike(at, leave), asyncio.new_event_loop()

            async def act(subscription: qflow.aio.AsyncSubscription) -> None:
                await (await subscription.get(0)).ack()

            async def subscribe() -> qflow.aio.AsyncSubscription:
                return await tasks.subscribe("s", start="earliest")

            subscription = loop.run_until_complete(subscribe())
            with suppress(Exit, asyncio.CancelledError):
                strike.run(lambda: loop.run_until_complete(act(subscription)))
            end(loop, str(strike.where))
            subscription.subscription.close()
            left = room.used - sum(tail.charged for tail in room.tails)
            assert (left, room.problems()) == (0, []), f"struck at place {at}: {strike.where}"
            return strike

        for at in range(0, struck(NEVER).seen, 1 if TORTURE else 3):
            struck(at)


def test_a_batch_that_expires_is_visible_and_counted_in_one(tmp_path: Path) -> None:
    """Where a handler exits as it becomes so, it is not on its way in for good, which a close would wait for."""
    with qflow.open(tmp_path / "spool") as broker:
        queue = broker.declare_queue("q", durable=False)
        tasks, parts = qflow.aio.AsyncBroker(broker).queue("q"), parts_of(queue)

        def struck(at: int) -> Strike:
            loop = asyncio.new_event_loop()
            queue.put(b"before it, so that it is a run of its own")
            strike = Strike(at, lambda: len(queue) > 1 and leave())
            with suppress(Exit, asyncio.CancelledError):
                strike.run(lambda: loop.run_until_complete(tasks.put_many([b"x"] * OWN_RUN, ttl_s=60)))
            end(loop, str(strike.where))
            return strike

        for at in range(struck(NEVER).seen):
            queue.purge()
            strike = struck(at)
            on_their_way = (parts.gate.incoming, parts.admission.pending)
            assert len(queue) == 1 + OWN_RUN
            assert on_their_way == (0, 0), f"struck at place {at}: {strike.where}"
