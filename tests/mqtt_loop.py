"""An MQTT server in the loop of a test, and clients of it that send packets by hand and read what comes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

import qflow.aio
from doors.event_loop import until
from mqtt_wire import packet, string
from qflow.mqtt import Server, serve
from qflow.mqtt.server.clock import Clock
from qflow.mqtt.server.connecting import Terms

CONNACK, PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP, SUBACK, UNSUBACK = 2, 3, 4, 5, 6, 7, 9, 11
PINGRESP, DISCONNECT = 13, 14
WAIT_S = 60.0
_CLIENTS: list[Raw] = []
_NAMES = {
    CONNACK: "CONNACK", PUBLISH: "PUBLISH", PUBACK: "PUBACK", PUBREC: "PUBREC", PUBREL: "PUBREL",
    PUBCOMP: "PUBCOMP", SUBACK: "SUBACK", UNSUBACK: "UNSUBACK", PINGRESP: "PINGRESP", DISCONNECT: "DISCONNECT",
}  # fmt: skip


class Packet(NamedTuple):
    """A packet of the server."""

    kind: int
    packet_id: int
    code: int
    """The first code of a SUBACK or UNSUBACK; of a CONNACK that of the answer."""
    codes: list[int]
    topic: str
    payload: bytes
    qos: int
    retain: bool
    dup: bool
    present: bool
    """The session, in a CONNACK."""
    properties: dict[str, Any]

    def __repr__(self) -> str:
        shown = f"{_NAMES.get(self.kind, self.kind)} {self.packet_id} 0x{self.code:02X}"
        if self.kind == PUBLISH:
            shown += f" {self.topic} {self.payload[:40]!r} q{self.qos} r{self.retain:d} d{self.dup:d}"
        return f"<{shown} {self.properties or ''}>"


def properties_of(kind: int, given: dict[str, Any] | None) -> bytes:
    properties = Properties(kind)
    for name, value in (given or {}).items():
        setattr(properties, name, value)
    return bytes(properties.pack())


class Gone(Exception):
    """The server has closed the connection."""


class Raw:
    """A connection; `expect` gives what comes next, `await` everything."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, version: int) -> None:
        self.reader, self.writer, self.version = reader, writer, version
        self.unread: deque[Packet] = deque()

    def _properties(self, kind: int, given: dict[str, Any] | None = None) -> bytes:
        return properties_of(kind, given) if self.version == 5 else b""

    def send(self, *data: bytes) -> None:
        self.writer.write(b"".join(data))

    async def connect(
        self, client_id: str, *, clean: bool = True, keep_alive_s: int = 0, will: dict[str, Any] | None = None,
        username: str | None = None, password: bytes | None = None, **properties: Any,
    ) -> Packet:  # fmt: skip
        """Send CONNECT; return the CONNACK."""
        flags = clean << 1
        body = string(client_id)
        if will is not None:
            flags |= 4 | will.get("qos", 0) << 3 | will.get("retain", False) << 5
            body += self._properties(PacketTypes.WILLMESSAGE, will.get("properties"))
            body += string(will["topic"]) + len(will["payload"]).to_bytes(2, "big") + will["payload"]
        if username is not None:
            flags |= 128
            body += string(username)
        if password is not None:
            flags |= 64
            body += len(password).to_bytes(2, "big") + password
        head = string("MQTT") + bytes((self.version, flags)) + keep_alive_s.to_bytes(2, "big")
        self.send(packet(0x10, head + self._properties(PacketTypes.CONNECT, properties) + body))
        return await self.expect(CONNACK)

    async def subscribe(
        self, *filters: str, qos: int = 1, packet_id: int = 1, flags: int = 0, **properties: Any
    ) -> Packet:
        """Send SUBSCRIBE; return the SUBACK, which may come behind messages: those are kept."""
        body = packet_id.to_bytes(2, "big") + self._properties(PacketTypes.SUBSCRIBE, properties)
        self.send(packet(0x82, body + b"".join(string(one) + bytes((qos | flags,)) for one in filters)))
        return await self.expect(SUBACK, skip=True)

    async def unsubscribe(self, *filters: str, packet_id: int = 1) -> Packet:
        body = packet_id.to_bytes(2, "big") + self._properties(PacketTypes.UNSUBSCRIBE)
        self.send(packet(0xA2, body + b"".join(map(string, filters))))
        return await self.expect(UNSUBACK, skip=True)

    def publish(
        self, topic: str, payload: bytes = b"x", *, qos: int = 1, packet_id: int = 1, retain: bool = False,
        dup: bool = False, **properties: Any,
    ) -> None:  # fmt: skip
        """Send PUBLISH."""
        body = string(topic) + (packet_id.to_bytes(2, "big") if qos else b"")
        body += self._properties(PacketTypes.PUBLISH, properties) + payload
        self.send(packet(0x30 | dup << 3 | qos << 1 | retain, body))

    def ack(self, kind: int, packet_id: int) -> None:
        """Send PUBACK, PUBREC, PUBREL or PUBCOMP."""
        self.send(packet(kind << 4 | (2 if kind == PUBREL else 0), packet_id.to_bytes(2, "big")))

    async def published(self, topic: str, payload: bytes = b"x", **given: Any) -> None:
        """Publish with QoS 1, and wait for the PUBACK."""
        self.publish(topic, payload, **given)
        answer = await self.expect(PUBACK, skip=True)
        assert answer.code < 0x80, answer

    async def released(self, topic: str, payload: bytes = b"x", *, packet_id: int = 1, **given: Any) -> None:
        """Publish with QoS 2, to the end of the exchange."""
        self.publish(topic, payload, qos=2, packet_id=packet_id, **given)
        assert (await self.expect(PUBREC, skip=True)).code < 0x80
        self.ack(PUBREL, packet_id)
        await self.expect(PUBCOMP, skip=True)

    async def disconnect(self, code: int = 0, **properties: Any) -> None:
        """Send DISCONNECT and wait until the server has closed."""
        self.send(
            packet(
                0xE0,
                bytes((code,)) + self._properties(PacketTypes.DISCONNECT, properties) if self.version == 5 else b"",
            )
        )
        await self.gone()

    async def gone(self) -> list[Packet]:
        """Wait until the server has closed; return what came before."""
        found: list[Packet] = []
        try:
            while True:
                found.append(await self.next())
        except Gone:
            self.writer.close()
            return found

    async def cut(self) -> None:
        """Close without a word."""
        self.writer.transport.abort()

    async def expect(self, kind: int, skip: bool = False) -> Packet:
        """Return the next packet, which is of a kind; with `skip` the others before it are kept for later."""
        if not skip:
            one = self.unread.popleft() if self.unread else await self.next()
            assert one.kind == kind, one
            return one
        for one in self.unread:
            if one.kind == kind:
                self.unread.remove(one)
                return one
        while (one := await self.next()).kind != kind:
            self.unread.append(one)
        return one

    async def message(self, ack: bool = True) -> Packet:
        """Return the next message; acknowledge it."""
        one = await self.expect(PUBLISH)
        if ack and one.qos == 1:
            self.ack(PUBACK, one.packet_id)
        elif ack and one.qos == 2:
            self.ack(PUBREC, one.packet_id)
            assert (await self.expect(PUBREL, skip=True)).packet_id == one.packet_id
            self.ack(PUBCOMP, one.packet_id)
        return one

    async def messages(self, count: int, ack: bool = True) -> list[bytes]:
        """Return the payloads of the next messages."""
        return [(await self.message(ack)).payload for _ in range(count)]

    async def nothing(self) -> None:
        """Check that nothing but the answer to a ping is on its way."""
        self.send(packet(0xC0, b""))
        await self.expect(PINGRESP)

    async def take(self) -> Packet:
        """Return the next packet, or one that was kept."""
        return self.unread.popleft() if self.unread else await self.next()

    async def next(self) -> Packet:
        """Read a packet."""
        async with asyncio.timeout(WAIT_S):
            try:
                first = (await self.reader.readexactly(1))[0]
                size = shift = 0
                while True:
                    byte = (await self.reader.readexactly(1))[0]
                    size |= (byte & 127) << shift
                    shift += 7
                    if byte < 128:
                        break
                body = await self.reader.readexactly(size)
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                raise Gone from error
        return self._parsed(first, body)

    def _parsed(self, first: int, body: bytes) -> Packet:
        kind = first >> 4
        packet_id = code = 0
        codes: list[int] = []
        topic, payload, present = "", b"", False
        properties: dict[str, Any] = {}
        if kind == CONNACK:
            present, code = bool(body[0]), body[1]
            properties, _ = self._unpacked(kind, body[2:])
        elif kind == PUBLISH:
            length = int.from_bytes(body[:2], "big")
            topic, body = body[2 : 2 + length].decode(), body[2 + length :]
            if first & 6:
                packet_id, body = int.from_bytes(body[:2], "big"), body[2:]
            properties, payload = self._unpacked(kind, body)
        elif kind == DISCONNECT:
            code = body[0] if body else 0
            properties, _ = self._unpacked(kind, body[1:])
        elif kind in (SUBACK, UNSUBACK):
            packet_id = int.from_bytes(body[:2], "big")
            properties, rest = self._unpacked(kind, body[2:])
            codes = list(rest)
            code = codes[0] if codes else 0
        elif body:
            packet_id = int.from_bytes(body[:2], "big")
            code = body[2] if len(body) > 2 else 0
            properties, _ = self._unpacked(kind, body[3:])
        return Packet(
            kind, packet_id, code, codes, topic, payload, first >> 1 & 3 if kind == PUBLISH else 0,
            kind == PUBLISH and bool(first & 1), kind == PUBLISH and bool(first & 8), present, properties,
        )  # fmt: skip

    def _unpacked(self, kind: int, data: bytes) -> tuple[dict[str, Any], bytes]:
        if self.version < 5 or not data:
            return {}, data
        properties = Properties(kind)
        _, used = properties.unpack(data)
        return {
            name: value
            for name, value in vars(properties).items()
            if name not in ("packetType", "types", "names", "properties")
        }, data[used:]


@asynccontextmanager
async def serving(spool: Path | str, **options: Any) -> AsyncIterator[Server]:
    """A server on a spool, in this loop."""
    async with qflow.aio.open(spool, **options) as broker, await serve(broker, port=0) as server:
        try:
            yield server
        finally:
            await cut_all()


async def client(server: Server, client_id: str = "", *, version: int = 5, **given: Any) -> Raw:
    """Return a client that is connected."""
    raw = await unconnected(server, version=version)
    connack = await raw.connect(client_id, **given)
    assert connack.code == 0, connack
    return raw


class SetClock(Clock):
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 1_900_000_000.0
        self.wall_s = 0.0
        """How much later the time of day is."""

    def now_ms(self) -> int:
        return int((self.now_s + self.wall_s) * 1000)

    def monotonic(self) -> float:
        return self.now_s


@asynccontextmanager
async def serving_at(clock: SetClock, spool: Path | str, **terms: Any) -> AsyncIterator[Server]:
    """A server in this loop that believes a clock; its ticks come by `server.tick()` alone, or once a real second."""
    async with qflow.aio.open(spool) as broker:
        server = Server(broker, None, None, clock, Terms(**terms))
        await server.start("127.0.0.1", 0, "mqtt")
        async with server:
            try:
                yield server
            finally:
                await cut_all()


async def slept(server: Server, others: int = 0) -> None:
    """Wait until no more clients than these are connected, and the sessions of the others are in the log."""
    async with asyncio.timeout(WAIT_S):
        await until(lambda: server.connections <= others)


async def cut_all() -> None:
    """Close all clients that are left."""
    for raw in _CLIENTS:
        raw.writer.transport.abort()
        with suppress(ConnectionError):
            await raw.writer.wait_closed()
    _CLIENTS.clear()


async def unconnected(server: Server, *, version: int = 5) -> Raw:
    """Return a client that has sent nothing yet."""
    return await dialled(server.port, version)


async def dialled(port: int, version: int = 5) -> Raw:
    """Return a client that has sent nothing yet, of a server that may be in another process; `cut_all` in the end."""
    raw = Raw(*await asyncio.open_connection("127.0.0.1", port), version)
    _CLIENTS.append(raw)
    return raw
