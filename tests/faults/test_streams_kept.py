"""What the log says of streams and subscriptions is kept: when it is damaged, of a later version, or half done."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lmdb
import pytest

import inside
import qflow
from faults.seams import in_thread
from qflow.broker import make_broker
from qflow.config import BrokerSettings
from qflow.queues.queue import parts_of
from qflow.storage.files import Files
from qflow.storage.log import recovery
from qflow.storage.log.keys import BLOCKS, QUEUES, key_of, queue_key
from qflow.storage.log.rows import new_row, write_row

STREAM, CURSOR = 1, 2
LAST = 2**64 - 1
Change = Callable[[Any], None]


def edit(spool: Path, change: Change) -> None:
    with lmdb.open(str(spool / "log"), map_size=2**30) as env, env.begin(write=True) as txn:
        change(txn)


def flip(spool: Path, key: bytes) -> None:
    """Damage a value."""

    def change(txn: Any) -> None:
        value = bytearray(txn.get(key))
        value[9] ^= 1
        txn.put(key, bytes(value))

    edit(spool, change)


def records(spool: Path, kind: str) -> list[int]:
    """Numbers of the records of a kind that are not deleted."""
    found: list[int] = []

    def look(txn: Any) -> None:
        for key, value in txn.cursor():
            if key[0] == QUEUES and f'"kind": "{kind}"'.encode() in value and b'"deleted": false' in value:
                found.append(int.from_bytes(key[1:], "big"))

    edit(spool, look)
    return found


@pytest.fixture
def written(spool: Path) -> Path:
    """A spool with a stream of ten messages that a subscription is still to get."""
    with qflow.open(spool) as broker:
        broker.declare_stream("s", topics=["t"], retain_until_consumed=True, retention_messages=1)
        broker.subscribe("s", name="panel", start="earliest").close()
        broker.publish_many([("t", b"%d" % number) for number in range(10)])
    return spool


# Damage --------------------------------------------------------------------------------------------------------------


def test_a_damaged_subscription_is_told_of_and_holds_back_what_it_is_to_get(written: Path) -> None:
    """It does not begin anew without a word; deleted, it can."""
    flip(written, key_of(BLOCKS, CURSOR, 0, LAST))
    with qflow.open(written) as broker:
        assert any("'panel' of stream 's' is damaged" in problem for problem in broker.recovery.problems)
        with pytest.raises(qflow.CorruptionError, match="delete_subscription removes it"):
            broker.subscribe("s", name="panel", start="latest")
        broker.stream("s").retain()
        assert broker.stream("s").stats().messages == 10
        assert "subscription 'panel' of stream 's' is damaged and is not served" in broker.check()
        broker.delete_subscription("s", "panel")
        with broker.subscribe("s", name="panel", start="earliest") as anew:
            assert anew.lag > 0
        assert broker.check() == []
    with qflow.open(written) as broker:
        assert broker.recovery.problems == ()


def test_a_damaged_stream_keeps_its_subscriptions(written: Path) -> None:
    """They are orphans only where there is no record, or one that says it was deleted."""
    edit(written, lambda txn: txn.put(b"kept", txn.get(queue_key(STREAM))))
    flip(written, queue_key(STREAM))
    with qflow.open(written) as broker:
        assert broker.streams() == []
        with inside.paused(broker):
            inside.upkeep(broker).remove_deleted()
    assert records(written, "cursor") == [CURSOR]
    edit(written, lambda txn: txn.put(queue_key(STREAM), txn.pop(b"kept")))
    with qflow.open(written) as broker, broker.subscribe("s", name="panel") as panel:
        assert panel.lag == 10


@pytest.mark.parametrize("what", ["setting", "filter", "kind", "cursor"])
def test_records_of_a_later_version_are_left_alone(written: Path, what: str) -> None:
    """The spool opens, and says what it does not serve."""
    settings = {"topics": ["a/#/b"] if what == "filter" else ["t"], "partitions": 100 if what == "setting" else 1}
    if what == "cursor":
        facts = {"stream": STREAM, "filter": "a/#/b", "group": False, "expiry_s": None, "seen_s": 0.0}
        key, value = queue_key(CURSOR), recovery.queue_value("panel", 0, facts, kind="cursor")
    else:
        kind = "table" if what == "kind" else "stream"
        key, value = queue_key(STREAM), recovery.queue_value("s", 0, settings, kind=kind)
    edit(written, lambda txn: txn.put(key, value))
    with qflow.open(written) as broker:
        assert len(broker.recovery.problems) == 1
        assert broker.streams() == (["s"] if what == "cursor" else [])
        if what == "cursor":
            with pytest.raises(qflow.CorruptionError):
                broker.subscribe("s", name="panel")
        elif what != "kind":
            with pytest.raises(qflow.CorruptionError, match="of a later version"):
                broker.stream("s")
        with inside.paused(broker):
            inside.upkeep(broker).remove_deleted()
    kept: list[bytes] = []
    edit(written, lambda txn: kept.append(txn.get(key)))
    assert kept == [value]


def test_two_streams_or_subscriptions_of_one_name_are_told_of(written: Path) -> None:
    """The first one is served; the second one stays, with its subscriptions."""

    def double(txn: Any) -> None:
        for owner in (STREAM, CURSOR):
            txn.put(queue_key(owner + 2), txn.get(queue_key(owner)))
            write_row(txn, owner + 2, 0, new_row(0))

    edit(written, double)
    with qflow.open(written) as broker:
        assert len(broker.recovery.problems) == 2
        assert broker.publish("t", b"x").offsets == {"s": 10}
        with broker.subscribe("s", name="panel") as panel:
            assert panel.lag == 11
        broker.delete_stream("s")
    with qflow.open(written) as broker:
        assert broker.stream("s").owner == STREAM + 2


# Half done -----------------------------------------------------------------------------------------------------------


def interrupted(broker: qflow.Broker, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    """Do something that is interrupted when its commit holds."""
    log = broker.engine.log
    wait = log.wait

    def stop(batch: Any) -> None:
        wait(batch)
        if threading.current_thread().name == "qflow-sheltered":  # which does it for this thread
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(log, "wait", stop)
        work()
        pytest.fail("it was not interrupted")


def test_what_was_interrupted_after_its_commit_is_there_once(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Declared or subscribed again, it is found; deleted, it is gone."""
    with qflow.open(spool) as broker:
        for _ in range(2):
            interrupted(broker, monkeypatch, lambda: broker.declare_stream("s", topics=["t"]))
            broker.declare_stream("s", topics=["t"])
            interrupted(broker, monkeypatch, lambda: broker.subscribe("s", name="panel"))
            broker.subscribe("s", name="panel").close()
            interrupted(broker, monkeypatch, lambda: broker.delete_subscription("s", "panel"))
            broker.delete_subscription("s", "panel")
            interrupted(broker, monkeypatch, lambda: broker.delete_stream("s"))
            broker.delete_stream("s")
        interrupted(broker, monkeypatch, lambda: broker.declare_stream("last", topics=["t"]))
    assert len(records(spool, "stream")) == 1
    assert records(spool, "cursor") == []


def test_a_delete_that_failed_can_be_repeated(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be deleted is known until that is written; declared meanwhile, it is deleted first."""
    with qflow.open(spool) as broker:
        for again in ("delete", "declare"):
            broker.declare_stream("s", topics=["t"])
            broker.publish("t", b"old")
            broker.subscribe("s", name="panel", start="earliest").close()
            with monkeypatch.context() as patch:
                patch.setattr(broker.engine.log._env, "make_room", no_room)
                with pytest.raises(qflow.DiskFull):
                    broker.delete_subscription("s", "panel")
                with pytest.raises(qflow.DiskFull):
                    broker.subscribe("s", name="panel")
                with pytest.raises(qflow.DiskFull):
                    broker.delete_stream("s")
                assert broker.publish("t", b"nobody has it").offsets == {}
                with pytest.raises(qflow.DiskFull):
                    broker.declare_stream("s", topics=["t"])
            if again == "delete":
                broker.delete_stream("s")
                assert broker.streams() == []
            else:
                assert broker.declare_stream("s", topics=["t"]).stats().messages == 0
                with pytest.raises(qflow.NotFound):
                    broker.delete_subscription("s", "panel")
    assert len(records(spool, "stream")) == 1


def no_room(*_: object, **__: object) -> None:
    raise qflow.DiskFull("the disk is full")


# Numbers -------------------------------------------------------------------------------------------------------------


def test_the_number_of_what_was_deleted_does_not_come_back(spool: Path) -> None:
    """What is written late under it is never taken for another's."""
    numbers = []
    for round_ in range(3):
        with qflow.open(spool) as broker:
            numbers.append(broker.declare_stream("s", topics=["t"]).owner)
            with broker.subscribe("s", name="panel") as panel:
                numbers.append(inside.cursor(panel).owner)
            numbers.append(parts_of(broker.declare_queue("q")).context.owner)
            broker.delete_queue("q")
            broker.delete_stream("s")
            with inside.paused(broker):
                while inside.upkeep(broker).remove_deleted():
                    pass
        assert records(spool, "stream") == records(spool, "queue") == []
        if round_ == 1:
            with qflow.open(spool) as broker:
                broker.compact()
    assert numbers == sorted(set(numbers))


def test_what_settles_a_subscription_is_done_before_it_is_deleted(written: Path) -> None:
    """Nothing of it is left in the log."""
    with qflow.open(written) as broker:
        inside.still(broker)  # maintenance writes, too
        panel = broker.subscribe("s", name="panel")
        batch = panel.get_many(10)
        order: list[str] = []
        join, settle = broker.engine.log.join, broker.engine.log.settle
        broker.engine.log.join = lambda *given: (order.append("write"), join(*given))[1]  # type: ignore[method-assign]
        broker.engine.log.settle = lambda *given: (order.append("settle"), settle(*given))[1]  # type: ignore[method-assign]
        broker.engine.spool.records.delete = late(broker.engine.spool.records.delete, batch[4].ack)  # type: ignore
        broker.delete_subscription("s", "panel")
        assert order == ["write"]


def late(work: Callable[[list[int]], None], ack: Callable[[], None]) -> Callable[[list[int]], None]:
    """Have somebody ack while it is written that a subscription is deleted."""

    def do(owners: list[int]) -> None:
        in_thread(ack)
        work(owners)
        in_thread(ack)

    return do


# A full disk ---------------------------------------------------------------------------------------------------------


class FullFiles(Files):
    """A disk that gives no more once it is full."""

    limit = 2**62

    def allocate(self, fd: int, size: int, start: int = 0) -> None:
        if size > self.limit:
            raise OSError(errno.ENOSPC, "full")
        super().allocate(fd, size, start)


def test_new_records_leave_acks_their_reserve(spool: Path) -> None:
    """Where a message is refused, so are new streams and subscriptions; who leaves, or deletes, is not."""
    files = FullFiles()
    with make_broker(spool, BrokerSettings(), files=files) as broker:
        broker.declare_stream("s", topics=["t"])
        queue = broker.declare_queue("q")
        queue.put_many([b"x" * 100] * 100)
        panel = broker.subscribe("s", name="panel", session_expiry_s=1000)
        facts = broker.engine.streams._sessions._facts[inside.cursor(panel)]
        files.limit = 0
        with suppress(qflow.DiskFull):
            while True:
                queue.put(bytes(20_000))
        with suppress(qflow.DiskFull):
            for number in range(10_000):
                broker.declare_stream(f"new {number}", topics=["new"])
            pytest.fail("streams take all there is")
        env = broker.engine.log._env
        confine = env.confine  # what is smaller than a stream finds no room, either
        env.confine = lambda *need, settles_only: settles_only and confine(*need, settles_only=True)  # type: ignore
        with pytest.raises(qflow.DiskFull):
            broker.subscribe("s", name="new")
        with pytest.raises(qflow.DiskFull):
            broker.subscribe("s", group="new")
        with pytest.raises(qflow.NotFound):
            broker.delete_subscription("s", "new")
        written_s = facts.written_s
        panel.close()
        assert facts.written_s == written_s
        with pytest.raises(qflow.DiskFull):
            broker.subscribe("s", name="panel", session_expiry_s=7)
        assert facts.expiry_s == 1000
        for _ in range(50):
            queue.get(0).ack(wait=True)
        broker.delete_stream("s")
