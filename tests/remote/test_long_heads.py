"""Calls that say much of many small messages: they are done, or refused before any of it is sent; nobody is cut off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qflow
import qflow.aio
from doors.event_loop import run, told
from qflow.remote.client import link
from qflow.remote.wire import frames

HEAD_BYTES = 2**12
COUNT = 1000
QUEUES = [f"q{number}" for number in range(20)]

Scenario = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound of what a head of a request takes that a thousand messages reach."""
    monkeypatch.setattr(frames, "MOST_HEAD_BYTES", HEAD_BYTES)
    monkeypatch.setattr(link, "MOST_HEAD_BYTES", HEAD_BYTES)


@pytest.fixture
def broker(owner: qflow.Broker) -> qflow.Broker:
    """The owner of queues, one of which has a message, and of a stream."""
    owner.declare_queues(QUEUES)[0].put(b"held")
    owner.declare_stream("s", topics=["t/#"], partitions=4)
    return owner


@pytest.fixture(params=["threads", "tasks"])
def drive(request: pytest.FixtureRequest, spool: Path) -> Callable[[Scenario], None]:
    """Run a scenario with a connection for threads, or for tasks, that holds a message, and is to go on doing so."""

    async def with_tasks(scenario: Scenario) -> None:
        async with qflow.aio.connect(spool) as remote:
            await _through(remote, scenario)

    async def with_threads(scenario: Scenario) -> None:
        with qflow.connect(spool) as remote:
            await _through(remote, scenario)

    return lambda scenario: run((with_tasks if request.param == "tasks" else with_threads)(scenario))


async def _through(remote: Any, scenario: Scenario) -> None:
    queue = await told(remote.queue("q0"))
    held = await told(queue.get(0))
    await scenario(remote)
    await told(held.ack(wait=True))
    assert len(await told(remote.queues())) == len(QUEUES)


def test_a_transaction_that_says_too_much_is_refused(broker: qflow.Broker, drive: Callable[[Scenario], None]) -> None:
    """As one that is too large; nothing of it is done."""

    async def scenario(remote: Any) -> None:
        tx = remote.transaction()
        for _ in range(COUNT):
            await told(tx.put("q1", b"x"))
        with pytest.raises(qflow.TransactionTooLarge, match=f"{HEAD_BYTES} bytes.*smaller"):
            await told(tx.commit())
        assert "rolled back" in repr(tx)

    drive(scenario)
    assert len(broker.queue("q1")) == 0


def test_messages_with_topics_and_keys_of_their_own_are_published(
    broker: qflow.Broker, drive: Callable[[Scenario], None]
) -> None:
    """However many there are; where they went is told of each."""
    messages = [(f"t/{number}", b"%d" % number, b"k%d" % number) for number in range(COUNT)]

    async def scenario(remote: Any) -> None:
        results = await told(remote.publish_many(messages))
        assert len({(result.partitions["s"], result.offsets["s"]) for result in results}) == COUNT

    drive(scenario)
    found = {(one.topic, one.body, one.key) for one in broker.stream("s").query()}
    assert found == set(messages)


def test_an_answer_is_as_long_as_it_is(broker: qflow.Broker, drive: Callable[[Scenario], None]) -> None:
    """Statistics of many queues take more than a request may say."""

    async def scenario(remote: Any) -> None:
        assert len((await told(remote.stats())).queues) == len(QUEUES)

    drive(scenario)


def test_an_answer_that_no_frame_holds_is_an_error_of_its_call(
    broker: qflow.Broker, drive: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a sentence."""
    monkeypatch.setattr(frames, "MOST_FRAME_BYTES", HEAD_BYTES)

    async def scenario(remote: Any) -> None:
        with pytest.raises(qflow.QflowError, match="answer.*less"):
            await told(remote.stats())

    drive(scenario)
