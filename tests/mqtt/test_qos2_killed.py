"""The server is killed at each step of an exchange with QoS 2: a message is stored once, and arrives once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import qflow
from mqtt_loop import PUBCOMP, PUBLISH, PUBREC, PUBREL, Gone, Raw, cut_all, dialled
from processes import free_port
from thorough import TORTURE

SEED = int(os.environ.get("QFLOW_SEED", "0")) or random.SystemRandom().randrange(10**6)
KILLS = 40 if TORTURE else 4
MESSAGES = 300
"""That a publisher sends between two kills, at most."""
SERVER = """
import asyncio, sys, qflow.aio, qflow.mqtt

async def main():
    async with qflow.aio.open(sys.argv[1]) as broker, await qflow.mqtt.serve(broker, port=int(sys.argv[2])):
        print("listening", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
KEPT = {"clean": False, "SessionExpiryInterval": 10_000}


def run(work: Coroutine[Any, Any, None]) -> None:
    async def to_its_end() -> None:
        try:
            await work
        finally:
            await cut_all()

    asyncio.run(to_its_end())


@contextmanager
def serving(spool: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """A server in a process of its own, which is killed at the end."""
    command = [sys.executable, "-c", SERVER, str(spool), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "listening\n"
            yield process
        finally:
            process.send_signal(signal.SIGKILL)


async def connected(port: int, client_id: str) -> Raw:
    raw = await dialled(port)
    assert (await raw.connect(client_id, **KEPT)).code == 0  # type: ignore[arg-type]
    return raw


@pytest.mark.parametrize("step", ["published", "received", "released", "completed"])
def test_a_message_from_a_client_is_stored_once(step: str, spool: Path) -> None:
    """Whatever the client had heard when the server was killed; it goes on as the protocol says."""
    run(_from_client(step, spool))


async def _from_client(step: str, spool: Path) -> None:
    port = free_port()
    with serving(spool, port):
        raw = await connected(port, "c")
        raw.publish("a", b"1", qos=2, packet_id=7)
        await raw.writer.drain()
        if step != "published":
            await raw.expect(PUBREC)
        if step in ("released", "completed"):
            raw.ack(PUBREL, 7)
            await raw.writer.drain()
        if step == "completed":
            await raw.expect(PUBCOMP)
    await raw.gone()
    with serving(spool, port):
        raw = await connected(port, "c")
        if step in ("published", "received"):
            raw.publish("a", b"1", qos=2, packet_id=7, dup=True)
            assert (await raw.expect(PUBREC)).code == 0
        if step != "completed":
            raw.ack(PUBREL, 7)
            assert (await raw.expect(PUBCOMP)).code == 0
        raw.publish("a", b"2", qos=2, packet_id=7)
        assert (await raw.expect(PUBREC)).code == 0
        await raw.cut()
    with qflow.open(spool) as broker:
        assert [message.body for message in broker.stream("mqtt").query()] == [b"1", b"2"]


@pytest.mark.parametrize("step", ["published", "received", "released", "completed"])
def test_a_message_to_a_client_arrives_once(step: str, spool: Path) -> None:
    """Whatever the server had heard when it was killed; the client goes on as the protocol says."""
    run(_to_client(step, spool))


async def _to_client(step: str, spool: Path) -> None:
    port = free_port()
    with serving(spool, port):
        raw = await connected(port, "c")
        await raw.subscribe("a", qos=2)
        await raw.released("a", b"1", packet_id=9)
        one = await raw.expect(PUBLISH)
        if step != "published":
            raw.ack(PUBREC, one.packet_id)
            await raw.writer.drain()
        if step in ("released", "completed"):
            await raw.expect(PUBREL)
        if step == "completed":
            raw.ack(PUBCOMP, one.packet_id)
            await raw.writer.drain()
    await raw.gone()
    with serving(spool, port):
        raw = await connected(port, "c")
        await raw.released("a", b"2", packet_id=9)
        got: list[bytes] = []
        while b"2" not in got:
            packet = await raw.take()
            if packet.kind == PUBREL:
                raw.ack(PUBCOMP, packet.packet_id)
            elif packet.kind == PUBLISH:
                if packet.packet_id == one.packet_id and packet.dup:
                    assert step in ("published", "received")  # it may not have heard PUBREC, nothing else
                else:
                    got.append(packet.payload)
                raw.ack(PUBREC, packet.packet_id)
        assert got == [b"2"]
        await raw.cut()


class Publisher:
    """Publishes numbers with QoS 2, as a client that keeps its state across connections."""

    def __init__(self) -> None:
        self.number = 0
        self.confirmed = 0
        self._is_received = False

    async def run(self, port: int, until: int) -> None:
        """Publish until so many are confirmed, or the server is gone."""
        with suppress(Gone, ConnectionError):
            raw = await connected(port, "publisher")
            dup = True
            while self.confirmed < until:
                if not self._is_received:
                    raw.publish("a", b"%d" % self.number, qos=2, packet_id=self.number % 5 + 1, dup=dup)
                    assert (await raw.expect(PUBREC)).code == 0
                    self._is_received = True
                raw.ack(PUBREL, self.number % 5 + 1)
                await raw.expect(PUBCOMP)
                self._is_received = False
                self.number += 1
                self.confirmed = self.number
                dup = False


class Subscriber:
    """Gets numbers with QoS 2, as a client that keeps its state across connections."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self._held: set[int] = set()

    async def run(self, port: int, last: int | None = None) -> None:
        """Take what comes, until a number has come, or the server is gone."""
        with suppress(Gone, ConnectionError):
            raw = await connected(port, "subscriber")
            if not self.got:
                await raw.subscribe("a", qos=2)
            while last is None or last not in self.got or self._held:
                packet = await raw.take()
                if packet.kind == PUBREL:
                    self._held.discard(packet.packet_id)
                    raw.ack(PUBCOMP, packet.packet_id)
                elif packet.kind == PUBLISH:
                    assert packet.qos == 2
                    if packet.packet_id not in self._held:
                        self._held.add(packet.packet_id)
                        self.got.append(int(packet.payload))
                    raw.ack(PUBREC, packet.packet_id)
                else:
                    raise AssertionError(packet)


def test_kills_at_any_moment(spool: Path) -> None:
    """Every number once, in order, to a subscriber that was there from the beginning."""
    print(f"seed {SEED} (set QFLOW_SEED)")
    run(_any_moment(spool, random.Random(SEED)))


async def _any_moment(spool: Path, chance: random.Random) -> None:
    port = free_port()
    publisher, subscriber = Publisher(), Subscriber()
    with serving(spool, port):
        raw = await connected(port, "subscriber")
        await raw.subscribe("a", qos=2)
        await raw.cut()
    subscriber.got.append(-1)
    for _ in range(KILLS):
        with serving(spool, port) as process:
            taking = asyncio.create_task(subscriber.run(port))
            sending = asyncio.create_task(publisher.run(port, 10**9))
            goal, turns = publisher.confirmed + chance.randrange(1, MESSAGES), chance.randrange(20)
            while publisher.confirmed < goal or (turns := turns - 1) > 0:
                await asyncio.sleep(0)
            process.send_signal(signal.SIGKILL)
            await asyncio.gather(taking, sending)
    with serving(spool, port):
        await publisher.run(port, publisher.confirmed + 5)
        await subscriber.run(port, publisher.number - 1)
    assert subscriber.got == list(range(-1, publisher.number))
    with qflow.open(spool) as broker:
        assert [int(message.body) for message in broker.stream("mqtt").query()] == list(range(publisher.number))
