"""A server that the first client of a spool starts, and that ends after the last: by kombu, as Celery uses it."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import kombu
import pika
import pytest
from kombu.exceptions import OperationalError

import qflow
import qflow.kombu  # the transport, for who imports no more of kombu than `Connection`
from amqp_clients import PATIENCE_S
from local_servers import pid, url, wait_for_the_end
from qflow import children
from qflow.amqp.local import joining, server
from qflow.amqp.local.joining import join
from qflow.amqp.local.place import Place, Where
from qflow.amqp.local.settings import LocalSettings
from qflow.serving import doors
from qflow.storage.log.handing import Handing


@contextmanager
def connected(spool: Path, **settings: Any) -> Iterator[kombu.Connection]:
    """Connect to the server of a spool."""
    with kombu.Connection(url(spool), **settings) as connection:
        connection.connect()
        yield connection


def put(connection: kombu.Connection, *numbers: int) -> None:
    """Put numbers into a queue."""
    with connection.SimpleQueue("numbers") as queue:
        for number in numbers:
            queue.put({"number": number})


def take(connection: kombu.Connection, number: int) -> list[int]:
    """Take and ack so many numbers."""
    found = []
    with connection.SimpleQueue("numbers") as queue:
        for _ in range(number):
            message = queue.get(timeout=PATIENCE_S)
            message.ack()
            found.append(message.payload["number"])
    return found


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("qflow:///srv/spool", "/srv/spool"),
        ("qflow:///srv/spool/", "/srv/spool"),
        ("qflow:///srv/../var/a%20b/%C3%B6%23%3B%3F", "/var/a b/ö#;?"),
        ("qflow:///srv/a b/%FF", "/srv/a b/\udcff"),
        ("qflow://./spool", "{cwd}/spool"),
        ("qflow://../spool", "{parent}/spool"),
    ],
)
def test_a_url_names_a_directory(given: str, path: str) -> None:
    """Absolute, or relative to the process's own directory; bytes that are no UTF-8 are kept."""
    assert LocalSettings.parse(given).spool == path.format(cwd=os.getcwd(), parent=os.path.dirname(os.getcwd()))


def test_a_url_has_settings() -> None:
    """How much memory, and how long it stays."""
    assert LocalSettings.parse("qflow:///srv/spool?capacity=2MiB&idle_s=60") == LocalSettings(
        "/srv/spool", 2 * 2**20, 60.0
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("qflow://", "the URL of a spool is qflow:///absolute/path"),
        ("qflow:///", "the URL of a spool is"),
        ("qflow://spool", "the URL of a spool is"),
        ("qflow://localhost/srv/spool", "the URL of a spool is"),
        ("qflow://user:password@localhost/srv", "the URL of a spool is"),
        ("qflow:///srv/%00", "the URL of a spool is"),
        ("qflow:///srv?capacity=much", "capacity must be a number of bytes"),
        ("qflow:///srv?idle_s=long", "idle_s must be from 0 to"),
        ("qflow:///srv?idle_s=nan", "idle_s must be from 0 to"),
        ("qflow:///srv?speed=1", "may have capacity and idle_s, not 'speed'"),
    ],
)
def test_a_wrong_url_is_refused(given: str, said: str) -> None:
    """Before anything is made: what looks like a host would be a directory that nobody meant."""
    with pytest.raises(qflow.InvalidArgument, match=said), kombu.Connection(given) as connection:
        connection.connect()


def test_the_first_starts_it_and_it_ends_after_the_last(tmp_path: Path) -> None:
    """Others connect to the same one; what was put is there for the next."""
    spool = tmp_path / "a b" / "spööl;#%"
    with connected(spool) as first:
        one = pid(spool)
        put(first, 1, 2, 3)
        with connected(spool) as second:
            assert take(second, 2) == [1, 2]
        assert pid(spool) == one
    wait_for_the_end(spool)
    with connected(spool) as later:
        assert pid(spool) != one
        assert take(later, 1) == [3]
    wait_for_the_end(spool)
    assert (spool / "amqp" / "log").read_text() == ""


def test_a_connection_that_switches_to_a_spool_is_connected_to_it(tmp_path: Path) -> None:
    """kombu takes such a URL apart itself."""
    spool = tmp_path / "a b%"
    with kombu.Connection("amqp://127.0.0.1:1") as connection:
        connection.switch(f"qflow://{quote(str(spool))}")
        connection.connect()
        put(connection, 1)
        assert take(connection, 1) == [1]
    os.kill(pid(spool), signal.SIGTERM)
    wait_for_the_end(spool)


def test_nobody_else_may_read_where_it_is(tmp_path: Path) -> None:
    """The directory is 0700, its files are 0600; `guest` is no user of this server."""
    with connected(tmp_path / "spool"):
        found = tmp_path / "spool" / "amqp"
        assert stat.S_IMODE((tmp_path / "spool").stat().st_mode) == stat.S_IMODE(found.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in found.iterdir()} == {0o600}
        port = json.loads((found / "serving").read_text())["port"]
        with pytest.raises(pika.exceptions.ProbableAuthenticationError):
            pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))
    wait_for_the_end(tmp_path / "spool")


def test_of_many_at_once_one_starts_it(tmp_path: Path) -> None:
    """Threads here, and processes, by a path of their own: all are connected to one server."""
    spool = tmp_path / "spool"
    script = f"import kombu, qflow.kombu; kombu.Connection({url(spool)!r}).connect(); print(open('lock').readline())"
    (tmp_path / "spool").mkdir()
    processes = [
        subprocess.Popen([sys.executable, "-c", script], cwd=spool, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    all_there = threading.Barrier(5)
    pids: list[int] = []

    def connect() -> None:
        with connected(spool):
            all_there.wait(PATIENCE_S)
            pids.append(pid(spool))

    threads = [threading.Thread(target=connect) for _ in range(4)]
    for thread in threads:
        thread.start()
    said = [int(process.communicate(timeout=PATIENCE_S)[0]) for process in processes]
    all_there.wait(PATIENCE_S)
    for thread in threads:
        thread.join()
    assert {*said, *pids} == {pids[0]}
    assert len(pids) == 4
    wait_for_the_end(spool)


def test_after_a_kill_the_next_one_starts_another(tmp_path: Path) -> None:
    """What was confirmed is there; what the killed one had published is not believed."""
    spool = tmp_path / "spool"
    with connected(spool) as connection:
        put(connection, *range(20))
        killed = pid(spool)
        os.kill(killed, signal.SIGKILL)
        with connected(spool) as again:
            assert pid(spool) != killed
            assert take(again, 20) == list(range(20))
    wait_for_the_end(spool)


def test_told_to_end_it_lets_clients_settle_and_another_follows(tmp_path: Path) -> None:
    """Clients that come meanwhile wait for the next one."""
    spool = tmp_path / "spool"
    with connected(spool) as connection:
        put(connection, 1)
        ended = pid(spool)
        os.kill(ended, signal.SIGTERM)
        while True:
            with connected(spool) as again:
                if pid(spool) != ended:  # else it came before the signal
                    assert take(again, 1) == [1]
                    break
    wait_for_the_end(spool)


def test_it_does_not_outlive_a_client_that_was_killed(tmp_path: Path) -> None:
    """One that is killed between the start of the server and its first connection."""
    spool = tmp_path / "spool"
    script = f"""
import os, signal
from qflow.amqp.local.joining import join
from qflow.amqp.local.settings import LocalSettings
join(LocalSettings.parse({url(spool)!r}), lambda where: os.kill(os.getpid(), signal.SIGKILL), ())
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGKILL
    wait_for_the_end(spool)


def test_whoever_waits_for_the_output_of_its_client_does_not_wait_for_it(tmp_path: Path) -> None:
    """The server keeps no pipe open, nor is it a child that is left over."""
    script = """
import kombu, os, qflow.kombu, sys
with kombu.Connection(sys.argv[1]) as connection:
    connection.connect()
try:
    os.wait()
except ChildProcessError:
    print("no child")
"""
    command = [sys.executable, "-c", script, url(tmp_path / "spool", idle_s=3600)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.stdout, done.stderr) == ("no child\n", "")
    os.kill(pid(tmp_path / "spool"), signal.SIGTERM)
    wait_for_the_end(tmp_path / "spool")


def test_a_spool_of_another_process_is_said_to_be(tmp_path: Path) -> None:
    """As an error of the connection, which a worker tries again; afterwards it works."""
    spool = tmp_path / "spool"
    refused = pytest.raises(OperationalError, match=f"in use.*{os.getpid()}")
    with qflow.open(spool), kombu.Connection(url(spool)) as connection, refused:
        connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)
    with connected(spool):
        pass
    wait_for_the_end(spool)


def test_what_is_no_spool_is_left_as_it_is(tmp_path: Path) -> None:
    """A directory with something else in it, and a file."""
    (tmp_path / "letter").touch()
    for path, said in ((tmp_path, "it holds 'letter'"), (tmp_path / "letter", "not a directory")):
        with pytest.raises(qflow.InvalidArgument, match=said), kombu.Connection(url(path)) as connection:
            connection.connect()
    assert os.listdir(tmp_path) == ["letter"]


def test_a_directory_that_cannot_be_used_is_an_error_of_the_connection(tmp_path: Path) -> None:
    """Somebody may mend it: a worker tries again, and says why."""
    (tmp_path / "spool" / "log").mkdir(parents=True)
    (tmp_path / "spool" / "log" / "data.mdb").symlink_to(tmp_path / "elsewhere")
    refused = pytest.raises(OperationalError, match="not a file of its own")
    with kombu.Connection(url(tmp_path / "spool")) as connection, refused:
        connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)


def test_a_damaged_spool_is_said_to_be(tmp_path: Path) -> None:
    """What the server could not open, its client raises; the log of the server has it, too."""
    spool = tmp_path / "spool"
    with connected(spool):
        pass
    wait_for_the_end(spool)
    (spool / "log" / "data.mdb").unlink()
    with pytest.raises(qflow.CorruptionError, match="the log is gone"), connected(spool):
        pass
    assert "the log is gone" in (spool / "amqp" / "log").read_text()


def test_a_client_with_thousands_of_open_files_starts_one(tmp_path: Path) -> None:
    """A pipe with a number above 1,023 is more than `select` takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        while not files or files[-1] < 1024:
            files.append(os.dup(0))
        with connected(tmp_path / "spool") as connection:
            put(connection, 1)
            assert take(connection, 1) == [1]
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_while_one_starts_it_others_only_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for each of them would be started, to find that another one is there."""
    monkeypatch.setattr(joining, "START_S", 0.0)
    monkeypatch.setattr(children, "interpreter", lambda: pytest.fail("started"))
    place = Place(str(tmp_path / "spool"))
    place.make()
    with place.starting() as is_first:
        assert is_first
        with pytest.raises(TimeoutError, match="took clients"):
            join(LocalSettings(place.spool), str, ())


def test_two_make_the_directory_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one has made it just after this one has looked for it."""
    place = Place(str(tmp_path / "spool"))
    is_directory = os.path.isdir

    def made_meanwhile(path: str) -> bool:
        found = is_directory(path)
        if path == place.directory and not found:
            os.mkdir(place.spool)
            os.mkdir(place.directory)
        return found

    monkeypatch.setattr(os.path, "isdir", made_meanwhile)
    place.make()
    assert os.listdir(place.spool) == ["amqp"]


def test_a_child_that_is_forked_meanwhile_keeps_no_lock(tmp_path: Path) -> None:
    """It has the descriptors of its parent for as long as it lives."""
    place = Place(str(tmp_path / "spool"))
    place.make()
    reading, writing = os.pipe()
    with place.starting():
        if not (child := os.fork()):
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
    with place.starting() as is_first:
        assert is_first
    os.close(writing)
    os.close(reading)
    os.waitpid(child, 0)


def test_an_error_of_the_system_is_one_of_storage() -> None:
    """And errors of this package are what they were."""
    assert type(joining.error_of("SpoolInUse", "x")) is qflow.SpoolInUse
    assert type(joining.error_of("PermissionError", "x")) is qflow.StorageError


def test_a_server_that_is_killed_before_it_listens_is_an_error_of_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients of kombu try again."""
    monkeypatch.setattr(children, "interpreter", lambda: shutil.which("false"))
    with pytest.raises(ConnectionError, match="ended before it listened"):
        join(LocalSettings(str(tmp_path / "spool")), str, ())


def test_a_server_that_does_not_come_up_is_waited_for_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process holds the lock of a server, and publishes nothing."""
    monkeypatch.setattr(joining, "START_S", 0.0)
    place = Place(str(tmp_path / "spool"))
    place.make()
    assert place.serve() is not None
    with pytest.raises(TimeoutError, match="no server of .* took clients"):
        join(LocalSettings(place.spool), str, ())


def test_a_server_that_does_not_even_begin_is_waited_for_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python that hangs as it starts is killed; others were started behind it, one after the other, for ever."""
    monkeypatch.setattr(joining, "START_S", 0.0)
    monkeypatch.setattr(children, "command", lambda *_: ["sleep", "1000"])
    with pytest.raises(TimeoutError, match="no server of .* took clients"):
        join(LocalSettings(str(tmp_path / "spool")), str, ())


def test_a_server_that_refuses_and_stays_is_tried_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the error is the client's."""
    now_s = count(step=joining.PAUSE_S)
    monkeypatch.setattr(joining, "time", SimpleNamespace(monotonic=lambda: next(now_s), sleep=lambda _: None))
    place = Place(str(tmp_path / "spool"))
    place.make()
    serving = place.serve()
    assert serving is not None
    serving.publish(Where(1, "secret"))
    calls: list[Where] = []

    def refused(where: Where) -> None:
        calls.append(where)
        raise ConnectionRefusedError

    with pytest.raises(ConnectionRefusedError):
        join(LocalSettings(place.spool), refused, (OSError,))
    assert len(calls) > 1


class Door:
    """Counts clients by a list: how many there are at each look; the last one stays."""

    def __init__(self, *connections: int) -> None:
        self.left = list(connections)
        self.done: list[str] = []

    @property
    def connections(self) -> int:
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]

    def publish(self) -> None:
        self.done.append("publish")

    def withdraw(self) -> None:
        self.done.append("withdraw")

    def receive(self, number: signal.Signals) -> None:
        self.done.append(number.name)


@pytest.mark.parametrize(
    ("connections", "done"),
    [
        ((0,), ["withdraw", "SIGTERM"]),
        ((2, 2, 1, 0), ["withdraw", "SIGTERM"]),
        ((0, 0, 1, 1, 0), ["withdraw", "publish", "withdraw", "SIGTERM"]),
    ],
)
def test_a_client_that_comes_at_the_last_moment_is_served(
    connections: tuple[int, ...], done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had read where the server is before that was withdrawn: the server stays."""
    monkeypatch.setattr(server, "LOOK_S", 0)
    monkeypatch.setattr(server, "LAST_S", 0)
    door = Door(*connections)
    asyncio.run(asyncio.wait_for(server.end_when_left(door, 0.0, door), PATIENCE_S))
    assert door.done == done


def test_a_server_whose_broker_has_failed_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client connects again, to a new process that opens the spool."""
    monkeypatch.setattr(doors, "LOOK_S", 0)

    class Teller:
        def tell(self, said: dict[str, str]) -> None:
            assert said == {}
            monkeypatch.setattr(Handing, "check_usable", fail)

    def fail(_: Handing) -> None:
        raise qflow.BrokerFailed("a commit failed")

    spool = tmp_path / "spool"
    place = Place(str(spool))
    place.make()
    serving = place.serve()
    assert serving is not None
    with pytest.raises(qflow.BrokerFailed, match="a commit failed"):
        asyncio.run(asyncio.wait_for(server.serve(LocalSettings(str(spool)), serving, Teller()), PATIENCE_S))


def test_a_server_that_cannot_say_where_it_is_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: nobody would find it any more."""
    monkeypatch.setattr(server, "LOOK_S", 0)
    monkeypatch.setattr(server, "LAST_S", 0)
    door = Door(0, 0, 1)

    def fail() -> None:
        raise OSError("no space")

    monkeypatch.setattr(door, "publish", fail)
    with pytest.raises(OSError, match="no space"):
        asyncio.run(asyncio.wait_for(server.end_when_left(door, 0.0, door), PATIENCE_S))
    assert door.done == ["withdraw", "SIGTERM"]
