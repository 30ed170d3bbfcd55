"""Sessions that outlive their connections, and the broker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from inside import copy_as_killed
from mqtt_loop import CONNACK, DISCONNECT, PUBACK, PUBCOMP, PUBLISH, PUBREC, PUBREL, client, serving, unconnected
from qflow.mqtt.server.storing import RECEIVED, SESSIONS

run = asyncio.run


@pytest.mark.parametrize("version", [4, 5])
def test_what_was_missed_comes_when_the_client_is_back(version: int, spool: Path) -> None:
    """In order, also what was published while no broker ran, and after it: the seam is exact."""
    run(_missed(version, spool))


async def _missed(version: int, spool: Path) -> None:
    kept = {"clean": False} | ({"SessionExpiryInterval": 1000} if version == 5 else {})
    async with serving(spool) as server:
        sleeper = await client(server, "sleeper", version=version, **kept)
        await sleeper.subscribe("a/#", "b", qos=1)
        await sleeper.disconnect()
        sender = await client(server)
        for number in range(150):
            await sender.published(f"a/{number}", b"%d" % number)
            await sender.published("c")
        again = await unconnected(server, version=version)
        assert (await again.connect("sleeper", **kept)).present
        assert await again.messages(70) == [b"%d" % number for number in range(70)]
        await again.disconnect()
    async with serving(spool) as server:
        await server.broker.publish("b", b"150")
        again = await client(server, "sleeper", version=version, **kept)
        sender = await client(server)
        await sender.published("a/151", b"151")
        got: list[bytes] = []
        while (message := await again.message()).payload != b"151":
            got += [message.payload] if not message.dup else []
        assert got == [b"%d" % number for number in range(got[0].isdigit() and int(got[0]), 151)]
        assert int(got[0]) <= 70 + 100


def test_a_session_without_expiry_ends_with_its_connection(spool: Path) -> None:
    """The log has nothing of it; and a clean start ends one that has."""
    run(_ended(spool))


async def _ended(spool: Path) -> None:
    async with serving(spool) as server:
        log = server.broker.broker.engine.log
        brief = await client(server, "brief")
        await brief.subscribe("a")
        assert log.facts(SESSIONS) == {}
        await brief.disconnect()
        assert not (await (await unconnected(server)).connect("brief", clean=False)).present
        long = await client(server, "long", SessionExpiryInterval=1000)
        await long.subscribe("a")
        await long.disconnect()
        assert list(log.facts(SESSIONS)) == ["long"]
        assert not (await (await unconnected(server)).connect("long")).present
        assert log.facts(SESSIONS) == {}


def test_disconnect_may_end_a_session_or_prolong_it(spool: Path) -> None:
    """By its expiry."""
    run(_prolonged(spool))


async def _prolonged(spool: Path) -> None:
    async with serving(spool) as server:
        raw = await client(server, "c", SessionExpiryInterval=1)
        await raw.disconnect(SessionExpiryInterval=1000)
        again = await unconnected(server)
        assert (await again.connect("c", clean=False, SessionExpiryInterval=1000)).present
        await again.disconnect(SessionExpiryInterval=0)
        assert not (await (await unconnected(server)).connect("c", clean=False)).present
        worse = await client(server, "d")
        worse.send(b"\xe0\x07\x00\x05\x11\0\0\0\x05")
        [told] = await worse.gone()
        assert (told.kind, told.code) == (DISCONNECT, 0x82)


@pytest.mark.parametrize("version", [4, 5])
def test_what_was_not_acknowledged_comes_again(version: int, spool: Path) -> None:
    """First, in order, with the same packet ids and the flag that says so; also after a kill."""
    run(_again(version, spool))


async def _again(version: int, spool: Path) -> None:
    kept = {"clean": False} | ({"SessionExpiryInterval": 1000} if version == 5 else {})
    killed = spool.with_name("killed")
    async with serving(spool) as server:
        raw = await client(server, "c", version=version, **kept)
        await raw.subscribe("a", qos=2)
        sender = await client(server)
        for number in range(3):
            await sender.published("a", b"one %d" % number)
            await sender.released("a", b"two %d" % number)
        before = [await raw.message(ack=False) for _ in range(6)]
        raw.ack(PUBACK, before[0].packet_id)
        raw.ack(PUBREC, before[1].packet_id)
        assert (await raw.expect(PUBREL)).packet_id == before[1].packet_id
        copy_as_killed(server.broker.broker, killed)
        await raw.cut()
        again = await client(server, "c", version=version, **kept)
        await _same(again, before[1:])
        await sender.published("a", b"new")
        assert await again.messages(1) == [b"new"]
        await again.nothing()
    async with serving(killed) as server:
        again = await client(server, "c", version=version, **kept)
        got = []
        while len(got) < 5:
            one = await again.next()
            if one.kind == PUBREL or one.qos == 2 or one.packet_id != before[0].packet_id:
                got.append(one)
        assert sorted((one.kind, one.packet_id, one.payload) for one in got) == sorted(
            [(PUBREL, before[1].packet_id, b"")] + [(PUBLISH, one.packet_id, one.payload) for one in before[2:]]
        )


async def _same(raw, before) -> None:  # type: ignore[no-untyped-def]
    assert (await raw.expect(PUBREL)).packet_id == before[0].packet_id
    raw.ack(PUBCOMP, before[0].packet_id)
    for one in before[1:]:
        got = await raw.message(ack=False)
        assert (got.payload, got.packet_id, got.qos, got.dup) == (one.payload, one.packet_id, one.qos, True)
    for one in before[1:]:
        raw.ack(PUBACK if one.qos == 1 else PUBREC, one.packet_id)
        if one.qos == 2:
            assert (await raw.expect(PUBREL)).packet_id == one.packet_id
            raw.ack(PUBCOMP, one.packet_id)


def test_a_message_with_qos_2_is_stored_once(spool: Path) -> None:
    """Whatever the client sends again before it is released; its packet id is free afterwards."""
    run(_stored_once(spool))


async def _stored_once(spool: Path) -> None:
    async with serving(spool) as server:
        raw = await client(server, "c", SessionExpiryInterval=1000)
        for _ in range(3):
            raw.publish("a", b"1", qos=2, packet_id=7, dup=True)
        assert [(await raw.expect(PUBREC)).packet_id for _ in range(3)] == [7, 7, 7]
        await raw.cut()
        again = await client(server, "c", clean=False, SessionExpiryInterval=1000)
        again.publish("a", b"1", qos=2, packet_id=7, dup=True)
        assert (await again.expect(PUBREC)).code == 0
        await again.cut()
    async with serving(spool) as server:
        log = server.broker.broker.engine.log
        assert list(log.facts(RECEIVED)) == ["c\x007"]
        again = await client(server, "c", clean=False, SessionExpiryInterval=1000)
        again.publish("a", b"1", qos=2, packet_id=7, dup=True)
        assert (await again.expect(PUBREC)).code == 0
        again.ack(PUBREL, 7)
        assert (await again.expect(PUBCOMP)).code == 0
        assert log.facts(RECEIVED) == {}
        again.publish("a", b"2", qos=2, packet_id=7)
        assert (await again.expect(PUBREC)).code == 0
        assert [message.body async for message in server.broker.stream("mqtt").query()] == [b"1", b"2"]


def test_a_release_whose_answer_was_lost_is_complete(spool: Path) -> None:
    """With 0x92, a client would say that its message failed, and a program publish it again.

    In a session that begins there was nothing to release, and the client is told.
    """
    run(_released_again(spool))


async def _released_again(spool: Path) -> None:
    async with serving(spool) as server:
        raw = await client(server, "c", SessionExpiryInterval=1000)
        raw.publish("a", b"1", qos=2, packet_id=7)
        assert (await raw.expect(PUBREC)).code == 0
        raw.ack(PUBREL, 8)
        assert (await raw.expect(PUBCOMP)).code == 0x92
        raw.ack(PUBREL, 7)
        assert (await raw.expect(PUBCOMP)).code == 0
        await raw.cut()
    async with serving(spool) as server:
        again = await client(server, "c", clean=False, SessionExpiryInterval=1000)
        again.ack(PUBREL, 7)
        assert (await again.expect(PUBCOMP)).code == 0
        await again.cut()
        new = await client(server, "c", clean=True, SessionExpiryInterval=1000)
        new.ack(PUBREL, 7)
        assert (await new.expect(PUBCOMP)).code == 0x92


def test_a_packet_id_that_begins_anew_is_another_message(spool: Path) -> None:
    """A client that forgot what it had in flight, and counts from 1 again, sends it without DUP."""
    run(_begun_anew(spool))


async def _begun_anew(spool: Path) -> None:
    async with serving(spool) as server:
        raw = await client(server, "c", SessionExpiryInterval=1000)
        raw.publish("a", b"1", qos=2, packet_id=1)
        assert (await raw.expect(PUBREC)).code == 0
        await raw.cut()
        again = await client(server, "c", clean=False, SessionExpiryInterval=1000)
        for dup in (True, False, False, True):
            again.publish("a", b"1" if dup else b"2", qos=2, packet_id=1, dup=dup)
            assert (await again.expect(PUBREC)).code == 0
        again.ack(PUBREL, 1)
        assert (await again.expect(PUBCOMP)).code == 0
        assert [message.body async for message in server.broker.stream("mqtt").query()] == [b"1", b"2"]


def test_a_packet_id_that_begins_anew_is_another_message_also_when_it_is_sent_again(spool: Path) -> None:
    """What came first of the new one is lost on the way, or with a server that was killed: it comes with DUP alone."""
    run(_sent_again(spool))


async def _sent_again(spool: Path) -> None:
    for first, again in (("a", b"1"), ("a", b"2")), (("a", b"2"), ("b", b"2")), (("b", b"2"), ("b", b"")):
        for topic, payload, dup in (*first, False), (*first, True), (*again, True), (*again, True):
            async with serving(spool) as server:
                raw = await client(server, "c", clean=False, SessionExpiryInterval=1000)
                raw.publish(topic, payload, qos=2, packet_id=1, dup=dup)
                assert (await raw.expect(PUBREC)).code == 0
                await raw.cut()
    async with serving(spool) as server:
        stored = [(message.topic, message.body) async for message in server.broker.stream("mqtt").query()]
        raw = await client(server, "c", clean=False, SessionExpiryInterval=1000)
        raw.ack(PUBREL, 1)
        assert (await raw.expect(PUBCOMP)).code == 0
    assert stored == [("a", b"1"), ("a", b"2"), ("a", b"2"), ("b", b"2"), ("b", b"2"), ("b", b"")]


def test_a_slow_client_that_sleeps_and_wakes_misses_nothing(spool: Path) -> None:
    """Cut off in the middle, again and again, with a bound of its own on what it takes."""
    run(_cut_off(spool))


async def _cut_off(spool: Path) -> None:
    async with serving(spool) as server:
        sender = await client(server)
        raw = await client(server, "c", SessionExpiryInterval=1000, ReceiveMaximum=7)
        await raw.subscribe("a", qos=2)
        published = 0
        got: list[bytes] = []
        for turn in range(12):
            for _ in range(20):
                if turn % 2:
                    await sender.released("a", b"%d" % published)
                else:
                    await sender.published("a", b"%d" % published)
                published += 1
            got += await raw.messages(15)
            await raw.cut()
            raw = await client(server, "c", clean=False, SessionExpiryInterval=1000, ReceiveMaximum=7)
        got += await raw.messages(published - len(got))
        assert got == [b"%d" % number for number in range(published)]
        await raw.nothing()


def test_unsubscribing_ends_it_for_good(spool: Path) -> None:
    """Also for who comes back; what is not there is told."""
    run(_unsubscribed(spool))


async def _unsubscribed(spool: Path) -> None:
    async with serving(spool) as server:
        raw = await client(server, "c", SessionExpiryInterval=1000)
        await raw.subscribe("a", "b")
        assert (await raw.unsubscribe("a", "c")).codes == [0, 0x11]
        await raw.disconnect()
        await server.broker.publish("a", b"a")
        await server.broker.publish("b", b"b")
        again = await client(server, "c", clean=False, SessionExpiryInterval=1000)
        assert await again.messages(1) == [b"b"]
        await again.nothing()


def test_what_retention_took_is_gone_for_sleepers_too(spool: Path) -> None:
    """They go on with what is there, and it is counted."""
    run(_retained_no_more(spool))


async def _retained_no_more(spool: Path) -> None:
    async with serving(spool) as server:
        raw = await client(server, "c", SessionExpiryInterval=1000)
        await raw.subscribe("a", qos=2)
        await server.broker.publish("a", b"first", headers={"mqtt.qos": 2})
        held = await raw.message(ack=False)
        await raw.disconnect()
        for number in range(5000):
            server.broker.submit_publish("a", b"%d" % number)
        await server.broker.alter_stream("mqtt", retention_messages=10)
        server.broker.broker.stream("mqtt").retain()  # type: ignore[attr-defined]
        again = await client(server, "c", clean=False, SessionExpiryInterval=1000)
        assert (await again.expect(PUBREL)).packet_id == held.packet_id
        assert (await again.messages(1))[0].isdigit()


def test_many_sessions_sleep_at_no_cost(spool: Path) -> None:
    """Nothing of them is in memory, and messages are stored once."""
    run(_many(spool))


async def _many(spool: Path) -> None:
    async with serving(spool) as server:
        for number in range(50):
            raw = await client(server, f"c{number}", SessionExpiryInterval=1000)
            await raw.subscribe("a")
            await raw.disconnect()
        sender = await client(server)
        for number in range(100):
            await sender.published("a", b"%d" % number)
        assert server.connections == 1
        assert (await server.broker.stream("mqtt").stats()).messages == 100
        for number in (0, 49):
            raw = await client(server, f"c{number}", clean=False, SessionExpiryInterval=1000)
            assert await raw.messages(100) == [b"%d" % number for number in range(100)]


def test_the_answer_to_connect_says_whether_the_session_was_there(spool: Path) -> None:
    """And is the first packet, before all that waits."""
    run(_present(spool))


async def _present(spool: Path) -> None:
    async with serving(spool) as server:
        raw = await client(server, "c", version=4, clean=False)
        await raw.subscribe("a")
        await raw.disconnect()
        await server.broker.publish("a", b"x")
        again = await unconnected(server, version=4)
        connack = await again.connect("c", clean=False)
        assert (connack.kind, connack.present) == (CONNACK, True)
        assert await again.messages(1) == [b"x"]
