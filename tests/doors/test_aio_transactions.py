"""Transactions of tasks: several lanes of a queue at its limit, and what a cancelled one leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import qflow
import qflow.aio
from doors.event_loop import cancelled_at, heard, leave_nothing_behind, plain, run, turns
from drivers import opening_tasks
from qflow.aio.transaction import AsyncTogether
from qflow.queues.queue import parts_of

pytestmark = pytest.mark.two_drivers
MOST_AWAITS = 60


async def put_both(broker: Any, body: bytes) -> None:
    """Put a message into each of two lanes of a queue, in one transaction."""
    async with broker.transaction() as tx:
        await tx.put("q", body, priority=0)
        await tx.put("q", body, priority=1)


@pytest.mark.parametrize("durable", [True, False], ids=["durable", "transient"])
def test_a_transaction_with_two_lanes_never_waits_for_itself(spool: Path, durable: bool, access: str) -> None:
    """At the limit, puts go on when the queue is empty: what one lane of it has reserved must not hold the other up."""

    async def scenario() -> None:
        async with opening_tasks(access, partial(qflow.open, spool)) as broker:
            queue = await broker.declare_queue("q", priorities=2, durable=durable, limit_messages=2, resume_ratio=0.1)
            await queue.put_many([b"old", b"old"])
            tasks = [asyncio.create_task(put_both(broker, body)) for body in (b"1", b"2")]
            await turns()
            assert not any(task.done() for task in tasks)
            found = []
            for _ in range(6):
                async with await queue.get() as delivery:
                    found.append(delivery.body)
            await asyncio.gather(*tasks)
            assert found == [b"old", b"old", b"1", b"1", b"2", b"2"]
            assert await leave_nothing_behind(broker) == []

    run(scenario())


def test_bodies_and_publications_that_are_none_are_refused_as_for_a_thread(spool: Path, access: str) -> None:
    """At a queue and in a transaction, with the same words; an empty body in place of several put nothing."""

    async def scenario() -> None:
        async with opening_tasks(access, partial(qflow.open, spool)) as broker:
            queue = await broker.declare_queue("q")
            async with broker.transaction() as tx:
                for put_many in (queue.put_many, partial(tx.put_many, "q")):
                    for one, words in ((b"", "not one bytes"), ("text", "not one str"), (5, "iterable, not int")):
                        with pytest.raises(qflow.InvalidArgument, match=f"bodies must be .*{words}"):
                            await put_many(one)
            with pytest.raises(qflow.InvalidArgument, match="publish_many takes pairs"):
                await broker.publish_many(5)
            assert await leave_nothing_behind(broker) == []

    run(scenario())


@pytest.mark.parametrize("wrong", [5, None, "text"])
def test_what_is_no_delivery_is_refused_in_the_words_of_threads(spool: Path, wrong: Any, access: str) -> None:
    """By a queue and by a transaction, alone or in a list, where a bare error of Python came; nothing is settled."""

    async def scenario() -> None:
        async with opening_tasks(access, partial(qflow.open, spool)) as broker:
            queue = await broker.declare_queue("q")
            await queue.put(b"1")
            held, tx = await queue.get(), broker.transaction()
            several = [partial(queue.ack_many, [held, wrong])]
            alone = [partial(tx.ack, wrong), partial(tx.ack, [held]), partial(tx.ack_many, [held, wrong])]
            if wrong != "text":  # which has items
                several += [partial(queue.ack_many, wrong), partial(tx.ack_many, wrong)]
            name = type(wrong).__name__
            for call in several:
                with pytest.raises(qflow.InvalidArgument, match=f"^ack_many takes a batch or deliveries, not {name}$"):
                    await call()
            for call in alone:
                with pytest.raises(qflow.InvalidArgument, match=f"^ack takes a delivery, not ({name}|list)$"):
                    await call()
            await tx.commit()
            await held.ack()
            assert await leave_nothing_behind(broker) == []

    run(scenario())


def test_lanes_that_can_never_fit_together_are_refused(spool: Path, access: str) -> None:
    """As for a thread: each alone would fit, both never do; nothing is put."""

    async def scenario() -> None:
        async with opening_tasks(access, partial(qflow.open, spool)) as broker:
            await broker.declare_queue("q", priorities=2, limit_messages=1)
            with pytest.raises(qflow.InvalidArgument, match="limit_messages"):
                await put_both(broker, b"1")
            assert await leave_nothing_behind(broker) == []

    run(scenario())


def test_lanes_that_the_limit_turns_away_become_dead_letters_together(spool: Path, access: str) -> None:
    """All lanes of a queue share one fate, as for a thread."""

    async def scenario() -> None:
        async with opening_tasks(access, partial(qflow.open, spool)) as broker:
            settings: dict[str, Any] = {"on_overflow": qflow.Overflow.DEAD_LETTER, "dead_letter": "dead"}
            queue = await broker.declare_queue("q", priorities=2, limit_messages=2, **settings)
            await queue.put(b"old")
            await put_both(broker, b"new")
            assert (await queue.stats()).dead_lettered_total == 2
            found = await leave_nothing_behind(broker)
            assert sorted(found) == [("dead", b"new", 1), ("dead", b"new", 1), ("q", b"old", 1)]

    run(scenario())


@pytest.mark.parametrize("late", [False, True], ids=["at once", "when it has come"])
def test_a_spilled_transaction_that_is_cancelled_holds_no_delivery(spool: Path, late: bool, access: str) -> None:
    """Its bodies wait on disk, so a thread begins its commit: what it was to ack is held as before, or acked."""

    async def attempt(at: int) -> bool:
        async with opening_tasks(access, partial(qflow.open, spool / str(at), capacity_bytes=100_000)) as broker:
            await broker.declare_queue("to")
            queue = await broker.declare_queue("from")
            await queue.put(b"old")
            held = await queue.get()

            async def act() -> None:
                async with broker.transaction() as tx:
                    for _ in range(3):
                        await tx.put("to", bytes(40_000))
                    await tx.ack(held)

            task = asyncio.ensure_future(cancelled_at(act(), at, late))  # type: ignore[arg-type]
            await asyncio.wait([task])
            await heard(broker)
            assert not parts_of(plain(broker, "from")).held.leaving
            committed = len(plain(broker, "to")) == 3
            if committed:
                with pytest.raises(qflow.AlreadySettled):
                    await held.nack()
            else:
                await held.nack()
            found = await leave_nothing_behind(broker)
            assert found == ([("to", bytes(40_000), 1)] * 3 if committed else [("from", b"old", 2)])
            return task.cancelled()

    spool.mkdir()
    for at in range(MOST_AWAITS):
        if not run(attempt(at)):
            assert at > 0
            return
    raise AssertionError("it never came to its end")


class Late(Exception):
    """What a signal handler raises: no time is left."""


@pytest.mark.owner_only
@pytest.mark.parametrize(
    ("error", "told"), [(Late, "interrupted"), (qflow.InDoubt, "interrupted"), (qflow.DiskFull, "rolled back")]
)
def test_a_commit_that_ends_with_an_error_is_rolled_back_only_where_that_is_known(
    open_spool: Callable[..., qflow.Broker], error: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler's exception may come when all of it was handed over; the door has a test of its own."""
    commit = AsyncTogether.commit

    async def struck(together: AsyncTogether, *arguments: Any) -> Any:
        if told == "interrupted":
            await commit(together, *arguments)
        raise error

    async def scenario() -> None:
        broker = qflow.aio.AsyncBroker(open_spool())
        queue = await broker.declare_queue("q")
        transaction = broker.transaction()
        await transaction.put(queue, b"1")
        monkeypatch.setattr(AsyncTogether, "commit", struck)
        with pytest.raises(error):
            await transaction.commit()
        with pytest.raises(qflow.InvalidArgument, match=told):
            await transaction.commit()
        assert len(queue) == (told == "interrupted")

    run(scenario())
