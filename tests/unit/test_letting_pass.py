"""What computes long lets threads pass that are at the log: counted in its steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

import inside
import qflow
from qflow.queues import browsing, registry
from qflow.queues.queue import parts_of
from qflow.storage.log import transaction_log
from qflow.storage.log.transaction_log import TransactionLog

Open = Callable[..., qflow.Broker]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Maintenance would do some of it, beside the test, which looks on in whatever thread lets others pass."""
    with inside.without_maintenance():
        yield


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Gets longer by one each time that this thread, or the one that works for it, lets others pass."""
    calls: list[None] = []
    monkeypatch.setattr(TransactionLog, "let_pass", lambda _: calls.append(None))
    return calls


def test_a_browse_shows_a_thousand_at_once(open_spool: Open, durable: bool, passed: list[None]) -> None:
    """In memory, spilled, delayed; many small parts are no step each."""
    broker = open_spool(capacity_bytes="1MiB")
    queue = broker.declare_queue("q", durable=durable)
    for delay_s in (None, 1000):
        queue.put_many([b"x" * 100] * 10_000, delay_s=delay_s)
    del passed[:]
    steps = [0]
    for _ in queue.browse():
        if len(passed) >= len(steps):
            steps.append(0)
        steps[-1] += 1
    assert sum(steps) == 20_000
    assert 10 <= len(steps) <= 30
    assert max(steps) < 2 * browsing.AT_ONCE
    del passed[:]
    few = broker.declare_queue("few", durable=durable)
    few.put_many([b"x"] * 10)
    held = few.get_many(10)
    for delivery in list(held)[::2]:
        delivery.nack()
    assert sum(1 for _ in few.browse()) == 5
    assert passed == []


def test_a_declaration_of_many_makes_a_few_at_once(open_spool: Open, durable: bool, passed: list[None]) -> None:
    broker = open_spool()
    del passed[:]
    queues = broker.declare_queues([f"q{number}" for number in range(50)], durable=durable)
    records_and_queues = 2 if durable else 1
    assert len(passed) == records_and_queues * 50 // registry.AT_ONCE
    for queue in queues:
        queue.put(b"x", durable=False)
    del passed[:]
    assert broker.check() == []
    assert len(passed) == 50 // registry.AT_ONCE


@pytest.mark.parametrize("busy", [True, False])
def test_it_waits_only_where_somebody_is_at_the_log(
    open_spool: Open, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_spool().engine.log
    waits: list[float] = []
    sleep, me = time.sleep, threading.get_ident()

    def note(seconds: float) -> None:
        if threading.get_ident() == me:
            waits.append(seconds)
        else:
            sleep(seconds)

    monkeypatch.setattr(TransactionLog, "busy", property(lambda _: busy))
    monkeypatch.setattr(time, "sleep", note)
    log.let_pass()
    assert waits == [transaction_log.PASS_S] * busy


@pytest.mark.parametrize("how", ["purge", "delete", "close"])
@pytest.mark.parametrize("delay_s", [None, 1000])
def test_what_is_dropped_is_let_go_of_a_thousand_at_once(
    open_spool: Open, durable: bool, delay_s: float | None, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million at once would keep the interpreter from all others for a quarter of a second; by no writer of the log."""
    passed: list[str] = []
    monkeypatch.setattr(TransactionLog, "let_pass", lambda _: passed.append(threading.current_thread().name))
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable)
    for number in range(20):
        queue.put_many([b"%d" % number] * 1000, delay_s=delay_s)
    exits = parts_of(queue).exits
    del passed[:]
    if how == "purge":
        assert queue.purge() == 20_000
    elif how == "delete":
        broker.delete_queue("q")
    else:
        broker.close()
    assert exits.dropped == []
    assert 20 <= len(passed) <= 100
    assert "qflow-writer" not in passed


@pytest.mark.parametrize("delay_s", [None, 1000])
def test_what_is_dropped_is_charged_until_it_is_freed(
    open_spool: Open, durable: bool, delay_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else others put as much meanwhile, and there is more in memory than the capacity. What a get holds is, too."""
    looks: list[Callable[[], object]] = []
    monkeypatch.setattr(TransactionLog, "let_pass", lambda _: [look() for look in looks])
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable)
    queue.put_many([b"held"] * 10)
    held = queue.get_many(10)
    for number in range(20):
        queue.put_many([b"%d" % number] * 1000, delay_s=delay_s)
    gate = parts_of(queue).gate
    charged = [gate.used]
    problems: list[str] = []

    def look() -> None:
        charged.append(gate.used)
        if len(charged) == 5:
            problems.extend(broker.check())

    looks.append(look)
    assert queue.purge() == 20_010
    assert len(charged) > 20
    assert all(before > after for before, after in pairwise(charged[:20]))
    assert charged[1] > charged[0] * 0.9
    assert (gate.used, gate.dropped) == (0, 0)
    assert problems == []
    held.ack()
    assert broker.check() == []


def test_what_an_interrupted_purge_has_dropped_is_freed_later(
    open_spool: Open, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    strikes: list[str] = []

    def strike(_: object) -> None:
        if threading.current_thread().name in strikes:
            raise KeyboardInterrupt

    monkeypatch.setattr(TransactionLog, "let_pass", strike)
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable)
    queue.put_many([b"x"] * 5000)
    strikes.append("qflow-sheltered")  # that works for this one
    try:
        with pytest.raises(KeyboardInterrupt):
            queue.purge()
    finally:
        del strikes[:]
    exits, gate = parts_of(queue).exits, parts_of(queue).gate
    assert broker.check() == []
    assert exits.dropped
    inside.upkeep(broker)._take_steps()
    assert not exits.dropped
    assert gate.dropped == gate.used == 0
