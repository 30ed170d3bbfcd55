"""What time does to wills and to the newest messages, where the log or their size is in the way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from doors.event_loop import until
from inside import copy_as_killed
from mqtt_loop import SetClock, client, serving_at, slept, unconnected
from qflow.errors import DiskFull
from qflow.mqtt.model.messages import of_headers
from qflow.mqtt.model.sessions import left_ms_of
from qflow.mqtt.server.recent import MOST_RECENT_BYTES, Recent
from qflow.mqtt.server.server import Server
from qflow.mqtt.server.storing import SESSIONS

run = asyncio.run


def test_a_will_that_the_log_does_not_take_is_published_later(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(_later(spool, monkeypatch))


async def _later(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SetClock()
    async with serving_at(clock, spool) as server:
        watcher = await client(server)
        await watcher.subscribe("w")
        will: dict[str, Any] = {"topic": "w", "payload": b"gone", "qos": 1, "properties": {"WillDelayInterval": 10}}
        raw = await client(server, "c", will=will, SessionExpiryInterval=1000)
        await raw.cut()
        await slept(server, 1)
        tried = asyncio.Event()

        def full(*_: Any) -> Any:
            tried.set()
            raise DiskFull("no space")

        with monkeypatch.context() as patch:
            patch.setattr(server.house.hub, "store", full)
            clock.now_s += 11
            server.tick()
            await tried.wait()
            await watcher.nothing()
        clock.now_s += 100
        server.tick()
        assert await watcher.messages(1) == [b"gone"]


@pytest.mark.parametrize(
    ("is_back", "set_back_s"),
    [(True, 0), (True, 3600), (False, 0)],
    ids=["its client is back first", "and the clock was set back", "its client stays away"],
)
def test_a_will_that_was_due_when_the_log_was_full_is_published_later(
    is_back: bool, set_back_s: int, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(_overdue(is_back, set_back_s, spool, monkeypatch))


async def _overdue(is_back: bool, set_back_s: int, spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SetClock()
    async with serving_at(clock, spool) as server:
        watcher = await client(server)
        await watcher.subscribe("w")
        will: dict[str, Any] = {"topic": "w", "payload": b"gone", "qos": 1}
        raw = await client(server, "c", will=will, SessionExpiryInterval=1000)

        def full(*_: Any) -> Any:
            raise DiskFull("no space")

        with monkeypatch.context() as patch:
            patch.setattr(server.house.hub, "store", full)
            await raw.cut()
            await slept(server, 1)
        clock.wall_s -= set_back_s
        if is_back:
            await client(server, "c", clean=False)
        else:
            clock.now_s += 100
            server.tick()
        assert await watcher.messages(1) == [b"gone"]
        await watcher.nothing()


def test_a_will_that_the_log_does_not_take_keeps_nobody_out(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it cost the session: what is smaller may have room."""
    run(_let_in(spool, monkeypatch))


async def _let_in(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SetClock()
    async with serving_at(clock, spool) as server:
        will: dict[str, Any] = {"topic": "w", "payload": b"gone", "qos": 1}
        raw = await client(server, "c", will=will, SessionExpiryInterval=1000)
        await raw.subscribe("x")

        def full(*_: Any) -> Any:
            raise DiskFull("no space")

        clock.now_s += 2000
        with monkeypatch.context() as patch:
            patch.setattr(server.house.hub, "store", full)
            await raw.cut()
            await slept(server)
            raw = await client(server, "c", clean=False, SessionExpiryInterval=1000)
        assert list(server.house.hub.sessions["c"].state.subscriptions) == ["x"]
        assert not server.house.leaving.is_due("c")


def test_a_session_ends_in_time_after_the_clock_was_set_back(spool: Path) -> None:
    run(_set_back(spool))


async def _set_back(spool: Path) -> None:
    clock = SetClock()
    async with serving_at(clock, spool) as server:
        server.tick()
        await until(lambda: not server.house.leaving.is_looking)
        clock.wall_s = -86_400.0
        raw = await client(server, "c", SessionExpiryInterval=2)
        await raw.cut()
        await slept(server)
        clock.now_s += 120
        server.tick()
        await until(lambda: server.broker.broker.engine.log.fact(SESSIONS, "c") is None)


def test_a_session_outlives_a_clock_that_is_set_after_the_start(spool: Path, tmp_path: Path) -> None:
    """Of a client that a kill cut off, and of one that left before; they end in time, also after the next start."""
    run(_set_forward(spool, tmp_path))


async def _set_forward(spool: Path, tmp_path: Path) -> None:
    clock = SetClock()
    async with serving_at(clock, spool) as server:
        for name in ("cut", "late"):
            await client(server, name, SessionExpiryInterval=1000)
        copy_as_killed(server.broker.broker, tmp_path / "killed")
    years_s = 6 * 366 * 86_400.0
    clock.wall_s, clock.now_s = -years_s, clock.now_s + 10
    async with serving_at(clock, tmp_path / "killed") as server:
        leaving, log = server.house.leaving, server.broker.broker.engine.log
        server.tick()
        await until(lambda: not leaving.is_looking)
        raw = await client(server, "left", SessionExpiryInterval=1000)
        await raw.cut()
        await slept(server)
        clock.now_s += 5
        clock.wall_s = 0.0
        assert (await resumed(server, "cut")).present
        server.tick()
        await until(lambda: not leaving.is_looking)
        assert all(left_ms_of(log.fact(SESSIONS, name)) > years_s * 1000 for name in ("late", "left"))
        clock.now_s += 900
    async with serving_at(clock, tmp_path / "killed") as server:
        assert (await resumed(server, "left")).present
        clock.now_s += 200
        assert not (await resumed(server, "late")).present


async def resumed(server: Server, name: str) -> Any:
    """Return CONNACK of a client that comes for its session, and goes again."""
    raw = await unconnected(server)
    connack = await raw.connect(name, clean=False, SessionExpiryInterval=1000)
    await raw.cut()
    await slept(server)
    return connack


def test_properties_count_among_what_is_kept_in_memory() -> None:
    recent = Recent()
    for offset in range(1000):
        message = of_headers("a", b"", {"key": f"{offset:060000}"})
        message.offset = offset
        recent.add(message)
    assert not recent.has(1000 - MOST_RECENT_BYTES // 60_000 - 1)
    assert recent.has(999)
