"""The life of the socket in a spool: who makes it, who is let in, and what becomes of it."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import qflow
from door_raw import RawDoor, until
from qflow import BrokerClosed, ForkedProcess, InDoubt, InvalidArgument, NotFound, QflowError, StorageError
from qflow.remote.wire.errors import decode_error
from qflow.remote.wire.frames import preamble

Open = Callable[..., qflow.Broker]
Connect = Callable[[], qflow.RemoteBroker]


def in_child(function: Callable[[], None]) -> str:
    """Return what a function raises in a forked child; empty if nothing."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        said = ""
        try:
            function()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode() or b"nothing")
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


def test_the_socket_is_its_owners_alone_and_goes_with_it(open_spool: Open, spool: Path) -> None:
    """Nothing but one thread is started before the first caller."""
    broker = open_spool()
    status = os.lstat(spool / "door")
    assert stat.S_ISSOCK(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert [thread.name for thread in threading.enumerate()].count("qflow-door") == 1
    broker.close()
    assert not os.path.lexists(spool / "door")
    assert "qflow-door" not in [thread.name for thread in threading.enumerate()]


def test_without_a_door_nobody_is_let_in(open_spool: Open, spool: Path) -> None:
    """`door=False`: no socket, no thread, and a sentence for who comes."""
    broker = open_spool(door=False)
    assert not os.path.lexists(spool / "door")
    assert "qflow-door" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(NotFound, match="lets nobody in"):
        qflow.connect(spool)
    assert not broker.settings.door


def test_nobody_to_connect_to_is_told(spool: Path, tmp_path: Path) -> None:
    """No spool, no owner, a file, a URL of a kind that is not known, no path at all."""
    with pytest.raises(NotFound, match="no spool"):
        qflow.connect(spool)
    qflow.open(spool).close()
    with pytest.raises(NotFound, match="nobody owns"):
        qflow.connect(spool)
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotFound):
        qflow.connect(tmp_path / "file")
    with pytest.raises(InvalidArgument, match="URL"):
        qflow.connect("ftp://host/spool")
    for wrong in ("", "a\0b", 5):
        with pytest.raises(InvalidArgument):
            qflow.connect(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="token"):
        qflow.connect(spool, token="x")


def test_a_socket_that_a_dead_owner_left_is_in_nobodys_way(open_spool: Open, spool: Path) -> None:
    """Callers are told that nobody owns the spool; the next owner takes its place."""
    script = "import os, qflow, sys; qflow.open(sys.argv[1]).declare_queue('jobs').put(b'x'); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", script, spool], check=False)
    assert os.path.lexists(spool / "door")
    with pytest.raises(NotFound, match="nobody owns"):
        qflow.connect(spool)
    open_spool()
    with qflow.connect(spool) as remote:
        assert remote.queue("jobs").get(60).body == b"x"


@pytest.mark.parametrize("what", ["file", "directory", "link"])
def test_something_else_in_its_place_is_left_there(
    open_spool: Open, spool: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """The broker works, with a warning."""
    qflow.open(spool).close()
    place = spool / "door"
    if what == "file":
        place.write_text("mine")
    elif what == "directory":
        place.mkdir()
    else:
        place.symlink_to("lock")
    with caplog.at_level(logging.WARNING, "qflow"):
        broker = open_spool()
    assert "move it away" in caplog.text
    assert broker.declare_queue("jobs").put(b"x") == 0
    broker.close()
    assert os.path.lexists(place)


def test_a_path_that_is_too_long_for_a_socket(tmp_path: Path) -> None:
    """The directory has another name while it is open."""
    long = tmp_path / ("d" * 100) / ("e" * 100) / "spool"
    with qflow.open(long) as broker:
        assert stat.S_ISSOCK(os.lstat(long / "door").st_mode)
        with qflow.connect(long) as remote:
            assert remote.declare_queue("jobs").put(b"x") == 0
        assert len(broker.queue("jobs")) == 1
    assert not os.path.lexists(long / "door")


def test_a_spool_that_is_moved_while_somebody_is_connected(tmp_path: Path) -> None:
    """Who is connected stays so; others come by the new path; the socket is removed there."""
    old, new = tmp_path / "old", tmp_path / "new"
    broker = qflow.open(old)
    first = qflow.connect(old)
    old.rename(new)
    assert first.declare_queue("jobs", durable=False).put(b"x") == 0
    with qflow.connect(new) as second:
        assert len(second.queue("jobs")) == 1
    with pytest.raises(NotFound):
        qflow.connect(old)
    new.rename(old)
    first.close()
    broker.close()
    assert not os.path.lexists(old / "door")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_process_of_another_user_is_turned_away() -> None:
    """Also where the modes of the directory and the socket would let it in."""
    directory = tempfile.mkdtemp(dir="/tmp")
    try:
        os.chmod(directory, 0o711)
        spool = Path(directory) / "spool"
        with qflow.open(spool):

            def come() -> None:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                with RawDoor(spool) as raw:
                    raw.send(preamble())
                    assert raw.read(8) == preamble()
                    frame = raw.frame()
                    assert frame is not None
                    assert raw.frame() is None
                    raise decode_error(frame.head)

            assert in_child(come).startswith("PermissionError")
            os.chmod(spool, 0o711)
            os.chmod(spool / "door", 0o666)
            said = in_child(come)
            assert said.startswith("InvalidArgument")
            assert "user 65534" in said
            assert "only its own user is let in" in said
            with qflow.connect(spool) as remote:
                assert remote.queues() == []
    finally:
        shutil.rmtree(directory)


def test_when_the_owner_closes_waiting_calls_are_answered(open_spool: Open, spool: Path, connect: Connect) -> None:
    """A get gets BrokerClosed; so does all that is called later. What was put before is confirmed."""
    broker = open_spool()
    remote = connect()
    queue = remote.declare_queue("jobs", limit_messages=1)
    empty = remote.declare_queue("empty")
    queue.put(b"x")
    caught: list[BaseException] = []

    def call(function: Callable[[], object]) -> None:
        try:
            function()
        except QflowError as error:
            caught.append(error)

    calls = (empty.get, lambda: queue.put(b"y"), lambda: empty.get_many(5))
    threads = [threading.Thread(target=call, args=(one,)) for one in calls]
    for thread in threads:
        thread.start()
    until(lambda: broker.queue("empty").stats().messages == 0 and all(thread.is_alive() for thread in threads))
    broker.close()
    for thread in threads:
        thread.join()
    assert len(caught) == 3
    assert {type(one) for one in caught} <= {BrokerClosed, InDoubt}
    until(lambda: remote.closed)
    with pytest.raises(BrokerClosed):
        queue.put(b"z")
    with open_spool() as again:
        assert len(again.queue("jobs")) == 1


def test_a_killed_owner_leaves_nobody_waiting(spool: Path) -> None:
    """A put is in doubt, a get is told; nothing hangs."""
    script = (
        "import qflow, sys\nbroker = qflow.open(sys.argv[1])\n"
        "broker.declare_queue('full', limit_messages=1).put(b'x')\nprint('up', flush=True)\nsys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(spool)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        remote = qflow.connect(spool)
        caught: list[BaseException] = []

        def put() -> None:
            try:
                remote.queue("full").put(b"y")
            except QflowError as error:
                caught.append(error)

        thread = threading.Thread(target=put)
        thread.start()
        future = remote.queue("full").submit(b"z")
        owner.kill()
        thread.join()
        with pytest.raises((InDoubt, BrokerClosed), match="has ended: connect again"):
            future.result(60)
        assert type(caught[0]) in (InDoubt, BrokerClosed)
        assert "has ended: connect again" in str(caught[0])
        with pytest.raises(BrokerClosed, match="has ended: connect again"):
            remote.queues()
        remote.close()
    with qflow.open(spool) as broker:
        assert len(broker.queue("full")) == 1


def test_a_forked_child_of_the_owner_has_no_part_in_the_door(owner: qflow.Broker, spool: Path) -> None:
    """Its copies are closed: the parent's clients stay connected, and see the end when the parent ends."""
    with qflow.connect(spool) as remote:
        queue = remote.declare_queue("jobs")

        def use() -> None:
            assert owner.engine.door is not None
            assert owner.engine.door.listening.fileno() == -1
            owner.queue("jobs").put(b"child")

        assert "ForkedProcess" in in_child(use)
        assert queue.put(b"x") == 0


def test_a_connection_in_a_forked_child_is_refused(remote: qflow.RemoteBroker) -> None:
    """The parent's goes on."""
    queue = remote.declare_queue("jobs")
    queue.put(b"x")
    assert in_child(lambda: queue.put(b"y")).startswith(ForkedProcess.__name__)  # type: ignore[arg-type,return-value]
    assert in_child(lambda: queue.get(0)).startswith(ForkedProcess.__name__)  # type: ignore[arg-type,return-value]
    assert in_child(remote.close) == "nothing"
    assert queue.get(60).body == b"x"


class Impostor:
    """Something that listens where the door is to be, and answers each caller with some bytes."""

    def __init__(self, spool: Path, says: bytes | None) -> None:
        spool.mkdir()
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(spool / "door"))
        self._listening.listen()
        self._says = says
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        one, _ = self._listening.accept()
        with one:
            if self._says is not None:
                one.sendall(self._says)
            while one.recv(4096):
                pass

    def close(self) -> None:
        self._thread.join()
        self._listening.close()


@pytest.mark.parametrize(
    ("says", "said"),
    [
        (preamble(999), "version 999"),
        (b"HTTP/1.1 400 Bad Request", "began with"),
        (preamble() + b"\0\0\0\0", "says 0"),
        (preamble() + b"\x0e\0\0\0\x63\0\0\0\x02\0\0\0{}\0\0\0\0", "request 99"),
    ],
)
def test_an_owner_of_another_version_or_none_at_all_is_told(spool: Path, says: bytes, said: str) -> None:
    """A newer one, something else, rubbish: in a sentence."""
    impostor = Impostor(spool, says)
    with pytest.raises(StorageError, match=said):
        qflow.connect(spool)
    impostor.close()


def test_an_owner_that_does_not_answer_is_told(spool: Path) -> None:
    """After the time-out."""
    impostor = Impostor(spool, None)
    with pytest.raises(StorageError, match=r"within 0\.05 s"):
        qflow.connect(spool, timeout_s=0.05)
    impostor.close()


def test_a_client_of_another_version_is_told(owner: qflow.Broker, spool: Path) -> None:
    """A newer one speaks the owner's; what is none hears a sentence."""
    with RawDoor(spool) as newer:
        newer.send(preamble(999))
        assert newer.read(8) == preamble(1)
        assert "result" in newer.ask({"op": "hello", "product": "raw", "new": [1]}).head
        frame = newer.ask({"op": "brew", "new": 1})
        error = decode_error(frame.head)
        assert type(error) is InvalidArgument
        assert "upgrade" in str(error)
    with RawDoor(spool) as other:
        other.send(b"GET / HTTP/1.1\r\n\r\n")
        frame = other.frame()  # type: ignore[assignment]
        assert "began with" in frame.head["text"]
        assert other.frame() is None
