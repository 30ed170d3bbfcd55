"""What is published when a client is gone, and when sessions end: by a clock that the test sets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import qflow
from inside import copy_as_killed
from mqtt_loop import DISCONNECT, Raw, SetClock, client, serving, serving_at, slept, unconnected
from qflow.mqtt import Server
from qflow.mqtt.model.sessions import left_ms_of
from qflow.mqtt.server import connecting, session
from qflow.mqtt.server.connecting import Terms
from qflow.mqtt.server.leaving import STALE
from qflow.mqtt.server.storing import RECEIVED, SESSIONS, WILLS

run = asyncio.run
DAY_S = 86_400


def will(**more: Any) -> dict[str, Any]:
    return {"topic": "will", "payload": b"gone", "qos": 1, **more}


async def watcher(server: Server) -> Raw:
    """Return a client that gets wills."""
    raw = await client(server)
    await raw.subscribe("will", qos=2, flags=8)
    return raw


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_will_is_published_when_a_client_is_cut_off(version: int, qos: int, spool: Path) -> None:
    """And not when it says good-bye; retained, if it is to be."""
    run(_cut(version, qos, spool))


async def _cut(version: int, qos: int, spool: Path) -> None:
    async with serving(spool) as server:
        raw = await watcher(server)
        first = await client(server, "c", version=version, will=will(qos=qos))
        await first.disconnect()
        second = await client(server, "c", version=version, will=will(qos=qos, retain=True))
        await second.cut()
        message = await raw.message()
        assert (message.topic, message.payload, message.qos, message.retain) == ("will", b"gone", qos, True)
        await raw.nothing()
        assert server.broker.broker.engine.log.facts(WILLS) == {}
        late = await watcher(server)
        assert (await late.message()).retain


def test_a_client_may_ask_for_its_will(spool: Path) -> None:
    """With any code of DISCONNECT but 0; one that broke the protocol has no choice, nor one that is taken over."""
    run(_asked(spool))


async def _asked(spool: Path) -> None:
    async with serving(spool) as server:
        raw = await watcher(server)
        for code in (0x04, 0x80):
            one = await client(server, "c", will=will())
            await one.disconnect(code)
            assert await raw.messages(1) == [b"gone"]
        two = await client(server, "c", will=will())
        two.send(b"\0\0")
        assert await raw.messages(1) == [b"gone"]
        await client(server, "c", will=will(payload=b"taken over"))
        await client(server, "c")
        assert await raw.messages(1) == [b"taken over"]
        await raw.nothing()


def test_a_will_waits_for_its_delay_and_not_for_who_is_back(spool: Path) -> None:
    """A client that is back before it is due has not gone; a clean start ends the session, so it is due."""
    run(_delayed(spool))


async def _delayed(spool: Path) -> None:
    clock = SetClock()
    async with serving_at(clock, spool) as server:
        raw = await watcher(server)
        given: dict[str, Any] = {
            "will": will(properties={"WillDelayInterval": DAY_S}),
            "SessionExpiryInterval": 2 * DAY_S,
        }
        one = await client(server, "c", **given)
        await one.cut()
        await slept(server, 1)
        clock.now_s += DAY_S - 1
        server.tick()
        again = await client(server, "c", clean=False, **given)
        clock.now_s += DAY_S
        server.tick()
        await raw.nothing()
        await again.cut()
        await slept(server, 1)
        clock.now_s += DAY_S
        server.tick()
        assert await raw.messages(1) == [b"gone"]
        two = await client(server, "d", **given)
        await two.cut()
        await slept(server, 1)
        await client(server, "d")
        assert await raw.messages(1) == [b"gone"]
        clock.now_s += DAY_S
        server.tick()
        await raw.nothing()


def test_a_will_is_due_when_its_session_ends(spool: Path) -> None:
    """If that comes first."""
    run(_session_first(spool))


async def _session_first(spool: Path) -> None:
    clock = SetClock()
    async with serving_at(clock, spool) as server:
        raw = await watcher(server)
        one = await client(server, "c", will=will(properties={"WillDelayInterval": DAY_S}), SessionExpiryInterval=10)
        await one.cut()
        await slept(server, 1)
        server.tick()
        await raw.nothing()
        clock.now_s += 10
        server.tick()
        assert await raw.messages(1) == [b"gone"]


@pytest.mark.parametrize("delay_s", [0, 100])
def test_a_kill_of_the_server_does_not_lose_a_will(delay_s: int, spool: Path) -> None:
    """Whether its client was there then, or was awaited."""
    run(_killed(delay_s, spool))


async def _killed(delay_s: int, spool: Path) -> None:
    clock = SetClock()
    killed = spool.with_name("killed")
    given = {"WillDelayInterval": delay_s, "MessageExpiryInterval": 7}
    async with serving_at(clock, spool) as server:
        await client(server, "c", will=will(properties=given), SessionExpiryInterval=1000)
        gone = await client(
            server,
            "d",
            will=will(payload=b"awaited", properties={"WillDelayInterval": 100}),
            SessionExpiryInterval=1000,
        )
        await gone.cut()
        await slept(server, 1)
        copy_as_killed(server.broker.broker, killed)
    async with serving_at(clock, killed) as server:
        raw = await watcher(server)
        server.tick()
        if delay_s:
            await raw.nothing()
        else:
            assert await raw.messages(1) == [b"gone"]
        clock.now_s += 100
        server.tick()
        got = [await raw.message() for _ in range(2 if delay_s else 1)]
        assert {message.payload for message in got} == ({b"gone", b"awaited"} if delay_s else {b"awaited"})
        assert all(message.properties.get("MessageExpiryInterval") in (7, None) for message in got)
        server.tick()
        await raw.nothing()
        assert server.broker.broker.engine.log.facts(WILLS) == {}


@pytest.mark.parametrize("is_late", [True, False], ids=["when it is due", "in time"])
@pytest.mark.parametrize("end", ["none", "kill", "close"])
def test_a_will_that_is_due_is_not_lost_by_a_client_that_is_back_first(is_late: bool, end: str, spool: Path) -> None:
    """Before it was looked whether it is due; one that is not due is never published then."""
    run(_back_first(is_late, end, spool))


async def _back_first(is_late: bool, end: str, spool: Path) -> None:
    clock = SetClock()
    killed = spool.with_name("killed")
    given = {"will": will(properties={"WillDelayInterval": 100}), "SessionExpiryInterval": 1000}
    async with serving_at(clock, spool) as server:
        raw = await watcher(server)
        await (await client(server, "c", **given)).cut()
        await slept(server, 1)
        copy_as_killed(server.broker.broker, killed)
        if end == "none":
            clock.now_s += 100 if is_late else 99
            await comes_back(server, raw, "c", is_late)
    if end != "none":
        clock.now_s += 100 if is_late else 99
        async with serving_at(clock, killed if end == "kill" else spool) as server:
            await comes_back(server, await watcher(server), "c", is_late)


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("delay_s", [0, 100])
def test_a_will_of_who_was_there_at_a_kill_is_not_lost_by_its_client(version: int, delay_s: int, spool: Path) -> None:
    """That is back first; its delay begins with the restart."""
    run(_there_at_a_kill(version, delay_s, spool))


async def _there_at_a_kill(version: int, delay_s: int, spool: Path) -> None:
    clock = SetClock()
    killed = spool.with_name("killed")
    properties = {"WillDelayInterval": delay_s} if version == 5 else {}
    lasts = {"SessionExpiryInterval": 1000} if version == 5 else {}
    async with serving_at(clock, spool) as server:
        await client(server, "c", version=version, clean=False, will=will(properties=properties), **lasts)
        copy_as_killed(server.broker.broker, killed)
    async with serving_at(clock, killed) as server:
        await comes_back(server, await watcher(server), "c", version == 4 or not delay_s, version=version)


async def comes_back(server: Server, raw: Raw, client_id: str, is_published: bool, **given: Any) -> None:
    """Connect again to a session, and check whether its will was published, once."""
    assert (await (await unconnected(server, **given)).connect(client_id, clean=False)).present
    if is_published:
        assert await raw.messages(1) == [b"gone"]
    server.tick()
    await raw.nothing()
    assert server.broker.broker.engine.log.facts(WILLS) == {}
    assert not server.house.leaving.is_due(client_id)


def test_a_will_waits_on_for_who_is_not_let_in(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since the log does not take the session."""
    run(_not_let_in(spool, monkeypatch))


async def _not_let_in(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SetClock()
    async with serving_at(clock, spool) as server:
        raw = await watcher(server)
        given: dict[str, Any] = {
            "will": will(properties={"WillDelayInterval": 100}),
            "SessionExpiryInterval": 1000,
        }
        await (await client(server, "c", **given)).cut()
        await slept(server, 1)
        with monkeypatch.context() as patched:
            patched.setattr(connecting, "keep", refuse)
            assert (await (await unconnected(server)).connect("c", clean=False, **given)).code == 0x97
        clock.now_s += 100
        server.tick()
        assert await raw.messages(1) == [b"gone"]


def test_a_will_is_published_at_its_moment(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with the next of the ticks that come each second, whichever of two is due first."""
    run(_at_its_moment(spool, monkeypatch))


async def _at_its_moment(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(spool) as server:
        monkeypatch.setattr(server.house, "tick", lambda: None)
        raw = await watcher(server)
        for delay_s in (2, 1):
            given = will(payload=b"%d s" % delay_s, properties={"WillDelayInterval": delay_s})
            await (await client(server, f"c{delay_s}", will=given, SessionExpiryInterval=1000)).cut()
        assert await raw.messages(2) == [b"1 s", b"2 s"]


@pytest.mark.parametrize("topic", ["$SYS/x"])
def test_a_will_that_would_not_be_allowed_is_refused(topic: str, spool: Path) -> None:
    """With its CONNECT."""
    run(_forbidden(topic, spool))


async def _forbidden(topic: str, spool: Path) -> None:
    async with serving(spool) as server:
        raw = await unconnected(server)
        assert (await raw.connect("c", will=will(topic=topic))).code == 0x90


def test_a_session_expires(spool: Path) -> None:
    """Its record goes, with all that belongs to it; one that never expires stays."""
    run(_expired(spool))


async def _expired(spool: Path) -> None:
    clock = SetClock()
    async with serving_at(clock, spool) as server:
        log = server.broker.broker.engine.log
        for name, expiry_s in (("day", DAY_S), ("two", 2 * DAY_S), ("ever", 0xFFFFFFFF), ("there", 5)):
            raw = await client(server, name, SessionExpiryInterval=expiry_s)
            await raw.subscribe("a")
            raw.publish("a", qos=2, packet_id=9)
            await raw.next()
            if name != "there":
                await raw.disconnect()
        clock.now_s += DAY_S - 1
        assert (await (await unconnected(server)).connect("day", clean=False, SessionExpiryInterval=DAY_S)).present
        await slept(server, 2)
        clock.now_s += 1
        server.tick()
        await last_look(server)
        assert set(log.facts(SESSIONS)) == {"day", "two", "ever", "there"}
        clock.now_s += DAY_S + 100
        assert not (await (await unconnected(server)).connect("two", clean=False)).present
        server.tick()
        await last_look(server)
        assert set(log.facts(SESSIONS)) == {"day", "ever", "there"}
        assert {key.split("\0")[0] for key in log.facts(RECEIVED)} == {"day", "ever", "there"}


def test_sessions_are_looked_at_when_one_ends(spool: Path) -> None:
    """Not each minute; that of a client whose going the log did not take is looked at, too."""
    run(_looked_at(spool))


async def _looked_at(spool: Path) -> None:
    clock = SetClock()
    looks: list[int] = []
    async with serving_at(clock, spool) as server:
        records, log = server.house.hub.records, server.broker.broker.engine.log
        page = records.sessions_page

        def counted(position: bytes, now_ms: int, report: Any) -> Any:
            looks.append(now_ms)
            return page(position, now_ms, report)

        records.sessions_page = counted  # type: ignore[method-assign]

        async def looks_after(seconds: float) -> int:
            before = len(looks)
            clock.now_s += seconds
            server.tick()
            await last_look(server)
            return len(looks) - before

        await looks_after(0)  # that of the start, unless it was before
        for name, expiry_s in (("ever", 0xFFFFFFFF), ("hour", 3600), ("two", 7200)):
            await (await client(server, name, SessionExpiryInterval=expiry_s)).disconnect()
            await slept(server)
        assert [await looks_after(1799) for _ in range(3)] == [0, 0, 1]
        assert set(log.facts(SESSIONS)) == {"ever", "two"}
        assert [await looks_after(1000) for _ in range(3)] == [0, 1, 0]
        assert set(log.facts(SESSIONS)) == {"ever"}
        assert await looks_after(DAY_S) == 0
        raw = await client(server, "ever", clean=False, SessionExpiryInterval=0xFFFFFFFF)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(session, "keep", refuse)
            await raw.disconnect()
            await slept(server)
        assert left_ms_of(log.facts(SESSIONS)["ever"]) == 0
        assert [await looks_after(61) for _ in range(2)] == [1, 0]
        assert left_ms_of(log.facts(SESSIONS)["ever"]) > 0


def refuse(*_: object) -> None:
    raise qflow.DiskFull("no room")


async def last_look(server: Server) -> None:
    """Wait until what a tick began is done."""
    while server.house.leaving.is_looking:
        await asyncio.sleep(0)


def test_a_session_of_a_client_that_a_kill_cut_off_expires(spool: Path) -> None:
    """From the restart on, also where the broker is restarted before that."""
    run(_cut_off(spool))


async def _cut_off(spool: Path) -> None:
    clock = SetClock()
    killed = spool.with_name("killed")
    async with serving_at(clock, spool) as server:
        raw = await client(server, "c", SessionExpiryInterval=100)
        await raw.subscribe("a")
        copy_as_killed(server.broker.broker, killed)
    clock.now_s += 1000
    async with serving_at(clock, killed) as server:
        server.tick()
        await last_look(server)
    clock.now_s += 99
    async with serving_at(clock, killed) as server:
        log = server.broker.broker.engine.log
        server.tick()
        await last_look(server)
        assert set(log.facts(SESSIONS)) == {"c"}
        clock.now_s += 61
        server.tick()
        await last_look(server)
        assert set(log.facts(SESSIONS)) == set()


@pytest.mark.parametrize("version", [4, 5])
def test_sessions_can_be_given_an_end(version: int, spool: Path) -> None:
    """Those of 3.1.1 have none otherwise; a client of MQTT 5 is told, and its good-bye does not change that."""
    run(_given_an_end(version, spool))


async def _given_an_end(version: int, spool: Path) -> None:
    clock = SetClock()
    for wrong in (0, -1, 2**32 - 1, 1.5):
        with pytest.raises(qflow.InvalidArgument, match="max_session_expiry_s is a number of seconds from 1 to"):
            Terms(max_session_expiry_s=wrong)  # type: ignore[arg-type]
    async with serving_at(clock, spool, max_session_expiry_s=100) as server:
        log = server.broker.broker.engine.log
        for client_id, wanted_s, told in (("long", 2**32 - 1, 100), ("short", 50, None)):
            raw = await unconnected(server, version=version)
            wish = {"SessionExpiryInterval": wanted_s} if version == 5 else {}
            connack = await raw.connect(client_id, clean=version == 5, **wish)
            assert connack.properties.get("SessionExpiryInterval") == (told if version == 5 else None)
            await raw.subscribe("a")
            await raw.disconnect(**wish)
            await slept(server)
        clock.now_s += 99
        server.tick()
        await last_look(server)
        assert set(log.facts(SESSIONS)) == ({"long"} if version == 5 else {"long", "short"})
        clock.now_s += 61
        server.tick()
        await last_look(server)
        assert set(log.facts(SESSIONS)) == set()


def test_who_says_nothing_is_closed(spool: Path) -> None:
    """One and a half times its keep-alive after the last packet; one without a keep-alive never."""
    run(_silent(spool))


async def _silent(spool: Path) -> None:
    clock = SetClock()
    async with serving_at(clock, spool) as server:
        ever, brief, mute = await client(server), await client(server, keep_alive_s=100), await unconnected(server)
        clock.now_s += 149
        server.tick()
        assert await mute.gone() == []
        await brief.nothing()
        clock.now_s += 149
        server.tick()
        await brief.nothing()
        clock.now_s += 150
        server.tick()
        [told] = await brief.gone()
        assert (told.kind, told.code) == (DISCONNECT, 0x8D)
        clock.now_s += DAY_S
        server.tick()
        await ever.nothing()


def test_the_server_may_ask_for_a_keep_alive(spool: Path) -> None:
    """Of a client of MQTT 5 that wants a longer one, or none; it is told, and closed if it does not keep to it."""
    run(_asked_for(spool))


async def _asked_for(spool: Path) -> None:
    clock = SetClock()
    for wrong in (0, -1, 65_536, 1.5, True, "60 s or so"):
        with pytest.raises(qflow.InvalidArgument, match="max_keep_alive_s"):
            Terms(max_keep_alive_s=wrong)  # type: ignore[arg-type]
    async with serving_at(clock, spool, max_keep_alive_s=60) as server:
        for wanted, told in ((120, 60), (0, 60), (50, None)):
            connack = await (await unconnected(server)).connect("", keep_alive_s=wanted)
            assert connack.properties.get("ServerKeepAlive") == told
        old = await client(server, version=4)
        raw = await client(server)
        clock.now_s += 89
        server.tick()
        await raw.nothing()
        clock.now_s += 90
        server.tick()
        assert (await raw.expect(DISCONNECT)).code == 0x8D
        await old.nothing()


def test_a_session_sleeps_once_its_client_is_told_to_go(spool: Path) -> None:
    """Also if that stays on the line: its will does not wait for it."""
    run(_told_to_go(spool))


async def _told_to_go(spool: Path) -> None:
    async with serving(spool) as server:
        raw = await watcher(server)
        stays = await client(server, "stays", will=will())
        stays.send(b"\0\0")
        assert await raw.messages(1) == [b"gone"]
        assert (await stays.expect(DISCONNECT)).code == 0x81


def test_a_client_that_comes_and_goes_leaves_nothing_behind(spool: Path) -> None:
    """Its will is remembered once, and some times in vain, but not each time."""
    run(_comes_and_goes(spool))


async def _comes_and_goes(spool: Path) -> None:
    clock = SetClock()
    async with serving_at(clock, spool) as server:
        leaving = server.house.leaving
        for number in range(5 * STALE):
            leaving.wait_for(clock.now_ms() + 1000 * DAY_S + number, "c")
        assert leaving.awaited <= STALE + 3
        raw = await watcher(server)
        given: dict[str, Any] = {"will": will(properties={"WillDelayInterval": 5}), "SessionExpiryInterval": DAY_S}
        for _ in range(5):
            one = await client(server, "c", clean=False, **given)
            await one.cut()
            await slept(server, 1)
            clock.now_s += 4
            server.tick()
        clock.now_s += 1
        server.tick()
        assert await raw.messages(1) == [b"gone"]
        await raw.nothing()
