"""Doors in one process: opened, reloaded, drained, closed; and the service manager, who is told."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from doors.event_loop import run, until
from qflow.errors import BrokerFailed, InvalidArgument
from qflow.serving import doors
from qflow.serving.addresses import Address
from qflow.serving.certificates import DAY_S, Validity
from qflow.serving.doors import Opening, Secrets, Service
from qflow.serving.notify import notify, reloading
from qflow.serving.users import Users

HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Listening:
    def __init__(self, *name: Any) -> None:
        self._name = name

    def getsockname(self) -> tuple[Any, ...]:
        return self._name


class FakeDoor:
    """Notes what it is told, and drains when it may."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log = log
        self.name = name
        self.may_drain = asyncio.Event()
        self.failing: Exception | None = None

    @property
    def sockets(self) -> Sequence[Listening]:
        return [Listening("127.0.0.1", 5672), Listening("::1", 5672, 0, 0)]

    async def drain(self, grace_s: float) -> None:
        self.log.append(f"{self.name} drains for {grace_s:g}")
        await self.may_drain.wait()
        if self.failing is not None:
            raise self.failing
        self.log.append(f"{self.name} is drained")

    async def close(self) -> None:
        self.log.append(f"{self.name} is closed")

    def reload(self, *, users: Users | None, ssl: ssl.SSLContext | None) -> None:
        self.log.append(f"{self.name} has {'users' if users else 'guest'} and {'TLS' if ssl else 'no TLS'}")


class Bench:
    """A service of two doors, one with TLS, and all that is heard of it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.doors: list[FakeDoor] = []
        self.secrets = Secrets(Users(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        self.wrong: Exception | None = None
        self.refused: OSError | None = None
        self.failure: Exception | None = None
        openings = [
            Opening("plain", Address("localhost", 5672), self._open),
            Opening("secure", Address("::1", 5671), self._open, has_tls=True),
        ]
        self.service = Service(
            openings,
            self._read,
            grace_s=5,
            tell=self._heard,
            warn=self._heard,
            notify=self._notified,
            check=self._check,
        )

    async def up(self) -> asyncio.Task[signal.Signals]:
        """Start it; return when it is ready."""
        running = asyncio.create_task(self.service.run())
        await until(lambda: "READY=1" in self.log)
        return running

    def _heard(self, line: str) -> None:
        self.log.append(line)

    def _notified(self, state: str) -> None:
        self.log.append(state.partition("\n")[0])

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _read(self) -> Secrets:
        if self.wrong is not None:
            raise self.wrong
        return self.secrets

    async def _open(self, address: Address, users: Users | None, context: ssl.SSLContext | None) -> FakeDoor:
        name = "secure" if context else "plain"
        if name == "secure" and self.refused is not None:
            raise self.refused
        self.log.append(f"{name} opens at {address}{' with users' if users else ''}")
        self.doors.append(FakeDoor(self.log, name))
        return self.doors[-1]


def test_doors_are_opened_told_of_drained_at_once_and_closed() -> None:
    """Ready is told when all of them listen, and that it ends before the first is drained."""

    async def scenario() -> list[str]:
        bench = Bench()
        running = await bench.up()
        bench.service.receive(signal.SIGTERM)
        await until(lambda: "secure drains for 5" in bench.log)
        for door in bench.doors:
            door.may_drain.set()
        assert await running is signal.SIGTERM
        return bench.log

    assert run(scenario()) == [
        "plain opens at localhost:5672 with users",
        "secure opens at [::1]:5671 with users",
        "plain on 127.0.0.1:5672",
        "plain on [::1]:5672",
        "secure on 127.0.0.1:5672",
        "secure on [::1]:5672",
        "READY=1",
        "STOPPING=1",
        "SIGTERM: clients have 5 s to finish; a second signal ends at once",
        "plain drains for 5",
        "secure drains for 5",
        "plain is drained",
        "secure is drained",
        "secure is closed",
        "plain is closed",
    ]


def test_signals_end_nothing_before_the_loop_does() -> None:
    """The spool beneath the doors is closed after them: one more signal would cut that off."""

    async def scenario() -> None:
        bench = Bench()
        running = await bench.up()
        bench.service.receive(signal.SIGTERM)
        bench.service.receive(signal.SIGTERM)
        await running
        assert signal.SIG_DFL not in map(signal.getsignal, HEARD)

    usual = [signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL for number in HEARD]
    before = list(map(signal.signal, HEARD, usual))  # others in this process may have had their own, as Spark has
    try:
        run(scenario())
        assert list(map(signal.getsignal, HEARD)) == usual
    finally:
        list(map(signal.signal, HEARD, before))


def test_a_second_signal_ends_the_drain_at_once() -> None:
    """It is the one that the exit code tells of."""

    async def scenario() -> list[str]:
        bench = Bench()
        running = await bench.up()
        bench.service.receive(signal.SIGTERM)
        await until(lambda: "secure drains for 5" in bench.log)
        bench.service.receive(signal.SIGINT)
        assert await running is signal.SIGINT
        return bench.log[-3:]

    assert run(scenario()) == ["secure drains for 5", "secure is closed", "plain is closed"]


def test_a_door_that_fails_to_drain_lets_the_others_finish() -> None:
    """Its error is raised when all doors are closed."""

    async def scenario() -> list[str]:
        bench = Bench()
        running = await bench.up()
        plain, secure = bench.doors
        plain.failing = RuntimeError("the door is stuck")
        bench.service.receive(signal.SIGTERM)
        plain.may_drain.set()
        await until(lambda: "secure drains for 5" in bench.log)
        secure.may_drain.set()
        with pytest.raises(RuntimeError, match="stuck"):
            await running
        return bench.log[-3:]

    assert run(scenario()) == ["secure is drained", "secure is closed", "plain is closed"]


def test_a_reload_gives_new_users_and_certificates_to_the_doors() -> None:
    """The one without TLS gets no certificates; the manager is told at both ends."""

    async def scenario() -> list[str]:
        bench = Bench()
        running = await bench.up()
        bench.log.clear()
        bench.service.receive(signal.SIGHUP)
        await until(lambda: "READY=1" in bench.log)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return bench.log

    assert run(scenario()) == [
        "RELOADING=1",
        "plain has users and no TLS",
        "secure has users and TLS",
        "users, tokens and certificates are read anew",
        "READY=1",
        "secure is closed",
        "plain is closed",
    ]


def test_a_certificate_that_expires_is_told_of_when_it_is_read_and_again() -> None:
    """Once a day, until another one is read."""

    class Expiring(Validity):
        def warning(self, now_s: float) -> str | None:
            return f"expires: {self.path}"

        def rest_s(self, now_s: float) -> float:
            return 0.0 if bench.log.count("expires: old") < 2 else DAY_S

    bench = Bench()
    bench.secrets = bench.secrets._replace(validity=Expiring(Path("old"), 0.0, 0.0))

    async def scenario() -> list[str]:
        running = await bench.up()
        await until(lambda: bench.log.count("expires: old") == 3)
        bench.secrets = bench.secrets._replace(validity=Expiring(Path("new"), 0.0, 0.0))
        bench.service.receive(signal.SIGHUP)
        await until(lambda: "expires: new" in bench.log)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return [line for line in bench.log if "expires" in line or "anew" in line]

    old, new = ["expires: old"] * 3, ["users, tokens and certificates are read anew", "expires: new"]
    assert run(scenario()) == [*old, *new]


@pytest.mark.parametrize("error", [InvalidArgument("line 3 is wrong"), PermissionError(13, "Permission denied")])
def test_what_is_broken_at_a_reload_leaves_the_old_and_is_told(error: Exception) -> None:
    """The next reload, of what is right again, is done."""

    async def scenario() -> list[str]:
        bench = Bench()
        running = await bench.up()
        bench.log.clear()
        bench.wrong = error
        bench.service.receive(signal.SIGHUP)
        await until(lambda: "READY=1" in bench.log)
        told = list(bench.log)
        bench.wrong = None
        bench.service.receive(signal.SIGHUP)
        await until(lambda: "secure has users and TLS" in bench.log)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return told

    assert run(scenario()) == [
        "RELOADING=1",
        f"nothing is reloaded, what was loaded before stays: {error}",
        "READY=1",
    ]


def test_a_service_that_cannot_go_on_closes_its_doors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain would wait for what nobody can do any more."""
    monkeypatch.setattr(doors, "LOOK_S", 0)

    async def scenario() -> list[str]:
        bench = Bench()
        running = await bench.up()
        bench.log.clear()
        bench.failure = BrokerFailed("a commit failed")
        with pytest.raises(BrokerFailed, match="a commit failed"):
            await running
        return bench.log

    assert run(scenario()) == ["secure is closed", "plain is closed"]


def test_a_door_that_cannot_listen_closes_those_before_it() -> None:
    """Nothing is told to be ready."""

    async def scenario() -> list[str]:
        bench = Bench()
        bench.refused = OSError(98, "Address already in use")
        with pytest.raises(InvalidArgument, match=r"^secure cannot listen on \[::1\]:5671: address already in use$"):
            await bench.service.run()
        return bench.log

    assert run(scenario()) == ["plain opens at localhost:5672 with users", "plain is closed"]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:5672", Address("127.0.0.1", 5672)),
        ("localhost:0", Address("localhost", 0)),
        ("[::1]:65535", Address("::1", 65535)),
        *((wrong, None) for wrong in ("", ":", "5672", ":5672", "host:", "host:65536", "host:-1", "::1:5672", "h:٣")),
        *((wrong, None) for wrong in ("[]:1", "h\n:1", "h:1 ", "h:http", "[::1]")),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, address: Address | None) -> None:
    """An IPv6 address is in brackets; what is written is read again."""
    if address is None:
        with pytest.raises(InvalidArgument, match="HOST:PORT"):
            Address.parse(text)
    else:
        assert Address.parse(text) == address
        assert Address.parse(str(address)) == address


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_the_service_manager_is_told_by_a_datagram(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a path, or in the abstract name space, where the name begins with `@`."""
    name = str(tmp_path / "notify") if kind == "path" else f"@{tmp_path}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name if kind == "path" else "\0" + name[1:])
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        notify("READY=1")
        assert manager.recv(100) == b"READY=1"
        notify(reloading())
        assert manager.recv(100).startswith(b"RELOADING=1\nMONOTONIC_USEC=")


class Noted(socket.socket):
    """Tells when something is about to be sent."""

    sending = threading.Event()

    def sendall(self, *data: Any) -> None:
        self.sending.set()
        super().sendall(*data)


def test_a_service_manager_that_has_much_to_read_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else it would wait itself, for a service that has told it and will not do so again."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "manager"))
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other,
    ):
        manager.bind(str(tmp_path / "manager"))
        other.connect(str(tmp_path / "manager"))
        other.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                other.send(b"other")
        monkeypatch.setattr(socket, "socket", Noted)
        telling = threading.Thread(target=notify, args=("READY=1",))
        telling.start()
        assert Noted.sending.wait(120)
        manager.settimeout(120)
        while manager.recv(100) == b"other" and not caplog.records:
            pass
        telling.join()
    assert not caplog.records


def test_a_service_manager_that_is_not_there_costs_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Without NOTIFY_SOCKET nobody is told, and nothing said."""
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
    assert not caplog.records
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    notify("READY=1")
    assert "was not told 'READY=1'" in caplog.text
