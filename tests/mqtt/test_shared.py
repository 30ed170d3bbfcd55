"""Groups that share a subscription: each message goes to one member, and to another one if that dies."""

from __future__ import annotations

import asyncio
import heapq
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from doors.event_loop import until
from inside import copy_as_killed
from mqtt_loop import DISCONNECT, PUBACK, PUBREC, PUBREL, Raw, SetClock, client, serving, serving_at, slept, unconnected
from qflow.mqtt import Server
from qflow.mqtt.model.messages import Message
from qflow.mqtt.server import groups
from qflow.mqtt.server.groups import GIVEN_BACK_AT_ONCE, Group
from qflow.mqtt.server.outbound import Outbound
from qflow.mqtt.server.storing import GROUPS

run = asyncio.run
LASTS: dict[str, Any] = {"SessionExpiryInterval": 1000}


async def member(server: Server, name: str, *, qos: int = 1, group: str = "$share/g/a/#", **given: Any) -> Raw:
    """Return a client that is a member of the group."""
    raw = await client(server, name, **given)
    assert (await raw.subscribe(group, qos=qos)).codes == [qos]
    return raw


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_each_message_goes_to_one_member(version: int, qos: int, spool: Path) -> None:
    """In turn; other groups, and who is in none, get all of them."""
    run(_to_one(version, qos, spool))


async def _to_one(version: int, qos: int, spool: Path) -> None:
    async with serving(spool) as server:
        members = [await member(server, f"m{number}", qos=qos, version=version) for number in range(3)]
        other = await member(server, "other", group="$share/h/a/+", version=version)
        alone = await client(server, "alone", version=version)
        await alone.subscribe("a/#")
        sender = await client(server)
        for number in range(30):
            if qos:
                await sender.released(f"a/{number}", b"%d" % number)
            else:
                sender.publish(f"a/{number}", b"%d" % number, qos=0)
        got = [await raw.messages(10) for raw in members]
        assert sorted(int(one) for some in got for one in some) == list(range(30))
        assert all(some == sorted(some, key=int) for some in got)
        for raw in (other, alone):
            assert await raw.messages(30) == [b"%d" % number for number in range(30)]
        for raw in (*members, other, alone):
            await raw.nothing()


def test_what_a_member_that_dies_had_goes_to_another(spool: Path) -> None:
    """Before anything new; what it had acknowledged does not."""
    run(_dies(spool))


async def _dies(spool: Path) -> None:
    async with serving(spool) as server:
        one, two = await member(server, "one", ReceiveMaximum=5), await member(server, "two", ReceiveMaximum=5)
        for number in range(40):
            await server.broker.publish("a/b", b"%d" % number)
        held = [await one.message(ack=False) for _ in range(5)]
        one.ack(PUBACK, held[0].packet_id)
        fresh = await one.message(ack=False)
        theirs = [await two.message(ack=False) for _ in range(5)]
        await one.cut()
        await slept(server, 1)
        for message in theirs:
            two.ack(PUBACK, message.packet_id)
        lost = sorted(int(message.payload) for message in [*held[1:], fresh])
        assert [int(one) for one in await two.messages(5)] == lost
        done = {held[0].payload, *(message.payload for message in theirs), *(b"%d" % number for number in lost)}
        rest = [b"%d" % number for number in range(40) if b"%d" % number not in done]
        assert await two.messages(len(rest)) == rest
        await two.nothing()


def test_a_group_waits_while_none_has_room_or_is_there(spool: Path) -> None:
    """With a member whose session lasts; across restarts and kills."""
    run(_waits(spool))


async def _waits(spool: Path) -> None:
    killed = spool.with_name("killed")
    async with serving(spool) as server:
        one, two = await member(server, "one", **LASTS), await member(server, "two")
        await one.disconnect()
        await two.disconnect()
        for number in range(100):
            server.broker.submit_publish("a/b", b"%d" % number)
        await server.broker.publish("a/b", b"100")
        two = await member(server, "two", ReceiveMaximum=10)
        assert await two.messages(20) == [b"%d" % number for number in range(20)]
        await two.cut()
        await slept(server)
        copy_as_killed(server.broker.broker, killed)
    async with serving(killed) as server:
        one = await client(server, "one", clean=False, **LASTS)
        got = await one.messages(81)
        assert got[-1] == b"100"
        assert sorted(map(int, got)) == list(range(20, 101))
        await one.nothing()


def test_a_group_without_lasting_members_ends_with_the_last(spool: Path) -> None:
    """Who comes next begins anew; the log has nothing of it."""
    run(_ends(spool))


async def _ends(spool: Path) -> None:
    async with serving(spool) as server:
        log = server.broker.broker.engine.log
        one = await member(server, "one")
        await one.disconnect()
        await server.broker.publish("a/b", b"nobody")
        one = await member(server, "one", **LASTS)
        assert set(log.facts(GROUPS)) == {"g\0a/#"}
        await one.nothing()
        await one.unsubscribe("$share/g/a/#")
        assert log.facts(GROUPS) == {}
        await server.broker.publish("a/b", b"nobody")
        await one.subscribe("$share/g/a/#")
        await server.broker.publish("a/b", b"one")
        assert await one.messages(1) == [b"one"]
        await one.disconnect(SessionExpiryInterval=0)
        await slept(server)
        assert log.facts(GROUPS) == {}
        one = await member(server, "one", **LASTS)
        await one.disconnect()
        assert not (await (await unconnected(server)).connect("one")).present
        assert log.facts(GROUPS) == {}


def test_a_group_ends_when_the_last_session_expires(spool: Path) -> None:
    """As if its client had unsubscribed."""
    run(_expires(spool))


async def _expires(spool: Path) -> None:
    clock = SetClock()
    async with serving_at(clock, spool) as server:
        log = server.broker.broker.engine.log
        one = await member(server, "one", **LASTS)
        await one.disconnect()
        await slept(server)
        clock.now_s += 2000
        server.tick()
        while log.facts(GROUPS):
            await asyncio.sleep(0)


def test_an_exchange_with_qos_2_is_the_members_own(spool: Path) -> None:
    """It goes on when the member is back; nobody else gets the message meanwhile, also after a kill."""
    run(_own(spool))


async def _own(spool: Path) -> None:
    killed = spool.with_name("killed")
    async with serving(spool) as server:
        one = await member(server, "one", qos=2, **LASTS)
        two = await member(server, "two", qos=2, **LASTS)
        sender = await client(server)
        await sender.released("a/b", b"1")
        await sender.released("a/b", b"2")
        first, second = await one.message(ack=False), await two.message(ack=False)
        assert {first.payload, second.payload} == {b"1", b"2"}
        one.ack(PUBREC, first.packet_id)
        await one.expect(PUBREL)
        copy_as_killed(server.broker.broker, killed)
        await one.cut()
        await two.cut()
    async with serving(killed) as server:
        two = await client(server, "two", clean=False, **LASTS)
        again = await two.message()
        assert (again.payload, again.packet_id, again.dup) == (second.payload, second.packet_id, True)
        await two.nothing()
        one = await client(server, "one", clean=False, **LASTS)
        assert (await one.expect(PUBREL)).packet_id == first.packet_id
        await one.nothing()


@pytest.mark.parametrize("version", [4, 5])
def test_a_group_begins_where_its_first_member_says(version: int, spool: Path) -> None:
    """And not anew with the next one."""
    run(_begins(version, spool))


async def _begins(version: int, spool: Path) -> None:
    async with serving(spool) as server:
        for number in range(50):
            await server.broker.publish("a/b", b"%d" % number)
        one = await client(server, "one", version=version)
        if version == 5:
            await one.subscribe("$share/g/a/#", UserProperty=("qflow-start", "10"))
        else:
            await one.subscribe("$share/g/$replay/10/a/#")
        assert await one.messages(40) == [b"%d" % number for number in range(10, 50)]
        two = await client(server, "two")
        await two.subscribe("$share/g/a/#", UserProperty=("qflow-start", "earliest"))
        await two.nothing()


def test_members_come_and_go(spool: Path) -> None:
    """While others publish; every message is acknowledged by somebody in the end."""
    run(_come_and_go(spool))


async def _come_and_go(spool: Path) -> None:
    async with serving(spool) as server:
        keeper = await member(server, "keeper", **LASTS)
        sender = await client(server)
        done: set[bytes] = set()
        published = 0
        for turn in range(15):
            raw = await member(server, f"m{turn}", ReceiveMaximum=3)
            for _ in range(20):
                await sender.published("a/b", b"%d" % published)
                published += 1
            done.update(await raw.messages(2))
            done.update(await keeper.messages(3))
            if turn % 3 == 0:
                await keeper.cut()
                await raw.cut()
                keeper = await client(server, "keeper", clean=False, **LASTS)
            elif turn % 3 == 1:
                await raw.unsubscribe("$share/g/a/#")
                await raw.disconnect()
            else:
                await raw.disconnect()
        while len(done) < published:
            done.add((await keeper.message()).payload)
        assert done == {b"%d" % number for number in range(published)}


def test_what_a_group_cannot_be(spool: Path) -> None:
    """One client is in it once; nobody asks for none of one's own."""
    run(_cannot(spool))


async def _cannot(spool: Path) -> None:
    async with serving(spool) as server:
        one = await member(server, "one")
        assert (await one.subscribe("$share/g/$replay/1/a/#")).codes == [0x8F]
        assert (await one.subscribe("$share/g/$replay/x/a/#")).codes == [0x8F]
        await server.broker.publish("a/b", b"1")
        assert await one.messages(1) == [b"1"]
        one.send(b"\x82\x0e\0\x09\0\0\x08$share/g\x01")
        [told] = await one.gone()
        assert told.kind == DISCONNECT


def test_a_member_that_is_taken_over_while_it_joins(spool: Path) -> None:
    """Is none: the group gives its messages to who is there."""
    run(_joins(spool))


async def _joins(spool: Path) -> None:
    async with serving(spool) as server:
        for turn in range(20):
            first = await client(server, "c", **(LASTS if turn % 2 else {}))
            asking = asyncio.create_task(first.subscribe("$share/g/a/#"))
            await asyncio.sleep(0)
            second = await member(server, "c")
            asking.cancel()
            for number in range(4):
                await server.broker.publish("a/b", b"%d" % number)
            assert await second.messages(4) == [b"0", b"1", b"2", b"3"]
            await second.disconnect()


def test_a_member_that_fails_ends_alone(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a fault of the server; the others go on."""
    run(_fails(spool, monkeypatch))


async def _fails(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(spool) as server:
        good, bad = await client(server, "good"), await client(server, "bad")
        await good.subscribe("a")
        await bad.subscribe("a")
        sessions = server.house.hub.sessions
        await until(lambda: not sessions["bad"].outbound.behind)  # from then on it is given what comes
        take = Outbound.take

        def fails(self: Outbound, *given: Any) -> None:
            if self.client_id == "bad":
                raise ValueError("a fault")
            take(self, *given)

        monkeypatch.setattr(Outbound, "take", fails)
        await good.published("a", b"x")
        [told] = await bad.gone()
        assert (told.kind, told.code) == (DISCONNECT, 0x80)
        assert await good.messages(1) == [b"x"]


def test_what_goes_to_another_member_is_taken_out_of_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the twenty that are read together had fifty thousand ordered anew: they stopped the server for 90 ms."""
    ordered: list[int] = []
    heapify = heapq.heapify

    def noting(heap: list[int]) -> None:
        ordered.append(len(heap))
        heapify(heap)

    async def none_are_left(*_: object) -> dict[int, Message]:
        return {}

    async def scenario() -> None:
        group = Group(SimpleNamespace(broker=None), "g", "#", 0)  # type: ignore[arg-type]
        group.returned = list(range(1000))
        await group._read_returned()
        assert sorted(group.returned) == list(range(GIVEN_BACK_AT_ONCE, 1000))
        assert group.returned[0] == GIVEN_BACK_AT_ONCE

    monkeypatch.setattr(groups, "in_thread", none_are_left)
    monkeypatch.setattr(heapq, "heapify", noting)
    run(scenario())
    assert ordered == [1000 - GIVEN_BACK_AT_ONCE]
