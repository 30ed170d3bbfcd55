"""The whole surface on another host: `qflow.connect` to a URL."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pa = pytest.importorskip("pyarrow")
pf = pytest.importorskip("pyarrow.flight")

import qflow  # noqa: E402
import qflow.aio  # noqa: E402
import qflow.flight  # noqa: E402
from processes import free_port  # noqa: E402
from qflow.errors import NO_THREAD  # noqa: E402
from qflow.flight import client, tunnel  # noqa: E402
from qflow.flight.owner import Owner  # noqa: E402
from qflow.remote.wire.frames import FrameReader, encode_frame, preamble  # noqa: E402
from unit.clocks import LONG_S, Clock, until  # noqa: E402

LEFT_OPEN = """
import atexit, sys, threading
atexit.register(lambda: print([one.name for one in threading.enumerate() if one.name == "qflow-flight"]))
import qflow
atexit.register(lambda: print(remote.queue("jobs").put(b"a")))
remote = qflow.connect(sys.argv[1])
"""
FORKED = """
import os, sys
import qflow
remote = qflow.connect(sys.argv[1])
child = os.fork()
if not child:
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
print(remote.queue("jobs").put(b"a"), flush=True)
"""
SERVES_AND_FORKS = """
import os, sys
import qflow, qflow.flight
with qflow.open(sys.argv[1]) as broker, qflow.flight.serve(broker, port=0) as server:
    broker.declare_queue("jobs")
    print(server.port, flush=True)
    sys.stdin.readline()
    child = os.fork()
    if not child:
        sys.exit()
    print(os.waitpid(child, 0)[1], flush=True)
    sys.stdin.readline()
"""
CONNECTS_IN_A_CHILD = """
import os, pathlib, sys
import qflow
def names():
    for one in pathlib.Path("/proc/self/task").iterdir():
        try:
            yield one.joinpath("comm").read_text()
        except OSError:
            pass  # it has ended
remote = qflow.connect(sys.argv[1])
if sys.argv[2] == "closed":
    remote.close()
    of_grpc = "grpc", "event_engine", "lifeguard"  # which end when nothing is connected any more
    looks = 0
    while looks < 1000:  # in a row: a thread has no name of its own as it begins
        looks = 0 if any(name.startswith(of_grpc) for name in names()) else looks + 1
child = os.fork()
if not child:
    try:
        qflow.connect(sys.argv[1]).queue("jobs").put(b"a")
        print("stored", flush=True)
    except qflow.ForkedProcess as error:
        print(error, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
remote.close()
"""


def url(server: qflow.flight.Server) -> str:
    """Return where it listens."""
    return f"grpc://127.0.0.1:{server.port}"


def test_queues_are_used_through_an_exchange(broker: qflow.Broker, server: qflow.flight.Server) -> None:
    """Puts, gets and acks; a large body goes through in pieces."""
    with qflow.connect(url(server)) as remote:
        jobs = remote.queue("jobs")
        jobs.put(b"small")
        jobs.put(b"x" * 3_000_000)
        assert list(jobs.put_many(b"%d" % number for number in range(1000))) == list(range(2, 1002))
        with jobs.get() as delivery:
            assert delivery.body == b"small"
        assert [len(one.body) for one in jobs.get_many(1)] == [3_000_000]
    assert len(broker.queue("jobs")) == 1001, "what was not acked came back"


def test_deliveries_belong_to_the_exchange(broker: qflow.Broker, server: qflow.flight.Server) -> None:
    """They come back when it ends, counted."""
    broker.queue("jobs").put(b"a")
    remote = qflow.connect(url(server))
    assert remote.queue("jobs").get().body == b"a"
    remote.close()
    again = broker.queue("jobs").get(timeout_s=60)
    assert (again.body, again.redelivered) == (b"a", True)


def test_a_child_that_ends_leaves_the_sessions_of_its_parent(server: qflow.flight.Server) -> None:
    """It has copies of their sockets."""
    command = [sys.executable, "-c", FORKED, url(server)]
    assert subprocess.run(command, check=True, capture_output=True, timeout=60).stdout == b"0\n"


def test_a_child_of_an_owner_that_ends_leaves_the_sessions_of_its_clients(tmp_path: Path) -> None:
    """What the owner does at its own end is not for its children: they have copies of its sockets."""
    command = [sys.executable, "-c", SERVES_AND_FORKS, str(tmp_path / "spool")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        with qflow.connect(f"grpc://127.0.0.1:{int(owner.stdout.readline())}") as remote:
            assert remote.queue("jobs").put(b"a") == 0
            print(file=owner.stdin, flush=True)
            assert owner.stdout.readline() == "0\n"
            assert remote.queue("jobs").put(b"b") == 1
        print(file=owner.stdin, flush=True)
    assert owner.returncode == 0


@pytest.mark.parametrize(("parent", "said"), [("open", b"spawn or forkserver"), ("closed", b"stored")])
def test_a_child_connects_unless_a_connection_was_open_when_it_was_forked(
    parent: str, said: bytes, server: qflow.flight.Server
) -> None:
    """gRPC has lost its threads then, and would abort the child, or have it wait."""
    command = [sys.executable, "-c", CONNECTS_IN_A_CHILD, url(server), parent]
    assert said in subprocess.run(command, check=True, capture_output=True, timeout=60).stdout


def test_a_process_ends_the_sessions_it_has_left_open(server: qflow.flight.Server) -> None:
    """Before Python ends the threads that carry them: gRPC aborts the process where those are within it.

    And behind what the program itself does at its end.
    """
    command = [sys.executable, "-c", LEFT_OPEN, url(server)]
    assert subprocess.run(command, check=True, capture_output=True, timeout=60).stdout == b"0\n[]\n"


def test_a_door_that_closes_ends_its_sessions(broker: qflow.Broker, server: qflow.flight.Server) -> None:
    """A call that waits ends, and those after it are refused, with the reason; the spool goes on."""
    with qflow.connect(url(server)) as remote, ThreadPoolExecutor() as threads:
        jobs = remote.queue("jobs")
        waiting = threads.submit(jobs.get)
        until(lambda: broker.queue("jobs").stats().consumers)
        server.close()
        with pytest.raises(qflow.BrokerClosed, match="the server has ended: connect again"):
            waiting.result(60)
        with pytest.raises(qflow.BrokerClosed, match="the server has ended: connect again"):
            jobs.put(b"not any more")
    broker.queue("jobs").put(b"kept")
    assert broker.queue("jobs").get().body == b"kept"


def _takes_one(client: Any) -> tuple[Any, Any]:
    """Get a message of `jobs` in an exchange, and send nothing more; return what writes and what reads."""
    writer, reader = client.do_exchange(pf.FlightDescriptor.for_command(tunnel.COMMAND))
    hello, get = encode_frame(1, {"op": "hello"}), encode_frame(2, {"op": "get", "queue": "jobs", "most": 1})
    writer.write_metadata(b"\0" + b"".join([preamble(), *hello, *get]))
    return writer, reader


def test_a_client_that_falls_silent_loses_its_session(
    broker: qflow.Broker, server: qflow.flight.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it holds comes back, though its host has not said that it is gone; one that is idle stays."""
    monkeypatch.setattr(tunnel, "PING_S", 0.02)
    monkeypatch.setattr(tunnel, "SILENT_S", 2.0)
    jobs = broker.queue("jobs")
    jobs.put(b"a")
    with qflow.connect(url(server)) as idle, pf.connect(url(server)) as client:
        writer, reader = _takes_one(client)
        answers = FrameReader(2**20)
        begun = b""
        while len(begun) < len(preamble()):
            begun += _bytes_of(reader)
        numbers = [frame.number for frame in answers.feed(begun[len(preamble()) :])]
        while 2 not in numbers:
            numbers += [frame.number for frame in answers.feed(_bytes_of(reader))]
        assert jobs.get(timeout_s=60).redelivered
        pieces = []
        with pytest.raises((pf.FlightError, StopIteration)):
            while True:
                pieces.append(bytes(reader.read_chunk().app_metadata)[:1])
                if pieces[-1] == b"\1":
                    writer.close()
        assert pieces[-1] == b"\1"
        assert idle.queues() == ["jobs"]


def test_a_client_that_is_gone_in_the_middle_of_a_delivery_loses_its_session(
    broker: qflow.Broker, server: qflow.flight.Server
) -> None:
    """What it holds comes back, though gRPC keeps what it does not read, and the thread that sends it."""
    clock = Clock()
    server._tunnels.clock = clock.monotonic

    def is_let_go() -> bool:
        clock.advance(tunnel.SILENT_S + 1)
        server._tunnels.sweep()
        return not jobs.stats().acquired_messages

    jobs = broker.queue("jobs")
    jobs.put(bytes(2**25))
    with pf.connect(url(server)) as client:
        _, reader = _takes_one(client)
        until(lambda: jobs.stats().acquired_messages)
        until(is_let_go)
        assert jobs.get(timeout_s=LONG_S).redelivered
        reader.cancel()


def _bytes_of(reader: Any) -> bytes:
    piece: bytes = reader.read_chunk().app_metadata.to_pybytes()
    return piece[1:]


def test_an_owner_that_falls_silent_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that waits is told so: nobody waits for a host that has lost its power."""

    class Silent(pf.FlightServerBase):  # type: ignore[misc]
        def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
            with contextlib.suppress(StopIteration, pa.ArrowException):
                while True:
                    reader.read_chunk()

    monkeypatch.setattr(tunnel, "PING_S", 0.02)
    monkeypatch.setattr(tunnel, "SILENT_S", 0.5)
    silent = Silent("grpc+tcp://127.0.0.1:0")
    with pytest.raises(qflow.QflowError):
        qflow.connect(f"grpc://127.0.0.1:{silent.port}", timeout_s=60)
    silent.shutdown()


def test_an_owner_that_falls_silent_in_the_middle_of_a_put_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC holds back what its network does not take, and a call that waits for that is told so, too."""
    tested = threading.Event()

    class Stalled(pf.FlightServerBase):  # type: ignore[misc]
        def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
            tested.wait(LONG_S)

    monkeypatch.setattr(tunnel, "SILENT_S", 0.5)
    stalled = Stalled("grpc+tcp://127.0.0.1:0")
    outlet = client.outlet(f"grpc://127.0.0.1:{stalled.port}", None)
    with outlet.socket, pytest.raises(OSError, match=r"Broken pipe|reset"):
        outlet.socket.settimeout(LONG_S)
        outlet.socket.sendall(bytes(2**26))
    assert "nothing has come for 0.5 s" in str(outlet.reason())
    tested.set()
    stalled.shutdown()


def test_a_network_of_two_kilobytes_a_second_has_time_for_each_piece() -> None:
    """Nothing is heard of one before all of it has come: its sender would be taken for gone, again and again."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
            theirs.sendall(bytes(2**18))
        sizes = [len(piece) for piece in tunnel._pieces(ours)]
    assert sum(sizes) - len(sizes) == 2**18
    assert max(sizes) < 2000 * tunnel.SILENT_S


def test_tasks_use_the_same_exchange(broker: qflow.Broker, server: qflow.flight.Server) -> None:
    """`qflow.aio.connect` takes a URL, too."""

    async def work() -> bytes:
        async with qflow.aio.connect(url(server)) as remote:
            jobs = await remote.queue("jobs")
            await jobs.put(b"from a task")
            async with await jobs.get() as delivery:
                return bytes(delivery.body)

    assert asyncio.run(work()) == b"from a task"


def test_a_spool_whose_owner_lets_nobody_in_says_so(tmp_path: Path) -> None:
    """Sessions need the door of the spool."""
    with (
        qflow.open(tmp_path / "shut", door=False) as broker,
        qflow.flight.serve(broker, port=0) as server,
        pytest.raises(qflow.NotFound, match="sessions go through the door of the spool"),
    ):
        qflow.connect(url(server))


def test_a_session_that_is_interrupted_as_it_is_begun_ends(
    server: qflow.flight.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has it to close it; its threads had each other."""
    begun: list[threading.Thread] = []

    def start_and_strike(thread: threading.Thread) -> None:
        thread.start()
        begun.append(thread)
        if thread is begun[0]:  # else it is one of the owner's, for the session
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    monkeypatch.setattr(tunnel, "start", start_and_strike)
    with pytest.raises(KeyboardInterrupt):
        qflow.connect(url(server))
    begun[0].join(LONG_S)
    assert not begun[0].is_alive()


def test_a_system_without_a_thread_for_a_session_refuses_it_and_keeps_nothing(
    broker: qflow.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket stayed among those of all sessions."""
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError(NO_THREAD)))
    carried = tunnel.Tunnels(Owner(broker))
    with pytest.raises(qflow.QflowError, match="starts no more threads"):
        carried.carry(Mock(), Mock(), Mock())
    assert not carried._exchanges


def test_a_door_that_finds_no_thread_for_its_end_is_closed_later(
    server: qflow.flight.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took itself for one that had ended, and no call closed it any more."""
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError(NO_THREAD)))
        with pytest.raises(qflow.QflowError, match="starts no more threads"):
            server.close()
        assert not server.ended
    server.close()
    assert server.ended


def test_a_host_that_is_not_there_is_named(tmp_path: Path) -> None:
    """With a sentence, and in time."""
    with pytest.raises(qflow.StorageError, match=r"nobody answers at grpc://127\.0\.0\.1"):
        qflow.connect(f"grpc://127.0.0.1:{free_port()}", timeout_s=30.0)


def test_a_host_where_something_else_answers_is_told() -> None:
    """One that knows Arrow Flight, and no sessions; so says one that knows gRPC alone, and a proxy on the way."""
    with pf.FlightServerBase("grpc://127.0.0.1:0") as other:
        target = f"grpc://127.0.0.1:{other.port}"
        sentence = f"at {target} there is no door of qflow"
        with pytest.raises(qflow.StorageError, match=sentence):
            qflow.connect(target)
        with pytest.raises(qflow.StorageError, match=sentence):
            asyncio.run(_queues_of(target))


async def _queues_of(target: str) -> list[str]:
    async with qflow.aio.connect(target) as remote:
        return await remote.queues()


@pytest.mark.parametrize(
    ("target", "options", "text"),
    [
        ("grpc+tls://", {}, "a URL of a door is"),
        ("grpc://host", {}, "a URL of a door is"),
        ("grpc://host..example:1", {}, "a URL of a door is"),
        (f"grpc+tls://{'a' * 64}.example:1", {}, "a URL of a door is"),
        ("grpc://127.0.0.1:1", {"ca": "ca.pem"}, "certificates are for grpc"),
        ("grpc+tls://127.0.0.1:1", {"ca": "/nowhere/ca.pem"}, "cannot be read"),
        ("spool", {"token": "t"}, "a token is for a URL"),
    ],
)
def test_a_target_that_makes_no_sense_is_refused(target: str, options: dict[str, Any], text: str) -> None:
    """Before anything is connected."""
    with pytest.raises(qflow.InvalidArgument, match=text):
        qflow.connect(target, **options)


def test_a_snapshot_is_made_where_its_path_means_something(server: qflow.flight.Server, tmp_path: Path) -> None:
    """A part of a path would mean another place on each host."""
    with qflow.connect(f"grpc://127.0.0.1:{server.port}") as remote:
        with pytest.raises(qflow.InvalidArgument, match="give the whole path there, not 'copy'"):
            remote.snapshot("copy")
        remote.snapshot(tmp_path / "copy")
    with qflow.open(tmp_path / "copy") as copy:
        assert copy.queues() == ["jobs"]
