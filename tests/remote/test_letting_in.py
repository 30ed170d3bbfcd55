"""Who is let in where the system is short of something, and who cannot be; what closing costs."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

import qflow
import qflow.aio
import qflow.door
from door_raw import RawDoor, until
from qflow import NotFound
from qflow.door import NAME, Door
from qflow.remote.client import requests
from qflow.remote.client.threads import Connection
from qflow.remote.server import serving
from qflow.remote.wire.frames import PREAMBLE_BYTES, VERSION, encode_frame, preamble, read_preamble

OUT_OF_DESCRIPTORS = """
import resource, sys, qflow
broker = qflow.open(sys.argv[1])
import qflow.remote.server.serving as serving
serving.PAUSE_S = 0.01
first = qflow.connect(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
print("up", flush=True)
sys.stdin.read()
broker.close()
"""
CLOSED_ALONE = """
import sys, qflow
for place in range(20):
    qflow.open(sys.argv[1]).close()
    assert "qflow.remote.server.serving" not in sys.modules, place
    assert "asyncio" not in sys.modules, place
"""


def test_a_close_without_callers_starts_nothing(spool: Path) -> None:
    """No server is imported, and no event loop runs."""
    subprocess.run([sys.executable, "-c", CLOSED_ALONE, spool], check=True)


def test_an_owner_that_was_short_of_descriptors_lets_others_in_later(spool: Path) -> None:
    """Those who wait are let in, with one warning, when some connections have ended."""
    command = [sys.executable, "-c", OUT_OF_DESCRIPTORS, str(spool)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as owner:  # type: ignore[call-overload]
        assert owner.stdout.readline() == b"up\n"
        connected = []
        while not select.select([owner.stderr], [], [], 0)[0]:  # it has said nothing yet
            with suppress(qflow.StorageError):
                connected.append(qflow.connect(spool, timeout_s=1))
        with pytest.raises(qflow.StorageError):
            qflow.connect(spool, timeout_s=0.1)
        for remote in connected:
            remote.close()
        with qflow.connect(spool, timeout_s=60) as remote:
            assert remote.declare_queue("jobs").put(b"x") == 0
        _, said = owner.communicate()
        assert said.count(b"nobody else is let in for now") == 1


def test_a_caller_that_is_gone_before_it_is_let_in_is_in_nobodys_way(
    owner: qflow.Broker, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is let in."""
    left: list[OSError] = [ConnectionAbortedError("it has gone"), InterruptedError("a signal")]
    accept = serving.accept

    def fail_first(door: Door) -> object:
        if left:
            raise left.pop()
        return accept(door)

    monkeypatch.setattr(serving, "accept", fail_first)
    with qflow.connect(spool) as remote:
        assert remote.queues() == []
    assert left == []


def test_a_server_that_cannot_run_lets_callers_know(
    open_spool: Callable[..., qflow.Broker],
    spool: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The socket goes: they are told that nobody is there; the broker works, and closes."""

    def fail(broker: qflow.Broker, door: Door) -> None:
        raise OSError("there is no epoll")

    monkeypatch.setattr(serving, "serve", fail)
    broker = open_spool()
    with caplog.at_level(logging.ERROR, "qflow"), pytest.raises(qflow.QflowError):
        qflow.connect(spool, timeout_s=60)
    assert not os.path.lexists(spool / "door")
    with pytest.raises(NotFound):
        qflow.connect(spool)
    assert "the door failed" in caplog.text
    assert broker.declare_queue("jobs").put(b"x") == 0
    broker.close()


def test_a_server_that_is_short_of_descriptors_at_first_is_started_again(
    open_spool: Callable[..., qflow.Broker],
    spool: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Who waits is let in then, with one warning: an event loop needs some descriptors for itself."""
    left = [OSError(number, os.strerror(number)) for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)]
    serve = serving.serve

    def fail_first(broker: qflow.Broker, door: Door) -> None:
        if left:
            raise left.pop()
        serve(broker, door)

    monkeypatch.setattr(serving, "serve", fail_first)
    monkeypatch.setattr(qflow.door, "PAUSE_S", 0.01)
    open_spool()
    with qflow.connect(spool) as remote:
        assert remote.declare_queue("jobs").put(b"x") == 0
    assert left == []
    assert caplog.text.count("nobody is let in for now") == 1


def test_a_broker_is_closed_while_its_server_is_short_of_descriptors(
    open_spool: Callable[..., qflow.Broker], spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause is over at once, and who waits is told that nobody owns the spool."""
    failed = threading.Event()

    def fail(broker: qflow.Broker, door: Door) -> None:
        failed.set()
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(serving, "serve", fail)
    monkeypatch.setattr(qflow.door, "PAUSE_S", 1e6)
    broker = open_spool()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(qflow.connect, spool)
        failed.wait()
        broker.close()
        with pytest.raises(NotFound, match="nobody owns"):
            waiting.result()
    assert not os.path.lexists(spool / NAME)


def test_without_a_thread_there_is_no_door(
    open_spool: Callable[..., qflow.Broker],
    spool: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """There are as many as there may be: a warning says so, and the broker works."""
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == "qflow-door":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    broker = open_spool()
    assert not os.path.lexists(spool / NAME)
    assert "there is no door for other processes: the system starts no more threads" in caplog.text
    assert broker.declare_queue("jobs").put(b"x") == 0


def test_without_poll_there_is_no_door(
    open_spool: Callable[..., qflow.Broker],
    spool: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As where eventlet has taken it away: a warning says so, and the broker works."""
    monkeypatch.delattr(select, "poll")
    broker = open_spool()
    assert not os.path.lexists(spool / NAME)
    assert "there is no door for other processes: `select.poll` was taken away" in caplog.text
    assert broker.declare_queue("jobs").put(b"x") == 0


def test_without_poll_nobody_connects(
    open_spool: Callable[..., qflow.Broker], spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said by `connect`, before anything is begun: the reader ended with an error of Python's."""
    open_spool()
    monkeypatch.delattr(select, "poll")
    with pytest.raises(qflow.StorageError, match=f"^{re.escape(str(spool))}: `select.poll` was taken away"):
        qflow.connect(spool)


def test_threads_that_became_others_since_are_told_of(
    open_spool: Callable[..., qflow.Broker], spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of gevent, where it comes late: the main thread waited for good for one that had no turn."""
    queue = open_spool().declare_queue("jobs")
    with monkeypatch.context() as patch:
        patch.setattr(threading, "get_ident", lambda: id(patch))
        for call in (lambda: qflow.open(tmp_path / "other"), lambda: qflow.connect(spool), lambda: queue.get_many(1)):
            with pytest.raises(
                qflow.QflowError, match=r"`monkey\.patch_all\(\)` of gevent before anything else is imported"
            ):
                call()
    assert not (tmp_path / "other").exists()
    queue.put(b"x")
    assert queue.get_many(1).bodies == [b"x"]


def test_who_can_start_no_thread_is_told_so(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an error of qflow; both go on when there may be threads again."""

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(qflow.QflowError, match="starts no more threads") as told:
            qflow.open(spool)
        assert "`ulimit -v`" in str(told.value), "a thread needs memory"
    with qflow.open(spool):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            with pytest.raises(qflow.QflowError, match="starts no more threads"):
                qflow.connect(spool)
        with qflow.connect(spool) as remote:
            assert remote.queues() == []


def test_a_door_that_is_ended_in_its_own_thread_closes_all_it_had(tmp_path: Path) -> None:
    """By a callback of the broker, for one."""
    gc.collect()  # what other tests left open is closed now, not meanwhile
    before = len(os.listdir("/proc/self/fd"))

    def serve(door: Door) -> None:
        door.shut()
        door.end()

    door = Door(str(tmp_path), serve)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(os.path.join(tmp_path, "door"))
        until(lambda: "qflow-door" not in [thread.name for thread in threading.enumerate()])
    assert len(os.listdir("/proc/self/fd")) == before
    door.end()


def test_who_comes_as_the_broker_is_closed_is_told_so(spool: Path) -> None:
    """Before it has said anything: as one that begins with a preamble."""
    with ExitStack() as stack:
        with qflow.open(spool):
            early = stack.enter_context(RawDoor(spool))
            stack.enter_context(RawDoor(spool)).greeted()  # so the other one is let in, too
        assert read_preamble(early.read(PREAMBLE_BYTES)) == VERSION
        frame = early.frame()
        assert frame is not None
        assert "is closed" in frame.head["closing"]


def test_a_client_that_comes_as_the_broker_is_closed_is_told_so(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that something else than a broker is there."""
    with qflow.open(spool) as broker:
        calling(monkeypatch, broker.close)
        # its last words are for whoever was let in by then
        with pytest.raises(NotFound, match="its owner ended as it was connected to"):
            qflow.connect(spool)


def test_a_client_that_is_never_let_in_is_told_that_the_owner_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the words of a system: a reset."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "door"))
        listening.listen()
        calling(monkeypatch, listening.close)
        with pytest.raises(NotFound, match=f"nobody owns {re.escape(str(tmp_path))} now"):
            qflow.connect(tmp_path)


def test_a_time_out_of_a_signal_handler_is_raised_as_it_is(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program has its own deadlines: the owner is not said to hang."""

    def late(*_: object) -> None:
        raise TimeoutError("the program's own deadline")

    before = signal.signal(signal.SIGALRM, late)
    try:
        with qflow.open(spool):
            monkeypatch.setattr(Connection, "call", lambda *_, **__: signal.raise_signal(signal.SIGALRM))
            with pytest.raises(TimeoutError, match="the program's own deadline"):
                qflow.connect(spool)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("by_tasks", [False, True])
def test_who_holds_has_the_number_that_the_owner_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_tasks: bool
) -> None:
    """A caller in another container has another number for itself, which the owner would take for any process."""
    real = requests.hello
    monkeypatch.setattr(requests, "hello", lambda _: real(1))
    with qflow.open(tmp_path / "spool") as broker:
        queue = broker.declare_queue("jobs")
        queue.put(b"x")

        def held_by() -> list[int]:
            return [one.pid for one in queue.stats().holders]

        async def hold() -> list[int]:
            async with qflow.aio.connect(tmp_path / "spool") as caller:
                await caller.queue("jobs").get()
                return held_by()

        if by_tasks:
            assert asyncio.run(hold()) == [os.getpid()]
        else:
            with qflow.connect(tmp_path / "spool") as caller:
                caller.queue("jobs").get()
                assert held_by() == [os.getpid()]


def calling(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Have a function called by who has connected, before it says anything."""
    real = requests.hello

    def hello(pid: int) -> object:
        call()
        return real(pid)

    monkeypatch.setattr(requests, "hello", hello)


class Ending:
    """An owner that ends as others connect to it: before it has read what they say, behind that, or with a word."""

    def __init__(self, how: str) -> None:
        self._how = how

    def answer(self, one: socket.socket) -> None:
        with one:
            if self._how == "unread":
                return
            one.recv(PREAMBLE_BYTES, socket.MSG_WAITALL)
            if self._how == "told":
                one.sendall(preamble() + b"".join(encode_frame(0, {"closing": "the broker is closed"})))
            one.shutdown(socket.SHUT_WR)
            while one.recv(4096):
                pass


ENDS = pytest.mark.parametrize("how", ["unread", "read", "told"])


@ENDS
@pytest.mark.parametrize("tasks", [False, True], ids=["threads", "tasks"])
def test_whose_owner_ends_meanwhile_is_told_that_there_is_none(spool: Path, how: str, tasks: bool) -> None:
    """So it is told of an owner that has ended, and tries again."""
    spool.mkdir()
    with socket.socket(socket.AF_UNIX) as listening, ThreadPoolExecutor() as pool:
        listening.bind(os.path.relpath(spool / NAME))
        listening.listen()
        answering = pool.submit(lambda: Ending(how).answer(listening.accept()[0]))
        with pytest.raises(NotFound, match="ended"):
            if tasks:
                asyncio.run(connect_task(spool))
            else:
                qflow.connect(spool)
        answering.result()


async def connect_task(target: Path | str) -> None:
    await qflow.aio.connect(target)


@ENDS
@pytest.mark.parametrize("tasks", [False, True], ids=["threads", "tasks"])
def test_so_it_is_by_a_url(monkeypatch: pytest.MonkeyPatch, how: str, tasks: bool) -> None:
    """Where the session ends, and nothing is wrong with it."""
    client = pytest.importorskip("qflow.flight.client")
    outlet = pytest.importorskip("qflow.flight.tunnel").Outlet.__new__
    with ThreadPoolExecutor() as pool:
        tunnel = outlet(client.Outlet)
        tunnel.socket, other = socket.socketpair()
        tunnel.target, tunnel.error = "grpc://host:1", None
        monkeypatch.setattr(client, "outlet", lambda *_: tunnel)
        answering = pool.submit(Ending(how).answer, other)
        with pytest.raises(NotFound, match="ended"):
            if tasks:
                asyncio.run(connect_task(tunnel.target))
            else:
                qflow.connect(tunnel.target)
        answering.result()
