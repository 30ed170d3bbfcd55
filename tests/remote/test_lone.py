"""Lone puts go on connections of their own: they mean the same, overtake nothing, and never wait there."""

from __future__ import annotations

import select
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

import qflow
from qflow import BrokerClosed, InDoubt, QueueDeleted, QueueFull
from qflow.remote.client import lone
from qflow.remote.client.connecting import open_socket
from qflow.remote.client.link import Reply, Request
from qflow.remote.client.lone import LonePuts
from qflow.remote.client.requests import put as put_request
from qflow.remote.client.requests import put_many as put_many_request
from qflow.remote.server import lone as serving


class Lines:
    """Lines that connections of this process make, and what was asked on them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Request] = []
        self.together: list[int] = []
        """How many were asked at once."""
        self.made: list[LonePuts] = []
        self._one_by_one = threading.Lock()
        monkeypatch.setattr(lone, "SOON", 1)
        monkeypatch.setattr(lone, "REST", 0)
        ask, begin = lone.Line.ask_all, LonePuts.__init__

        def asked(line: lone.Line, together: Sequence[lone.Asked]) -> None:
            self.asked += [one.request for one in together]
            self.together.append(len(together))
            ask(line, together)

        def made(puts: LonePuts, make: Callable[[], lone.Line | None], later: object) -> None:
            self.made.append(puts)
            begin(puts, make, self._later)

        monkeypatch.setattr(lone.Line, "ask_all", asked)
        monkeypatch.setattr(LonePuts, "__init__", made)

    def _later(self, job: Callable[[], object]) -> None:
        """Do it now, behind the one before, as the thread does it."""
        with self._one_by_one:
            job()


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Lines:
    """Made with the first put that finds none."""
    return Lines(monkeypatch)


@pytest.fixture
def jobs(lines: Lines, owner: qflow.Broker, connect: Callable[[], qflow.RemoteBroker]) -> qflow.RemoteQueue:
    """A queue, and a line for its puts."""
    queue = connect().declare_queue("jobs")
    queue.put(b"0")
    return queue


def bodies(queue: qflow.Queue) -> list[bytes]:
    """Return what waits, in order."""
    return [bytes(delivery.body) for delivery in queue.get_many(1000, 0)]


def test_puts_return_what_they_return_elsewhere(jobs: qflow.RemoteQueue, lines: Lines, owner: qflow.Broker) -> None:
    """Sequences, ranges, and what is in the queue."""
    first = jobs.put(b"1")
    assert first is not None
    assert jobs.put_many([b"2", b"3", b""]) == range(first + 1, first + 4)
    assert len(lines.asked) == 2
    assert bodies(owner.queue("jobs")) == [b"0", b"1", b"2", b"3", b""]


def test_many_messages_go_the_long_way_though_there_is_nothing_in_them(
    jobs: qflow.RemoteQueue, lines: Lines, owner: qflow.Broker
) -> None:
    """A frame of them is longer than an owner takes there, for each has a length in it."""
    assert len(jobs.put_many([b""] * 200_000)) == 200_000
    assert not lines.asked
    assert len(jobs.put_many([b""] * 100_000)) == 100_000
    assert len(lines.asked) == 1
    assert len(owner.queue("jobs")) == 300_001


def test_a_transient_queue_is_put_into_as_well(jobs: qflow.RemoteQueue, lines: Lines, owner: qflow.Broker) -> None:
    """Without a commit."""
    del jobs
    with qflow.connect(owner.path) as remote:
        queue = remote.declare_queue("fleeting", durable=False)
        queue.put(b"0")
        queue.put(b"1")
    assert len(lines.asked) == 1
    assert bodies(owner.queue("fleeting")) == [b"0", b"1"]


def test_what_cannot_be_put_at_once_waits_on_the_other_connection(
    jobs: qflow.RemoteQueue, lines: Lines, owner: qflow.Broker
) -> None:
    """Where it is refused, or finds room; errors are those of the owner."""
    first = threading.Thread(target=jobs.put, args=(b"00",))  # has a line made for threads
    first.start()
    first.join(60)
    assert bodies(owner.queue("jobs")) == [b"0", b"00"]
    owner.alter_queue("jobs", limit_messages=1)
    waiting = threading.Thread(target=jobs.put, args=(b"1",))
    waiting.start()
    owner.queue("jobs").purge()
    waiting.join(60)
    assert not waiting.is_alive()
    owner.alter_queue("jobs", on_overflow="reject")
    owner.queue("jobs").purge()
    jobs.put(b"2")
    with pytest.raises(QueueFull):
        jobs.put(b"3")
    assert bodies(owner.queue("jobs")) == [b"2"]
    assert len(lines.asked) == 3
    owner.delete_queue("jobs")
    with pytest.raises(QueueDeleted):
        jobs.put(b"4")


def test_puts_go_into_the_queue_that_has_the_name_now(
    jobs: qflow.RemoteQueue, lines: Lines, owner: qflow.Broker
) -> None:
    """The line was used for another one, which was deleted."""
    jobs.put(b"1")
    owner.delete_queue("jobs")
    queue = owner.declare_queue("jobs")
    for body in (b"2", b"3"):
        jobs.put(body)
    assert bodies(queue) == [b"2", b"3"]
    assert len(lines.asked) == 3


def test_nothing_is_overtaken_that_nobody_waits_for(jobs: qflow.RemoteQueue, lines: Lines, owner: qflow.Broker) -> None:
    """Puts that were submitted, and acks."""
    owner.alter_queue("jobs", limit_messages=1, on_overflow="reject")
    for number in range(100):
        jobs.get(60).ack()
        jobs.put(b"%d" % number)
    assert not lines.asked
    owner.alter_queue("jobs", limit_messages=None)
    for number in range(0, 300, 2):
        future = jobs.submit(b"%d" % number)
        jobs.put(b"%d" % (number + 1))
        future.result(60)
    assert bodies(owner.queue("jobs"))[1:] == [b"%d" % number for number in range(300)]


def test_an_interrupt_closes_the_line_and_the_next_put_finds_its_way(
    jobs: qflow.RemoteQueue, lines: Lines, owner: qflow.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer that is still to come is nobody's."""
    with monkeypatch.context() as patch:
        patch.setattr(lone, "Reply", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            jobs.put(b"1")
    sequences = [jobs.put(b"%d" % number) for number in range(2, 6)]
    assert sequences == sorted(sequences)
    assert len(lines.asked) == 4  # one was interrupted, and one had another line made
    assert bodies(owner.queue("jobs")) == [b"%d" % number for number in range(6)]


def test_no_line_is_left_open_wherever_an_interrupt_strikes(
    jobs: qflow.RemoteQueue, lines: Lines, owner: qflow.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between taking it and having it."""
    open_ones: set[lone.Line] = set()
    begin, close = lone.Line.begin, lone.Line.close
    monkeypatch.setattr(lone.Line, "begin", lambda line, uuid: (begin(line, uuid), open_ones.add(line))[0])
    monkeypatch.setattr(lone.Line, "close", lambda line: (close(line), open_ones.discard(line)))
    for strike in range(12):
        jobs.put(b"x")  # has a line made, if there is none
        left = [None] * strike

        def profile(frame: FrameType, event: str, _: object, left: list[None] = left) -> None:
            if event == "c_return" and frame.f_code.co_name == "_ask_alone":
                if left:
                    left.pop()
                else:
                    raise KeyboardInterrupt

        sys.setprofile(profile)
        try:
            with suppress(KeyboardInterrupt):
                jobs.put(b"y")
        finally:
            sys.setprofile(None)
        assert len(open_ones) <= 1
    assert lines.asked
    assert len(owner.queue("jobs")) >= 13


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_threads_share_a_line_and_are_asked_for_together(
    jobs: qflow.RemoteQueue, lines: Lines, owner: qflow.Broker
) -> None:
    """And each thread's messages keep their order."""

    def put(letter: str) -> None:
        for number in range(50):
            jobs.put(f"{letter}{number:02}".encode())

    threads = [threading.Thread(target=put, args=(letter,)) for letter in "abcdefgh"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = bodies(owner.queue("jobs"))[1:]
    for letter in b"abcdefgh":
        assert [body[1:] for body in found if body[0] == letter] == [b"%02d" % number for number in range(50)]
    assert len(found) == 400
    assert len(lines.asked) > 50
    assert max(lines.together) > 1


@pytest.fixture
def shared(owner: qflow.Broker) -> Iterator[lone.Shared]:
    """A line of threads to a queue that they put into."""
    owner.declare_queue("jobs").put(b"first")  # that of a queue waits
    line = lone.make_line(open_socket(owner.path), owner.path, str(owner.uuid))
    assert line is not None
    found = lone.Shared(line)
    yield found
    found.close()


def test_each_of_those_who_are_asked_for_together_is_told_its_own_place(
    shared: lone.Shared, owner: qflow.Broker
) -> None:
    """Those of one queue that follow each other are one put, and go the long way together."""
    owner.declare_queue("other").put(b"first")
    owner.alter_queue("jobs", max_message_bytes=10)
    many = put_many_request("jobs", [b"3", b"4"], {})
    assert many is not None
    made = [put_request("jobs", body, {}) for body in (b"1", b"2")]
    requests = [*made, many, many, put_request("other", b"x", {}), *made, put_request("jobs", bytes(11), {})]
    together = list(map(lone.Asked, requests))
    shared.line.ask_all(together)
    done, refused = together[:5], together[5:]
    assert [one.outcome for one in refused] == [lone.NOT_MADE] * 3
    first, second, third, fourth, other = (
        one.request.read(one.outcome) for one in done if isinstance(one.outcome, Reply)
    )
    assert second == first + 1
    assert third == range(first + 2, first + 4)
    assert fourth == range(first + 4, first + 6)
    assert bodies(owner.queue("jobs")) == [b"first", b"1", b"2", b"3", b"4", b"3", b"4"]
    assert [delivery.sequence for delivery in owner.queue("other").get_many(9, 0)][1:] == [other]


def test_what_a_signal_has_left_of_a_large_put_is_sent_behind_it(shared: lone.Shared, owner: qflow.Broker) -> None:
    """The system sends less of what is not joined then."""

    class Struck(socket.socket):
        def sendmsg(self, parts: Any, *_: Any) -> int:
            return super().sendmsg([b"".join(parts)[:100_000]])

    shared.line.socket = Struck(fileno=shared.line.socket.detach())
    assert isinstance(shared.ask(lone.Asked(put_request("jobs", bytes(200_000), {}))), Reply)
    assert bodies(owner.queue("jobs")) == [b"first", bytes(200_000)]


class Held:
    """A line whose owner's answers are held back until `go_on`; then it may be told to fail."""

    def __init__(self, shared: lone.Shared, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.may_go_on = threading.Event()
        self.error: BaseException | None = None
        ask = lone.Line.ask_all

        def held(line: lone.Line, together: Sequence[lone.Asked]) -> None:
            self.reached.set()
            assert self.may_go_on.wait(60)
            if self.error is not None:
                line.socket.shutdown(socket.SHUT_RD)  # it is heard, and not answered
            ask(line, together)

        monkeypatch.setattr(lone.Line, "ask_all", held)

    def run(self, threads: list[threading.Thread]) -> None:
        """Have the first one reach the owner, the others come meanwhile, and all end."""
        threads[0].start()
        assert self.reached.wait(60)
        for thread in threads[1:]:
            thread.start()
        self.may_go_on.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.parametrize("ends", [False, True])
def test_those_who_wait_for_a_line_are_let_go_of_whatever_becomes_of_it(
    shared: lone.Shared, owner: qflow.Broker, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """With their own outcomes; where it has ended, those not sent yet are to go another way."""
    held = Held(shared, monkeypatch)
    held.error = ConnectionError() if ends else None
    outcomes: dict[bytes, object] = {}

    def put(body: bytes) -> None:
        outcomes[body] = shared.ask(lone.Asked(put_request("jobs", body, {})))

    held.run([threading.Thread(target=put, args=(b"%d" % number,)) for number in range(5)])
    if ends:
        assert isinstance(outcomes.pop(b"0"), InDoubt)
        assert all(outcome in (lone.NOT_MADE,) or isinstance(outcome, InDoubt) for outcome in outcomes.values())
        assert len(outcomes) == 4
    else:
        firsts = sorted(outcome.result["first"] for outcome in outcomes.values() if isinstance(outcome, Reply))
        assert firsts == list(range(firsts[0], firsts[0] + 5))
        assert sorted(bodies(owner.queue("jobs"))[1:]) == [b"%d" % number for number in range(5)]


def test_who_was_asked_for_before_it_found_the_line_free_lets_go_of_it(
    shared: lone.Shared, owner: qflow.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came while another asked, who took it along, and was done when it looked; and so do those behind it."""
    made = lone.Asked
    here = threading.get_ident()

    class Late(deque[lone.Asked]):
        """Whoever comes in this thread goes on when another one has asked for it."""

        def append(self, one: lone.Asked) -> None:
            super().append(one)
            if threading.get_ident() == here:
                behind = made(put_request("jobs", b"behind", {}))
                behind.gate.acquire()
                super().append(behind)
                waits.append(behind)
                _in_a_thread(lambda: shared.ask(lone.Asked(put_request("jobs", b"other", {}))))

    waits: list[lone.Asked] = []
    monkeypatch.setattr(shared, "_asked", Late())
    assert isinstance(shared.ask(lone.Asked(put_request("jobs", b"late", {}))), Reply)
    assert waits[0].gate.acquire(timeout=60)
    _in_a_thread(lambda: shared.ask(lone.Asked(put_request("jobs", b"next", {}))))
    assert bodies(owner.queue("jobs")) == [b"first", b"late", b"behind", b"other", b"next"]


def _in_a_thread(work: Callable[[], object]) -> None:
    """Do some work in a thread, which is to end."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_a_finalizer_of_a_thread_that_is_at_the_line_goes_the_long_way(
    jobs: qflow.RemoteQueue, lines: Lines, owner: qflow.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for what its own thread holds."""
    _in_a_thread(lambda: jobs.put(b"1"))  # has a line made
    encode = lone.encode_frame
    finals: list[bytes] = [b"final"]

    def encoded(*given: Any) -> list[bytes]:
        """What a collector does in the middle of it."""
        if finals:
            jobs.put(finals.pop())
        return encode(*given)

    monkeypatch.setattr(lone, "encode_frame", encoded)
    _in_a_thread(lambda: jobs.put(b"2"))
    assert len(lines.asked) == 1
    assert bodies(owner.queue("jobs")) == [b"0", b"1", b"final", b"2"]


def test_as_many_are_asked_for_at_once_as_an_owner_takes(
    shared: lone.Shared, owner: qflow.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two by number; and by size fewer."""
    shared.line.most = 2
    held = Held(shared, monkeypatch)
    together: list[int] = []
    ask = lone.Line.ask_all
    monkeypatch.setattr(lone.Line, "ask_all", lambda line, some: (together.append(len(some)), ask(line, some)))
    monkeypatch.setattr(lone, "MOST_BYTES", 2_000)
    large = bytes(1_500)
    held.run(
        [
            threading.Thread(target=shared.ask, args=(lone.Asked(put_request("jobs", body, {})),))
            for body in (b"", b"", b"", b"", b"", large, large)
        ]
    )
    assert sum(together) == 7
    assert max(together) <= 2
    assert len(owner.queue("jobs")) == 8


def test_the_end_of_a_connection_or_of_its_owner_is_told(
    lines: Lines, owner: qflow.Broker, connect: Callable[[], qflow.RemoteBroker]
) -> None:
    """Nothing hangs, and no file stays open."""
    first, second = connect(), connect()
    queues = [remote.declare_queue("jobs") for remote in (first, second)]
    for queue in queues:
        queue.put(b"0")
        queue.put(b"1")
    first.close()
    with pytest.raises(BrokerClosed):
        queues[0].put(b"2")
    assert len(lines.asked) == 2
    owner.close()
    with pytest.raises((BrokerClosed, InDoubt)):
        queues[1].put(b"2")


def test_an_owner_that_makes_none_is_put_to_as_before(
    lines: Lines, owner: qflow.Broker, connect: Callable[[], qflow.RemoteBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of an earlier version, or where there are enough of them."""
    monkeypatch.setattr("qflow.remote.server.connection.MOST_LONE", 0)
    queue = connect().declare_queue("jobs")
    assert [queue.put(b"x") is not None for _ in range(5)] == [True] * 5
    assert not lines.asked
    assert len(owner.queue("jobs")) == 5


def test_an_owner_without_epoll_makes_none(
    lines: Lines,
    owner: qflow.Broker,
    connect: Callable[[], qflow.RemoteBroker],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As where gevent has put its own `select` in place: puts go the long way, and the connection goes on."""
    monkeypatch.delattr(select, "epoll")
    queue = connect().declare_queue("jobs")
    for number in range(5):
        queue.put(b"%d" % number)
    assert lines.asked == []
    assert bodies(owner.queue("jobs")) == [b"%d" % number for number in range(5)]
    assert caplog.text == ""


def test_answers_of_many_are_sent_by_the_thread(
    jobs: qflow.RemoteQueue, lines: Lines, owner: qflow.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of few are by the writer."""
    monkeypatch.setattr(serving, "FEW", 0)
    for number in range(1, 20):
        jobs.put(b"%d" % number)
    assert len(lines.asked) == 19
    assert bodies(owner.queue("jobs")) == [b"%d" % number for number in range(20)]


def test_the_connection_of_a_line_is_the_same_spools(
    lines: Lines, owner: qflow.Broker, connect: Callable[[], qflow.RemoteBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another one lies at the path now, there is no line."""
    remote = connect()
    begin = lone.Line.begin
    monkeypatch.setattr(lone.Line, "begin", lambda line, uuid: begin(line, uuid[::-1]))
    queue = remote.declare_queue("jobs")
    queue.put(b"0")
    queue.put(b"1")
    assert not lines.asked
    assert len(owner.queue("jobs")) == 2
