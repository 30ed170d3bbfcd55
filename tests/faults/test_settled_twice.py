"""An ack that was interrupted and repeated settles one message, and a count that is wrong drops none."""

from __future__ import annotations

from typing import Any

import pytest

import qflow
from faults.seams import drained, in_thread
from faults.test_damage import edit
from qflow import inspect
from qflow import spool as spool_module
from qflow.queues.queue import parts_of
from qflow.storage.log.rows import Row, Settled, read_row, write_row


def interrupt_after(monkeypatch: pytest.MonkeyPatch, log: Any, name: str) -> None:
    """Have the next call of a method raise KeyboardInterrupt when it is done."""
    real = getattr(log, name)

    def interrupted(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(log, name, real)
        real(*arguments, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(log, name, interrupted)


@pytest.mark.parametrize("acked", [0, 1, 2])
def test_an_ack_that_was_interrupted_and_repeated_settles_one_message(acked, spool, monkeypatch):
    """I19: the range enters a batch twice; nothing else is gone when the spool is opened again."""
    with qflow.open(spool) as broker:
        queue = broker.declare_queue("q")
        queue.put_many([b"0", b"11", b"222"])
        held = [queue.get(0) for _ in range(3)]
        interrupt_after(monkeypatch, broker.engine.log, "handed_over")
        with pytest.raises(KeyboardInterrupt):
            held[acked].ack()
        with pytest.raises(qflow.AlreadySettled):  # it is done, though its caller does not know
            held[acked].ack(wait=True)
        (lane,) = parts_of(queue).logged_lanes
        broker.engine.log.commit(
            broker.engine.log.settle(lane, [Settled(acked, acked + 1, 1, acked + 1)])
        )  # all the same
        with broker.engine.log.read() as txn:
            row = read_row(txn, parts_of(queue).context.owner, 0)
        assert (row.messages, row.bytes) == (2, 5 - acked)
    assert inspect.check_spool(spool) == []
    left = [body for at, body in enumerate([b"0", b"11", b"222"]) if at != acked]
    with qflow.open(spool) as broker:
        assert broker.recovery.problems == ()
        assert drained(broker.queue("q")) == left


def test_a_batch_whose_ack_was_interrupted_and_repeated_in_parts(spool, monkeypatch):
    """I19: of what was left of a batch, and acked, and interrupted, one message is acked again, alone."""
    with qflow.open(spool) as broker:
        queue = broker.declare_queue("q")
        queue.put_many([b"%d" % number for number in range(6)])
        batch = queue.get_many(4)
        batch[0].ack()
        interrupt_after(monkeypatch, broker.engine.log, "settle_all")
        with pytest.raises(KeyboardInterrupt):
            batch.ack()
        batch[1].ack()
        batch.ack(wait=True)
    with qflow.open(spool) as broker:
        assert drained(broker.queue("q")) == [b"4", b"5"]


def test_a_whole_batch_whose_ack_was_interrupted_and_repeated(spool, monkeypatch):
    """I19: it is settled once, and its caller is told so."""
    with qflow.open(spool) as broker:
        queue = broker.declare_queue("q")
        queue.put_many([b"%d" % number for number in range(6)])
        batch = queue.get_many(4)
        interrupt_after(monkeypatch, broker.engine.log, "handed_over")
        with pytest.raises(KeyboardInterrupt):
            batch.ack()
        with pytest.raises(qflow.AlreadySettled):
            batch[1].ack()
        with pytest.raises(qflow.AlreadySettled):
            batch.ack(wait=True)
        assert broker.check() == []
    with qflow.open(spool) as broker:
        assert drained(broker.queue("q")) == [b"4", b"5"]


@pytest.mark.parametrize("count", [1, 40])
def test_a_row_that_says_empty_drops_nothing_that_lies_in_blocks(count, spool):
    """I19: a queue is empty when no block holds anything above the floor, never because a count says so."""
    with qflow.open(spool) as broker:
        queue = broker.declare_queue("q")
        queue.put_many([b"%03d" % number * 1_000 for number in range(count + 2)])
        queue.get_many(2).ack(wait=True)

    def empty(txn: Any) -> None:
        row = read_row(txn, 1, 0)
        write_row(txn, 1, 0, row._replace(messages=0, bytes=0))

    edit(spool, empty)
    for _ in range(2):  # what was served is in the log as before
        with qflow.open(spool) as broker:
            queue = broker.queue("q")
            assert any("says that it is empty" in problem for problem in broker.recovery.problems)
            assert [delivery.body for delivery in queue.get_many(100)] == [
                b"%03d" % number * 1_000 for number in range(2, count + 2)
            ]
        edit(spool, empty)
    with qflow.open(spool) as broker:
        assert len(drained(broker.queue("q"))) == count
        assert len(broker.queue("q")) == 0
    with qflow.open(spool) as broker:
        assert broker.recovery.problems == ()


def test_numbers_that_were_reserved_are_no_messages(spool):
    """A row that runs ahead of what is not logged, with nothing behind it, is empty."""
    with qflow.open(spool) as broker:
        broker.declare_queue("q").put(b"x")
        broker.queue("q").get(0).ack(wait=True)
    edit(spool, lambda txn: write_row(txn, 1, 0, Row(next=70_000, floor=1, tail=0)))
    with qflow.open(spool) as broker:
        assert broker.recovery.problems == ()
        assert broker.queue("q").put(b"y") == 70_000


@pytest.mark.parametrize("how", ["one", "batch", "ack_many"])
def test_an_ack_that_comes_while_the_rows_are_written_for_the_last_time_is_refused(how, spool, monkeypatch):
    """I3: it would be confirmed, and written over."""
    real = spool_module.write_ending
    broker = qflow.open(spool)
    queue = broker.declare_queue("q")
    queue.put_many([b"0", b"1", b"2"])
    held = queue.get_many(3)
    one = held[0]
    acks = {"one": one.ack, "batch": held.ack, "ack_many": lambda wait: queue.ack_many([one], wait=wait)}

    def ending(log: Any, pieces: Any) -> None:
        found = list(pieces())
        with pytest.raises(qflow.BrokerClosed):
            in_thread(lambda: acks[how](wait=True))
        real(log, lambda: found)

    monkeypatch.setattr(spool_module, "write_ending", ending)
    broker.close()
    with qflow.open(spool) as broker:
        assert broker.recovery.problems == ()
        again = broker.queue("q").get_many(3)
        assert again.bodies == [b"0", b"1", b"2"]
        assert [delivery.delivery_count for delivery in again] == [2, 2, 2]


@pytest.mark.parametrize("get", ["get", "get_many"])
def test_nothing_is_delivered_while_the_rows_are_written_for_the_last_time(get, spool, monkeypatch):
    """I3: its ack would be confirmed, and written over."""
    real = spool_module.write_ending
    broker = qflow.open(spool)
    queue = broker.declare_queue("q")
    queue.put_many([b"0", b"1"])
    gets = {"get": lambda: queue.get(0), "get_many": lambda: queue.get_many(2, 0)}

    def ending(log: Any, pieces: Any) -> None:
        found = list(pieces())
        with pytest.raises(qflow.BrokerClosed):
            in_thread(gets[get])
        real(log, lambda: found)

    monkeypatch.setattr(spool_module, "write_ending", ending)
    broker.close()
    with qflow.open(spool) as broker:
        assert broker.recovery.problems == ()
        assert [(one.body, one.delivery_count) for one in broker.queue("q").get_many(2)] == [(b"0", 1), (b"1", 1)]
