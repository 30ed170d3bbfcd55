"""What waits in the owner holds up nothing else: not of the same connection, and not of others; memory is bounded."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import qflow
import qflow.aio
from door_raw import RawDoor, until
from qflow import InvalidArgument, QflowError
from qflow.remote.client.link import Link, Reply, Request
from qflow.remote.server import budget, connection, long
from qflow.remote.server.operations import streams
from qflow.remote.server.session import Pages, Session
from qflow.remote.wire.errors import decode_error
from qflow.remote.wire.frames import FrameReader, encode_frame, preamble

PUT = {"op": "put", "queue": "jobs"}
GET = {"op": "get", "queue": "jobs", "most": 1}


def test_gets_that_wait_do_not_hold_up_the_put_they_wait_for(owner: qflow.Broker, spool: Path) -> None:
    """However many of them, on the same connection."""
    owner.declare_queue("jobs")
    with RawDoor(spool, timeout_s=60).greeted() as raw:
        raw.send(b"".join(b"".join(encode_frame(number, GET)) for number in range(100, 2600)))
        raw.request({**PUT, "headers": {"a": 1}}, [b"x"], number=50)
        frames = [raw.frame(), raw.frame()]
        assert sorted(frame.number for frame in frames if frame) == [50, 100]


def test_more_that_waits_than_an_owner_bears_is_refused_in_a_sentence(
    owner: qflow.Broker, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest goes on."""
    monkeypatch.setattr(connection, "MOST_WAITING", 10)
    owner.declare_queue("jobs")
    with RawDoor(spool, timeout_s=60).greeted() as raw:
        raw.send(b"".join(b"".join(encode_frame(number, GET)) for number in range(100, 111)))
        frame = raw.frame()
        assert frame is not None
        assert frame.number == 110
        error = decode_error(frame.head)
        assert type(error) is InvalidArgument
        assert "10 requests" in str(error)
        raw.request({**PUT, "headers": {"a": 1}}, [b"x"], number=50)
        frames = [raw.frame(), raw.frame()]
        assert sorted(frame.number for frame in frames if frame) == [50, 100]


def test_puts_that_wait_for_room_do_not_hold_up_who_makes_room(
    owner: qflow.Broker, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More bytes than may be under way wait for room in a bounded queue, and the same connection empties it."""
    monkeypatch.setattr(budget, "CREDITS_BYTES", 2**22)
    monkeypatch.setattr(connection, "SLACK_BYTES", 2**16)
    owner.declare_queue("jobs", limit_messages=5)
    with qflow.connect(spool) as remote:
        queue = remote.queue("jobs")
        futures = [queue.submit(bytes(100_000)) for _ in range(60)]
        got = 0
        while got < 60:
            batch = queue.get_many(10, timeout_s=60)
            got += len(batch)
            batch.ack()
        assert [future.result(60) for future in futures] == list(range(60))


def test_a_large_put_that_waits_for_room_does_not_hold_up_those_of_others(
    owner: qflow.Broker, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has come: what it takes is no longer taken from what is to come."""
    monkeypatch.setattr(budget, "BUDGET_BYTES", 2**22)
    monkeypatch.setattr(connection, "HELD_S", 0.01)
    owner.declare_queue("full", limit_messages=1).put(b"x")
    owner.declare_queue("jobs")
    with RawDoor(spool).greeted() as one, RawDoor(spool, timeout_s=60).greeted() as another:
        number = one.request({"op": "put", "queue": "full"}, [bytes(3 * 2**20)])
        assert another.ask(PUT, [bytes(3 * 2**20)]).head["result"]["first"] == 0
        owner.queue("full").get(60).ack()
        frame = one.frame()
        assert frame is not None
        assert (frame.number, frame.head["result"]["first"]) == (number, 1)


def test_what_is_released_twice_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that waited is answered in the end, too."""
    monkeypatch.setattr(budget, "BUDGET_BYTES", 100)
    memory = budget.Budget()
    called: list[str] = []
    assert memory.come("a", 80, lambda: called.append("a"))
    taken = memory.complete("a")
    assert not memory.come("b", 80, lambda: called.append("b"))
    memory.release(taken)
    assert called == ["b"]
    memory.release(taken)
    memory.complete("b")
    assert not memory.come("c", 80, lambda: called.append("c"))


def test_credits_of_all_connections_are_bounded(owner: qflow.Broker, spool: Path) -> None:
    """Each is told its own, which it keeps; who comes when little is left gets little."""
    told = []
    remotes = [qflow.connect(spool) for _ in range(30)]
    for remote in remotes:
        told.append(remote._connection._link.limits["bytes"])
    assert told[0] == budget.CREDITS_BYTES // 8
    assert told == sorted(told, reverse=True)
    assert told[-1] == budget.LEAST_CREDIT_BYTES
    assert sum(told) <= budget.CREDITS_BYTES + 30 * budget.LEAST_CREDIT_BYTES
    for remote in remotes:
        remote.close()


def test_a_credit_comes_back_with_its_connection() -> None:
    """The next one gets it."""
    memory = budget.Budget()
    first = memory.grant("a")
    assert memory.grant("b") < first
    memory.leave("a")
    memory.leave("b")
    assert memory.grant("c") == first


def test_who_sends_more_than_its_credit_is_not_read(
    owner: qflow.Broker, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds up itself alone; when there is room, all of it is taken."""
    monkeypatch.setattr(budget, "CREDITS_BYTES", 2**20)
    monkeypatch.setattr(connection, "SLACK_BYTES", 2**16)
    full = owner.declare_queue("full", limit_messages=1)
    full.put(b"x")
    with RawDoor(spool).greeted() as raw:
        head, body = {"op": "put", "queue": "full"}, bytes(2**18)
        data = b"".join(b"".join(encode_frame(number, head, [[body]])) for number in range(100, 164))
        sender = threading.Thread(target=raw.send, args=(data,))
        sender.start()
        with qflow.connect(spool) as remote:
            assert remote.queues() == ["full"]
        assert sender.is_alive()
        for _ in range(65):
            full.get(60).ack()
        sender.join()
        answers = [raw.frame() for _ in range(64)]
        assert {answer.number for answer in answers if answer} == set(range(100, 164))


def test_a_subscriber_that_never_reads_is_sent_no_more_than_a_bound(owner: qflow.Broker, spool: Path) -> None:
    """However many of its gets wait: what it is not sent, others of its group get."""
    owner.declare_stream("s", topics=["a"])
    other = owner.subscribe("s", group="g")
    with RawDoor(spool).greeted() as raw:
        opened = raw.ask({"op": "subscribe", "stream": "s", "filter": "#", "options": {"group": "g"}})
        assert "error" not in opened.head, opened.head
        number = opened.head["result"]["subscription"]
        get = {"op": "subscription_get", "subscription": number, "taker": 1, "most": 1}
        raw.send(b"".join(b"".join(encode_frame(number, get)) for number in range(100, 160)))
        with qflow.connect(spool) as remote:
            assert remote.queues() == []  # and its gets have been read, too
        for _ in range(40):
            owner.publish("a", bytes(2**20))
        for _ in range(20):
            other.ack(other.get(60))
    other.close()


@pytest.mark.parametrize("operation", ["query", "last"])
def test_what_a_caller_asks_for_and_never_reads_is_not_made(
    owner: qflow.Broker, spool: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """But for a bound; as soon as it reads, all of it is."""
    owner.declare_stream("s", topics=["a/#"])
    owner.publish_many([(f"a/{number}", bytes(2**20)) for number in range(6)])
    made: list[int] = []
    describe = streams.describe_messages

    def counted(messages: list[Any]) -> Any:
        made.append(len(messages))
        return describe(messages)

    monkeypatch.setattr(streams, "describe_messages", counted)
    head = {"op": operation, "stream": "s", "filter": "#"}
    with RawDoor(spool).greeted() as raw, RawDoor(spool).greeted() as other:
        raw.send(b"".join(b"".join(encode_frame(number, head)) for number in range(100, 120)))
        until(lambda: made)
        for _ in range(5):  # the threads that read come to it behind what was asked for before
            other.ask(head)
        assert len(made) <= 5 + long.MADE_TOGETHER + 2
        frames = [raw.frame() for _ in range(20)]
        assert {frame.number for frame in frames if frame} == set(range(100, 120))
    assert made == [6] * 25


def tasks() -> int:
    """Return how many requests have a task."""
    return sum(type(one) is asyncio.Task and "_answer" in repr(one.get_coro()) for one in gc.get_objects())


def test_requests_with_long_answers_wait_without_a_task_and_few_are_read(owner: qflow.Broker, spool: Path) -> None:
    """Thousands of them by a caller that reads nothing; when it is gone, nothing of them is left."""
    owner.declare_stream("s", topics=["a"])
    owner.publish_many([("a", bytes(2**20))] * 6)
    head = {"op": "query", "stream": "s", "filter": "#", "said": "x" * 2000}
    with RawDoor(spool).greeted() as raw, RawDoor(spool).greeted() as other:
        data = b"".join(b"".join(encode_frame(number, head)) for number in range(100, 3100))

        def send() -> None:
            with suppress(OSError):
                raw.send(data)

        sender = threading.Thread(target=send)
        sender.start()
        for _ in range(5):  # the threads that read come to it behind what was asked for before
            other.ask({**head, "said": ""})
        assert tasks() <= long.MADE_TOGETHER + 1
        assert sender.is_alive()
        raw.socket.shutdown(socket.SHUT_RDWR)
        sender.join()
        until(lambda: not tasks())


@pytest.fixture
def held_up(owner: qflow.Broker, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Pages of queries are read when this is set."""
    owner.declare_stream("s", topics=["a"])
    go = threading.Event()
    read = Pages._read

    def waits(self: Pages[Any], make: Any) -> Any:
        assert go.wait(60)
        return read(self, make)

    monkeypatch.setattr(Pages, "_read", waits)
    yield go
    go.set()


QUERY = {"op": "query", "stream": "s", "filter": "#"}


def test_a_request_that_is_not_begun_can_be_cancelled(spool: Path, held_up: threading.Event) -> None:
    """It is answered at once, and the others are when it is their turn; no other may have its number before."""
    with RawDoor(spool, timeout_s=60).greeted() as raw:
        for number in range(100, 105):
            raw.request(QUERY, number=number)
        raw.request({"op": "cancel", "request": 104}, number=0)
        frame = raw.frame()
        assert frame is not None
        assert frame.number == 104
        assert "cancelled" in frame.head["text"]
        raw.request(QUERY, number=104)
        held_up.set()
        assert {frame.number for frame in (raw.frame() for _ in range(5)) if frame} == set(range(100, 105))
        held_up.clear()
        for number in (100, 101, 102, 102):
            raw.request(QUERY, number=number)
        frame = raw.frame()
        assert frame is not None
        assert "under way already" in frame.head["text"]


def test_an_owner_that_closes_tells_what_it_has_not_begun(
    owner: qflow.Broker, spool: Path, held_up: threading.Event
) -> None:
    """What is under way is answered before."""
    with RawDoor(spool, timeout_s=60).greeted() as raw:
        for number in range(100, 104):
            raw.request(QUERY, number=number)
        raw.request({"op": "queue", "queue": "q"}, number=50)
        assert raw.frame() is not None  # the others were read
        closing = threading.Thread(target=owner.close)
        closing.start()
        refused = [raw.frame(), raw.frame()]
        assert [frame.number for frame in refused if frame] == [102, 103]
        assert {type(decode_error(frame.head)) for frame in refused if frame} == {qflow.BrokerClosed}
        held_up.set()
        assert {frame.number for frame in (raw.frame(), raw.frame()) if frame} == {100, 101}
        closing.join()


def test_connections_that_asked_for_events_leave_nothing(owner: qflow.Broker, spool: Path) -> None:
    """Who is there is told each event once."""

    def sessions() -> set[int]:
        gc.collect()
        return {id(one) for one in gc.get_objects() if type(one) is Session}

    jobs = owner.declare_queue("jobs", limit_messages=1, on_overflow=qflow.Overflow.DROP_NEWEST)
    others = sessions()  # of a test that failed: its traceback holds them
    with RawDoor(spool).greeted() as raw:
        raw.ask({"op": "events"})
        raw.ask({"op": "events"})
        for _ in range(5):
            with RawDoor(spool).greeted() as gone:
                gone.ask({"op": "events"})
        until(lambda: len(sessions() - others) == 1)
        jobs.put_many([b"x"])
        jobs.put(b"y")
        notice, answer = raw.frame(), raw.ask({"op": "queues"})
        assert notice is not None
        assert notice.head["event"]["kind"] == "limit_reached"
        assert answer.head == {"result": ["jobs"]}


def test_tasks_that_wait_do_not_hold_up_who_they_wait_for(
    owner: qflow.Broker, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gets that wait for the put of the same connection, and puts that wait for its acks."""
    monkeypatch.setattr(budget, "CREDITS_BYTES", 2**22)
    monkeypatch.setattr(connection, "SLACK_BYTES", 2**16)
    owner.declare_queue("empty")
    owner.declare_queue("full", limit_messages=5)

    async def work() -> None:
        async with asyncio.timeout(60), qflow.aio.connect(spool) as remote:
            empty, full = await remote.queue("empty"), await remote.queue("full")
            gets = [asyncio.ensure_future(empty.get()) for _ in range(1200)]
            puts = [full.submit(bytes(100_000)) for _ in range(60)]
            for _ in range(60):
                delivery = await full.get()
                await delivery.ack()
            assert await asyncio.gather(*puts) == list(range(60))
            await empty.put_many([b"x"] * 1200)
            assert len(await asyncio.gather(*gets)) == 1200

    asyncio.run(work())


# The client's side --------------------------------------------------------------------------------------------------


class Caller:
    """Somebody who waits for a reply."""

    def __init__(self) -> None:
        self.outcome: Reply | QflowError | None = None

    def answered(self, outcome: Reply | QflowError) -> None:
        self.outcome = outcome


class Sent:
    """A link whose owner the test is."""

    def __init__(self, **limits: int) -> None:
        self.link = Link("spool")
        self.link.feed(preamble())
        self.link.take()
        self.link.welcomed({"frame_bytes": 2**20, **limits})
        self._reader = FrameReader(2**20)

    def put(self, size: int, doubt: str = "put") -> tuple[int, Caller]:
        caller = Caller()
        return self.link.begin(Request(PUT, ([bytes(size)],), doubt), caller), caller

    def get(self) -> int:
        return self.link.begin(Request(GET), Caller())

    def answer(self, number: int) -> None:
        self.link.feed(b"".join(encode_frame(number, {"result": None})))

    def sent(self) -> list[int]:
        return [frame.number for frame in self._reader.feed(b"".join(self.link.take()))]


def test_puts_beyond_the_credit_are_kept_and_all_else_is_sent() -> None:
    """In their order, as answers come."""
    sent = Sent(bytes=1000, requests=1000)
    puts = [sent.put(300)[0] for _ in range(5)]
    get = sent.get()
    assert sent.sent() == [*puts[:2], get]
    sent.answer(get)
    assert sent.sent() == []
    sent.answer(puts[1])
    assert sent.sent() == [puts[2]]
    later = sent.put(300)[0]
    assert sent.sent() == []
    for number in (puts[0], puts[2]):
        sent.answer(number)
    assert sent.sent() == puts[3:5]
    sent.answer(puts[3])
    assert sent.sent() == [later]


def test_one_put_that_is_larger_than_the_credit_is_sent_beside_it() -> None:
    """One at a time, and what has come before it may wait for as long as it likes."""
    sent = Sent(bytes=1000, requests=1000)
    small, large, another, other_large = (sent.put(size)[0] for size in (800, 5000, 1, 5000))
    assert sent.sent() == [small, large, another]
    sent.answer(another)
    assert sent.sent() == []
    sent.answer(large)
    assert sent.sent() == [other_large]
    sent.answer(small)
    sent.answer(other_large)
    assert sent.put(900)[0] in sent.sent()


def test_no_more_puts_are_sent_at_once_than_the_owner_takes() -> None:
    """The next one as one is answered."""
    sent = Sent(bytes=10_000, requests=4)
    numbers = [sent.put(1)[0] for _ in range(4)]
    assert sent.sent() == numbers[:2]
    sent.answer(numbers[1])
    assert sent.sent() == numbers[2:3]


def test_a_put_beyond_the_credit_goes_while_a_small_one_waits_for_room(
    owner: qflow.Broker, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same connection, into another queue."""
    monkeypatch.setattr(budget, "CREDITS_BYTES", 2**20)
    monkeypatch.setattr(connection, "SLACK_BYTES", 2**16)
    owner.declare_queue("full", limit_messages=1).put(b"x")
    owner.declare_queue("jobs")
    with qflow.connect(spool) as remote:
        future = remote.queue("full").submit(b"y")
        assert remote.queue("jobs").submit(bytes(3 * 2**20)).result(60) == 0
        remote.queue("full").get(60).ack()
        assert future.result(60) == 1


def test_a_put_that_was_kept_and_is_given_up_is_never_sent() -> None:
    """The one behind it is."""
    sent = Sent(bytes=1000, requests=1000)
    first, second, third = sent.put(500)[0], sent.put(900)[0], sent.put(100)[0]
    assert sent.sent() == [first]
    sent.link.give_up(second)
    assert sent.sent() == [third]
    sent.link.give_up(third)
    assert sent.sent() == [0]
    assert sent.link.under_way == 2


def test_a_put_that_was_kept_is_not_in_doubt() -> None:
    """At the end of the connection: it was never sent."""
    sent = Sent(bytes=1000, requests=1000)
    (_, one), (_, other) = sent.put(900), sent.put(900)
    sent.link.end()
    assert type(one.outcome) is qflow.InDoubt
    assert type(other.outcome) is qflow.BrokerClosed
