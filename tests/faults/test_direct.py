"""Requests that stand alone are confirmed by their own threads, also where those are interrupted, or late."""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import logging
import os
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest

import inside
import qflow
from crash.seams import run_in_child
from faults.seams import Faults, faulty_broker, in_thread
from faults.strikes import Strike, Struck
from qflow import inspect
from qflow.aio.broker import AsyncBroker
from qflow.identity import new_uuid
from qflow.message import OVERHEAD_BYTES
from qflow.queues.puts import Puts
from qflow.queues.queue import parts_of
from qflow.queues.together import Together
from qflow.storage.files import Files
from qflow.storage.log import batch, confirming, direct, journal, recovery, writer
from qflow.storage.log.facts import Facts
from qflow.storage.log.journal import HEADER_BYTES, JOURNAL, Head, Journal
from qflow.storage.log.notes import NOTED_LANES
from qflow.storage.log.shared_reading import open_to_read
from unit.clocks import until
from unit.test_waking import is_told_wherever

FILES = Files()


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a journal from the first small batch on, and nothing applied that is not asked for."""
    monkeypatch.setattr(confirming, "FIRST_BATCHES", 0)
    monkeypatch.setattr(writer, "SOON_S", 1000)
    monkeypatch.setattr(confirming, "LATE_S", 1000)
    monkeypatch.setattr(direct, "PATIENCE_S", 1000)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[qflow.Broker]:
    with qflow.open(tmp_path / "spool") as broker:
        begin(broker)
        yield broker
        assert broker.check() == []


def begin(broker: qflow.Broker) -> qflow.Queue:
    """Declare a queue, and have a journal; return when the turn may be taken."""
    inside.still(broker)
    queue = broker.declare_queue("q")
    queue.put_many([b"a", b"b"])
    queue.put(b"c")
    rest(broker)
    return queue


def rest(broker: qflow.Broker) -> None:
    """Return when the writer rests, and threads may confirm by themselves."""
    broker.engine.log.drain()
    until(lambda: broker.engine.log.turn.open)


def put_together(broker: qflow.Broker, *bodies: bytes, acked: qflow.Delivery | None = None) -> None:
    """Put messages into the queue by a transaction."""
    with broker.transaction() as tx:
        for body in bodies:
            tx.put("q", body)
        if acked is not None:
            tx.ack(acked)


def confirmed(broker: qflow.Broker) -> int:
    return broker.engine.log.turn.confirmed


def reopened(broker: qflow.Broker, path: Path) -> list[bytes]:
    """Return the bodies that are there after a kill; those who only read see as many."""
    copy = inside.copy_as_killed(broker, path)
    env = open_to_read(str(copy), FILES)
    assert env is not None
    seen = next(one.rows for one in recovery.read_log(env).queues if one.name == "q")
    env.close()
    with qflow.open(copy) as again:
        assert again.check() == []
        assert again.recovery.problems == ()
        bodies = again.queue("q").get_many(1000, timeout_s=0).bodies
    assert seen is not None
    assert seen[0].messages == len(bodies)
    return bodies


def test_what_stands_alone_takes_no_batch(broker: qflow.Broker, tmp_path: Path) -> None:
    """Put with headers and without, taken, acked: each a note, all there after a kill, and carried out by what follows."""
    queue, before, batches = broker.queue("q"), confirmed(broker), broker.engine.log.commits
    assert [queue.put(b"d"), queue.put(b"e", headers={"n": 1})] == [3, 4]
    for body in (b"a", b"b"):
        delivery = queue.get()
        assert delivery.body == body
        delivery.ack(wait=True)
    assert confirmed(broker) == before + 4
    assert broker.engine.log.commits == batches + 4
    assert len(queue) == 3
    assert reopened(broker, tmp_path / "notes") == [b"c", b"d", b"e"]
    broker.declare_queue("other")
    assert broker.engine.log._writer._confirming.notes == []
    queue.put_many([b"f", b"g"])
    assert reopened(broker, tmp_path / "record") == [b"c", b"d", b"e", b"f", b"g"]
    rest(broker)
    queue.put(b"h")
    queue.put(b"x" * 2**20)
    assert confirmed(broker) == before + 6
    assert reopened(broker, tmp_path / "commit")[5:] == [b"h", b"x" * 2**20]
    rest(broker)
    queue.put(b"i")
    assert queue.get_many(100).bodies[2] == b"e"


def test_what_is_put_together_is_one_note(broker: qflow.Broker, tmp_path: Path) -> None:
    """With headers and without, some of it acked, all there after a kill; what is many messages the writer notes."""
    queue, before, batches = broker.queue("q"), confirmed(broker), broker.engine.log.commits
    queue.get_many(3).ack(wait=True)
    assert queue.put_many([b"d", b"", b"e" * 60_000]) == range(3, 6)
    assert queue.put_many([b"f", b"g"], headers={"n": 1}) == range(6, 8)
    assert queue.get().body == b"d"
    queue.get_many(2).ack(wait=True)
    assert reopened(broker, tmp_path / "few") == [b"d", b"f", b"g"]
    rest(broker)
    assert queue.put_many([b"h"] * 300) == range(8, 308)
    assert confirmed(broker) == before + 4
    assert broker.engine.log.commits == batches + 5
    assert reopened(broker, tmp_path / "many") == [b"d", b"f", b"g", *[b"h"] * 300]
    with qflow.open(tmp_path / "many") as again:
        assert [one.headers for one in again.queue("q").get_many(4)] == [{}, {"n": 1}, {"n": 1}, {}]
    assert len(queue) == 303


def test_a_transaction_that_stands_alone_is_one_note_of_its_own_thread(broker: qflow.Broker, tmp_path: Path) -> None:
    """All of it or nothing of it is there after a kill, also where a queue gives and takes. Not what is stored once."""
    queue, other = broker.queue("q"), broker.declare_queue("other")
    other.put(b"0")
    rest(broker)
    before, alone = confirmed(broker), list[int]()
    at_sync(broker, lambda: alone.append(1))
    with broker.transaction() as tx:
        tx.ack(queue.get())
        tx.put("other", b"1", headers={"n": 1})
        tx.put("other", b"2")
    assert (confirmed(broker), alone) == (before + 1, [1])
    assert (len(queue), len(other)) == (2, 3)
    with qflow.open(inside.copy_as_killed(broker, tmp_path / "note")) as again:
        assert again.check() == []
        assert again.queue("q").get_many(9).bodies == [b"b", b"c"]
        assert [(one.body, one.headers) for one in again.queue("other").get_many(9)] == [
            (b"0", {}), (b"1", {"n": 1}), (b"2", {})
        ]  # fmt: skip
    torn = cut(broker, tmp_path / "cut")
    with qflow.open(torn) as again:
        assert again.queue("q").get_many(9).bodies == [b"a", b"b", b"c"]
        assert again.queue("other").get_many(9).bodies == [b"0"]
    large = b"x" * 5_000
    for puts in ([("q", b"d")], [("q", large), ("other", large)]):
        rest(broker)
        with broker.transaction() as tx:
            tx.ack(queue.get())
            for name, body in puts:
                tx.put(name, body)
    assert confirmed(broker) == before + 2
    assert reopened(broker, tmp_path / "batches") == [b"d", large]
    assert other.get_many(9).bodies == [b"0", b"1", b"2", large]


def test_a_put_and_the_acks_before_it_that_nobody_waits_for_are_one_note(
    broker: qflow.Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a consumer does all day: of the queue it puts into, and of another one."""
    monkeypatch.setattr(writer, "FLUSH_S", 1000)
    queue, other, log = broker.queue("q"), broker.declare_queue("other"), broker.engine.log
    other.put_many([b"0", b"1", b"2"])
    rest(broker)
    before, batches = confirmed(broker), log.commits
    queue.get().ack()
    other.get().ack()
    queue.get().ack()
    queue.put(b"d")
    assert (confirmed(broker), log.commits) == (before + 1, batches + 1)
    with qflow.open(inside.copy_as_killed(broker, tmp_path / "note")) as again:
        assert again.check() == []
        assert [again.queue(name).get_many(9).bodies for name in ("q", "other")] == [[b"c", b"d"], [b"1", b"2"]]
    with qflow.open(cut(broker, tmp_path / "cut")) as again:
        assert again.check() == []
        assert [len(again.queue(name)) for name in ("q", "other")] == [3, 3]
    rest(broker)
    queue.put(b"e")
    assert reopened(broker, tmp_path / "batch") == [b"c", b"d", b"e"]
    assert queue.get_many(9).bodies == [b"c", b"d", b"e"]


def test_what_tasks_do_together_is_one_note(broker: qflow.Broker, tmp_path: Path) -> None:
    """Plain, with headers, and by a transaction that gives and takes, in one turn of a loop; each has its sequence."""
    log, queue = broker.engine.log, broker.queue("q")
    other = broker.declare_queue("other")
    other.put(b"0")
    rest(broker)
    before, batches = confirmed(broker), log.commits

    async def work() -> list[Any]:
        around = AsyncBroker(broker)
        here, there = around.queue("q"), around.queue("other")

        async def move() -> list[Any]:
            async with around.transaction() as tx:
                await tx.ack(await here.get())
                await tx.put("other", b"moved")
            return tx.result

        puts = here.put(b"d"), here.put(b"e", headers={"n": 1}), here.put_many([b"f", b"g"]), there.put(b"1")
        return await asyncio.gather(*puts, move())

    assert asyncio.run(work()) == [3, 4, range(5, 7), 1, [2]]
    assert (confirmed(broker), log.commits) == (before + 1, batches + 1)
    assert parts_of(queue).admission.pending == parts_of(other).admission.pending == 0
    bodies = [b"b", b"c", b"d", b"e", b"f", b"g"]
    with qflow.open(inside.copy_as_killed(broker, tmp_path / "note")) as again:
        assert again.check() == []
        found = again.queue("q").get_many(9)
        assert (found.bodies, found[3].headers) == (bodies, {"n": 1})
        assert again.queue("other").get_many(9).bodies == [b"0", b"1", b"moved"]
    with qflow.open(cut(broker, tmp_path / "cut")) as again:
        assert [len(again.queue(name)) for name in ("q", "other")] == [3, 1]
    assert queue.get_many(9).bodies == bodies
    assert other.get_many(9).bodies == [b"0", b"1", b"moved"]


def test_what_else_is_written_with_a_put_is_there_after_a_kill(broker: qflow.Broker, tmp_path: Path) -> None:
    """Facts, and a put that comes beside them: no note holds the first."""
    log, queue, before = broker.engine.log, broker.queue("q"), confirmed(broker)
    kept = log.join_facts(Facts({"room": {"key": b"value"}}), soon=False)
    assert queue.submit(b"d").result() == 3
    assert (kept.done, kept.error, confirmed(broker)) == (True, None, before)
    with qflow.open(inside.copy_as_killed(broker, tmp_path / "copy")) as again:
        assert again.engine.log.facts("room") == {"key": b"value"}
        assert again.queue("q").get_many(9).bodies == [b"a", b"b", b"c", b"d"]


def test_a_publish_to_a_few_queues_that_stands_alone_is_one_note(broker: qflow.Broker, tmp_path: Path) -> None:
    """Of more queues than notes may be of, and of what is stored once for them, a batch has it."""
    few, many = [f"few{number}" for number in range(3)], [f"many{number}" for number in range(20)]
    for name in [*few, *many]:
        broker.declare_queue(name)
        broker.bind(name, "few" if name in few else "many")
    broker.publish("few", b"0")
    broker.publish("many", b"0")
    rest(broker)
    before, alone = confirmed(broker), list[int]()
    at_sync(broker, lambda: alone.append(1))
    broker.publish("few", b"1")
    assert (confirmed(broker), alone) == (before + 1, [1])
    rest(broker)
    broker.publish("few", b"x" * 5_000)
    rest(broker)
    broker.publish("many", b"1")
    assert confirmed(broker) == before + 1
    rest(broker)
    broker.publish("few", b"2")
    assert confirmed(broker) == before + 2
    with qflow.open(inside.copy_as_killed(broker, tmp_path / "copy")) as again:
        assert again.check() == []
        assert all(again.queue(name).get_many(9).bodies == [b"0", b"1", b"x" * 5_000, b"2"] for name in few)
        assert all(again.queue(name).get_many(9).bodies == [b"0", b"1"] for name in many)
    assert all(broker.queue(name).get_many(9).bodies == [b"0", b"1", b"x" * 5_000, b"2"] for name in few)


def test_what_is_put_together_and_not_logged_is_not_counted_as_what_the_log_holds(
    broker: qflow.Broker, tmp_path: Path
) -> None:
    """Between messages that are: a row that counts it would have one sought that was never there, and told as lost."""
    queue = broker.queue("q")
    with broker.transaction() as tx:
        tx.put("q", b"d")
        tx.put("q", b"not logged", durable=False)
        tx.put("q", b"e", headers={"n": 1})
    assert reopened(broker, tmp_path / "copy") == [b"a", b"b", b"c", b"d", b"e"]
    assert queue.get_many(9).bodies == [b"a", b"b", b"c", b"d", b"not logged", b"e"]


def test_notes_hold_no_more_than_is_said_of_messages_that_were_acked(
    broker: qflow.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are charged to nobody by then: small ones take many times in memory what they take in the journal."""
    monkeypatch.setattr(direct, "NOTED_BYTES", 100_000)
    queue, held = broker.queue("q"), 0
    queue.get_many(3).ack(wait=True)
    for _ in range(10):
        rest(broker)
        queue.put_many([b"x"] * 255)
        queue.get_many(255).ack(wait=True)
        notes = broker.engine.log._writer._confirming.notes
        held = max(held, sum(len(note.records or ()) for note in notes))
    assert 255 <= held <= 100_000 // OVERHEAD_BYTES


def test_of_a_publish_to_more_queues_than_there_is_room_for_no_note_is_made(
    broker: qflow.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To be thrown away: that would take as long as to write it."""
    for name in (names := [f"many{number}" for number in range(NOTED_LANES + 1)]):
        broker.declare_queue(name).put(b"0")
        broker.bind(name, "many")
        if name != names[-1]:
            broker.bind(name, "few")
    made: list[Any] = []
    real = batch.put_note
    monkeypatch.setattr(batch, "put_note", lambda *given: (made.append(given), real(*given))[1])
    for topic, count in (("many", 0), ("few", NOTED_LANES)):
        rest(broker)
        broker.publish(topic, b"1")
        assert len(made) == count


def cut(broker: qflow.Broker, path: Path) -> Path:
    """Return a copy as a kill leaves it amid the write of the last record of the journal."""
    copy = inside.copy_as_killed(broker, path)
    end = broker.engine.log._writer._confirming.journal.position  # type: ignore[union-attr]
    with open(copy / JOURNAL, "r+b") as file:
        file.seek(end - 16)
        file.write(bytes(16))
    return copy


def test_what_was_put_and_acked_alone_is_never_written_to_the_log(broker: qflow.Broker, tmp_path: Path) -> None:
    """But for the row of the lane."""
    queue = broker.queue("q")
    queue.get_many(3).ack(wait=True)
    rest(broker)
    for number in range(20):
        queue.put(b"needle %d" % number)
        queue.get().ack(wait=True)
    assert reopened(broker, tmp_path / "copy") == []
    with broker.engine.log.read() as txn:
        assert b"needle" not in b"".join(value for _, value in txn.cursor())


def test_the_writer_notes_what_stands_alone_and_was_handed_over(broker: qflow.Broker, tmp_path: Path) -> None:
    """A put that a future or a task waits for, and an ack that nobody waits for; what comes right behind, too."""
    queue, before, batches = broker.queue("q"), confirmed(broker), broker.engine.log.commits
    assert queue.submit(b"d").result() == 3
    rest(broker)

    async def put_and_ack() -> None:
        around = AsyncBroker(broker).queue("q")
        assert await around.put(b"e", headers={"n": 1}) == 4
        rest(broker)
        await (await around.get()).ack()

    asyncio.run(put_and_ack())
    until(lambda: confirmed(broker) == before + 3)
    assert broker.engine.log.commits == batches + 3
    assert reopened(broker, tmp_path / "notes") == [b"b", b"c", b"d", b"e"]
    one: Any = broker.engine.log._writer._confirming.journal
    sync, both = one.sync, list[Any]()
    one.sync = lambda: (both.extend([queue.submit(b"g"), queue.submit(b"h")]) if not both else None, sync())
    assert queue.submit(b"f").result() == 5
    assert [put.result() for put in both] == [6, 7]
    assert confirmed(broker) == before + 5
    assert reopened(broker, tmp_path / "batch") == [b"b", b"c", b"d", b"e", b"f", b"g", b"h"]


def test_what_the_writer_notes_is_in_the_log_in_time_however_little_it_rests(
    broker: qflow.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One comes after the other, and none is alone for long enough that it would be applied."""
    queue, log = broker.queue("q"), broker.engine.log
    assert queue.submit(b"d").result() == 3
    assert log.held_back > 0
    rest(broker)
    monkeypatch.setattr(confirming, "LATE_S", 0)
    assert queue.submit(b"e").result() == 4
    assert log.held_back == 0


def test_what_is_tried_again_goes_with_the_next_that_stands_alone(tmp_path: Path) -> None:
    """An ack that nobody waits for, which the log has refused."""
    faults = Faults()
    with faulty_broker(tmp_path, faults, journal="auto") as broker:
        queue = begin(broker)
        large = b"x" * 2**20
        queue.put(large)  # is committed, so that the next batch begins a transaction
        rest(broker)
        held = [queue.get() for _ in range(3)]
        faults.fail("begin", lmdb.Error("no transaction now"), times=1)
        held[1].ack()
        until(lambda: broker.engine.log._writer._again is not None)
        assert queue.submit(b"d").result() == 4
        broker.engine.log.drain()
        assert reopened(broker, tmp_path.with_name("copy")) == [b"a", b"c", large, b"d"]


@pytest.mark.parametrize(("acked", "size"), [(1, 20_000), (3, 10)])
def test_what_stands_alone_right_before_a_close_is_followed_by_what_comes_then(
    acked: int, size: int, tmp_path: Path
) -> None:
    """A note knows no block: the one it is written in is known when the close itself has taken over the journal."""
    last = b"x" * size
    with qflow.open(tmp_path / "spool") as broker:
        queue = begin(broker)
        queue.get_many(acked, 0).ack()
        rest(broker)
        before = confirmed(broker)
        queue.put(last)
        assert confirmed(broker) == before + 1
    with qflow.open(tmp_path / "spool") as broker:
        broker.queue("q").put_many([b"d", b"e"])
    assert inspect.check_spool(tmp_path / "spool") == []
    with qflow.open(tmp_path / "spool") as broker:
        assert broker.recovery.problems == ()
        assert broker.queue("q").get_many(10, 0).bodies == [*[b"a", b"b", b"c"][acked:], last, b"d", b"e"]


@pytest.mark.parametrize("operation", ["pwrite", "sync_data"])
def test_a_journal_that_fails_under_a_note_of_the_writer(operation: str, tmp_path: Path) -> None:
    """What could not be written to it is committed to the log; after a sync that failed nobody knows."""
    faults = Faults()
    with faulty_broker(tmp_path, faults, journal="auto") as broker:
        queue = begin(broker)
        faults.fail(operation, OSError(5, "Input/output error"), times=1)
        put = queue.submit(b"d")
        if operation == "pwrite":
            assert put.result() == 3
            assert [queue.submit(b"e").result(), queue.put(b"f")] == [4, 5]
            assert broker.check() == []
        else:
            with pytest.raises(qflow.InDoubt):
                put.result()
    with qflow.open(tmp_path) as broker:
        found = broker.queue("q").get_many(9).bodies
        assert found in ([b"a", b"b", b"c", b"d", b"e", b"f"], [b"a", b"b", b"c", b"d"], [b"a", b"b", b"c"])
        assert (len(found) == 6) == (operation == "pwrite")


def test_more_lanes_than_there_is_room_for_take_batches(broker: qflow.Broker, tmp_path: Path) -> None:
    queues = [broker.declare_queue(f"q{number}") for number in range(NOTED_LANES + 4)]
    for queue in queues:
        queue.put(b"first")
    rest(broker)
    before = confirmed(broker)
    for queue in queues:
        rest(broker)
        queue.put(b"second")
    assert NOTED_LANES <= confirmed(broker) - before < len(queues)
    copy = inside.copy_as_killed(broker, tmp_path / "copy")
    with qflow.open(copy) as again:
        assert all(again.queue(queue.name).get_many(9).bodies == [b"first", b"second"] for queue in queues)


def test_a_getter_that_waits_is_told(broker: qflow.Broker) -> None:
    queue = broker.queue("q")
    queue.get_many(3).ack(wait=True)
    found: list[bytes] = []

    def begin_to_wait() -> None:
        takers.append(threading.Thread(target=lambda: found.append(queue.get(timeout_s=60).body)))
        takers[-1].start()
        until(lambda: parts_of(queue).gate.getters > 0)

    takers: list[threading.Thread] = []
    begin_to_wait()
    queue.put(b"d")
    takers[0].join()
    rest(broker)
    at_sync(broker, begin_to_wait)
    queue.put(b"e")
    takers[1].join()
    assert found == [b"d", b"e"]


def at_sync(broker: qflow.Broker, call: Callable[[], object]) -> None:
    """Have something called by the next thread that syncs the journal by itself, before it does."""
    one = broker.engine.log._writer._confirming.journal
    assert one is not None
    sync = one.sync_alone

    def called() -> None:
        one.sync_alone = sync  # type: ignore[method-assign]
        call()
        sync()

    one.sync_alone = called  # type: ignore[method-assign]


def test_what_is_visible_is_in_the_log_for_who_reads_that(
    broker: qflow.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have left memory, and is to come back: also before its thread has counted it."""
    monkeypatch.setattr(direct, "PATIENCE_S", 0)
    log, count = broker.engine.log, direct.Direct.count
    seen: list[bool] = []

    def look() -> None:
        with log.read() as txn:
            seen.append(any(b"visible" in value for _, value in txn.cursor()))

    def late(*counted: Any) -> None:
        in_thread(look)
        count(*counted)

    look()  # from here on all is in the log
    rest(broker)
    monkeypatch.setattr(direct.Direct, "count", late)
    broker.queue("q").put(b"visible")
    assert seen == [False, True]


def test_who_comes_meanwhile_waits_for_the_next_batch(broker: qflow.Broker, tmp_path: Path) -> None:
    """In the order of their hand-over, those that are not logged too; acks that nobody waits for."""
    queue = broker.queue("q")
    delivery = queue.get()
    later: list[Any] = []

    def meanwhile() -> None:
        later.append(in_thread(lambda: queue.submit(b"second")))
        in_thread(lambda: delivery.ack())
        later.append(queue)

    at_sync(broker, meanwhile)
    assert queue.put(b"first") == 3
    assert later[0].result(60) == 4
    queue.put(b"third", durable=False)
    assert queue.get_many(9).bodies == [b"b", b"c", b"first", b"second", b"third"]
    assert reopened(broker, tmp_path / "copy") == [b"b", b"c", b"first", b"second"]


def test_a_message_that_is_not_logged_takes_its_sequence_while_an_ack_has_the_turn(broker: qflow.Broker) -> None:
    queue = broker.queue("q")
    queue.get_many(3).ack(wait=True)
    queue.put(b"logged")
    assert queue.put(b"4", durable=False) == 4
    rest(broker)
    before, later = confirmed(broker), []
    at_sync(broker, lambda: later.append(in_thread(lambda: queue.put(b"5", durable=False))))
    queue.get().ack(wait=True)
    assert confirmed(broker) == before + 1
    assert [*later, queue.put(b"6", durable=False)] == [5, 6]
    assert [(one.sequence, one.body) for one in queue.get_many(9)] == [(4, b"4"), (5, b"5"), (6, b"6")]


@pytest.mark.parametrize("strikes", [1, 2])
def test_an_interrupt_at_any_place_wakes_who_waits_for_it(
    broker: qflow.Broker, monkeypatch: pytest.MonkeyPatch, strikes: int
) -> None:
    """Once the message is visible, also where the next one comes as that is made good."""
    queue = broker.queue("q")
    queue.purge()
    struck = (is_told_wherever(monkeypatch, queue, strikes, lambda: rest(broker), at) for at in itertools.count())
    places = [*itertools.takewhile(bool, struck)]
    assert any("line.py" in where and "__call__" in where for where in places)


@pytest.mark.parametrize("call", ["put", "put_many", "transaction", "ack"])
def test_an_interrupt_at_any_place_leaves_it_done_or_not_done(call: str, tmp_path: Path) -> None:
    """A handler that raises; then others go on, and a reopened spool has what this one has."""
    with qflow.open(tmp_path / "spool") as broker:
        queue = begin(broker)
        at, number, struck, alone = 0, 0, True, 0
        while struck:
            rest(broker)
            number += 1
            queue.put(b"old %d" % number)
            rest(broker)
            held = queue.get() if call == "ack" else None
            before, count = confirmed(broker), len(queue)
            strike = Strike(at)
            work: Callable[[], Any] = {
                "put": lambda: queue.put(b"new"),
                "put_many": lambda: queue.put_many([b"new", b"er"]),
                "transaction": lambda: put_together(broker, b"new", b"er"),
                "ack": lambda one=held: one.ack(wait=True),
            }[call]
            struck = strike.run(work)
            alone += confirmed(broker) > before
            queue.put(b"after")  # which asks for the turn, if the writer has to go on
            done = len(queue) - count - 1
            several = {0, 2}
            acked = {-1, 0} if struck else {-1}
            assert done in {"put": {0, 1}, "put_many": several, "transaction": several, "ack": acked}[call]
            assert broker.engine.log.turn.request is None
            if held is not None and struck:
                try:
                    held.ack(wait=True)
                except qflow.AlreadySettled:
                    pass
            at += 7 if struck else 0
        assert alone > 0
        bodies = reopened(broker, tmp_path / "copy")
        assert bodies == queue.get_many(10_000, timeout_s=0).bodies
        assert broker.check() == []


def test_a_handler_may_put_in_the_middle_and_both_are_done(tmp_path: Path) -> None:
    with qflow.open(tmp_path / "spool") as broker:
        queue = begin(broker)
        at, wanted = 0, [b"a", b"b", b"c"]
        while True:
            rest(broker)
            strike = Strike(at, lambda: queue.put(b"handler"))
            strike.run(lambda: queue.put(b"call"))
            if strike.where is None:
                wanted.append(b"call")
                break
            wanted += [b"handler", b"call"]
            at += 9
        found = queue.get_many(10_000).bodies
        assert sorted(found) == sorted(wanted)
        assert reopened(broker, tmp_path / "copy") == found
        assert broker.check() == []


@pytest.mark.parametrize("call", ["put", "transaction"])
def test_a_thread_that_does_not_come_back_holds_nobody_up(
    broker: qflow.Broker, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The writer goes on; nothing is written over what may come late; that changes nothing, and all is as before."""
    monkeypatch.setattr(direct, "PATIENCE_S", 0.01)
    queue, other, goes_on, stuck = broker.queue("q"), broker.declare_queue("o"), threading.Event(), threading.Event()
    other.put_many([b"1", b"2"])
    other.get().ack(wait=True)
    acked = other.get()
    rest(broker)
    one: Any = broker.engine.log._writer._confirming.journal
    write = one.write_alone

    def late(record: Any) -> None:
        if threading.current_thread() is thread:
            stuck.set()
            assert goes_on.wait(60)
        write(record)

    one.write_alone = late
    late_call = (lambda: queue.put(b"late")) if call == "put" else (lambda: put_together(broker, b"late", acked=acked))
    thread = threading.Thread(target=late_call)
    thread.start()
    assert stuck.wait(60)
    assert queue.put(b"next") == 4
    for number in range(40):  # more than the journal holds
        queue.put(b"%d" % number * 200_000)
    assert one.inside
    assert not one.fits(1)
    goes_on.set()
    thread.join()
    assert not one.inside
    queue.put(b"x" * 2**20)
    rest(broker)
    before = confirmed(broker)
    queue.put(b"last")
    assert confirmed(broker) == before + 1
    assert len(other) == (1 if call == "put" else 0)
    found = queue.get_many(10_000).bodies
    assert found[3:5] == [b"late", b"next"]
    assert found[-1] == b"last"


def test_a_thread_that_does_not_come_back_before_it_writes_holds_nobody_up(
    broker: qflow.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer, which takes the turn to commit what is late, does what that was taken for, too."""
    queue, goes_on, note = broker.queue("q"), threading.Event(), direct.Direct._note

    def late(*given: Any) -> Any:
        if threading.current_thread() is thread:
            assert goes_on.wait(60)
        return note(*given)

    queue.put(b"d")
    monkeypatch.setattr(direct, "PATIENCE_S", 0)
    thread = threading.Thread(target=lambda: queue.put(b"late"))
    monkeypatch.setattr(direct.Direct, "_note", late)
    thread.start()
    until(lambda: broker.engine.log.turn.request is not None)
    monkeypatch.setattr(writer, "SOON_S", 0.001)
    broker.engine.log._handing.turn._wake()
    until(lambda: len(queue) == 5)
    goes_on.set()
    thread.join()


def test_a_broker_is_closed_in_the_middle_by_a_handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its spool opened again; what the call would still write goes nowhere."""
    monkeypatch.setattr(direct, "PATIENCE_S", 0.01)
    with qflow.open(tmp_path / "spool") as broker:
        queue = begin(broker)
        one: Any = broker.engine.log._writer._confirming.journal
        write, again = one.write_alone, []

        def close_first(record: Any) -> None:
            one.write_alone = write
            broker.close()
            again.append(qflow.open(tmp_path / "spool"))
            again[0].queue("q").put_many([b"other"])
            write(record)

        one.write_alone = close_first
        assert queue.put(b"d") == 3
    with again[0]:
        assert again[0].check() == []
        assert again[0].queue("q").get_many(9).bodies == [b"a", b"b", b"c", b"d", b"other"]


def test_a_disk_that_fails_once_is_tried_again_by_the_writer(tmp_path: Path) -> None:
    """An error of the write, and one of the sync: the same bytes are written and synced once more."""
    faults = Faults()
    with faulty_broker(tmp_path, faults, journal="auto") as broker:
        queue = begin(broker)
        faults.fail("sync_data", OSError(5, "Input/output error"), times=1)
        assert queue.put(b"d") == 3
        rest(broker)
        faults.fail("pwrite", OSError(5, "Input/output error"), times=1)
        assert queue.put(b"e") == 4
        rest(broker)
        faults.fail("sync_data", OSError(5, "Input/output error"), times=1)
        put_together(broker, b"f", b"g")
        assert len(queue) == 7
        rest(broker)
        faults.fail("pwrite", OSError(5, "Input/output error"), times=1)
        put_together(broker, b"h", b"i")
        assert b"".join(queue.get_many(9).bodies) == b"abcdefghi"
        assert broker.check() == []
    with qflow.open(tmp_path) as broker:
        assert b"".join(broker.queue("q").get_many(9).bodies) == b"abcdefghi"


def test_an_error_of_a_sync_is_told_to_the_writer_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both sync, for the thread is late: the system tells it once for each opening of the file."""
    monkeypatch.setattr(direct, "PATIENCE_S", 0.01)
    faults = Faults()
    with faulty_broker(tmp_path, faults, journal="auto") as broker:
        queue = begin(broker)
        synced: list[int] = []
        sync = broker.engine.spool.files.sync_data
        monkeypatch.setattr(broker.engine.spool.files, "sync_data", lambda fd: (synced.append(fd), sync(fd)))
        at_sync(broker, lambda: in_thread(lambda: queue.put(b"next")))
        queue.put(b"late")
        *by_writer, late = synced
    assert len(by_writer) == 2
    assert late not in by_writer


def test_an_error_that_a_handler_raises_comes_out_though_it_looks_like_one_of_the_disk(broker: qflow.Broker) -> None:
    """A time-out is an `OSError`, and may have an error number."""

    def handler(*_: object) -> None:
        raise TimeoutError(110, "too late")

    queue, before = broker.queue("q"), signal.signal(signal.SIGUSR1, handler)
    try:
        at_sync(broker, lambda: signal.raise_signal(signal.SIGUSR1))
        with pytest.raises(TimeoutError, match="too late"):
            queue.put(b"d")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert queue.put(b"e") == 4
    assert queue.get_many(9).bodies[3:] == [b"d", b"e"]


def test_a_full_disk_refuses_puts_and_takes_acks(tmp_path: Path) -> None:
    faults = Faults()
    with faulty_broker(tmp_path, faults, journal="auto") as broker:
        queue = begin(broker)
        faults.fail("allocate", OSError(28, "No space left on device"))
        with pytest.raises(qflow.DiskFull):
            while True:
                queue.put(b"x" * 60_000, timeout_s=0)
        for body in (b"a", b"b"):
            delivery = queue.get()
            assert delivery.body == body
            delivery.ack(wait=True)
        faults.heal()
        queue.put(b"y")
        rest(broker)
        before = confirmed(broker)
        queue.put(b"z")
        assert confirmed(broker) == before + 1
        assert broker.check() == []


def test_a_forked_child_writes_nothing(broker: qflow.Broker, tmp_path: Path) -> None:
    queue = broker.queue("q")
    queue.put(b"d")

    def child() -> None:
        with pytest.raises(qflow.ForkedProcess):
            queue.put(b"child")

    assert run_in_child(child) == 0
    assert reopened(broker, tmp_path / "copy") == [b"a", b"b", b"c", b"d"]


def test_a_handler_forks_in_the_middle_and_the_child_writes_nothing(broker: qflow.Broker, tmp_path: Path) -> None:
    """It goes on with the put when its parent has begun the journal anew."""
    queue = broker.queue("q")
    one: Any = broker.engine.log._writer._confirming.journal
    write = one.write_alone

    def fork_first(record: journal.Record) -> None:
        one.write_alone = write

        def child() -> None:
            with pytest.raises(qflow.ForkedProcess):
                broker.engine.log.wait(broker.engine.log.turn.request)
            write(record._replace(data=b"x" * len(record.data)))

        write(record)
        assert run_in_child(child) == 0

    one.write_alone = fork_first
    queue.put(b"d")
    assert reopened(broker, tmp_path / "copy") == [b"a", b"b", b"c", b"d"]


@contextmanager
def forked_by_a_handler() -> Iterator[Callable[[], None]]:
    """Give what has a handler fork in the main thread, for another thread; the child is to be told before it leaves."""
    children: list[int] = []

    def fork(*_: object) -> None:
        if children:
            return
        children.append(os.fork())
        if not children[0]:
            faulthandler.dump_traceback_later(30, exit=True)
        forked.set()

    def strike() -> None:
        while not forked.wait(0.1):  # one that comes as the main thread begins to wait is seen when that ends
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    forked, before = threading.Event(), signal.signal(signal.SIGUSR1, fork)
    status = 1
    try:
        yield strike
    except qflow.ForkedProcess:
        status = 0
    finally:
        if children and not children[0]:
            os._exit(status)
        signal.signal(signal.SIGUSR1, before)
    assert os.waitpid(children[0], 0)[1] == 0


def test_a_handler_forks_while_another_thread_works_for_it_and_the_child_is_told(broker: qflow.Broker) -> None:
    """There is no such thread in the child, which waits for nobody, whatever it was in the middle of."""
    with forked_by_a_handler() as strike:
        at_sync(broker, strike)
        put_together(broker, b"d", b"e")
    assert broker.queue("q").get_many(9).bodies == [b"a", b"b", b"c", b"d", b"e"]


def test_a_handler_forks_while_its_thread_waits_for_the_writer_and_the_child_is_told(broker: qflow.Broker) -> None:
    """There is no writer in the child, which hung for good."""
    one = broker.engine.log._writer._confirming.journal
    assert one is not None
    sync, batch = one.sync, broker.queue("q").get_many(9)

    with forked_by_a_handler() as strike:

        def held_up(*given: Any) -> Any:
            strike()
            return sync(*given)

        one.sync = held_up  # type: ignore[method-assign]
        batch.ack(wait=True)
    assert len(broker.queue("q")) == 0


def test_a_journal_without_notes_is_read_and_another_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the format before: no note is written into it, for an older qflow would take it for something else."""
    spool = tmp_path / "spool"
    monkeypatch.setattr(journal, "FORMAT", 1)
    monkeypatch.setattr(Head.__new__, "__defaults__", (1, bytes(8)))
    with qflow.open(spool) as broker:
        begin(broker).put_many([b"d"])
        copy = inside.copy_as_killed(broker, tmp_path / "copy")
    monkeypatch.undo()
    data = (copy / JOURNAL).read_bytes()
    assert struct.unpack_from("<8sI", data)[1] == 1
    with qflow.open(copy) as broker:
        assert broker.recovery.journal_records > 0
        assert broker.queue("q").get_many(9).bodies == [b"a", b"b", b"c", b"d"]
        assert not (copy / JOURNAL).exists()


def test_a_note_that_does_not_fit_its_lane_is_reported(tmp_path: Path) -> None:
    """A log that is another one than the notes were made beside."""
    with qflow.open(tmp_path / "spool") as broker:
        queue = begin(broker)
        queue.put(b"x" * 2**20)  # all of it is committed
        early = inside.copy_as_killed(broker, tmp_path / "early")
        queue.put_many([b"d"] * 3)
        queue.put(b"x" * 2**20)
        rest(broker)
        queue.put(b"e")
        late = inside.copy_as_killed(broker, tmp_path / "late")
    os.replace(late / JOURNAL, early / JOURNAL)
    with qflow.open(early) as again:
        assert "fell back" in again.recovery.journal_problems[0]
        assert again.queue("q").get_many(9).bodies[:3] == [b"a", b"b", b"c"]


def test_a_record_is_written_twice_as_once(tmp_path: Path) -> None:
    one = Journal.create(str(tmp_path / JOURNAL), 8192, new_uuid(), FILES, 1)
    record = one.record(b"changes")
    one.write_record(record)
    one.write_record(record)
    assert record.position == HEADER_BYTES == one.position
    one.inside = True
    one.begin_anew()
    assert not one.fits(1)
    one.close()
    one.write_alone(record._replace(data=b"x" * 64))  # a thread that comes late
    assert b"x" * 64 not in (tmp_path / JOURNAL).read_bytes()
    assert issubclass(Struck, BaseException)


def test_the_thread_of_a_transaction_has_the_turn_until_all_of_it_is_visible(
    broker: qflow.Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes meanwhile is behind it, however little patience the writer has."""
    monkeypatch.setattr(direct, "PATIENCE_S", 0)
    queue, publish, later, turn = broker.queue("q"), Puts.publish, list[Any](), broker.engine.log.turn

    def meanwhile(*given: Any) -> None:
        monkeypatch.setattr(Puts, "publish", publish)
        later.append(in_thread(lambda: queue.submit(b"later")))
        until(lambda: not turn.open)  # the writer is about to take it
        publish(*given)

    monkeypatch.setattr(Puts, "publish", meanwhile)
    put_together(broker, b"d", b"e")
    assert later[0].result(60) == 5
    assert reopened(broker, tmp_path / "copy") == [b"a", b"b", b"c", b"d", b"e", b"later"]
    assert queue.get_many(9).sequences == range(6)


def test_a_transaction_that_cannot_be_made_visible_is_in_doubt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is promised after that; a handler of logging that is told of it does not wait for its own thread."""
    publish, refused = Puts.publish, list[BaseException]()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            try:
                queue.put(b"told")
            except qflow.QflowError as error:
                refused.append(error)

    handler = Handler()
    with qflow.open(tmp_path) as broker:
        queue = begin(broker)
        monkeypatch.setattr(Puts, "publish", lambda *_: 1 / 0)
        logging.getLogger("qflow").addHandler(handler)
        try:
            with pytest.raises(qflow.InDoubt):
                put_together(broker, b"d", b"e")
        finally:
            logging.getLogger("qflow").removeHandler(handler)
            monkeypatch.setattr(Puts, "publish", publish)
        with pytest.raises(qflow.BrokerFailed):
            queue.put(b"f")
    assert [type(error) for error in refused] == [qflow.Reentered]
    with qflow.open(tmp_path) as broker:
        assert broker.queue("q").get_many(9).bodies == [b"a", b"b", b"c", b"d", b"e"]


def test_a_log_that_has_failed_gives_nobody_the_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looked before that whether it has would note something behind what nobody knows."""
    clear_up, given = Together.clear_up, list[bool]()
    with qflow.open(tmp_path) as broker:
        begin(broker)
        turn = broker.engine.log.turn

        def look(*of: Any) -> None:
            given.append(turn.open)
            clear_up(*of)

        with monkeypatch.context() as patched, pytest.raises(qflow.InDoubt):
            patched.setattr(turn, "_wake", lambda: None)  # the writer, which takes it, comes later
            patched.setattr(Puts, "publish", lambda *_: 1 / 0)
            patched.setattr(Together, "clear_up", look)
            put_together(broker, b"d")
    assert given
    assert not any(given)


def test_what_a_thread_has_synced_and_the_writer_cannot_count_is_in_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was said not to be done, and was there after a kill."""

    def lacks_memory(*_: object) -> None:
        raise MemoryError

    broker = qflow.open(tmp_path / "spool")
    begin(broker)
    monkeypatch.setattr(Puts, "show", lambda *_: False)  # as where a handler strikes
    monkeypatch.setattr(direct.Direct, "_count_in", lacks_memory)
    with pytest.raises(qflow.InDoubt):
        broker.queue("q").put(b"d")
    monkeypatch.undo()
    with pytest.raises(qflow.BrokerFailed):
        broker.queue("q").put(b"e")
    assert reopened(broker, tmp_path / "copy") == [b"a", b"b", b"c", b"d"]
    broker.close()


def test_a_writer_without_memory_goes_on_with_what_a_thread_has_left(
    broker: qflow.Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for some, as for any batch; it ended, and whoever had the turn waited for good."""
    monkeypatch.setattr(writer, "SHORT_S", 0)
    tries: list[int] = []

    class Short(writer.Gate):
        def __init__(self) -> None:
            tries.append(1)
            if len(tries) < 3:
                raise MemoryError
            super().__init__()

    with monkeypatch.context() as patch:
        patch.setattr(Puts, "show", lambda *_: False)  # as where a handler strikes
        patch.setattr(writer, "Gate", Short)
        in_thread(lambda: broker.queue("q").put(b"d"))
    assert len(tries) >= 3
    assert reopened(broker, tmp_path / "copy") == [b"a", b"b", b"c", b"d"]


def test_notes_are_carried_out_once_where_what_follows_fails(
    broker: qflow.Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction that has them is not gone on with: there they would meet themselves, with every batch."""
    queue, carry_out, failed = broker.queue("q"), confirming.carry_out, []

    def left(*arguments: Any) -> Any:
        return {lane: (row, at, True) for lane, (row, at, _) in carry_out(*arguments).items()}

    def lacks_memory(*_: object) -> None:
        failed.append(1)
        raise MemoryError

    queue.put(b"d")
    with monkeypatch.context() as patch:
        patch.setattr(confirming, "carry_out", left)
        patch.setattr(Puts, "note_left", lacks_memory)
        with pytest.raises(MemoryError):
            queue.put_many([b"x" * 1000] * 200)
    assert failed
    queue.put_many([b"y" * 1000] * 200)
    assert reopened(broker, tmp_path / "copy") == [b"a", b"b", b"c", b"d", *[b"y" * 1000] * 200]
