"""What becomes of calls that are kept back, or given up."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import qflow
import qflow.aio
from door_raw import RawDoor, until
from doors import event_loop
from doors.event_loop import cancelled_at, run, struck, turns
from qflow.remote.client import link as client
from qflow.remote.client import queue, requests, stream_requests
from qflow.remote.client.link import Link, Reply, Request
from qflow.remote.server.grants import MOST_GAPS, Grants
from qflow.remote.server.session import Session
from qflow.remote.wire.errors import encode_error
from qflow.remote.wire.frames import Frame, FrameReader, encode_frame, preamble
from qflow.streams.stream_log import StreamLog


class Waiting:
    """Waits for nothing."""

    def answered(self, outcome: object) -> None:
        """Forget it."""


class Told:
    """Waits for an answer."""

    outcome: object = None

    def answered(self, outcome: object) -> None:
        """Keep it."""
        self.outcome = outcome


def sent(link: Link) -> list[Frame]:
    """Return the frames that are to be sent."""
    return list(FrameReader(2**20).feed(b"".join(link.take())))


@pytest.fixture
def link() -> Link:
    """To an owner that takes one request with columns at a time."""
    made = Link("spool")
    made.take()
    made.feed(preamble())
    made.welcomed({"requests": 1, "bytes": 2**20, "frame_bytes": 2**20})
    return made


def put(**options: Any) -> Request:
    """Return a put of a message with options."""
    return Request({"op": "put", "queue": "jobs", **options}, [[b"x"]])


class Large(bytes):
    """More bytes than a frame can have, as far as it says."""

    def __len__(self) -> int:
        return 2**32


@pytest.mark.parametrize("frame_bytes", [2**27, 2**40])
def test_what_is_too_large_is_refused_before_it_is_put_together(
    link: Link, monkeypatch: pytest.MonkeyPatch, frame_bytes: int
) -> None:
    """Also where the owner takes more than a frame can have: it was no error of qflow's, and took as much memory."""
    link.welcomed({**link.limits, "frame_bytes": frame_bytes})
    monkeypatch.setattr(client, "encode_frame", None)
    with pytest.raises(qflow.TransactionTooLarge, match="smaller"):
        link.begin(Request({"op": "put", "queue": "jobs"}, [[Large()]]), Waiting())


@pytest.mark.parametrize(("passed_s", "left_s"), [(3.0, 2.0), (9.0, 0.0)])
def test_a_timeout_begins_with_the_call(
    link: Link, monkeypatch: pytest.MonkeyPatch, passed_s: float, left_s: float
) -> None:
    """Also where the put was kept back until others were answered."""
    now = [100.0]
    monkeypatch.setattr(client, "monotonic", lambda: now[0])
    link.begin(put(timeout_s=5.0), Waiting())
    link.begin(put(timeout_s=5.0, priority=1), Waiting())
    link.begin(put(headers={"a": '"timeout_s"'}), Waiting())
    assert [frame.head["timeout_s"] for frame in sent(link)] == [5.0]
    now[0] += passed_s
    link.feed(b"".join(encode_frame(1, {"result": None})))
    (frame,) = sent(link)
    assert (frame.head["timeout_s"], frame.head["priority"], frame.columns) == (left_s, 1, [[b"x"]])
    link.feed(b"".join(encode_frame(2, {"result": None})))
    assert sent(link)[0].head == {"op": "put", "queue": "jobs", "headers": {"a": '"timeout_s"'}}


def test_what_is_told_counts_as_heard_though_the_request_that_would_show_it_was_given_up(link: Link) -> None:
    """It was kept back, and so never sent: the next one shows it."""
    link.begin(put(), Waiting())
    link.tell(requests.ack(1, None, False))
    link.give_up(link.begin(put(), Waiting()))
    link.feed(b"".join(encode_frame(1, {"result": None})))
    assert link.has_unheard
    number = link.begin(put(), Waiting())
    link.feed(b"".join(encode_frame(number, {"result": None})))
    assert not link.has_unheard


GET = {"offsets": [], "sequences": [], "grant": 3}
GIVEN_BACK = {"op": "give_back", "grant": 3, "from": 0}


@pytest.mark.parametrize(
    ("request_", "result", "undone"),
    [
        (requests.get("jobs", 1, None, "me"), GET, GIVEN_BACK),
        (requests.get("jobs", 1, None, "me"), {"sequences": []}, None),
        (requests.consume("jobs", "me"), 3, {"op": "consume_end", "consumer": 3}),
        (queue.browse("jobs"), {"browse": 3, "entries": []}, {"op": "browse_close", "browse": 3}),
        (queue.browse_next(3), {"browse": 3, "entries": []}, {"op": "browse_close", "browse": 3}),
        (queue.browse("jobs"), {"browse": None, "entries": []}, None),
        (stream_requests.query("s", "#", {}), {"offsets": [], "query": 3}, {"op": "query_close", "query": 3}),
        (stream_requests.query_next("s", 3), {"offsets": [], "query": 3}, {"op": "query_close", "query": 3}),
        (stream_requests.query("s", "#", {}), {"offsets": [], "query": None}, None),
        (
            stream_requests.subscribe("", "s", "#", {}),
            {"subscription": 3, "settings": {}},
            {"op": "subscription_close", "subscription": 3},
        ),
        (stream_requests.get(1, 1, None, 1), GET, GIVEN_BACK),
        (stream_requests.get_ahead(1, 1, 1), GET, GIVEN_BACK),
        (requests.put("jobs", b"x", {}), {"first": 3, "count": 1}, None),
        (requests.queue_stats("jobs"), {"grant": 3}, None),
    ],
)
def test_what_nobody_was_handed_is_undone(link: Link, request_: Request, result: object, undone: object) -> None:
    """Its answer came after the call was given up: what the owner holds for it is let go of."""
    number = link.begin(request_, Waiting())
    link.give_up(number)
    assert [frame.number for frame in sent(link)] == [number, 0]
    link.feed(b"".join(encode_frame(number, {"result": result})))
    assert [frame.head for frame in sent(link)] == ([] if undone is None else [undone])


def test_the_owner_is_told_of_an_error_that_nobody_was_handed(link: Link) -> None:
    """Its answer had come: it may be a gap, which the owner tells the next one then."""
    number = link.begin(stream_requests.get(1, 1, None, 1), Waiting())
    sent(link)
    link.feed(b"".join(encode_frame(number, encode_error(qflow.GapError("gone", partition=0, first=3, end=5)))))
    link.give_up(number)
    assert [frame.head for frame in sent(link)] == [{"op": "cancel", "request": number}]
    assert link.must_be_heard


@pytest.mark.parametrize("get", [{"op": "get", "queue": "jobs"}, {"op": "subscription_get", "subscription": 1}])
def test_what_is_asked_for_behind_a_cancelled_get_comes_behind_what_that_held(
    owner: qflow.Broker, spool: Path, get: dict[str, Any]
) -> None:
    """Its answer was on its way: the owner has given that back before it gets more; told of it once more, it forgets it."""
    owner.declare_queue("jobs").put_many([b"0", b"1"])
    owner.declare_stream("s", topics=["s"])
    owner.publish_many([("s", b"0"), ("s", b"1")])
    with RawDoor(spool).greeted() as raw:
        raw.ask({"op": "subscribe", "stream": "s", "filter": "#", "options": {"name": "n", "start": 0}})
        request = {**get, "most": 1, "taker": 1}
        answers = [raw.ask(request)]
        for _ in range(2):
            raw.request({"op": "cancel", "request": answers[0].number}, number=0)
        answers.append(raw.ask(request))
        raw.request({"op": "give_back", "grant": answers[0].head["result"]["grant"]}, number=0)
        answers.append(raw.ask(request))
    bodies = [answer.columns[0][0] for answer in answers]
    assert bodies == [b"0", b"0", b"1"]
    assert [answer.head["result"]["redelivered"] for answer in answers] == [
        answers[0].head["result"]["redelivered"]
    ] * 3


SUBSCRIBE = {"op": "subscribe", "stream": "s", "filter": "#", "options": {"group": "g", "start": 0}}


def lose(owner: qflow.Broker) -> None:
    """Have the first five of ten messages of a stream dropped."""
    stream = owner.declare_stream("s", topics=["s"], retention_messages=5)
    owner.publish_many([("s", b"%d" % number) for number in range(10)])
    assert isinstance(stream, StreamLog)
    stream.retain()


def told(answer: Frame | None) -> Any:
    """Return the gap that an answer tells of, or the body of its message."""
    assert answer is not None
    if "error" in answer.head:
        assert answer.head["error"] == "GapError", answer.head
        return answer.head["facts"]["first"], answer.head["facts"]["end"]
    return answer.columns[0][0] if answer.columns else None


@pytest.mark.parametrize("whose", ["the same", "another's"])
@pytest.mark.parametrize("op", [{"most": 1}, {"ahead": True, "loop": 1}])
def test_a_gap_that_nobody_was_told_of_is_told_first_of_what_is_asked_for_next(
    owner: qflow.Broker, spool: Path, op: dict[str, Any], whose: str
) -> None:
    """Its answer was on its way to a get that was cancelled: whoever of the group asks next is told, and once."""
    lose(owner)
    with RawDoor(spool).greeted() as raw, RawDoor(spool).greeted() as other:
        for one in (raw, other):
            one.ask(SUBSCRIBE)
        get = {"op": "subscription_get", "subscription": 1, "taker": 1, **op}
        answer = raw.ask(get)
        assert told(answer) == (0, 5)
        for _ in range(2):
            raw.request({"op": "cancel", "request": answer.number}, number=0)
        raw.ask({"op": "lag", "subscription": 1})  # it has heard that
        asks = raw
        if whose == "another's":
            raw.socket.close()
            until(lambda: owner.stream("s").stats().subscriptions[0].members == 1)
            asks = other
        assert [told(asks.ask(get)) for _ in range(2)] == [(0, 5), b"5"]


@pytest.mark.parametrize("lost", [False, True])
def test_a_cancel_is_of_the_last_request_that_had_the_number(owner: qflow.Broker, spool: Path, lost: bool) -> None:
    """What was granted to an earlier one, or told, stays so."""
    lose(owner)
    with RawDoor(spool).greeted() as raw:
        raw.ask(SUBSCRIBE)
        get = {"op": "subscription_get", "subscription": 1, "taker": 1, "most": 1}
        if not lost:
            assert told(raw.ask(get)) == (0, 5)
        raw.request(get, number=1000)
        assert told(raw.frame()) == ((0, 5) if lost else b"5")
        raw.request({"op": "lag", "subscription": 1}, number=1000)
        assert raw.frame() is not None
        raw.request({"op": "cancel", "request": 1000}, number=0)
        assert told(raw.ask(get)) == (b"5" if lost else b"6")


def test_a_cancel_is_of_its_request_where_several_say_the_same(owner: qflow.Broker, spool: Path) -> None:
    """Two that wait have one name: what the first of them was given stays with it when the second is given up."""
    jobs = owner.declare_queue("jobs")
    with RawDoor(spool).greeted() as raw:
        get = {"op": "get", "queue": "jobs", "consumer": "one of many"}
        first, second = raw.request(get), raw.request(get)
        until(lambda: jobs.stats().consumers_total == 2)
        jobs.put(b"0")
        answers = [raw.frame()]
        for _ in range(2):  # as it waits, and as its answer is on its way
            raw.request({"op": "cancel", "request": second}, number=0)
        answers.append(raw.frame())
        assert [answer.number for answer in answers if answer is not None] == [first, second]
        assert not raw.ask({"op": "get", "queue": "jobs", "timeout_s": 0}).columns
        raw.request({"op": "cancel", "request": first}, number=0)
        assert raw.ask({"op": "get", "queue": "jobs", "timeout_s": 0}).columns == [[b"0"]]


def test_of_gaps_that_were_answered_the_last_ones_are_known() -> None:
    """That they were told, nobody says; more than that are not on their way."""
    grants, told_again = Grants(), list[int]()
    for request in range(1, MOST_GAPS + 2):
        grants.add_gap(request, partial(told_again.append, request))
    for request in (1, 2, MOST_GAPS + 1, 2):
        grants.give_up_of(request)
    assert told_again == [2, MOST_GAPS + 1]


def test_the_owner_keeps_nothing_for_tasks_that_were_cancelled(owner: qflow.Broker) -> None:
    """Each of these as its answer comes, more often than a connection may have them open; and others go on."""

    async def scenario() -> None:
        async with qflow.aio.connect(owner.path) as broker:
            queue = await broker.declare_queue("jobs")
            stream = await broker.declare_stream("s", topics=["s"])
            await queue.put_many([b"x"] * 1001)
            await broker.publish_many([("s", b"x")] * 257)
            entries, messages = queue.browse(), stream.query()
            await anext(entries)
            await anext(messages)
            for _ in range(100):
                for page in (queue.browse(), stream.query()):
                    task = asyncio.ensure_future(cancelled_at(anext(page), 0, True))
                    await asyncio.wait([task])
                    assert task.cancelled()
            assert len([entry async for entry in entries]) == 1000
            assert len([message async for message in messages]) == 256
            assert len([message async for message in stream.query()]) == 257

    run(scenario())


def test_a_consumer_of_tasks_that_is_closed_as_it_begins_is_known_no_longer(owner: qflow.Broker) -> None:
    """The owner hears of its begin and of its end, at whichever await it is closed."""

    async def scenario() -> None:
        async with qflow.aio.connect(owner.path) as broker:
            queue = await broker.declare_queue("jobs")

            async def never(delivery: qflow.aio.AsyncDelivery) -> None:
                raise AssertionError(delivery)

            for at in range(20):
                consumer = queue.consume(never)
                await turns(at)
                await consumer.close()
            await event_loop.until(lambda: not owner.queue("jobs").stats().consumers)

    run(scenario())


def test_a_subscribe_waits_until_one_that_was_cancelled_is_closed_again(
    owner: qflow.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the owner, which had not even come to the first: they may be of one name."""
    stream = owner.declare_stream("s", topics=["s/#"])
    assert isinstance(stream, StreamLog)
    call, seen = Session.call, []

    async def watched(session: Session, head: dict[str, Any], columns: Any) -> Any:
        seen.append(head["op"])
        try:
            return await call(session, head, columns)
        finally:
            seen.append("")

    async def scenario() -> None:
        async with qflow.aio.connect(owner.path) as broker:
            monkeypatch.setattr(Session, "call", watched)
            with owner.engine.spool.changing:  # the owner does nothing of it yet
                cancelled = asyncio.ensure_future(broker.subscribe("s", name="mine").__aenter__())
                await event_loop.until(lambda: seen)
                cancelled.cancel()
                opening = asyncio.ensure_future(broker.subscribe("s", name="mine").__aenter__())
                await turns()
            subscription = await opening
            assert cancelled.cancelled()
            assert len(stream.open_cursors()) == 1
            assert seen == ["subscribe", "", "subscription_close", "", "subscribe", ""]
            await subscription.close()

    run(scenario())


@pytest.mark.parametrize("late", [False, True])
def test_a_subscribe_may_be_cancelled_at_each_of_its_awaits(owner: qflow.Broker, late: bool) -> None:
    """Also as its answer comes: the name is free for the next one, and one that was refused is nothing to be closed."""
    stream = owner.declare_stream("s", topics=["s/#"])
    assert isinstance(stream, StreamLog)

    async def scenario() -> None:
        async with qflow.aio.connect(owner.path) as broker:
            for at in count():
                await struck(_refused(broker), at, late)
                opening = broker.subscribe("s", name="mine")
                was_struck = await struck(opening.__aenter__(), at, late)
                if not was_struck:
                    await opening.__aexit__(None, None, None)
                    return
                async with broker.subscribe("s", name="mine"):
                    assert len(stream.open_cursors()) == 1

    run(scenario())
    assert not stream.open_cursors()


async def _refused(broker: qflow.aio.AsyncRemoteBroker) -> None:
    with pytest.raises(qflow.NotFound):
        await broker.subscribe("nowhere", name="mine")


def test_an_interrupted_subscribe_leaves_no_subscription(
    owner: qflow.Broker, remote: qflow.RemoteBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted when the answer is there already."""
    stream = owner.declare_stream("s", topics=["s/#"])

    def strike(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("qflow.remote.client.broker.subscription_of", strike)
        with pytest.raises(KeyboardInterrupt):
            remote.subscribe("s")
    until(lambda: not stream.stats().subscriptions)
    with remote.subscribe("s"):
        assert len(stream.stats().subscriptions) == 1


@pytest.mark.parametrize("way", ["ack", "ack and wait", "nack"])
def test_what_is_settled_after_a_seek_that_was_cancelled_ends_nothing(owner: qflow.Broker, way: str) -> None:
    """The seek was done, and its task did not hear of that: what was held before is taken back already."""

    async def scenario() -> None:
        async with qflow.aio.connect(owner.path) as broker:
            await broker.declare_stream("s", topics=["s"])
            await broker.publish_many([("s", b"%d" % number) for number in range(4)])
            async with broker.subscribe("s", name="n", start="earliest") as subscription:
                held = await subscription.get()
                batch = await subscription.get_many(2)
                task = asyncio.ensure_future(cancelled_at(subscription.seek(0), 0, True))
                await asyncio.wait([task])
                assert task.cancelled()
                for one in (held, batch):
                    await (one.nack() if way == "nack" else one.ack(wait=way == "ack and wait"))
                assert len(await subscription.get_many(10)) == 4

    run(scenario())


def test_behind_an_answer_that_the_broker_is_closed_nothing_is_asked_for(link: Link) -> None:
    """Nor given back, for the owner does that; what is under way is answered as before."""
    other = Told()
    link.begin(requests.get("jobs", 1, None, "me"), Waiting())
    link.begin(requests.get("jobs", 1, None, "me"), other)
    given_up = link.begin(requests.get("jobs", 1, None, "me"), Waiting())
    link.give_up(given_up)
    link.take()
    link.feed(b"".join(encode_frame(1, encode_error(qflow.BrokerClosed("it is closed")))))
    for make in (lambda: link.begin(put(), Waiting()), lambda: link.tell(requests.ack(1, None, False))):
        with pytest.raises(qflow.BrokerClosed, match="it is closed"):
            make()
    link.feed(b"".join(encode_frame(given_up, {"result": GET})))
    link.feed(b"".join(encode_frame(2, {"result": GET})))
    assert isinstance(other.outcome, Reply)
    assert sent(link) == []
