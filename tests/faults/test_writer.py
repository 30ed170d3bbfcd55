"""The thread that writes the log: handlers and interrupts beside it, errors inside it, requests while it ends."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import lmdb
import pytest

import qflow
from faults.bare_log import Line, Told, bare_log, declared, in_log
from faults.seams import PATIENCE_S, Faults, drained, faulty_broker, in_thread
from qflow.storage.log import writer
from qflow.storage.log.settling import Settling
from qflow.storage.log.transaction_log import TransactionLog, Unit
from qflow.streams.registry import Streams
from unit.clocks import until


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
def log(spool, faults):
    with bare_log(spool, faults) as log:
        yield log


class Interrupt(Exception):
    """What the handler of a signal raises."""


@contextmanager
def signalled(faults: Faults, step: str, handler: Callable[[], object]) -> Iterator[None]:
    """Have a signal handled, in this thread, while the writer is at a step; it goes on when the handler has begun."""
    begun, struck = threading.Event(), threading.Event()

    def handle(*_: object) -> None:
        if not begun.is_set():
            begun.set()
            handler()

    def strike() -> None:
        faults.before.clear()
        while not begun.is_set():  # again: one that comes right before a wait is handled after it
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            begun.wait(0.01)
        struck.set()

    before = signal.signal(signal.SIGUSR1, handle)
    faults.before[step] = strike
    try:
        yield
    finally:
        assert struck.wait(PATIENCE_S)
        signal.signal(signal.SIGUSR1, before)


def interrupt() -> None:
    raise Interrupt


# Handlers of signals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["make_room", "begin", "commit"])
def test_a_handler_that_raises_strikes_the_caller_and_never_the_commit(step, spool, faults):
    """Edge 26: the put whose wait was interrupted is done, whole, with nobody after it."""
    with faulty_broker(spool, faults) as broker:
        queue = broker.declare_queue("q", limit_messages=3)
        with signalled(faults, step, interrupt), pytest.raises(Interrupt):
            queue.put_many([b"1", b"2"])
        until(lambda: len(queue) == 2)
        assert broker.check() == []
        queue.put(b"3", timeout_s=0)
        assert drained(queue) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("error", [Interrupt, qflow.QueueFull], ids=["of its own", "as a put raises"])
def test_a_transaction_that_a_handler_strikes_as_it_waits_for_its_commit_is_in_doubt(error, spool, faults):
    """It was handed over, and is committed: whatever the handler raises, nobody is told that it was rolled back."""

    def strike() -> None:
        raise error

    with faulty_broker(spool, faults) as broker:
        queue = broker.declare_queue("q")
        transaction = broker.transaction()
        transaction.put(queue, b"1")
        with signalled(faults, "commit", strike), pytest.raises(error):
            transaction.commit()
        until(lambda: len(queue) == 1)
        with pytest.raises(qflow.InvalidArgument, match="interrupted"):
            transaction.commit()
        assert broker.check() == []


def test_a_handler_may_use_the_broker_while_its_thread_waits_for_a_commit(spool, faults):
    """Edge 26: it waits for a commit of its own, inside the wait for another one."""
    with faulty_broker(spool, faults) as broker:
        queue = broker.declare_queue("q")
        inside: list[int] = []
        with signalled(faults, "commit", lambda: inside.append(queue.put(b"handler"))):
            assert queue.put(b"caller") == 0
        assert inside == [1]
        assert drained(queue) == [b"caller", b"handler"]


# Errors inside the writer ------------------------------------------------------------------------------------------------


class Broken(Line):
    """A queue that cannot be told."""

    def publish(self, *_: Any) -> None:
        raise KeyError("a fault of a queue")

    publish_transient = refused = purged = publish  # type: ignore[assignment]


class BrokenParty(Told):
    def committed(self, unit: Unit) -> None:
        raise KeyboardInterrupt

    refused = committed


@pytest.mark.parametrize("what", ["a queue", "a queue that is not logged", "a purge", "a party"])
def test_an_error_after_the_commit_fails_the_log_and_keeps_nobody_waiting(what, spool, faults, monkeypatch):
    """The others are told as ever; who shared the batch is in doubt, all later calls are refused, and nothing is lost."""
    monkeypatch.setattr(writer, "FLUSH_S", PATIENCE_S)  # all in one batch
    with bare_log(spool, faults) as log:
        line, other, broken = declared(log, 1), declared(log, 2), declared(log, 3)
        if what != "a party":
            broken.__class__ = Broken
        loose = Broken(2**31, None)
        parties = [Told(), BrokenParty() if what == "a party" else Told(), Told()]
        put, unit = line.put(b"1"), Unit([line.put(b"2"), other.put(b"3")], parties=parties)
        put.future, unit.future = Future(), Future()
        log.put(put)
        if what == "a queue":
            log.put(broken.put(b"x"))
        if what == "a queue that is not logged":
            log.join(Unit([loose.put(b"x")]))
        if what == "a purge":
            log.purge([broken.lane])
        log.join(unit)
        last = log.put(other.put(b"4"))
        in_thread(lambda: log.wait(last))
        for request in (put, unit, last):
            assert isinstance(request.error, qflow.InDoubt)
        assert isinstance(put.future.exception(PATIENCE_S), qflow.InDoubt)
        assert isinstance(unit.future.exception(PATIENCE_S), qflow.InDoubt)
        assert [party.outcomes for party in (parties[0], parties[2])] == [["committed"]] * 2
        assert line.visible == {0: b"1", 1: b"2"}
        assert other.visible == {0: b"3", 1: b"4"} or other.visible == {0: b"4", 1: b"3"}
        with pytest.raises(qflow.BrokerFailed, match="open the spool again"):
            log.put(line.put(b"x"))
    with bare_log(spool, faults) as log:
        assert in_log(log, line) == {0: b"1", 1: b"2"}
        assert set(in_log(log, other).values()) == {b"3", b"4"}


@pytest.mark.parametrize("error", [lmdb.Error("no"), qflow.DiskFull("no")], ids=["error", "full disk"])
def test_a_refusal_that_fails_keeps_nobody_waiting(error, log, faults, monkeypatch):
    """All others have their room back, and are told why."""
    monkeypatch.setattr(writer, "FLUSH_S", PATIENCE_S)
    line, broken = declared(log, 1), declared(log, 2)
    broken.__class__ = Broken
    faults.fail("make_room", error)
    log.put(broken.put(b"x"))
    unit = Unit([broken.put(b"x"), line.put(b"x")], parties=[BrokenParty(), party := Told()])
    log.join(unit)
    last = log.put(line.put(b"y"))
    in_thread(lambda: log.wait(last))
    assert isinstance(unit.error, qflow.StorageError)
    assert isinstance(last.error, qflow.StorageError)
    assert line.refusals == [unit.puts[1], last]
    assert party.outcomes == ["refused"]
    assert log.failed


def test_a_listener_that_fails_keeps_nobody_waiting(log, monkeypatch, caplog):
    """What is called for one request is no other's matter."""
    monkeypatch.setattr(writer, "FLUSH_S", PATIENCE_S)
    line = declared(log, 1)
    first, second = line.put(b"1"), line.put(b"2")
    second.future = Future()
    log.tell(first, lambda: {}["missing"])
    log.put(first)
    log.put(second)
    in_thread(lambda: log.wait(second))
    assert second.future.result(PATIENCE_S) == 1
    in_thread(lambda: log.wait(log.put(line.put(b"3"))))
    assert "could not be told" in caplog.text
    assert line.visible == {0: b"1", 1: b"2", 2: b"3"}


def test_a_map_that_cannot_grow_fails_the_log(spool, faults):
    """It may not be mapped at all any more: those who wait are told, and nobody goes on."""
    with bare_log(spool, faults) as log:
        line = declared(log, 1)
        faults.fail("begin", lmdb.MapFullError("full"))
        faults.fail("grow_map", lmdb.Error("Cannot allocate memory"))
        put = line.put(b"x")
        in_thread(lambda: log.wait(log.put(put)))
        assert isinstance(put.error, qflow.StorageError)
        assert line.refusals == [put]
        with pytest.raises(qflow.BrokerFailed, match="Cannot allocate"):
            log.put(line.put(b"y"))


def test_what_is_tried_again_is_in_nobodys_way(log, faults):
    """On a disk too full for an ack that nobody waits for, what needs the log for itself is done all the same."""
    line = declared(log, 1)
    log.wait(log.put(line.put(b"1", b"2")))
    faults.fail("make_room", qflow.DiskFull("no"))
    failed = log.settle(*line.settled(0))
    log.wait(failed)
    assert isinstance(failed.error, qflow.DiskFull)
    assert log.busy  # memory and log differ
    done: list[object] = []
    in_thread(lambda: log.alone(lambda env, reading: done.append(env)))
    assert len(done) == 1
    faults.heal()
    until(lambda: not log.busy)
    assert in_log(log, line) == {1: b"2"}


def test_nothing_is_busy_when_its_callers_are_let_go(log):
    """Who has waited for all there is finds memory and log the same."""
    line = declared(log, 1)
    for number in range(200):
        log.wait(log.put(line.put(b"%d" % number)))
        assert not log.busy


# Futures -----------------------------------------------------------------------------------------------------------------


def test_a_callback_of_a_future_may_wait_for_commits_and_close_the_broker(spool):
    """All futures are resolved, those that were handed over behind it included, and the spool can be opened again."""
    before = set(threading.enumerate())
    broker = qflow.open(spool)
    queue = broker.declare_queue("q")
    ends: Future[int] = Future()

    def done(_: Future[Any]) -> None:
        ends.set_result(queue.put(b"callback"))
        broker.close()

    queue.submit(b"first").add_done_callback(done)
    assert ends.result(PATIENCE_S) >= 1
    until(lambda: not any(one.name == "qflow-futures" for one in set(threading.enumerate()) - before))
    with qflow.open(spool) as broker:
        assert drained(broker.queue("q")) == [b"first", b"callback"]


def test_all_futures_are_resolved_and_called_back_when_close_returns(spool):
    """Those of what was handed over right before it, too."""
    broker = qflow.open(spool)
    queue = broker.declare_queue("q")
    called: list[int] = []
    for _ in range(100):
        queue.submit(b"x").add_done_callback(lambda future: called.append(future.result()))
    in_thread(broker.close)
    assert called == list(range(100))


# The end -----------------------------------------------------------------------------------------------------------------


class Late(Settling):
    """A request during whose handing over something happens."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self._is_joined = False
        super().__init__([])
        self._meanwhile = meanwhile

    @property
    def joined(self) -> bool:  # type: ignore[override]
        return self._is_joined

    @joined.setter
    def joined(self, joined: bool) -> None:
        """Set after the log was found open, and before it takes the request."""
        self._is_joined = joined
        if joined:
            self._meanwhile()


def test_a_request_that_is_handed_over_while_the_log_closes_is_refused(spool, faults):
    """Its caller is told at once, and keeps what it reserved."""
    with bare_log(spool, faults) as log:
        late = Late(log.close)
        with pytest.raises(qflow.BrokerClosed, match="open the spool again"):
            log._handing.hand_over(late)
        assert not late.joined
        assert not log.busy


def test_what_was_looked_after_is_kept_no_longer_than_it_takes(spool, faults):
    """Somebody looks for what stands while the writer is in a commit: nothing of it stays when it is done."""
    with bare_log(spool, faults) as log:
        line = declared(log, 1)
        at_commit, go = threading.Event(), threading.Event()
        faults.before["commit"] = lambda: (faults.before.clear(), at_commit.set(), go.wait(PATIENCE_S))
        log.put(line.put(b"1"))
        assert at_commit.wait(PATIENCE_S)
        put = line.put(b"2")
        log.put(put)
        log._handing.look_after()
        go.set()
        log.drain()
        until(lambda: sys.getrefcount(put) == 2)


def test_what_was_handed_over_before_the_end_is_done(spool, faults):
    """The writer is in a commit when somebody closes: what is behind that is written first, and all are told."""
    with bare_log(spool, faults) as log:
        line = declared(log, 1)
        at_commit, go = threading.Event(), threading.Event()
        faults.before["commit"] = lambda: (faults.before.clear(), at_commit.set(), go.wait(PATIENCE_S))
        first = log.put(line.put(b"1"))
        assert at_commit.wait(PATIENCE_S)
        second = line.put(b"2")
        second.future = Future()
        log.put(second)
        closing = threading.Thread(target=log.close)
        closing.start()
        until(lambda: log._writer._ending)
        third = log.put(line.put(b"3"))
        go.set()
        closing.join(PATIENCE_S)
        assert first.done
        assert second.future.result(0) == 1
        assert third.done
        assert third.error is None
    with bare_log(spool, faults) as log:
        assert in_log(log, line) == {0: b"1", 1: b"2", 2: b"3"}


def test_an_interrupted_close_lets_go_of_nothing_that_is_being_written(spool, faults):
    """The interrupt goes on when the writer has ended: nobody else may open the spool before."""
    with bare_log(spool, faults) as log:
        line = declared(log, 1)
        with signalled(faults, "commit", interrupt), pytest.raises(Interrupt):
            put = log.put(line.put(b"1"))
            log.close()
        assert put.done
        assert put.error is None
        assert log._writer._over.is_set()
        with pytest.raises(qflow.BrokerClosed):
            log.put(line.put(b"2"))


def test_the_writer_cannot_close_the_broker_it_writes_for(open_spool):
    """As a finalizer may try that runs in its thread: it is told, and the broker goes on."""
    broker = open_spool()
    for work in (broker.close, lambda: broker.engine.log.wait(broker.engine.log.write(lambda txn: None))):
        with pytest.raises(qflow.Reentered, match="in another thread"):
            in_thread(lambda: broker.engine.log.alone(lambda env, reading: work()))  # noqa: B023
    assert not broker.closed
    assert in_thread(lambda: broker.declare_queue("q").put(b"x")) == 0


def test_a_broker_that_cannot_be_opened_leaves_no_writer(spool, monkeypatch):
    """What fails after the log was opened closes it."""
    logs: list[TransactionLog] = []

    def recover(streams: Streams, *_: Any, **__: Any) -> list[str]:
        logs.append(streams._log)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Streams, "recover", recover)
        with pytest.raises(MemoryError):
            qflow.open(spool)
    assert logs[0]._writer._over.is_set()
    with qflow.open(spool) as broker:
        assert broker.check() == []


@pytest.mark.parametrize("times", [1, 2, 5])
def test_a_writer_without_memory_for_a_batch_waits_for_it(
    spool: Any, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """It goes on as before; nobody is refused, and it ends when it is told."""
    monkeypatch.setattr(writer, "SHORT_S", 0)
    short = iter([True] * times)

    class Short(writer.Gate):
        def __init__(self) -> None:
            if next(short, False):
                raise MemoryError
            super().__init__()

    with qflow.open(spool) as broker:
        queue = broker.declare_queue("q")
        with monkeypatch.context() as patch:
            patch.setattr(writer, "Gate", Short)
            for _ in range(4):
                queue.put_many([b"1", b"2"])
        assert next(short, None) is None
    with qflow.open(spool) as broker:
        assert len(broker.queue("q")) == 8
