"""Two publishes that want the same queues never wait for each other, also where some of it becomes a dead letter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

import qflow
import qflow.aio
from qflow.queues import assembly
from qflow.queues.admission import Admission
from qflow.queues.assembly import Receipt
from qflow.queues.queue import parts_of
from qflow.queues.together import Together
from qflow.streams.partition import Partition

Open = Callable[..., qflow.Broker]
PATIENCE_S = 10.0
BODY = bytes(2_000_000)
"""More than a queue may have in memory: one put of those at a time passes alone."""


def _declared(broker: qflow.Broker, order: str) -> dict[str, qflow.Queue]:
    """Return queues, declared in this order; what goes into `full` is a dead letter, in `dead`."""
    queues = {name: broker.declare_queue(name, capacity_bytes="1MB") for name in order.split()}
    broker.alter_queue("full", limit_messages=1, on_overflow="dead_letter", dead_letter="dead")
    queues["full"].put(b"")
    for name, topic in (("full", "turned"), ("both", "turned"), ("both", "plain"), ("dead", "plain")):
        broker.bind(name, topic)
    return queues


def _who_waits_for(monkeypatch: pytest.MonkeyPatch, queue: qflow.Queue) -> Event:
    """Return what is set as soon as somebody waits for room in a queue."""
    waits, note_blocked = Event(), Admission.note_blocked

    def note(admission: Admission, putter: Any) -> None:
        note_blocked(admission, putter)
        if admission is parts_of(queue).admission:
            waits.set()

    monkeypatch.setattr(Admission, "note_blocked", note)
    return waits


def _published_at_redirect(
    monkeypatch: pytest.MonkeyPatch, threads: ThreadPoolExecutor, broker: qflow.Broker, comes: Event
) -> list[Any]:
    """Have a commit that is turned away go on when another publish was begun, which `comes` tells; return that one."""
    redirect = Together.redirect
    plain: list[Any] = []

    def redirect_late(*arguments: Any) -> Any:
        plain.append(threads.submit(broker.publish, "plain", BODY))
        assert comes.wait(PATIENCE_S)
        return redirect(*arguments)

    monkeypatch.setattr(Together, "redirect", redirect_late)
    return plain


def test_dead_letters_do_not_wait_for_who_waits_for_them(open_spool: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue of dead letters comes before one in which their commit has room: they wait for a while only."""
    broker = open_spool()
    queues = _declared(broker, "dead both full")
    waits = _who_waits_for(monkeypatch, queues["both"])

    with ThreadPoolExecutor() as threads:
        plain = _published_at_redirect(monkeypatch, threads, broker, waits)
        monkeypatch.setattr(assembly, "DEAD_LETTERS_S", 0.0)
        turned = threads.submit(broker.publish, "turned", BODY)
        try:
            with pytest.raises(qflow.QueueFull, match="'dead'"):
                turned.result(PATIENCE_S)
            assert dict(plain[0].result(PATIENCE_S).sequences) == {"dead": 0, "both": 0}
        finally:
            if not turned.done():
                broker.close()  # lets them go
    assert {name: len(queue) for name, queue in queues.items()} == {"dead": 1, "both": 1, "full": 1}


def test_dead_letters_have_no_room_while_their_commit_waits(open_spool: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue of dead letters comes behind one in which their commit waits for room."""
    broker = open_spool()
    queues = _declared(broker, "full both dead")
    waits, comes, prepare = _who_waits_for(monkeypatch, queues["both"]), Event(), Together._prepare

    with ThreadPoolExecutor() as threads:
        plain = _published_at_redirect(monkeypatch, threads, broker, comes)

        def prepare_late(together: Together, receipts: list[Receipt], *others: Any) -> None:
            if receipts[0].insert.queue.name == "dead" and not comes.is_set():
                comes.set()
                assert waits.wait(PATIENCE_S)
            prepare(together, receipts, *others)

        monkeypatch.setattr(Together, "_prepare", prepare_late)
        turned = threads.submit(broker.publish, "turned", BODY)
        try:
            results = [turned.result(PATIENCE_S), plain[0].result(PATIENCE_S)]
        finally:
            if not turned.done():
                broker.close()  # lets them go
    assert [dict(one.sequences) for one in results] == [{"full": None, "both": 1}, {"both": 0, "dead": 0}]
    assert {name: len(queue) for name, queue in queues.items()} == {"dead": 2, "both": 2, "full": 1}


@pytest.mark.parametrize("order", ["dead full too", "full too dead"])
@pytest.mark.parametrize("by_task", [False, True])
def test_dead_letters_do_not_wait_for_their_own_commit(open_spool: Open, order: str, by_task: bool) -> None:
    """Their queue has no memory but for what the same commit puts there, and is that of two that turn it away."""
    broker = open_spool()
    for name in order.split():
        broker.bind(broker.declare_queue(name, capacity_bytes="1MB"), "large")
    for name in ("full", "too"):
        broker.alter_queue(name, limit_messages=1, on_overflow="dead_letter", dead_letter="dead").put(b"")
    if by_task:
        result = asyncio.run(qflow.aio.AsyncBroker(broker).publish("large", BODY))
    else:
        result = broker.publish("large", BODY)
    assert result.sequences["full"] is result.sequences["too"] is None
    sources = []
    for _ in range(len(broker.queue("dead"))):
        with broker.queue("dead").get(timeout_s=0) as delivery:  # one at a time has room
            sources.append(delivery.headers.get("dead_letter_queue"))
    assert sorted(map(str, sources)) == ["None", "full", "too"]


def test_dead_letters_have_their_room_before_streams(open_spool: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has room in partitions waits for nothing else, since all who publish need that."""
    broker = open_spool()
    _declared(broker, "dead full both")
    broker.declare_stream("stream", topics=["turned"])
    order: list[str] = []
    preparing, at_once = Together.preparing, Partition.reserve_puts_at_once

    def prepare(together: Together, receipts: list[Receipt], *others: Any) -> Any:
        order.append(receipts[0].insert.queue.name)
        return preparing(together, receipts, *others)

    def reserve(*arguments: Any) -> bool:
        order.append("stream")
        return at_once(*arguments)

    monkeypatch.setattr(Together, "preparing", prepare)
    monkeypatch.setattr(Partition, "reserve_puts_at_once", reserve)
    broker.publish("turned", b"")
    assert order == ["full", "dead", "stream"]
