"""Redrive: dead letters go back to where they came from, and what cannot stays where it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import qflow
from faults.seams import bodies_of
from qflow import Overflow, inspect
from qflow.inspect import MessageFacts
from qflow.queues import redrive
from qflow.queues.puts import Puts
from qflow.queues.redrive import Redrive
from unit.clocks import until

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
    real = broker.engine.together.commit
    calls: list[int] = []

    def commit(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise qflow.DiskFull("no space left")
        return real(*arguments, **options)

    broker.engine.together.commit = commit  # type: ignore[method-assign]
    moving = Redrive(broker, "dead")
    with pytest.raises(qflow.DiskFull):
        moving.run()
    broker.engine.together.commit = real  # type: ignore[method-assign]
    assert moving.moved == {"q": 100}
    assert (len(queue), len(broker.queue("dead"))) == (100, 50)
    assert broker.queue("dead").stats().acquired_messages == 0
    assert broker.check() == []
