"""MQTT over WebSockets: what is carried, what is refused, and what ends a connection."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, NegotiationError
from websockets.frames import Frame, Opcode

import qflow.aio
from doors.event_loop import run, turns, until
from mqtt_loop import SetClock
from qflow.mqtt import serve
from qflow.mqtt.server import websockets
from qflow.mqtt.server.websockets import MOST_FRAME_BYTES, MOST_REQUEST_BYTES, WebSockets
from thorough import examples

MIB = 2**20
CLOSED = b"\x88"
"""The frame that ends a connection begins so: a server waits for the answer to it, which these clients give by closing."""


class Echo(asyncio.Protocol):
    """Notes what it is told, and sends back what comes; `close` and `abort` end the connection."""

    def __init__(self) -> None:
        self.got = b""
        self.incomplete = 0
        self.heard: list[str] = []
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.heard.append("made")

    def data_received(self, data: bytes) -> None:
        assert type(data) is bytes
        self.got += data
        if data == b"close":
            self.transport.write(b"bye")
            self.transport.close()
            self.transport.close()
            self.transport.write(b"too late")
        elif data == b"abort":
            self.transport.abort()
        else:
            self.transport.write(data)

    def coming(self, size: int) -> None:
        self.incomplete = size

    def pause_writing(self) -> None:
        self.heard.append("pause")

    def resume_writing(self) -> None:
        self.heard.append("resume")

    def connection_lost(self, error: Exception | None) -> None:
        self.heard.append("lost")


class Serving:
    """A server of echoes."""

    def __init__(self, is_open: bool) -> None:
        self.made: list[Echo] = []
        self.sockets = WebSockets(self._make, lambda: is_open)
        self.port = 0

    def _make(self) -> Echo:
        self.made.append(Echo())
        return self.made[-1]

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/mqtt"


@asynccontextmanager
async def serving(is_open: bool = True) -> AsyncIterator[Serving]:
    server = Serving(is_open)
    listening = await asyncio.get_running_loop().create_server(server.sockets, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        server.sockets.close()
        for echo in server.made:
            echo.transport.abort()
        await until(lambda: all("lost" in echo.heard for echo in server.made))


@asynccontextmanager
async def connected(server: Serving, **options: Any) -> AsyncIterator[ClientConnection]:
    async with connect(server.url, subprotocols=["mqtt"], max_size=None, proxy=None, **options) as client:  # type: ignore[list-item]
        yield client


def request(**headers: str | None) -> bytes:
    """Return a request for the protocol, with headers replaced, or left out."""
    said = {
        "Host": "127.0.0.1",
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": base64.b64encode(bytes(16)).decode(),
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Protocol": "mqtt",
    }
    said |= {name.replace("_", "-"): value for name, value in headers.items()}  # type: ignore[misc]
    lines = "".join(f"{name}: {value}\r\n" for name, value in said.items() if value is not None)
    return f"GET /mqtt HTTP/1.1\r\n{lines}\r\n".encode()


def frame(opcode: Opcode, data: bytes, fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=True)


async def exchanged(server: Serving, *parts: bytes) -> bytes:
    """Send bytes in so many writes; return what comes until the end, which may be an abort."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for part in parts:
        writer.write(part)
        await writer.drain()
        await turns(1)
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def test_bytes_are_carried_in_both_directions() -> None:
    """In frames, whole or in fragments, of which none says where a packet begins."""

    async def scenario() -> None:
        async with serving() as server, connected(server) as client:
            assert client.subprotocol == "mqtt"
            await client.send(b"one")
            assert await client.recv() == b"one"
            await client.send([b"two", b"", b"three"])
            assert [await client.recv(), await client.recv()] == [b"two", b"three"]
            large = os.urandom(MIB)
            await client.send(large)
            assert await client.recv() == large
            await client.send(b"")
            await (await client.ping())
            [echo] = server.made
            assert echo.got == b"one" + b"two" + b"three" + large
            assert echo.transport.get_extra_info("peername")[0] == "127.0.0.1"
            assert echo.transport.get_extra_info("nothing", 7) == 7
            assert not echo.transport.is_closing()

    run(scenario())


def test_what_comes_with_the_request_or_byte_by_byte_is_carried_too() -> None:
    """A client may not wait for the answer."""

    async def scenario() -> None:
        sent = request() + frame(Opcode.BINARY, b"early") + frame(Opcode.CLOSE, b"")
        for parts in ([sent], [sent[at : at + 1] for at in range(len(sent))]):
            async with serving() as server:
                answered = await exchanged(server, *parts)
                assert answered.startswith(b"HTTP/1.1 101 ")
                assert answered.endswith(b"\x88\x00")
                assert server.made[0].got == b"early"
                await until(lambda: server.made[0].heard == ["made", "lost"])

    run(scenario())


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (request(Sec_WebSocket_Protocol=None), b"HTTP/1.1 400 "),
        (request(Sec_WebSocket_Protocol="amqp"), b"HTTP/1.1 400 "),
        (request(Upgrade=None), b"HTTP/1.1 426 "),
        (request(Sec_WebSocket_Version="8"), b"HTTP/1.1 400 "),
        (
            request(Sec_WebSocket_Protocol="amqp") + frame(Opcode.CLOSE, b"") + frame(Opcode.TEXT, b"x"),
            b"HTTP/1.1 400 ",
        ),
        (b"POST / HTTP/1.1\r\n\r\n", None),
        (b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x3c\x00\x00\r\n\r\n", b""),
        (b"\xff" * 100 + b"\r\n\r\n", b""),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 9000 + b"\r\n\r\n", None),
    ],
    # Masks of frames are random: processes of one run would know the test by different names.
    ids=["no protocol", "amqp", "no upgrade", "version 8", "frames", "post", "mqtt", "bytes", "too long"],
)
def test_a_request_for_something_else_is_refused(asked: bytes, answer: bytes | None) -> None:
    """With a status where it was HTTP, and versions of the library agree on it; nothing is carried."""

    async def scenario() -> None:
        async with serving() as server:
            answered = await exchanged(server, asked)
            assert not answered.startswith(b"HTTP/1.1 1")
            if answer is not None:
                assert answered[: len(answer)] == answer
                assert bool(answered) == bool(answer)
            assert server.made == []

    run(scenario())


def test_a_request_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many bytes, or so many seconds, or with the server."""

    async def scenario() -> None:
        async with serving() as server:
            assert await exchanged(server, b"GET / HTTP/1.1\r\n", b"x" * (MOST_REQUEST_BYTES + 1)) == b""
            monkeypatch.setattr(websockets, "HANDSHAKE_S", 0)
            assert await exchanged(server, b"GET / HTTP/1.1\r\n") == b""
            monkeypatch.setattr(websockets, "HANDSHAKE_S", 3600)
            waiting = asyncio.create_task(exchanged(server, b"GET / HTTP/1.1\r\n"))
            await until(lambda: len(server.sockets._asking) == 1)
            server.sockets.close()
            assert await waiting == b""
            assert server.made == []
            await until(lambda: not server.sockets._asking)

    run(scenario())


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(Opcode.TEXT, b"text"), 1003),
        (frame(Opcode.TEXT, b"text") + frame(Opcode.CLOSE, b"") + frame(Opcode.BINARY, b"more"), 0),
        (frame(Opcode.TEXT, b"te", fin=False) + frame(Opcode.CONT, b"xt"), 1003),
        (frame(Opcode.CONT, b"text"), 1002),
        (Frame(Opcode.BINARY, b"not masked").serialize(mask=False), 1002),
        (b"\x82\xff" + (MOST_FRAME_BYTES + 1).to_bytes(8, "big"), 1009),
    ],
    ids=["text", "text and the end", "fragments of text", "a fragment of nothing", "not masked", "too large"],
)
def test_frames_that_may_not_be_end_the_connection(sent: bytes, code: int) -> None:
    """With the code of the reason, unless the client has ended it already; what is carried hears that it is lost, and nothing else."""

    async def scenario() -> None:
        async with serving() as server:
            answered = await exchanged(server, request(), sent)
            closed = answered[answered.index(b"\r\n\r\n") + 4 :]
            assert closed[0] == 0x88
            assert int.from_bytes(closed[2:4], "big") == code
            await until(lambda: server.made[0].heard == ["made", "lost"])
            assert server.made[0].got == b""

    run(scenario())


def test_frames_that_are_not_whole_count_for_their_client(tmp_path: Path) -> None:
    """Among what all clients may hold of packets; it is told so before the connection ends."""

    async def scenario() -> None:
        async with qflow.aio.open(tmp_path / "spool") as broker, await serve(broker, port=0, websockets=True) as server:
            budget = server.house.budget
            budget.most_bytes = 100_000
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            connect = b"\x10\x0e\x00\x04MQTT\x05\x02\x00\x00\x00\x00\x01c"
            whole = frame(Opcode.BINARY, b"\x30\x80\x80\x0c" + bytes(150_000))
            writer.write(request() + frame(Opcode.BINARY, connect) + whole[:90_000])
            await until(lambda: budget._total > 80_000)
            writer.write(whole[90_000:120_000])
            answer = await reader.readuntil(CLOSED)
            assert b"\xe0" in answer
            assert b"this one" in answer
            writer.close()
            await until(lambda: not budget._held)

    run(scenario())


def test_pings_are_no_sign_of_a_client(tmp_path: Path) -> None:
    """Only packets of MQTT are, and frames that carry them."""

    async def scenario() -> None:
        async with qflow.aio.open(tmp_path / "spool") as broker, await serve(broker, port=0, websockets=True) as server:
            clock = server._clock = SetClock()
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            connect = b"\x10\x0e\x00\x04MQTT\x05\x02\x00\x05\x00\x00\x01c"  # every 5 s
            writer.write(request() + frame(Opcode.BINARY, connect))
            await until(lambda: server._hub.connected == 1)
            clock.now_s += 8
            pinged = frame(Opcode.PING, b"there?")
            writer.write(pinged)
            await reader.readuntil(b"there?")
            server.tick()
            assert b"\xe0" in await reader.readuntil(CLOSED)
            writer.close()

    run(scenario())


def test_a_message_of_any_length_comes_in_fragments() -> None:
    """A client may send its whole life as one message: only a frame has a bound."""

    async def scenario() -> None:
        async with serving() as server, connected(server) as client:
            await client.send([bytes(MIB // 2)] * 8)
            for _ in range(8):
                assert await client.recv() == bytes(MIB // 2)

    run(scenario())


def test_closing_writes_what_is_to_be_written_and_waits_for_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """For some seconds; an abort waits for nothing."""

    async def scenario() -> None:
        async with serving() as server:
            async with connected(server) as client:
                await client.send(b"close")
                assert await client.recv() == b"bye"
                with pytest.raises(ConnectionClosed) as closed:
                    await client.recv()
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == 1000
            await until(lambda: server.made[0].heard == ["made", "lost"])
            async with connected(server) as client:
                await client.send(b"abort")
                with pytest.raises(ConnectionClosed) as closed:
                    await client.recv()
                assert closed.value.rcvd is None
            monkeypatch.setattr(websockets, "CLOSE_S", 0)
            answered = await exchanged(server, request(), frame(Opcode.BINARY, b"close"))
            assert answered.endswith(b"\x82\x03bye\x88\x02\x03\xe8")
            await until(lambda: server.made[2].heard == ["made", "lost"])

    run(scenario())


def test_what_is_carried_may_pause_its_client_and_is_paused_by_it() -> None:
    """As on a transport of its own."""

    async def scenario() -> None:
        async with serving() as server, connected(server) as client:
            await client.send(b"a")
            assert await client.recv() == b"a"
            [echo] = server.made
            echo.transport.pause_reading()
            assert not echo.transport.is_reading()
            await client.send(b"b")
            echo.transport.resume_reading()
            assert await client.recv() == b"b"
            echo.transport.set_write_buffer_limits(1024)
            while "pause" not in echo.heard:
                echo.transport.write(bytes(MIB))
            assert echo.transport.get_write_buffer_size() > 1024
            while "resume" not in echo.heard:
                await client.recv()

    run(scenario())


def test_a_client_that_pings_and_reads_no_answer_is_not_read_from() -> None:
    """Each answer was kept, before the client had logged in, too; when it reads, all of them come."""

    async def scenario() -> None:
        async with serving() as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request())
            await reader.readuntil(b"\r\n\r\n")
            [echo] = server.made
            pings = 0
            while echo.transport.is_reading():
                assert echo.transport.get_write_buffer_size() < 4 * MIB
                writer.write(1000 * frame(Opcode.PING, bytes(125)))
                pings += 1000
                await asyncio.sleep(0)
            echo.transport.pause_reading()
            echo.transport.resume_reading()
            assert not echo.transport.is_reading()
            for _ in range(pings):
                assert await reader.readexactly(127) == Frame(Opcode.PONG, bytes(125)).serialize(mask=False)
            writer.write(frame(Opcode.BINARY, b"a"))
            assert await reader.readexactly(3) == Frame(Opcode.BINARY, b"a").serialize(mask=False)
            writer.close()

    run(scenario())


@pytest.mark.parametrize(
    ("is_open", "headers", "may"),
    [
        (True, {}, True),
        (True, {"Origin": "http://localhost:8080"}, True),
        (True, {"Origin": "http://127.0.0.1"}, True),
        (True, {"Origin": "http://[::1]:80"}, True),
        (True, {"Origin": "https://example.org"}, False),
        (True, {"Origin": "null"}, False),
        (True, {"Origin": "http://["}, False),
        (True, {"Origin": "http://example.org", "Host": "example.org"}, False),
        (True, {"Origin": "http://localhost.example.org"}, False),
        (False, {"Origin": "https://example.org"}, True),
    ],
)
def test_pages_of_others_do_not_come_in_without_a_password(is_open: bool, headers: dict[str, str], may: bool) -> None:
    """A browser would let any page use the broker of the machine it runs on; where a name is no proof, nor is `Host`."""

    async def scenario() -> None:
        async with serving(is_open) as server:
            answered = await exchanged(server, request(**headers), frame(Opcode.CLOSE, b""))
            assert answered.startswith(b"HTTP/1.1 101 " if may else b"HTTP/1.1 403 ")
            assert len(server.made) == may

    run(scenario())


@pytest.mark.parametrize(
    ("origin", "host", "may"),
    [
        (None, "example.org", True),
        ("https://example.org", "example.org:8884", True),
        ("https://EXAMPLE.org", "example.org", True),
        ("https://evil.example", "example.org", False),
        ("null", "example.org", False),
        ("https://example.org", None, False),
    ],
)
def test_a_browser_s_certificate_is_for_pages_of_the_same_host(origin: str | None, host: str | None, may: bool) -> None:
    """The browser sends it wherever a page asks it to."""
    begin: Callable[..., Any] = WebSockets(Echo, lambda: False)._begun
    assert (begin(origin, host, True) is not None) == may


def test_the_client_s_library_sees_what_is_refused() -> None:
    """As errors of its own."""

    async def scenario() -> None:
        async with serving() as server:
            with pytest.raises(InvalidStatus):
                await connect(server.url, origin="https://example.org", subprotocols=["mqtt"], proxy=None)  # type: ignore[arg-type, list-item]
            with pytest.raises((InvalidStatus, NegotiationError)):
                await connect(server.url, proxy=None)

    run(scenario())


def test_a_client_that_is_paused_is_told_of_the_end_and_heard() -> None:
    """The answer comes behind what was not read yet."""

    async def scenario() -> None:
        async with serving() as server, connected(server) as client:
            await client.send(b"a")
            assert await client.recv() == b"a"
            [echo] = server.made
            echo.transport.pause_reading()
            await client.send(b"b")
            echo.transport.close()
            with pytest.raises(ConnectionClosed) as closed:
                await client.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1000
            assert echo.got == b"a"

    run(scenario())


class Sink:
    """A transport that nobody reads from."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.ended = False

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def close(self) -> None:
        self.ended = True

    abort = close

    def is_closing(self) -> bool:
        return self.ended

    def resume_reading(self) -> None:
        """Nothing is read."""

    pause_reading = resume_reading

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self.sent))

    def get_extra_info(self, _name: str, default: Any = None) -> Any:
        return default


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_whatever_comes_is_no_fault_of_the_server(data: st.DataObject) -> None:
    """Streams with bytes changed, left out or repeated, cut anywhere: nothing is raised."""
    good = request() + b"".join(
        frame(opcode, b"x" * size, fin)
        for opcode, size, fin in [
            (Opcode.BINARY, 5, True),
            (Opcode.PING, 3, True),
            (Opcode.BINARY, 300, False),
            (Opcode.CONT, 70_000, True),
            (Opcode.TEXT, 2, True),
            (Opcode.CLOSE, 0, True),
        ]
    )
    sent = bytearray(good)
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, min(700, len(sent) - 1)))
        match data.draw(st.integers(0, 2)):
            case 0:
                sent[at] = data.draw(st.integers(0, 255))
            case 1:
                del sent[at : at + data.draw(st.integers(1, 30))]
            case _:
                sent[at:at] = sent[at : at + data.draw(st.integers(1, 30))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=5)))

    async def scenario() -> None:
        sockets, sink = WebSockets(Echo, lambda: True), Sink()
        one = sockets()
        one.connection_made(sink)  # type: ignore[arg-type]
        for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
            if not sink.ended:
                one.data_received(bytes(sent[start:end]))
        one.connection_lost(None)
        assert not sockets._asking

    run(scenario())
