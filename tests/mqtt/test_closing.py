"""How the server closes a connection: the client gets to read why."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import weakref
from pathlib import Path
from typing import Any

import pytest

import mqtt_served
from mqtt_loop import DISCONNECT, client, cut_all, dialled, serving, slept, unconnected
from mqtt_wire import connect, decoded, packet, publish
from qflow.errors import InvalidArgument
from qflow.mqtt.errors import ReasonCode
from qflow.mqtt.server.connecting import Terms
from qflow.mqtt.server.tcp import TcpPipe

FLOOD = publish(5, "t", bytes(60_000)) * 100


@pytest.mark.parametrize(("permanent", "code"), [(False, 0x9C), (True, 0x9D)])
def test_clients_are_sent_to_another_server(spool: Path, permanent: bool, code: int) -> None:
    """Those that are there, whose sessions sleep, and those that come, for now or for good; until they are taken."""
    asyncio.run(_sent_elsewhere(spool, permanent, code))


async def _sent_elsewhere(spool: Path, permanent: bool, code: int) -> None:
    async with serving(spool) as server:
        there, old = await client(server, "there", SessionExpiryInterval=60), await client(server, "old", version=4)
        await there.subscribe("a")
        with pytest.raises(InvalidArgument, match="a server is referred to by a text"):
            server.redirect("two\nlines")
        with pytest.raises(InvalidArgument, match="a permanent redirect leads to another server"):
            server.redirect(None, permanent=True)
        await there.nothing()
        server.redirect("other.example:1883 third.example", permanent=permanent)
        [told] = await there.gone()
        assert (told.kind, told.code) == (DISCONNECT, code)
        assert told.properties["ServerReference"] == "other.example:1883 third.example"
        assert await old.gone() == []
        new, plain = await unconnected(server), await unconnected(server, version=4)
        refused = await new.connect("new")
        assert (refused.code, refused.properties["ServerReference"]) == (code, "other.example:1883 third.example")
        assert (await plain.connect("new")).code == 3
        assert await new.gone() == await plain.gone() == []
        await slept(server)
        server.redirect(None)
        assert (await (await unconnected(server)).connect("there", clean=False)).present


@pytest.mark.parametrize("wrong", ["", " other", "a\0", "x" * 1025, "\ud800", 5])
def test_what_is_no_reference_to_a_server_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="a server is referred to by a text"):
        Terms(redirect=wrong)


@pytest.mark.parametrize("wrong", [{"redirect_permanent": True}, {"redirect": "b", "redirect_permanent": "yes"}])
def test_a_move_for_good_leads_somewhere(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="permanent"):
        Terms(**wrong)


def test_a_door_may_take_nobody_from_its_start(tmp_path: Path) -> None:
    """By options of `qflow serve`."""
    options = ("--mqtt", "127.0.0.1:0", "--mqtt-redirect", "other.example:1883", "--mqtt-redirect-permanent")
    with mqtt_served.serving(tmp_path, *options) as (_, ports):

        async def scenario() -> None:
            refused = await (await dialled(ports["mqtt"][0])).connect("c")
            assert (refused.code, refused.properties["ServerReference"]) == (0x9D, "other.example:1883")
            await cut_all()

        asyncio.run(scenario())


def test_a_client_that_goes_on_sending_reads_why_its_connection_ends(spool: Path) -> None:
    """6 MB behind what is wrong: a connection that is closed with bytes unread is reset, and what was sent is lost."""
    asyncio.run(_flooded(spool))


async def _flooded(spool: Path) -> None:
    async with serving(spool) as server:
        data = await asyncio.to_thread(_sent, server.port, connect(5) + packet(0x90, b"\0\1\0\0") + FLOOD)
        (_, connack), (first, disconnect) = decoded(data, 5)
        assert connack.rc == 0
        assert first == 0xE0
        assert disconnect.reason.value == ReasonCode.PROTOCOL_ERROR
        await slept(server)


def _sent(port: int, data: bytes) -> bytes:
    """Send all, and only then read up to the end."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
        raw.sendall(data)
        return b"".join(iter(lambda: raw.recv(65_536), b""))


def test_a_client_that_resets_its_connection_is_gone(spool: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it sent before; nothing of that is an error of the server."""
    caplog.set_level(logging.ERROR)
    asyncio.run(_reset(spool))
    assert caplog.records == []


async def _reset(spool: Path) -> None:
    async with serving(spool) as server:
        for last in (b"", packet(0xE0), packet(0x90, b"\0\1\0\0"), publish(5, "t", first=0x32, packet_id=1)):
            for _ in range(5):
                await asyncio.to_thread(_cut, server.port, connect(5) + last)
        await slept(server)


def _cut(port: int, data: bytes) -> None:
    """Send, and reset the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.sendall(data)


class _Taken(asyncio.Transport):
    """As much of one as a client that is not taken needs."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def abort(self) -> None:
        pass


def test_what_is_left_of_a_client_keeps_no_transport() -> None:
    """With TLS it has large buffers, and the garbage collector comes to what is left after thousands of clients."""
    pipe, transport = TcpPipe(lambda _: None), _Taken()
    there = weakref.ref(transport)
    pipe.connection_made(transport)
    pipe.connection_lost(None)
    del transport
    assert there() is None
    pipe.close()
    pipe.abort()  # what a server that ends does to all
