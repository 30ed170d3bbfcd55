"""The disk under the spool is full: publishers are told, nothing that was confirmed is lost, and clients go on."""

from __future__ import annotations

import asyncio
from pathlib import Path

from faults.test_full_disk import disk_of, fill
from mqtt_loop import PUBACK, PUBREC, PUBREL, client, serving, slept

LASTS = {"SessionExpiryInterval": 1000}


def test_a_full_disk_refuses_publishes_and_nothing_else(tmp_path: Path) -> None:
    """With 0x97, QoS 1 and 2; the same packet ids are taken when there is space again, and sessions go on."""
    with disk_of("8m", tmp_path / "disk") as disk:
        asyncio.run(_full(disk))


async def _full(disk: Path) -> None:
    async with serving(disk / "spool") as server:
        sleeper = await client(server, "sleeper", **LASTS)  # type: ignore[arg-type]
        await sleeper.subscribe("a", qos=2)
        await sleeper.disconnect()
        await slept(server)
        ballast = fill(disk)
        raw = await client(server, "raw")
        taken: list[bytes] = []
        refused = {1: 0, 2: 0}
        number, size = 0, 20_000
        while min(refused.values()) < 20:
            qos = 1 + number % 2
            body = (b"%d " % number).ljust(size, b"x")
            raw.publish("a", body, qos=qos, packet_id=7)
            answer = await raw.expect(PUBACK if qos == 1 else PUBREC)
            assert answer.code in (0, 0x97)
            if answer.code:
                refused[qos] += size == 50
                size = max(50, size // 2)
            else:
                taken.append(body)
                if qos == 2:
                    raw.ack(PUBREL, 7)
                    await raw.next()
            number += 1
        ballast.unlink()
        await raw.released("a", b"last", packet_id=7)
        stored = [message.body async for message in server.broker.stream("mqtt").query()]
        assert stored == [*taken, b"last"]
        again = await client(server, "sleeper", clean=False, **LASTS)  # type: ignore[arg-type]
        assert await again.messages(len(stored)) == stored
