"""Redrive: dead letters go back to where they came from, and what cannot stays where it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import qflow
from faults.seams import bodies_of
from qflow import Overflow, inspect
from qflow.inspect import MessageFacts
from qflow.queues import redrive, tending
from qflow.queues import source as source_module
from qflow.queues.admission import Admission
from qflow.queues.apart import HeldOne
from qflow.queues.claims import Claims
from qflow.queues.deleting import Deleting
from qflow.queues.overflow import Depth
from qflow.queues.puts import Puts
from qflow.queues.queue import parts_of
from qflow.queues.redrive import Redrive
from unit.clocks import Clock, open_still, until

pytestmark = pytest.mark.two_drivers

Open = Callable[..., qflow.Broker]


def kill(broker: qflow.Broker, name: str, *bodies: bytes, **settings: Any) -> qflow.Queue:
    """Declare a queue whose dead letters go to `dead`, and have these messages die there."""
    queue = broker.declare_queue(name, dead_letter="dead", **settings)
    if bodies:
        queue.put_many(bodies)
        die(broker, queue.get_many(len(bodies)))
    return queue


def page(broker: Any, name: str) -> list[MessageFacts]:
    """Return the messages of a queue as its log has them, read from a copy: a process opens a log once."""
    with TemporaryDirectory() as directory:
        return inspect.read_page(broker.snapshot(f"{directory}/copy").path, name).messages


def die(broker: Any, held: Any) -> None:
    """Have a delivery, or a batch of them, be dead letters."""
    dead = broker.declare_queue("dead")
    wanted = len(dead) + (len(held) if isinstance(held, Sequence) else 1)
    held.nack(requeue=False)
    until(lambda: len(dead) == wanted)


def test_each_goes_back_to_its_own_queue_in_order(open_spool: Open) -> None:
    """With body, headers and topic; the count of its deaths stays; more than one commit."""
    broker = open_spool()
    bodies = [b"%03d" % number for number in range(250)]
    one, two = kill(broker, "one", *bodies), kill(broker, "two", b"x")
    broker.bind(two, "t/#")
    broker.publish("t/u", b"published", headers={"kept": 1})
    die(broker, two.get())
    assert broker.redrive("dead") == qflow.RedriveReport(moved={"one": 250, "two": 2}, kept={})
    assert len(broker.queue("dead")) == 0
    assert bodies_of(one) == bodies
    assert two.get().body == b"x"
    delivery = two.get()
    assert (delivery.body, delivery.topic, delivery.delivery_count) == (b"published", "t/u", 1)
    assert delivery.headers == {"kept": 1, "dead_letter_count": 1}
    die(broker, delivery)
    assert broker.queue("dead").get().headers["dead_letter_count"] == 2


def test_what_cannot_go_back_stays_uncounted(open_spool: Open) -> None:
    """No origin, an origin that is gone, at its limit, or too small; with the reason, in its place."""
    broker = open_spool()
    kill(broker, "gone", b"1")
    kill(broker, "small", b"2" * 50)
    kill(broker, "full", b"3", b"4", limit_messages=2).put(b"there")
    broker.queue("dead").put(b"5")
    kill(broker, "fine", b"6")
    broker.delete_queue("gone")
    broker.alter_queue("small", max_message_bytes=10)
    broker.alter_queue("dead", max_deliveries=1)
    for _ in range(3):
        kept = broker.redrive("dead").kept
    assert sum(kept.values()) == 4
    assert [reason.partition(":")[0].partition(",")[0] for reason in sorted(kept)] == [
        "no dead letter",
        "queue 'full' is at its limit",
        "queue 'gone'",
        "queue 'small' does not take messages of its size any more",
    ]
    assert bodies_of(broker.queue("fine")) == [b"6"]
    assert bodies_of(broker.queue("full")) == [b"there", b"3"]
    batch = broker.queue("dead").get_many(10)
    assert batch.bodies == [b"1", b"2" * 50, b"4", b"5"]
    assert {delivery.delivery_count for delivery in batch} == {1}


@pytest.mark.parametrize("policy", [Overflow.DROP_NEWEST, Overflow.DROP_OLDEST, Overflow.DEAD_LETTER])
def test_no_policy_takes_what_is_moved(open_spool: Open, policy: Overflow) -> None:
    """A queue at its limit would drop it, or send it round: it stays."""
    broker = open_spool()
    queue = kill(broker, "q", b"1", b"2", b"3", limit_messages=3, on_overflow=policy)
    queue.put(b"there")
    assert broker.redrive("dead").moved == {"q": 2}
    assert bodies_of(queue) == [b"there", b"1", b"2"]
    assert bodies_of(broker.queue("dead")) == [b"3"]


def test_room_that_others_take_before_the_commit_is_told(open_spool: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was to go together stays, uncounted; what goes elsewhere goes on."""
    broker = open_spool()
    kill(broker, "full", *[b"%03d" % number for number in range(100)])
    kill(broker, "open", b"behind")
    broker.alter_queue("full", limit_messages=100)
    broker.queue("full").put(b"there")
    monkeypatch.setattr(Puts, "would_admit", lambda *arguments: True)
    monkeypatch.setattr(redrive, "PATIENCE_S", 0.01)
    assert broker.redrive("dead") == qflow.RedriveReport(moved={"open": 1}, kept={redrive.TAKEN: 100})
    held = broker.queue("dead").get_many(200)
    assert [delivery.body for delivery in held] == [b"%03d" % number for number in range(100)]
    assert {delivery.delivery_count for delivery in held} == {1}
    assert bodies_of(broker.queue("full")) == [b"there"]


def test_another_queue_and_a_limit(open_spool: Open) -> None:
    """`to` takes those without an origin, too; the limit counts what was moved."""
    broker = open_spool()
    kill(broker, "q", b"1", b"2")
    broker.queue("dead").put(b"3")
    broker.declare_queue("other")
    for _ in range(2):
        assert broker.redrive("dead", to="other", limit=1).moved == {"other": 1}
    assert broker.redrive("dead", to="other").moved == {"other": 1}
    assert bodies_of(broker.queue("other")) == [b"1", b"2", b"3"]


def test_what_is_no_dead_letter_goes_as_it_is(open_spool: Open) -> None:
    """Priority and expiry, as far as the other queue has them; topic and key; what is not due yet stays, and is told."""
    broker = open_spool()
    source = broker.declare_queue("source", priorities=3)
    broker.bind(source, "t")
    source.put(b"plain")
    source.put(b"urgent", priority=2)
    source.put(b"brief", ttl_s=3600, headers={"kept": 1})
    broker.publish("t", b"published", key=b"k")
    source.put_many([b"later", b"later still"], delay_s=3600)
    wanted = {one.body: one for one in page(broker, "source")}
    other = broker.declare_queue("other", priorities=2)
    short = broker.declare_queue("short", ttl_s=60)
    for _ in range(2):
        report = broker.redrive("source", to="other")
        assert report.kept == {"not due yet": 2}
    assert broker.redrive("source", to="short", limit=1).kept == {"not due yet": 2}
    there = page(broker, "other")
    assert [(one.body, one.priority) for one in there] == [
        (b"urgent", 1),
        (b"plain", 0),
        (b"brief", 0),
        (b"published", 0),
    ]
    for one in there:
        before = wanted[one.body]
        assert (one.topic, one.key, one.headers) == (before.topic, before.key, before.headers)
        assert abs(one.expires_ms - before.expires_ms) <= 1
    assert wanted[b"brief"].expires_ms
    assert broker.redrive("other", to="short").moved == {"short": 4}
    assert all(0 < one.expires_ms < wanted[b"brief"].expires_ms for one in page(broker, "short"))
    assert (len(source), len(other), len(short)) == (2, 0, 4)


def test_a_dead_letter_is_put_anew(open_spool: Open) -> None:
    """Whatever time the queue of dead letters gave it."""
    broker = open_spool()
    dead, queue = broker.declare_queue("dead", ttl_s=3600), broker.declare_queue("q", dead_letter="dead")
    queue.put(b"1")
    queue.get().nack(requeue=False)
    until(lambda: len(dead) == 1)
    assert broker.redrive("dead").moved == {"q": 1}
    assert [one.expires_ms for one in page(broker, "q")] == [0]


@pytest.mark.owner_only
def test_a_signal_handler_finds_the_lock_of_the_other_queue_free(
    open_spool: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether there is room is asked where none strikes: one that looks at the queue would wait for this thread."""
    broker = open_spool()
    kill(broker, "q", b"1", b"2")
    real, asked = Admission.admits, []

    def admits(admission: Admission, depth: Depth) -> bool:
        asked.append(threading.current_thread() is threading.main_thread())
        return real(admission, depth)

    monkeypatch.setattr(Admission, "admits", admits)
    broker.redrive("dead", sequences=[next(broker.queue("dead").browse()).sequence])
    broker.redrive("dead")
    assert asked == [False] * len(asked) != []


def test_bad_names_are_refused(open_spool: Open) -> None:
    """Nothing is moved."""
    broker = open_spool()
    kill(broker, "q", b"1")
    for name, to in (("missing", None), ("dead", "missing")):
        with pytest.raises(qflow.NotFound, match="missing"):
            broker.redrive(name, to=to)
    with pytest.raises(qflow.InvalidArgument, match="itself"):
        broker.redrive("dead", to="dead")
    assert len(broker.queue("dead")) == 1


def test_more_than_a_transaction_holds_is_several(open_spool: Open) -> None:
    """Large messages, little memory: all of them go."""
    broker = open_spool(capacity_bytes=50_000, max_transaction_bytes=20_000)
    bodies = [b"%02d" % number * 2_500 for number in range(20)]
    queue = broker.declare_queue("q", dead_letter="dead")
    for body in bodies:
        queue.put(body)
        die(broker, queue.get())
    assert broker.redrive("dead").moved == {"q": 20}
    assert bodies_of(queue) == bodies


@pytest.mark.owner_only
def test_a_failure_in_the_midst_keeps_the_rest(open_spool: Open) -> None:
    """What was committed before is moved, all else is where it was."""
    broker = open_spool()
    queue = kill(broker, "q", *[b"%03d" % number for number in range(150)])
    real = broker.engine.together.begin
    calls: list[int] = []

    def begin(*arguments: Any, **options: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise qflow.DiskFull("no space left")
        real(*arguments, **options)

    broker.engine.together.begin = begin  # type: ignore[method-assign]
    moving = Redrive(broker, "dead")
    with pytest.raises(qflow.DiskFull):
        moving.run()
    broker.engine.together.begin = real  # type: ignore[method-assign]
    assert moving.moved == {"q": 100}
    assert (len(queue), len(broker.queue("dead"))) == (100, 50)
    assert broker.queue("dead").stats().acquired_messages == 0
    assert broker.check() == []


def test_chosen_messages_move_and_nobody_holds_the_others(open_spool: Open) -> None:
    """More than a commit takes, out of the middle, in the order they are named in; what is held is told."""
    broker = open_spool()
    bodies = [b"%03d" % number for number in range(400)]
    queue, dead = kill(broker, "q", *bodies), broker.queue("dead")
    sequences = [entry.sequence for entry in dead.browse()]
    held = dead.get(0)
    chosen = [*sequences[::-2], sequences[0], 10**30]
    report = broker.redrive("dead", sequences=chosen)
    assert report == qflow.RedriveReport(moved={"q": 200}, kept={redrive.NOT_WAITING: 2})
    assert bodies_of(queue) == bodies[::-2]
    assert [delivery.delivery_count for delivery in dead.get_many(400, 0)] == [1] * 199
    held.ack()
    assert dead.stats().acked_total == 201


def test_chosen_messages_that_cannot_go_are_in_their_place(open_spool: Open) -> None:
    """No origin, and a queue at its limit; a limit on how many; a paused queue; what is no sequence."""
    broker = open_spool()
    kill(broker, "full", b"1", b"2", b"3")
    broker.alter_queue("full", limit_messages=2)
    dead = broker.queue("dead")
    dead.put(b"4")
    sequences = [entry.sequence for entry in dead.browse()]
    dead.pause()
    assert broker.redrive("dead", sequences=sequences).kept == {redrive.PAUSED: 4}
    assert broker.redrive("dead", sequences=[]).kept == {}
    dead.resume()
    assert broker.redrive("dead", sequences=sequences, limit=1).moved == {"full": 1}
    report = broker.redrive("dead", sequences=sequences[1:])
    assert report.moved == {"full": 1}
    assert sorted(report.kept) == ["no dead letter: nothing says where it came from", "queue 'full' is at its limit"]
    assert bodies_of(broker.queue("full")) == [b"1", b"2"]
    assert broker.redrive("dead", to="full", sequences=[]).moved == {}
    for wrong in ("0", 0, [-1], [None]):
        with pytest.raises(qflow.InvalidArgument, match="sequence"):
            broker.redrive("dead", sequences=wrong)  # type: ignore[arg-type]
    batch = dead.get_many(9, 0)
    assert (batch.bodies, {delivery.delivery_count for delivery in batch}) == ([b"3", b"4"], {1})


@pytest.mark.owner_only
@pytest.mark.parametrize("durable", [True, False], ids=["durable", "transient"])
def test_chosen_messages_move_wherever_they_lie(
    spool: Path, clock: Clock, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory, spilled, delayed, given back for later; and after a restart, in the log alone."""
    monkeypatch.setattr(redrive, "BATCH_MESSAGES", 7)
    bodies = [b"%03d" % number + bytes(500) for number in range(60)]
    with open_still(spool, clock) as broker:
        source = broker.declare_queue("q", durable=durable, capacity_bytes="16KiB")
        broker.declare_queue("to", durable=durable)
        sequences = [source.put(body, delay_s=1000.0 * (place % 5 == 4)) for place, body in enumerate(bodies)]
        source.get(0).nack(delay_s=500)
        assert source.stats().spilled_messages > 0
        assert broker.redrive("q", to="to", sequences=sequences[:40:3]).moved == {"to": 14}
        assert broker.check() == []
        assert [delivery.body for delivery in broker.queue("to").get_many(99, 0)] == bodies[:40:3]
        if not durable:
            return
    with open_still(spool, clock, capacity_bytes="16KiB") as broker:
        source = broker.queue("q")
        assert source.stats().logged_messages > 0
        assert broker.redrive("q", to="to", sequences=sequences[1:40:3]).moved == {"to": 13}
        assert broker.check() == []
    with open_still(spool, clock) as broker:
        clock.advance(2000)
        assert sorted(bodies_of(broker.queue("to"))) == sorted(bodies[:40:3] + bodies[1:40:3])
        assert sorted(bodies_of(broker.queue("q"))) == sorted(bodies[2:40:3] + bodies[40:])
        assert broker.check() == []


@pytest.mark.owner_only
def test_room_that_others_take_before_the_commit_is_told_of_chosen_ones(
    open_spool: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stays by itself, uncounted; what goes elsewhere goes on."""
    broker = open_spool()
    kill(broker, "full", b"0", b"1")
    kill(broker, "open", b"behind")
    broker.alter_queue("full", limit_messages=2)
    broker.queue("full").put(b"there")
    monkeypatch.setattr(Puts, "would_admit", lambda *arguments: True)
    monkeypatch.setattr(redrive, "PATIENCE_S", 0.01)
    chosen = [entry.sequence for entry in broker.queue("dead").browse()]
    report = broker.redrive("dead", sequences=chosen)
    assert report == qflow.RedriveReport(moved={"full": 1, "open": 1}, kept={redrive.TAKEN: 1})
    (left,) = broker.queue("dead").get_many(9, 0)
    assert (left.body, left.delivery_count) == (b"1", 1)


@pytest.mark.owner_only
def test_a_failure_in_the_midst_keeps_the_rest_of_chosen_ones(open_spool: Open) -> None:
    """What is in a commit moves, and what is behind it waits where it was."""
    broker = open_spool()
    queue, dead = kill(broker, "q", b"0", b"1", b"2", b"3"), broker.queue("dead")
    real = broker.engine.together.commit
    calls: list[int] = []

    def commit(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise qflow.DiskFull("no space left")
        return real(*arguments, **options)

    broker.engine.together.commit = commit  # type: ignore[method-assign]
    moving = Redrive(broker, "dead")
    with pytest.raises(qflow.DiskFull):
        moving.run_chosen([entry.sequence for entry in dead.browse()])
    broker.engine.together.commit = real  # type: ignore[method-assign]
    assert sum(moving.moved.values()) + moving.in_doubt == 2
    broker.engine.log.drain()
    assert (bodies_of(queue), bodies_of(dead)) == ([b"0", b"1"], [b"2", b"3"])
    assert broker.check() == []


@pytest.mark.owner_only
def test_a_handler_that_finds_a_queue_full_leaves_what_was_chosen_in_its_place(open_spool: Open) -> None:
    """Its QueueFull strikes before the commit has begun; or as it has, and then it moves, and the error is told."""
    broker = open_spool()
    queue, dead = kill(broker, "q", b"0", b"1", b"2"), broker.queue("dead")
    chosen = [entry.sequence for entry in dead.browse()]
    real = broker.engine.together.commit

    def struck(*arguments: Any, **options: Any) -> Any:
        raise qflow.QueueFull("found by the handler")

    def struck_late(*arguments: Any, **options: Any) -> Any:
        real(*arguments, **options)
        struck()

    broker.engine.together.commit = struck  # type: ignore[method-assign]
    assert broker.redrive("dead", sequences=chosen[:1]).kept == {redrive.TAKEN: 1}
    broker.engine.together.commit = struck_late  # type: ignore[method-assign]
    with pytest.raises(qflow.QueueFull, match="handler"):
        broker.redrive("dead", sequences=chosen[1:])
    broker.engine.log.drain()
    assert (bodies_of(queue), bodies_of(dead)) == ([b"1"], [b"0", b"2"])
    assert broker.check() == []


@pytest.mark.owner_only
@pytest.mark.parametrize("logged", [False, True], ids=["in memory", "in the log"])
def test_what_a_purge_found_on_its_way_has_moved(spool: Path, clock: Clock, logged: bool) -> None:
    """The purge counts it, and so does the move, for it is in the other queue."""
    with open_still(spool, clock) as broker:
        broker.declare_queue("to")
        sequences = [broker.declare_queue("q").put(b"%03d" % number + bytes(500)) for number in range(60)]
        if not logged:
            move_while_purged(broker, sequences[50])
            return
    with open_still(spool, clock, capacity_bytes="16KiB") as broker:
        move_while_purged(broker, sequences[50])


def move_while_purged(broker: qflow.Broker, sequence: int) -> None:
    """Have a message moved that a purge finds when it was taken out, before its commit."""
    real = broker.engine.together.commit
    purged: list[int] = []

    def commit(*arguments: Any, **options: Any) -> Any:
        purged.append(broker.queue("q").purge())
        return real(*arguments, **options)

    broker.engine.together.commit = commit  # type: ignore[method-assign]
    assert broker.redrive("q", to="to", sequences=[sequence]).moved == {"to": 1}
    assert (purged, bodies_of(broker.queue("to"))) == ([60], [b"050" + bytes(500)])
    assert broker.check() == []


@pytest.mark.owner_only
def test_what_is_given_up_twice_keeps_nothing_of_who_takes_it_in_between(spool: Path, clock: Clock) -> None:
    """Both claim a run of the log, as another one does: the second has it to its end."""
    with open_still(spool, clock) as broker:
        sequences = [broker.declare_queue("q").put(b"%03d" % number + bytes(500)) for number in range(60)]
    with open_still(spool, clock, capacity_bytes="16KiB") as broker:

        def taken(place: int) -> Deleting:
            deleting = Deleting(parts_of(broker.queue("q")), sequences[place], moves=True)
            assert deleting.step(None, may_work=True) is None
            return deleting

        first, beside = taken(50), taken(51)
        first.give_up()
        second = taken(50)
        first.give_up()
        beside.give_up()
        assert second.leaving is not None
        assert second.leaving.in_log.stands
        second.give_up()
        assert not second.leaving.in_log.stands
        assert broker.check() == []


@pytest.mark.owner_only
def test_an_interrupt_as_what_stays_is_put_back_leaves_nothing_held(
    open_spool: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever in that it strikes: behind the first of several batches, too."""
    monkeypatch.setattr(redrive, "BATCH_MESSAGES", 1)
    broker = open_spool()
    dead = broker.declare_queue("dead")
    dead.put_many([b"0", b"1", b"2"])
    real, struck = Claims.give_up, []

    def give_up(claims: Claims, one: HeldOne) -> None:
        real(claims, one)
        if not struck:
            struck.append(one)
            raise KeyboardInterrupt

    monkeypatch.setattr(Claims, "give_up", give_up)
    with pytest.raises(KeyboardInterrupt):
        broker.redrive("dead")
    assert (dead.stats().acquired_messages, dead.get_many(9, 0).bodies) == (0, [b"0", b"1", b"2"])


@pytest.mark.parametrize("limit", [None, 2])
def test_what_is_due_at_an_opening_moves_though_it_takes_long_to_read(
    limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A get waits for 30 ms, and maintenance reads the rest: a redrive reads them itself, and says what is not due."""
    clock = Clock()
    with open_still(tmp_path / "spool", clock) as broker:
        source = broker.declare_queue("source")
        for delay_s in (3600, 1):
            source.put_many([b"%d" % delay_s] * 3000, delay_s=delay_s)
        broker.declare_queue("target")
    clock.advance(10)
    monkeypatch.setattr(source_module, "READ_FIRST_S", -1)
    with open_still(tmp_path / "spool", clock) as broker:
        report = broker.redrive("source", to="target", limit=limit)
        moved = 3000 if limit is None else limit
        assert report.moved == {"target": moved}
        assert report.kept == ({} if limit else {"not due yet": 3000})
        assert len(broker.queue("source")) == 6000 - moved


def test_what_another_thread_reads_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As maintenance does after an opening."""
    clock = Clock()
    with open_still(tmp_path / "spool", clock) as broker:
        broker.declare_queue("source").put_many([b"due"] * 3, delay_s=1)
        broker.declare_queue("target")
    clock.advance(10)
    monkeypatch.setattr(source_module, "READ_FIRST_S", -1)
    with open_still(tmp_path / "spool", clock) as broker:
        (delayed,) = parts_of(broker.queue("source")).lanes.delayed_lists()
        read = delayed.claim_head(object())

        def wait(_seconds: float) -> None:
            read.claim = None

        monkeypatch.setattr(tending, "sleep", wait)
        assert broker.redrive("source", to="target").moved == {"target": 3}
