"""Queues and streams of another spool are refused at the door; those of the same one are taken, whoever made them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import qflow
import qflow.aio
from doors.event_loop import run

ON_QUEUES: dict[str, Callable[[Any, Any], Any]] = {
    "alter_queue": lambda broker, queue: broker.alter_queue(queue, limit_messages=5),
    "bind": lambda broker, queue: broker.bind(queue, "t"),
    "unbind": lambda broker, queue: broker.unbind(queue, "t"),
    "schedule": lambda broker, queue: broker.schedule("nightly", queue, b"x", every_s=60),
    "put": lambda broker, queue: broker.transaction().put(queue, b"x"),
    "put_many": lambda broker, queue: broker.transaction().put_many(queue, [b"x"]),
    "put_many of nothing": lambda broker, queue: broker.transaction().put_many(queue, []),
    "delete_queue": lambda broker, queue: broker.delete_queue(queue),
}
ON_STREAMS: dict[str, Callable[[Any, Any], Any]] = {
    "alter_stream": lambda broker, stream: broker.alter_stream(stream, retention_messages=5),
    "stream": lambda broker, stream: broker.stream(stream),
    "subscribe": lambda broker, stream: broker.subscribe(stream),
    "delete_subscription": lambda broker, stream: broker.delete_subscription(stream, "kept"),
    "delete_stream": lambda broker, stream: broker.delete_stream(stream),
}
CALLS = ON_QUEUES | ON_STREAMS


@pytest.fixture
def other(tmp_path: Path, owner: qflow.Broker) -> Any:
    """The broker of another spool, where all has the same names."""
    with qflow.open(tmp_path / "other") as broker:
        for one in (owner, broker):
            one.declare_queue("q")
            one.bind("q", "t")
            one.declare_stream("s", topics=["t"])
            one.subscribe("s", name="kept").close()
        yield broker


def of(call: str, broker: Any) -> Any:
    """Return the queue of a broker, or its stream, as the call takes it."""
    return broker.queue("q") if call in ON_QUEUES else broker.stream("s")


def refused(one: object) -> str:
    """Return the words of the owner for what is another broker's."""
    return f"^{re.escape(repr(one))} is a (queue|stream) of another broker: use the one it came from$"


@pytest.mark.parametrize("call", CALLS)
def test_what_is_of_another_spool_is_refused(
    call: str, owner: qflow.Broker, other: qflow.Broker, remote: qflow.RemoteBroker
) -> None:
    """As beside the owner, and with its words: a queue of the same name was taken for it."""
    with qflow.connect(other.path) as far:
        for broker, one in ((owner, of(call, other)), (remote, of(call, other)), (remote, of(call, far))):
            with pytest.raises(qflow.InvalidArgument, match=refused(one)):
                CALLS[call](broker, one)
    assert (owner.queues(), owner.streams(), owner.schedules()) == (["q"], ["s"], [])
    assert owner.queue("q").settings.limit_messages is None


@pytest.mark.parametrize("call", CALLS)
def test_what_is_of_another_spool_is_refused_for_tasks(call: str, owner: qflow.Broker, other: qflow.Broker) -> None:
    """As for threads, also what is known there at once."""

    async def scenario() -> None:
        async with qflow.aio.connect(owner.path) as broker, qflow.aio.connect(other.path) as far:
            for one in (of(call, far), of(call, qflow.aio.AsyncBroker(other))):
                with pytest.raises(qflow.InvalidArgument, match=refused(one)):
                    await awaited(CALLS[call](broker, one))

    run(scenario())
    assert (owner.queues(), owner.streams(), owner.schedules()) == (["q"], ["s"], [])


async def awaited(what: Awaitable[Any] | Any) -> Any:
    """Return what is awaited, as far as it is to be."""
    return await what if hasattr(what, "__await__") else what


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("source", ["owner", "its tasks", "earlier connection", "task's connection"])
def test_what_is_of_the_same_spool_is_taken(
    call: str, source: str, owner: qflow.Broker, other: qflow.Broker, remote: qflow.RemoteBroker
) -> None:
    """Of the owner itself, and of a connection that has ended."""

    async def scenario() -> Any:
        async with qflow.aio.connect(owner.path) as far:
            return of(call, far)

    if source == "earlier connection":
        with qflow.connect(owner.path) as earlier:
            one = of(call, earlier)
    elif source == "task's connection":
        one = run(scenario())
    else:
        one = of(call, owner if source == "owner" else qflow.aio.AsyncBroker(owner))
    CALLS[call](remote, one)
    assert owner.queues() == ([] if call == "delete_queue" else ["q"])
    assert owner.streams() == ([] if call == "delete_stream" else ["s"])


@pytest.mark.parametrize("call", CALLS)
def test_what_is_neither_a_queue_nor_a_name_is_refused_in_the_words_of_the_owner(
    call: str, owner: qflow.Broker, other: qflow.Broker, remote: qflow.RemoteBroker
) -> None:
    """Also a stream in place of a queue, and the other way round, which was taken by its name."""
    subscription = remote.subscribe("s", name="q")
    wrong = remote.stream("s") if call in ON_QUEUES else remote.queue("q")
    for one in (wrong, subscription, 5):
        kind = "queue" if call in ON_QUEUES else "stream"
        with pytest.raises(qflow.InvalidArgument, match=f"^a {kind} name must be str, not {type(one).__name__}$"):
            CALLS[call](remote, one)
