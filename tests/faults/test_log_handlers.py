"""Handlers of Python's logging that raise, or use the broker, in each thread and task that logs: nothing stops for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
import qflow.aio
from doors import event_loop
from drivers import opening_tasks
from faults.raising import Raising
from faults.seams import PATIENCE_S, in_thread
from qflow.remote.server.serving import _Serving
from qflow.storage.log import confirming
from unit.clocks import until

Open = Callable[..., qflow.Broker]
KINDS = [ValueError, qflow.BrokerClosed, qflow.InDoubt, SystemExit, KeyboardInterrupt]
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


class IntoAQueue(logging.Handler):
    """Puts each line into a queue, without a `try`."""

    def __init__(self, lines: qflow.Queue) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.put(record.getMessage().encode())


class Shown:
    """What is on stderr."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._text = ""

    def getvalue(self) -> str:
        """Return all that was shown so far."""
        self._text += self._capsys.readouterr().err
        return self._text

    @property
    def times(self) -> int:
        """How often what the handler raised was shown."""
        return self.getvalue().count("--- Logging error ---")


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Shown:
    return Shown(capsys)


@pytest.fixture
def handle() -> Iterator[Callable[..., None]]:
    """Add handlers to a logger, which end with the test."""
    added: list[tuple[logging.Logger, logging.Handler]] = []

    def add(handler: logging.Handler, name: str = "qflow") -> None:
        logger = logging.getLogger(name)
        added.append((logger, handler))
        logger.addHandler(handler)

    yield add
    for logger, handler in added:
        logger.removeHandler(handler)


@pytest.fixture
def raising(request: pytest.FixtureRequest, handle: Callable[..., None]) -> type[BaseException]:
    """Have a handler raise one of `KINDS`."""
    kind: type[BaseException] = request.param
    handle(Raising(kind))
    return kind


each_kind = pytest.mark.parametrize("raising", KINDS, indirect=True)


def remove_journal(broker: qflow.Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the writer find its journal gone: with the next commit it says so, and works without."""
    monkeypatch.setattr(confirming, "FIRST_BATCHES", 0)
    queue = broker.declare_queue("jobs")
    path = Path(broker.path) / "journal"
    while not path.exists():
        queue.put(b"x")
    path.unlink()


def put_many(broker: qflow.Broker) -> None:
    """Have the journal full: what it holds is committed."""
    for _ in range(100):
        broker.queue("jobs").put(bytes(1000))


# Owners --------------------------------------------------------------------------------------------------------------


@each_kind
def test_a_warning_of_the_writer_is_no_failure_of_its_commit(
    open_spool: Open, raising: type[BaseException], shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = open_spool(journal_bytes="8KiB")
    remove_journal(broker, monkeypatch)
    before = len(broker.queue("jobs"))
    in_thread(lambda: put_many(broker))
    assert len(broker.queue("jobs")) == before + 100
    until(lambda: "Message: '%s was removed or replaced" in shown.getvalue())
    assert f"{raising.__name__}: the handler" in shown.getvalue()


def test_a_handler_of_what_the_writer_tells_may_use_the_broker(
    open_spool: Open, handle: Callable[..., None], shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer itself waits for nobody: another thread tells it."""
    broker = open_spool(journal_bytes="8KiB")
    remove_journal(broker, monkeypatch)
    lines = broker.declare_queue("lines")
    handle(IntoAQueue(lines))
    in_thread(lambda: put_many(broker))
    assert b"was removed or replaced" in in_thread(lambda: lines.get(PATIENCE_S)).body
    assert shown.times == 0


def test_what_the_writer_has_to_tell_is_told_at_the_end_at_the_latest(
    open_spool: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broker = open_spool(journal_bytes="8KiB")
    inside.still(broker)
    remove_journal(broker, monkeypatch)
    broker.close()
    assert caplog.text.count("was removed or replaced") == 1


@each_kind
def test_maintenance_goes_on_after_a_handler_and_a_callback_that_raise(
    open_spool: Open, raising: type[BaseException], shown: Shown
) -> None:
    """It is the one that expires messages, and that tells of more events."""
    broker = open_spool()
    events: list[qflow.Event] = []

    def callback(event: qflow.Event) -> None:
        events.append(event)
        raise raising("the callback")

    broker.on_event(callback)
    small = broker.declare_queue("small", limit_messages=1, on_overflow=qflow.Overflow.REJECT)
    small.put(b"1")
    with pytest.raises(qflow.QueueFull):
        small.put(b"2")
    until(lambda: f"{raising.__name__}: the callback" in shown.getvalue())  # what it was about is shown, too
    dead = broker.declare_queue("dead")
    broker.declare_queue("short", ttl_s=0.01, dead_letter="dead").put(b"expires")
    assert in_thread(lambda: dead.get(PATIENCE_S)).body == b"expires"
    until(lambda: len(events) > 1)
    assert inside.maintenance(broker).is_alive()
    broker.close()


@each_kind
def test_a_part_of_maintenance_that_fails_is_tried_again_where_that_cannot_be_told(
    open_spool: Open, raising: type[BaseException], shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = open_spool()
    monkeypatch.setattr(broker.engine.spool.wiper, "step", lambda most: 1 // 0)
    until(lambda: shown.times)
    assert "wiping" in broker.stats().troubles
    monkeypatch.undo()
    until(lambda: broker.stats().troubles == {})
    assert inside.maintenance(broker).is_alive()


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
@pytest.mark.parametrize("part", ["events", "a round"])
def test_whatever_part_of_a_round_raises_is_told_and_the_thread_goes_on(
    open_spool: Open, part: str, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = open_spool()

    def fail(*_: object) -> None:
        raise kind("a fault")

    engine = broker.engine
    if part == "a round":
        monkeypatch.setattr(engine.upkeep, "_take_steps", fail)
    else:
        monkeypatch.setattr(engine.listeners, "tell_all", fail)
    until(lambda: inside.troubles(broker))
    assert broker.stats().troubles == {part: f"{kind.__name__}: a fault"}
    monkeypatch.undo()
    until(lambda: not inside.troubles(broker))
    assert inside.maintenance(broker).is_alive()


@each_kind
def test_no_call_of_a_program_raises_what_a_handler_does(
    spool: Path, raising: type[BaseException], shown: Shown
) -> None:
    """What it was asked for is done: here, a broker without a door."""
    in_thread(lambda: qflow.open(spool).close())
    (spool / "door").mkdir()
    broker = in_thread(lambda: qflow.open(spool))
    assert "something else stands" in shown.getvalue()
    broker.declare_queue("q").put(b"x")
    in_thread(broker.close)


# Threads and tasks, in the owner and through the door ---------------------------------------------------------------


@pytest.mark.two_drivers
@each_kind
def test_a_consumer_goes_on_after_a_handler_and_a_callback_that_raise(
    open_spool: Open, raising: type[BaseException], shown: Shown
) -> None:
    queue = open_spool().declare_queue("q")
    queue.put_many([b"1", b"2"])
    failed: list[bytes] = []

    def callback(delivery: qflow.Delivery) -> None:
        if not failed:
            failed.append(delivery.body)
            raise ValueError("the callback")

    with queue.consume(callback) as consumer:
        until(lambda: len(queue) == 0 or not consumer.running)
        assert consumer.running
    assert shown.times == 1
    assert "ValueError: the callback" in shown.getvalue() or raising is ValueError


@pytest.mark.two_drivers
@pytest.mark.parametrize("kind", [ValueError, qflow.BrokerClosed, qflow.InDoubt])
def test_a_consumer_of_tasks_goes_on_after_a_handler_and_a_callback_that_raise(
    spool: Path, access: str, kind: type[BaseException], handle: Callable[..., None], shown: Shown
) -> None:
    """Also where what the handler raises is how consumers hear that their own broker is closed."""

    async def scenario() -> None:
        async with opening_tasks(access, lambda: qflow.open(spool)) as broker:
            queue: Any = await broker.declare_queue("q")
            await queue.put_many([b"1", b"2"])
            failed: list[bytes] = []

            async def callback(delivery: qflow.aio.AsyncDelivery) -> None:
                if not failed:
                    failed.append(delivery.body)
                    raise ValueError("the callback")

            async with queue.consume(callback) as consumer:
                while consumer.running and await event_loop.length(queue):
                    await event_loop.turns()
                assert consumer.running

    handle(Raising(kind))
    event_loop.run(scenario())
    assert shown.times == 1


@each_kind
def test_a_future_whose_callback_raises_keeps_no_other_from_its_own(
    open_spool: Open, raising: type[BaseException], shown: Shown
) -> None:
    """The thread for futures is one for all."""
    queue = open_spool().declare_queue("q")
    told: list[str] = []

    def leave(_: object) -> None:
        raise SystemExit

    queue.submit(b"1").add_done_callback(leave)
    queue.submit(b"2").add_done_callback(lambda _: told.append("2"))
    until(lambda: told)
    until(lambda: shown.times)


@each_kind
def test_a_fault_in_the_event_loop_of_the_door_ends_it_for_nobody(
    open_spool: Open, spool: Path, raising: type[BaseException], shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's event loop logs it; a handler that raises would end the loop."""
    handler = Raising(raising)
    logging.getLogger("asyncio").addHandler(handler)
    loops: list[asyncio.AbstractEventLoop] = []
    listen = _Serving._listen
    monkeypatch.setattr(_Serving, "_listen", lambda self: (loops.append(asyncio.get_running_loop()), listen(self)))
    try:
        open_spool().declare_queue("q").put(b"x")
        with qflow.connect(spool) as remote:
            loops[0].call_soon_threadsafe(lambda: 1 // 0)
            until(lambda: "ZeroDivisionError" in shown.getvalue())
            assert remote.queue("q").get(PATIENCE_S).body == b"x"
        with qflow.connect(spool) as remote:
            assert len(remote.queue("q")) == 1
    finally:
        logging.getLogger("asyncio").removeHandler(handler)
