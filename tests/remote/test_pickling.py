"""What is of a process is not pickled for another one, which is told how it gets the same."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qflow
import qflow.aio
from doors import event_loop
from drivers import DOOR, OWNER, joining

SENTENCE = r"cannot pickle or copy '{}' object: .* qflow\.connect\(path\)"


def check_refused(one: Any) -> None:
    """It says what it is, and what to do; it is no copy either."""
    for take in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match=SENTENCE.format(type(one).__qualname__)):
            take(one)


@pytest.mark.parametrize("access", [OWNER, DOOR])
def test_what_belongs_to_a_process_is_not_pickled(open_spool: Callable[..., Any], access: str) -> None:
    """A broker and what it makes, of the owner and of who is connected."""
    broker = open_spool()
    queue = broker.declare_queue("jobs")
    stream = broker.declare_stream("s", topics=["t"])
    with broker.subscribe("s") as subscription, queue.consume(lambda delivery: None) as consumer:
        for one in (broker, queue, stream, subscription, consumer, broker.transaction()):
            check_refused(one)
    other = broker.declare_queue("other")
    other.put_many([b"a", b"b", b"c"])
    check_refused(other.get())
    check_refused(other.get_many(2))


@pytest.mark.parametrize("access", [OWNER, DOOR])
def test_what_belongs_to_tasks_is_not_pickled(spool: Path, access: str) -> None:
    """As that of threads."""

    async def scenario() -> None:
        async with qflow.aio.open(spool) as owner, joining(access, owner) as broker:
            queue = await broker.declare_queue("jobs")
            await queue.put_many([b"a", b"b", b"c"])
            await broker.declare_stream("s", topics=["t"])
            async with broker.subscribe("s") as subscription:
                taken = await queue.get(), await queue.get_many(2)
                for one in (broker, queue, subscription, broker.transaction(), *taken):
                    check_refused(one)

    event_loop.run(scenario())


def test_what_is_told_of_them_is_pickled(open_spool: Callable[..., qflow.Broker]) -> None:
    """Figures and settings are plain values."""
    broker = open_spool()
    queue = broker.declare_queue("jobs")
    for one in (queue.stats(), queue.settings, broker.settings):
        assert pickle.loads(pickle.dumps(one)) == one
