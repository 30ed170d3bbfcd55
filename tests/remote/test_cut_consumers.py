"""Consumers whose connection ends under them: whoever runs them hears of it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import qflow
import qflow.aio
from door_raw import until
from doors import event_loop
from other_owner import End, owned
from qflow.remote.client.threads import Connection


def check_told(caplog: pytest.LogCaptureFixture) -> None:
    """There is one warning, whatever number of threads or tasks the consumer had."""
    [told] = [one.getMessage() for one in caplog.records if one.name == "qflow"]
    assert "the consumer of queue 'jobs' has ended" in told
    assert "connect again" in told
    assert {(one.levelname, one.__dict__["queue"]) for one in caplog.records} == {("WARNING", "jobs")}


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_a_consumer_that_ends_with_its_connection_is_told_of(
    spool: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """It would be missed only by messages that nobody takes."""
    came = threading.Event()
    with caplog.at_level(logging.WARNING, "qflow"), owned(spool, how) as end, qflow.connect(spool) as remote:
        consumer = remote.queue("jobs").consume(lambda delivery: came.set(), concurrency=3)
        remote.queue("jobs").put(b"x")
        came.wait()
        end()
        until(lambda: not consumer.running)
    assert consumer.close()
    check_told(caplog)


def test_a_consumer_is_closed_as_its_connection_ends(
    spool: Path, owner: qflow.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look whether it has ended and what is told to the owner: there is nothing left to be told."""
    owner.declare_queue("jobs")
    with qflow.connect(spool) as remote:
        consumer = remote.queue("jobs").consume(lambda delivery: None)
    monkeypatch.setattr(Connection, "closed", False)
    assert consumer.close()


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_a_consumer_of_tasks_that_ends_with_its_connection_is_told_of(
    spool: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """As one of threads."""

    async def scenario(end: End) -> None:
        async with qflow.aio.connect(spool) as remote:
            came = asyncio.Event()
            consumer = remote.queue("jobs").consume(lambda delivery: came.set(), concurrency=3)
            await remote.queue("jobs").put(b"x")
            await came.wait()
            end()
            await event_loop.until(lambda: not consumer.running)
            await consumer.close()

    with caplog.at_level(logging.WARNING, "qflow"), owned(spool, how) as end:
        event_loop.run(scenario(end))
    check_told(caplog)


def test_a_consumer_that_its_program_ends_is_not_told_of(
    open_spool: Callable[..., qflow.Broker], spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By its own close, by that of its connection, or by that of the owner it is in."""
    owner = open_spool()
    jobs = owner.declare_queue("jobs")
    with caplog.at_level(logging.WARNING, "qflow"):
        with qflow.connect(spool) as remote:
            remote.queue("jobs").consume(lambda delivery: None).close()
            left = remote.queue("jobs").consume(lambda delivery: None)
            until(lambda: jobs.stats().consumers_total)
        embedded = jobs.consume(lambda delivery: None)

        async def scenario() -> None:
            async with qflow.aio.connect(spool) as tasks:
                await tasks.queue("jobs").consume(lambda delivery: None).close()
                tasks.queue("jobs").consume(lambda delivery: None)
                await event_loop.until(lambda: jobs.stats().consumers_total == 2)

        event_loop.run(scenario())
        owner.close()
        until(lambda: not left.running and not embedded.running)
    assert not caplog.records
