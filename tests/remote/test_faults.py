"""Callers that hang, lie, send rubbish, are killed or interrupted: each holds up itself alone, and nothing is lost."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import qflow
import qflow.aio
from damaging import damaged, torn
from door_raw import RawDoor, until
from qflow import InvalidArgument, QueueEmpty, TransactionTooLarge
from qflow.aio.delivery import AsyncDeliveries, held_of
from qflow.aio.queue_work import QueueWork
from qflow.queues.queue import parts_of
from qflow.remote.server import budget, connection
from qflow.remote.server.session import Session
from qflow.remote.wire.errors import decode_error
from qflow.remote.wire.frames import encode_frame, preamble

PUT = {"op": "put", "queue": "jobs"}
GET = {"op": "get", "queue": "jobs", "most": 1000}


@pytest.fixture
def jobs(owner: qflow.Broker) -> qflow.Queue:
    """A queue that the test's own process has."""
    return owner.declare_queue("jobs")


def test_a_caller_that_never_reads_is_sent_no_more_than_a_bound(owner: qflow.Broker, spool: Path) -> None:
    """What it asks for stays in the queue, for others."""
    jobs = owner.declare_queue("jobs", durable=False)
    for _ in range(50):
        jobs.put(bytes(2**20))
    with RawDoor(spool).greeted() as raw:
        head = {**GET, "most": 1}
        raw.send(b"".join(b"".join(encode_frame(number, head)) for number in range(100, 300)))
        other = qflow.connect(spool)
        theirs = other.queue("jobs")
        for _ in range(20):
            theirs.get(60).ack(wait=True)
        assert jobs.stats().acquired_bytes < 20 * 2**20
        other.close()
    until(lambda: jobs.stats().acquired_messages == 0)
    assert len(jobs) == 30


def test_a_caller_that_lies_about_sizes_holds_nobody_up(jobs: qflow.Queue, spool: Path) -> None:
    """Frames that were announced and do not come take nothing from those of others."""
    with RawDoor(spool).greeted() as one, RawDoor(spool).greeted() as another:
        for raw in (one, another):
            raw.send((100 * 2**20).to_bytes(4, "little") + bytes(2**21))
        with qflow.connect(spool) as remote:
            queue = remote.queue("jobs")
            assert queue.put_many([bytes(3 * 2**20)] * 4) == range(4)
            assert queue.put(b"small") == 4
    assert len(jobs) == 5


def test_more_than_the_budget_comes_one_after_the_other(
    owner: qflow.Broker, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large batches of several connections at once, more than may come together: all are taken."""
    monkeypatch.setattr(budget, "BUDGET_BYTES", 6 * budget.LARGE)
    owner.declare_queue("jobs", durable=False)
    failed: list[BaseException] = []

    def put() -> None:
        try:
            with qflow.connect(spool) as remote:
                remote.queue("jobs").put_many([bytes(budget.LARGE)] * 3)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=put) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(owner.queue("jobs")) == 15


def test_a_frame_that_is_too_long_is_refused_before_it_comes(jobs: qflow.Queue, spool: Path) -> None:
    """By the owner in a sentence; by the client before it sends any of it."""
    with RawDoor(spool).greeted() as raw:
        raw.send(b"\xff\xff\xff\xff")
        frame = raw.frame()
        assert frame is not None
        assert frame.number == 0
        assert "4294967295" in frame.head["text"]
        assert raw.frame() is None
    with qflow.connect(spool) as remote:
        queue = remote.queue("jobs")
        with pytest.raises(TransactionTooLarge, match="smaller"):
            queue.put_many([bytes(2**20)] * 129)
        assert queue.put(b"x") == 0


WRONG: list[dict[str, Any]] = [
    {},
    {"op": None},
    {"op": "unknown"},
    {"op": ["put"]},
    {"op": "hello"},
    {"op": "put"},
    {"op": "put", "queue": 5},
    {"op": "put", "queue": "jobs"},
    {"op": "put", "queue": "nothing"},
    {"op": "put", "queue": "jobs", "headers": [1]},
    {"op": "get", "queue": "jobs", "most": "many"},
    {"op": "get", "queue": "jobs", "timeout_s": -1},
    {"op": "get", "queue": "jobs", "timeout_s": "soon"},
    {"op": "declare_queues", "names": "jobs"},
    {"op": "declare_queues", "names": ["x"], "settings": {"capacity": 1}},
    {"op": "declare_queues", "names": ["x"], "settings": 5},
    {"op": "ack", "grant": "x"},
    {"op": "ack", "grant": 17},
    {"op": "nack", "grant": 17, "requeue": "no"},
    {"op": "extend", "grant": 17},
    {"op": "publish", "topics": ["a"]},
    {"op": "publish", "topics": 5},
    {"op": "transaction", "steps": 5},
    {"op": "transaction", "steps": [{"do": "dance"}]},
    {"op": "transaction", "steps": [{"do": "put", "queue": "jobs", "bodies": 3}]},
    {"op": "browse_next", "browse": 17},
    {"op": "move_entry", "queue": "jobs", "sequence": 0, "to": "moon"},
    {"op": "redrive", "queue": "nothing"},
    {"op": "snapshot"},
    {"op": "subscribe", "stream": 5},
    {"op": "declare_queues", "names": ["x"], "settings": {"names": 1}},
    {"op": "declare_queues", "names": ["x"], "settings": {"self": 1}},
    {"op": "alter_queue", "queue": "jobs", "changes": {"name": 1}},
    {"op": "declare_stream", "stream": "x", "settings": {"name": 1}},
    {"op": "alter_stream", "stream": "x", "changes": {"self": 1}},
    {"op": "subscribe", "stream": "x", "filter": "#", "options": {"stream": 1}},
    {"op": "subscribe", "stream": "x", "filter": "#", "options": {"soon": 1}},
]


def test_what_makes_no_sense_is_an_answer_in_a_sentence(jobs: qflow.Queue, spool: Path) -> None:
    """The connection goes on."""
    with RawDoor(spool).greeted() as raw:
        for head in WRONG:
            answer = raw.ask(head)
            assert "error" in answer.head, head
            assert "failed at this" not in answer.head["text"], (head, answer.head)
        assert raw.ask({**PUT, "new": "a field of a later version"}, [b"x"]).head["result"]["first"] == 0


def test_a_number_that_is_under_way_is_refused(jobs: qflow.Queue, spool: Path) -> None:
    """In a sentence, and the connection ends."""
    with RawDoor(spool).greeted() as raw:
        raw.request(GET, number=7)
        raw.request(GET, number=7)
        frame = raw.frame()
        assert frame is not None
        assert "request 7" in frame.head["text"]
        assert raw.frame() is None


def test_a_settle_that_makes_no_sense_ends_the_connection_where_nobody_waits_for_it(
    jobs: qflow.Queue, spool: Path
) -> None:
    """With its sentence; what the connection held goes back."""
    jobs.put(b"x")
    with RawDoor(spool).greeted() as raw:
        raw.ask(GET)
        raw.request({"op": "ack", "grant": "x"}, number=0)
        frame = raw.frame()
        assert frame is not None
        assert "nobody waits for operation 'ack'" in frame.head["text"]
        assert raw.frame() is None
    assert jobs.get(60).delivery_count == 2


def test_a_settle_that_the_end_of_the_owner_overtakes_is_told_of_that_end(
    jobs: qflow.Queue, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection ends with it, and so do calls that wait: what they raise names no other operation."""

    async def ack(*_: object) -> None:
        raise qflow.BrokerClosed("the log is closed")

    operation = Session._operation
    monkeypatch.setattr(Session, "_operation", lambda self, head: ack if head["op"] == "ack" else operation(self, head))
    jobs.put(b"x")
    with RawDoor(spool).greeted() as raw:
        raw.request({"op": "ack", "grant": raw.ask(GET).head["result"]["grant"]}, number=0)
        frame = raw.frame()
        assert frame is not None
        assert frame.head["error"] == "BrokerClosed"
        assert frame.head["text"].startswith("the broker of")
        assert raw.frame() is None


def test_a_settle_that_comes_too_late_is_passed_over_where_nobody_waits_for_it(
    owner: qflow.Broker, jobs: qflow.Queue, spool: Path
) -> None:
    """What was taken back from the connection meanwhile, or it never held: it goes on, and holds what it held."""
    jobs.put_many([b"1", b"2"])
    owner.declare_queue("other").put(b"x")
    with RawDoor(spool).greeted() as raw:
        raw.ask({**GET, "queue": "other"})
        answer = raw.ask(GET).head["result"]
        assert not answer["leased"]
        jobs.on_slow_consumer(0.01, qflow.SlowConsumer.RELEASE)
        until(lambda: not jobs.stats().acquired_messages)
        raw.request({"op": "ack", "grant": answer["grant"], "places": [[0, 1]]}, number=0)
        raw.request({"op": "ack", "grant": answer["grant"], "places": None}, number=0)
        raw.request({"op": "ack", "grant": 99, "places": None}, number=0)
        late = raw.ask({"op": "ack", "grant": answer["grant"], "places": None})
        assert type(decode_error(late.head)) is qflow.AlreadySettled
        assert owner.queue("other").stats().acquired_messages == 1
    assert len(jobs) == 2


def test_what_is_cancelled_takes_nothing(owner: qflow.Broker, spool: Path) -> None:
    """A get that waits, and a put that waits for room."""
    jobs = owner.declare_queue("jobs", limit_messages=1)
    with RawDoor(spool).greeted() as raw:
        number = raw.request(GET)
        raw.request({"op": "cancel", "request": number}, number=0)
        frame = raw.frame()
        assert frame is not None
        assert (frame.number, frame.head["error"]) == (number, "InvalidArgument")
        jobs.put(b"x")
        number = raw.request({**PUT, "headers": {"a": 1}}, [b"y"])
        raw.request({"op": "cancel", "request": number}, number=0)
        raw.request({"op": "cancel", "request": 12345}, number=0)
        raw.request({"op": "cancel", "request": "x"}, number=0)
        frame = raw.frame()
        assert frame is not None
        assert frame.number == number
        assert "error" in frame.head
    delivery = jobs.get(60)
    assert (delivery.body, delivery.delivery_count) == (b"x", 1)
    delivery.ack()
    assert len(jobs) == 0


def test_more_requests_than_may_be_under_way_are_answered_in_the_end(jobs: qflow.Queue, spool: Path) -> None:
    """The connection is read again when some are answered; others are served meanwhile."""
    with RawDoor(spool).greeted() as raw:
        head = {**GET, "most": 1}
        raw.send(b"".join(b"".join(encode_frame(number, head)) for number in range(100, 1200)))
        with qflow.connect(spool) as other:
            assert other.queues() == ["jobs"]
        jobs.put_many([b"x"] * 1100)
        numbers = set()
        for _ in range(1100):
            frame = raw.frame()
            assert frame is not None
            assert "grant" in frame.head["result"]
            numbers.add(frame.number)
        assert len(numbers) == 1100


def test_a_killed_process_gives_back_what_it_held(jobs: qflow.Queue, spool: Path) -> None:
    """At once, counted, in order."""
    jobs.put_many([b"%d" % place for place in range(5)])
    script = (
        "import qflow, os, sys\nremote = qflow.connect(sys.argv[1])\nqueue = remote.queue('jobs')\n"
        "held = [queue.get(), queue.get_many(2)]\nos.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script, spool], check=False)
    until(lambda: jobs.stats().acquired_messages == 0)
    batch = jobs.get_many(10)
    assert batch.bodies == [b"%d" % place for place in range(5)]
    assert [one.delivery_count for one in batch] == [2, 2, 2, 1, 1]


class Interrupt(Exception):
    """What a signal handler raises."""


def test_an_interrupted_call_takes_nothing_and_the_connection_goes_on(
    jobs: qflow.Queue, remote: qflow.RemoteBroker
) -> None:
    """A handler that raises, wherever in the call it strikes."""
    queue = remote.queue("jobs")

    def call() -> None:
        """Put and get until nothing is there in time."""
        nonlocal put
        with suppress(QueueEmpty):
            while True:
                queue.put(b"x")
                put += 1
                queue.get(0.01).ack()

    def strike(number: int, frame: FrameType | None) -> None:
        while frame is not None:  # else it comes between two rounds, or behind the last one
            if frame.f_code is call.__code__:
                raise Interrupt
            frame = frame.f_back

    before = signal.signal(signal.SIGALRM, strike)
    put = struck = 0
    gc.disable()  # what others have called at a collection lets nothing out, and would be reported as this test's
    try:
        for round in range(200):
            # Again, where the first one came in a finalizer, which lets nothing out.
            signal.setitimer(signal.ITIMER_REAL, 0.0002 + round % 20 * 0.0001, 0.1)
            try:
                call()
            except Interrupt:
                struck += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert struck > 50
    assert remote.queues() == ["jobs"]
    batches: list[Any] = []

    def all_are_held(here: Any) -> bool:  # a put that was interrupted may still come
        batches.append(here.get_many(1000, timeout_s=0))
        return jobs.stats().acquired_messages == len(jobs)

    until(lambda: all_are_held(queue))
    remote.close()
    until(lambda: jobs.stats().acquired_messages == 0)
    until(lambda: all_are_held(jobs))


def test_a_get_that_is_interrupted_while_it_waits_leaves_the_message_to_others(
    jobs: qflow.Queue, remote: qflow.RemoteBroker
) -> None:
    """Not counted as delivered."""
    queue = remote.queue("jobs")

    struck = threading.Event()

    def strike(number: int, frame: FrameType | None) -> None:
        if not struck.is_set():
            struck.set()
            raise Interrupt

    def interrupt() -> None:
        until(lambda: parts_of(jobs).gate.getters)
        while not struck.is_set():  # again: one that comes right before a wait is handled after it
            signal.pthread_kill(main, signal.SIGUSR1)
            struck.wait(0.01)

    main = threading.get_ident()

    before = signal.signal(signal.SIGUSR1, strike)
    interrupting = threading.Thread(target=interrupt)
    try:
        with pytest.raises(Interrupt):
            interrupting.start()
            queue.get()
    finally:
        interrupting.join()
        signal.signal(signal.SIGUSR1, before)
    jobs.put(b"x")
    delivery = queue.get(60)
    assert (delivery.body, delivery.delivery_count) == (b"x", 1)


def a_session() -> bytes:
    """Return what a caller sends who does a little of everything."""
    heads: list[tuple[dict[str, Any], list[Any]]] = [
        ({"op": "hello", "product": "raw"}, []),
        ({"op": "declare_queues", "names": ["jobs", "other"], "settings": {"max_deliveries": 3}}, []),
        (PUT, [[b"a", b"bb", b"ccc"]]),
        ({**PUT, "single": True, "headers": {"a": 1}, "ttl_s": 100}, [[b"x"]]),
        ({**GET, "timeout_s": 0}, []),
        ({"op": "ack", "grant": 1, "places": [[0, 1]], "wait": True}, []),
        ({"op": "nack", "grant": 1, "places": None, "requeue": True}, []),
        ({**GET, "timeout_s": 0.001}, []),
        ({"op": "extend", "grant": 2, "places": None, "seconds": 5}, []),
        ({"op": "give_back", "grant": 2}, []),
        ({"op": "publish", "topics": "a/b", "single": True}, [[b"x"], [b"key"]]),
        ({"op": "transaction", "steps": [{"do": "put", "queue": "other", "bodies": 1}]}, [[b"x"]]),
        ({"op": "browse", "queue": "jobs"}, []),
        ({"op": "queue_stats", "queue": "jobs"}, []),
        ({"op": "purge", "queue": "other"}, []),
        ({"op": "cancel", "request": 3}, []),
        ({"op": "stats"}, []),
    ]
    frames = [b"".join(encode_frame(number, *one)) for number, one in enumerate(heads, 1)]
    return preamble() + b"".join(frames)


def test_damaged_sessions_harm_nobody_else(
    owner: qflow.Broker, remote: qflow.RemoteBroker, spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bytes changed, lost, doubled, inserted, and torn anywhere; the owner is sound, and others are served."""
    owner.declare_queue("safe").put(b"x")
    session = a_session()
    for seed in range(int(os.environ.get("DOOR_FUZZ", "150"))):
        randomness = random.Random(seed)
        data = damaged(session, 8, randomness, 0.1)
        with RawDoor(spool) as raw:
            try:
                for piece in torn(data, randomness, (3, 50, 10_000)):
                    raw.send(piece)
                raw.socket.shutdown(1)
                while raw.socket.recv(2**16):
                    pass
            except (BrokenPipeError, ConnectionResetError):
                pass  # it was refused before all of it was sent
        if seed % 10 == 0:
            assert len(remote.queue("safe")) == 1, seed
    until(lambda: owner.queue("safe").stats().acquired_messages == 0)
    assert owner.check() == []
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_errors_of_the_wire_are_of_this_connection(spool: Path, owner: qflow.Broker) -> None:
    """A sentence, and the end."""
    with RawDoor(spool).greeted() as raw:
        raw.send(b"\x0a\0\0\0\x01\0\0\0\x02\0\0\0[]")
        frame = raw.frame()
        assert frame is not None
        error = decode_error(frame.head)
        assert type(error) is InvalidArgument
        assert "object" in str(error)
        assert raw.frame() is None


def test_threads_that_come_and_go_share_a_connection(remote: qflow.RemoteBroker) -> None:
    """Puts, gets and acks of many at once: each message once."""
    queue = remote.declare_queue("jobs")
    got: list[bytes] = []

    def work(name: int) -> None:
        for place in range(50):
            queue.put(b"%d.%d" % (name, place))
            with queue.get(60) as delivery:
                got.append(delivery.body)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == sorted(b"%d.%d" % (name, place) for name in range(8) for place in range(50))
    assert len(queue) == 0


def test_a_caller_that_hangs_in_a_large_frame_with_answers_unread_is_ended(
    owner: qflow.Broker, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once others wait for the memory that it takes: their puts go on, and what it holds goes back."""
    monkeypatch.setattr(budget, "BUDGET_BYTES", 2**22)
    monkeypatch.setattr(connection, "STALLED_S", 0.01)
    monkeypatch.setattr(connection, "LAST_WORDS_S", 0.01)
    jobs, bulk = owner.declare_queues(["jobs", "bulk"], durable=False)
    with RawDoor(spool).greeted() as raw, qflow.connect(spool) as remote:
        get = {"op": "get", "queue": "bulk", "most": 1000}
        raw.send(b"".join(b"".join(encode_frame(number, get)) for number in range(100, 104)))
        raw.send((100 * 2**20).to_bytes(4, "little") + bytes(2**22))
        for _ in range(4):
            bulk.put_many([bytes(2**20)] * 7)
        assert remote.queue("jobs").submit(bytes(3 * 2**20)).result(60) == 0
        until(lambda: not bulk.stats().acquired_messages)
    assert len(jobs) == 1


ENDS = """
import sys
import qflow

owner = qflow.open(sys.argv[1], capacity_bytes="64KiB")
queue = owner.declare_queue("q", max_deliveries=5, dead_letter="dl")
queue.put_many([b"x" * 500] * 200)
client = qflow.connect(sys.argv[1])
held = [client.queue("q").get() for _ in range(40)]
client.close()
"""


def test_an_owner_that_ends_without_a_close_says_nothing_of_what_a_connection_held(spool: Path) -> None:
    """It is there at the next opening, as all that was held."""
    child = subprocess.run([sys.executable, "-c", ENDS, spool], capture_output=True, text=True)
    assert (child.returncode, child.stderr) == (0, "")
    with qflow.open(spool) as owner:
        assert len(owner.queue("q")) == 200


def test_what_a_connection_held_as_the_interpreter_ends_is_no_line_of_the_log(
    owner: qflow.Broker, spool: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No thread can be started any more, as in Python 3.12: calls of tasks raise `BrokerClosed`."""
    owner.declare_queue("jobs", max_deliveries=5, dead_letter="dead").put(b"held")
    closed: list[Session] = []
    close = Session.close

    async def closes(session: Session) -> None:
        await close(session)
        with pytest.raises(qflow.BrokerClosed, match="the interpreter is ending"):
            await qflow.aio.AsyncBroker(owner).stats()
        closed.append(session)

    def refuses(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(Session, "close", closes)
    with RawDoor(spool).greeted() as raw:
        raw.ask(GET)
        monkeypatch.setattr(threading.Thread, "start", refuses)
    until(lambda: closed)
    monkeypatch.undo()
    assert caplog.text == ""


def test_what_cannot_be_given_back_holds_up_nothing_else(
    owner: qflow.Broker,
    jobs: qflow.Queue,
    spool: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """When a connection ends: the rest goes back, and the log says what did not."""
    other = owner.declare_queue("other")
    abandon = QueueWork.abandon

    async def fails(work: QueueWork, batch: AsyncDeliveries) -> None:
        if held_of(batch).left_records() == [(0, b"jobs")]:
            raise MemoryError("none is left")
        await abandon(work, batch)

    monkeypatch.setattr(QueueWork, "abandon", fails)
    for queue in (jobs, other):
        queue.put(queue.name.encode())
    with RawDoor(spool).greeted() as raw:
        raw.ask({**GET, "queue": "other"})
        raw.ask(GET)
    until(lambda: not other.stats().acquired_messages)
    assert "none is left" in caplog.text
