"""Puts that bear a key: one of each is stored within the window, in threads, in tasks, through the door and in crashes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qflow
import qflow.aio
from qflow.queues import dedupe
from qflow.queues.queue import parts_of
from qflow.storage.log import facts
from qflow.storage.log.transaction_log import TransactionLog
from unit.clocks import LONG_S, Clock

KILLED = """
import os, sys, qflow
queue = qflow.open(sys.argv[1]).declare_queue("jobs", dedupe_window_s="1h")
assert [queue.put(b"%d" % number, dedupe_key=f"key {number}") for number in range(50)] == list(range(50))
os._exit(9)
"""


def kept(broker: qflow.Broker) -> tuple[int, int]:
    """Return how many keys are in the log, and how many of their times."""
    return len(broker.engine.log.facts(dedupe.ROOM)), len(broker.engine.log.facts(dedupe.UNTIL))


@pytest.mark.two_drivers
def test_a_key_is_stored_once_within_the_window(open_at: Callable[..., Any], clock: Clock) -> None:
    """The second put returns the sequence of the first, also when that was settled; afterwards it is stored again."""
    queue = open_at().declare_queue("jobs", dedupe_window_s="10m", priorities=2)
    assert queue.put(b"a", dedupe_key="1") == 0
    assert queue.put(b"b", dedupe_key="2", headers={"n": 1}, priority=1, delay_s="1s") > 1
    assert queue.put(b"again", dedupe_key="1", timeout_s=1) == 0
    assert queue.put_nowait(b"again", dedupe_key="1") == 0
    queue.get().ack()
    assert queue.put(b"again", dedupe_key="1") == 0
    assert len(queue) == 1
    clock.advance(600)
    assert queue.put(b"later", dedupe_key="1") == 1
    assert queue.put(b"later", dedupe_key="1") == 1
    assert len(queue) == 2


def test_keys_outlive_the_owner_with_their_messages(spool: Path) -> None:
    """A process that is killed after its puts has stored both."""
    done = subprocess.run([sys.executable, "-c", KILLED, os.fspath(spool)], check=False, timeout=120)
    assert done.returncode == 9
    with qflow.open(spool) as broker:
        queue = broker.queue("jobs")
        assert len(queue) == 50
        assert [queue.put(b"again", dedupe_key=f"key {number}") for number in range(50)] == list(range(50))
        assert queue.put(b"new", dedupe_key="key 50") == 50
        assert len(queue) == 51


@pytest.mark.parametrize("known", [0, 3, 1000])
def test_keys_that_memory_has_not_are_found_in_the_log(open_at: Callable[..., qflow.Broker], known: int) -> None:
    """Memory is bounded, and nothing is stored twice."""
    broker = open_at()
    broker.engine.queues.keys._known_at_once = known
    queue = broker.declare_queue("jobs", dedupe_window_s=60)
    for _ in range(3):
        assert [queue.put(b"x", dedupe_key=f"{number}") for number in range(10)] == list(range(10))
    assert len(broker.engine.queues.keys._known) <= known
    assert len(queue) == 10


def test_what_has_expired_leaves_the_log(open_at: Callable[..., qflow.Broker], clock: Clock, monkeypatch: Any) -> None:
    """In bounded steps, and only what has; a key that was stored again meanwhile stays."""
    monkeypatch.setattr(dedupe, "REMOVED_AT_ONCE", 4)
    broker = open_at()
    queue = broker.declare_queue("jobs", dedupe_window_s=60)
    for number in range(10):
        queue.put(b"x", dedupe_key=f"{number}")
    keys = broker.engine.queues.keys
    while keys.forget_expired():
        pass
    assert kept(broker) == (10, 10)
    clock.advance(60)
    assert queue.put(b"y", dedupe_key="0") == 10
    assert keys.forget_expired()
    while keys.forget_expired():
        pass
    assert kept(broker) == (1, 1)
    assert queue.put(b"z", dedupe_key="0") == 10
    broker.delete_queue("jobs")
    clock.advance(60)
    while keys.forget_expired():
        pass
    assert kept(broker) == (0, 0)


def test_a_removal_that_fails_is_tried_again(
    open_at: Callable[..., qflow.Broker], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has to put with a key for that."""
    broker = open_at()
    broker.declare_queue("jobs", dedupe_window_s=60).put(b"x", dedupe_key="1")
    keys, fails = broker.engine.queues.keys, [True]
    remove = dedupe._remove

    def fail_once(*given: Any) -> None:
        if fails:
            fails.pop()
            raise OSError("no room, this once")
        remove(*given)

    monkeypatch.setattr(dedupe, "_remove", fail_once)
    clock.advance(60)
    with pytest.raises(OSError, match="no room"):
        keys.forget_expired()
    assert kept(broker) == (1, 1)
    while keys.forget_expired():
        pass
    assert kept(broker) == (0, 0)


def test_what_expires_after_an_opening_leaves_the_log_though_nobody_puts(
    open_at: Callable[..., qflow.Broker], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is to expire is looked for once, without a commit where nothing does."""
    with open_at() as broker:
        queue = broker.declare_queue("jobs", dedupe_window_s=60)
        for number in range(5):
            queue.put(b"x", dedupe_key=f"{number}")
    broker = open_at()
    keys, looks, commits = broker.engine.queues.keys, [], []
    page, write = broker.engine.log.facts_page, broker.engine.log.write
    monkeypatch.setattr(
        broker.engine.log, "facts_page", lambda *given, **named: looks.append(1) or page(*given, **named)
    )
    monkeypatch.setattr(broker.engine.log, "write", lambda *given: commits.append(1) or write(*given))
    for _ in range(3):
        assert not keys.forget_expired()
    assert (len(looks), len(commits)) == (1, 0)
    clock.advance(60)
    while keys.forget_expired():
        pass
    assert len(commits) == 1
    assert kept(broker) == (0, 0)


def test_memory_has_nothing_of_a_queue_that_was_deleted(open_at: Callable[..., qflow.Broker]) -> None:
    """Nor does a put that comes too late bring it back, or one that another queue's keys push out."""
    broker = open_at()
    keys = broker.engine.queues.keys
    keys._known_at_once = 3
    other = broker.declare_queue("other", dedupe_window_s=60)
    for number in range(20):
        queue = broker.declare_queue("jobs", dedupe_window_s=60)
        assert queue.put(b"x", dedupe_key="1") == 0
        broker.delete_queue("jobs")
        with pytest.raises(qflow.QueueDeleted):
            queue.put(b"x", dedupe_key="1")
        other.put(b"x", dedupe_key=f"{number}")
    assert len(keys._whole) == 1
    assert len(keys._known) == 3
    assert other.put(b"x", dedupe_key="0") == 0
    claim = keys.claim(parts_of(other).puts, "1", b"x")
    keys.forget(claim.place[0])
    assert keys.ask(claim) == 1


def test_a_put_that_fails_or_is_dropped_leaves_its_key_free(open_at: Callable[..., qflow.Broker]) -> None:
    """Nothing was stored, so the next put with the key is a first one."""
    broker = open_at()
    queue = broker.declare_queue("jobs", dedupe_window_s=60, limit_messages=1)
    queue.put(b"fills it", dedupe_key="1")
    with pytest.raises(qflow.QueueFull):
        queue.put(b"x", dedupe_key="2", timeout_s=0)
    assert queue.put(b"again", dedupe_key="1", timeout_s=0) == 0
    broker.alter_queue("jobs", on_overflow=qflow.Overflow.DROP_NEWEST)
    assert queue.put(b"x", dedupe_key="2") is None
    queue.get().ack()
    assert queue.put(b"x", dedupe_key="2") == 1
    assert kept(broker) == (2, 2)


def test_puts_with_one_key_at_once_wait_for_the_first(open_at: Callable[..., qflow.Broker]) -> None:
    """If that is refused, another takes its place; who does not wait so long is told."""
    broker = open_at()
    queue = broker.declare_queue("jobs", dedupe_window_s=60)
    keys = broker.engine.queues.keys
    claim = keys.claim(parts_of(queue).puts, "1", b"x")
    assert keys.ask(claim) is None
    with pytest.raises(qflow.ProducerBusy, match="dedupe_key '1'"):
        queue.put(b"x", dedupe_key="1", timeout_s=0)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(queue.put(b"x", dedupe_key="1"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    claim.give_up()
    for thread in threads:
        thread.join(LONG_S)
    assert found == [0] * 4
    assert len(queue) == 1


def test_tasks_put_once_too(spool: Path) -> None:
    """At the same time, beside the broker and through its door; one that is cancelled leaves the key free."""

    async def main() -> None:
        async with qflow.aio.open(spool) as broker, qflow.aio.connect(spool) as remote:
            queue = await broker.declare_queue("jobs", dedupe_window_s=60, limit_messages=2)
            there = remote.queue("jobs")
            there = await there if asyncio.iscoroutine(there) else there
            puts = [one.put(b"x", dedupe_key="1") for one in (queue, there) for _ in range(5)]
            assert await asyncio.gather(*puts) == [0] * 10
            assert await queue.put(b"y", dedupe_key="2") == 1
            waiting = asyncio.create_task(queue.put(b"z", dedupe_key="3"))
            follower = asyncio.create_task(queue.put(b"z", dedupe_key="3"))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await (await queue.get()).ack(wait=True)
            assert await follower == 2
            assert len(queue) == 2

    asyncio.run(main())


@pytest.mark.two_drivers
def test_bad_keys_are_refused(open_spool: Callable[..., Any]) -> None:
    """With a sentence; nothing is stored."""
    broker = open_spool()
    queue = broker.declare_queue("jobs", dedupe_window_s=60)
    for bad in ("", "x" * 256, "\ud800", 7, b"x"):
        with pytest.raises(qflow.InvalidArgument, match="dedupe_key must be a text of 1 to 255 bytes"):
            queue.put(b"x", dedupe_key=bad)
    with pytest.raises(qflow.InvalidArgument, match="durable=False do not go together"):
        queue.put(b"x", dedupe_key="1", durable=False)
    with pytest.raises(qflow.InvalidArgument, match="needs a durable queue with dedupe_window_s"):
        broker.declare_queue("plain").put(b"x", dedupe_key="1")
    for settings in ({"dedupe_window_s": 0}, {"dedupe_window_s": 60, "durable": False}):
        with pytest.raises(qflow.InvalidArgument, match="dedupe_window_s"):
            broker.declare_queue("bad", **settings)
    assert queue.put(b"x", dedupe_key="é\0\n" * 50) == 0
    assert len(queue) == 1


def test_a_damaged_key_is_told_of(open_at: Callable[..., qflow.Broker]) -> None:
    """`check` names it."""
    broker = open_at()
    queue = broker.declare_queue("jobs", dedupe_window_s=60)
    queue.put(b"x", dedupe_key="1")
    (name,) = broker.engine.log.facts(dedupe.ROOM)
    log = broker.engine.log
    log.commit(log.write(lambda txn: txn.put(facts.fact_key(dedupe.ROOM, name), b"damaged")))
    problems = broker.check()
    assert any("of 'dedupe'" in problem for problem in problems)
    log.commit(log.write(lambda txn: txn.delete(facts.fact_key(dedupe.ROOM, name))))


@pytest.mark.owner_only
def test_keys_are_read_where_no_signal_handler_strikes(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that closes the broker would wait for the end of the read, and for its own thread."""
    read: list[bool] = []

    def told(name: str) -> None:
        real = getattr(TransactionLog, name)

        def tell(log: TransactionLog, *arguments: Any) -> Any:
            read.append(threading.current_thread() is threading.main_thread())
            return real(log, *arguments)

        monkeypatch.setattr(TransactionLog, name, tell)

    with qflow.open(spool) as broker:
        broker.declare_queue("q", dedupe_window_s=100).put(b"1", dedupe_key="k")
    told("facts_page")
    told("fact")
    with qflow.open(spool) as broker:
        assert broker.queue("q").put(b"1", dedupe_key="k") == 0
    assert read == [False] * len(read) != []
