"""Large requests whose bodies are stored ahead of their commit: in parts, all or nothing, in order, right after a crash."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lmdb
import pytest

import qflow
from crash.seams import LOG, Steps
from crash.test_kill_steps import kills
from drivers import opening_tasks, owner_of
from faults.bare_log import Line, bare_log, declared, held, in_log
from faults.seams import PATIENCE_S, Faults, in_thread
from faults.test_full_disk import disk_of
from faults.test_lanes import declare, edit
from faults.test_shared_bodies import stored
from qflow import inspect
from qflow.message import Message, Record
from qflow.storage.environment import Environment
from qflow.storage.files import Files
from qflow.storage.log import ahead, bodies, table, writer
from qflow.storage.log.gates import Gate
from qflow.storage.log.keys import DAMAGED, parts_of, prefix_of
from qflow.storage.log.rows import new_row, read_row
from qflow.storage.log.transaction_log import TransactionLog, Unit
from unit.clocks import until

MIB = 2**20
SIZE = 2_000


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
def small(monkeypatch):
    """A body of 1,000 bytes is large, and a request of 10,000; a part is 4,000, and 3 bodies are removed at once."""
    for name, value in (("LARGE_BYTES", 10_000), ("BODY_BYTES", 1_000), ("PART_BYTES", 4_000), ("REMOVED_AT_ONCE", 6)):
        monkeypatch.setattr(ahead, name, value)
    monkeypatch.setattr(writer, "BATCH_BYTES", 10_000)


@pytest.fixture
def log(spool, faults, small):
    with bare_log(spool, faults) as log:
        yield log
        assert log.problems() == []


def many(count: int = 10, size: int = SIZE, start: int = 0) -> list[Record]:
    """Return so many different bodies."""
    return [b"%04d" % number * (size // 4) for number in range(start, start + count)]


def noted(log: TransactionLog) -> range:
    with log.read() as txn:
        return bodies.noted_ahead(txn)


def one(size: int = 10 * SIZE) -> list[Record]:
    """Return one body, which is stored in as many parts as `many` of the same size."""
    return [b"".join(many(size // SIZE))]


def nothing_is_left(log: TransactionLog) -> None:
    until(lambda: not (log.busy or noted(log)))
    assert pieces(log) == stored(log) == {}


def pieces(log: TransactionLog) -> dict[tuple[int, int], int]:
    """Return the size of each body and piece, by its number and place."""
    with log.read() as txn:
        first, behind = bodies.key_of_body(2), bytes((bodies.BODIES + 1,))
        parts = {parts_of(key)[2:]: len(value) for key, value in table.items(txn, first, behind)}
    return {(number, place): size for (place, number), size in parts.items() if not number % 2}


def at_commits(faults: Faults, *calls: Callable[[], Any] | None) -> list[int]:
    """Have something done before each of the next commits; return, when they were made, how many those were."""
    left, made = list(calls), [0]

    def before() -> None:
        made[0] += 1
        if left and (call := left.pop(0)) is not None:
            call()

    faults.before["commit"] = before
    return made


# Parts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("records", [many(20, MIB), [b"".join(many(20, MIB))]], ids=["many", "one"])
def test_no_transaction_holds_more_than_a_part(records, spool, faults, monkeypatch):
    """Of 20 bodies of 1 MiB, or one of 20, none writes more than one: LMDB has them all in memory."""
    with bare_log(spool, faults) as log:
        line = declared(log, 1)
        written: list[int] = []
        real_begin, real_commit = log._env.begin, log._env.commit

        class Counted:
            """A transaction that counts what is put into it."""

            def __init__(self, txn: Any) -> None:
                self.txn, self.bytes = txn, 0

            def put(self, key: bytes, value: Any) -> bool:
                self.bytes += len(value)
                return self.txn.put(key, value)

            def __getattr__(self, name: str) -> Any:
                return getattr(self.txn, name)

        def commit(txn: Any) -> None:
            written.append(txn.bytes)
            real_commit(txn.txn)

        monkeypatch.setattr(
            log._env,
            "begin",
            lambda write=False, **how: (Counted if write else lambda it: it)(real_begin(write=write, **how)),
        )
        monkeypatch.setattr(log._env, "commit", commit)
        log.commit(log.put(line.put(*records)))
        assert len(written) == 21
        assert sum(written) < 20 * MIB + 10_000
        assert max(written) < MIB + 1_000
        assert written[-1] < 5_000
        assert in_log(log, line) == line.visible == dict(enumerate(records))
        assert log.problems() == []


def test_what_is_stored_ahead_is_what_was_put(log, faults):
    """Plain and with headers, small ones between, what is not logged, the same object twice; rows count the whole."""
    line = declared(log, 1)
    same = b"same" * 1_000
    kinds: list[Record] = [
        Message(b"m" * SIZE, b'{"a":1}'),
        same,
        b"small",
        Message(b"u" * SIZE, b"", logged=False),
        same,
    ]
    records = [*many(5), *kinds, *many(5, start=5)]
    made = at_commits(faults)
    log.commit(log.put(line.put(*records)))
    assert made == [9]
    expected = {at: record for at, record in enumerate(records) if at != 8}
    assert in_log(log, line) == expected
    assert line.visible == dict(enumerate(records))
    assert sorted(stored(log).values()) == [1] * 11 + [2]
    assert not noted(log)
    log.wait(log.purge([line.lane]))
    nothing_is_left(log)


def test_what_would_gain_nothing_is_written_at_once(log, faults):
    """Small bodies, large ones that are few, or one that is there many times: a single commit, without references."""
    line = declared(log, 1)
    made = at_commits(faults)
    for number, records in enumerate((many(30, 500), many(1, 10_000), [b"x" * SIZE] * 10, many(4)), 1):
        log.commit(log.put(line.put(*records)))
        assert made == [number]
    assert stored(log) == {}


def test_a_large_body_is_stored_in_pieces(log, faults):
    """Plain, with headers, between others, in several queues; each as it was put, and gone with its last reference."""
    line, other = declared(log, 1), declared(log, 2)
    plain, message = b"".join(many(5, start=20)), Message(b"".join(many(6)), b'{"a":1}')
    records = [b"small", plain, b"large" * 400, message, *many(2)]
    made = at_commits(faults)
    log.commit(log.join(Unit([line.put(*records), other.put(*records)])))
    assert made == [9]
    assert [place for _, place in sorted(pieces(log))] == [0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 0, 0]
    assert max(pieces(log).values()) < 4_100
    for one in (line, other):
        assert in_log(log, one) == one.visible == dict(enumerate(records))
        assert [*map(type, in_log(log, one).values())] == [*map(type, records)]
    assert log.problems() == []
    log.wait(log.settle(*line.settled(*range(len(records)))))
    assert list(stored(log).values()) == [1] * 5
    assert in_log(log, other) == dict(enumerate(records))
    log.wait(log.purge([other.lane]))
    nothing_is_left(log)


def test_pieces_are_larger_where_they_would_be_too_many(log, faults):
    """Their places are numbered up to 255."""
    line = declared(log, 1)
    records = [b"".join(many(1_000))]
    log.commit(log.put(line.put(*records)))
    assert max(place for _, place in pieces(log)) == 255
    assert in_log(log, line) == dict(enumerate(records))
    log.wait(log.purge([line.lane]))
    nothing_is_left(log)


@pytest.mark.parametrize("lost", [1, 3, 5])
@pytest.mark.parametrize("gone", [False, True], ids=["damaged", "gone"])
def test_a_piece_that_is_lost_loses_its_message_alone(lost, gone, spool, small):
    """It is named, to who gets and to who checks; the others come. What is damaged is set aside, as it was found."""
    with qflow.open(spool) as broker:
        broker.declare_queue("q").put_many([b"before", *one(), b"behind"])

    def damage(txn: Any) -> None:
        key = bodies.key_of_body(2, lost)
        value = bytearray(txn.pop(key))
        value[500] ^= 1
        if not gone:
            txn.put(key, bytes(value))
            aside.append((key, bytes(value)))

    def look(txn: Any) -> None:
        prefix = prefix_of(DAMAGED, bodies.NOBODY)
        kept = [
            (bytes((bodies.BODIES,)) + key[1:], value) for key, value in table.items(txn, prefix, table.behind(prefix))
        ]
        assert kept == aside

    aside: list[tuple[bytes, bytes]] = []
    edit(spool, damage)
    said = "has vanished" if gone else "checksum"
    assert any(f"piece {lost} of shared body 2" in text and said in text for text in inspect.check_spool(spool))
    with qflow.open(spool) as broker:
        queue = broker.queue("q")
        assert queue.get_many(3, 0).bodies == [b"before", b"behind"]
        assert queue.stats().lost_total + queue.stats().quarantined_total > 0
        queue.purge()
        nothing_is_left(broker.engine.log)
    edit(spool, look)
    assert len(inspect.check_spool(spool)) == len(aside)


def test_pieces_without_their_body_are_named_in_one_line(spool, small):
    with qflow.open(spool) as broker:
        broker.declare_queue("q").put(one()[0])
    edit(spool, lambda txn: txn.delete(bodies.key_of_body(2)))
    assert inspect.check_spool(spool)[2:] == ["shared body 2 has vanished, and 5 of its pieces are left"]
    with qflow.open(spool) as broker:
        broker.queue("q").purge()
        nothing_is_left(broker.engine.log)
    assert inspect.check_spool(spool) == []


def test_a_unit_is_stored_ahead_too(log, faults):
    """Several queues, one of them not logged, and what it settles: bodies once, all of it with the last commit."""
    one, two, loose = declared(log, 1), declared(log, 2), Line(2**31, None)
    log.commit(log.put(one.put(b"before")))
    records = many(6)
    seen: list[object] = []
    made = at_commits(faults, None, lambda: seen.append((dict(two.visible), dict(loose.visible), in_log(log, one))))
    unit = Unit([one.put(*records), two.put(*records, b"more"), loose.put(*records)], [one.settled(0)])
    log.commit(log.join(unit))
    assert made == [4]
    assert seen == [({}, {}, {0: b"before"})]
    assert in_log(log, one) == dict(enumerate(records, 1))
    assert in_log(log, two) == two.visible == dict(enumerate([*records, b"more"]))
    assert loose.visible == dict(enumerate(records))
    assert list(stored(log).values()) == [2] * 6


def test_room_is_asked_for_a_part_not_for_all(log, monkeypatch):
    """I12: neither a part nor the last commit asks for the room of the whole."""
    line = declared(log, 1)
    asked: list[int] = []
    real = log._env.make_room
    monkeypatch.setattr(
        log._env, "make_room", lambda size, values, **how: (asked.append(size), real(size, values, **how))
    )
    log.commit(log.put(line.put(*many(100))))
    assert len(asked) >= 50
    assert max(asked) < bodies.RELEASING_BYTES + 50_000


# Others --------------------------------------------------------------------------------------------------------------


def test_commits_of_others_come_between(log, faults):
    """A put of another queue waits for one part, not for all of them."""
    line, other = declared(log, 1), declared(log, 2)
    order: list[str] = []
    put, small = line.put(*many()), [other.put(b"%d" % number) for number in range(3)]
    put.told = lambda: order.append("large")
    for one in small:
        one.told = lambda: order.append("small")
    at_commits(faults, *[lambda one=one: log.put(one) for one in small])
    log.commit(log.put(put))
    assert order == ["small"] * 3 + ["large"]
    assert other.visible == {0: b"0", 1: b"1", 2: b"2"}


def test_what_comes_behind_in_the_same_queue_stays_behind(log, faults):
    """I5: puts, units and purges keep their order with it, and with each other; acks and other queues go by."""
    line, other = declared(log, 1), declared(log, 2)
    log.commit(log.put(line.put(b"first")))
    done: list[str] = []
    late, both, after = line.put(b"late"), Unit([line.put(b"a"), other.put(b"b")]), other.put(b"after")
    ack = log.settle

    def hand_over() -> None:
        log.put(late)
        log.join(both)
        log.put(after)
        acked = ack(*line.settled(0))
        for name, request in (("late", late), ("both", both), ("after", after), ("ack", acked)):
            request.told = lambda name=name: done.append(name)

    at_commits(faults, hand_over)
    put = line.put(*many())
    put.told = lambda: done.append("large")
    log.put(put)
    log.drain()
    assert done == ["ack", "large", "late", "both", "after"]
    assert list(line.visible.values()) == [b"first", *many(), b"late", b"a"]
    assert list(other.visible.values()) == [b"b", b"after"]
    assert in_log(log, line) == {at: record for at, record in line.visible.items() if at}


def test_the_end_of_the_log_comes_after_it(spool, faults, small):
    """What was handed over is written, in all its parts, and nothing of it is left to be removed."""
    with bare_log(spool, faults) as log:
        line = declared(log, 1)
        closing = threading.Thread(target=log.close)
        at_commits(faults, lambda: (closing.start(), until(lambda: log._writer._ending)))
        put = log.put(line.put(*many()))
        log.wait(put)
        closing.join(PATIENCE_S)
        assert put.error is None
    with bare_log(spool, faults) as log:
        assert list(in_log(log, line).values()) == many()
        assert log.problems() == []


@pytest.mark.parametrize("how", ["drain", "purge", "delete", "alone"])
def test_what_asks_for_all_before_it_waits(how, log, faults):
    """A drain, a purge of its queue, the clearing of a deleted one, a compaction come after it."""
    declare(log, 1, "q")
    line = Line(1, new_row(0))
    faults.before.clear()
    put = line.put(*many())
    found: list[object] = []
    works: dict[str, Callable[[], object]] = {
        "drain": log.drain,
        "purge": lambda: log.wait(log.purge([line.lane])),
        "delete": lambda: log.wait(log.delete(1)),
        "alone": lambda: log.alone(lambda env, still: found.append(put.done)),
    }
    thread = threading.Thread(target=lambda: (works[how](), found.append(put.done)))

    def begin() -> None:
        thread.start()
        until(lambda: bool(log.requests))

    at_commits(faults, begin)
    log.wait(log.put(put))
    thread.join(PATIENCE_S)
    assert set(found) == {True}
    assert put.error is None
    if how in ("purge", "delete"):
        nothing_is_left(log)


def test_what_finds_no_memory_to_wait_behind_it_is_refused_and_not_done(log, faults, monkeypatch):
    line = declared(log, 1)
    large, behind = line.put(*many()), line.put(b"behind")
    places = ahead._places_of

    def fails_once(request):
        if request is behind and failing:
            return places(request) if failing.pop() else no_memory()
        return places(request)

    def no_memory():
        raise MemoryError

    failing = [0, 1]  # it is asked whether it may pass, and then where it waits
    monkeypatch.setattr(ahead, "_places_of", fails_once)
    at_commits(faults, lambda: log.put(behind))
    for put in (log.put(large), behind):
        until(lambda put=put: put.done)
    log.drain()
    assert isinstance(behind.error, MemoryError)
    assert line.refusals == [behind]
    assert list(line.visible.values()) == many()


def test_large_requests_take_turns(log, faults):
    """One after the other, in the order in which they were handed over, whatever queues they are for."""
    lines = [declared(log, owner) for owner in (1, 2, 3)]
    order: list[int] = []
    puts = [line.put(*many(start=20 * at)) for at, line in enumerate(lines)]
    for at, put in enumerate(puts):
        put.told = lambda at=at: order.append(at)
    at_commits(faults, lambda: [log.put(put) for put in puts[1:]])
    log.put(puts[0])
    until(lambda: all(put.done for put in puts))
    assert order == [0, 1, 2]
    assert [in_log(log, line) for line in lines] == [dict(enumerate(many(start=20 * at))) for at in range(3)]


def test_who_waits_is_not_woken_by_parts(log, faults, monkeypatch):
    """Its gate opens with the last commit: a large put costs its caller no more wake-ups than a small one."""
    line = declared(log, 1)
    waits: list[int] = []
    real = TransactionLog.wait

    class Counting(Gate):
        """A gate that counts who passes it."""

        @property
        def taken(self) -> bool:  # type: ignore[override]
            waits.append(1)
            return super().taken

    monkeypatch.setattr(writer, "Gate", Counting)
    log.commit(log.put(line.put(b"renews the gate")))
    waits.clear()
    put = log.put(line.put(*many(50)))
    real(log, put)
    assert put.error is None
    assert len(waits) <= 2


# Failures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["make_room", "begin", "commit"])
@pytest.mark.parametrize("after", range(7))
@pytest.mark.parametrize("records", [many(), one()], ids=["many", "one"])
def test_a_full_map_at_any_part_changes_nothing(records, step, after, log, faults):
    """Edge 22: the part is written again; each body is stored once."""
    line = declared(log, 1)
    faults.fail(step, lmdb.MapFullError("full"), after=after, times=1)
    log.commit(log.put(line.put(*records)))
    assert in_log(log, line) == dict(enumerate(records))
    assert list(stored(log).values()) == [1] * len(records)
    assert not noted(log)


@pytest.mark.parametrize(
    "error", [qflow.DiskFull("no"), lmdb.Error("no"), KeyboardInterrupt(), MemoryError()], ids=type
)
@pytest.mark.parametrize("after", range(6))
@pytest.mark.parametrize("records", [many(), one()], ids=["many", "one"])
def test_a_part_that_fails_refuses_the_whole_and_leaves_nothing(records, error, after, log, faults):
    """I3, I12: its caller is told once; what was stored is removed, in steps; what waited behind goes on."""
    line = declared(log, 1)
    put, behind = line.put(*records), line.put(b"behind")
    at_commits(faults, lambda: log.put(behind))
    faults.fail("begin", error, after=after, times=1)
    with pytest.raises(qflow.StorageError if isinstance(error, lmdb.Error) else type(error)):
        log.commit(log.put(put))
    assert line.refusals == [put]
    faults.before.clear()
    if not behind.joined:
        log.put(behind)
    log.commit(behind)
    assert in_log(log, line) == line.visible == {0: b"behind"}
    nothing_is_left(log)
    log.commit(log.put(line.put(*records)))
    assert in_log(log, line) == {0: b"behind", **dict(enumerate(records, 1))}


def test_what_is_removed_is_removed_in_steps(log, faults):
    """I14: so many records in a commit, at most; those of others come between."""
    line, other = declared(log, 1), declared(log, 2)
    faults.fail("begin", qflow.DiskFull("no"), after=5, times=1)
    left: list[int] = []
    at_commits(
        faults, *[None] * 5, *[lambda: left.append(len(stored(log)))] * 5, lambda: log.put(other.put(b"between"))
    )
    with pytest.raises(qflow.DiskFull):
        log.commit(log.put(line.put(*many())))
    nothing_is_left(log)
    assert left == [10, 10, 7, 4, 1]  # the first is a commit of what is left of the batch that was refused: nothing


def test_where_there_is_no_room_to_remove_it_is_tried_again(log, faults, monkeypatch):
    """I12: until then nobody waits for it, and a large request is written whole."""
    monkeypatch.setattr(writer, "RETRY_S", 0.001)
    line = declared(log, 1)
    faults.fail("begin", qflow.DiskFull("no"), after=2)
    with pytest.raises(qflow.DiskFull):
        log.commit(log.put(line.put(*many())))
    until(lambda: log._writer._ahead.stuck)
    assert len(stored(log)) == 4
    assert log.problems() == []
    faults.heal()
    nothing_is_left(log)
    log.commit(log.put(line.put(*many())))
    assert in_log(log, line) == dict(enumerate(many()))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("after", range(6))
@pytest.mark.parametrize("records", [many(), one()], ids=["many", "one"])
def test_a_commit_in_doubt_is_all_or_nothing(records, after, late, spool, faults, small):
    """Edge 21: the log takes nothing more; opened again, the messages are all there or not at all, and nothing else."""
    with bare_log(spool, faults) as log:
        line = declared(log, 1)
        faults.fail("commit", OSError(5, "no"), after=after, times=1, late=late)
        put, behind = line.put(*records), line.put(b"behind")
        at_commits(faults, lambda: log.put(behind))
        log.put(put)
        for one in (put, behind):
            if one.joined:
                in_thread(lambda one=one: log.wait(one))
        assert isinstance(put.error, qflow.InDoubt | qflow.BrokerFailed)
        assert line.visible == {}
        assert log.failed
    assert inspect.check_spool(spool) == []
    with bare_log(spool, Faults()) as log:
        until(lambda: not log.busy)
        is_there = late and after == 5
        with log.read() as txn:
            assert held(txn, 1, 0) == (dict(enumerate(records)) if is_there else {})
        assert len(stored(log)) == (len(records) if is_there else 0)
        assert is_there or not pieces(log)
        assert log.problems() == []
        assert not noted(log)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("records", [many(6), one(6 * SIZE)], ids=["many", "one"])
def test_a_large_put_can_be_killed_at_any_step(records, tmp_path, small):
    """Edge 20, I3: after a kill anywhere all of it is there or nothing; what was stored ahead is gone once it is open."""
    start, spool = tmp_path / "start", tmp_path / "spool"
    with bare_log(start, Faults()) as log:
        declare(log, 1, "q")
    confirmed = tmp_path / "confirmed"

    def task(steps: Steps, path: Any) -> None:
        env = Environment(str(path / "log"), Files())
        for name in LOG:
            setattr(env, name, steps.watched(name, getattr(env, name)))
        log = TransactionLog(env)
        log.commit(log.put(Line(1, new_row(0)).put(*records)))
        confirmed.touch()
        log.close()

    outcomes = set()
    for _ in kills(task, spool, start):
        assert inspect.check_spool(spool) == []
        with bare_log(spool, Faults()) as log:
            before = len(stored(log)) if noted(log) else -1
            until(lambda: not log.busy)
            with log.read() as txn:
                found = held(txn, 1, 0)
            assert found in ({}, dict(enumerate(records)))
            assert found or not pieces(log)
            assert found or not confirmed.exists()
            outcomes.add((bool(found), len(stored(log)), before > 0))
            line = Line(1, read_row_of(log))
            log.commit(log.put(line.put(*many(6, start=50))))
            assert list(in_log(log, line).values()) == [*found.values(), *many(6, start=50)]
            assert log.problems() == []
            assert not noted(log)
        confirmed.unlink(missing_ok=True)
    assert {(found, left) for found, left, _ in outcomes} == {(False, 0), (True, len(records))}


def read_row_of(log: TransactionLog) -> Any:
    with log.read() as txn:
        return read_row(txn, 1, 0)


def orphans(spool: Any, count: int, *, damaged: bool = False) -> None:
    """Leave what a crash between two parts leaves."""

    def change(txn: Any) -> None:
        numbers = bodies.new_numbers(txn, count)
        bodies.note_ahead(txn, numbers)
        for number in numbers[: count - 1]:
            bodies.store(txn, number, b"x" * 5_000, 0, b"".join)
            bodies.write_count(txn, number, 1)
        if damaged:
            txn.put(bodies._AHEAD, b"damaged")

    edit(spool, change)


def test_a_spool_with_orphans_is_clean_and_opening_removes_them_in_steps(spool, monkeypatch):
    """I14: whoever looks from outside knows them; the broker is open before the last of them is gone; so is a copy."""
    with qflow.open(spool) as broker:
        broker.declare_queue("q").put(b"x")
    orphans(spool, 50)
    assert inspect.check_spool(spool) == []
    monkeypatch.setattr(ahead, "REMOVED_AT_ONCE", 6)
    with qflow.open(spool) as broker:
        assert broker.recovery.problems == ()
        assert broker.check() == []
        broker.compact()
        broker.snapshot(spool.parent / "copy")
        log = broker.engine.log
        nothing_is_left(log)
        assert log.commits >= 17
        assert broker.queue("q").get(0).body == b"x"
    assert inspect.check_spool(spool.parent / "copy") == []


def test_a_log_without_a_note_is_not_swept(spool, small):
    """Nothing is looked for where nothing is noted, and a note that is damaged removes nothing: too much is kept."""
    with bare_log(spool, Faults()) as log:
        declare(log, 1, "q")
        log.commit(log.put(Line(1, new_row(0)).put(*many())))
        commits = log.commits
    assert commits == 7
    orphans(spool, 5, damaged=True)
    with bare_log(spool, Faults()) as log:
        log.drain()
        assert log.commits == 0
        assert len(stored(log)) == 14
        assert sum("counts 1 references" in text for text in log.problems()) == 4


def test_a_disk_that_fills_between_parts_gets_its_room_back(tmp_path):
    """I12: a put of many that finds no room leaves none of it taken; acks of one that did give it back."""
    with disk_of("48m", tmp_path / "disk") as disk, qflow.open(disk / "spool", capacity_bytes="96MiB") as broker:
        queue = broker.declare_queue("q")
        log = broker.engine.log
        for _ in range(3):
            with pytest.raises(qflow.DiskFull):
                queue.put_many(many(60, MIB))
            nothing_is_left(log)
            assert broker.check() == []
        for round in range(6):
            queue.put_many(many(10, MIB, start=10 * round))
            deliveries = [queue.get(0) for _ in range(10)]
            assert [delivery.body for delivery in deliveries] == many(10, MIB, start=10 * round)
            random.Random(round).shuffle(deliveries)
            for delivery in deliveries:
                delivery.ack(wait=True)
            nothing_is_left(log)
        assert broker.check() == []


# Streams -------------------------------------------------------------------------------------------------------------


def test_a_publish_of_many_is_stored_ahead_in_queues_and_streams(spool, small):
    """Into a queue and two partitions, and by a transaction: read back in order from both, also after a restart."""
    with qflow.open(spool) as broker:
        stream = broker.declare_stream("s", topics=["t/#"], partitions=2)
        queue = broker.declare_queue("q")
        broker.bind(queue, "t/#")
        log = broker.engine.log
        records = [bytes(record) for record in many(12)]
        before = log.commits
        broker.publish_many([(f"t/{number % 3}", record) for number, record in enumerate(records)])
        assert log.commits - before >= 7
        with broker.transaction() as transaction:
            for record in records:
                transaction.put(queue, record)
        assert broker.check() == []
        assert stream.name == "s"
    with qflow.open(spool) as broker:
        deliveries = [broker.queue("q").get(0) for _ in range(24)]
        assert [delivery.body for delivery in deliveries] == records * 2
        assert broker.check() == []
    assert inspect.check_spool(spool) == []


def test_a_publish_to_several_queues_is_stored_ahead_once(tmp_path) -> None:
    """With all bodies shared by the queues, and others that are small between them."""
    sent = [b"%d" % number * (2**19 if number % 3 else 2) for number in range(10, 40)]
    with qflow.open(tmp_path) as broker:
        queues = [broker.declare_queue(name) for name in ("a", "b", "c")]
        for queue in queues:
            broker.bind(queue.name, "#")
        broker.publish_many([("t", body) for body in sent])
        assert broker.check() == []
    with qflow.open(tmp_path) as broker:
        for name in ("a", "b", "c"):
            batch = broker.queue(name).get_many(100, timeout_s=0)
            assert list(batch.bodies) == sent
            batch.ack(wait=True)
        assert broker.check() == []
        with broker.engine.log.read() as txn:
            assert not bodies.noted_ahead(txn)


@pytest.mark.two_drivers
@pytest.mark.usefixtures("small")
def test_a_task_is_told_when_its_own_request_is_done(spool: Path, access: str) -> None:
    """What another task of the same turn handed over behind it passes, and is done before."""

    async def put() -> None:
        async with opening_tasks(access, partial(qflow.open, spool)) as broker:
            large, other = await broker.declare_queue("large"), await broker.declare_queue("other")
            confirmed = asyncio.gather(large.put_many(many(64)), other.put(b"passes"))  # type: ignore[arg-type]
            assert await confirmed == [range(64), 0]
            assert len(owner_of(broker).broker.queue("large")) == 64
            assert await broker.check() == []

    asyncio.run(put())
