"""A task may be cancelled at any of its awaits: whatever it was doing is done or not, and nothing is left behind."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import qflow
import qflow.aio
from doors.event_loop import StruckOperations, heard, leave_nothing_behind, run, struck, told, turns, until
from drivers import DOOR, opening_tasks, owner_of
from faults.seams import Faults, open_faulty

pytestmark = pytest.mark.two_drivers
KIB = bytes(1000)
MOST_AWAITS = 60


class Stage:
    """A broker for one scenario, and what its helper needs."""

    def __init__(self, broker: Any, faults: Faults) -> None:
        self.broker = broker
        self.faults = faults
        self.acked: list[bytes] = []
        self.held: list[qflow.aio.AsyncDelivery] = []
        self.others: list[asyncio.Task[Any]] = []

    async def queue(self, name: str = "q", **settings: Any) -> Any:
        return await self.broker.declare_queue(name, **settings)


Act = Callable[[Stage], Coroutine[Any, Any, Any]]


class Scenario:
    """What is there before, what is cancelled, what goes on beside it, and which bodies may be there afterwards."""

    def __init__(self, before: Act, act: Act, beside: Act | None, always: list[bytes], perhaps: list[bytes]) -> None:
        self.before = before
        self.act = act
        self.beside = beside
        self.always = always
        self.perhaps = perhaps


async def nothing(stage: Stage) -> None: ...


def put_durable() -> Scenario:
    async def act(stage: Stage) -> None:
        await (stage.broker.queue("q")).put(b"new")

    return Scenario(lambda stage: stage.queue(), act, None, [], [b"new"])


def put_transient() -> Scenario:
    async def act(stage: Stage) -> None:
        await stage.broker.queue("q").put(b"new")

    return Scenario(lambda stage: stage.queue(durable=False), act, None, [], [b"new"])


def put_many_durable() -> Scenario:
    async def act(stage: Stage) -> None:
        await stage.broker.queue("q").put_many([b"one", b"two"])

    return Scenario(lambda stage: stage.queue(), act, None, [], [b"one", b"two"])


def submit() -> Scenario:
    async def act(stage: Stage) -> None:
        await stage.broker.queue("q").submit(b"new")

    return Scenario(lambda stage: stage.queue(), act, None, [], [b"new"])


def put_at_a_limit(durable: bool) -> Scenario:
    async def before(stage: Stage) -> None:
        queue = await stage.queue(durable=durable, limit_messages=1)
        await queue.put(b"old")

    async def act(stage: Stage) -> None:
        await stage.broker.queue("q").put(b"new")

    async def beside(stage: Stage) -> None:
        await turns()
        async with await stage.broker.queue("q").get() as delivery:
            stage.acked.append(delivery.body)

    return Scenario(before, act, beside, [b"old"], [b"new"])


def put_behind_another_at_a_limit() -> Scenario:
    async def before(stage: Stage) -> None:
        await put_at_a_limit(False).before(stage)
        stage.others.append(asyncio.create_task(stage.broker.queue("q").put(b"other")))
        owned = owner_of(stage.broker).broker.queue("q")
        await until(lambda: owned.stats().blocked_putters == 1)  # else it might be the one that is cancelled

    async def beside(stage: Stage) -> None:
        for _ in range(2):
            await turns()
            async with await stage.broker.queue("q").get() as delivery:
                stage.acked.append(delivery.body)
        await asyncio.gather(*stage.others)

    return Scenario(before, put_at_a_limit(False).act, beside, [b"old", b"other"], [b"new"])


def put_at_a_limit_for_long() -> Scenario:
    async def act(stage: Stage) -> None:
        with pytest.raises(qflow.QueueFull):
            await stage.broker.queue("q").put(b"new", timeout_s=0)

    return Scenario(put_at_a_limit(True).before, act, None, [b"old"], [])


def put_drops_what_is_on_disk() -> Scenario:
    async def before(stage: Stage) -> None:
        queue = await stage.queue(durable=False, limit_messages=20, on_overflow=qflow.Overflow.DROP_OLDEST)
        for _ in range(20):
            await queue.put(KIB)
        await stage.broker.alter_queue("q", capacity_bytes=3000)

    async def act(stage: Stage) -> None:
        for _ in range(3):
            await stage.broker.queue("q").put(b"new")

    return Scenario(before, act, None, [], [KIB] * 20 + [b"new"] * 3)


def put_made_a_dead_letter() -> Scenario:
    async def before(stage: Stage) -> None:
        queue = await stage.queue(limit_messages=1, on_overflow=qflow.Overflow.DEAD_LETTER, dead_letter="dead")
        await queue.put(b"old")

    async def act(stage: Stage) -> None:
        assert await stage.broker.queue("q").put(b"new") is None

    return Scenario(before, act, None, [b"old"], [b"new"])


def put_that_spills(durable: bool) -> Scenario:
    async def before(stage: Stage) -> None:
        queue = await stage.queue(durable=durable, capacity_bytes=8000)
        await queue.put_many([KIB] * 6)

    async def act(stage: Stage) -> None:
        for _ in range(6):
            await stage.broker.queue("q").put(b"new" * 300)

    return Scenario(before, act, None, [KIB] * 6, [b"new" * 300] * 6)


def put_on_a_full_disk() -> Scenario:
    async def before(stage: Stage) -> None:
        queue = await stage.queue(durable=False, capacity_bytes=8000)
        await queue.put_many([KIB] * 6)
        stage.faults.fail("pwrite", errno.ENOSPC)

    async def act(stage: Stage) -> None:
        for _ in range(3):
            await stage.broker.queue("q").put(b"new" * 300)

    async def beside(stage: Stage) -> None:
        await turns(200)
        stage.faults.heal()
        await stage.broker.alter_queue("q", resume_ratio=0.7)  # has those who wait for the disk look again

    return Scenario(before, act, beside, [KIB] * 6, [b"new" * 300] * 3)


def get_that_waits(most: int | None) -> Scenario:
    async def act(stage: Stage) -> None:
        queue = stage.broker.queue("q")
        if most is None:
            stage.held.append(await queue.get())
        else:
            stage.held += await queue.get_many(most)

    async def beside(stage: Stage) -> None:
        await turns()
        await stage.broker.queue("q").put(b"old")

    return Scenario(lambda stage: stage.queue(durable=False), act, beside, [b"old"], [])


def get_that_restores(most: int | None) -> Scenario:
    async def before(stage: Stage) -> None:
        queue = await stage.queue(durable=False, capacity_bytes=20_000)
        for _ in range(15):
            await queue.put(KIB)
        await stage.broker.alter_queue("q", capacity_bytes=0)

    return Scenario(before, get_that_waits(most).act, None, [KIB] * 15, [])


def ack_waits() -> Scenario:
    async def before(stage: Stage) -> None:
        queue = await stage.queue()
        await queue.put_many([b"one", b"two"])
        stage.held.append(await queue.get())

    async def act(stage: Stage) -> None:
        stage.acked.append(stage.held[0].body)
        delivery = stage.held.pop()
        await delivery.ack(wait=True)

    return Scenario(before, act, None, [b"one", b"two"], [])


def nack_to_the_dead() -> Scenario:
    async def before(stage: Stage) -> None:
        queue = await stage.queue(dead_letter="dead")
        await queue.put(b"old")
        stage.held.append(await queue.get())

    async def act(stage: Stage) -> None:
        delivery = stage.held.pop()
        await delivery.nack(requeue=False)

    return Scenario(before, act, None, [b"old"], [])


def publish() -> Scenario:
    async def before(stage: Stage) -> None:
        await stage.queue("durable")
        await stage.queue("passing", durable=False, limit_messages=1)
        await stage.broker.bind("durable", "#")
        await stage.broker.bind("passing", "a")
        await stage.broker.queue("passing").put(b"old")

    async def act(stage: Stage) -> None:
        result = await stage.broker.publish("a", b"new")
        assert set(result.sequences) == {"durable", "passing"}

    async def beside(stage: Stage) -> None:
        await turns()
        async with await stage.broker.queue("passing").get() as delivery:
            stage.acked.append(delivery.body)

    return Scenario(before, act, beside, [b"old"], [b"new", b"new"])


def transaction() -> Scenario:
    async def before(stage: Stage) -> None:
        queue = await stage.queue("from")
        await stage.queue("to", limit_messages=1)
        await queue.put(b"old")
        await stage.broker.queue("to").put(b"first")
        stage.held.append(await queue.get())

    async def act(stage: Stage) -> None:
        async with stage.broker.transaction() as tx:
            await tx.put("to", b"new")
            await tx.put("from", b"new")
            await tx.ack(stage.held[0])
        assert len(tx.result) == 2
        stage.held.clear()
        stage.acked.append(b"old")

    async def beside(stage: Stage) -> None:
        await turns()
        async with await stage.broker.queue("to").get() as delivery:
            stage.acked.append(delivery.body)

    return Scenario(before, act, beside, [b"first", b"old"], [b"new", b"new"])


def transaction_on_disk() -> Scenario:
    """Its bodies do not fit in memory, and wait in the spill store."""

    async def before(stage: Stage) -> None:
        await stage.queue("to")

    async def act(stage: Stage) -> None:
        async with stage.broker.transaction() as tx:
            for _ in range(3):
                await tx.put("to", bytes(40_000))

    return Scenario(before, act, None, [], [bytes(40_000)] * 3)


def iterate() -> Scenario:
    async def before(stage: Stage) -> None:
        queue = await stage.queue()
        await queue.put_many([b"one", b"two"])

    async def act(stage: Stage) -> None:
        async with aclosing(stage.broker.queue("q").iterate()) as deliveries:
            async for delivery in deliveries:
                stage.acked.append(delivery.body)
                await delivery.ack(wait=True)
                if delivery.body == b"three":
                    break

    async def beside(stage: Stage) -> None:
        await turns()
        await stage.broker.queue("q").put(b"three")

    return Scenario(before, act, beside, [b"one", b"two", b"three"], [])


def consume() -> Scenario:
    async def before(stage: Stage) -> None:
        queue = await stage.queue(durable=False)
        await queue.put_many([b"one", b"two", b"three"])

    async def act(stage: Stage) -> None:
        handled = asyncio.Event()

        async def callback(delivery: qflow.aio.AsyncDelivery) -> None:
            await asyncio.sleep(0)
            stage.acked.append(delivery.body)
            if len(stage.acked) == 2:
                handled.set()

        async with stage.broker.queue("q").consume(callback):
            await handled.wait()

    return Scenario(before, act, None, [b"one", b"two", b"three"], [])


def administer() -> Scenario:
    async def before(stage: Stage) -> None:
        await stage.queue("old")
        await stage.broker.queue("old").put(b"old")

    async def act(stage: Stage) -> None:
        queue = await stage.queue("q")
        await stage.broker.bind(queue, "a/#")
        await stage.broker.alter_queue("q", limit_messages=7)
        await stage.broker.publish_many([("a/b", b"new"), ("nowhere", b"new")])
        await queue.purge()
        await stage.broker.unbind("q", "a/#")
        assert [entry.sequence async for entry in stage.broker.queue("old").browse()] == [0]
        await stage.broker.delete_queue("q")

    return Scenario(before, act, None, [b"old"], [b"new"])


def transaction_on_disk_committed_in_its_block() -> Scenario:
    async def act(stage: Stage) -> None:
        async with stage.broker.transaction() as tx:
            for _ in range(3):
                await tx.put("to", bytes(40_000))
            await tx.commit()

    return Scenario(transaction_on_disk().before, act, None, [], [bytes(40_000)] * 3)


def delete() -> Scenario:
    """Two messages, one after the other."""

    async def before(stage: Stage) -> None:
        queue = await stage.queue()
        await queue.put_many([b"one", b"two", b"three"])

    async def act(stage: Stage) -> None:
        for sequence, body in enumerate([b"one", b"two"]):
            if await stage.broker.queue("q").delete(sequence):
                stage.acked.append(body)

    return Scenario(before, act, None, [b"three"], [b"one", b"two"])


def delete_many() -> Scenario:
    """Two messages together."""

    async def act(stage: Stage) -> None:
        assert await stage.broker.queue("q").delete_many([0, 1]) == [0, 1]
        stage.acked += [b"one", b"two"]

    return Scenario(delete().before, act, None, [b"three"], [b"one", b"two"])


SCENARIOS = {
    "put durable": put_durable,
    "put transient": put_transient,
    "put_many durable": put_many_durable,
    "submit": submit,
    "put at a limit": lambda: put_at_a_limit(False),
    "put behind another at a limit": put_behind_another_at_a_limit,
    "put durable at a limit": lambda: put_at_a_limit(True),
    "put at a limit without waiting": put_at_a_limit_for_long,
    "put drops what is on disk": put_drops_what_is_on_disk,
    "put made a dead letter": put_made_a_dead_letter,
    "put that spills": lambda: put_that_spills(False),
    "put durable that spills": lambda: put_that_spills(True),
    "put on a full disk": put_on_a_full_disk,
    "get that waits": lambda: get_that_waits(None),
    "get_many that waits": lambda: get_that_waits(10),
    "get that restores": lambda: get_that_restores(None),
    "get_many that restores": lambda: get_that_restores(10),
    "ack that waits": ack_waits,
    "nack to the dead": nack_to_the_dead,
    "publish": publish,
    "transaction": transaction,
    "transaction on disk": transaction_on_disk,
    "transaction on disk, committed in its block": transaction_on_disk_committed_in_its_block,
    "async for": iterate,
    "consume": consume,
    "delete": delete,
    "delete_many": delete_many,
    "administer": administer,
}


@asynccontextmanager
async def staged(access: str, path: Path, name: str) -> AsyncIterator[Stage]:
    faults = Faults()
    settings = {"capacity_bytes": 100_000} if name.startswith("transaction on disk") else {}
    async with opening_tasks(access, partial(open_faulty, path, faults, **settings)) as broker:
        yield Stage(broker, faults)


async def settle(stage: Stage, cancelled: bool, scenario: Scenario, name: str) -> None:
    """See that the books balance, nothing is stuck, and no delivery was counted that was none."""
    stage.faults.heal()
    held = [delivery.body for delivery in stage.held]
    await heard(stage.broker)
    for delivery in stage.held:
        try:
            await delivery.nack()
        except qflow.AlreadySettled:
            stage.acked.append(delivery.body)  # by a transaction that was committed after all
    for queue in await told(stage.broker.queues()):
        await stage.broker.alter_queue(queue, capacity_bytes=None)
    found = await leave_nothing_behind(stage.broker)
    bodies = sorted([body for _, body, _ in found] + stage.acked)
    missing = list(scenario.perhaps)
    for body in scenario.always:
        assert body in bodies, f"{body[:10]!r} is gone"
        bodies.remove(body)
    for body in bodies:
        assert body in missing, f"{body[:10]!r} came twice"
        missing.remove(body)
    if not cancelled and name not in ("administer", "put drops what is on disk"):
        assert not missing, "it did not happen"
    for _, body, count in found:
        assert count == 1 or body in held, f"{body[:10]!r} was counted as delivered"


@pytest.mark.parametrize("late", [False, True], ids=["at once", "when it has come"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_cancelled_at_every_await(name: str, late: bool, directory: Path, access: str) -> None:
    """Each await of each scenario once."""

    async def attempt(at: int) -> bool:
        scenario = SCENARIOS[name]()
        async with staged(access, directory / str(at), name) as stage:
            await scenario.before(stage)
            beside = asyncio.create_task((scenario.beside or nothing)(stage))
            cancelled = await struck(scenario.act(stage), at, late)
            await beside
            await settle(stage, cancelled, scenario, name)
        return cancelled

    for at in range(MOST_AWAITS):
        if not run(attempt(at)):
            assert at > 0 or name in {"put transient", "put at a limit without waiting"}
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
        async with staged(DOOR, directory / str(at), name) as stage:
            await scenario.before(stage)
            other = copy(stage)
            other.broker = owner_of(stage.broker)
            beside = asyncio.create_task((scenario.beside or nothing)(other))
            cancelled = await operations.strike(scenario.act(stage), at, late)
            await beside
            await settle(stage, cancelled, scenario, name)
        return cancelled

    assert any(not run(attempt(at)) for at in range(MOST_AWAITS)), "it never came to its end"


@pytest.mark.parametrize("operation", ["pwrite", "read"], ids=["spilling", "dropping"])
def test_a_put_that_is_cancelled_while_a_thread_works_for_it_takes_no_room(
    operation: str, directory: Path, access: str
) -> None:
    """The thread finishes what it does to the disk, and then finds that nobody wants it."""
    entered, go_on = threading.Event(), threading.Event()

    def wait_there() -> None:
        if threading.current_thread().name.startswith("qflow-aio"):  # maintenance comes by, too
            entered.set()
            go_on.wait(60)

    async def scenario() -> None:
        async with staged(access, directory / "spool", operation) as stage:
            scenario = put_that_spills(False) if operation == "pwrite" else put_drops_what_is_on_disk()
            await scenario.before(stage)
            stage.faults.before[operation] = wait_there
            done = []

            async def put() -> None:
                while True:
                    done.append(await stage.broker.queue("q").put(b"new" * 300))

            task = asyncio.create_task(put())
            await until(entered.is_set)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            del stage.faults.before[operation]
            go_on.set()
            await stage.broker.check()
            await stage.broker.alter_queue("q", capacity_bytes=None)
            bodies = [body for _, body, _ in await leave_nothing_behind(stage.broker)]
            assert bodies.count(b"new" * 300) == len(done)

    run(scenario())
