"""Groups and the log: what the one has of a group goes with what it has of its members."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from inside import copy_as_killed
from mqtt_loop import client, serving, slept, unconnected
from qflow.mqtt.server import groups
from qflow.mqtt.server.storing import GROUPS

run = asyncio.run
LASTS: dict[str, Any] = {"clean": False, "SessionExpiryInterval": 1000}
GROUP = "$share/g/a"


def test_a_member_that_goes_slowly_leaves_the_group_where_it_is(spool: Path, tmp_path: Path) -> None:
    """What others got meanwhile with QoS 2 is not given again after a kill."""
    run(_slowly(spool, tmp_path / "killed"))


async def _slowly(spool: Path, killed: Path) -> None:
    async with serving(spool) as server:
        one, other = await client(server, "one", **LASTS), await client(server, "other", **LASTS)
        for raw in (one, other):
            await raw.subscribe(GROUP, qos=2)
        session = server.house.hub.sessions["one"]
        goes = asyncio.Event()
        session.inbound.settled = goes.wait  # type: ignore[method-assign]
        await one.cut()
        while not session._is_left:
            await asyncio.sleep(0)
        sender = await client(server)
        await sender.released("a", b"1")
        assert await other.messages(1) == [b"1"]
        await other.nothing()
        server.house.hub.keeper.tick()
        await other.released("b")
        goes.set()
        await slept(server, 2)
        copy_as_killed(server.broker.broker, killed)
    async with serving(killed) as server:
        again = await client(server, "other", **LASTS)
        await server.broker.publish("a", b"2")
        assert (await again.message()).payload == b"2"


def test_a_group_is_not_written_without_the_session_that_it_gave_to(spool: Path, tmp_path: Path) -> None:
    """A message with QoS 2 is in the one or in the other, whenever a kill comes."""
    run(_given(spool, tmp_path / "killed"))


async def _given(spool: Path, killed: Path) -> None:
    async with serving(spool) as server:
        one, other = await client(server, "one", **LASTS), await client(server, "other", **LASTS)
        await one.subscribe(GROUP, qos=2)
        await one.nothing()
        keeper = server.house.hub.keeper
        keeper._is_writing = True  # as while records are written: what is urgent comes in the next commit
        sender = await client(server)
        await sender.released("a", b"1")
        await one.nothing()
        await other.subscribe(GROUP, qos=2)
        copy_as_killed(server.broker.broker, killed)
        keeper._is_writing = False
        keeper.tick()
        await one.message()
    async with serving(killed) as server:
        again = await client(server, "one", **LASTS)
        assert (await again.message()).payload == b"1"


def test_a_member_that_is_forgotten_while_another_wakes_the_group(spool: Path) -> None:
    """It is a member no more, and the group ends with the other."""
    run(_forgotten(spool))


async def _forgotten(spool: Path) -> None:
    async with serving(spool) as server:
        one = await client(server, "one", **LASTS)
        await one.subscribe("$share/g/a", qos=1)
        await one.disconnect()
        other = await client(server, "other", **LASTS)
        loop = asyncio.get_running_loop()
        log = server.broker.broker.engine.log
        fact = log.fact
        waking: list[asyncio.Task[Any]] = []

        async def wake() -> None:
            waking.append(asyncio.create_task(other.subscribe("$share/g/a", qos=1)))
            while not server.house.hub.sessions["other"].state.subscriptions:
                await asyncio.sleep(0)

        def slow(room: str, key: str) -> Any:
            found = fact(room, key)
            if room == GROUPS and log.fact is slow:
                log.fact = fact  # type: ignore[method-assign]
                asyncio.run_coroutine_threadsafe(wake(), loop).result(60)
            return found

        log.fact = slow  # type: ignore[method-assign]
        again = await unconnected(server)
        await again.connect("one", clean=True)
        await waking[0]
        server.house.hub.keeper.tick()
        await other.disconnect()
        record = fact(GROUPS, "g\0a")
        assert record is not None
        assert b'"members": ["other"]' in record


def test_a_group_that_refuses_its_only_guest_sleeps_on(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was loaded for a client that is one too many: it follows the stream no more, as before."""
    monkeypatch.setattr(groups, "MOST_LASTING", 1)
    run(_refusing(spool))


async def _refusing(spool: Path) -> None:
    async with serving(spool) as server:
        one = await client(server, "one", **LASTS)
        assert (await one.subscribe(GROUP)).code == 1
        await one.disconnect()
        other = await client(server, "other", **LASTS)
        assert (await other.subscribe(GROUP)).code == 0x97
        assert server.house.hub.subscriptions == 0
