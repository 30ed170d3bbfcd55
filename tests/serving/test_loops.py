"""What the event loop of a process that serves does otherwise than those of other programs."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import socket
import ssl
import weakref
from asyncio import sslproto
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from doors.event_loop import run, until
from qflow.serving.certificates import Certificates
from qflow.serving.loops import let_go_of_failed_handshakes, telling_of_few_files

PEM = Path(__file__).parent / "certificates"


class Door(asyncio.Protocol):
    """What a door makes for a connection."""


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def _look(port: int) -> None:
    """Look whether a port is open."""
    socket.create_connection(("127.0.0.1", port)).close()


def _talk_otherwise(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as client, suppress(ConnectionError):
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        client.recv(1)


def _distrust(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as client, pytest.raises(ssl.SSLCertVerificationError):
        ssl.create_default_context().wrap_socket(client, server_hostname="localhost")


@pytest.mark.parametrize("fail", [_look, _talk_otherwise, _distrust])
@pytest.mark.usefixtures("without_collector")
def test_a_handshake_that_fails_leaves_nothing(
    fail: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The garbage collector is not needed for what it held, its buffers and what the door made; no line of the log."""
    monkeypatch.setattr(sslproto, "SSLProtocol", sslproto.SSLProtocol)
    let_go_of_failed_handshakes()
    made: list[weakref.ref[Door]] = []

    def make() -> Door:
        protocol = Door()
        made.append(weakref.ref(protocol))
        return protocol

    async def serve() -> None:
        context = Certificates(PEM / "server.pem", PEM / "server.key").context()
        async with await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0, ssl=context) as server:
            port = server.sockets[0].getsockname()[1]
            for _ in range(3):
                await asyncio.to_thread(fail, port)
            await until(lambda: len(made) == 3 and not any(one() for one in made))

    with caplog.at_level(logging.WARNING):
        run(serve())
    assert caplog.records == []


def test_a_loop_that_can_accept_nobody_says_so_in_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And not for each try, of which there are as many a second as may wait to be accepted. Other faults are as ever."""
    monkeypatch.setattr("asyncio.constants.ACCEPT_RETRY_DELAY", 0)
    accept, refusals = socket.socket.accept, [OSError(errno.EMFILE, os.strerror(errno.EMFILE)) for _ in range(300)]

    def try_to(listening: socket.socket) -> tuple[socket.socket, object]:
        if refusals:
            raise refusals.pop()
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", try_to)

    async def serve() -> str:
        loop = asyncio.get_running_loop()
        with telling_of_few_files():
            async with await loop.create_server(Door, "127.0.0.1", 0) as server:
                host, port = server.sockets[0].getsockname()
                await asyncio.to_thread(_look, port)
                await until(lambda: not refusals)
                loop.call_soon(lambda: 1 // 0)
                await until(lambda: len(caplog.records) >= 2)
        return f"{host}:{port}"

    with caplog.at_level(logging.WARNING):
        address = run(serve())
    short, other, last = caplog.records
    assert (short.name, last.name) == ("qflow", "qflow")
    remedy = "this process has too many open files: close some, or raise `ulimit -n`"
    assert short.getMessage() == last.getMessage() == f"{address}: nobody else is let in for now: {remedy}"
    assert other.exc_info is not None
    assert other.exc_info[0] is ZeroDivisionError
