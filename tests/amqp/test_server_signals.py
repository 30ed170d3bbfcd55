"""SIGTERM, SIGHUP and TLS with real AMQP clients on `qflow serve`."""

from __future__ import annotations

import signal
import socket
import ssl
import subprocess
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType

import pytest

import qflow
from amqp_client import Basic, Connections, method
from amqp_clients import PATIENCE_S, serving
from amqp_raw import Raw
from qflow.serving.passwords import PasswordHash
from qflow.serving.users import Account, Permission, User, Users

PEM = Path(__file__).parent.parent / "serving" / "certificates"
ENDED = 128 + signal.SIGTERM


def ends(process: subprocess.Popen[str]) -> int:
    return process.wait(PATIENCE_S)


def test_a_server_that_ends_lets_clients_settle(tmp_path: Path) -> None:
    """They are told 320 when nobody holds anything any more; no more messages are sent meanwhile."""
    with serving(tmp_path / "spool", "--grace", "600") as (server, process):
        with Raw(server.port).open() as consumer, Raw(server.port).open() as publisher:
            publisher.declare("q")
            publisher.confirmed("q", b"1", b"2", b"3", b"4")
            consumer.consume("q", prefetch=2)
            assert [consumer.delivered()[1] for _ in range(2)] == [b"1", b"2"]
            process.send_signal(signal.SIGTERM)
            until_refused(server.port)
            consumer.send(method(1, Basic.Ack(1)))
            publisher.confirmed("q", b"5")
            assert process.poll() is None
            consumer.send(method(1, Basic.Ack(2)))
            for client in consumer, publisher:
                _, close = client.next()
                assert (type(close), close.reply_code) == (Connections.Close, 320)
                client.send(method(0, Connections.CloseOk()))
                assert client.rest() == b""
        assert ends(process) == ENDED
    with qflow.open(tmp_path / "spool") as broker:
        left = [broker.queue("q").get(0) for _ in range(3)]
        assert [(one.body, one.redelivered) for one in left] == [(b"3", False), (b"4", False), (b"5", False)]


def until_refused(port: int) -> None:
    """Return when no client is let in any more."""
    while True:
        try:
            with Raw(port):
                pass
        except ConnectionError:
            return


def test_what_is_not_settled_in_time_is_kept(tmp_path: Path) -> None:
    """The client is told 320, also if it never answers."""
    with serving(tmp_path / "spool", "--grace", "0.2") as (server, process), Raw(server.port).open() as consumer:
        consumer.declare("q")
        consumer.confirmed("q", b"held")
        consumer.consume("q")
        assert consumer.delivered()[1] == b"held"
        process.send_signal(signal.SIGTERM)
        assert consumer.until(Connections.Close).reply_code == 320
        assert ends(process) == ENDED
    with qflow.open(tmp_path / "spool") as broker:
        delivery = broker.queue("q").get(0)
        assert (delivery.body, delivery.redelivered) == (b"held", True)


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """Whatever clients hold."""
    with (
        serving(tmp_path / "spool", "--grace", "3600") as (server, process),
        Raw(server.port).open() as consumer,
    ):
        consumer.declare("q")
        consumer.confirmed("q", b"held")
        consumer.consume("q")
        assert consumer.delivered()[1] == b"held"
        process.send_signal(signal.SIGTERM)
        until_refused(server.port)
        process.send_signal(signal.SIGTERM)
        assert ends(process) == ENDED
        assert consumer.until(Connections.Close).reply_code == 320
        assert consumer.rest() == b""


def write_users(path: Path, *names: str) -> None:
    """Write a users file, in which all have the password `secret` and may do everything in `/`."""
    password, all_of_it = PasswordHash.of("secret", n=2), {"/": Permission(".*", ".*", ".*")}
    users = {name: Account(User(name, frozenset(), all_of_it), password) for name in names}
    path.write_text(Users(MappingProxyType(users)).text())


def tls(certificate: str = "client") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=PEM / "ca.pem")
    if certificate:
        context.load_cert_chain(PEM / f"{certificate}.pem", PEM / f"{certificate}.key")
    return context


def test_certificates_and_users_are_used_and_renewed(tmp_path: Path) -> None:
    """EXTERNAL logs in by the name in the certificate; SIGHUP has other users, and who is none any more is told so."""
    users = tmp_path / "users.json"
    write_users(users, "anna")
    said = tmp_path / "said"
    files = ["--cert", PEM / "server.pem", "--key", PEM / "server.key", "--ca", PEM / "ca.pem", "--users", users]
    options = ["--amqps", "127.0.0.1:0", *map(str, files)]
    with open(said, "w") as stderr, serving(tmp_path / "spool", *options, said=stderr) as (server, process):
        assert process.stdout is not None
        tls_port = int(process.stdout.readline().rpartition(":")[2])
        with Raw(tls_port, tls=tls()).open(mechanism="EXTERNAL", response="") as anna:
            anna.declare("q")
            anna.confirmed("q", bytes(300_000))
            assert [log_in(server.port, name) for name in ("anna", "bert", "guest")] == [True, False, False]
            write_users(users, "bert")
            process.send_signal(signal.SIGHUP)
            while not log_in(server.port, "bert"):
                pass
            assert not log_in(server.port, "anna")
            assert anna.until(Connections.Close).reply_code == 320
        with Raw(tls_port, tls=tls()) as anna:
            assert anna.log_in("", mechanism="EXTERNAL").reply_code == 403
        with Raw(tls_port, tls=tls()) as bert:
            bert.open(response="\0bert\0secret").consume("q")
            assert len(bert.delivered()[1]) == 300_000
        with pytest.raises((ssl.SSLError, ConnectionError, EOFError)), Raw(tls_port, tls=tls("")) as nobody:
            nobody.open()
        with pytest.raises((ssl.SSLError, ConnectionError, EOFError)), Raw(tls_port) as plain:
            plain.open()
    lines = said.read_text().splitlines()
    assert not any("Traceback" in line for line in lines), lines
    [refused] = [line for line in lines if "TLS" in line]
    assert "the client shows no certificate" in refused
    assert len(lines) < 8, lines


def log_in(port: int, name: str) -> bool:
    """Tell whether a user with the password `secret` is taken."""
    with Raw(port) as client:
        return isinstance(client.log_in(f"\0{name}\0secret"), Connections.Tune)


def test_a_connection_with_tls_takes_little_memory(tmp_path: Path) -> None:
    """Also before it has said anything: asyncio gives each 256 KiB, from its first byte to its last."""
    number = 100
    options = ["--amqps", "127.0.0.1:0", "--cert", str(PEM / "server.pem"), "--key", str(PEM / "server.key")]
    with serving(tmp_path / "spool", *options) as (_, process), ExitStack() as silent:
        assert process.stdout is not None
        port = int(process.stdout.readline().rpartition(":")[2])
        tls = ssl.create_default_context(cafile=PEM / "ca.pem")
        with Raw(port, tls=tls).open():
            before = memory_kib(process.pid)
        for _ in range(number):
            silent.enter_context(socket.create_connection(("127.0.0.1", port)))
        with Raw(port, tls=tls).open():  # they come in before this one
            each = (memory_kib(process.pid) - before) / number
        assert each < 150, f"{each:.0f} KiB"


def memory_kib(pid: int) -> int:
    """Return RssAnon."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
