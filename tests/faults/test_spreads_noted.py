"""One message into many durable queues, in the journal: one short record of them all, that a crash brings back."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import lmdb
import pytest

import inside
import qflow
import qflow.inspect
from faults.seams import Faults, drained, faulty_broker
from faults.test_spreads import bound
from qflow.errors import CorruptionError
from qflow.identity import uuid_of
from qflow.storage.blocks import BlockKey, read_header
from qflow.storage.encoding import Messages, encode
from qflow.storage.environment import CannotGrow, Environment
from qflow.storage.log import alike, carrying, confirming, journal, spreading, writer
from qflow.storage.log.alike import Alike
from qflow.storage.log.changes import played
from qflow.storage.log.journal import HEADER_BYTES, JOURNAL, Head
from qflow.storage.log.keys import BLOCKS, key_of, parts_of
from qflow.storage.log.rows import read_row
from qflow.storage.log.table import LAST


@pytest.fixture(autouse=True)
def never_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a journal from the first small batch on, and have the log take over what it holds at the end only."""
    monkeypatch.setattr(confirming, "FIRST_BATCHES", 0)
    monkeypatch.setattr(writer, "SOON_S", 1000)
    monkeypatch.setattr(confirming, "LATE_S", 1000)


def opened(path: Path, **settings: Any) -> qflow.Broker:
    broker = qflow.open(path, **settings)
    inside.still(broker)
    return broker


def journaled(broker: qflow.Broker) -> tuple[int, int]:
    """Return how many records wait in the journal for the log, and how long it is."""
    one = broker.engine.log._writer._confirming.journal
    assert one is not None
    return broker.stats().journal_records, one.position


def crashed(broker: qflow.Broker, path: Path) -> Path:
    """Return a copy of the spool as it would be found if its owner died now."""
    shutil.copytree(broker.path, path, ignore=shutil.ignore_patterns("lock.mdb", "spill", "door", "stats.json*"))
    return path


def pairs(path: Path) -> dict[bytes, Any]:
    """Return the rows and blocks of the queues of a closed spool, but for how a row says that there was a crash.

    And but for blocks of which all is settled: where notes settle it, a recovery leaves them to the next batch.
    """
    with lmdb.open(str(path / "log"), readonly=True, lock=False, create=False) as env, env.begin() as txn:
        found: dict[bytes, Any] = {}
        for key, value in txn.cursor():
            if key[0] != BLOCKS:
                continue
            _, owner, lane, number = parts_of(key)
            row = read_row(txn, owner, lane)
            if number == LAST:
                found[key] = row._replace(doubtful=0)
            elif read_header(value, where="a block").end > row.floor:
                found[key] = value
        return found


def test_a_publish_is_one_record_that_grows_by_four_bytes_a_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no commit of the log, though it is for more queues than a batch of puts may be. Pages are changed once."""
    number = confirming.FEW_LANES + 50
    changed: list[int] = []
    items = spreading._items
    monkeypatch.setattr(spreading, "_items", lambda lanes, *rest: changed.append(len(lanes)) or items(lanes, *rest))
    with opened(tmp_path) as broker:
        bound(broker, number)
        broker.publish("t", b"0")
        broker.publish("t", b"1")
        commits, (records, before) = broker.stats().commits_total, journaled(broker)
        changed.clear()
        for body in range(2, 12):
            broker.publish("t", b"%d" % body)
        assert journaled(broker)[0] == records + 10
        assert (journaled(broker)[1] - before) / 10 < 4 * number + 600
        assert broker.stats().commits_total - commits == 10
        assert changed in ([], [number])
    assert changed in ([number], [number] * 2)
    with opened(tmp_path) as broker:
        assert broker.recovery.problems == ()
        assert all(drained(broker.queue(name)) == [b"%d" % body for body in range(12)] for name in broker.queues())


def test_a_commit_holds_what_was_to_be_put_late(tmp_path: Path) -> None:
    """One that a publish itself makes, for the journal is full."""
    commits = 0
    with opened(tmp_path / "spool", journal_bytes="8KiB") as broker:
        bound(broker, 40)
        for number in range(40):
            broker.publish("t", b"%d" % number)
            if number and broker.stats().journal_records == 0:
                commits += 1
                with opened(crashed(broker, tmp_path / f"copy{number}")) as after:
                    assert after.recovery.problems == ()
                    assert {len(after.queue(name)) for name in after.queues()} == {number + 1}
    assert commits > 2


def test_what_a_crash_brings_back_is_what_the_log_would_hold(tmp_path: Path) -> None:
    """Byte for byte, after any history, whether it is seen from outside or carried over."""
    chance = random.Random(5)
    broker = opened(tmp_path / "spool", journal_bytes="1MiB")
    queues = bound(broker, 8)
    expected: list[list[bytes]] = [[] for _ in queues]
    noted = 0
    for number in range(120):
        body = b"%d " % number * chance.choice([1, 3, 30, 300])
        broker.publish("t", body)
        for lot in expected:
            lot.append(body)
        at, step = chance.randrange(len(queues)), chance.random()
        if step < 0.1:
            queues[at].put(body)
            expected[at].append(body)
        elif step < 0.2:
            batch = queues[at].get_many(chance.choice([1, 5, 100]))
            batch.ack(wait=True)
            del expected[at][: len(batch)]
        elif step < 0.25:
            queues[at].purge()
            expected[at].clear()
        if number % 8 == 0:
            noted += journaled(broker)[0]
            copy = crashed(broker, tmp_path / f"copy{number}")
            assert [one.messages for one in qflow.inspect.read_spool(copy).queues] == list(map(len, expected))
            assert qflow.inspect.check_spool(copy) == []
            with opened(copy, journal="off") as after:
                assert after.recovery.problems == ()
                assert after.check() == []
                for name, lot in zip(after.queues(), expected, strict=True):
                    assert drained(after.queue(name)) == lot
    assert noted > 100
    copy = crashed(broker, tmp_path / "last")
    broker.close()
    opened(copy, journal="off").close()
    assert pairs(copy) == pairs(tmp_path / "spool")


def test_a_map_that_is_full_is_grown_under_publishes_that_the_journal_holds(tmp_path: Path) -> None:
    faults = Faults()
    with faulty_broker(tmp_path, faults, journal="auto") as broker:
        inside.still(broker)  # it reads the log, which has that take over what the journal holds
        queues = bound(broker)
        for number in range(6):
            broker.publish("t", b"%d" % number)
        assert broker.stats().journal_records
        faults.fail("commit", lmdb.MapFullError("full"), times=1)
        broker.publish("t", b"x" * confirming.SMALL_BYTES)
        assert broker.stats().journal_records == 0
        bodies = [b"%d" % number for number in range(6)] + [b"x" * confirming.SMALL_BYTES]
        assert all(drained(queue) == bodies for queue in queues)
        assert broker.check() == []


def test_a_crash_that_leaves_many_queues_to_be_written_grows_the_map(tmp_path: Path) -> None:
    """What a record stands for is a hundred times what it is."""
    with opened(tmp_path / "spool", journal_bytes="1MiB") as broker:
        bound(broker, 1000)
        for number in range(3):
            broker.publish("t", b"%d" % number * 400)
        assert journaled(broker)[0] >= 2
        copy = crashed(broker, tmp_path / "copy")
    with opened(copy) as after:
        assert after.recovery.problems == ()
        assert {len(after.queue(name)) for name in after.queues()} == {3}
        assert after.check() == []


def test_a_disk_that_is_full_as_the_journal_is_carried_over_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file has no room for it either, as one that was copied without its reserve. Nothing is lost."""
    with opened(tmp_path / "spool") as broker:
        bound(broker, 150)
        for number in range(3):
            broker.publish("t", b"%d" % number)
        copy = crashed(broker, tmp_path / "copy")
    wanted: list[int] = []

    def make_room(env: Environment, value_bytes: int, values: int, **_: object) -> None:
        wanted.append(values)
        raise CannotGrow("full")

    def confine(env: Environment, *_: object, **__: object) -> int:
        env.confined = True
        return 1

    def play(*_: object) -> int:
        raise lmdb.MapFullError("full")

    with monkeypatch.context() as patch:
        patch.setattr(Environment, "make_room", make_room)
        patch.setattr(Environment, "confine", confine)
        patch.setattr(carrying, "_play", play)
        with pytest.raises(qflow.DiskFull, match="has no room for what the journal .* give it some"):
            opened(copy)
    assert wanted[0] >= 2 * 150, "a row and a block of each queue"
    with opened(copy) as after:
        assert {len(after.queue(name)) for name in after.queues()} == {3}


def test_queues_in_too_many_states_are_committed(tmp_path: Path) -> None:
    """A record that has a block of each is as long as what it stands for."""
    with opened(tmp_path) as broker:
        queues = bound(broker, 100)
        for index, queue in enumerate(queues):
            queue.put(b"%d" % index * 700)
        broker.publish("t", b"0")
        broker.publish("t", b"1")
        assert broker.stats().journal_records == 0
        assert all(drained(queue)[1:] == [b"0", b"1"] for queue in queues)


def test_a_change_stands_for_the_row_and_the_block_of_each_owner() -> None:
    messages = Messages([b"a", b"bc"], [1, 2], True)
    key = BlockKey(BLOCKS, 3, 0, 7)

    def block(owner: int) -> bytes:
        return encode(key._replace(owner=owner), messages.records, previous=5, time_ms=9)

    owners = [3, 1, 2**32 - 1]
    change = Alike(key_of(*key)[-8:], owners, b"row", block(3)).encode()
    assert alike.end_of(b"before" + change, 6) == len(change) + 6
    expected = [pair for owner in owners for pair in ((key_of(BLOCKS, owner, 0, 7), block(owner)),)]
    found = list(played(lambda key: None, change + change))
    assert found[: len(found) // 2] == found[len(found) // 2 :]
    assert found[0 : 2 * len(owners) : 2] == expected
    assert found[1 : 2 * len(owners) : 2] == [(key_of(BLOCKS, owner, 0, LAST), b"row") for owner in owners]
    for other in (b"", b"x" * 100, block(4)):
        with pytest.raises(CorruptionError, match="of 3 queues at once"):
            list(alike.pairs(Alike(b"", owners, b"row", other).encode(), 0))


def test_a_spool_whose_journal_is_of_before_goes_on(tmp_path: Path) -> None:
    """Its changes are carried over, and another one is made for it."""
    with opened(tmp_path / "spool") as broker:
        broker.declare_queue("q").put(b"1")
        broker.queue("q").put(b"2")
        assert journaled(broker)[0]
        copy = crashed(broker, tmp_path / "copy")
    data = (copy / JOURNAL).read_bytes()
    before = Head(int.from_bytes(data[28:36], "little"), data[36:44], journal.FORMAT - 1)
    (copy / JOURNAL).write_bytes(journal._header(uuid_of(data[12:28]), before) + data[HEADER_BYTES:])
    with opened(copy) as after:
        assert drained(after.queue("q")) == [b"1", b"2"]
        after.queue("q").put(b"3")
        after.queue("q").put(b"4")
        assert (copy / JOURNAL).read_bytes()[8:12] == journal.FORMAT.to_bytes(4, "little")
