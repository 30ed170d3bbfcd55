"""A log whose begin, commit or making of room fails, before or after the real one; and with nobody after it."""

from __future__ import annotations

import errno
import threading

import lmdb
import pytest

import qflow
import qflow.aio
from doors.event_loop import run
from faults.seams import PATIENCE_S, Faults, drained, faulty_broker, in_thread, open_faulty
from qflow.queues.queue import parts_of
from qflow.storage import environment
from qflow.storage.log import writer
from qflow.storage.log.rows import read_row
from unit.clocks import until


@pytest.fixture
def faults():
    return Faults()


# Before the commit: nothing was done, and the next one works ------------------------------------------------------------


@pytest.mark.parametrize("step", ["begin", "make_room"])
@pytest.mark.parametrize(
    "error",
    [
        lmdb.Error("no"),
        lmdb.CorruptedError("no"),
        SystemError("<method 'delete' of 'Cursor' objects> returned a result with an exception set"),
        qflow.StorageError("no"),
        qflow.DiskFull("no"),
        MemoryError("no"),
        KeyboardInterrupt(),
        SystemExit(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_put_that_fails_before_its_transaction_leaves_no_trace(step, error, spool, faults):
    """Edge 26: the caller gets an error, depth and room are given back, and the next put works by itself."""
    with faulty_broker(spool, faults, capacity_bytes=1_000) as broker:
        queue = broker.declare_queue("q", limit_messages=2)
        queue.put(b"before")
        faults.fail(step, error, times=1)
        ours = {lmdb.Error: qflow.StorageError, lmdb.CorruptedError: qflow.CorruptionError}
        ours[SystemError] = qflow.CorruptionError  # the binding of LMDB has met damaged pages
        with pytest.raises(ours.get(type(error), type(error))):
            queue.put(b"no")
        assert broker.check() == []
        assert len(queue) == 1
        assert in_thread(lambda: queue.put(b"after", timeout_s=0)) >= 1  # the room was given back
        assert drained(queue) == [b"before", b"after"]
        assert broker.check() == []


@pytest.mark.parametrize("step", ["begin", "make_room"])
@pytest.mark.parametrize("error", [lmdb.Error("no"), MemoryError("no"), qflow.StorageError("no"), qflow.DiskFull("no")])
def test_an_unwaited_ack_survives_an_error_of_somebody_elses_put(step, error, spool, faults, monkeypatch):
    """Edge 26: an ack that shared a batch with a put that failed rides the next one, and is not forgotten."""
    monkeypatch.setattr(writer, "FLUSH_S", PATIENCE_S)  # they share one
    with faulty_broker(spool, faults) as broker:
        queue, other = broker.declare_queue("q"), broker.declare_queue("other")
        queue.put_many([b"a", b"b"])
        faults.fail(step, error, times=2)
        queue.get().ack()
        with pytest.raises((qflow.StorageError, MemoryError)):
            other.put(b"x")
        faults.heal()
        other.put(b"y")
        assert broker.check() == []
    with qflow.open(spool) as broker:
        assert [delivery.body for delivery in broker.queue("q").get_many(9)] == [b"b"]


@pytest.mark.parametrize("step", ["begin", "make_room"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_everybody_in_a_batch_that_fails_is_told_and_the_next_goes_on(step, error, spool, faults, monkeypatch):
    """Edge 26: whatever is raised in the writer, it goes on; those who share the batch are told, and nothing is kept."""
    monkeypatch.setattr(writer, "FLUSH_S", PATIENCE_S)  # they share one
    with faulty_broker(spool, faults) as broker:
        queue = broker.declare_queue("q", limit_messages=9)
        faults.fail(step, error, times=1)
        futures = [queue.submit(b"%d" % number) for number in range(8)]
        with pytest.raises(error):
            in_thread(lambda: queue.put(b"waits"))
        assert [type(future.exception(PATIENCE_S)) for future in futures] == [error] * 8
        assert len(queue) == 0
        assert broker.check() == []
        for number in range(9):
            in_thread(lambda body=b"%d" % number: queue.put(body, timeout_s=0))
        assert drained(queue) == [b"%d" % number for number in range(9)]
        assert broker.check() == []


def test_what_was_refused_is_tried_again(spool, faults):
    """An error that was over in a moment does not keep an ack waiting."""
    with faulty_broker(spool, faults) as broker:
        queue = broker.declare_queue("q")
        queue.put(b"x")
        faults.fail("begin", lmdb.Error("no"), times=1)
        queue.get().ack()
        until(lambda: not broker.engine.log.busy)
        with broker.engine.log._env.reading() as txn:
            assert read_row(txn, parts_of(queue).context.owner, 0).messages == 0


def test_a_lone_submit_is_confirmed_with_nobody_after_it(spool):
    """Edge 26: what nobody waits for is written all the same."""
    with qflow.open(spool) as broker:
        assert broker.declare_queue("q").submit(b"x").result(timeout=PATIENCE_S) == 0


def test_a_lone_unwaited_ack_reaches_the_log_with_nobody_after_it(spool):
    """Edge 26: the same for an ack; it is in the log although nothing follows and nobody closes."""
    with qflow.open(spool) as broker:
        queue = broker.declare_queue("q")
        queue.put(b"x")
        queue.get().ack()
        until(lambda: not broker.engine.log.busy)
        txn = broker.engine.log._env.begin()
        try:
            assert read_row(txn, parts_of(queue).context.owner, 0).messages == 0
        finally:
            txn.abort()


# At the commit: in doubt ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True], ids=["not on disk", "on disk"])
@pytest.mark.parametrize(
    "error", [lmdb.Error("mdb_txn_commit: Input/output error"), KeyboardInterrupt(), MemoryError()], ids=type
)
def test_a_failed_commit_is_in_doubt_and_resolved_by_reopening(error, late, spool, faults):
    """Edge 21: the caller and all who rode along get InDoubt, then BrokerFailed; gets go on; reopening tells which."""
    broker = open_faulty(spool, faults)
    queue = broker.declare_queue("q")
    queue.put_many([b"a", b"b"])
    faults.fail("commit", error, times=1, late=late)
    said = str(error) or type(error).__name__  # a MemoryError has no text of its own
    with pytest.raises(qflow.InDoubt, match=rf"a commit failed \({said}\): .* opened again"):
        queue.put(b"doubtful")
    for call in (
        lambda: queue.put(b"x"),
        lambda: queue.put_many([b"x"]),
        lambda: queue.submit(b"x"),
        lambda: broker.declare_queue("new"),
        lambda: queue.purge(),
    ):
        with pytest.raises(qflow.BrokerFailed, match="open the spool again"):
            in_thread(call)
    delivery = queue.get(0)
    assert delivery.body == b"a"
    with pytest.raises(qflow.BrokerFailed):
        delivery.ack()
    stats = queue.stats()
    assert stats.messages == 2
    with pytest.raises(qflow.QueueEmpty):
        queue.get(0), queue.get(0)
    broker.close()
    with qflow.open(spool) as broker:
        assert not broker.recovery.clean
        batch = broker.queue("q").get_many(9)
        assert batch.bodies == [b"a", b"b", b"doubtful"][: 3 if late else 2]
        assert all(delivery.redelivered for delivery in batch)
        batch.ack(wait=True)
        assert broker.queue("q").put(b"new") >= 2 + late
        assert broker.check() == []


def test_everybody_in_a_batch_in_doubt_is_told(spool, faults):
    """Edge 21: each of many callers whose puts shared the failed commit gets an error, and none hangs."""
    broker = open_faulty(spool, faults)
    queue = broker.declare_queue("q", limit_messages=1000)
    faults.fail("commit", lmdb.Error("Input/output error"), after=3)
    outcomes: list[BaseException | int] = []

    def produce() -> None:
        try:
            while True:
                outcomes.append(queue.put(b"x"))
        except qflow.StorageError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=produce, daemon=True) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a producer hangs"
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert len(errors) == 16
    assert any(isinstance(error, qflow.InDoubt) for error in errors)
    confirmed = len(outcomes) - 16
    assert queue.stats().messages == confirmed
    broker.close()
    with qflow.open(spool) as broker:
        assert len(broker.queue("q")) >= confirmed


def test_submits_and_waited_acks_in_a_batch_in_doubt_are_told(spool, faults):
    """Edge 21: the future of a submit and `ack(wait=True)` raise InDoubt; the message comes again, or not."""
    broker = open_faulty(spool, faults)
    queue = broker.declare_queue("q")
    queue.put(b"a")
    delivery = queue.get()
    faults.fail("commit", lmdb.Error("Input/output error"), times=1)
    with pytest.raises(qflow.InDoubt):
        delivery.ack(wait=True)
    broker.close()
    faults.heal()
    broker = open_faulty(spool, faults)
    faults.fail("commit", lmdb.Error("Input/output error"), times=1)
    future = broker.queue("q").submit(b"b")
    assert isinstance(future.exception(timeout=PATIENCE_S), qflow.InDoubt)
    broker.close()
    with qflow.open(spool) as broker:
        assert drained(broker.queue("q")) == [b"a"]


def test_ack_many_settles_all_or_none_though_the_log_fails_meanwhile(spool, faults):
    """A commit of others fails while the deliveries are gathered: refused, and none of them is settled."""
    broker = open_faulty(spool, faults)
    queue = broker.declare_queue("q")
    queue.put_many([b"1", b"2", b"3"])
    held = [queue.get() for _ in range(3)]

    def gather():
        yield held[0]
        broker.engine.log.drain()  # had the first one been settled by itself, it would be on disk now
        faults.fail("commit", lmdb.Error("Input/output error"), times=1)
        with pytest.raises(qflow.InDoubt):
            queue.put(b"doubtful")
        yield from held[1:]

    with pytest.raises(qflow.BrokerFailed):
        queue.ack_many(gather(), wait=True)
    broker.close()
    with qflow.open(spool) as broker:
        assert drained(broker.queue("q")) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("late", [False, True], ids=["not on disk", "on disk"])
def test_ack_many_in_a_batch_in_doubt_is_told(late, spool, faults):
    """Edge 21: one commit has all of them, which holds or not."""
    broker = open_faulty(spool, faults)
    queue = broker.declare_queue("q", priorities=2)
    for priority in (0, 1, 0, 1):
        queue.put(b"%d" % priority, priority=priority)
    faults.fail("commit", lmdb.Error("Input/output error"), times=1, late=late)
    with pytest.raises(qflow.InDoubt):
        queue.ack_many([queue.get() for _ in range(4)], wait=True)
    broker.close()
    with qflow.open(spool) as broker:
        assert len(broker.queue("q")) == (0 if late else 4)


def test_a_task_that_waits_for_settles_of_before_the_log_failed_is_in_doubt(spool, faults):
    """The ack holds, in the queue and in the subscription; whoever asks only now is not told that nothing was done."""

    async def scenario():
        async with qflow.aio.AsyncBroker(open_faulty(spool, faults)) as broker:
            queue = await broker.declare_queue("q")
            await broker.declare_stream("s", topics=["t"])
            await queue.put(b"1")
            await broker.publish("t", b"1")
            reader = await broker.subscribe("s", name="r", start="earliest")
            await (await queue.get()).ack()
            await (await reader.get()).ack()
            broker.broker.engine.log.drain()
            faults.fail("commit", lmdb.Error("Input/output error"), times=1)
            with pytest.raises(qflow.InDoubt):
                await queue.put(b"doubtful")
            for held in (queue._work, reader._settling):
                with pytest.raises(qflow.InDoubt, match="opened again"):
                    await held.settled()

    run(scenario())
    with qflow.open(spool) as broker:
        assert len(broker.queue("q")) == 0
        with broker.subscribe("s", name="r", follow=False) as reader:
            assert list(reader) == []


# A map that is full ------------------------------------------------------------------------------------------------------


def test_a_full_map_is_grown_and_the_put_goes_on(spool, monkeypatch):
    """Edge 22: with a small map (an address-space limit) puts, acks and reads go on while it doubles."""
    monkeypatch.setattr(environment, "MAP_BYTES", 2**20)
    with qflow.open(spool, capacity_bytes=20_000) as broker:
        queue = broker.declare_queue("q")
        bodies = [b"%d" % number * 1_000 for number in range(100)]
        for number in range(20):
            queue.put_many(bodies)
            if number % 4 == 0:
                queue.get().ack(wait=True)
        assert broker.engine.log._env._env.info()["map_size"] > 2**20
        assert broker.check() == []
        assert drained(queue) == (bodies * 20)[5:]
        assert broker.check() == []


@pytest.mark.parametrize("step", ["make_room", "commit", "begin"])
def test_map_full_raised_at_any_step_is_survived(step, spool, faults):
    """Edge 22: MapFullError wherever it shows up grows the map, and the batch is done again as a whole."""
    with faulty_broker(spool, faults) as broker:
        queue = broker.declare_queue("q")
        queue.put_many([b"a", b"b"])
        faults.fail(step, lmdb.MapFullError("full"), times=1)
        assert in_thread(lambda: queue.put(b"c")) == 2
        faults.fail(step, lmdb.MapFullError("full"), times=1)
        in_thread(lambda: queue.get().ack(wait=True))
        assert faults.calls["grow_map"] == 2
        assert drained(queue) == [b"b", b"c"]
        assert broker.check() == []


def test_a_long_reader_does_not_stop_puts(spool):
    """Edge 22: another process that reads for long pins pages; puts go on and the log grows."""
    with qflow.open(spool) as broker:
        queue = broker.declare_queue("q")
        queue.put(b"a")
        txn = broker.engine.log._env.begin()
        try:
            for _ in range(50):
                queue.put(b"x" * 1_000)
        finally:
            txn.abort()
        assert len(drained(queue)) == 51


# Room in the log ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_for_the_log_refuses_puts_and_lets_acks_and_gets_go_on(number, spool, faults):
    """I12: DiskFull says what to do; gets and acks work; puts work again by themselves when there is space."""
    with faulty_broker(spool, faults) as broker:
        queue = broker.declare_queue("q")
        queue.put_many([b"x" * 1_000] * 10)
        real = broker.engine.log._env.make_room

        def full(value_bytes: int, values: int, *, settles_only: bool) -> None:
            if not settles_only:
                raise qflow.DiskFull("no room: free some space")
            real(value_bytes, values, settles_only=settles_only)

        broker.engine.log._env.make_room = full
        with pytest.raises(qflow.DiskFull, match="free some space"):
            queue.put(b"y")
        with pytest.raises(qflow.DiskFull):
            queue.put_many([b"y"] * 3)
        assert isinstance(queue.submit(b"y").exception(timeout=PATIENCE_S), qflow.DiskFull)
        queue.get().ack(wait=True)
        queue.get().ack()
        assert broker.check() == []
        broker.engine.log._env.make_room = real
        queue.put(b"z")
        assert len(queue) == 9
        assert broker.check() == []
