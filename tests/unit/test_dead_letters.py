"""Dead letters: why and where a message goes that is not wanted, in one commit with its leaving."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
from faults.seams import Faults, bodies_of, faulty_broker, in_thread
from qflow import Overflow, inspect
from qflow.delivery import MAX_REASON_BYTES, Segment
from qflow.memory.waiting import shelter
from qflow.message import Message, encode_headers
from qflow.queues.dead_letters import Cause, check_no_cycle, dead_letters, headers_of, revived
from qflow.queues.queue import parts_of
from unit.clocks import LONG_S, Clock

pytestmark = pytest.mark.two_drivers

Open = Callable[..., qflow.Broker]


# Pure ----------------------------------------------------------------------------------------------------------------


def test_headers_say_from_where_why_when_and_how_often() -> None:
    """Its own headers and topic stay, times go, and it is logged."""
    record = Message(b"body", encode_headers({"a": 1}), logged=False, expires_ms=5, due_ms=6, topic="x/y")
    (dead,) = dead_letters("q", [Segment(7, [record], 6)], Cause("rejected", "no such street"), 12.34567)
    assert headers_of(dead) == {
        "a": 1,
        "dead_letter_queue": "q",
        "dead_letter_reason": "rejected",
        "dead_letter_nack_reason": "no such street",
        "dead_letter_time_s": 12.346,
        "dead_letter_sequence": 7,
        "dead_letter_deliveries": 3,
        "dead_letter_count": 1,
    }
    assert isinstance(dead, Message)
    assert (dead.body, dead.topic, dead.logged, dead.expires_ms, dead.due_ms) == (b"body", "x/y", True, 0, 0)


def test_a_dead_letter_that_dies_again_is_counted() -> None:
    """The last death is described, all of them are counted; what dies at a limit has no sequence."""
    (once,) = dead_letters("q", [Segment(0, [b"body"], 0)], Cause("expired"), 1)
    (twice,) = dead_letters("other", [Segment(-1, [once], 0)], Cause("limit"), 2)
    headers = headers_of(twice)
    assert (headers["dead_letter_count"], headers["dead_letter_queue"]) == (2, "other")
    assert headers["dead_letter_sequence"] is None


def test_a_dead_letter_is_revived_as_it_was() -> None:
    """All but the count of its deaths is taken off; what was no dead letter is left alone."""
    record = Message(b"body", encode_headers({"a": 1}), topic="x")
    (dead,) = dead_letters("q", [Segment(0, [record], 0)], Cause("expired"), 1)
    queue, again = revived(dead)
    assert queue == "q"
    assert headers_of(again) == {"a": 1, "dead_letter_count": 1}
    assert isinstance(again, Message)
    assert (again.body, again.topic) == (b"body", "x")
    assert revived(b"plain") == (None, b"plain")
    assert revived(record) == (None, record)


@pytest.mark.parametrize(
    ("queue", "target", "targets", "cycle"),
    [
        ("a", None, {}, False),
        ("a", "b", {}, False),
        ("a", "b", {"b": "c", "c": None}, False),
        ("a", "a", {}, True),
        ("a", "b", {"b": "a"}, True),
        ("a", "b", {"b": "c", "c": "a"}, True),
        ("a", "b", {"b": "c", "c": "b"}, False),  # a cycle, but not of this queue
        ("a", None, {"b": "a"}, False),
    ],
)
def test_a_cycle_is_found(queue: str, target: str | None, targets: dict[str, str | None], cycle: bool) -> None:
    """And named from its beginning to its end."""
    if not cycle:
        check_no_cycle(queue, target, targets.get)
        return
    with pytest.raises(qflow.InvalidArgument, match="cycle: 'a' -> .*'a'"):
        check_no_cycle(queue, target, targets.get)


# Reasons -------------------------------------------------------------------------------------------------------------


def test_a_rejected_message_becomes_a_dead_letter(open_spool: Open, durable: bool) -> None:
    """`nack(requeue=False)`: single, a batch, and one of a batch."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, dead_letter="dead")
    queue.put_many([b"%d" % number for number in range(6)], headers={"kept": "yes"})
    queue.get().nack(requeue=False)
    batch = queue.get_many(4)
    batch[2].nack(requeue=False)
    batch.nack(requeue=False)
    dead = broker.queue("dead")
    found = {}
    for _ in range(5):
        with dead.get(LONG_S) as delivery:
            assert delivery.headers["dead_letter_reason"] == "rejected"
            assert delivery.headers["dead_letter_deliveries"] == 1
            assert delivery.headers["kept"] == "yes"
            found[delivery.headers["dead_letter_sequence"]] = delivery.body
    assert found == {number: b"%d" % number for number in range(5)}
    stats = queue.stats()
    assert (stats.messages, stats.dead_lettered_total, stats.dropped_total) == (1, 5, 0)
    assert stats.put_total == 6


def test_without_a_dead_letter_queue_it_is_dropped_and_counted(open_spool: Open, durable: bool) -> None:
    """Rejected ones, and those that came too often; it does not come back after reopening."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, max_deliveries=2)
    queue.put_many([b"1", b"2"])
    queue.get().nack(requeue=False)
    queue.get().nack()
    queue.get().nack()
    assert (len(queue), queue.stats().dropped_total) == (0, 2)
    if durable:
        broker.close()
        assert len(open_spool().queue("q")) == 0


def test_a_message_is_delivered_so_often_and_no_more(open_spool: Open, durable: bool) -> None:
    """`max_deliveries`, by nacks, by an exception in a block, and by leases that end."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, max_deliveries=3, dead_letter="dead")
    queue.put(b"1")
    for count in (1, 2):
        delivery = queue.get(0)
        assert delivery.delivery_count == count
        delivery.nack()
    with pytest.raises(RuntimeError), queue.get(0):
        raise RuntimeError
    with pytest.raises(qflow.QueueEmpty):
        queue.get(0)
    with broker.queue("dead").get(LONG_S) as delivery:
        assert delivery.headers["dead_letter_deliveries"] == 3
        assert delivery.headers["dead_letter_reason"] == "max_deliveries"
        assert delivery.delivery_count == 1


def test_a_nack_says_why(open_spool: Open, durable: bool) -> None:
    """Its reason is kept by what becomes a dead letter with it: single, one of a batch, a batch; also the last nack."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, dead_letter="dead", max_deliveries=2)
    queue.put_many([b"%d" % number for number in range(5)], headers={"kept": "yes"})
    queue.get().nack(requeue=False, reason="single")
    batch = queue.get_many(3)
    batch[0].nack(requeue=False, reason="of a batch")
    batch.nack(requeue=False, reason="batch")
    queue.get().nack(reason="first")
    again = queue.get()
    assert again.headers == {"kept": "yes"}  # what is only given back is not changed
    again.nack(reason="last")
    letters = [broker.queue("dead").get(LONG_S) for _ in range(5)]
    said = [(letter.headers["dead_letter_reason"], letter.headers["dead_letter_nack_reason"]) for letter in letters]
    assert sorted(said) == [
        ("max_deliveries", "last"),
        ("rejected", "batch"),
        ("rejected", "batch"),
        ("rejected", "of a batch"),
        ("rejected", "single"),
    ]


def test_an_exception_in_a_block_is_the_reason(open_spool: Open, durable: bool) -> None:
    """Its type and text, as the last line of its traceback."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, dead_letter="dead", max_deliveries=1)
    queue.put(b"1")
    with pytest.raises(ValueError, match="twelve"), queue.get(0):
        int("twelve")
    letter = broker.queue("dead").get(LONG_S)
    text = "ValueError: invalid literal for int() with base 10: 'twelve'"
    assert letter.headers["dead_letter_nack_reason"] == text


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("é" * 1000, "é" * (MAX_REASON_BYTES // 2)),
        ("a" + "é" * 1000, "a" + "é" * (MAX_REASON_BYTES // 2 - 1)),  # no half of a character
        ("\ud800", "\\ud800"),
        ("", ""),
    ],
)
def test_a_reason_is_cut_and_made_unicode(open_spool: Open, given: str, kept: str) -> None:
    """What an exception says may be anything; a message must not fail by it."""
    broker = open_spool()
    queue = broker.declare_queue("q", dead_letter="dead")
    queue.put(b"1")
    queue.get().nack(requeue=False, reason=given)
    assert broker.queue("dead").get(LONG_S).headers["dead_letter_nack_reason"] == kept


def test_a_reason_that_is_no_text_settles_nothing(open_spool: Open) -> None:
    """The call is refused, and the message is held as before."""
    queue = open_spool().declare_queue("q")
    queue.put(b"1")
    delivery = queue.get()
    with pytest.raises(qflow.InvalidArgument, match="reason must be str.*ValueError"):
        delivery.nack(reason=ValueError("no"))  # type: ignore[arg-type]
    delivery.ack()


def test_a_reason_does_not_outlive_the_next_death(open_spool: Open) -> None:
    """A dead letter that dies again says what became of it then."""
    broker = open_spool()
    broker.declare_queue("dead", dead_letter="grave")
    queue = broker.declare_queue("q", dead_letter="dead")
    queue.put(b"1")
    queue.get().nack(requeue=False, reason="no such street")
    broker.queue("dead").get(LONG_S).nack(requeue=False)
    headers = broker.queue("grave").get(LONG_S).headers
    assert "dead_letter_nack_reason" not in headers
    assert headers["dead_letter_count"] == 2


@pytest.mark.owner_only
def test_a_lease_that_ends_too_often_makes_a_dead_letter(open_at: Open, clock: Clock, durable: bool) -> None:
    """Whoever forgets a message for the last time cannot settle it any more."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=durable, max_deliveries=2, dead_letter="dead", ack_timeout_s=10)
    queue.put(b"1")
    for _ in range(2):
        delivery = queue.get(0)
        clock.advance(11)
        inside.tick(queue)
    with pytest.raises(qflow.AlreadySettled):
        delivery.ack()
    broker.engine.log.drain()
    assert bodies_of(broker.queue("dead")) == [b"1"]
    assert queue.stats().dead_lettered_total == 1


@pytest.mark.owner_only
def test_counts_of_deliveries_survive_a_crash_where_they_matter(open_at: Open, spool: Path, tmp_path: Path) -> None:
    """A message that kills its worker is a dead letter after so many lives, although nobody nacked it."""
    broker = open_at()
    queue = broker.declare_queue("q", max_deliveries=3, dead_letter="dead")
    queue.put_many([b"deadly", b"good"])
    broker.close()
    path = spool
    for life in range(1, 8):
        broker = qflow.open(path)
        queue = broker.queue("q")
        try:
            delivery = queue.get(0)
        except qflow.QueueEmpty:
            break
        if delivery.body == b"good":
            delivery.ack(wait=True)
        copy = tmp_path / f"life{life}"
        crash(broker, copy)
        path = copy
    else:
        raise AssertionError("it killed its worker again and again")
    broker.engine.log.drain()
    assert bodies_of(broker.queue("dead")) == [b"deadly"]
    assert broker.check() == []
    broker.close()


def crash(broker: qflow.Broker, copy: Path) -> None:
    """Leave what a kill would leave in another directory, and close the broker."""
    inside.copy_as_killed(broker, copy)
    broker.close()


# Atomic --------------------------------------------------------------------------------------------------------------


@pytest.mark.owner_only
def test_a_crash_at_any_commit_finds_a_message_in_one_place(open_spool: Open, spool: Path, tmp_path: Path) -> None:
    """I3: the copy of the log after each commit has each message once, here or there."""
    broker = open_spool()
    queue = broker.declare_queue("q", dead_letter="dead", max_deliveries=1)
    broker.declare_queue("dead")
    queue.put_many([b"%d" % number for number in range(8)])
    env = broker.engine.log._env
    real = env.commit
    copies: list[Path] = []

    def commit(txn: Any) -> None:
        real(txn)
        copy = tmp_path / f"copy{len(copies)}"
        copies.append(inside.copy_as_killed(broker, copy))

    env.commit = commit  # type: ignore[method-assign]
    queue.get().nack()
    queue.get().nack(requeue=False)
    queue.get_many(3).nack()
    broker.engine.log.drain()
    env.commit = real  # type: ignore[method-assign]
    assert copies
    for copy in copies:
        assert inspect.check_spool(copy) == []
        with qflow.open(copy) as after:
            left, dead = bodies_of(after.queue("q")), bodies_of(after.queue("dead"))
            assert sorted(left + dead) == [b"%d" % number for number in range(8)]
            assert after.check() == []
    assert len(dead) == 5


@pytest.mark.owner_only
def test_dead_letters_ride_one_commit_with_what_settles_them(open_spool: Open) -> None:
    """Edge 15: a batch that came too often moves in one commit."""
    broker = open_spool()
    queue = broker.declare_queue("q", dead_letter="dead")
    broker.declare_queue("dead")
    queue.put_many([b"x"] * 50)
    batch = queue.get_many(50)
    broker.engine.log.drain()
    before = broker.stats().commits_total
    batch.nack(requeue=False)
    broker.engine.log.drain()
    assert broker.stats().commits_total == before + 1
    assert (len(queue), len(broker.queue("dead"))) == (0, 50)


# Targets -------------------------------------------------------------------------------------------------------------


def test_a_missing_target_is_declared_as_durable_as_the_source(open_spool: Open, durable: bool) -> None:
    """When it is first needed, also again after it was deleted."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, dead_letter="dead")
    assert broker.queues() == ["q"]
    for _ in range(2):
        queue.put(b"1")
        queue.get().nack(requeue=False)
        dead = broker.queue("dead")
        assert dead.settings.durable is durable
        assert dead.get(LONG_S).body == b"1"
        broker.delete_queue("dead")


def test_a_durable_source_refuses_a_transient_target(open_spool: Open) -> None:
    """A restart would lose its dead letters; from either side, at declare and at alter."""
    broker = open_spool()
    broker.declare_queue("loose", durable=False)
    with pytest.raises(qflow.InvalidArgument, match="restart"):
        broker.declare_queue("q", dead_letter="loose")
    assert broker.queues() == ["loose"]
    queue = broker.declare_queue("q")
    with pytest.raises(qflow.InvalidArgument, match="restart"):
        broker.alter_queue("q", dead_letter="loose")
    assert queue.settings.dead_letter is None
    broker.alter_queue("q", dead_letter="later")
    with pytest.raises(qflow.InvalidArgument, match="restart"):
        broker.declare_queue("later", durable=False)
    broker.declare_queue("r", durable=False, dead_letter="later")
    assert broker.queues() == ["loose", "q", "r"]


@pytest.mark.owner_only
def test_a_transient_source_may_have_a_durable_target(open_spool: Open) -> None:
    """What dies there is kept."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=False, dead_letter="dead")
    broker.declare_queue("dead")
    queue.put_many([b"1", b"2"])
    queue.get().nack(requeue=False)
    broker.engine.log.drain()
    assert len(queue) == 1
    broker.close()
    assert bodies_of(open_spool().queue("dead")) == [b"1"]


def test_cycles_are_refused_at_declare_and_alter(open_spool: Open, durable: bool) -> None:
    """Edge 15: the queue itself, two, and three; nothing is declared or changed."""
    broker = open_spool()
    with pytest.raises(qflow.InvalidArgument, match="cycle"):
        broker.declare_queue("a", durable=durable, dead_letter="a")
    broker.declare_queue("a", durable=durable, dead_letter="b")
    with pytest.raises(qflow.InvalidArgument, match="cycle: 'b' -> 'a' -> 'b'"):
        broker.declare_queue("b", durable=durable, dead_letter="a")
    broker.declare_queue("b", durable=durable, dead_letter="c")
    broker.declare_queue("c", durable=durable)
    with pytest.raises(qflow.InvalidArgument, match="cycle"):
        broker.alter_queue("c", dead_letter="a")
    with pytest.raises(qflow.InvalidArgument, match="cycle"):
        broker.alter_queue("c", dead_letter="c")
    assert broker.queue("c").settings.dead_letter is None


@pytest.mark.owner_only
def test_dead_letters_pass_the_limit_of_their_queue(open_spool: Open, durable: bool) -> None:
    """Edge 15: they were confirmed before and have nowhere else to go."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, dead_letter="dead")
    dead = broker.declare_queue("dead", durable=durable, limit_messages=2, on_overflow=Overflow.REJECT)
    queue.put_many([b"%d" % number for number in range(5)])
    for _ in range(5):
        queue.get().nack(requeue=False)
    broker.engine.log.drain()
    assert bodies_of(dead) == [b"%d" % number for number in range(5)]


@pytest.mark.owner_only
def test_a_blocking_target_holds_nobody_back(open_spool: Open, durable: bool) -> None:
    """Neither who nacks, nor the puts that wait there."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, dead_letter="dead")
    dead = broker.declare_queue("dead", durable=durable, limit_messages=1)
    queue.put_many([b"1", b"2"])
    queue.get_many(2).nack(requeue=False)
    broker.engine.log.drain()
    with pytest.raises(qflow.QueueFull):
        dead.put_nowait(b"3")
    assert bodies_of(dead) == [b"1", b"2"]


@pytest.mark.owner_only
@pytest.mark.parametrize(("policy", "left"), [(Overflow.DROP_OLDEST, b"34"), (Overflow.DROP_NEWEST, b"01")])
def test_a_target_that_drops_does_so(open_spool: Open, durable: bool, policy: Overflow, left: bytes) -> None:
    """Its own policy about messages holds, and counts."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, dead_letter="dead")
    dead = broker.declare_queue("dead", durable=durable, limit_messages=2, on_overflow=policy)
    queue.put_many([b"%d" % number for number in range(5)])
    for _ in range(5):
        queue.get().nack(requeue=False)
        broker.engine.log.drain()
    assert len(queue) == 0
    assert dead.stats().dropped_total == 3
    assert b"".join(bodies_of(dead)) == left


def test_a_chain_of_dead_letter_policies_is_followed(open_spool: Open, durable: bool) -> None:
    """A full dead-letter queue may have one of its own; counts are where the messages passed."""
    broker = open_spool()
    options: dict[str, Any] = {"durable": durable, "limit_messages": 1, "on_overflow": Overflow.DEAD_LETTER}
    first = broker.declare_queue("first", dead_letter="second", **options)
    second = broker.declare_queue("second", dead_letter="third", **options)
    for number in range(4):
        first.put(b"%d" % number)
    third = broker.queue("third")
    assert (len(first), len(second), len(third)) == (1, 1, 2)
    assert (first.stats().dead_lettered_total, second.stats().dead_lettered_total) == (3, 2)
    assert {delivery.headers["dead_letter_queue"] for delivery in third.get_many(5)} == {"first"}


@pytest.mark.owner_only
def test_a_target_deleted_under_it_is_made_again(open_at: Open, clock: Clock) -> None:
    """The delete comes between the finding of the queue and the put: the letter stays and goes later."""
    broker = open_at()
    queue = broker.declare_queue("q", dead_letter="dead")
    broker.declare_queue("dead")
    queue.put(b"1")
    router = broker.engine.queues.router
    real = router.queue_for

    def find(source: Any) -> Any:
        found = in_thread(lambda: real(source))
        router.together._dead_letter_queue = router.queue_for = real  # type: ignore[method-assign]
        in_thread(lambda: broker.delete_queue("dead"))
        return found

    router.queue_for = find  # type: ignore[method-assign]
    queue.get().nack(requeue=False)
    assert len(queue) == 1
    clock.advance(1)
    queue.get(0).nack(requeue=False)
    broker.engine.log.drain()
    assert (len(queue), bodies_of(broker.queue("dead"))) == (0, [b"1"])


def test_dead_letters_stay_while_the_disk_is_full_and_go_later(spool: Path) -> None:
    """I12: nothing is lost and nothing is there twice; gets of others go on, and so do dead letters with the space."""
    faults = Faults()
    with faulty_broker(spool, faults) as broker:
        queue = broker.declare_queue("q", max_deliveries=1, dead_letter="dead")
        dead = broker.declare_queue("dead")
        queue.put_many([b"1", b"2", b"3"])

        def full(*arguments: Any, settles_only: bool) -> None:
            if not settles_only:
                raise qflow.DiskFull("no space left")

        real = broker.engine.log._env.make_room
        broker.engine.log._env.make_room = full  # type: ignore[method-assign]
        queue.get(0).nack()
        broker.engine.log.drain()
        assert (len(queue), len(dead)) == (3, 0)
        batch = queue.get_many(10, timeout_s=LONG_S)
        assert b"2" in batch.bodies
        batch.ack()
        broker.engine.log._env.make_room = real  # type: ignore[method-assign]
        while not len(dead):
            with pytest.raises(qflow.QueueEmpty):
                queue.get(0.05)
        broker.engine.log.drain()
        assert (len(queue), bodies_of(dead)) == (0, [b"1"])
        assert queue.stats().dead_lettered_total == 1
        assert broker.check() == []
    assert inspect.check_spool(spool) == []


@pytest.mark.owner_only
def test_who_asks_often_does_not_put_off_what_stayed(open_at: Open, clock: Clock, durable: bool) -> None:
    """A dead letter that could not go is tried again half a second later, however many gets have found it meanwhile."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=durable, dead_letter="dead")
    dead = broker.declare_queue("dead", durable=durable)
    queue.put(b"late", ttl_s=1)
    queue.put_many([b"behind it"] * 6)
    exits = parts_of(queue).exits
    real = exits.bury
    exits.bury = lambda *_: False
    clock.advance(2)
    assert queue.get(0).body == b"behind it"
    exits.bury = real
    for _ in range(4):
        clock.advance(0.1)
        assert queue.get(0).body == b"behind it"
        assert len(dead) == 0
    clock.advance(0.2)
    assert queue.get(0).body == b"behind it"
    broker.engine.log.drain()
    assert bodies_of(dead) == [b"late"]


@pytest.mark.owner_only
@pytest.mark.parametrize("delay", [None, 1.0])
def test_who_waits_behind_what_stayed_wakes_nobody_for_that(open_at: Open, clock: Clock, delay: float | None) -> None:
    """Gets that wait behind a dead letter which cannot go would else wake each other all the time."""
    broker = open_at()
    queue = broker.declare_queue("q", dead_letter="dead")
    broker.declare_queue("dead")
    queue.put(b"late", ttl_s=1, delay_s=delay)
    exits = parts_of(queue).exits
    real = exits.bury
    exits.bury = lambda *_: False
    clock.advance(3)
    with pytest.raises(qflow.QueueEmpty):
        queue.get(0)
    woken: list[int] = []
    gets = [parts_of(queue).gets.begin(1, 2, "getter", single=True) for _ in range(3)]
    for _ in range(2):
        for number, getting in enumerate(gets):
            step = partial(getting.step, partial(woken.append, number), may_work=True)
            assert shelter(step) is not None
    assert woken == []
    exits.bury = real
    for getting in gets:
        shelter(getting.give_up)


def test_a_put_turned_away_onto_a_full_disk_says_so(spool: Path) -> None:
    """The put raises, nothing is anywhere, and nothing is counted."""
    faults = Faults()
    with faulty_broker(spool, faults) as broker:
        queue = broker.declare_queue("q", limit_messages=1, on_overflow=Overflow.DEAD_LETTER, dead_letter="dead")
        broker.declare_queue("dead")
        queue.put(b"1")
        faults.fail("make_room", qflow.DiskFull("no space left"))
        with pytest.raises(qflow.DiskFull):
            queue.put(b"2")
        faults.heal()
        assert queue.stats().dead_lettered_total == 0
        assert queue.put(b"3") is None
        assert (bodies_of(queue), bodies_of(broker.queue("dead"))) == ([b"1"], [b"3"])
        assert queue.stats().dead_lettered_total == 1
        assert broker.check() == []


@pytest.mark.owner_only
def test_a_spilled_message_dies_with_its_body(open_spool: Open, durable: bool) -> None:
    """Memory is too small for either queue; what finds no room stays where it is, and dies when it comes again."""
    broker = open_spool(capacity_bytes=5_000)
    queue = broker.declare_queue("q", durable=durable, dead_letter="dead")
    queue.put_many([b"%03d" % number * 500 for number in range(20)])
    while len(queue):
        queue.get(LONG_S).nack(requeue=False)
        broker.engine.log.drain()
    assert broker.check() == []
    assert bodies_of(broker.queue("dead")) == [b"%03d" % number * 500 for number in range(20)]


@pytest.mark.owner_only
@pytest.mark.parametrize("end", ["close", "delete"])
def test_an_end_while_a_letter_is_carried_away_is_no_trouble(
    open_spool: Open, durable: bool, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Edge 16: it is in its queue or in the other, or gone with its queue; late settles are answered."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, dead_letter="dead")
    broker.declare_queue("dead", durable=durable)
    queue.put_many([b"1", b"2"])
    held = queue.get_many(2)
    real = parts_of(queue).exits.bury

    def end_first(*arguments: Any) -> bool:
        in_thread(broker.close if end == "close" else lambda: broker.delete_queue("q"))
        return real(*arguments)

    parts_of(queue).exits.bury = end_first
    held.nack(requeue=False)
    assert caplog.messages == []
    if end == "delete":
        broker.engine.log.drain()
        assert broker.check() == []
        assert broker.queues() == ["dead"]
    elif durable:
        broker = open_spool()
        assert len(broker.queue("q")) + len(broker.queue("dead")) == 2


@pytest.mark.owner_only
def test_an_interrupt_on_the_way_leaves_the_message_in_its_place(open_spool: Open, durable: bool) -> None:
    """Ctrl-C while a dead letter is carried away."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, dead_letter="dead")
    queue.put_many([b"1", b"2"])
    real = parts_of(queue).exits.bury

    def interrupt(*_: Any) -> bool:
        raise KeyboardInterrupt

    parts_of(queue).exits.bury = interrupt
    with pytest.raises(KeyboardInterrupt):
        queue.get().nack(requeue=False)
    parts_of(queue).exits.bury = real
    assert broker.check() == []
    assert bodies_of(queue) == [b"1", b"2"]


@pytest.mark.owner_only
def test_nothing_of_a_copy_is_left_when_its_spool_is_removed(open_spool: Open, spool: Path) -> None:
    """A dead-letter queue is a queue like others: purge, delete, reopen."""
    broker = open_spool()
    queue = broker.declare_queue("q", dead_letter="dead")
    queue.put_many([b"1", b"2"])
    queue.get_many(2).nack(requeue=False)
    broker.engine.log.drain()
    assert broker.queue("dead").purge() == 2
    broker.close()
    broker = open_spool()
    assert broker.queues() == ["dead", "q"]
    assert broker.queue("q").settings.dead_letter == "dead"
    broker.delete_queue("dead")
    broker.close()
    shutil.rmtree(spool)
