"""What the doors in an event loop have alike."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
from contextlib import suppress
from pathlib import Path

import pytest

from doors.event_loop import run
from qflow.serving.certificates import Certificates
from qflow.serving.listening import Listening

PEM = Path(__file__).parent / "certificates"


class Door(Listening):
    """Answers whether the system looks, now and then, if a client that says nothing is still there."""

    async def start(self) -> None:
        await self._listen(self._answer, "127.0.0.1", 0, 10)

    async def _close(self) -> None:
        await self._end_listening()

    def _answer(self) -> asyncio.StreamReaderProtocol:
        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            taken = writer.get_extra_info("socket")
            writer.write(b"%d" % taken.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
            writer.close()

        return asyncio.StreamReaderProtocol(asyncio.StreamReader(), connected)


@pytest.mark.parametrize("has_tls", [False, True])
def test_a_client_whose_host_has_gone_is_noticed(has_tls: bool) -> None:
    """Also where it wants no heartbeats: it would be there for good."""
    context = Certificates(PEM / "server.pem", PEM / "server.key").context() if has_tls else None
    trust = ssl.create_default_context(cafile=PEM / "ca.pem") if has_tls else None

    async def scenario() -> bytes:
        async with Door(context) as door:
            await door.start()
            reader, writer = await asyncio.open_connection("localhost", door.port, ssl=trust)
            answer = await reader.read()
            writer.close()
            return answer

    assert run(scenario()) == b"1"


@pytest.mark.parametrize("turns", range(5))
def test_a_client_that_comes_as_the_door_closes_is_not_left_waiting(turns: int) -> None:
    """However far the loop is with it: one it has accepted, and gives to nobody, would hang until garbage is looked for."""

    async def scenario() -> None:
        async with Door(None) as door:
            await door.start()
            clients = [socket.create_connection(("127.0.0.1", door.port), timeout=60) for _ in range(3)]
            for _ in range(turns):
                await asyncio.sleep(0)
        for client in clients:
            with client, suppress(ConnectionResetError):
                await asyncio.to_thread(client.recv, 1)

    gc.disable()
    try:
        run(scenario())
    finally:
        gc.enable()
