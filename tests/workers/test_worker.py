"""What a worker does with messages, in this process, on a broker of its own."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

import qflow
import qflow.aio
import qflow.workers
from qflow.workers.job import AWAY, FAILED, READY, REFUSED, Job, report
from qflow.workers.targets import Target
from qflow.workers.worker import Held, Worker
from workers.shared import slots

Handle = Callable[[qflow.Delivery], object]
called: list[Handle] = []


def work(delivery: qflow.Delivery) -> object:
    """What the worker calls: a test says what that is."""
    return called[-1](delivery)


class Scene:
    """A worker, and what it reports."""

    def __init__(self, broker: Any, **changes: Any) -> None:
        self.broker = broker
        self.reported: list[tuple[str, str]] = []
        self.hear: Callable[[str, str], None] = lambda kind, text: self.reported.append((kind, text))
        self.tries: list[Exception] = []
        self.slot = slots(1)[0]
        facts: dict[str, Any] = {
            "spool": "s",
            "queue": "jobs",
            "target": Target(__name__, "work"),
            "processes": 1,
            "retry_delay_s": 0,
        }
        self.worker = Worker(
            Job(**facts | changes),
            connect=self._connect,
            report=lambda kind, text: self.hear(kind, text),
            slot=self.slot,
            is_told=lambda: False,
        )

    def _connect(self, _: str) -> Any:
        if self.tries:
            raise self.tries.pop(0)
        return self.broker

    def run(self, handle_it: Handle, *, messages: int) -> int:
        """Work until so many were handed to a function."""
        seen = []

        def count(delivery: qflow.Delivery) -> object:
            seen.append(delivery)
            self.worker.stop = len(seen) == messages
            return handle_it(delivery)

        called[:] = [count]
        with closing(self.worker):
            return self.worker.run()


@pytest.fixture
def broker(spool: Path) -> Iterator[Any]:
    with qflow.open(spool) as opened:
        yield opened


def letters(spool: Path, name: str = "dead") -> list[tuple[bytes, Any]]:
    with qflow.open(spool) as broker:
        batch = broker.queue(name).get_many(100, timeout_s=0)
        return [(one.body, one.headers["dead_letter_nack_reason"]) for one in batch]


def test_messages_are_acked_when_the_function_returns(spool: Path, broker: Any) -> None:
    queue = broker.declare_queue("jobs")
    queue.put_many([b"1", b"2", b"3"])
    scene = Scene(broker)
    bodies: list[bytes] = []
    assert scene.run(lambda delivery: bodies.append(delivery.body), messages=2) == 0
    assert bodies == [b"1", b"2"]
    assert scene.reported == [(READY, "")]
    assert scene.slot.read() == (0.0, 1, 2, 0)
    with qflow.open(spool) as again:
        assert again.queue("jobs").get_many(10, timeout_s=0).bodies == [b"3"]


def test_an_exception_is_the_reason_of_the_dead_letter(
    spool: Path, broker: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.declare_queue("jobs", max_deliveries=2, dead_letter="dead").put(b"twelve")
    scene = Scene(broker)
    assert scene.run(lambda delivery: int(delivery.body), messages=2) == 0
    said = capsys.readouterr().err
    assert "message 0 of queue 'jobs' failed at delivery 1:\nTraceback" in said
    assert "failed at delivery 2" in said
    assert letters(spool) == [(b"twelve", "ValueError: invalid literal for int() with base 10: b'twelve'")]


class Gone:
    """What is there in place of stderr when nobody reads it."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        """Nothing is written."""


@pytest.mark.parametrize("stderr", [None, Gone()])
@pytest.mark.parametrize("is_heard", [True, False])
def test_a_failure_that_cannot_be_written_is_reported(
    spool: Path, broker: Any, stderr: Any, is_heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If that is not possible either, the next message has its turn all the same."""
    broker.declare_queue("jobs", max_deliveries=1, dead_letter="dead").put_many([b"one", b"two"])
    scene = Scene(broker)
    if not is_heard:
        scene.hear = lambda kind, text: None if kind == READY else report(-1, kind, text)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        assert scene.run(lambda delivery: int(delivery.body), messages=2) == 0
    reasons = [f"ValueError: invalid literal for int() with base 10: {body!r}" for body in (b"one", b"two")]
    if is_heard:
        failed = [(FAILED, f"message {n} of queue 'jobs' failed at delivery 1: {reasons[n]}") for n in range(2)]
        assert scene.reported == [(READY, ""), *failed]
    assert letters(spool) == list(zip([b"one", b"two"], reasons, strict=True))


async def later(delivery: qflow.Delivery) -> None:
    """Nobody awaits it."""


def test_a_function_that_has_not_run_when_it_returns_has_failed(spool: Path, broker: Any) -> None:
    """An async one behind a decorator: its messages are not acked."""
    queue = broker.declare_queue("jobs", max_deliveries=1, dead_letter="dead")
    broker.declare_queue("dead")
    queue.put(b"1")
    assert Scene(broker).run(later, messages=1) == 0
    [(body, reason)] = letters(spool)
    assert (body, "the function returned a coroutine and has not run" in reason) == (b"1", True)


def test_a_message_that_fails_waits_longer_each_time(broker: Any) -> None:
    """Others come before it; what is delayed is not handed out meanwhile."""
    queue = broker.declare_queue("jobs")
    queue.put_many([b"bad", b"good"])
    scene = Scene(broker, retry_delay_s=1000)
    bodies = []

    def fail(delivery: qflow.Delivery) -> None:
        bodies.append(delivery.body)
        if delivery.body == b"bad":
            raise ValueError
        assert queue.stats().delayed_messages == 1

    scene.run(fail, messages=2)
    assert bodies == [b"bad", b"good"]


@pytest.mark.parametrize(("retry_delay_s", "waits"), [(7200, [7200, 7200]), (3000, [3000, 3600])])
def test_a_message_waits_as_long_as_is_asked_for_also_above_an_hour(
    broker: Any, monkeypatch: pytest.MonkeyPatch, retry_delay_s: float, waits: list[float]
) -> None:
    """What grows ends at an hour; a wait that is longer from the start stays as it is."""
    broker.declare_queue("jobs").put(b"bad")
    found: list[float] = []

    def nack(held: Held, *, delay_s: float, reason: str) -> None:
        found.append(delay_s)
        qflow.Delivery.nack(held, reason=reason)

    monkeypatch.setattr(Held, "nack", nack)
    Scene(broker, retry_delay_s=retry_delay_s).run(lambda delivery: int(delivery.body), messages=2)
    assert found == waits


@pytest.mark.parametrize("settles", ["ack", "nack"])
@pytest.mark.parametrize("fails", [True, False])
def test_what_the_function_settled_is_left_alone(spool: Path, broker: Any, settles: str, fails: bool) -> None:
    broker.declare_queue("jobs", dead_letter="dead").put(b"1")

    def settle(delivery: qflow.Delivery) -> None:
        delivery.ack() if settles == "ack" else delivery.nack(requeue=False, reason="mine")
        if fails:
            raise ValueError("theirs")

    scene = Scene(broker)
    assert scene.run(settle, messages=1) == 0
    with qflow.open(spool) as again:
        assert len(again.queue("jobs")) == 0
    if settles == "nack":
        assert letters(spool) == [(b"1", "mine")]


def test_one_that_ends_the_process_gives_the_message_back_first(spool: Path, broker: Any) -> None:
    broker.declare_queue("jobs", max_deliveries=1, dead_letter="dead").put(b"1")

    def leave(_: qflow.Delivery) -> None:
        raise SystemExit(7)

    with pytest.raises(SystemExit):
        Scene(broker).run(leave, messages=1)
    assert letters(spool) == [(b"1", "SystemExit: 7")]


@pytest.mark.parametrize("settles", ["ack", "nack"])
def test_one_that_has_settled_its_message_may_end_the_process(
    spool: Path, broker: Any, settles: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one does that leaks memory, after so many messages: nothing has failed, and no pause grows by it."""
    broker.declare_queue("jobs", dead_letter="dead").put(b"1")

    def leave(delivery: qflow.Delivery) -> None:
        delivery.ack() if settles == "ack" else delivery.nack(requeue=False, reason="mine")
        raise SystemExit(7)

    scene = Scene(broker)
    with pytest.raises(SystemExit) as ended:
        scene.run(leave, messages=1)
    assert ended.value.code == 7
    assert scene.slot.read() == (0.0, 0, 1, 0)
    assert capsys.readouterr().err == ""
    with qflow.open(spool) as again:
        assert len(again.queue("jobs")) == 0


def test_a_function_puts_by_the_broker_that_its_message_came_by(spool: Path, broker: Any) -> None:
    """Together with the ack; by the next broker once the first has ended."""
    broker.declare_queue("jobs").put_many([b"1", b"2"])
    broker.declare_queue("next")
    brokers: list[Any] = [broker]

    def pass_on(delivery: qflow.Delivery) -> None:
        assert qflow.workers.broker() is brokers[-1]
        with qflow.workers.broker().transaction() as tx:
            tx.put("next", delivery.body)
            tx.ack(delivery)
        if delivery.body == b"1":
            broker.close()
            brokers.append(qflow.open(spool))
            scene.broker = brokers[-1]

    scene = Scene(broker)
    assert scene.run(pass_on, messages=2) == 0
    with qflow.open(spool) as again:
        assert again.queue("next").get_many(10, timeout_s=0).bodies == [b"1", b"2"]
        assert len(again.queue("jobs")) == 0
    with pytest.raises(qflow.NotFound, match="for a function that `qflow work` calls"):
        qflow.workers.broker()


async def work_async(delivery: qflow.aio.AsyncDelivery) -> None:
    """As `work`, and awaited."""
    await asyncio.sleep(0)
    outcome: Any = called[-1](delivery)  # type: ignore[arg-type]
    if outcome is not None:
        await outcome


def test_what_an_async_function_began_goes_on_between_messages(broker: Any) -> None:
    """The event loop runs while the next message is waited for."""
    queue = broker.declare_queue("jobs")
    queue.put(b"begins")
    tasks = []
    seen = []

    async def put_later() -> None:
        await asyncio.sleep(0)
        await asyncio.to_thread(queue.put, b"comes of it")

    async def begin(delivery: qflow.aio.AsyncDelivery) -> None:
        seen.append(delivery.body)
        if delivery.body == b"begins":
            tasks.append(asyncio.get_running_loop().create_task(put_later()))

    scene = Scene(broker, target=Target(__name__, "work_async"))
    assert scene.run(begin, messages=2) == 0  # type: ignore[arg-type]
    assert seen == [b"begins", b"comes of it"]


def test_an_async_function_is_awaited(spool: Path, broker: Any) -> None:
    """Its delivery is settled by `await`; what it raises, and its cancellation, are reasons."""
    queue = broker.declare_queue("jobs", dead_letter="dead", max_deliveries=1, ack_timeout_s=100)
    queue.put_many([b"acks", b"nacks", b"extends", b"raises", b"cancels", b"returns"])
    seen = []

    async def settle(delivery: qflow.aio.AsyncDelivery) -> None:
        seen.append((delivery.body, asyncio.get_running_loop()))
        match delivery.body:
            case b"acks":
                await delivery.ack(wait=True)
            case b"nacks":
                await delivery.nack(requeue=False, reason="mine")
            case b"extends":
                await delivery.extend(5000)
                assert scene.slot.read().deadline > monotonic() + 4000
            case b"raises":
                raise ValueError("no")
            case b"cancels":
                raise asyncio.CancelledError

    scene = Scene(broker, target=Target(__name__, "work_async"))
    assert scene.run(settle, messages=6) == 0  # type: ignore[arg-type]
    assert len({loop for _, loop in seen}) == 1
    assert letters(spool) == [
        (b"nacks", "mine"),
        (b"raises", "ValueError: no"),
        (b"cancels", "qflow.workers.tasks.FunctionCancelled: the function was cancelled"),
    ]
    with qflow.open(spool) as again:
        assert len(again.queue("jobs")) == 0


def test_the_lease_is_the_queues_or_the_longer_one_that_is_asked_for(broker: Any) -> None:
    """What is at hand is shown with its deadline; a longer lease than the queue's is had from its owner, too."""
    queue = broker.declare_queue("jobs", ack_timeout_s=100)
    queue.put_many([b"1", b"2", b"3"])
    seen = []

    def look(_: qflow.Delivery) -> None:
        hand = scene.slot.read()
        seen.append(round((hand.deadline - monotonic()) / 100))

    for lease_s in (None, 50_000, 1000):
        scene = Scene(Kept(broker), lease_s=lease_s)
        scene.run(look, messages=1)
    assert seen == [1, 500, 10]


@pytest.mark.parametrize(("lease_s", "shown"), [(None, [math.inf, 100, 200, math.inf]), (150, [150, 150, 150, 150])])
def test_the_lease_is_that_of_the_queue_as_it_is_altered_meanwhile(
    lease_s: float | None, shown: list[float], broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each message anew; where a longer one is asked for, the owner holds the message for so long."""
    monkeypatch.setattr("qflow.workers.worker.FRESH_S", 0.0)
    extended: list[float] = []
    monkeypatch.setattr(Held, "extend", lambda held, seconds: extended.append(seconds))
    queue = broker.declare_queue("jobs")
    queue.put_many([b"none", b"100", b"200", b"none"])
    changes = iter([100, 200, None, None])
    seen = []

    def alter(_: qflow.Delivery) -> None:
        seen.append(round(scene.slot.read().deadline - monotonic(), -1))
        broker.alter_queue("jobs", ack_timeout_s=next(changes))

    scene = Scene(broker, lease_s=lease_s)
    scene.run(alter, messages=4)
    assert seen == shown
    assert extended == ([150] if lease_s else [])


def test_settings_are_not_read_for_each_of_many_messages(broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would be a round trip each."""
    monkeypatch.setattr("qflow.workers.worker.FRESH_S", math.inf)
    broker.declare_queue("jobs").put_many([b"1", b"2", b"3"])
    read = []
    settings: Any = qflow.Queue.settings
    monkeypatch.setattr(qflow.Queue, "settings", property(lambda queue: read.append(1) or settings.fget(queue)))
    Scene(broker).run(lambda _: None, messages=3)
    assert len(read) == 1


def test_a_message_that_went_back_before_its_lease_is_extended_is_not_begun(
    broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another has it; the owner is there as before, and nobody is told of it."""
    queue = broker.declare_queue("jobs", ack_timeout_s=100)
    queue.put_many([b"1", b"2"])
    extend, bodies = Held.extend, []

    def late(held: Held, seconds: float) -> None:
        if held.body == b"1":
            raise qflow.AlreadySettled("it was held for too long")
        extend(held, seconds)

    monkeypatch.setattr(Held, "extend", late)
    scene = Scene(broker, lease_s=1000)
    assert scene.run(lambda delivery: bodies.append(delivery.body), messages=1) == 0
    assert bodies == [b"2"]
    assert scene.reported == [(READY, "")]


def test_an_extension_is_shown_to_the_supervisor(broker: Any) -> None:
    broker.declare_queue("jobs", ack_timeout_s=100).put(b"1")

    def extend(delivery: qflow.Delivery) -> None:
        delivery.extend(5000)
        seen.append(round((scene.slot.read().deadline - monotonic()) / 100))

    seen: list[int] = []
    scene = Scene(broker)
    scene.run(extend, messages=1)
    assert seen == [50]


class Kept:
    """A broker that outlives its connections."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker

    def __enter__(self) -> Any:
        return self._broker

    def __exit__(self, *_: object) -> None:
        """It stays open."""


def test_a_queue_that_is_not_there_is_refused_before_the_first_message(
    broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner is waited for: the supervisor has seen one, which is being started again."""
    scene = Scene(Kept(broker))
    monkeypatch.setattr("qflow.workers.worker.FIRST_PAUSE_S", 0.0)
    scene.tries = [qflow.NotFound("nobody owns the spool"), qflow.StorageError("the owner has not answered")]
    assert scene.run(print, messages=1) == 2
    assert [kind for kind, _ in scene.reported] == [AWAY, AWAY, REFUSED]
    assert scene.reported[0][1] == "nobody owns the spool"
    assert "'jobs'" in scene.reported[2][1]
    broker.close()


@pytest.mark.parametrize("error", [qflow.NotFound("its owner lets nobody in"), qflow.FormatTooNew("upgrade it")])
def test_an_owner_that_lets_nobody_in_is_not_waited_for_for_good(
    error: qflow.QflowError, broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be opening the spool just now; but not for long."""
    monkeypatch.setattr("qflow.workers.worker.OPENING_S", 0.0)
    monkeypatch.setattr("qflow.inspect.owner_of", lambda spool: 1)
    broker.declare_queue("jobs")
    scene = Scene(Kept(broker))
    scene.tries = [error]
    assert scene.run(print, messages=1) == 2
    assert scene.reported == [(REFUSED, str(error))]
    broker.close()


def test_an_owner_that_goes_away_is_waited_for(spool: Path, broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message at hand then is done again; nothing else is lost but the connection."""
    monkeypatch.setattr("qflow.workers.worker.FIRST_PAUSE_S", 0.0)
    broker.declare_queue("jobs").put_many([b"1", b"2"])
    scene = Scene(broker)
    bodies = []

    def lose(delivery: qflow.Delivery) -> None:
        bodies.append(delivery.body)
        if len(bodies) == 1:
            broker.close()
            scene.tries = [qflow.NotFound("nobody owns the spool")]
            scene.broker = qflow.open(spool)

    assert scene.run(lose, messages=3) == 0
    assert bodies == [b"1", b"1", b"2"]
    assert [kind for kind, _ in scene.reported] == [READY, AWAY, AWAY, READY]
    assert "nobody owns the spool" in scene.reported[2][1]


def test_a_function_that_is_not_there_takes_nothing(broker: Any) -> None:
    broker.declare_queue("jobs").put(b"1")
    scene = Scene(Kept(broker), target=Target("not_there", "work"))
    assert scene.worker.run() == 2
    assert [kind for kind, _ in scene.reported] == [REFUSED]
    assert broker.queue("jobs").get(0).delivery_count == 1
    broker.close()
