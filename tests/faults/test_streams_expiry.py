"""Many durable subscriptions that expire at once, or were last open at another time: in steps, each with a commit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
from faults.seams import in_thread
from qflow.storage.log.keys import queue_key
from qflow.storage.log.transaction_log import Unit
from qflow.streams import sessions
from unit.clocks import Clock, open_still

MANY = 2 * sessions.EXPIRED_AT_ONCE + 10
EXPIRY_S = 100


@pytest.fixture
def clock() -> Clock:
    return Clock()


def opened(spool: Path, clock: Clock, many: int = MANY) -> qflow.Broker:
    """Open a spool whose stream has durable subscriptions that nobody has open, and one without an expiry."""
    broker = open_still(spool, clock)
    broker.declare_stream("s", topics=["t"])
    broker.subscribe("s", name="for good").close()
    for number in range(many):
        broker.subscribe("s", name=f"n{number}", session_expiry_s=EXPIRY_S).close()
    return broker


def names(broker: qflow.Broker) -> set[str | None]:
    return {subscription.name for subscription in broker.stats().streams["s"].subscriptions}


def test_subscriptions_that_expire_share_commits(spool: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step has one, lets go of the lock behind it, and tells whether there are more; a kill loses none."""
    monkeypatch.setattr(sessions, "AT_ONCE_S", 0)  # one step a call
    left: list[int] = []
    with opened(spool, clock) as broker:
        clock.advance(EXPIRY_S + 1)
        commits = broker.stats().commits_total
        more = True
        while more:
            more = broker.engine.streams.tick()
            left.append(len(names(broker)))
            if len(left) == 1:
                killed = inside.copy_as_killed(broker, spool.parent / "killed")
                broker.subscribe("s", name="new", session_expiry_s=EXPIRY_S).close()
        steps = -(-MANY // sessions.EXPIRED_AT_ONCE)
        assert left == [MANY + 1 - sessions.EXPIRED_AT_ONCE, MANY + 2 - 2 * sessions.EXPIRED_AT_ONCE, 2]
        assert broker.stats().commits_total - commits <= 2 * steps + 4
        assert broker.check() == []
    with open_still(killed, clock) as broker:
        assert len(names(broker)) <= MANY + 1 - sessions.EXPIRED_AT_ONCE  # maintenance may have taken a step before
        while broker.engine.streams.tick() or inside.upkeep(broker).remove_deleted():
            pass
        assert names(broker) == {"for good"}
        assert broker.check() == []


def test_subscriptions_that_stay_open_share_commits(spool: Path, clock: Clock) -> None:
    """When they were last open is written for many at once."""
    with opened(spool, clock, 0) as broker:
        held = [broker.subscribe("s", name=f"n{number}", session_expiry_s=EXPIRY_S) for number in range(MANY)]
        clock.advance(EXPIRY_S / 2)
        commits = broker.stats().commits_total
        while broker.engine.streams.tick():
            pass
        assert broker.stats().commits_total - commits <= 6
        killed = inside.copy_as_killed(broker, spool.parent / "killed")
        assert len(held) == MANY
    clock.advance(EXPIRY_S - 1)
    with open_still(killed, clock) as broker:
        while broker.engine.streams.tick():
            pass
        assert len(names(broker)) == MANY + 1


def test_subscriptions_that_are_left_share_commits(spool: Path, clock: Clock) -> None:
    """Each had a commit when it was closed: the end of who has thousands of them open took seconds."""
    with opened(spool, clock, 0) as broker:
        held = [broker.subscribe("s", name=f"n{number}", session_expiry_s=EXPIRY_S) for number in range(MANY)]
        clock.advance(EXPIRY_S / 5)
        commits = broker.stats().commits_total
        for subscription in held:
            subscription.close()
        assert broker.stats().commits_total == commits
        while broker.engine.streams.tick():
            pass
        assert 0 < broker.stats().commits_total - commits <= 6
        commits = broker.stats().commits_total
        while broker.engine.streams.tick():
            pass
        assert broker.stats().commits_total == commits
        killed = inside.copy_as_killed(broker, spool.parent / "killed")
    clock.advance(EXPIRY_S - 1)
    with open_still(killed, clock) as broker:
        while broker.engine.streams.tick():
            pass
        assert len(names(broker)) == MANY + 1


@pytest.mark.parametrize("room", [0, 1])
def test_a_full_disk_has_fewer_expire_in_a_commit(
    spool: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """What has no room at all is tried again; nobody has it meanwhile."""
    with opened(spool, clock) as broker:
        clock.advance(EXPIRY_S + 1)
        expiring = broker.engine.streams._sessions._expiring
        delete, sizes = expiring.delete, []

        def short(owners: list[int]) -> None:
            sizes.append(len(owners))
            if len(owners) > room:
                raise qflow.DiskFull("full")
            delete(owners)

        with monkeypatch.context() as patch:
            patch.setattr(expiring, "delete", short)
            with nullcontext() if room else pytest.raises(qflow.DiskFull):
                while broker.engine.streams.tick():
                    pass
        assert min(sizes) == 1
        if not room:
            broker.subscribe("s", name="n0").close()
        while broker.engine.streams.tick():
            pass
        assert names(broker) == ({"for good"} if room else {"for good", "n0"})
        assert broker.check() == []


def test_a_log_handler_that_raises_leaves_nothing_half_done(spool: Path, clock: Clock) -> None:
    """It is called with nothing held, when they are gone."""

    class Raising(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            in_thread(lambda: broker.subscribe("s").close())
            raise ValueError("a handler")

    logger, raising = logging.getLogger("qflow"), Raising()
    level = logger.level
    with opened(spool, clock, 3) as broker:
        clock.advance(EXPIRY_S + 1)
        logger.addFilter(raising)
        logger.setLevel(logging.INFO)
        try:
            broker.engine.streams.tick()
        finally:
            logger.setLevel(level)
            logger.removeFilter(raising)
        assert names(broker) == {"for good"}
        while broker.engine.streams.tick() or inside.upkeep(broker).remove_deleted():
            pass
        assert broker.check() == []


def test_what_expires_while_a_queue_is_declared_does_not_undo_it(
    spool: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maintenance knows nothing of what somebody else is about to hand over."""
    with opened(spool, clock, 1) as broker:
        clock.advance(EXPIRY_S + 1)
        log = broker.engine.log
        join: Callable[..., Any] = log.join

        def late(unit: Any, soon: bool = True) -> Any:
            monkeypatch.setattr(log, "join", join)
            in_thread(broker.engine.streams.tick)
            return join(unit, soon)

        monkeypatch.setattr(log, "join", late)
        broker.declare_queue("q").put(b"x")
        assert names(broker) == {"for good"}
        assert broker.queue("q").get(0).body == b"x"


def test_a_damaged_record_keeps_no_other_subscription_and_fails_no_commit(spool: Path, clock: Clock) -> None:
    """It is told once, and stays; what else expires goes, and who shares a commit does not hear of it."""
    with opened(spool, clock, 10) as broker:
        log = broker.engine.log
        cursor = broker.engine.streams.get("s").cursors["n4"]

        def damage(txn: Any) -> None:
            value = bytearray(txn.get(queue_key(cursor.owner)))
            value[10] ^= 0xFF
            txn.put(queue_key(cursor.owner), bytes(value))

        log.wait(log.join(Unit(writes=[damage])))
        clock.advance(EXPIRY_S + 1)
        failed = log.commits
        with pytest.raises(qflow.CorruptionError, match=f"the record of queue {cursor.owner}"):
            broker.engine.streams.tick()
        assert log.commits == failed
        while broker.engine.streams.tick():
            pass
        assert names(broker) == {"for good", "n4"}
