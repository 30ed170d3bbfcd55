"""Bodies that several queues share, through the log: stored once, gone with the last use, right after any failure."""

from __future__ import annotations

from typing import Any

import lmdb
import pytest

import inside
import qflow
from crash.seams import LOG, Steps
from crash.test_kill_steps import kills
from faults.bare_log import ALL, Line, bare_log, declared, held, in_log
from faults.seams import Faults, in_thread
from faults.test_lanes import declare, edit
from qflow import inspect
from qflow.inspect import log_check
from qflow.message import Message, Record
from qflow.storage.environment import Environment
from qflow.storage.files import Files
from qflow.storage.log import bodies
from qflow.storage.log.bodies import FEW_RELEASED, RELEASED_AT_ONCE, SHARED_BYTES, key_of_body
from qflow.storage.log.keys import META, scan
from qflow.storage.log.reading import find_message
from qflow.storage.log.rows import new_row, read_row
from qflow.storage.log.transaction_log import TransactionLog, Unit

BODY = b"b" * 5_000
OTHER = Message(b"m" * 5_000, b'{"a":1}')


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
def log(spool, faults):
    with bare_log(spool, faults) as log:
        yield log
        assert log.problems() == []


def stored(log: TransactionLog) -> dict[int, int]:
    """Return the count of each body by its number."""
    with log.read() as txn:
        counts: dict[int, int] = {}
        with txn.cursor() as cursor:
            found = cursor.set_range(key_of_body(1))
            while found and cursor.key()[0] == bodies.BODIES:
                number = int.from_bytes(cursor.key()[-8:], "big")
                if number % 2:
                    counts[number - 1] = int.from_bytes(cursor.value()[:8], "little")
                found = cursor.next()
        return counts


def publish(log: TransactionLog, lines: list[Line], *records: Record) -> Unit:
    """Put the same records into several queues, as one unit."""
    unit = Unit([line.put(*records) for line in lines])
    log.wait(log.join(unit))
    assert unit.error is None
    return unit


def three(log: TransactionLog) -> list[Line]:
    return [declared(log, 1), declared(log, 2), declared(log, 3)]


def settle(log: TransactionLog, line: Line, *sequences: int) -> None:
    log.wait(log.settle(*line.settled(*sequences)))


def test_a_large_body_for_several_queues_is_stored_once(log):
    """Queues see the whole record, rows count it in full, and the log holds it one time."""
    lines = three(log)
    publish(log, lines, BODY, OTHER, b"small")
    assert sorted(stored(log).values()) == [3, 3]
    for line in lines:
        assert in_log(log, line) == line.visible == {0: BODY, 1: OTHER, 2: b"small"}
        assert line.visible[0] is BODY
        with log.read() as txn:
            assert sum(len(value) for _, value in scan(txn, line.lane.owner, 0, 0, ALL)) < 500
            assert type(find_message(txn, line.lane.owner, 0, 1)[0]) is Message
            row = read_row(txn, line.lane.owner, 0)
            assert (row.messages, row.bytes) == (3, len(BODY) + len(OTHER) + 5)


def test_what_need_not_be_shared_is_not(log):
    """Small ones, ones for a single queue that is logged, other objects with the same bytes, and what is not logged."""
    lines, loose = three(log), Line(2**31, None)
    small, unlogged = b"s" * (SHARED_BYTES - 1), Message(b"u" * 5_000, b"", logged=False)
    publish(log, lines, small, unlogged)
    log.wait(log.join(Unit([lines[0].put(BODY), loose.put(BODY), lines[1].put(bytes(bytearray(BODY)))])))
    assert stored(log) == {}
    publish(log, lines, b"s" * SHARED_BYTES)
    assert list(stored(log).values()) == [3]
    assert in_log(log, lines[2]) == {0: small, 2: b"s" * SHARED_BYTES}


def test_a_body_goes_with_the_last_message_that_needs_it(log):
    """The count goes down as blocks leave the log, whichever queue comes first; then nothing of it is left."""
    lines = three(log)
    for _ in range(5):
        publish(log, lines, BODY, OTHER)
    assert list(stored(log).values()) == [3] * 10
    settle(log, lines[1], *range(10))
    assert list(stored(log).values()) == [2] * 10
    log.wait(log.purge([lines[0].lane]))
    assert list(stored(log).values()) == [1] * 10
    assert in_log(log, lines[2]) == dict(enumerate([BODY, OTHER] * 5))
    settle(log, lines[2], *range(10))
    assert stored(log) == {}
    assert not any(line.lane.removing for line in lines)


def test_a_body_outlives_queues_that_are_deleted(log):
    """Edge 16: a deleted queue gives its references back, and the others keep theirs."""
    one, two, three = (Line(owner, new_row(0)) for owner in (1, 2, 3))
    for line in (one, two, three):
        declare(log, line.lane.owner, f"queue {line.lane.owner}")
    publish(log, [one, two, three], BODY)
    publish(log, [one, two], OTHER)
    batch = log.delete(1)
    log.wait(batch)
    assert batch.batch is not None
    assert batch.batch.deleted == (1,)
    assert list(stored(log).values()) == [2, 1]
    log.delete(2)
    log.wait(log.delete(3))
    assert stored(log) == {}
    with log.read() as txn, txn.cursor() as cursor:
        assert {key[0] for key in cursor.iternext(values=False)} == {META, bodies.BODIES}


def test_a_body_that_one_message_holds_among_many_settled_ones_is_the_only_one_left(log):
    """Edge 24: hollowing gives back what references stand for, although they take little room themselves."""
    lines = three(log)[:2]
    records = [b"%04d" % number * 1_024 for number in range(1_000)]
    publish(log, lines, *records)
    publish(log, lines, BODY * 4)  # in another block, the last one, which is left alone
    for line in lines:
        settle(log, line, *range(50), *range(51, 1_001))
        line.lane.passes.at = 0
        log.wait(log.hollow(line.lane))
    assert sorted(stored(log).values()) == [2, 2]
    for line in lines:
        assert in_log(log, line) == {50: records[50]}
        settle(log, line, 50)
    assert stored(log) == {}


def test_references_are_counted_down_a_bounded_number_at_a_time(log):
    """I14: what a purge of many leaves goes in several commits, each with so many references at most."""
    lines = three(log)[:2]
    records = [b"%04d" % number * 1_024 for number in range(400)]
    for _ in range(8):
        publish(log, lines, *records)
    assert len(stored(log)) == 3_200
    log.wait(log.purge(line.lane for line in lines))
    left = sum(stored(log).values())
    assert 6_400 - RELEASED_AT_ONCE <= left < 6_400
    commits = 1
    while any(line.lane.removing for line in lines):
        log.wait([log.settle(line.lane, []) for line in lines if line.lane.removing][-1])
        now = sum(stored(log).values())
        assert 0 < left - now <= RELEASED_AT_ONCE
        left, commits = now, commits + 1
    assert stored(log) == {}
    assert commits >= 7


def test_a_put_of_the_same_object_in_the_same_batch_refers_to_it_too(log):
    """Who shares is told by identity alone; every reference is counted."""
    lines = three(log)
    log.put(lines[0].put(BODY))
    publish(log, lines, BODY)
    assert list(stored(log).values()) == [4]
    settle(log, lines[0], 0, 1)
    assert list(stored(log).values()) == [2]


def test_the_tail_grows_over_references_until_one_of_them_is_settled(log):
    """Messages that come one by one share blocks; no reference is dropped uncounted when the tail is written again."""
    (line, other) = three(log)[:2]
    for number in range(20):
        publish(log, [line, other], BODY)
        log.wait(log.put(line.put(b"%d" % number)))
    with log.read() as txn:
        assert len(list(scan(txn, 1, 0, 0, ALL))) == 1
    settle(log, line, 0, 1)
    for number in range(20):
        publish(log, [line, other], BODY)
        log.wait(log.put(line.put(b"%d" % number)))
        settle(log, line, *range(2 * number + 2, 2 * number + 4))
    assert log.problems() == []
    assert list(in_log(log, line).values()) == [BODY, b"19"] or len(in_log(log, line)) == 38
    with log.read() as txn:
        assert len(list(scan(txn, 1, 0, 0, ALL))) < 22


# Failures ----------------------------------------------------------------------------------------------------------------


def test_room_is_asked_for_what_is_stored_not_for_what_queues_see(log, monkeypatch):
    """I12: a body of 5 MB for three queues does not need 30 MB of disk."""
    asked: list[int] = []
    monkeypatch.setattr(
        log._env, "make_room", lambda value_bytes, values, **_: asked.append(value_bytes + 8192 * values)
    )
    lines = three(log)
    asked.clear()
    publish(log, lines, b"x" * 5_000_000)
    assert asked
    assert all(5_000_000 < size < 13_000_000 for size in asked)


def test_a_disk_without_room_for_counting_puts_it_off(log, monkeypatch):
    """I12: settles go on without that; bodies stay until there is room again, and then go by themselves."""
    lines = three(log)
    publish(log, lines, BODY)
    for number in (5, 6):
        declare(log, number, f"queue {number}")
    real = log._env.make_room

    def full(value_bytes: int, values: int, *, settles_only: bool) -> None:
        if not settles_only or values >= FEW_RELEASED:
            raise qflow.DiskFull("no room")
        real(value_bytes, values, settles_only=settles_only)

    with monkeypatch.context() as context:
        context.setattr(log._env, "make_room", full)
        for line in lines:
            batch = log.settle(*line.settled(0))
            log.wait(batch)
            assert batch.error is None
            assert batch.short
            assert in_log(log, line) == {}
        assert list(stored(log).values()) == [3]
        log.delete(1)
        batch = log.delete(5)  # it holds no reference: it goes all the same
        log.wait(batch)
        assert batch.batch is not None
        assert batch.batch.deleted == (5,)
    assert all(line.lane.removing for line in lines)
    for line in lines[1:]:
        batch = log.settle(line.lane, [])
    log.wait(batch)
    assert not batch.short
    log.wait(log.delete(1))
    assert stored(log) == {}


def test_a_full_disk_counts_a_few_references_down_out_of_the_reserve(log, monkeypatch):
    """I12: a disk full of shared bodies would stay full; so many at a time, and those of a block together."""
    lines = three(log)
    records = [b"%04d" % number * 16_384 for number in range(100)]
    publish(log, lines, *records)
    real = log._env.make_room

    def full(value_bytes: int, values: int, *, settles_only: bool) -> None:
        if not settles_only:
            raise qflow.DiskFull("no room")
        real(value_bytes, values, settles_only=settles_only)

    monkeypatch.setattr(log._env, "make_room", full)
    left = 300
    log.wait(log.purge(line.lane for line in lines))
    while True:
        now = sum(stored(log).values())
        assert 0 < left - now <= FEW_RELEASED
        left = now
        if not any(line.lane.removing for line in lines):
            break
        batch = [log.settle(line.lane, []) for line in lines if line.lane.removing][-1]
        log.wait(batch)
        assert not batch.short
    assert stored(log) == {}


def test_what_stands_for_much_is_in_blocks_of_its_own(log):
    """A block is given back as a whole: one that grew message by message would pin all the bodies it refers to."""
    (line, other) = three(log)[:2]
    records = [b"%04d" % number * 5_000 for number in range(5)]
    for record in records:
        publish(log, [line, other], record)
    with log.read() as txn:
        assert len(list(scan(txn, 1, 0, 0, ALL))) == 5
    settle(log, line, *range(4))
    settle(log, other, *range(4))
    assert in_log(log, line) == {4: records[4]}
    assert list(stored(log).values()) == [2]


def test_a_unit_that_was_refused_leaves_no_body(log, monkeypatch, faults):
    """I3: neither a full disk nor an error before the commit leaves anything; the next unit is stored as ever."""
    lines = three(log)
    for error, step in (
        (qflow.DiskFull("no"), "make_room"),
        (lmdb.Error("no"), "begin"),
        (KeyboardInterrupt(), "make_room"),
        (KeyboardInterrupt(), "begin"),
    ):
        faults.fail(step, error, times=1)
        unit = Unit([line.put(BODY) for line in lines])
        log.wait(log.join(unit))
        assert unit.error is not None
        assert stored(log) == {}
    faults.heal()
    log.put(lines[0].put(b"plain"))
    publish(log, lines, BODY)
    assert list(stored(log).values()) == [3]


@pytest.mark.parametrize("step", ["make_room", "begin", "commit"])
def test_a_batch_that_is_done_again_stores_a_body_once(step, log, faults):
    """Edge 22: whichever step finds the map full, counts and references agree."""
    lines = three(log)
    publish(log, lines, OTHER)
    faults.fail(step, lmdb.MapFullError("full"), times=1)
    unit = Unit([line.put(BODY) for line in lines], [line.settled(0) for line in lines[:2]])
    log.wait(log.join(unit))
    assert unit.error is None
    assert list(stored(log).values()) == [1, 3]
    assert [in_log(log, line) for line in lines] == [{1: BODY}, {1: BODY}, {0: OTHER, 1: BODY}]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_sharing_can_be_killed_at_any_step(tmp_path):
    """Edge 20, I3: after a kill anywhere, units are whole, counts are right, and in the end nothing is left."""
    start, spool = tmp_path / "start", tmp_path / "spool"
    with bare_log(start, Faults()) as log:
        for owner in (1, 2):
            declare(log, owner, f"queue {owner}")
        publish(log, [Line(1, new_row(0)), Line(2, new_row(0))], BODY)
    confirmed = tmp_path / "confirmed"

    def lines_of(log: TransactionLog) -> list[Line]:
        with log.read() as txn:
            lines = [Line(owner, read_row(txn, owner, 0)) for owner in (1, 2)]
            for line in lines:
                line.visible = held(txn, line.lane.owner, 0)
        return lines

    def task(steps: Steps, path: Any) -> None:
        env = Environment(str(path / "log"), Files())
        for name in LOG:
            setattr(env, name, steps.watched(name, getattr(env, name)))
        log = TransactionLog(env)
        lines = lines_of(log)
        unit = Unit([line.put(OTHER) for line in lines], [lines[0].settled(0)])
        log.wait(log.join(unit))
        confirmed.touch()
        settle(log, lines[1], 0)
        settle(log, lines[0], 1)
        log.close()

    outcomes = set()
    for _ in kills(task, spool, start):
        assert inspect.check_spool(spool) == []
        with bare_log(spool, Faults()) as log:
            lines = lines_of(log)
            seen = [set(line.visible.values()) for line in lines]
            assert seen in ([{BODY}, {BODY}], [{OTHER}, {BODY, OTHER}], [{OTHER}, {OTHER}], [set(), {OTHER}])
            assert seen != [{BODY}, {BODY}] or not confirmed.exists()
            outcomes.add(str(seen))
            log.wait(log.purge(line.lane for line in lines))
            assert stored(log) == {}
        confirmed.unlink(missing_ok=True)
    assert len(outcomes) == 4


# Damage ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def written(spool):
    """Two queues of a spool that share two bodies, with messages of their own around them."""
    with bare_log(spool, Faults()) as log:
        lines = [Line(owner, new_row(0)) for owner in (1, 2)]
        for line in lines:
            declare(log, line.lane.owner, f"queue {line.lane.owner}")
        publish(log, lines, b"before", BODY, OTHER, b"behind")
    return spool


def broken(spool: Any, how: str) -> int:
    """Damage the first body; return its number."""

    def change(txn: Any) -> None:
        key = key_of_body(2)
        if how == "damaged":
            txn.put(key, txn.get(key)[:-1] + b"x")
        else:
            txn.delete(key)

    edit(spool, change)
    return 2


@pytest.mark.parametrize("how", ["damaged", "vanished"])
@pytest.mark.parametrize("capacity", ["64MiB", 0])
def test_a_message_whose_body_is_damaged_is_reported_and_the_rest_is_served(how, capacity, written):
    """I10: each queue that referred to it reports it, in place of wrong bytes, and goes on; so does the inspector."""
    number = broken(written, how)
    found = inspect.check_spool(written)
    for name in ("queue 1", "queue 2"):
        assert any(f"'{name}'" in text and f"shared body {number}" in text for text in found)
    assert inspect.read_message(written, "queue 1", 2).headers == {"a": 1}
    with pytest.raises(qflow.CorruptionError, match=f"shared body {number}"):
        inspect.read_message(written, "queue 1", 1)
    with qflow.open(written, capacity_bytes=capacity) as broker:
        for name in ("queue 1", "queue 2"):
            queue = broker.queue(name)
            came = []
            while batch := in_thread(lambda: queue.get_many(1, timeout_s=0)):  # noqa: B023
                came += batch.bodies
                batch.ack(wait=True)
            assert came == [b"before", OTHER.body, b"behind"]
            assert queue.stats().quarantined_total == 1
            assert any(f"'{name}'" in text and f"shared body {number}" in text for text in broker.recovery.problems)
        assert broker.recovery.quarantined_blocks == (2 if how == "damaged" else 0)
        with inside.paused(broker):
            while inside.upkeep(broker).remove_settled():
                pass
        assert broker.check() == []
        assert stored(broker.engine.log) == {}
    kept = [f"damaged shared body {number} was set aside" in text for text in inspect.check_spool(written)]
    assert kept == ([True] if how == "damaged" else [])


def test_a_shared_body_is_read_back_and_removed_by_queues_that_know_nothing_of_it(written):
    """Recovery, replay, acks and checks see messages; when all are acked, no body is left."""
    with qflow.open(written, capacity_bytes=6_000) as broker:
        for name in ("queue 1", "queue 2"):
            queue = broker.queue(name)
            assert [entry.size_bytes for entry in queue.browse()] == [6, 5_000, len(OTHER), 6]
            deliveries = [in_thread(lambda: queue.get(0)) for _ in range(2)]  # noqa: B023
            assert [delivery.body for delivery in deliveries] == [b"before", BODY]
            queue.ack_many(deliveries)
            assert broker.check() == []
            delivery = in_thread(lambda: queue.get(0))  # noqa: B023
            assert (delivery.body, delivery.headers) == (OTHER.body, {"a": 1})
            delivery.ack(wait=True)
            queue.get(0).ack(wait=True)
        assert stored(broker.engine.log) == {}
        assert broker.check() == []


@pytest.mark.parametrize("kind", ["left over", "too few", "vanished"])
def test_a_check_compares_counts_with_references_both_ways(kind, written):
    """Inside a broker and from outside: what is left over is named, and so is what is missing."""

    def change(txn: Any) -> None:
        if kind == "left over":
            for key in (key_of_body(2), key_of_body(3)):
                txn.put(key_of_body(int.from_bytes(key[-8:], "big") + 100), txn.get(key))
        elif kind == "too few":
            txn.put(key_of_body(3), bodies._sealed(key_of_body(3), 1))
        else:
            txn.delete(key_of_body(3))

    edit(written, change)
    expected = {
        "left over": "the count of shared body 102 is damaged",
        "too few": "shared body 2 counts 1 references, the blocks hold 2",
        "vanished": "the count of shared body 2 has vanished",
    }[kind]
    assert any(expected in text for text in inspect.check_spool(written))
    with qflow.open(written) as broker:
        assert any(expected in text for text in broker.check())


def test_an_inspector_beside_an_owner_compares_nothing_across_two_moments(written, monkeypatch):
    """I10: who checks from outside while messages come and go sees nothing wrong."""
    monkeypatch.setattr(log_check, "BLOCKS_AT_ONCE", 1)
    with bare_log(written, Faults()) as log:
        with log.read() as txn:
            lines = [Line(owner, read_row(txn, owner, 0)) for owner in (1, 2)]
        for line in lines:
            line.visible = in_log(log, line)

        class Moving:
            """An environment in which something is settled before each transaction of the inspector."""

            def reading(self) -> Any:
                if lines[0].visible:
                    publish(log, lines, BODY)
                    settle(log, lines[0], min(lines[0].visible))
                    del lines[0].visible[min(lines[0].visible)]
                return log._env.reading()

            def last_transaction(self) -> int:
                return log._env.last_transaction()

        assert list(log_check.check_bodies(Moving())) == []  # type: ignore[arg-type]
        assert list(log_check.check_bodies(log._env)) == []
