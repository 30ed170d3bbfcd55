"""Clients that die, hang, or do not read: others are unharmed, and the memory of the server is bounded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from pamqp import commands

import qflow
from amqp_client import Basic, Channels, Connections, method
from amqp_clients import PATIENCE_S, serving, unique
from amqp_raw import Raw, publish
from thorough import TORTURE

MIB = 1024**2
CAPACITY_MIB = 16
UNREAD_MIB = 20
"""What is beside the capacity: write buffers, a few bodies on their way, and what Python does not give back."""
FULL = 3
"""What the queue of a program takes."""
IDLE = 10_000 if TORTURE else 300


class Served(NamedTuple):
    """A server, and its process."""

    port: int
    pid: int

    def client(self, **settings: int) -> Raw:
        return Raw(self.port, **settings).open()

    def memory_kib(self) -> int:
        """Return RssAnon."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests here, with little memory."""
    directory = tmp_path_factory.mktemp("clients")
    with serving(directory / "spool", "--capacity", f"{CAPACITY_MIB}MiB") as (server, process):
        yield Served(server.port, process.pid)


@pytest.fixture
def client(served: Served) -> Iterator[Raw]:
    """A client that behaves."""
    with served.client() as raw:
        yield raw


@pytest.fixture
def queue(client: Raw) -> str:
    """A durable queue."""
    name = unique("queue")
    client.declare(name)
    return name


def until_ready(client: Raw, queue: str, number: int) -> None:
    """Ask until a queue has so many messages ready; for at most a minute."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if client.ready(queue) == number:
            return
    raise AssertionError(f"{client.ready(queue)} messages are ready, not {number}")


def test_a_client_that_is_told_to_close_and_does_not_loses_nothing(served: Served, client: Raw) -> None:
    """Its consumers end with its connection, also before it has answered; a delivery limit does not count them."""
    queue = unique("queue")
    client.declare(queue, x_queue_type="quorum", x_delivery_limit=2)
    client.confirmed(queue, b"held")
    with served.client() as bad:
        bad.consume(queue, prefetch=5)
        assert bad.delivered()[1] == b"held"
        bad.send(method(7, Basic.Qos(0, 1, False)))
        assert bad.until(Connections.Close).reply_code == 504
        until_ready(client, queue, 1)
        client.confirmed(queue, *(b"%d" % number for number in range(10)))
        assert client.ready(queue) == 11
        client.consume(queue)
        assert [client.delivered()[1] for _ in range(11)] == [b"held", *(b"%d" % number for number in range(10))]


def test_a_connection_that_fails_by_its_framing_gives_back_what_it_holds(
    served: Served, client: Raw, queue: str
) -> None:
    """The socket may stay open for as long as the client likes."""
    client.confirmed(queue, b"held")
    with served.client() as bad:
        bad.consume(queue)
        assert bad.delivered()[1] == b"held"
        bad.send(method(1, Connections.Open("/")))
        assert bad.until(Connections.Close).reply_code == 503
        until_ready(client, queue, 1)


CLIENT = """
import os, sys
from amqp_client import Basic, method
from amqp_raw import Raw
port, queue, full = int(sys.argv[1]), sys.argv[2], sys.argv[3]
raw = Raw(port).open()
raw.consume(queue)
for _ in range(3):
    raw.delivered()
print("holds", flush=True)
while full:
    raw.publish(full, bytes(100_000))
sys.stdin.read()
"""


def kill_client(served: Served, client: Raw, queue: str, full: str) -> None:
    """Have a process hold three messages, kill it, and see them come to another."""
    client.confirmed(queue, b"1", b"2", b"3")
    path = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    command = [sys.executable, "-c", CLIENT, str(served.port), queue, full]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"holds\n"
            if full:
                with served.client() as other:
                    until_full(other, full)
        finally:
            process.send_signal(signal.SIGKILL)
    client.consume(queue)
    for body in (b"1", b"2", b"3"):
        deliver, found = client.delivered()
        assert (found, deliver.redelivered) == (body, True)


def until_full(client: Raw, queue: str) -> None:
    """Publish what it takes and one more, until that is held up."""
    client.publish(queue, *[b"small"] * (FULL + 1))
    assert client.until(Connections.Blocked)


def test_what_a_killed_client_held_comes_to_others(served: Served, client: Raw, queue: str) -> None:
    """At once, with `redelivered`, in order."""
    kill_client(served, client, queue, "")


def test_what_a_killed_client_held_comes_to_others_while_its_publish_waits_for_room(
    tmp_path: Path,
) -> None:
    """It is not read from, so its end is looked for otherwise; without heartbeats."""
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_queue("full", limit_messages=FULL, on_overflow="block")
    with serving(tmp_path / "spool") as (server, process):
        served = Served(server.port, process.pid)
        with served.client() as client:
            client.declare("held")
            kill_client(served, client, "held", "full")


def test_answers_that_are_not_read_do_not_pile_up(served: Served, client: Raw, queue: str) -> None:
    """Messages of 256 KiB are asked for at once, and settled by that; none is read."""
    number = 150
    for _ in range(number):
        client.publish(queue, bytes(256 * 1024))
    assert client.ready(queue) == number
    before = served.memory_kib()
    with served.client(receive_bytes=4096) as deaf:
        deaf.send(*[method(1, Basic.Get(0, queue, True))] * number)
        with served.client() as other:  # all that the server does at once for it is done before
            for _ in range(600):
                assert other.ready(queue) > number / 2
        assert served.memory_kib() - before < UNREAD_MIB * 1024


def test_a_slow_consumer_does_not_hold_a_fast_one(served: Served, client: Raw, queue: str) -> None:
    """One that reads nothing is sent what a write buffer takes; the memory of the server is bounded."""
    slow_queue, body, number = unique("slow"), bytes(64 * 1024), 300
    client.declare(slow_queue)
    before = served.memory_kib()
    with served.client(receive_bytes=4096) as slow, served.client() as fast:
        slow.ask(Basic.Consume(0, slow_queue, "", False, True), Basic.ConsumeOk)
        fast.consume(queue, no_ack=True)
        for _ in range(number // 10):
            client.publish(slow_queue, *[body] * 10)
            client.publish(queue, *[body] * 10)
            for _ in range(10):
                assert len(fast.delivered()[1]) == len(body)
        assert client.ready(slow_queue) > number * 0.5
        assert served.memory_kib() - before < (CAPACITY_MIB + UNREAD_MIB) * 1024


def test_a_publisher_that_reads_no_confirms_is_bounded(served: Served, client: Raw, queue: str) -> None:
    """It is not read from in the end; another one is served."""
    with served.client(receive_bytes=4096) as deaf:
        deaf.ask(commands.Confirm.Select(), commands.Confirm.SelectOk)
        returned = publish("nobody", bytes(1000)).replace(b"nobody\x00", b"nobody\x01", 1)
        assert deaf.socket.gettimeout() == PATIENCE_S
        deaf.socket.settimeout(1)
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 200 * MIB:
                sent += deaf.socket.send(returned * 100)
        client.confirmed(queue, b"of another")
        assert served.memory_kib() < (CAPACITY_MIB + UNREAD_MIB + 60) * 1024


def test_what_comes_behind_close_is_dropped_and_close_ok_arrives(served: Served, client: Raw, queue: str) -> None:
    """Clients that write out of a buffer, as amqplib of Node does, send publishes behind it."""
    with Raw(served.port).open() as hasty:
        hasty.send(method(0, Connections.Close(200, "", 0, 0)), *[publish(queue, bytes(100_000))] * 200)
        hasty.until(Connections.CloseOk)
        assert hasty.rest() == b""
    until_ready(client, queue, 0)


def test_half_a_frame_holds_nobody(served: Served, client: Raw, queue: str) -> None:
    """Of a client that then hangs; its messages go back when it is missed."""
    client.confirmed(queue, b"held")
    with Raw(served.port).open(heartbeat_s=1) as half:
        half.consume(queue)
        assert half.delivered()[1] == b"held"
        half.send(publish(queue, bytes(1000))[:200])
        client.confirmed(queue, b"another")
        until_ready(client, queue, 2)
        assert half.rest().endswith(b"\x08\x00\x00\x00\x00\x00\x00\xce"), "it was sent heartbeats"


def test_idle_connections_take_little_memory(served: Served) -> None:
    """40 KiB each at most, with a channel and a consumer; and they are served."""
    with served.client() as first:
        first.declare("idle")
        before = served.memory_kib()
        idle = []
        try:
            for _ in range(IDLE):
                idle.append(served.client())
                idle[-1].consume("idle", prefetch=10)
            each = (served.memory_kib() - before) / IDLE
            print(f"{each:.1f} KiB each of {IDLE}")
            assert each < 40
            first.confirmed("idle", b"one")
            assert idle[0].delivered()[1] == b"one"
        finally:
            for one in idle:
                one.socket.close()
        until_ready(first, "idle", 1)


def test_a_channel_that_is_opened_again_begins_anew(served: Served, client: Raw, queue: str) -> None:
    """What was held on it went back."""
    client.confirmed(queue, b"one")
    client.consume(queue)
    assert client.delivered()[1] == b"one"
    client.ask(Channels.Close(200, "", 0, 0), Channels.CloseOk)
    client.ask(Channels.Open(), Channels.OpenOk)
    assert client.ready(queue) == 1
