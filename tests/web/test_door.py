"""The door itself: sockets, the clients of doors beside it, and its end."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import struct
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import qflow.aio
import qflow.amqp
import qflow.mqtt
import qflow.web
from qflow.errors import InvalidArgument, NotFound

pytest.importorskip("starlette")
pytest.importorskip("jinja2")
h11 = pytest.importorskip("h11")
httpx = pytest.importorskip("httpx")
web_served = pytest.importorskip("web_served")


def test_clients_of_the_doors_beside_it_are_shown(spool: Path) -> None:
    """Protocol, name and user of each; none when they have gone."""
    aio_pika = pytest.importorskip("aio_pika")

    async def test() -> None:
        async with (
            qflow.aio.open(spool) as broker,
            await qflow.web.serve(broker, port=0) as server,
            await qflow.amqp.serve(broker, port=0) as amqp,
            await qflow.mqtt.serve(broker, port=0) as mqtt,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as browser,
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", mqtt.port)
            writer.write(b"\x10\x10\x00\x04MQTT\x04\x02\x00\x3c\x00\x04pump")
            await reader.readexactly(4)
            connection = await aio_pika.connect(
                f"amqp://guest:guest@127.0.0.1:{amqp.port}/", client_properties={"connection_name": "mailer"}
            )
            found = (await browser.get("/api/connections")).json()["connections"]
            assert sorted((one["door"], one["name"], one["user"]) for one in found) == [
                ("amqp", "mailer", "guest"),
                ("mqtt", "pump", ""),
            ]
            page = (await browser.get("/connections")).text
            assert "mailer" in page
            assert "pump" in page
            await connection.close()
            writer.close()
            await writer.wait_closed()

    web_served.run(test)


def test_a_request_that_does_not_come_to_its_end_is_closed(spool: Path) -> None:
    """One that is idle between requests, or has said nothing, takes a place for a while only."""

    async def test() -> None:
        async with qflow.aio.open(spool) as broker, await qflow.web.serve(broker, port=0) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET / HTTP/1.1\r\nHost: loc")
            other, talking = await asyncio.open_connection("127.0.0.1", server.port)
            talking.write(b"GET /static/page.css HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await other.readline()).startswith(b"HTTP/1.1 200")
            for _ in range(qflow.web.door.PATIENCE_LOOKS + 1):
                server.look()
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
            talking.close()
            writer.close()

    web_served.run(test)


@pytest.mark.parametrize("ends", ["closes", "resets"])
def test_a_connection_that_has_ended_is_freed_at_once(spool: Path, ends: str) -> None:
    """With the buffers that it has with TLS: a timer would keep it for a minute, and then the garbage collector is to find it."""

    async def test() -> None:
        async with qflow.aio.open(spool) as broker, await qflow.web.serve(broker, port=0) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET /static/page.css HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            there = weakref.ref(next(iter(server._state.connections)))
            await until(lambda: getattr(there(), "timeout_keep_alive_task", None) is not None)
            if ends == "closes":
                writer.close()
            else:
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            await until(lambda: not server._state.connections and not server._state.tasks)
            for _ in range(10):  # turns of the loop, in which others let go of it
                await asyncio.sleep(0)
            assert there() is None

    gc.disable()
    try:
        web_served.run(test)
    finally:
        gc.enable()


async def until(holds: Callable[[], bool]) -> None:
    """Let the loop go on until something holds."""
    while not holds():
        await asyncio.sleep(0)


def test_the_time_for_a_request_begins_with_it(spool: Path) -> None:
    """Neither what a connection idled before counts, nor the requests that came on it."""

    async def test() -> None:
        async with qflow.aio.open(spool) as broker, await qflow.web.serve(broker, port=0) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)

            async def answer() -> bytes:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]))
                return head[:12]

            def look() -> None:
                for _ in range(qflow.web.door.PATIENCE_LOOKS):
                    server.look()

            await until(lambda: bool(server._state.connections))
            (protocol,) = server._state.connections
            for _ in range(3):
                writer.write(b"GET /static/page.css HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert await answer() == b"HTTP/1.1 200"
                await until(lambda: protocol.timeout_keep_alive_task is not None)
                look()
                writer.write(b"POST /api/publish HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n")
                await until(lambda: protocol.timeout_keep_alive_task is None)
                look()
                writer.write(b"Content-Type: application/json\r\n\r\n{")
                await until(lambda: protocol.conn.their_state is h11.SEND_BODY)
                look()
                writer.write(b'"topic":')
                assert await answer() == b"HTTP/1.1 400"
            writer.close()

    web_served.run(test)


def test_who_reads_no_answer_is_closed_and_who_reads_slowly_is_not(spool: Path) -> None:
    """As long as some of it is taken between looks."""

    async def test() -> None:
        async with qflow.aio.open(spool) as broker, await qflow.web.serve(broker, port=0) as server:
            loop = asyncio.get_running_loop()
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                await loop.sock_connect(client, ("127.0.0.1", server.port))
                asked = b"GET /static/uPlot.iife.min.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
                await loop.sock_sendall(client, asked * 1000)
                await until(lambda: bool(server._state.connections))
                (protocol,) = server._state.connections

                await until(lambda: protocol.flow.write_paused)
                for _ in range(qflow.web.door.PATIENCE_LOOKS + 2):
                    server.look()
                    read = 0
                    while read < 65536:
                        read += len(await loop.sock_recv(client, 65536))
                assert not protocol.transport.is_closing()
                while server._state.connections:
                    server.look()
                    await asyncio.sleep(0)

    web_served.run(test)


def test_a_connection_that_is_closing_is_not_closed_again(spool: Path) -> None:
    """By TLS nothing can be asked of it then, nor could it be ended."""

    async def test() -> None:
        async with qflow.aio.open(spool) as broker, await qflow.web.serve(broker, port=0) as server:
            shut: list[str] = []
            transport = SimpleNamespace(is_closing=lambda: True, abort=lambda: shut.append("at once"))
            closing = Mock(transport=transport, shutdown=lambda: shut.append("again"))
            server._state.connections.add(closing)
            await server.drain(0.0)
            await server.close()
            server._state.connections.remove(closing)
            assert shut == ["at once"]

    web_served.run(test)


def test_a_close_that_is_cancelled_has_closed_the_connections(spool: Path) -> None:
    """Closing again does nothing, so nobody else would."""

    async def test() -> None:
        async with qflow.aio.open(spool) as broker, await qflow.web.serve(broker, port=0) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            while not server._state.connections:
                await asyncio.sleep(0)
            closing = asyncio.create_task(server.close())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait([closing])
            with suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 30) == b""
            writer.close()
            assert not server.sockets

    web_served.run(test)


def test_it_listens_for_others_only_with_users(spool: Path) -> None:
    """And says so."""

    async def test() -> None:
        async with qflow.aio.open(spool) as broker:
            with pytest.raises(InvalidArgument, match="give users"):
                await qflow.web.serve(broker, host="0.0.0.0", port=0)
            async with await qflow.web.serve(broker, port=0) as server:
                assert server.site.cookie == f"qflow-{server.port}"
                port = server.port
                await server.drain(1.0)
                with pytest.raises(ConnectionRefusedError):
                    await asyncio.open_connection("127.0.0.1", port)

    web_served.run(test)


def test_without_its_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them at once, whichever is missed first."""
    monkeypatch.delitem(qflow.web.__dict__, "serve", raising=False)
    monkeypatch.setattr(
        "importlib.import_module",
        lambda name: (_ for _ in ()).throw(ModuleNotFoundError("no", name="uvicorn")) if name == "uvicorn" else None,
    )
    with pytest.raises(NotFound, match="needs the package uvicorn, .*: pip install starlette uvicorn jinja2$"):
        _ = qflow.web.serve


def test_connections_that_ask_nothing_are_bounded(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a descriptor, which spill files need, too."""
    monkeypatch.setattr("qflow.web.door.MOST_CONNECTIONS", 2)
    monkeypatch.setattr("qflow.web.door.MOST_REFUSED", 1)

    async def test() -> None:
        async with qflow.aio.open(spool) as broker, await qflow.web.serve(broker, port=0) as server:
            first = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
            while len(server._state.connections) < 3:
                await asyncio.sleep(0)
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
            assert len(server._state.connections) == 3
            reader, writer = first[0]
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await reader.readline()).split()[1] == b"503"
            for _, writer in first:
                writer.close()

    web_served.run(test)


def test_the_logger_of_other_servers_of_uvicorn_is_left_alone(
    spool: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A program that has one lost its lines. A fault of the page is told by a logger of qflow."""
    others = logging.getLogger("uvicorn.error")
    before = others.level

    async def fault(_: object) -> None:
        raise LookupError("no such thing")

    monkeypatch.setattr("qflow.web.figures.Figures.look", fault)

    async def test() -> None:
        async with qflow.aio.open(spool) as broker, await qflow.web.serve(broker, port=0) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await reader.readline()).split()[1] == b"500"
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"no request\r\n\r\n")
            assert (await reader.readline()).split()[1] == b"400"
            writer.close()

    web_served.run(test)
    assert others.level == before
    assert [one.name for one in caplog.records if one.levelno >= logging.WARNING] == ["qflow.web.faults"]
    assert "no such thing" in caplog.text
