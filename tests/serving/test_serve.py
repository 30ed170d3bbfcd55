"""`qflow serve`: a process with a spool, a fake door, signals, and a service manager."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from click.testing import CliRunner

import qflow
import qflow.amqp
from processes import free_port
from qflow.cli.main import app
from qflow.serving.certificates import Certificates
from qflow.serving.passwords import PasswordHash
from qflow.serving.users import Account, User, Users

HERE = Path(__file__).parent
PEM = HERE / "certificates"
WATCHDOG_S = 120


def write_users(path: Path, *names: str) -> None:
    """Write a users file, in which all have the password `secret`."""
    password = PasswordHash.of("secret", n=2)
    users = Users(MappingProxyType({name: Account(User(name), password) for name in names}))
    path.write_text(users.text())


class Server:
    """`qflow serve`, whose door is `fake_serve.py`; what comes on stdout is read line by line."""

    def __init__(self, directory: Path, *arguments: object, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "fake_serve.py"), "serve", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=directory,
            env=os.environ | environment,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def port(self, name: str) -> int:
        """Return where it listens, which is the next line."""
        said, _, address = self.line().partition(" on 127.0.0.1:")
        assert said == name, self.end()
        return int(address)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[str, str]:
        """Return what else it writes to stdout and stderr until its end."""
        return self.process.communicate(timeout=WATCHDOG_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Start a server in the directory of the test."""
    started: list[Server] = []

    def begin(*arguments: object, **environment: str) -> Server:
        started.append(Server(tmp_path, *arguments, **environment))
        return started[-1]

    yield begin
    for server in started:
        server.process.kill()
        server.process.communicate()


def log_in(port: int, name: str, password: str, tls: ssl.SSLContext | None = None) -> str:
    """Return what the door answers."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=WATCHDOG_S)
    with tls.wrap_socket(connection, server_hostname="localhost") if tls else connection as talking:
        talking.sendall(f"{name} {password}\n".encode())
        with talking.makefile() as answers:
            return answers.readline().strip()


def trusting(certificate: str = "client") -> ssl.SSLContext:
    """Return what a client of the TLS door needs; without a certificate of its own if that is empty."""
    context = ssl.create_default_context(cafile=PEM / "ca.pem")
    if certificate:
        context.load_cert_chain(PEM / f"{certificate}.pem", PEM / f"{certificate}.key")
    return context


def shown(port: int, server_hostname: str | None = "localhost") -> bytes | None:
    """Return the certificate that the door shows, in DER."""
    context = trusting()
    context.check_hostname = server_hostname is not None
    connection = socket.create_connection(("127.0.0.1", port), timeout=WATCHDOG_S)
    with context.wrap_socket(connection, server_hostname=server_hostname) as talking:
        return talking.getpeercert(binary_form=True)


def certificate_of(name: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert((PEM / f"{name}.pem").read_text())


def test_a_server_is_ready_reloads_and_drains(start: Any, tmp_path: Path) -> None:
    """From its line on stdout to the exit code of SIGTERM; the manager is told of all of it."""
    users = tmp_path / "users.json"
    write_users(users, "anna")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "manager"))
        manager.settimeout(WATCHDOG_S)
        server = start(
            *("spool", "--amqp", "127.0.0.1:0", "--users", users, "--capacity", "8MiB", "--spill", "segments"),
            NOTIFY_SOCKET=str(tmp_path / "manager"),
        )
        port = server.port("amqp")
        assert manager.recv(100) == b"READY=1"
        assert [log_in(port, name, "secret") for name in ("anna", "bob", "guest")] == ["anna", "no", "no"]
        write_users(users, "bob")
        server.signal(signal.SIGHUP)
        assert server.line() == "reloaded bob"
        assert manager.recv(100).startswith(b"RELOADING=1\n")
        assert manager.recv(100) == b"READY=1"
        assert [log_in(port, name, "secret") for name in ("anna", "bob")] == ["no", "bob"]
        users.write_text("{")
        server.signal(signal.SIGHUP)
        assert manager.recv(100).startswith(b"RELOADING=1\n")
        assert manager.recv(100) == b"READY=1"
        assert log_in(port, "bob", "secret") == "bob"
        server.signal(signal.SIGTERM)
        assert manager.recv(100) == b"STOPPING=1"
    said, warned = server.end()
    assert said.splitlines() == ["drain 10", "closed"]
    assert server.process.returncode == 128 + signal.SIGTERM
    refused, read, reloaded, stopping, others = warned.splitlines()
    assert refused == "qflow: a login as 'bob' from 127.0.0.1 was refused"
    assert read == "qflow: users, tokens and certificates are read anew"
    assert reloaded.startswith("qflow: nothing is reloaded, what was loaded before stays: the users file ")
    assert stopping == "qflow: SIGTERM: clients have 10 s to finish; a second signal ends at once"
    assert others == "qflow: a login as 'anna' from 127.0.0.1 was refused, and 1 more since the last line"
    with qflow.open(tmp_path / "spool") as broker:
        assert broker.queues() == ["served"]
        assert broker.check() == []


def test_processes_of_the_host_that_hold_something_finish_it(start: Any, tmp_path: Path) -> None:
    """Whatever other doors there are; those that hold nothing end at once."""
    server = start("spool", "--amqp", "127.0.0.1:0", "--grace", "3600")
    server.port("amqp")
    with qflow.connect(tmp_path / "spool") as working, qflow.connect(tmp_path / "spool") as idle:
        jobs = working.declare_queue("jobs")
        jobs.put_many([b"at hand", b"left"])
        delivery = jobs.get()
        server.signal(signal.SIGTERM)
        with pytest.raises(qflow.BrokerClosed):
            idle.declare_queue("others").get()
        assert server.line() == "drain 3600"
        assert server.process.poll() is None
        delivery.ack(wait=True)
        server.end()
    assert server.process.returncode == 128 + signal.SIGTERM
    with qflow.open(tmp_path / "spool") as broker:
        assert broker.queue("jobs").get_many(10).bodies == [b"left"]


def test_a_second_signal_ends_a_drain(start: Any) -> None:
    """The spool is closed all the same; SIGINT is 130."""
    server = start("spool", "--amqp", "localhost:0", "--grace", "3600", FAKE_DRAIN="endless")
    server.port("amqp")
    server.signal(signal.SIGTERM)
    while server.line() != "drain 3600":
        pass  # localhost may be two addresses
    server.signal(signal.SIGINT)
    said, _ = server.end()
    assert said == "closed\n"
    assert server.process.returncode == 128 + signal.SIGINT


def test_tls_asks_for_a_certificate_and_takes_new_ones(start: Any, tmp_path: Path) -> None:
    """A broken certificate at a reload leaves the old one."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    shutil.copy(PEM / "server.pem", cert)
    shutil.copy(PEM / "server.key", key)
    server = start(
        *("spool", "--amqp", "127.0.0.1:0", "--amqps", "127.0.0.1:0"),
        *("--cert", cert, "--key", key, "--ca", PEM / "ca.pem"),
    )
    plain, secure = server.port("amqp"), server.port("amqps")
    assert log_in(plain, "guest", "guest") == "guest"
    assert log_in(secure, "guest", "guest", trusting()) == "guest"
    assert shown(secure) == certificate_of("server")
    with suppress(ssl.SSLError, ConnectionError):  # the client may have said all before it hears of it
        assert log_in(secure, "guest", "guest", trusting("")) == ""
    refused = f"qflow: TLS with 127.0.0.1 failed at 127.0.0.1:{secure}: the client shows no certificate: give it one"
    assert server.process.stderr.readline().startswith(refused)
    shutil.copy(PEM / "renewed.pem", cert)  # the key is still the other one's
    server.signal(signal.SIGHUP)
    assert server.process.stderr.readline().startswith("qflow: nothing is reloaded")
    assert shown(secure) == certificate_of("server")
    shutil.copy(PEM / "renewed.key", key)
    server.signal(signal.SIGHUP)
    assert [server.line(), server.line()] == ["reloaded guest", "reloaded guest with certificates"]
    assert shown(secure) == shown(secure, server_hostname=None) == certificate_of("renewed")
    assert log_in(secure, "guest", "guest", trusting()) == "guest"
    server.signal(signal.SIGINT)
    server.end()
    assert server.process.returncode == 128 + signal.SIGINT


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "say what to serve: --amqp, --amqps, --mqtt, --mqtts, --ws, --wss"),
        (("--amqp", "5672"), "an address is HOST:PORT"),
        (("--amqp", "0.0.0.0:0"), "0.0.0.0:0 can be reached by others than this machine, so it needs --users FILE"),
        (("--amqp", "[::]:0"), "[::]:0 can be reached by others"),
        (
            ("--amqp", "127.0.0.1:0", "--amqps", "192.0.2.1:0", "--cert", "a", "--key", "b"),
            "192.0.2.1:0 can be reached",
        ),
        (("--amqp", "no..host:0"), "'no..host' is no address of this machine"),
        (("--amqp", "127.0.0.1:0", "--users", "nowhere"), "there is no users file 'nowhere'"),
        (
            ("--amqp", "127.0.0.1:0", "--cert", "x"),
            "--cert, --key and --ca are for --amqps, --mqtts, --wss, --https and --flight",
        ),
        (("--amqps", "127.0.0.1:0"), "--amqps needs --cert and --key"),
        (("--mqtt", "127.0.0.1:0", "--wss", "127.0.0.1:0"), "--wss needs --cert and --key"),
        (("--mqtt", "127.0.0.1:0", "--ws", "0.0.0.0:0"), "0.0.0.0:0 can be reached by others"),
        (("--amqps", "127.0.0.1:0", "--cert", "nowhere", "--key", "k"), "'nowhere' cannot be read: No such file"),
        (("--amqp", "127.0.0.1:0", "--grace", "nan"), "nan is no number of seconds"),
    ],
)
def test_what_is_wrong_is_said_before_a_spool_is_made(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With exit code 2."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["serve", "spool", *arguments])
    assert done.exit_code == 2
    assert said in done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("--amqp", "127.0.0.1:0", "--users", "pipe"),
        ("--amqps", "127.0.0.1:0", "--cert", PEM / "server.pem", "--key", "pipe"),
        ("--amqps", "127.0.0.1:0", "--cert", PEM / "server.pem", "--key", PEM / "server.key", "--ca", "pipe"),
        ("--flight", "127.0.0.1:0", "--token-file", "pipe"),
    ],
)
def test_a_pipe_in_place_of_a_file_is_refused(arguments: tuple[object, ...], start: Any, tmp_path: Path) -> None:
    """As bash has it for `<(…)`: what it gives is gone once it was read."""
    if "--flight" in arguments:
        pytest.importorskip("pyarrow.flight")
    os.mkfifo(tmp_path / "pipe")
    server = start("spool", *arguments)
    assert server.end()[1].startswith(
        "qflow: 'pipe' is no regular file: it is read more than once, and again on SIGHUP"
    )
    assert (server.process.returncode, os.listdir(tmp_path)) == (2, ["pipe"])


def test_a_users_file_that_has_become_a_pipe_is_not_waited_for(start: Any, tmp_path: Path) -> None:
    """The users stay as they were, and the server ends when it is told to."""
    users = tmp_path / "users.json"
    write_users(users, "anna")
    server = start("spool", "--amqp", "127.0.0.1:0", "--users", users)
    port = server.port("amqp")
    users.unlink()
    os.mkfifo(users)
    server.signal(signal.SIGHUP)
    assert server.process.stderr.readline().startswith("qflow: nothing is reloaded, what was loaded before stays: '")
    assert log_in(port, "anna", "secret") == "anna"
    server.signal(signal.SIGTERM)
    server.end()
    assert server.process.returncode == 128 + signal.SIGTERM


def test_an_option_that_is_given_twice_opens_two_doors(start: Any) -> None:
    """In the order of the command line."""
    server = start("spool", "--amqp", "127.0.0.1:0", "--amqp", "127.0.0.1:0")
    ports = [server.port("amqp"), server.port("amqp")]
    assert [log_in(port, "guest", "guest") for port in ports] == ["guest", "guest"]
    server.signal(signal.SIGTERM)
    assert [server.line() for _ in range(4)] == ["drain 10", "drain 10", "closed", "closed"]
    server.end()
    assert server.process.returncode == 128 + signal.SIGTERM


def test_a_server_ends_with_a_broker_that_has_failed(start: Any) -> None:
    """Its clients can be served again when a new process opens the spool."""
    server = start("spool", "--amqp", "127.0.0.1:0", FAKE_LOG="fails")
    said = sorted(server.line() for _ in range(2))  # the first is written by a thread, the other by the door itself
    assert (said[0].partition(" on 127.0.0.1:")[0], said[1]) == ("amqp", "closed")
    output, errors = server.end()
    assert output == ""
    assert errors.splitlines()[-1] == "qflow: a commit failed"  # maintenance may have seen it before
    assert server.process.returncode == 4


def test_without_pamqp_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to a program that embeds the server. An import that fails otherwise is a fault, and raised."""
    monkeypatch.delitem(sys.modules, "qflow.amqp.server.server", raising=False)
    monkeypatch.delitem(sys.modules, "qflow.amqp.errors", raising=False)
    monkeypatch.setitem(sys.modules, "pamqp", None)
    done = CliRunner().invoke(app, ["serve", str(tmp_path / "spool"), "--amqp", "127.0.0.1:0"])
    assert done.exit_code == 2
    assert "pip install pamqp" in done.stderr
    with pytest.raises(qflow.NotFound, match="AMQP needs the package pamqp"):
        _ = qflow.amqp.serve
    assert os.listdir(tmp_path) == []


def test_without_websockets_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a spool is made."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "websockets"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "qflow.mqtt.server.websockets", raising=False)
    monkeypatch.setitem(sys.modules, "websockets", None)
    done = CliRunner().invoke(app, ["serve", str(tmp_path / "spool"), "--ws", "127.0.0.1:0"])
    assert done.exit_code == 2
    assert "MQTT over WebSockets needs the package websockets, which is not installed: pip install" in done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("lacks", ["pyarrow", "numpy"])
def test_what_arrow_flight_lacks_is_named_with_all_that_it_needs(tmp_path: Path, lacks: str) -> None:
    """PyArrow brings no numpy. In a process of its own: neither is imported twice by one."""
    pytest.importorskip("pyarrow.flight", reason="Arrow Flight is not installed: pip install .[net]")
    script = f"import sys; sys.modules[{lacks!r}] = None; from qflow.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "serve", tmp_path / "spool", "--flight", "127.0.0.1:0"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    needed = f"Arrow Flight needs the package {lacks}, which is not installed: pip install pyarrow numpy"
    assert (done.returncode, done.stderr) == (2, f"qflow: {needed}\n")
    assert os.listdir(tmp_path) == []


def test_an_expired_certificate_is_told_of_at_the_start(start: Any) -> None:
    server = start(
        *("spool", "--amqps", "127.0.0.1:0", "--cert", PEM / "expired.pem", "--key", PEM / "expired.key"),
    )
    server.port("amqps")
    line = f"qflow: the certificate '{PEM / 'expired.pem'}' has expired at 2021-01-01 00:00 UTC, and clients refuse it"
    assert server.process.stderr.readline().startswith(line)


@pytest.mark.parametrize(
    ("cert", "key", "ca", "said"),
    [
        ("server.pem", "renewed.key", None, r"renewed\.key' is the key of another certificate than '.*server\.pem'"),
        ("server.pem", "weak.key", None, r"weak\.key' is the key of another certificate than '.*server\.pem'"),
        (
            "server.key",
            "server.key",
            None,
            r"server\.key' is no certificate, or has one that is cut off: give it in PEM",
        ),
        ("junk", "junk", None, r"junk' is no certificate, or has one that is cut off: give it in PEM"),
        ("cut.pem", "server.key", None, r"cut\.pem' is no certificate, or has one that is cut off: give it in PEM"),
        (
            "server.pem",
            "server.pem",
            None,
            r"server\.pem' is no private key, or is cut off: give one in PEM, from a line",
        ),
        ("server.pem", "junk", None, r"junk' is no private key, or is cut off: give one in PEM"),
        ("server.pem", "cut.key", None, r"cut\.key' is no private key, or is cut off: give one in PEM"),
        (
            "weak.pem",
            "weak.key",
            None,
            r"the certificate '.*weak\.pem' is not taken, make another one: ee key too small",
        ),
        ("server.pem", "encrypted.key", None, "is encrypted"),
        (
            "server.pem",
            "server.key",
            "server.key",
            r"server\.key' is no certificate, or has one that is cut off: give it in PEM",
        ),
        ("server.pem", "server.key", "junk", r"junk' is no certificate, or has one that is cut off: give it in PEM"),
        ("server.pem", "server.key", "nowhere", "cannot be read"),
    ],
)
def test_certificates_that_are_wrong_are_named(cert: str, key: str, ca: str | None, said: str, tmp_path: Path) -> None:
    """With what to give instead, and no text of OpenSSL's; nobody is asked for the password of a key."""
    shutil.copytree(PEM, tmp_path, dirs_exist_ok=True)
    (tmp_path / "junk").write_bytes(b"junk\n\xff")
    for name in ("pem", "key"):
        whole = (PEM / f"server.{name}").read_text()
        (tmp_path / f"cut.{name}").write_text(whole[: len(whole) // 2])
    with pytest.raises(qflow.InvalidArgument, match=said) as caught:
        Certificates(tmp_path / cert, tmp_path / key, None if ca is None else tmp_path / ca).context()
    assert "ssl" not in str(caught.value).lower()


def test_a_port_and_a_spool_that_are_in_use_are_said_to_be(start: Any, tmp_path: Path) -> None:
    """The spool is exit code 3, as everywhere; the port 2."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start("spool", "--amqp", f"127.0.0.1:{port}")
        assert server.end()[1] == f"qflow: amqp cannot listen on 127.0.0.1:{port}: address already in use\n"
        assert server.process.returncode == 2
    with qflow.open(tmp_path / "spool"):
        server = start("spool", "--amqp", "127.0.0.1:0")
        said, warned = server.end()
    assert (said, server.process.returncode) == ("", 3)
    assert len(warned.splitlines()) == 1


@pytest.mark.parametrize(("door", "host"), [("amqp", "127.0.0.1"), ("mqtt", "localhost"), ("http", "127.0.0.1")])
def test_a_start_at_a_port_that_is_in_use_leaves_nothing(door: str, host: str, start: Any, tmp_path: Path) -> None:
    """No directory is made for a spool."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"{host}:{taken.getsockname()[1]}"
        said = "", f"qflow: {door} cannot listen on {address}: address already in use\n"
        assert start("new/spool", f"--{door}", address).end() == said
        assert os.listdir(tmp_path) == []


def test_a_spool_at_whose_port_somebody_listens_is_left_as_it_is(start: Any, tmp_path: Path) -> None:
    """Also a directory that is empty; that another process owns it is said first."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = "", f"qflow: mqtt cannot listen on {address}: address already in use\n"
        (tmp_path / "empty").mkdir()
        assert start("empty", "--mqtt", address).end() == said
        assert os.listdir(tmp_path / "empty") == []
        with qflow.open(tmp_path / "spool"):
            owned = start("spool", "--mqtt", address)
            assert len(owned.end()[1].splitlines()) == 1
            assert owned.process.returncode == 3
        assert start("spool", "--mqtt", address).end() == said
    with qflow.open(tmp_path / "spool") as broker:
        assert (broker.stats().queues, broker.stats().streams) == ({}, {})


def test_two_doors_at_one_address_leave_nothing(start: Any, tmp_path: Path) -> None:
    """As one that is in use."""
    address = f"127.0.0.1:{free_port()}"
    server = start("spool", "--mqtt", address, "--http", address)
    assert server.end() == ("", f"qflow: http cannot listen on {address}: address already in use\n")
    assert (server.process.returncode, os.listdir(tmp_path)) == (2, [])
