"""Publish: one message into every queue that is bound to its topic, in one commit, all of them or none."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
import qflow.aio
from faults.seams import Faults, bodies_of, faulty_broker
from qflow import Overflow
from qflow.memory.waiting import in_place, shelter
from qflow.message import OVERHEAD_BYTES
from qflow.queues.queue import parts_of
from unit.clocks import LONG_S, Clock, until

pytestmark = pytest.mark.two_drivers

Open = Callable[..., qflow.Broker]


def bound(broker: qflow.Broker, *names: str, topic_filter: str = "#", **settings: Any) -> list[qflow.Queue]:
    """Declare queues and bind them."""
    queues = [broker.declare_queue(name, **settings) for name in names]
    for queue in queues:
        broker.bind(queue, topic_filter)
    return queues


def test_a_message_goes_where_its_topic_is_wanted(open_spool: Open, durable: bool) -> None:
    """By filters as in MQTT; several filters of one queue are one copy; the result names each queue."""
    broker = open_spool()
    one, two, three = (broker.declare_queue(name, durable=durable) for name in ("one", "two", "three"))
    broker.bind(one, "flights/+/late")
    broker.bind("one", "flights/#")
    broker.bind(two, "flights/ewr/late")
    broker.bind(three, "trains/#")
    assert broker.publish("flights/ewr/late", b"1", headers={"a": 1}).sequences == {"one": 0, "two": 0}
    assert broker.publish("flights/jfk", b"2").sequences == {"one": 1}
    assert broker.publish("trains", bytearray(b"3")).sequences == {"three": 0}
    with one.get(0) as delivery:
        assert (delivery.body, delivery.topic, delivery.headers) == (b"1", "flights/ewr/late", {"a": 1})
    with two.get(0) as delivery:
        assert (delivery.body, delivery.topic, delivery.headers) == (b"1", "flights/ewr/late", {"a": 1})
    with one.get(0) as delivery:
        assert (delivery.body, delivery.topic, delivery.headers) == (b"2", "flights/jfk", {})
    assert bodies_of(three) == [b"3"]


def test_what_nobody_wants_is_counted(open_spool: Open) -> None:
    """No queue is bound: nothing is stored, the result is empty; each message counts."""
    broker = open_spool()
    broker.declare_queue("q")
    assert broker.publish("a/b", b"1").sequences == {}
    assert broker.publish_many([("a", b"2"), ("b", b"3")]) == [({}, {}), ({}, {})]
    assert broker.submit_publish("c", b"4").result(LONG_S).sequences == {}
    assert broker.stats().unrouted_total == 4
    assert broker.stats().messages == 0


def test_durable_and_transient_queues_take_part_together(open_spool: Open) -> None:
    """In one commit; what is not durable is visible when that holds, and gone after a restart."""
    broker = open_spool()
    kept, loose = bound(broker, "kept")[0], bound(broker, "loose", durable=False)[0]
    before = broker.stats().commits_total
    assert broker.publish("a", b"1").sequences == {"kept": 0, "loose": 0}
    assert broker.stats().commits_total == before + 1
    assert (len(kept), bodies_of(loose)) == (1, [b"1"])
    broker.close()
    broker = open_spool()
    assert broker.queues() == ["kept"]
    assert bodies_of(broker.queue("kept")) == [b"1"]


def test_many_messages_are_one_commit(open_spool: Open) -> None:
    """All of them or none, with a result for each, in order."""
    broker = open_spool()
    one, two = bound(broker, "one", topic_filter="a/#") + bound(broker, "two", topic_filter="+/x")
    before = broker.stats().commits_total
    results = broker.publish_many(
        ((topic, body) for topic, body in [("a/x", b"1"), ("b/x", b"2"), ("c", b"3"), ("a/x", b"4")]), headers={"h": 1}
    )
    assert broker.stats().commits_total == before + 1
    assert [result.sequences for result in results] == [{"one": 0, "two": 0}, {"two": 1}, {}, {"one": 1, "two": 2}]
    assert (bodies_of(one), bodies_of(two)) == ([b"1", b"4"], [b"1", b"2", b"4"])
    assert broker.publish_many([]) == []


def test_results_of_many_are_those_of_each(open_spool: Open, durable: bool) -> None:
    """In queues that get all or some of them, priorities of their own, streams and partitions, by place and by slice."""
    broker = open_spool()
    bound(broker, "all", "twin", durable=durable, topic_filter="#")
    bound(broker, "some", topic_filter="a/#", durable=durable, limit_messages=6, on_overflow=qflow.Overflow.DROP_NEWEST)
    broker.queue("some").put(b"first", durable=durable)
    broker.declare_stream("s", topics=["a/x"], partitions=4)
    messages = [(("a/x", "b", "a/y")[number % 3], b"%d" % number, b"%d" % number) for number in range(9)]
    together = broker.publish_many(messages)
    assert [one.sequences for one in together] == [
        {"all": number, "twin": number} | ({} if number % 3 == 1 else {"some": None}) for number in range(9)
    ]
    places = [(one.offsets["s"], one.partitions["s"]) for one in together if one.offsets]
    assert len(places) == 3
    alone = [broker.publish(topic, body, key=key) for topic, body, key in messages]
    assert [one.partitions for one in alone] == [one.partitions for one in together]
    assert [together[-1], together[8], *together[2:4]] == [together[8], list(together)[8], together[2], together[3]]
    with pytest.raises(IndexError):
        together[9]
    assert broker.check() == []


@pytest.mark.owner_only
@pytest.mark.parametrize("options", [{}, {"headers": {"h": 1}}])
def test_a_time_to_live_that_comes_meanwhile_is_that_of_its_queue_alone(
    open_spool: Open, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Queues that have messages together share their bytes, the moment when they expire included."""
    broker = open_spool()
    bound(broker, "one", "two")
    routing = broker.engine.routing
    fanned = routing._fanned

    def altered(messages: Any) -> Any:
        found = fanned(messages)
        broker.alter_queue("one", ttl_s=60)
        return found

    monkeypatch.setattr(routing, "_fanned", altered)
    broker.publish_many([("a", b"1"), ("a", b"2")], **options)
    assert [one.expires_at_s for one in broker.queue("two").get_many(2)] == [None, None]


def test_a_bad_message_among_many_stops_all(open_spool: Open, durable: bool) -> None:
    """Nothing is put, whichever of them it is."""
    broker = open_spool()
    (queue,) = bound(broker, "q", durable=durable)
    for bad in (("a/#", b"x"), ("", b"x"), ("a", "text"), ("a", None), (None, b"x"), ("a\0", b"x")):
        with pytest.raises(qflow.InvalidArgument):
            broker.publish_many([("good", b"1"), bad, ("good", b"2")])  # type: ignore[list-item]
        with pytest.raises(qflow.InvalidArgument):
            broker.publish(*bad)  # type: ignore[arg-type]
        with pytest.raises(qflow.InvalidArgument):
            broker.submit_publish(*bad)  # type: ignore[arg-type]
    assert len(queue) == 0
    assert broker.check() == []


def test_a_submitted_publish_tells_when_it_is_confirmed(open_spool: Open, durable: bool) -> None:
    """The future has the result; without a waiter the commit comes all the same."""
    broker = open_spool()
    bound(broker, "one", "two", durable=durable)
    futures = [broker.submit_publish("a", b"%d" % number) for number in range(20)]
    assert [future.result(LONG_S).sequences["two"] for future in futures] == list(range(20))
    assert bodies_of(broker.queue("one")) == [b"%d" % number for number in range(20)]


# Limits and policies -------------------------------------------------------------------------------------------------


def test_each_queue_keeps_its_own_limit_and_policy(open_spool: Open, durable: bool) -> None:
    """One drops what arrives, one drops the oldest, one buries it, one has room."""
    broker = open_spool()
    options: dict[str, Any] = {"durable": durable, "limit_messages": 1}
    newest = bound(broker, "newest", on_overflow=Overflow.DROP_NEWEST, **options)[0]
    oldest = bound(broker, "oldest", on_overflow=Overflow.DROP_OLDEST, **options)[0]
    buries = bound(broker, "buries", on_overflow=Overflow.DEAD_LETTER, dead_letter="dead", **options)[0]
    roomy = bound(broker, "roomy", durable=durable)[0]
    assert set(broker.publish("a", b"1").sequences.values()) == {0}
    result = broker.publish("a/b", b"2")
    assert result.sequences == {"newest": None, "oldest": 1, "buries": None, "roomy": 1}
    assert [bodies_of(queue) for queue in (newest, oldest, buries, roomy)] == [[b"1"], [b"2"], [b"1"], [b"1", b"2"]]
    with broker.queue("dead").get(0) as delivery:
        assert (delivery.body, delivery.topic) == (b"2", "a/b")
        assert delivery.headers["dead_letter_queue"] == "buries"
    assert newest.stats().dropped_total == oldest.stats().dropped_total == 1
    assert buries.stats().dead_lettered_total == 1


@pytest.mark.owner_only
def test_one_queue_that_refuses_refuses_all(open_spool: Open, durable: bool) -> None:
    """Nothing is in any of them, nothing is reserved, nothing counted; one at a time, many, and submitted."""
    broker = open_spool()
    one, two, three = bound(broker, "one", "two", "three", durable=durable)
    broker.alter_queue("two", limit_messages=1, on_overflow=Overflow.REJECT)
    broker.alter_queue("three", limit_messages=1, on_overflow=Overflow.DROP_NEWEST)
    broker.publish("a", b"1")
    for publish in (
        lambda: broker.publish("a", b"2"),
        lambda: broker.publish("a", b"2", headers={"a": 1}),
        lambda: broker.publish_many([("a", b"2")]),
        lambda: broker.submit_publish("a", b"2"),
    ):
        with pytest.raises(qflow.QueueFull, match="two"):
            publish()
    assert three.stats().dropped_total == 0
    assert [bodies_of(queue) for queue in (one, two, three)] == [[b"1"]] * 3
    assert broker.check() == []
    assert set(broker.publish("a", b"3").sequences.values()) == {1}


def test_one_queue_that_refuses_by_size_refuses_all(open_spool: Open, durable: bool) -> None:
    """A message too large for one of them, or for its limit."""
    broker = open_spool()
    queues = bound(broker, "one", "two", durable=durable)
    broker.alter_queue("two", max_message_bytes=100)
    with pytest.raises(qflow.MessageTooLarge, match="two"):
        broker.publish("a", b"x" * 101)
    broker.alter_queue("two", max_message_bytes=1000, limit_bytes=50)
    with pytest.raises(qflow.InvalidArgument, match="two"):
        broker.publish("a", b"x" * 101)
    assert [len(queue) for queue in queues] == [0, 0]
    assert broker.check() == []


@pytest.mark.owner_only
def test_one_queue_that_blocks_holds_all_back(open_spool: Open, durable: bool) -> None:
    """Until there is room in it; nothing is seen before in the others."""
    broker = open_spool()
    one, two = bound(broker, "one", "two", durable=durable)
    broker.alter_queue("two", limit_messages=1)
    broker.publish("a", b"1")
    bodies_of(one)
    results: list[Any] = []
    publisher = threading.Thread(target=lambda: results.append(broker.publish("a", b"2").sequences))
    publisher.start()
    until(lambda: parts_of(two).admission.line)
    assert len(one) == 0
    two.get(0).ack()
    publisher.join(LONG_S)
    assert results == [{"one": 1, "two": 1}]
    assert (bodies_of(one), bodies_of(two)) == ([b"2"], [b"2"])


def two_with_room(open_spool: Open) -> tuple[qflow.Broker, qflow.Queue, qflow.Queue]:
    """Return two queues that have borrowed memory for a message more."""
    broker = open_spool()
    first, last = bound(broker, "first", "last", durable=False, capacity_bytes=200 + OVERHEAD_BYTES)
    last.put(b"")
    first.put(b"")
    return broker, first, last


@pytest.mark.owner_only
def test_queues_that_take_it_at_once_get_nothing_when_another_is_filled_meanwhile(open_spool: Open) -> None:
    """There is room in the first one, and then none in the last: the time-out counts, and it is all or none."""
    broker, first, last = two_with_room(open_spool)
    with inside.before_lock(last, lambda: broker.alter_queue("last", limit_messages=1)), pytest.raises(qflow.QueueFull):
        broker.publish("t", b"x", timeout_s=0.01)
    assert (bodies_of(first), bodies_of(last)) == ([b""], [b""])
    assert broker.check() == []


@pytest.mark.owner_only
@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_queue_that_is_altered_when_it_has_room_for_a_message_gets_it(open_spool: Open, is_deleted: bool) -> None:
    """As if the alteration came behind it; one that is deleted takes it along."""
    broker, first, last = two_with_room(open_spool)

    def alter() -> None:
        broker.alter_queue("last", limit_messages=1)
        if is_deleted:
            broker.delete_queue("last")

    with inside.before_lock(last, alter, entry=2):
        broker.publish("t", b"x", timeout_s=0.01)
    assert bodies_of(first) == [b"", b"x"]
    assert is_deleted or bodies_of(last) == [b"", b"x"]
    assert not is_deleted or parts_of(last).gate.used == 0
    assert broker.check() == []


@pytest.mark.owner_only
def test_a_limit_that_comes_when_there_is_room_for_a_message_counts_it(open_spool: Open) -> None:
    """Also among the places that another put has counted before the message is seen."""
    broker = open_spool()
    for queue in (queues := bound(broker, "first", "last", durable=False)):
        queue.put(b" " * 1000)  # borrows memory for all that comes
        queue.get(0).ack(wait=True)
    last = queues[1]

    def limit() -> None:
        broker.alter_queue("last", limit_messages=2)
        last.put(b"other")

    with inside.before_lock(last, limit, entry=2):
        broker.publish("t", b"x", timeout_s=0.01)
    with pytest.raises(qflow.QueueFull):
        last.put(b"", timeout_s=0)
    assert bodies_of(last) == [b"other", b"x"]


@pytest.mark.owner_only
@pytest.mark.parametrize("waits", [False, True])
def test_a_publish_that_a_loop_refuses_a_signal_handler_does_nothing(open_spool: Open, waits: bool) -> None:
    """In the middle of a step: where one of the queues has no room at once, and where a task waits for a message."""
    broker = open_spool()
    first, last = bound(broker, "first", "last", durable=False)
    first.put(b"")
    first.get(0).ack(wait=True)  # it has borrowed its memory
    if waits:
        last.put(b"")
        last.get(0).ack(wait=True)
        getting = parts_of(last).gets.begin(1, None, "task", single=True)
        shelter(partial(getting.step, lambda: None, may_work=True))
    before = signal.signal(signal.SIGUSR1, lambda *_: broker.publish("t", b"x"))
    try:
        with pytest.raises(qflow.Reentered):
            in_place(lambda: signal.raise_signal(signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    if waits:
        shelter(getting.give_up)
    assert (bodies_of(first), bodies_of(last)) == ([], [])
    assert inside.left_behind(first) == inside.left_behind(last) == {}


def test_topics_that_reach_the_same_queues_in_another_order_do_not_wait_for_each_other(open_spool: Open) -> None:
    """Queues are locked in the order of their numbers, not of their bindings."""
    broker = open_spool()
    queues = [broker.declare_queue(name, durable=False) for name in ("one", "two", "three")]
    for queue in queues:
        broker.bind(queue, "up")
    for queue in reversed(queues):
        broker.bind(queue, "down")
    threads = [
        threading.Thread(target=lambda topic=topic: [broker.publish(topic, b"x") for _ in range(2000)], daemon=True)
        for topic in ("up", "down")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    assert [len(queue) for queue in queues] == [4000] * 3


@pytest.mark.parametrize("driver", ["thread", "task", "future"])
@pytest.mark.parametrize("takers", ["a stream", "a queue", "both"])
def test_a_number_is_stored_once_whoever_takes_the_message(
    spool: Path, tmp_path: Path, takers: str, driver: str
) -> None:
    """The producer's number is in the commit of the message: sent again after a crash, it is a duplicate."""

    def publish(broker: qflow.Broker) -> bool:
        message = {"topic": "t", "body": b"x", "producer": "p", "number": 7}
        if driver == "task":
            return asyncio.run(qflow.aio.AsyncBroker(broker).publish(**message)).duplicate  # type: ignore[arg-type]
        if driver == "future":
            return broker.submit_publish(**message).result(LONG_S).duplicate  # type: ignore[arg-type]
        return broker.publish(**message).duplicate  # type: ignore[arg-type]

    with qflow.open(spool) as broker:
        if takers != "a queue":
            broker.declare_stream("s", topics=["t"])
        if takers != "a stream":
            bound(broker, "q")
        assert not publish(broker)
        broker.snapshot(tmp_path / "crashed")
    for path in (spool, tmp_path / "crashed"):
        with qflow.open(path) as broker:
            assert publish(broker)
            assert [len(broker.queue(name)) for name in broker.queues()] == [1] * (takers != "a stream")
            assert [broker.stream(name).stats().messages for name in broker.streams()] == [1] * (takers != "a queue")


@pytest.mark.owner_only
@pytest.mark.parametrize("end", ["delete", "close", "unbind"])
def test_a_publisher_that_waits_sees_the_end_of_a_queue(open_spool: Open, durable: bool, end: str) -> None:
    """A queue that is deleted does not keep the others from their message; a closed broker ends it; unbinding is for
    what is published later."""
    broker = open_spool()
    one, two = bound(broker, "one", "two", durable=durable)
    broker.alter_queue("two", limit_messages=1)
    broker.publish("a", b"1")
    outcome: list[Any] = []

    def publish() -> None:
        try:
            outcome.append(broker.publish("a", b"2").sequences)
        except qflow.QflowError as error:
            outcome.append(type(error))

    publisher = threading.Thread(target=publish)
    publisher.start()
    until(lambda: parts_of(two).admission.line)
    if end == "delete":
        broker.delete_queue("two")
    elif end == "close":
        broker.close()
    else:
        broker.unbind("two", "#")
        two.get(0).ack()
    publisher.join(LONG_S)
    assert outcome == [{"delete": {"one": 1}, "close": qflow.BrokerClosed, "unbind": {"one": 1, "two": 1}}[end]]
    if end == "delete":
        assert bodies_of(one) == [b"1", b"2"]


@pytest.mark.owner_only
def test_a_queue_deleted_under_what_is_reserved_in_it_gets_nothing(open_spool: Open) -> None:
    """One queue blocks, another one is deleted meanwhile: its part is given up, and nothing of it is in the log."""
    broker = open_spool()
    one, two = bound(broker, "one", "two")
    owner = parts_of(one).context.owner
    broker.alter_queue("two", limit_messages=1)
    broker.publish("a", b"1")
    results: list[Any] = []
    publisher = threading.Thread(target=lambda: results.append(broker.publish("a", b"2").sequences))
    publisher.start()
    until(lambda: parts_of(two).admission.line)
    broker.delete_queue("one")
    inside.upkeep(broker).finish_removing()
    two.get(0).ack()
    publisher.join(LONG_S)
    assert results == [{"two": 1}]
    with broker.engine.log.read() as txn, txn.cursor() as cursor:
        assert not [key for key, _ in cursor if bytes(key)[1:5] == owner.to_bytes(4, "big")]


def test_publishers_and_a_delete_at_once(open_spool: Open, durable: bool) -> None:
    """Queues come and go under publishers: the one that stays gets every message."""
    broker = open_spool()
    (stays,) = bound(broker, "stays", durable=durable)
    results: list[Any] = []

    def publish() -> None:
        results.extend(broker.publish("a", b"x").sequences for _ in range(150))

    publishers = [threading.Thread(target=publish) for _ in range(2)]
    for publisher in publishers:
        publisher.start()
    while any(publisher.is_alive() for publisher in publishers):
        bound(broker, "goes", durable=durable)
        broker.delete_queue("goes")
    for publisher in publishers:
        publisher.join(LONG_S)
    assert sorted(result["stays"] for result in results) == list(range(300))
    assert len(stays) == 300


def test_times_to_live_are_each_queues_own(open_at: Open, clock: Clock, durable: bool) -> None:
    """The same message expires in one and stays in the other."""
    broker = open_at()
    (short,) = bound(broker, "short", durable=durable, ttl_s=5)
    (long,) = bound(broker, "long", durable=durable)
    broker.publish("a", b"1")
    clock.advance(6)
    assert (bodies_of(short), bodies_of(long)) == ([], [b"1"])


def test_a_full_disk_refuses_all_of_it(spool: Path) -> None:
    """I12: the queues that are not durable get nothing either."""
    faults = Faults()
    with faulty_broker(spool, faults) as broker:
        (kept,) = bound(broker, "kept")
        (loose,) = bound(broker, "loose", durable=False)
        broker.publish("a", b"1")
        faults.fail("make_room", qflow.DiskFull("no space left"))
        with pytest.raises(qflow.DiskFull):
            broker.publish("a", b"2")
        with pytest.raises(qflow.DiskFull):
            broker.publish_many([("a", b"2"), ("a", b"3")])
        assert isinstance(broker.submit_publish("a", b"2").exception(LONG_S), qflow.DiskFull)
        assert broker.check() == []
        faults.heal()
        assert broker.publish("a", b"3").sequences == {"kept": 1, "loose": 1}
        assert (bodies_of(kept), bodies_of(loose)) == ([b"1", b"3"], [b"1", b"3"])


# Bindings ------------------------------------------------------------------------------------------------------------


def test_bindings_survive_reopening(open_spool: Open) -> None:
    """Of durable queues, all their filters, also after settings were changed; unbound ones stay so."""
    broker = open_spool()
    queue = broker.declare_queue("q")
    for topic_filter in ("a/#", "b/+", "c"):
        broker.bind(queue, topic_filter)
    broker.unbind(queue, "b/+")
    broker.alter_queue("q", limit_messages=10)
    broker.declare_queue("q", limit_messages=10, capacity_bytes=5_000)
    broker.bind(broker.declare_queue("loose", durable=False), "a/#")
    broker.close()
    broker = open_spool()
    assert broker.publish("a/x", b"1").sequences == {"q": 0}
    assert broker.publish("b/x", b"2").sequences == {}
    assert broker.publish("c", b"3").sequences == {"q": 1}


def test_bindings_of_a_deleted_queue_are_gone(open_spool: Open, durable: bool) -> None:
    """Also when it is declared again, and after reopening."""
    broker = open_spool()
    bound(broker, "q", durable=durable)
    broker.delete_queue("q")
    broker.declare_queue("q", durable=durable)
    assert broker.publish("a", b"1").sequences == {}
    broker.close()
    assert open_spool().publish("a", b"1").sequences == {}


def test_binding_again_changes_nothing_and_unbinding_what_is_not_bound_says_so(open_spool: Open) -> None:
    """A missing queue, too, and a filter that is not valid."""
    broker = open_spool()
    (queue,) = bound(broker, "q")
    before = broker.stats().commits_total
    broker.bind(queue, "#")
    assert broker.stats().commits_total == before
    with pytest.raises(qflow.NotFound, match="'a/b'"):
        broker.unbind("q", "a/b")
    with pytest.raises(qflow.NotFound, match="'missing'"):
        broker.bind("missing", "#")
    for bad in ("", "a/#/b", "a+", "#a", None, 5):
        with pytest.raises(qflow.InvalidArgument):
            broker.bind(queue, bad)  # type: ignore[arg-type]
        with pytest.raises(qflow.InvalidArgument):
            broker.unbind(queue, bad)  # type: ignore[arg-type]
    assert broker.publish("x", b"1").sequences == {"q": 0}


def test_a_binding_that_could_not_be_written_is_not_there(spool: Path) -> None:
    """The disk is full: it is as it was before, bound or not."""
    faults = Faults()
    with faulty_broker(spool, faults) as broker:
        (queue,) = bound(broker, "q", topic_filter="a")
        faults.fail("make_room", qflow.DiskFull("no space left"))
        with pytest.raises(qflow.DiskFull):
            broker.bind(queue, "b")
        with pytest.raises(qflow.DiskFull):
            broker.unbind(queue, "a")
        faults.heal()
        assert broker.publish("b", b"1").sequences == {}
        assert broker.publish("a", b"1").sequences == {"q": 0}


# Fan-out and memory --------------------------------------------------------------------------------------------------


@pytest.mark.owner_only
@pytest.mark.parametrize("order", ["one first", "two first", "alternating"])
@pytest.mark.parametrize("size", [100, 5_000])
def test_spilled_on_one_and_resident_on_another(open_spool: Open, durable: bool, size: int, order: str) -> None:
    """Edge 4: each queue keeps its own account of the same message, released in any order."""
    broker = open_spool()
    (one,) = bound(broker, "one", durable=durable, capacity_bytes=3 * (size + OVERHEAD_BYTES))
    (two,) = bound(broker, "two", durable=durable)
    bodies = [b"%03d" % number * (size // 3) for number in range(20)]
    for body in bodies:
        broker.publish("t", body)
    assert one.stats().spilled_messages >= 15
    assert two.stats().spilled_messages == 0
    assert one.stats().bytes == two.stats().bytes
    assert broker.check() == []
    received: dict[str, list[bytes]] = {"one": [], "two": []}
    turns = {"one first": [one] * 20 + [two] * 20, "two first": [two] * 20 + [one] * 20}.get(order, [one, two] * 20)
    for queue in turns:
        with queue.get(LONG_S) as delivery:
            received[queue.name].append(delivery.body)
    assert received == {"one": bodies, "two": bodies}
    assert broker.stats().resident_bytes == 0
    broker.engine.log.drain()
    assert broker.check() == []


@pytest.mark.owner_only
def test_a_shared_body_survives_what_happens_to_it_elsewhere(open_spool: Open) -> None:
    """Acked, purged and deleted in some queues, reopened, and still whole in the others."""
    broker = open_spool()
    queues = bound(broker, "acked", "purged", "deleted", "kept")
    body = bytes(range(256)) * 40
    for _ in range(5):
        broker.publish("t", body)
    bodies_of(queues[0])
    queues[1].purge()
    broker.delete_queue("deleted")
    broker.close()
    broker = open_spool()
    inside.upkeep(broker).finish_removing()
    assert broker.check() == []
    assert bodies_of(broker.queue("kept")) == [body] * 5


@pytest.mark.owner_only
def test_each_queue_spills_the_same_entry_by_hand(open_spool: Open, durable: bool) -> None:
    """Moving it in one queue moves it in no other."""
    broker = open_spool()
    one, two = bound(broker, "one", "two", durable=durable)
    broker.publish("t", b"x" * 5_000)
    entry = next(iter(one.browse()))
    entry.spill()
    assert entry.spilled
    assert not next(iter(two.browse())).spilled
    assert one.get(0).body == two.get(0).body == b"x" * 5_000
