"""One message into many durable queues: what is made once for all of them, and that each has what it would have alone."""

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

import inside
import qflow
from doors import event_loop
from drivers import opening_tasks, owner_of
from faults.seams import PATIENCE_S, Faults, drained, faulty_broker
from qflow.broker import make_broker
from qflow.config import BrokerSettings
from qflow.memory.run_list import OWN_RUN
from qflow.message import Message, encode_headers
from qflow.queues.queue import parts_of
from qflow.storage import blocks
from qflow.storage.blocks import NO_PREVIOUS
from qflow.storage.contents import Content
from qflow.storage.log import batch_writing, spreading
from qflow.storage.log.batch_writing import BatchWriting
from qflow.storage.log.keys import scan
from unit.clocks import Clock

Open = Callable[..., qflow.Broker]
MANY = 40


def bound(broker: qflow.Broker, number: int = MANY, **settings: Any) -> list[qflow.Queue]:
    """Declare durable queues, and bind them to all topics."""
    queues = broker.declare_queues([f"q{index}" for index in range(number)], **settings)
    for queue in queues:
        broker.bind(queue, "#")
    return queues


class Counts:
    """How often something was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: dict[str, int] = {}
        for owner, name in (
            (Content, "__init__"),
            (spreading._After, "_new_state"),
            (spreading._After, "_stored"),
            (BatchWriting, "_write_lane"),
        ):
            monkeypatch.setattr(owner, name, self._counted(name, getattr(owner, name)))

    def _counted(self, name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            return function(*arguments)

        return call

    def taken(self) -> dict[str, int]:
        """Return the counts, and begin anew."""
        calls, self.calls = self.calls, {}
        return calls


def test_what_is_the_same_in_all_queues_is_made_once(open_spool: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """One state and two contents a publish, however many queues; tail blocks are read once, after an opening."""
    broker = open_spool()
    bound(broker)
    counts = Counts(monkeypatch)
    for _ in range(2):
        for number in range(100):  # over several blocks
            broker.publish("t", b"%d" % number)
            calls = counts.taken()
            assert calls.pop("__init__") <= 2
            assert calls == {"_new_state": 1}
        broker.close()
        broker = open_spool()
        counts.taken()
        broker.publish("t", b"first")
        assert counts.taken() == {"__init__": 2 + MANY, "_stored": MANY, "_new_state": 1}


def test_queues_with_different_histories_share_what_is_in_their_blocks(
    open_spool: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a state of its own; of a drained one the tail block is another than of one with a backlog."""
    broker = open_spool()
    queues = bound(broker)
    for index, queue in enumerate(queues):
        queue.put_many([b"x"] * (index + 1))
        queue.get_many(100).ack(wait=True)
    counts = Counts(monkeypatch)
    broker.publish("t", b"0")
    counts.taken()
    for number in range(20):
        broker.publish("t", b"%d" % number)
        calls = counts.taken()
        assert calls.pop("__init__") <= 2
        assert calls == {"_new_state": MANY}
    queues[3].get_many(100).ack(wait=True)
    queues[4].get(0).ack(wait=True)
    broker.publish("t", b"last")
    assert counts.taken()["__init__"] == 2
    assert [len(queue) for queue in queues] == [22, 22, 22, 1, 21, *[22] * (MANY - 5)]
    assert broker.check() == []


def test_a_column_of_kinds_is_not_taken_for_one_of_times(spool: Path) -> None:
    """Blocks may agree in all bytes but those that say what their columns are."""
    clock = Clock()

    def opened() -> qflow.Broker:
        return make_broker(spool, BrokerSettings(), clock=clock.wall, monotonic=clock.monotonic)

    whole = Message(b"body", encode_headers({"a": "b"}))
    with opened() as broker:
        of_kinds, of_times = bound(broker, 2)
        with broker.transaction() as transaction:
            transaction.put(of_kinds, b"0")
            transaction.put(of_kinds, b"body", headers={"a": "b"})
        of_times.put(b"0")
        clock.wall_s += 0.001
        of_times.put(bytes(whole))
    with opened() as broker:
        broker.publish("t", b"2")
    with opened() as broker:
        assert drained(broker.queue("q0")) == [b"0", b"body", b"2"]
        assert drained(broker.queue("q1")) == [b"0", bytes(whole), b"2"]


def test_contents_are_remembered_for_a_few_and_the_rest_is_read(
    open_spool: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for that is bounded: what was closed is read again, and the messages are the same."""
    monkeypatch.setattr(spreading, "CONTENTS_KEPT", 2)
    broker = open_spool()
    queues = bound(broker)
    for index, queue in enumerate(queues):
        queue.put(b"%d" % index)
    for number in range(3):
        broker.publish("t", b"p%d" % number)
    kept = broker.engine.log._writer._writing._spreading._kept  # type: ignore[attr-defined]
    assert len(kept) == 2
    tails = [parts_of(queue).lanes.logged[0].tail.content for queue in queues]
    assert sum(content.is_open for content in tails) <= 2
    assert all(content._shown == b"" for content in tails if not content.is_open)
    for index, queue in enumerate(queues):
        assert drained(queue) == [b"%d" % index, b"p0", b"p1", b"p2"]
    broker.publish_many([("t", bytes(1000))] * 20)  # no block of so much grows
    assert not parts_of(queues[0]).lanes.logged[0].tail.content.is_open


def held_up(broker: Any) -> threading.Event:
    """Have the writer wait: what is handed over meanwhile shares one batch. Return what lets it go on."""
    began, go_on = threading.Event(), threading.Event()

    def wait(_: Any) -> None:
        began.set()
        assert go_on.wait(PATIENCE_S)

    broker.engine.log.write(wait)
    broker.engine.log.now()
    assert began.wait(PATIENCE_S)
    return go_on


@pytest.mark.parametrize("between", ["nothing", "a put", "a put elsewhere", "other queues", "a large body"])
def test_publishes_of_one_batch_keep_their_order(
    open_spool: Open, between: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are written together as long as the queues are the same; what comes between has its place."""
    broker = open_spool()
    queues = bound(broker, 5)
    other = broker.declare_queue("other")
    broker.bind(queues[1], "u")
    broker.unbind(queues[2], "#")
    broker.bind(queues[2], "t")
    counts = Counts(monkeypatch)
    go_on = held_up(broker)
    counts.taken()
    large = bytes(5_000)
    futures: list[Any] = [broker.submit_publish("t", b"1"), broker.submit_publish("t", b"2")]
    if between == "a put":
        futures.append(queues[0].submit(b"x"))
    elif between == "a put elsewhere":
        futures.append(other.submit(b"x"))
    elif between == "other queues":
        futures.append(broker.submit_publish("u", b"x"))
    elif between == "a large body":
        futures.append(broker.submit_publish("t", large))
    futures += [broker.submit_publish("t", b"3")]
    before = broker.stats().commits_total
    go_on.set()
    results = [future.result(PATIENCE_S) for future in futures]
    assert broker.stats().commits_total - before <= 2  # the one that waited, too
    parts = [b"1", b"2", b"3"]
    whole = [b"1", b"2", {"other queues": b"x", "a large body": large}.get(between, b""), b"3"]
    expected = [whole if len(whole[2]) else parts for _ in queues]
    if between == "a put":
        expected[0] = [b"1", b"2", b"x", b"3"]
    elif between == "other queues":
        expected[2] = parts
    assert results[0].sequences == {queue.name: 0 for queue in queues}
    assert results[-1].sequences == {queue.name: len(found) - 1 for queue, found in zip(queues, expected, strict=True)}
    assert [drained(queue) for queue in queues] == expected
    assert drained(other) == ([b"x"] if between == "a put elsewhere" else [])
    with broker.engine.log.read() as txn:  # type: ignore[attr-defined]
        assert sum(len(value) > len(large) for _, value in txn.cursor().iternext()) == (between == "a large body")
    assert broker.check() == []


def test_what_is_settled_or_purged_in_the_commit_of_a_publish_is_gone(open_spool: Open) -> None:
    """Rows say both, whatever was written first."""
    broker = open_spool()
    queues = bound(broker, 6)
    for number in range(3):
        broker.publish("t", b"%d" % number)
    held = [queue.get(0) for queue in queues[:2]]
    go_on = held_up(broker)
    future = broker.submit_publish("t", b"3")
    for delivery in held:
        delivery.ack()
    broker.engine.log.purge(parts_of(queues[4]).logged_lanes)  # type: ignore[attr-defined]
    go_on.set()
    assert set(future.result(PATIENCE_S).sequences.values()) == {3}
    assert broker.check() == []
    broker.close()
    broker = open_spool()
    contents = [drained(broker.queue(queue.name)) for queue in queues]
    all_of_it = [b"0", b"1", b"2", b"3"]
    assert contents == [all_of_it[1:], all_of_it[1:], all_of_it, all_of_it, [b"3"], all_of_it]
    assert broker.check() == []


def test_a_queue_that_has_no_room_at_once_does_not_keep_the_others_from_going_together(
    open_spool: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drops its oldest, drops what comes, or makes it a dead letter; the result names all, in order."""
    broker = open_spool(journal="off")  # with one, a publish is noted there, and carried out later
    queues = bound(broker, 8)
    broker.declare_queue("dead")
    broker.alter_queue("q2", limit_messages=1, on_overflow=qflow.Overflow.DROP_OLDEST)
    broker.alter_queue("q4", limit_messages=1, on_overflow=qflow.Overflow.DROP_NEWEST)
    broker.alter_queue("q6", limit_messages=1, on_overflow=qflow.Overflow.DEAD_LETTER, dead_letter="dead")
    broker.publish("t", b"0")
    broker.publish("t", b"1")
    counts = Counts(monkeypatch)
    result = broker.publish("t", b"2")
    calls = counts.taken()
    assert calls["_new_state"] == 1
    assert list(result.sequences.items()) == [
        (queue.name, None if queue.name in ("q4", "q6") else 2) for queue in queues
    ]
    contents = {queue.name: drained(queue) for queue in queues}
    assert contents.pop("q2") == [b"2"]
    assert contents.pop("q4") == contents.pop("q6") == [b"0"]
    assert list(contents.values()) == [[b"0", b"1", b"2"]] * 5
    assert drained(broker.queue("dead")) == [b"1", b"2"]
    assert broker.check() == []


@pytest.mark.two_drivers
def test_a_task_fans_out_as_a_thread_does(spool: Path, access: str) -> None:
    """It waits for the one that has no room, and cancelled there it leaves nothing in any queue."""

    async def main() -> None:
        async with opening_tasks(access, partial(qflow.open, spool)) as broker:
            owner = owner_of(broker).broker
            queues = bound(owner, 8)
            owner.alter_queue("q5", limit_messages=1)
            await broker.publish("t", b"0")
            admission = parts_of(queues[5]).admission
            waiting = asyncio.ensure_future(broker.publish("t", b"1"))
            await event_loop.until(lambda: len(admission.line) == 1)
            cancelled = asyncio.ensure_future(broker.publish("t", b"lost"))
            await event_loop.until(lambda: len(admission.line) == 2)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            await event_loop.until(lambda: len(admission.line) == 1)
            queues[5].get(0).ack(wait=True)
            result = await waiting
            assert list(result.sequences.items()) == [(queue.name, 1) for queue in queues]
            assert [drained(queue) for queue in queues] == [
                [b"1"] if queue is queues[5] else [b"0", b"1"] for queue in queues
            ]
            assert all(inside.left_behind(queue) == {} for queue in queues)
            assert owner.check() == []

    asyncio.run(main())


def test_many_messages_for_the_same_queues_fan_out_together(open_spool: Open) -> None:
    """As a run of their own, where they are many; and each result says where its message is."""
    broker = open_spool(max_transaction_bytes="100KiB")
    queues = bound(broker, 3, max_message_bytes=50_000)
    broker.declare_stream("s", topics=["#"])
    results = broker.publish_many([(f"t/{number % 2}", b"%d" % number) for number in range(2 * OWN_RUN)])
    assert [result.sequences for result in results] == [
        {queue.name: number for queue in queues} for number in range(2 * OWN_RUN)
    ]
    assert [result.offsets["s"] for result in results] == list(range(2 * OWN_RUN))
    for queue in queues:
        assert drained(queue) == [b"%d" % number for number in range(2 * OWN_RUN)]
    with pytest.raises(qflow.InvalidArgument, match="publish_many takes"):
        broker.publish_many([("t", b"x"), ("t", b"x", None, 1)])
    with pytest.raises(qflow.TransactionTooLarge):
        broker.publish_many([("t", bytes(3000))] * 40)
    with pytest.raises(qflow.MessageTooLarge):
        broker.publish("t", bytes(60_000))
    assert all(inside.left_behind(queue) == {} for queue in queues)
    assert broker.check() == []


def test_a_publish_that_is_refused_leaves_nothing_in_any_queue(spool: Path) -> None:
    """Before the commit, whatever is raised; the next one finds all as it was."""
    faults = Faults()
    with faulty_broker(spool, faults) as broker:
        queues = bound(broker)
        broker.publish("t", b"0")
        for operation, error in (("begin", lmdb.MemoryError("no")), ("make_room", qflow.DiskFull("no"))):
            faults.fail(operation, error, times=1)
            with pytest.raises(qflow.QflowError):
                broker.publish("t", b"lost")
            faults.heal()
            assert all(inside.left_behind(queue) == {} for queue in queues)
        broker.publish("t", b"1")
        assert all(drained(queue) == [b"0", b"1"] for queue in queues)
        assert broker.check() == []


def test_a_map_that_is_full_is_grown_and_the_publish_written_once(spool: Path) -> None:
    faults = Faults()
    with faulty_broker(spool, faults) as broker:
        queues = bound(broker)
        for number in range(3):
            faults.fail("commit", lmdb.MapFullError("full"), times=1)
            assert set(broker.publish("t", b"%d" % number).sequences.values()) == {number}
        assert all(drained(queue) == [b"0", b"1", b"2"] for queue in queues)


def test_damaged_pages_of_one_lane_refuse_the_publish_and_say_which(
    open_spool: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is refused, for it is one unit; queues that are not damaged go on."""
    broker = open_spool()
    queues = bound(broker)
    broker.publish("t", b"0")
    assert broker.check() == []  # so the log has it, and the next one touches pages on the disk
    items = spreading._items

    def damaged(lanes: Any, states: Any, current: Any) -> Any:
        for key, value in items(lanes, states, current):
            if current[0].owner == parts_of(queues[7]).context.owner:
                raise lmdb.CorruptedError("damaged")
            yield key, value

    monkeypatch.setattr(spreading, "_items", damaged)
    with pytest.raises(qflow.QflowError):
        broker.publish("t", b"1")
    monkeypatch.undo()
    assert [parts_of(queue).lanes.logged[0].broken is not None for queue in queues] == [
        queue is queues[7] for queue in queues
    ]
    assert all(inside.left_behind(queue) == {} for queue in queues)
    broker.unbind(queues[7], "#")
    assert len(broker.publish("t", b"2").sequences) == MANY - 1
    assert drained(queues[8]) == [b"0", b"2"]


def test_damaged_pages_below_one_tail_block_cost_who_shares_the_commit_nothing(spool: Path) -> None:
    """After an opening it is read: the lane is told, as one whose block cannot be written."""
    faults = Faults()
    with faulty_broker(spool, faults) as broker:
        bound(broker, 3)
        broker.declare_queue("other")
        broker.publish("t", b"0")
    with faulty_broker(spool, faults) as broker:
        faulty = parts_of(broker.queue("q1")).lanes.logged[0]
        stored = spreading._After._stored

        def damaged(self: Any, txn: Any, lane: Any) -> Any:
            if lane is faulty:
                raise lmdb.CorruptedError("damaged")
            return stored(self, txn, lane)

        other = broker.queue("other")
        begun, go_on = threading.Event(), threading.Event()

        def before() -> None:
            begun.set()
            assert go_on.wait(PATIENCE_S)

        faults.before["commit"] = before
        first = other.submit(b"0")
        assert begun.wait(PATIENCE_S)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spreading._After, "_stored", damaged)
            refused = broker.submit_publish("t", b"1")
            fine = other.submit(b"1")
            go_on.set()
            with pytest.raises(qflow.CorruptionError):
                refused.result(PATIENCE_S)
            assert (first.result(PATIENCE_S), fine.result(PATIENCE_S)) == (0, 1)
        assert faulty.broken is not None
        assert all(inside.left_behind(broker.queue(name)) == {} for name in broker.queues())


def test_a_publish_beside_a_damaged_lane_is_made_visible_once(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transaction is begun anew without what is of that lane, and then the publish is written lane by lane."""
    faults = Faults()
    with faulty_broker(spool, faults) as broker:
        queues, other = bound(broker, 3), broker.declare_queue("other")
        append = batch_writing.append_messages

        def damaged(txn: Any, key: Any, *others: Any, **named: Any) -> Any:
            if key.owner == parts_of(other).context.owner:
                raise lmdb.CorruptedError("damaged")
            return append(txn, key, *others, **named)

        begun, go_on = threading.Event(), threading.Event()

        def before() -> None:
            begun.set()
            assert go_on.wait(PATIENCE_S)

        faults.before["commit"] = before
        first = broker.submit_publish("t", b"0")
        assert begun.wait(PATIENCE_S)
        monkeypatch.setattr(batch_writing, "append_messages", damaged)
        fine, refused = broker.submit_publish("t", b"1"), other.submit(b"1")
        go_on.set()
        with pytest.raises(qflow.CorruptionError):
            refused.result(PATIENCE_S)
        monkeypatch.undo()
        assert [set(one.result(PATIENCE_S).sequences.values()) for one in (first, fine)] == [{0}, {1}]
        broker.publish("t", b"2")
        assert all(inside.left_behind(queue) == {} for queue in queues)
        assert broker.check() == []
        assert all(drained(queue) == [b"0", b"1", b"2"] for queue in queues)


def test_a_publish_that_a_full_map_refuses_is_not_visible(spool: Path) -> None:
    """It was written before that was found, in a transaction that came to nothing."""
    faults = Faults()
    with faulty_broker(spool, faults) as broker:
        queues = bound(broker, 3)
        broker.publish("t", b"0")
        env = broker.engine.log._env

        def confine() -> None:
            env.confined = True

        faults.before["commit"] = confine
        faults.fail("commit", lmdb.MapFullError("full"), times=1)
        with pytest.raises(qflow.DiskFull):
            broker.publish("t", b"refused")
        faults.before.clear()
        broker.publish("t", b"1")
        assert all(inside.left_behind(queue) == {} for queue in queues)
        assert broker.check() == []
        assert all(drained(queue) == [b"0", b"1"] for queue in queues)


def test_a_body_of_a_refused_publish_is_not_stored(open_spool: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was to be stored once for all of them; what else is in the commit is written without it."""
    broker = open_spool()
    queues = bound(broker, 3)
    append = batch_writing.append_stand_ins

    def damaged(txn: Any, key: Any, *others: Any, **named: Any) -> Any:
        if key.owner == parts_of(queues[1]).context.owner:
            raise lmdb.CorruptedError("damaged")
        return append(txn, key, *others, **named)

    monkeypatch.setattr(batch_writing, "append_stand_ins", damaged)
    with pytest.raises(qflow.CorruptionError):
        broker.publish("t", b"x" * 10_000)
    monkeypatch.undo()
    assert broker.engine.log.problems() == []


def test_blocks_are_chained_and_counted_as_those_of_any_put(open_spool: Open) -> None:
    """Over blocks that are full, behind those of puts: a check finds nothing, and a reopened spool has all messages."""
    chance = random.Random(7)
    broker = open_spool()
    queues = bound(broker, 12)
    expected: list[list[bytes]] = [[] for _ in queues]
    for number in range(150):
        body = b"%d " % number * chance.choice([1, 3, 30, 300, 1500])
        broker.publish("t", body)
        for lot in expected:
            lot.append(body)
        at = chance.randrange(len(queues))
        step = chance.random()
        if step < 0.3:
            queues[at].put(body)
            expected[at].append(body)
        elif step < 0.5 and expected[at]:
            batch = queues[at].get_many(chance.choice([1, 5, 100]))
            assert batch.bodies == expected[at][: len(batch)]
            batch.ack(wait=True)
            del expected[at][: len(batch)]
        elif step < 0.6:
            queues[at].put(b"not logged", durable=False)
            expected[at].append(b"not logged")
        elif step < 0.65:
            queues[at].purge()
            expected[at].clear()
    assert broker.check() == []
    broker.close()
    broker = open_spool()
    assert broker.recovery.clean
    assert not broker.recovery.problems
    for queue, lot in zip([broker.queue(f"q{index}") for index in range(12)], expected, strict=True):
        assert drained(queue) == [body for body in lot if body != b"not logged"]
    assert broker.check() == []


def blocks_of(broker: Any, queue: qflow.Queue) -> list[tuple[int, int, int]]:
    """Return of each block in the log where it begins, what it says of the one before, and how long it is."""
    with broker.engine.log.read() as txn:
        values = [value for _, value in scan(txn, parts_of(queue).context.owner, 0, 0, 2**62)]
    headers = [blocks.read_header(value, where="a block") for value in values]
    return [(head.key.first, head.previous, len(value)) for head, value in zip(headers, values, strict=True)]


def test_a_clock_that_goes_back_begins_new_blocks(spool: Path) -> None:
    """Times in a block are counted from its first; the chain of blocks holds."""
    clock = Clock()
    settings = BrokerSettings()
    with make_broker(spool, settings, clock=clock.wall, monotonic=clock.monotonic) as broker:
        bound(broker, 3)
        for number in range(4):
            broker.publish("t", b"%d" % number)
            clock.wall_s -= 3600
        for name in broker.queues():
            found = blocks_of(broker, broker.queue(name))
            assert [previous for _, previous, _ in found] == [NO_PREVIOUS, 0, 1, 2]
        assert broker.check() == []
    with make_broker(spool, settings, clock=clock.wall, monotonic=clock.monotonic) as broker:
        assert not broker.recovery.problems
        for name in broker.queues():
            assert drained(broker.queue(name)) == [b"0", b"1", b"2", b"3"]


def test_numbers_of_what_is_not_logged_stay_reserved(open_spool: Open, tmp_path: Path) -> None:
    """After a crash no message has the sequence of one before."""
    broker = open_spool()
    queues = bound(broker, 3)
    queues[1].put(b"not logged", durable=False)
    broker.publish("t", b"logged")
    assert queues[1].put(b"not logged", durable=False) == 2
    broker.snapshot(tmp_path / "crashed")
    with qflow.open(tmp_path / "crashed") as after:
        assert after.queue("q1").put(b"new") > 2
        assert drained(after.queue("q1")) == [b"logged", b"new"]


def test_numbers_of_what_is_not_logged_are_not_given_again(open_spool: Open, tmp_path: Path) -> None:
    """Also where the lanes were in one state before: such a message takes a number without a commit."""
    broker = open_spool()
    queues = bound(broker, 2)
    for queue in queues:
        queue.put(b"not logged", durable=False)
    broker.publish("t", b"1")
    assert queues[1].put(b"not logged", durable=False) == 2
    assert broker.publish("t", b"2").sequences == {"q0": 2, "q1": 3}
    for _ in range(3):
        queues[1].get_nowait().ack()
    broker.snapshot(tmp_path / "crashed")
    with qflow.open(tmp_path / "crashed") as after:
        assert not after.recovery.problems
        assert drained(after.queue("q1")) == [b"2"]


def test_tail_blocks_of_a_wide_spread_are_small(open_spool: Open) -> None:
    """Each publish writes them anew: they stay below a page."""
    broker = open_spool()
    queues = bound(broker)
    for number in range(60):
        broker.publish("t", b"%060d" % number)
    for queue in queues:
        found = blocks_of(broker, queue)
        assert [previous for _, previous, _ in found] == [NO_PREVIOUS, *[first for first, _, _ in found[:-1]]]
        assert len(found) > 1
        assert max(size for _, _, size in found) < 2000
