"""`qflow.aio` where no event loop of asyncio runs, as under trio: a sentence, and nothing is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import qflow
import qflow.aio

SAYS = r"no event loop of asyncio runs here, .*`trio\.to_thread\.run_sync`"
CALLS: dict[str, Callable[[qflow.aio.AsyncBroker], Any]] = {
    "put": lambda broker: broker.queue("q").put(b"x"),
    "put with headers": lambda broker: broker.queue("q").put(b"x", headers={"a": 1}),
    "put with a key": lambda broker: broker.queue("q").put(b"x", dedupe_key="a"),
    "put_many": lambda broker: broker.queue("q").put_many([b"x", b"y"]),
    "submit": lambda broker: broker.queue("q").submit(b"x"),
    "publish": lambda broker: broker.publish("s", b"x"),
    "publish_many": lambda broker: broker.publish_many([("s", b"x"), ("q", b"x")]),
    "submit_publish": lambda broker: broker.submit_publish("s", b"x"),
    "get": lambda broker: broker.queue("held").get(),
    "get_many": lambda broker: broker.queue("held").get_many(5),
    "iterate": lambda broker: anext(broker.queue("held").iterate()),
    "consume": lambda broker: broker.queue("held").consume(print),
    "subscribe": lambda broker: broker.subscribe("s"),
    "purge": lambda broker: broker.queue("held").purge(),
    "declare_queue": lambda broker: broker.declare_queue("more"),
    "on_event": lambda broker: broker.on_event(print),
    "close": lambda broker: broker.close(),
    "open": lambda broker: qflow.aio.open(f"{broker.path} more"),
    "connect": lambda broker: qflow.aio.connect(broker.path),
}


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[qflow.Broker]:
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_queue("q", dedupe_window_s=60)
        broker.bind("q", "q")
        broker.declare_queue("held").put(b"held")
        broker.declare_stream("s", topics=["s"])
        yield broker


@pytest.mark.parametrize("name", CALLS)
def test_where_no_loop_of_asyncio_runs_nothing_is_done(name: str, broker: qflow.Broker) -> None:
    """A put raised what asyncio says, and was stored with the next one."""
    for_tasks = qflow.aio.AsyncBroker(broker)
    before = broker.stats().resident_bytes
    with pytest.raises(qflow.InvalidArgument, match=SAYS):
        CALLS[name](for_tasks).__await__().send(None)
    broker.queue("held").put(b"behind")
    assert broker.check() == []
    assert broker.stats().resident_bytes - before == len(b"behind") + 80
    assert (len(broker.queue("q")), broker.stream("s").stats().messages) == (0, 0)
    assert broker.queues() == ["held", "q"]
    assert not Path(f"{broker.path} more").exists()
