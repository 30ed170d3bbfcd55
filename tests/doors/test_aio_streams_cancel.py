"""A task at a stream may be cancelled at any of its awaits: nothing is lost, stored twice, stuck or left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import qflow
import qflow.aio
from doors.event_loop import StruckOperations, heard, leave_no_reader_behind, run, struck, told, turns
from drivers import DOOR, opening_tasks, owner_of

pytestmark = pytest.mark.two_drivers
MOST_AWAITS = 60
OLD = [b"one", b"two", b"three"]


class Stage:
    """A broker with a stream for one scenario."""

    def __init__(self, broker: Any) -> None:
        self.broker = broker
        self.sub: Any = None
        self.held: list[Any] = []
        self.acked: list[bytes] = []
        self.gaps = 0
        """How many messages are to be told of as gone."""
        self.claim: Any = None

    @property
    def room(self) -> Any:
        return owner_of(self.broker).broker.engine.streams.room


Act = Callable[[Stage], Coroutine[Any, Any, Any]]


class Scenario:
    """What is there before, what is cancelled, what goes on beside it, and which messages it may store."""

    def __init__(self, act: Act, before: Act | None = None, beside: Act | None = None, perhaps: int = 0) -> None:
        self.act = act
        self.before = before or nothing
        self.beside = beside or nothing
        self.perhaps = perhaps


async def nothing(stage: Stage) -> None: ...


async def follower(stage: Stage) -> None:
    stage.sub = await stage.broker.subscribe("s")


async def durable(stage: Stage) -> None:
    stage.sub = await stage.broker.subscribe("s", name="reader", start="earliest")


async def replayer(stage: Stage) -> None:
    stage.sub = await stage.broker.subscribe("s", start="earliest")


async def publish_old(stage: Stage) -> None:
    await turns()
    await stage.broker.publish_many([("t/old", body) for body in OLD])


async def publish(stage: Stage) -> None:
    await stage.broker.publish("t/new", b"new 0", key="k")


async def publish_many(stage: Stage) -> None:
    await stage.broker.publish_many([("t/new", b"new 0"), ("nowhere", b"lost"), ("t/new", b"new 1", "key")])


async def submit(stage: Stage) -> None:
    await stage.broker.submit_publish("t/new", b"new 0")


async def publish_to_a_queue_too(stage: Stage) -> None:
    result = await stage.broker.publish("t/both", b"new 0", producer="p", number=1)
    assert result.sequences == {"q": 0}


async def bind(stage: Stage) -> None:
    await stage.broker.declare_queue("q")
    await stage.broker.bind("q", "t/both")


async def publish_as_producer(stage: Stage) -> None:
    await stage.broker.publish("t/new", b"new 0", producer="p", number=7)


async def take_the_number(stage: Stage) -> None:
    stage.claim = owner_of(stage.broker).broker.engine.publisher.claim_of("p", 7)
    stage.claim.take()


async def give_the_number_up(stage: Stage) -> None:
    await turns()
    stage.claim.give_up()


async def fill_the_room(stage: Stage) -> None:
    while stage.room.reserve_at_once(50_000):
        stage.held.append(50_000)


async def empty_the_room(stage: Stage) -> None:
    await turns(100)
    while stage.held:
        stage.room.arrived(stage.held.pop())


async def publish_in_the_full(stage: Stage) -> None:
    for number in range(3):
        await publish_large(stage, number)


async def publish_large(stage: Stage, number: int) -> None:
    await stage.broker.publish("t/new", b"new %d" % number + bytes(49_000), producer="large", number=number)


async def transact_in_the_full(stage: Stage) -> None:
    async with stage.broker.transaction() as tx:
        await tx.publish("t/new", b"new 0" + bytes(49_000))


async def get(stage: Stage) -> None:
    for _ in OLD:
        delivery = await stage.sub.get()
        stage.held.append(delivery)
        await stage.sub.ack(delivery)
        stage.acked.append(stage.held.pop().body)


async def get_many(stage: Stage) -> None:
    batch = await stage.sub.get_many(10)
    stage.acked += batch.bodies
    await batch.ack()


async def drop(stage: Stage) -> None:
    """Have messages dropped that were to come; nothing of the stream is in memory any more."""
    stage.gaps = len(OLD)
    await stage.broker.publish_many([("t/dropped", b"dropped")] * stage.gaps)
    await stage.broker.alter_stream("s", retention_messages=len(OLD))
    await publish_old(stage)
    owner = owner_of(stage.broker).broker
    owner.stream("s").retain()
    owner.engine.streams.room.give_way(2**30)


async def get_behind(stage: Stage) -> None:
    try:
        await stage.sub.get()
    except qflow.GapError as gap:
        stage.gaps -= gap.messages


async def iterate(stage: Stage) -> None:
    async with aclosing(stage.sub.iterate()) as deliveries:
        async for delivery in deliveries:
            stage.acked.append(delivery.body)
            await delivery.ack(wait=True)
            if delivery.body == OLD[-1]:
                break


async def subscribe(stage: Stage) -> None:
    async with stage.broker.subscribe("s", start="earliest") as one:
        async with stage.broker.subscribe("s", name="other", session_expiry_s=100) as other:
            await other.seek(0)
        assert await told(one.lag) == len(OLD)


async def transact(stage: Stage) -> None:
    delivery = await stage.sub.get()
    stage.held.append(delivery)
    async with stage.broker.transaction() as tx:
        await tx.publish("t/new", b"new 0", key="k")
        await tx.ack(delivery)
    stage.acked.append(stage.held.pop().body)


async def administer(stage: Stage) -> None:
    broker = stage.broker
    stream = await broker.declare_stream("other", topics=["o/#"])
    await broker.alter_stream("other", retention_messages=5)
    await broker.publish("o/1", b"x")
    assert [message.body async for message in stream.query()] == [b"x"]
    assert list(await stream.last()) == ["o/1"]
    await (await broker.subscribe("other", name="gone")).close()
    await broker.delete_subscription("other", "gone")
    await broker.delete_stream("other")


SCENARIOS = {
    "publish": lambda: Scenario(publish, publish_old, perhaps=1),
    "publish many": lambda: Scenario(publish_many, publish_old, perhaps=2),
    "submit": lambda: Scenario(submit, publish_old, perhaps=1),
    "publish to a queue, too": lambda: Scenario(publish_to_a_queue_too, bind, publish_old, perhaps=1),
    "publish as a producer": lambda: Scenario(publish_as_producer, publish_old, perhaps=1),
    "wait for a number": lambda: Scenario(publish_as_producer, take_the_number, give_the_number_up, perhaps=1),
    "wait for room": lambda: Scenario(publish_in_the_full, fill_the_room, empty_the_room, perhaps=3),
    "wait for room in a transaction": lambda: Scenario(transact_in_the_full, fill_the_room, empty_the_room, perhaps=1),
    "get that waits": lambda: Scenario(get, follower, publish_old),
    "get_many that waits": lambda: Scenario(get_many, follower, publish_old),
    "get that reads": lambda: Scenario(get, both(publish_old, replayer)),
    "get_many that reads": lambda: Scenario(get_many, both(publish_old, durable)),
    "get that tells of a gap": lambda: Scenario(get_behind, both(durable, drop)),
    "async for": lambda: Scenario(iterate, durable, publish_old),
    "subscribe, seek and close": lambda: Scenario(subscribe, publish_old),
    "transaction": lambda: Scenario(transact, both(publish_old, durable), perhaps=1),
    "administer": lambda: Scenario(administer, publish_old),
}


def both(first: Act, then: Act) -> Act:
    async def act(stage: Stage) -> None:
        await first(stage)
        await then(stage)

    return act


@asynccontextmanager
async def staged(access: str, path: Path) -> AsyncIterator[Stage]:
    async with opening_tasks(access, partial(qflow.open, path, capacity_bytes=400_000)) as broker:
        await broker.declare_stream("s", topics=["t/#"])
        yield Stage(broker)


async def settle(stage: Stage, cancelled: bool, scenario: Scenario) -> None:
    """See that each message is stored once, and comes once to the subscriber, as if nothing had been cancelled."""
    broker = stage.broker
    await heard(broker)
    stored = [message.body.rstrip(b"\0") async for message in broker.stream("s").query()]
    news = [body for body in stored if body not in OLD]
    assert len(set(stored)) == len(stored), "a message was stored twice"
    assert cancelled or len(news) == scenario.perhaps, "it did not happen"
    if "q" in await told(broker.queues()):
        queued = [delivery.body for delivery in await broker.queue("q").get_many(10, timeout_s=0)]
        assert queued == news, "one was stored without the other"
    if stage.sub is not None:
        await settle_subscription(stage, cancelled)
    again = await broker.publish("t/last", b"last", producer="p", number=7)
    assert again.duplicate or again.offsets, "the number is held by nobody"
    await leave_no_reader_behind(broker)


async def settle_subscription(stage: Stage, cancelled: bool) -> None:
    shown = {delivery.body for delivery in stage.held}
    for delivery in stage.held:
        try:
            await delivery.nack()
        except qflow.AlreadySettled:
            stage.acked.append(delivery.body)  # by what was committed after all
    if stage.gaps:
        with pytest.raises(qflow.GapError) as told_of:
            await stage.sub.get_many(100, timeout_s=0)
        assert told_of.value.messages == stage.gaps
    left = await stage.sub.get_many(100, timeout_s=0)
    for delivery in left:
        assert delivery.delivery_count == 1 or delivery.body in shown, "it was counted as delivered"
    bodies = [body for body in left.bodies if body in OLD]
    if set(stage.acked) & set(bodies):
        assert cancelled, "an ack was lost"
        stage.acked = [body for body in stage.acked if body not in bodies]  # it was about to ack it
    assert stage.acked + bodies == OLD
    await left.ack()
    cursors = owner_of(stage.broker).broker.engine.streams.get("s").open_cursors()
    assert [cursor._line.watching for cursor in cursors] == [0]
    await stage.sub.close()


@pytest.mark.parametrize("late", [False, True], ids=["at once", "when it has come"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_cancelled_at_every_await(name: str, late: bool, directory: Path, access: str) -> None:
    """Each await of each scenario once."""

    async def attempt(at: int) -> bool:
        scenario = SCENARIOS[name]()
        async with staged(access, directory / str(at)) as stage:
            await scenario.before(stage)
            beside = asyncio.create_task(scenario.beside(stage))
            cancelled = await struck(scenario.act(stage), at, late)
            await beside
            await settle(stage, cancelled, scenario)
        return cancelled

    for at in range(MOST_AWAITS):
        if not run(attempt(at)):
            assert at > 0
            return
    raise AssertionError("it never came to its end")


@pytest.mark.parametrize("late", [False, True], ids=["at once", "when it has come"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_an_operation_is_cancelled_at_every_await_of_the_owner(
    name: str, late: bool, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What callers give up at the door, each await of each scenario once."""
    operations = StruckOperations(monkeypatch)

    async def attempt(at: int) -> bool:
        scenario = SCENARIOS[name]()
        async with staged(DOOR, directory / str(at)) as stage:
            await scenario.before(stage)
            other = copy(stage)
            other.broker = owner_of(stage.broker)
            beside = asyncio.create_task(scenario.beside(other))
            cancelled = await operations.strike(scenario.act(stage), at, late)
            await beside
            await settle(stage, cancelled, scenario)
        return cancelled

    assert any(not run(attempt(at)) for at in range(MOST_AWAITS)), "it never came to its end"
