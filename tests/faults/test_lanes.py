"""Lanes: several lines in one queue, told by their sequences; each is found at open, checked, shown and deleted."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import lmdb
import pytest

import inside
import qflow
from faults.bare_log import Line, bare_log, create_log, in_log
from faults.seams import Faults, in_thread
from faults.strikes import Strike
from qflow import inspect, upkeep
from qflow.inspect import log_check, stream_check
from qflow.inspect.logs import opened_log
from qflow.message import DELAYED, LANE_SHIFT, lane_of
from qflow.queues.queue import parts_of
from qflow.storage.environment import Environment
from qflow.storage.files import Files
from qflow.storage.log import recovery, removal
from qflow.storage.log.keys import BLOCKS, DAMAGED, META, key_of, queue_key
from qflow.storage.log.reading import read_unsettled
from qflow.storage.log.recovery import QueueRecord
from qflow.storage.log.rows import new_row, read_rows, write_row
from qflow.storage.log.transaction_log import Lane, TransactionLog, Unit

OWNER = 1
LANES = (0, 3, 9, DELAYED + 3)
ROW = 2**64 - 1


def at(lane: int, number: int = 0) -> int:
    """Return a sequence of a lane."""
    return (lane << LANE_SHIFT) + number


def declare(log: TransactionLog, owner: int, name: str) -> None:
    """Write what declaring a queue writes."""

    def write(txn: Any) -> None:
        txn.put(queue_key(owner), recovery.queue_value(name, 1, {"durable": True}))
        write_row(txn, owner, 0, new_row(0))

    log.wait(log.write(write))


def recovered(spool: Any, owner: int = OWNER) -> tuple[QueueRecord, list[str]]:
    """Return what an open finds of a queue, and what is wrong."""
    env = Environment(str(spool / "log"), Files(), read_only=True)
    txn = env.begin()
    found = recovery.read(txn, str(spool))
    txn.abort()
    env.close()
    (record,) = [record for record in found.queues if record.owner == owner]
    return record, found.problems


def edit(spool: Any, change: Any) -> None:
    """Change the log behind everybody's back."""
    env = Environment(str(spool / "log"), Files())
    txn = env.begin(write=True)
    change(txn)
    txn.commit()
    env.close()


@pytest.fixture
def written(spool):
    """A queue with three messages in each of four lanes, the first of each settled; and another queue."""
    with bare_log(spool, Faults()) as log:
        declare(log, OWNER, "q")
        declare(log, 2, "other")
        lines = {number: Line(OWNER, new_row(number), number) for number in LANES}
        log.wait(log.put(Line(2, new_row(0)).put(b"other")))
        for _ in range(2):  # the second time, each lane goes on where it was
            puts = [line.put(b"%d" % number) for number, line in lines.items()]
            log.wait(log.join(Unit(puts)))
        log.wait(log.put(lines[3].put(b"3")))
        for line in lines.values():
            log.settle(*line.settled(min(line.visible)))
        log.drain()
        for number, line in lines.items():
            assert list(line.visible) == [at(number, place) for place in range(3 if number == 3 else 2)]
            assert set(map(lane_of, line.visible)) == {number}
            assert list(in_log(log, line).values()) == [b"%d" % number] * (2 if number == 3 else 1)
    return spool


def test_an_open_finds_every_lane_that_was_used_and_no_other(written):
    """Edge 28: the row of a lane is written with its first message; one that is not there was never used."""
    record, problems = recovered(written)
    assert problems == []
    assert record.rows is not None
    assert {number: (row.messages, row.next, row.floor) for number, row in record.rows.items()} == {
        number: (2 if number == 3 else 1, at(number, 3 if number == 3 else 2), at(number, 1)) for number in LANES
    }
    other, _ = recovered(written, 2)
    assert list(other.rows or ()) == [0]


def test_lanes_and_their_blocks_are_read_in_order(spool):
    """Each lane from its first block to its last, more than a byte counts; lanes by their numbers, of no other queue."""
    with bare_log(spool, Faults()) as log:
        declare(log, OWNER, "q")
        owners = {owner: {number: Line(owner, new_row(number), number) for number in LANES} for owner in (OWNER, 256)}
        for place in range(300):  # two queues and all lanes take turns, large enough for a block each
            puts = [line.put(b"%03d" % place * 100) for lines in owners.values() for line in lines.values()]
            log.wait(log.join(Unit(puts)))
        for owner, lines in owners.items():
            with log.read() as txn:
                rows = read_rows(txn, owner)
                assert list(rows) == list(LANES)
                for number, row in rows.items():
                    read = read_unsettled(txn, owner, number, row, row.floor, row.next, 2**40)
                    found = [
                        (sequence, record)
                        for first, records in read.pieces
                        for sequence, record in enumerate(records, first)
                    ]
                    assert found == [(at(number, place), b"%03d" % place * 100) for place in range(300)]
                    assert found == list(lines[number].visible.items())
                    assert read.problems == []


def test_a_new_lane_begins_at_its_number(spool):
    """I13: lanes share no sequence, so a sequence tells its lane."""
    assert (new_row(0).next, new_row(25).floor) == (0, 25 << 56)
    assert [lane_of(at(number, 2**56 - 1)) for number in (0, 9, 25)] == [0, 9, 25]
    assert not Lane(OWNER, 25, new_row(25), Line(OWNER, None)).removing
    assert Lane(OWNER, 25, new_row(25)._replace(floor=at(25, 1)), Line(OWNER, None)).removing


@pytest.mark.parametrize("lane", [0, 9, DELAYED + 3])
@pytest.mark.parametrize("how", ["damaged", "missing", "another's"])
def test_a_row_that_cannot_be_read_stops_its_queue_and_no_other(how, lane, written):
    """I10: a queue of which one lane cannot be counted is not served, whichever lane it is."""

    def change(txn: Any) -> None:
        key = key_of(BLOCKS, OWNER, lane, ROW)
        if how == "missing":
            txn.delete(key)
        elif how == "damaged":
            txn.put(key, txn.get(key)[:-1] + b"x")
        else:
            txn.put(key, txn.get(key_of(BLOCKS, OWNER, 3, ROW)))

    edit(written, change)
    record, problems = recovered(written)
    assert record.rows is None
    assert len(problems) == 1
    assert "'q' cannot be served" in problems[0]
    assert f"lane {lane} " in problems[0]
    assert recovered(written, 2)[0].rows is not None
    assert inspect.check_spool(written) == problems
    with qflow.open(written) as broker:
        assert broker.queues() == ["other"]
        with pytest.raises(qflow.CorruptionError):
            broker.queue("q")


def test_facts_of_a_queue_are_those_of_all_its_lanes(written):
    """The inspector sums what waits; a message is shown by its sequence alone."""
    (facts, _) = inspect.read_spool(written).queues
    assert (facts.messages, facts.bytes, facts.floor, facts.next_sequence) == (5, 1 + 2 + 1 + 2, 1, 2)
    assert facts.problem is None
    for number in LANES:
        shown = inspect.read_message(written, "q", at(number, 1))
        assert (shown.body, shown.sequence, shown.settled) == (b"%d" % number, at(number, 1), False)
        for sequence in (at(number, 7), at(number + 1, 1), at(250, 1), at(256, 1), 2**80):
            with pytest.raises(qflow.NotFound, match="never logged"):
                inspect.read_message(written, "q", sequence)
    assert inspect.check_spool(written) == []


def test_a_message_is_shown_although_the_row_of_its_lane_is_damaged(written):
    """I10: what is there can be looked at."""
    edit(written, lambda txn: txn.put(key_of(BLOCKS, OWNER, 3, ROW), b"damaged"))
    assert inspect.read_message(written, "q", at(3, 1)).body == b"3"
    (facts, _) = inspect.read_spool(written).queues
    assert (facts.messages, facts.problem) == (0, "its row is damaged")
    with pytest.raises(qflow.NotFound):
        inspect.read_message(written, "q", at(256, 1))


def test_a_damaged_block_of_any_lane_is_found(written):
    """I10: the inspector reads all lanes, and what was set aside of each."""
    key = key_of(BLOCKS, OWNER, DELAYED + 3, at(DELAYED + 3))

    def change(txn: Any) -> None:
        value = bytearray(txn.get(key))
        value[-9] ^= 1
        txn.put(key, bytes(value))
        txn.put(bytes((DAMAGED,)) + key[1:], bytes(value))

    edit(written, change)
    found = inspect.check_spool(written)
    assert any(f"block {at(DELAYED + 3)}:" in text and "checksum" in text for text in found)
    assert any(f"damaged block {at(DELAYED + 3)} was set aside" in text for text in found)
    assert all("'q'" in text for text in found)


@pytest.mark.parametrize("limit", [1, 3, 256])
def test_a_deleted_queue_leaves_nothing_in_any_lane(limit, written, monkeypatch):
    """Edge 16, I14: the records of all lanes go, a bounded number at a time, and those of no other queue."""
    monkeypatch.setattr(removal, "REMOVED_AT_ONCE", limit)
    monkeypatch.setattr(upkeep, "REMOVING_S", 0)  # one commit a step
    steps = 1
    with qflow.open(written) as broker:
        inside.still(broker)
        with broker.engine.log.read() as txn, txn.cursor() as cursor:
            records = sum(key[1:5] == OWNER.to_bytes(4, "big") for key in cursor.iternext(values=False))
        broker.delete_queue("q")
        while inside.upkeep(broker).remove_deleted():
            steps += 1
        assert steps == 1 + (records - 2) // limit  # one of them is its name
        with broker.engine.log.read() as txn, txn.cursor() as cursor:
            left = [key for key in cursor.iternext(values=False) if key[0] not in (META,)]
        assert {key[1:5] for key in left} == {(2).to_bytes(4, "big")}
        assert len(left) == 3


@pytest.mark.parametrize(("shared_s", "most"), [(math.inf, 25), (0.0, 10_000)])
def test_a_check_of_many_lanes_begins_few_transactions(
    spool: Path, monkeypatch: pytest.MonkeyPatch, shared_s: float, most: int
) -> None:
    """Each looks what the journal says; lanes share one until it is old, when it would pin what is freed."""
    with qflow.open(spool) as broker:
        for queue in broker.declare_queues([f"q{number}" for number in range(100)]):
            queue.put_many([b"x"] * 3)
        for name in ("s", "t"):
            broker.declare_stream(name, topics=[name], partitions=20)
            broker.publish(name, b"x")
    monkeypatch.setattr(stream_check, "SHARED_S", shared_s)
    with opened_log(str(spool)) as (env, found):
        begun: list[int] = []
        monkeypatch.setattr(env, "seen", lambda txn: begun.append(txn.id()) or txn)
        assert list(log_check.check_log(env, found, Counter())) == []
    assert len(begun) < most
    assert (len(begun) > 2 * 100 + 2 * 20) == (shared_s == 0)


@pytest.mark.parametrize("removed", [0, 1, 9, 1000])
@pytest.mark.parametrize("before", range(7))
def test_a_queue_that_is_deleted_while_it_is_checked_misses_nothing(before, removed, written, monkeypatch):
    """I10: before any transaction of a check in another process, whatever is left of it by then."""
    monkeypatch.setattr(log_check, "READ_AT_ONCE", 1)
    monkeypatch.setattr(stream_check, "SHARED_S", 0.0)
    monkeypatch.setattr(removal, "REMOVED_AT_ONCE", 1)
    monkeypatch.setattr(upkeep, "REMOVING_S", 0)  # one commit a step
    with qflow.open(written, journal="off") as broker:
        inside.still(broker)
        env = broker.engine.log._env
        found = recovery.read_log(env)
        real, transactions = env.reading, itertools.count()

        def reading(**options: Any) -> Any:
            if next(transactions) == before:
                broker.delete_queue("q")
                for _ in range(removed):
                    inside.upkeep(broker).remove_deleted()
            return real(**options)

        monkeypatch.setattr(env, "reading", reading)
        assert list(log_check.check_log(env, found, Counter())) == []
        assert [record.name for record in recovery.read_log(env).queues if not record.deleted] == ["other"]


def test_damaged_pages_of_a_deleted_queue_keep_no_other_in_the_log(
    spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told once, and what lies on them stays; it is tried again after the next opening."""
    delete_lanes, tried = removal.delete_lanes, []
    with qflow.open(spool, door=False) as broker:
        inside.still(broker)
        names = ("bad", "good", "better")
        owners = {name: parts_of(broker.declare_queue(name)).context.owner for name in names}

        def delete(txn: Any, owner: int, *rest: Any) -> tuple[int, bool]:
            tried.append(owner)
            if owner == owners["bad"]:
                raise lmdb.CorruptedError("damaged")
            return delete_lanes(txn, owner, *rest)

        monkeypatch.setattr(removal, "delete_lanes", delete)
        for name in names:
            broker.queue(name).put_many([b"x" * 1000] * 300)
        for name in ("bad", "good"):  # in one commit
            broker.delete_queue(name)
        while inside.upkeep(broker).remove_deleted():
            pass
        assert owners["good"] not in left_in(broker)
        broker.delete_queue("better")
        while inside.upkeep(broker).remove_deleted():
            pass
        assert tried.count(owners["bad"]) == 1
        (problem,) = broker.recovery.problems
        assert f"number {owners['bad']} left" in problem
        assert left_in(broker) == {owners["bad"]}
    monkeypatch.undo()
    with qflow.open(spool, door=False) as broker:
        inside.still(broker)
        while inside.upkeep(broker).remove_deleted():
            pass
        assert left_in(broker) == set()


def left_in(broker: qflow.Broker) -> set[int]:
    """Return the numbers of the queues of which the log has something."""
    with broker.engine.log.read() as txn, txn.cursor() as cursor:
        return {int.from_bytes(key[1:5], "big") for key in cursor.iternext(values=False) if key[0] != META}


class Counting:
    """A transaction that counts what is looked up in it."""

    def __init__(self, txn: Any) -> None:
        self.txn = txn
        self.lookups = 0

    def get(self, key: bytes) -> bytes | None:
        self.lookups += 1
        found: bytes | None = self.txn.get(key)
        return found

    def cursor(self) -> Any:
        self.lookups += 1
        return self.txn.cursor()


def test_an_open_looks_up_a_row_for_each_lane_and_no_more(spool):
    """I14: what an open costs does not depend on what waits; a queue of one lane costs one cursor more."""
    create_log(spool)
    env = Environment(str(spool / "log"), Files())
    txn = env.begin(write=True)
    for owner in range(1, 101):
        txn.put(queue_key(owner), recovery.queue_value(f"queue {owner}", owner, {}))
        write_row(txn, owner, 0, new_row(0))
    counting = Counting(txn)
    found = recovery.read(counting, "here")
    assert [len(record.rows or ()) for record in found.queues] == [1] * 100
    assert counting.lookups == 4 + 1 + 2 * 100
    txn.abort()
    env.close()


def test_an_ack_that_is_synced_minds_no_lane_that_is_opened_beside_it(spool: Path) -> None:
    """What it is told of damaged lanes it reads without a lock."""
    with qflow.open(spool, door=False) as broker:
        for at in range(1000):
            queue = broker.declare_queue(f"q{at}", priorities=2)
            queue.put(b"1")
            delivery = queue.get(0)
            claims = parts_of(queue).claims
            joined = claims.join_settles()
            strike = Strike(at, lambda: in_thread(lambda: queue.put(b"2", priority=1, delay_s=100)))  # noqa: B023
            strike.run(lambda: claims.finish(joined, True))  # noqa: B023
            delivery.ack()
            if strike.where is None:
                break
        assert 0 < at < 1000
