"""What the event loop of a process that serves does otherwise than those of other programs."""

from __future__ import annotations

import asyncio
import gc
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
from qflow.serving.loops import let_go_of_failed_handshakes

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
def test_a_handshake_that_fails_leaves_nothing(fail: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector is not needed for what it held: its buffers, and what the door made for it."""
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

    run(serve())
