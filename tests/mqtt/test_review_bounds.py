"""What clients can make the server hold is bounded."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from doors.event_loop import held_syncs, until
from mqtt_loop import DISCONNECT, PINGRESP, PUBACK, SUBACK, client, serving, unconnected
from mqtt_wire import packet, string
from qflow.mqtt.server import hub as hub_module
from qflow.mqtt.server import inbound

run = asyncio.run


def test_retained_with_qos_0_waits_for_the_log(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one client no more is read than may wait."""
    monkeypatch.setattr(inbound, "MOST_TOGETHER_BYTES", 0)
    run(_retained(spool, monkeypatch))


async def _retained(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(spool) as server:
        loop = asyncio.get_running_loop()
        waiting: list[tuple[asyncio.Future[Any], Any]] = []
        keep = hub_module.keep

        def slow(broker: Any, rooms: Any) -> asyncio.Future[Any]:
            future = loop.create_future()
            waiting.append((future, rooms))
            return future

        monkeypatch.setattr(hub_module, "keep", slow)
        other = await client(server)
        sender = await client(server)
        for number in range(400):
            sender.publish(f"a/{number}", b"x" * 10_000, qos=0, retain=True)
        for _ in range(50):
            await other.nothing()
        assert len(waiting) < 100
        monkeypatch.setattr(hub_module, "keep", keep)
        for future, _ in waiting:
            future.set_result(None)
        await sender.nothing()


def test_answers_to_a_client_that_does_not_read(spool: Path) -> None:
    """No more is read from it than it takes answers."""
    run(_deaf(spool))


async def _deaf(spool: Path) -> None:
    async with serving(spool) as server:
        raw = await client(server)
        raw.writer.transport.pause_reading()
        [inside] = server._clients
        for _ in range(200):
            raw.send(packet(0xC0, b"") * 20_000)
            for _ in range(20):
                await asyncio.sleep(0)
        other = await client(server)
        for _ in range(500):
            await other.nothing()
        assert inside.pipe._transport.get_write_buffer_size() < 2 * 2**20


@pytest.mark.parametrize("kind", [0xC0, 0x40, 0x62], ids=["ping", "puback", "pubrel"])
def test_what_comes_in_one_turn_of_the_loop(kind: int, spool: Path) -> None:
    """No more of it is read than others can wait for, however often the loop reads from one client in a turn."""
    run(_in_one_turn(kind, spool))


async def _in_one_turn(kind: int, spool: Path) -> None:
    async with serving(spool) as server:
        await client(server)
        [inside] = server._clients
        data = packet(kind, b"" if kind == 0xC0 else b"\0\7") * 1_000
        times = 0
        while inside.pipe._transport.is_reading():
            inside.received(data)
            times += 1
            assert times < 200
        assert inside.machine.pending_bytes < 2**19
        async with asyncio.timeout(60):
            while not inside.pipe._transport.is_reading():
                await asyncio.sleep(0)


def test_what_comes_while_a_client_is_waited_for(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits, also where it comes in frames of a WebSocket that were read together: one SUBSCRIBE is done at a time."""
    run(_together(spool, monkeypatch))


async def _together(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(spool) as server:
        raw = await client(server)
        [inside] = server._clients
        assert inside.session is not None
        subscribe = inside.session.subscribe
        under_way: list[int] = []

        async def watched(asked: Any) -> None:
            under_way.append(asked.packet_id)
            assert len(under_way) == 1
            await asyncio.sleep(0)
            await subscribe(asked)
            under_way.clear()

        monkeypatch.setattr(inside.session, "subscribe", watched)
        for number in range(1, 4):
            inside.received(packet(0x82, bytes((0, number, 0)) + string(f"a/{number}") + b"\1"))
        assert [(await raw.expect(SUBACK)).packet_id for _ in range(3)] == [1, 2, 3]


def test_subscribing_again_and_again(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is retained is looked for once after the last time, and not at all for a subscription that has gone."""
    run(_subscribing(spool, monkeypatch))


async def _subscribing(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(spool) as server:
        raw = await client(server)
        await raw.published("a", b"1", retain=True)
        await raw.published("z", b"last", retain=True)
        log = server.broker.broker.engine.log
        page, gate = log.facts_page, threading.Event()
        looked: list[str] = []

        def held(room: str, prefix: str, *args: Any, **given: Any) -> Any:
            looked.append(prefix)
            gate.wait(60)
            return page(room, prefix, *args, **given)

        monkeypatch.setattr(log, "facts_page", held)
        for _ in range(50):
            await raw.subscribe("a")
            await raw.subscribe("b")
            await raw.unsubscribe("b")
        gate.set()
        await raw.subscribe("z")
        assert await raw.messages(3) == [b"1", b"1", b"last"]
        assert [prefix for prefix in looked if prefix] == ["a", "a", "z"]


def test_large_messages_that_are_sent_again(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read as the client takes them."""
    run(_again(spool, monkeypatch))


async def _again(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(spool) as server:
        raw = await client(server, "c", clean=False, SessionExpiryInterval=100)
        await raw.subscribe("a")
        sender = await client(server)
        for number in range(60):
            await sender.published("a", b"%d" % number + b"x" * 900_000)
            await raw.message(ack=False)
        await raw.cut()
        again = await unconnected(server)
        assert (await again.connect("c", clean=False, SessionExpiryInterval=100)).present
        again.writer.transport.pause_reading()
        inside = server.house.hub.sessions["c"]._line
        while not inside.is_paused:
            await sender.nothing()
        await sender.nothing()
        assert inside.pipe._transport.get_write_buffer_size() < 4 * 2**20
        again.writer.transport.resume_reading()
        got = [await again.message() for _ in range(60)]
        assert [int(one.payload[:2].rstrip(b"x")) for one in got] == list(range(60))


@pytest.mark.parametrize("version", [4, 5])
def test_packets_that_are_not_whole_are_bounded_for_all_clients(version: int, spool: Path) -> None:
    """Whoever holds more than an equal share is ended; what it held is there for others then."""
    run(_incomplete(version, spool))


async def _incomplete(version: int, spool: Path) -> None:
    async with serving(spool) as server:
        budget = server.house.budget
        budget.most_bytes = 300_000
        small, large = await client(server, version=version), await client(server, version=version)
        whole = packet(0x30, string("a") + (b"" if version == 4 else b"\0") + bytes(250_000))
        small.send(whole[:1_000])
        large.send(whole[:-1])
        await until(lambda: budget._total == 1_000 + len(whole) - 1)
        small.send(whole[1_000:60_000])
        await until(lambda: budget._total > 300_000)
        large.send(whole[-1:] + whole[:-2])
        told = await large.gone()
        assert [(one.kind, one.code) for one in told] == ([] if version == 4 else [(DISCONNECT, 0x97)])
        await until(lambda: budget._total == 60_000)
        small.send(whole[60_000:])
        await small.nothing()
        assert not budget._held
        await small.cut()
        waits = await unconnected(server)
        waits.send(packet(0x10, bytes(100_000))[:50_000])
        await until(lambda: budget._total == 50_000)
        await waits.cut()
        await until(lambda: not budget._held)
        assert budget._total == 0


def test_recent_messages_are_kept_without_their_encodings(spool: Path) -> None:
    """Of those that were given live as of those that were read from there."""
    run(_encodings(spool))


async def _encodings(spool: Path) -> None:
    async with serving(spool) as server:
        sender = await client(server)
        live = [await client(server, version=version) for version in (4, 5)]
        slow = await client(server, ReceiveMaximum=1)
        for qos, one in enumerate((*live, slow)):
            await one.subscribe("a", qos=qos)
        for _ in range(3):
            await sender.published("a")
        for one in (*live, slow):
            assert await one.messages(3) == [b"x"] * 3
        recent = server.house.hub.recent._messages
        assert len(recent) == 3
        assert not any(message._encoded for message in recent)


def test_a_client_is_read_from_and_its_pings_are_answered_while_a_sync_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it keeps to the receive maximum; clients give up a connection on which no answer to a ping comes."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            raw = await client(server, "raw")
            with held_syncs(monkeypatch):
                for packet_id in range(1, 1001):
                    raw.publish("a", bytes(1000), packet_id=packet_id)
                raw.send(b"\xc0\0")
                await raw.expect(PINGRESP)
            assert [(await raw.expect(PUBACK)).packet_id for _ in range(1000)] == list(range(1, 1001))

    run(scenario())


@pytest.mark.parametrize("size", [1000, 0])
def test_what_all_clients_wait_for_has_a_bound_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Beyond it, each has 64 KiB, is read from again when its own are synced, and leaves nothing behind."""
    monkeypatch.setattr(inbound, "MOST_TOGETHER_BYTES", 0)

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            raw = await client(server, "raw")
            hub = server.house.hub
            with held_syncs(monkeypatch):
                for packet_id in range(1, 301):
                    raw.publish("a", bytes(size), packet_id=packet_id)
                await until(lambda: hub.unsynced_bytes >= inbound.MOST_WAITING_BYTES)
                assert hub.unsynced_bytes < inbound.MOST_WAITING_BYTES + 1500
            assert [(await raw.expect(PUBACK)).packet_id for _ in range(300)] == list(range(1, 301))
            assert not hub.unsynced_bytes

    run(scenario())
