"""Attempts with growing waits, and several callbacks at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import qflow
import qflow.aio
from unit.clocks import LONG_S


def failed(times: int) -> Any:
    return SimpleNamespace(delivery_count=times)


def test_waits_grow_up_to_the_most() -> None:
    """By the factor, and within the jitter."""
    plain = qflow.Backoff("1s", factor=3, most_s="1m", jitter=0)
    assert [plain.delay_s(failures) for failures in (1, 2, 3, 4, 5, 9999)] == [1, 3, 9, 27, 60, 60]
    waits = {qflow.Backoff(10, jitter=0.5).delay_s(1) for _ in range(100)}
    assert len(waits) > 1
    assert all(5 <= wait <= 15 for wait in waits)
    error = ValueError("no such street")
    assert qflow.Backoff(1, jitter=0, max_attempts=2).terms(failed(1), error) == {
        "delay_s": 1,
        "reason": "ValueError: no such street",
    }
    assert qflow.Backoff(1, max_attempts=2).terms(failed(2), error)["requeue"] is False


@pytest.mark.parametrize(
    "options",
    [
        {"first_s": "soon"},
        {"most_s": -1},
        {"factor": 0.5},
        {"factor": float("nan")},
        {"jitter": 2},
        {"jitter": True},
        {"max_attempts": 0},
    ],
)
def test_a_bad_backoff_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(qflow.InvalidArgument):
        qflow.Backoff(**options)


@pytest.mark.two_drivers
def test_a_message_that_fails_is_tried_again_and_given_up(open_spool: Callable[..., Any]) -> None:
    """It waits between attempts, and is a dead letter after the last, with the reason; one that was settled is left."""
    broker = open_spool()
    jobs = broker.declare_queue("jobs", dead_letter="dead")
    dead = broker.declare_queue("dead")
    tries: list[tuple[bytes, int]] = []

    def fail(delivery: qflow.Delivery) -> None:
        tries.append((delivery.body, delivery.delivery_count))
        if delivery.body == b"settled":
            delivery.ack()
        raise ValueError("no such street")

    jobs.put_many([b"bad", b"settled"])
    with jobs.consume(fail, retry=qflow.Backoff("1ms", max_attempts=3)):
        letter = dead.get(LONG_S)
    assert letter.body == b"bad"
    assert letter.headers["dead_letter_nack_reason"] == "ValueError: no such street"
    letter.ack()
    assert sorted(tries) == [(b"bad", 1), (b"bad", 2), (b"bad", 3), (b"settled", 1)]
    assert len(jobs) == 0
    jobs.put(b"bad")
    seen = threading.Event()
    with jobs.consume(lambda delivery: seen.set() or fail(delivery), retry=qflow.Backoff("1d")):
        assert seen.wait(LONG_S)
    assert jobs.get_many(1, 0).bodies == []
    assert len(jobs) == 1


@pytest.mark.two_drivers
def test_so_many_callbacks_run_at_once_and_close_waits_for_all(open_spool: Callable[..., Any]) -> None:
    """Each in a thread of its own; what was not handed out goes back."""
    jobs = open_spool().declare_queue("jobs")
    jobs.put_many([b"%d" % number for number in range(8)])
    together, ended = threading.Barrier(4), []

    def work(delivery: qflow.Delivery) -> None:
        together.wait(LONG_S)
        ended.append(delivery.body)

    consumer = jobs.consume(work, prefetch=4, concurrency=4, name="mailer")
    while len(ended) < 8 and consumer.running and not together.broken:
        threading.Event().wait(0.001)
    assert consumer.close(LONG_S)
    assert not consumer.running
    assert sorted(ended) == [b"%d" % number for number in range(8)]
    assert len(jobs) == 0
    for options in ({"concurrency": 0}, {"prefetch": 0}, {"retry": 3}, {"concurrency": True}):
        with pytest.raises(qflow.InvalidArgument):
            jobs.consume(work, **options)


def test_tasks_retry_too(spool: Path) -> None:
    """Beside the broker, and through its door."""

    async def main() -> None:
        async with qflow.aio.open(spool) as broker, qflow.aio.connect(spool) as remote:
            here = await broker.declare_queue("jobs", dead_letter="dead")
            dead = await broker.declare_queue("dead")
            for jobs in (here, await remote.declare_queue("jobs", dead_letter="dead")):
                tries: list[int] = []

                async def fail(delivery: Any, tries: list[int] = tries) -> None:
                    tries.append(delivery.delivery_count)
                    raise ValueError("no such street")

                await jobs.put(b"bad")
                async with jobs.consume(fail, retry=qflow.Backoff("1ms", max_attempts=3), concurrency=2):
                    letter = await dead.get(LONG_S)
                await letter.ack(wait=True)
                assert tries == [1, 2, 3]

    asyncio.run(main())
