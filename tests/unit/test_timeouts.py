"""Time-outs that are none: refused by name where they are given, before anything is done."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qflow
import qflow.aio
from faults.seams import in_thread

WRONG = ["soon", float("nan"), -1, True, [1]]
PUTS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "put": lambda broker, queue, wrong: queue.put(b"x", timeout_s=wrong),
    "put not logged": lambda broker, queue, wrong: queue.put(b"x", durable=False, timeout_s=wrong),
    "put with headers": lambda broker, queue, wrong: queue.put(b"x", headers={"a": 1}, timeout_s=wrong),
    "put_many": lambda broker, queue, wrong: queue.put_many([b"x"], timeout_s=wrong),
    "put_many nothing": lambda broker, queue, wrong: queue.put_many([], timeout_s=wrong),
    "submit": lambda broker, queue, wrong: queue.submit(b"x", timeout_s=wrong),
    "publish": lambda broker, queue, wrong: broker.publish(queue.name, b"x", timeout_s=wrong),
    "publish to nobody": lambda broker, queue, wrong: broker.publish("nobody", b"x", timeout_s=wrong),
    "publish_many": lambda broker, queue, wrong: broker.publish_many([(queue.name, b"x")], timeout_s=wrong),
    "submit_publish": lambda broker, queue, wrong: broker.submit_publish(queue.name, b"x", timeout_s=wrong),
    "get": lambda broker, queue, wrong: queue.get(timeout_s=wrong),
    "get_many": lambda broker, queue, wrong: queue.get_many(1, timeout_s=wrong),
    "transaction": lambda broker, queue, wrong: broker.transaction(timeout_s=wrong),
}


@pytest.fixture(params=["threads", "tasks"])
def refuse(request: pytest.FixtureRequest) -> Callable[[qflow.Broker, qflow.Queue, str, Any], None]:
    """Make a call in another thread, which takes other ways than the main one; or in a task."""

    def call(broker: qflow.Broker, queue: qflow.Queue, name: str, wrong: Any) -> None:
        if request.param == "threads":
            in_thread(lambda: PUTS[name](broker, queue, wrong))
            return

        async def whole() -> None:
            tasks = qflow.aio.AsyncBroker(broker)
            made = PUTS[name](tasks, tasks.queue(queue.name), wrong)
            if inspect.isawaitable(made):
                await made

        asyncio.run(whole())

    return call


@pytest.mark.parametrize("name", PUTS)
@pytest.mark.parametrize("durable", [True, False], ids=["durable", "transient"])
def test_a_time_out_that_is_none_is_refused_by_name(
    refuse: Callable[..., None], name: str, durable: bool, spool: Path
) -> None:
    """Nothing is stored, also where there is room at once, so that nothing would be waited for."""
    with qflow.open(spool, door=False) as broker:
        queue = broker.declare_queue("q", durable=durable)
        broker.bind("q", "q")
        broker.declare_stream("s", topics=["q"])
        for _ in range(2):  # from then on there is room that was given to the queue before
            queue.put_many([b"x"] * 10)
            broker.publish("q", b"x")
            queue.purge()
        published = broker.stream("s").stats().next_offsets
        for wrong in WRONG:
            with pytest.raises(qflow.InvalidArgument, match="timeout_s"):
                refuse(broker, queue, name, wrong)
        assert len(queue) == 0
        assert broker.stream("s").stats().next_offsets == published
        assert broker.stats().unrouted_total == 0
