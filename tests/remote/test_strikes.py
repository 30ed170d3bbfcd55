"""Handlers that raise, at every place of a call through the door where one can strike."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

import qflow
import qflow.aio
from door_raw import until
from faults.strikes import Strike, Struck, places, reach
from qflow.streams.stream_log import StreamLog

MOST = 60
"""Places of each call that are struck in a normal run."""
NEVER = 2**60


def is_told(get: Callable[[], object]) -> bool:
    """Tell whether a get tells that messages are gone."""
    try:
        get()
    except qflow.GapError:
        return True
    return False


@pytest.mark.parametrize("way", ["get", "get_many", "none"])
def test_wherever_a_get_is_interrupted_its_message_is_there_for_the_next(
    owner: qflow.Broker, remote: qflow.RemoteBroker, way: str
) -> None:
    """On the way in, while it waits, and on the way out; also where there is nothing in time."""
    jobs = owner.declare_queue("jobs", durable=False)
    queue = remote.queue("jobs")
    if way != "none":
        jobs.put(b"x")
    got: list[Any] = []

    def get() -> None:
        if way == "get_many":
            got.append(queue.get_many(1))
        elif way == "get":
            got.append(queue.get())
        else:
            with pytest.raises(qflow.QueueEmpty):
                queue.get_nowait()

    def strike_at(at: int) -> tuple[Strike, bool]:
        strike = Strike(at)
        ended = strike.run(get)
        while got:
            got.pop().nack()
        return strike, ended

    strike_at(NEVER)
    for at in places(strike_at(NEVER)[0].seen, MOST, 1):
        strike, _ = reach(at, strike_at)
        until(lambda: jobs.stats().acquired_messages == 0, strike.where)


@pytest.mark.parametrize("way", ["get", "get_many", "stream", "subscribe"])
def test_wherever_a_get_of_a_task_is_interrupted_its_message_is_there_for_the_next(
    owner: qflow.Broker, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """Also where what came is lost: the connection ends then, and whoever waited is told."""
    caplog.set_level(logging.CRITICAL, "asyncio")  # which tells of that
    jobs = owner.declare_queue("jobs", durable=False)
    jobs.put(b"x")
    stream = owner.declare_stream("s", topics=["s"])
    assert isinstance(stream, StreamLog)
    owner.publish("s", b"x")
    with asyncio.Runner() as runner:

        async def connect() -> tuple[Any, Any]:
            broker = await qflow.aio.connect(owner.path)
            return broker, await broker.subscribe("s", name="n", start="earliest")

        got: list[Any] = []

        async def get(broker: Any, subscription: Any) -> None:
            async with asyncio.timeout(60):
                queue = broker.queue("jobs")
                calls = {"get": queue.get, "get_many": partial(queue.get_many, 1), "stream": subscription.get}
                calls["subscribe"] = partial(broker.subscribe, "s", name="m")
                got.append(await calls[way]())

        def held() -> int:
            cursors = stream.open_cursors()
            return jobs.stats().acquired_messages + sum(len(cursor.held.batches) for cursor in cursors)

        def strike_at(at: int) -> Strike:
            broker, subscription = runner.run(connect())

            def leave() -> None:
                if "asyncio" not in str(strike.where):  # a future of its own wakes nobody any more then
                    raise Struck

            strike = Strike(at, leave)
            with suppress(qflow.BrokerClosed, qflow.InDoubt):
                strike.run(lambda: runner.run(get(broker, subscription)))
                if got:
                    runner.run(got.pop().close() if way == "subscribe" else got.pop().nack())
                runner.run(broker.subscribe("s").__aenter__())  # which waits for one that is closed again
                until(lambda: held() == 0, strike.where)
                assert len(stream.open_cursors()) == 2, strike.where
                runner.run(subscription.close())
            runner.run(broker.close())
            until(lambda: not stream.open_cursors())
            return strike

        strike_at(NEVER)
        for at in places(strike_at(NEVER).seen, MOST, 1):
            strike_at(at)


@pytest.mark.parametrize("way", ["loop", "batches", "get"])
def test_wherever_a_subscriber_is_interrupted_each_message_comes_once_and_in_order(
    owner: qflow.Broker, remote: qflow.RemoteBroker, way: str
) -> None:
    """In a loop over a batch that is there, over batches of one, and in `get`: none is acked that was not returned."""
    owner.declare_stream("s", topics=["s"])
    subscription = remote.subscribe("s", start="earliest", name="n")
    loop = iter(subscription)
    take: Callable[[], Any] = subscription.get if way == "get" else loop.__next__
    got: list[Any] = []
    put = 0

    def publish() -> None:
        nonlocal put
        owner.publish("s", b"%d" % put)
        put += 1

    def strike_at(at: int) -> tuple[Strike, bool]:
        publish()
        strike, before = Strike(at), len(got)
        ended = strike.run(lambda: got.append(take()))
        if way == "get" and len(got) > before:
            got[-1].ack()
        return strike, ended

    for _ in range(150 if way == "loop" else 0):
        publish()
    strike_at(NEVER)
    for at in places(strike_at(NEVER)[0].seen, MOST, 1):
        reach(at, strike_at)
    while len(got) < put:
        got.append(take())
        if way == "get":
            got[-1].ack()
    assert [delivery.body for delivery in got] == [b"%d" % place for place in range(put)]


def test_wherever_the_closing_of_a_subscription_is_interrupted_it_is_open_or_closed(
    owner: qflow.Broker, remote: qflow.RemoteBroker
) -> None:
    """On both sides: a second `close` closes what is open, and of what is closed the owner holds nothing."""
    stream = owner.declare_stream("s", topics=["s"])
    owner.publish("s", b"x")

    def strike_at(at: int) -> tuple[Strike, bool]:
        subscription = remote.subscribe("s", start="earliest")
        subscription.get()
        strike = Strike(at)
        ended = strike.run(subscription.close)
        subscription.close()
        until(lambda: not stream.stats().subscriptions, strike.where)
        return strike, ended

    strike_at(NEVER)
    for at in places(strike_at(NEVER)[0].seen, MOST, 1):
        reach(at, strike_at)


def test_wherever_a_get_is_interrupted_that_tells_of_a_gap_one_is_told_of_it(
    owner: qflow.Broker, remote: qflow.RemoteBroker
) -> None:
    """By that get, or by the next."""
    stream = owner.declare_stream("s", topics=["s"], retention_messages=1)
    owner.publish_many([("s", b"x")] * 2)
    assert isinstance(stream, StreamLog)
    stream.retain()
    subscription = remote.subscribe("s", start="earliest", name="n")

    def strike_at(at: int) -> tuple[Strike, bool]:
        subscription.seek(0)
        strike = Strike(at)
        told = [is_told(lambda: strike.run(subscription.get)), is_told(subscription.get)]
        assert sorted(told) == [False, True], strike.where
        return strike, told[1]

    strike_at(NEVER)
    for at in places(strike_at(NEVER)[0].seen, MOST, 1):
        reach(at, strike_at)
