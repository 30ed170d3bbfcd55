"""What the side of the caller does with calls that cannot be sent, with the end, and with what is submitted."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import qflow
import qflow.aio
from door_raw import until
from doors import event_loop
from qflow import BrokerClosed, InDoubt, InvalidArgument, QflowError, StorageError
from qflow.remote.client import channel, tasks
from qflow.remote.client.connecting import open_socket
from qflow.remote.client.link import Reply, Request
from qflow.remote.client.promises import MOST_SUBMITTED, MOST_SUBMITTED_BYTES
from qflow.remote.client.tasks import TaskConnection
from qflow.remote.client.threads import Connection
from qflow.remote.wire.frames import FrameReader, encode_frame, preamble

UNSAYABLE: list[Callable[[Any, Any], object]] = [
    lambda broker, queue: queue.on_slow_consumer(Decimal(1)),
    lambda broker, queue: broker.publish("topic", b"x", producer="p", number=object()),
    lambda broker, queue: broker.submit_publish("topic", b"x", producer="p", number=object()),
    lambda broker, queue: broker.subscribe(object()),
    lambda broker, queue: broker.queue(object()),
    lambda broker, queue: broker.bind(queue, {1, 2}),
]


@pytest.mark.parametrize("call", UNSAYABLE)
def test_a_call_that_cannot_be_said_is_refused_and_the_connection_goes_on(
    remote: qflow.RemoteBroker, call: Callable[[Any, Any], object]
) -> None:
    """From the main thread, whose requests the reader sends, and from another."""
    queue = remote.declare_queue("jobs")
    with pytest.raises(InvalidArgument):
        call(remote, queue)
    refused: list[BaseException] = []

    def ask() -> None:
        try:
            call(remote, queue)
        except InvalidArgument as error:
            refused.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert len(refused) == 1
    assert queue.put(b"x") == 0


class Owner:
    """The owner's end of a connection, by hand."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.connection = Connection(theirs, "here")
        self.reader = FrameReader(2**30)
        self.numbers: list[int] = []
        self.greeted = False

    def take(self) -> None:
        """Read some of what was sent."""
        data = self.socket.recv(2**20)
        if not self.greeted:
            data, self.greeted = data[len(preamble()) :], True
            self.socket.sendall(preamble())
        self.numbers += [frame.number for frame in self.reader.feed(data)]

    def answer(self, number: int, head: dict[str, Any] | None = None) -> None:
        self.socket.sendall(b"".join(encode_frame(number, head or {"result": number})))

    def close(self) -> None:
        self.socket.close()
        self.connection.close()


@pytest.fixture
def by_hand() -> Any:
    """An owner's end."""
    owner = Owner()
    yield owner
    owner.close()


ASK = Request({"op": "ask"}, doubt="the message")


def test_a_reader_that_fails_ends_the_connection_and_tells_everybody(by_hand: Owner) -> None:
    """Whatever it is that fails: nobody waits for good."""

    def fail(head: object) -> None:
        raise ArithmeticError("of its own making")

    by_hand.connection._link.notices.append(fail)
    future = by_hand.connection.submit(ASK)
    by_hand.take()
    by_hand.socket.sendall(b"".join(encode_frame(0, {"event": "x"})))
    assert isinstance(future.exception(60), InDoubt)
    assert by_hand.connection.closed
    with pytest.raises(StorageError, match="ArithmeticError"):
        by_hand.connection.call(ASK)


def test_an_answer_that_cannot_be_read_is_the_future_s_error(by_hand: Owner) -> None:
    """And not a future that is never resolved."""

    def read(reply: Reply) -> Any:
        raise KeyError(reply.result)

    future = by_hand.connection.submit(Request({"op": "ask"}, read=read))
    while not by_hand.numbers:
        by_hand.take()
    by_hand.answer(by_hand.numbers[0])
    assert isinstance(future.exception(60), KeyError)


def test_an_answer_that_cannot_be_read_is_the_error_of_a_future_of_tasks() -> None:
    """As of threads."""

    def read(reply: Reply) -> Any:
        raise KeyError(reply.result)

    async def scenario() -> None:
        theirs, mine = socket.socketpair()
        with theirs:
            connection = TaskConnection("here")
            await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=mine)
            future = connection.submit(Request({"op": "ask"}, read=read))
            theirs.sendall(preamble() + b"".join(encode_frame(1, {"result": 1})))
            with pytest.raises(KeyError):
                await future
            await connection.close()

    event_loop.run(scenario())


def test_what_is_submitted_after_the_end_is_refused(owner: qflow.Broker, remote: qflow.RemoteBroker) -> None:
    """In the main thread, too."""
    queue = remote.declare_queue("jobs")
    queue.submit(b"x").result(60)
    owner.close()
    until(lambda: remote.closed)
    with pytest.raises(BrokerClosed):
        queue.submit(b"y")


def test_every_future_is_resolved_that_was_submitted_while_the_connection_ended(by_hand: Owner) -> None:
    """With an error; later ones are refused."""
    futures = []
    threading.Timer(0.02, by_hand.socket.close).start()
    try:
        while True:
            futures.append(by_hand.connection.submit(Request({"op": "ask"})))
            if len(futures) > MOST_SUBMITTED // 2:
                until(lambda: by_hand.connection.closed)
    except QflowError:
        pass
    for future in futures:
        assert isinstance(future.exception(60), BrokerClosed)


def test_what_is_submitted_is_bounded_by_bytes(by_hand: Owner) -> None:
    """An owner that does not read holds up who submits, and takes no memory without end; one message always goes."""
    body = bytes(MOST_SUBMITTED_BYTES // 4)
    request = Request({"op": "ask"}, [[body]], "the message")
    submitted = []

    def submit() -> None:
        for _ in range(8):
            submitted.append(by_hand.connection.submit(request))

    thread = threading.Thread(target=submit)
    thread.start()
    until(lambda: by_hand.connection.submitted[1] > MOST_SUBMITTED_BYTES - 2 * len(body))
    assert by_hand.connection.submitted[1] <= MOST_SUBMITTED_BYTES
    answered = 0
    while answered < 8:
        by_hand.take()
        for number in by_hand.numbers[answered:]:
            assert by_hand.connection.submitted[1] <= MOST_SUBMITTED_BYTES
            by_hand.answer(number)
            answered += 1
    thread.join()
    assert [future.result(60) for future in submitted] == by_hand.numbers
    assert by_hand.connection.submitted == (0, 0)
    large = by_hand.connection.submit(Request({"op": "ask"}, [[bytes(12 * 2**20)]]))
    assert not large.done()


@pytest.fixture
def full(spool: Path) -> Iterator[socket.socket]:
    """A door at which as many wait to be let in as there may be."""
    spool.mkdir()
    with ExitStack() as opened:
        door = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        door.bind(str(spool / "door"))
        door.listen(0)
        with pytest.raises(BlockingIOError):
            while True:
                opened.enter_context(open_socket(str(spool)))
        yield door


def test_who_finds_others_waiting_at_the_door_waits_too(full: socket.socket, spool: Path) -> None:
    """As long as the caller says, and then as long as it takes, but for an interrupt."""
    with pytest.raises(StorageError, match=r"within 0\.05 s"):
        qflow.connect(spool, timeout_s=0.05)
    with pytest.raises(StorageError, match=r"within 0\.05 s"):
        asyncio.run(open_task(spool))

    class Interrupt(Exception):
        """What a signal handler raises."""

    def strike(number: int, frame: object) -> None:
        if not struck.is_set():
            struck.set()
            raise Interrupt

    def interrupt() -> None:
        while not struck.wait(0.05):  # again: one that comes right before a wait is handled after it
            signal.pthread_kill(main, signal.SIGUSR1)

    struck, main = threading.Event(), threading.get_ident()
    before = signal.signal(signal.SIGUSR1, strike)
    interrupting = threading.Thread(target=interrupt)
    try:
        with pytest.raises(Interrupt):
            interrupting.start()
            qflow.connect(spool, timeout_s=None)
    finally:
        interrupting.join()
        signal.signal(signal.SIGUSR1, before)


async def open_task(spool: Path) -> None:
    await qflow.aio.connect(spool, timeout_s=0.05)


def test_an_option_that_there_is_not_is_refused(owner: qflow.Broker, remote: qflow.RemoteBroker) -> None:
    """As beside the owner: a message without the time to live that was meant would be another message."""
    remote.declare_queue("jobs")
    for queue in (owner.queue("jobs"), remote.queue("jobs")):
        put: Any = queue
        for call in (put.put, put.put_nowait, put.submit):
            with pytest.raises(TypeError):
                call(b"x", tttl_s=5)
        with pytest.raises(TypeError):
            put.put_many([b"x"], tttl_s=5)
        with pytest.raises(TypeError):
            put.put_nowait(b"x", timeout_s=5)
    with remote.transaction() as held:
        transaction: Any = held
        with pytest.raises(TypeError):
            transaction.put("jobs", b"x", timeout_s=5)
        with pytest.raises(TypeError):
            transaction.put_many("jobs", [b"x"], tttl_s=5)
    assert len(owner.queue("jobs")) == 0


def test_a_path_may_begin_as_a_url_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a URL where it has `://`."""
    monkeypatch.chdir(tmp_path)
    with qflow.open("grpc-spool"), qflow.connect("grpc-spool") as remote:
        assert remote.queues() == []


def test_a_connection_is_closed_whose_owner_hangs(by_hand: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it has not sent all, and somebody waits, who is told first."""
    monkeypatch.setattr(channel, "CLOSE_S", 0.01)
    connection = by_hand.connection
    connection.welcomed({"uuid": "", "limits": {"requests": 10, "bytes": 2**30, "frame_bytes": 2**30}})
    future = connection.submit(Request({"op": "ask"}, [[bytes(2**20)]], "the message"))
    connection.tell(lambda: Request({"op": "ack"}))
    connection.close()
    assert isinstance(future.exception(60), InDoubt)


def test_a_connection_of_tasks_is_closed_whose_owner_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of threads, also where the task that closes it is cancelled, and where several do."""
    monkeypatch.setattr(tasks, "CLOSE_S", 0.01)

    async def scenario(closing: Callable[[TaskConnection], Awaitable[object]]) -> None:
        theirs, mine = socket.socketpair()
        with theirs:
            connection = TaskConnection("here")
            await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=mine)
            connection.welcomed({"uuid": "", "limits": {"requests": 10, "bytes": 2**30, "frame_bytes": 2**30}})
            call = asyncio.ensure_future(connection.call(Request({"op": "ask"}, [[bytes(2**20)]], "the message")))
            await asyncio.sleep(0)
            connection.tell(Request({"op": "ack"}))
            await closing(connection)
            with pytest.raises(InDoubt):
                await call
            await connection.close()
            assert mine.fileno() == -1

    async def cancelled(connection: TaskConnection) -> None:
        closing = asyncio.ensure_future(connection.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])

    event_loop.run(scenario(TaskConnection.close))
    event_loop.run(scenario(lambda connection: asyncio.gather(connection.close(), connection.close())))
    event_loop.run(scenario(cancelled))


def test_a_connection_that_is_closed_keeps_no_file(owner: qflow.Broker, spool: Path) -> None:
    """Though nothing was collected since."""
    qflow.connect(spool).close()
    gc.disable()
    try:
        before = os.listdir("/proc/self/fd")
        for _ in range(10):
            qflow.connect(spool).close()
        until(lambda: len(os.listdir("/proc/self/fd")) <= len(before))
    finally:
        gc.enable()
