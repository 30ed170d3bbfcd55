"""Messages from those who publish to those who are there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import qflow
import qflow.aio
from mqtt_loop import DISCONNECT, PUBACK, PUBCOMP, PUBREL, client, serving, unconnected
from qflow.aio.delivery import AsyncStreamDeliveries
from qflow.aio.subscription import AsyncSubscription
from qflow.mqtt.server import hub
from qflow.mqtt.server.hub import Hub

run = asyncio.run


@pytest.mark.parametrize("version", [4, 5])
def test_a_message_goes_to_all_who_want_it(version: int, spool: Path) -> None:
    """With the lower of both QoS, once each, in the order in which it was published."""
    run(_to_all(version, spool))


async def _to_all(version: int, spool: Path) -> None:
    async with serving(spool) as server:
        one, two, three = [await client(server, name, version=version) for name in ("one", "two", "three")]
        assert (await one.subscribe("plant/#", qos=0)).codes == [0]
        assert (await two.subscribe("plant/+/heat", "other", qos=1)).codes == [1, 1]
        assert (await three.subscribe("plant/1/heat", qos=2)).codes == [2]
        sender = await client(server, version=version)
        await sender.published("plant/1/heat", b"1")
        sender.publish("plant/1/heat", b"0", qos=0)
        await sender.released("plant/1/heat", b"2")
        for subscriber, most in ((one, 0), (two, 1), (three, 2)):
            got = [await subscriber.message() for _ in range(3)]
            assert {(message.payload, message.qos) for message in got} == {
                (b"0", 0), (b"1", min(1, most)), (b"2", min(2, most)),
            }  # fmt: skip
            assert [message.payload for message in got if message.payload != b"0"] == [b"1", b"2"]
            assert {(message.topic, message.retain, message.dup) for message in got} == {("plant/1/heat", False, False)}
            await subscriber.nothing()


@pytest.mark.parametrize("qos", [0, 1])
def test_who_subscribes_gets_nothing_that_was_confirmed_before(
    qos: int, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the hub has not come to it yet."""
    run(_confirmed_before(qos, spool, monkeypatch))


async def _confirmed_before(qos: int, spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, waits = asyncio.Event(), asyncio.Event()
    get_many, catch_up = AsyncSubscription.get_many, Hub.catch_up

    async def late(self: AsyncSubscription, most: int, timeout_s: float | None) -> AsyncStreamDeliveries:
        batch = await get_many(self, most, timeout_s)
        await go_on.wait()
        return batch

    async def caught_up(self: Hub) -> None:
        waits.set()
        await catch_up(self)

    monkeypatch.setattr(AsyncSubscription, "get_many", late)
    monkeypatch.setattr(Hub, "catch_up", caught_up)
    monkeypatch.setattr(hub, "MOST_LATE_S", 3600)
    async with serving(spool) as server:
        sender, subscriber = await client(server), await client(server)
        await sender.released("plant/1", b"before")
        subscribing = asyncio.ensure_future(subscriber.subscribe("plant/#", qos=qos))
        waiting = asyncio.ensure_future(waits.wait())
        await asyncio.wait([subscribing, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        go_on.set()
        await subscribing
        await sender.released("plant/1", b"behind")
        assert (await subscriber.message()).payload == b"behind"


def test_a_subscriber_waits_for_nothing_that_never_comes(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is damaged is never seen."""
    monkeypatch.setattr(hub, "MOST_LATE_S", 0.01)
    monkeypatch.setattr(Hub, "next", property(lambda self: 0, lambda self, offset: None), raising=False)
    run(_never_comes(spool))


async def _never_comes(spool: Path) -> None:
    async with serving(spool) as server:
        sender, subscriber = await client(server), await client(server)
        await sender.released("plant/1", b"damaged")
        assert (await subscriber.subscribe("plant/#", qos=0)).codes == [0]


def test_a_subscriber_waits_for_nothing_that_the_hub_passes_over(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may publish $app/x; no client gets it, or waits for it."""
    monkeypatch.setattr(hub, "MOST_LATE_S", 3600)
    run(_passed_over(spool))


async def _passed_over(spool: Path) -> None:
    async with qflow.aio.open(spool) as broker:
        await broker.declare_stream("mqtt", topics=["#", "$app/#"])
    async with serving(spool) as server:
        await server.broker.publish("$app/x", b"1")
        subscriber = await client(server)
        assert (await subscriber.subscribe("#", qos=0)).codes == [0]
        await server.broker.publish("a", b"2")
        assert (await subscriber.message()).payload == b"2"


def test_what_a_program_publishes_comes_with_its_headers(spool: Path) -> None:
    """As user properties; and a program reads what clients publish, properties as headers."""
    run(_programs(spool))


async def _programs(spool: Path) -> None:
    async with serving(spool) as server:
        subscriber = await client(server)
        await subscriber.subscribe("plant/#")
        await server.broker.publish("plant/1", b"21.5", headers={"unit": "C", "number": 7})
        message = await subscriber.message()
        assert (message.topic, message.payload, message.qos) == ("plant/1", b"21.5", 1)
        assert message.properties == {"UserProperty": [("unit", "C"), ("number", "7")]}
        given: dict[str, Any] = {
            "ContentType": "text", "ResponseTopic": "back", "CorrelationData": b"\0\xff", "PayloadFormatIndicator": 1,
            "UserProperty": [("a", "b"), ("a", "ü")],
        }  # fmt: skip
        await subscriber.published("plant/2", b"x", **given)
        assert (await subscriber.message()).properties == given
        [_, stored] = [message async for message in server.broker.stream("mqtt").query()]
        assert stored.headers["mqtt.content_type"] == "text"


def test_a_client_that_acknowledges_nothing_holds_nobody_up(spool: Path) -> None:
    """It gets as many as it can take; the others get all, and it the rest once it acknowledges."""
    run(_slow(spool))


async def _slow(spool: Path) -> None:
    async with serving(spool) as server:
        slow = await client(server, "slow", ReceiveMaximum=3)
        quick = await client(server, "quick")
        await slow.subscribe("a")
        await quick.subscribe("a")
        sender = await client(server)
        for number in range(300):
            await sender.published("a", b"%d" % number)
        assert await quick.messages(300) == [b"%d" % number for number in range(300)]
        held = [await slow.message(ack=False) for _ in range(3)]
        await slow.nothing()
        for message in held:
            slow.ack(PUBACK, message.packet_id)
        assert [message.payload for message in held] == [b"0", b"1", b"2"]
        assert await slow.messages(297) == [b"%d" % number for number in range(3, 300)]
        await sender.published("a", b"live")
        assert await slow.messages(1) == [b"live"]


def test_a_client_that_reads_nothing_holds_nobody_up(spool: Path) -> None:
    """What it gets with QoS 1 waits in the stream, and what it gets with QoS 0 is dropped: nothing is held for it."""
    run(_deaf(spool))


async def _deaf(spool: Path) -> None:
    async with serving(spool) as server:
        deaf = await client(server, "deaf")
        quick = await client(server, "quick")
        await deaf.subscribe("a")
        await deaf.subscribe("zero", qos=0)
        await quick.subscribe("a")
        sender = await client(server)
        body = b"x" * 50_000
        for number in range(400):
            await sender.published("a", body + b"%d" % number)
            sender.publish("zero", body, qos=0)
        assert [one[50_000:] for one in await quick.messages(400)] == [b"%d" % number for number in range(400)]
        got: list[bytes] = []
        dropped = 400
        while len(got) < 400:
            message = await deaf.message()
            if message.qos:
                got.append(message.payload[50_000:])
            else:
                dropped -= 1
        assert got == [b"%d" % number for number in range(400)]
        assert dropped > 0


@pytest.mark.parametrize("version", [4, 5])
def test_a_topic_of_the_servers_is_refused(version: int, spool: Path) -> None:
    """With the code that says why; to a client of 3.1.1, which cannot be told, it is acknowledged and dropped."""
    run(_dollar(version, spool))


async def _dollar(version: int, spool: Path) -> None:
    async with serving(spool) as server:
        sender = await client(server, version=version)
        sender.publish("$SYS/x", qos=0)
        await sender.nothing()
        sender.publish("$SYS/x", qos=1)
        assert (await sender.expect(PUBACK)).code == (0x90 if version == 5 else 0)
        sender.publish("$SYS/x", qos=2, packet_id=2)
        assert (await sender.take()).code == (0x90 if version == 5 else 0)
        if version == 4:
            sender.ack(PUBREL, 2)
            await sender.expect(PUBCOMP)
        assert [message async for message in server.broker.stream("mqtt").query()] == []


def test_a_second_client_with_the_same_id_takes_over(spool: Path) -> None:
    """The first one is told, and closed."""
    run(_taken_over(spool))


async def _taken_over(spool: Path) -> None:
    async with serving(spool) as server:
        first = await client(server, "same")
        await first.subscribe("a")
        second = await client(server, "same", clean=False)
        [told] = await first.gone()
        assert (told.kind, told.code) == (DISCONNECT, 0x8E)
        await second.published("a")
        await second.nothing()


def test_closing_the_server_ends_all(spool: Path) -> None:
    """Clients are told, and their sessions sleep."""
    run(_closed(spool))


async def _closed(spool: Path) -> None:
    async with serving(spool) as server:
        raw = await client(server, "c", SessionExpiryInterval=100)
        await raw.subscribe("a")
        await server.close()
        [told] = await raw.gone()
        assert (told.kind, told.code) == (DISCONNECT, 0x8B)
        assert server.connections == 0


def test_ids_are_assigned(spool: Path) -> None:
    """To whom has none; one of 3.1.1 that wants its session kept must have one."""
    run(_assigned(spool))


async def _assigned(spool: Path) -> None:
    async with serving(spool) as server:
        raw = await unconnected(server)
        connack = await raw.connect("")
        assert connack.properties["AssignedClientIdentifier"]
        old = await unconnected(server, version=4)
        assert (await old.connect("", clean=False)).code == 2
        await old.gone()
        assert (await (await unconnected(server, version=4)).connect("")).code == 0


def test_identifiers_and_offsets_come_with_messages(spool: Path) -> None:
    """Those of all subscriptions that match."""
    run(_identified(spool))


async def _identified(spool: Path) -> None:
    async with serving(spool) as server:
        raw = await client(server)
        await raw.subscribe("a/#", qos=1, SubscriptionIdentifier=3)
        await raw.subscribe("a/+", qos=2, SubscriptionIdentifier=4, UserProperty=("qflow-offsets", "yes"))
        await raw.published("a/b")
        message = await raw.message()
        assert sorted(message.properties.pop("SubscriptionIdentifier")) == [3, 4]
        assert (message.qos, message.properties) == (1, {"UserProperty": [("qflow-offset", "0")]})
        await raw.nothing()


def test_no_local_and_retain_as_published(spool: Path) -> None:
    """Options of a subscription of MQTT 5."""
    run(_options(spool))


async def _options(spool: Path) -> None:
    async with serving(spool) as server:
        one, two = await client(server, "one"), await client(server, "two")
        await one.subscribe("a", qos=1, flags=4)
        await two.subscribe("a", qos=1, flags=8)
        for sender in (one, two):
            await sender.published("a", b"q1", retain=True)
            sender.publish("a", b"q0", qos=0)
        assert sorted(await one.messages(2)) == [b"q0", b"q1"]
        await one.nothing()
        got = [await two.message() for _ in range(4)]
        assert sorted((message.payload, message.retain) for message in got) == [
            (b"q0", False), (b"q0", False), (b"q1", True), (b"q1", True),
        ]  # fmt: skip


def test_a_message_expires(spool: Path) -> None:
    """Its age is told to who gets it."""
    run(_expiring(spool))


async def _expiring(spool: Path) -> None:
    async with serving(spool) as server:
        raw = await client(server)
        await raw.subscribe("a")
        await raw.published("a", b"gone", MessageExpiryInterval=0)
        await raw.published("a", b"there", MessageExpiryInterval=100)
        message = await raw.message()
        assert message.payload == b"there"
        assert 90 <= message.properties["MessageExpiryInterval"] <= 100


def test_a_message_larger_than_a_client_takes_is_not_sent(spool: Path) -> None:
    """As if it had been delivered; those behind it come."""
    run(_large(spool))


async def _large(spool: Path) -> None:
    async with serving(spool) as server:
        small, sender = await client(server, MaximumPacketSize=100), await client(server)
        for qos in (0, 1, 2):
            await small.subscribe("a", qos=qos)
            await sender.published("a", b"x" * 100)
            await sender.published("a", b"y")
            assert (await small.message()).payload == b"y"


def test_what_waits_for_the_log_is_bounded(spool: Path) -> None:
    """Of one client no more is read than may wait; all of it is acknowledged, in order."""
    run(_flood(spool))


async def _flood(spool: Path) -> None:
    async with serving(spool) as server:
        raw = await client(server)
        for number in range(900):
            raw.publish("a", b"%d" % number, packet_id=number + 1)
        assert [(await raw.expect(PUBACK)).packet_id for _ in range(900)] == list(range(1, 901))
        stored = [message.body async for message in server.broker.stream("mqtt").query()]
        assert stored == [b"%d" % number for number in range(900)]


def test_a_second_connect_and_garbage_end_the_connection_alone(spool: Path) -> None:
    """The others are unharmed."""
    run(_garbage(spool))


async def _garbage(spool: Path) -> None:
    async with serving(spool) as server:
        good = await client(server)
        bad = await client(server)
        bad.send(b"\x10\x0d\x00\x04MQTT\x05\x02\x00\x00\x00\x00\x00")
        [told] = await bad.gone()
        assert (told.kind, told.code) == (DISCONNECT, 0x82)
        raw = await unconnected(server)
        raw.send(b"GET / HTTP/1.1\r\n\r\n")
        assert await raw.gone() == []
        await good.nothing()


def test_messages_keep_the_order_in_which_a_client_published_them(spool: Path) -> None:
    """Whether they are stored with others, by themselves, or with what is kept beside them."""
    run(_in_order(spool))


async def _in_order(spool: Path) -> None:
    async with serving(spool) as server:
        sender = await client(server, SessionExpiryInterval=100)
        expected: list[bytes] = []
        for number in range(400):
            body = b"%d" % number + b"x" * (20_000 if number % 7 == 0 else 10)
            given: dict[str, Any] = {"ContentType": "text"} if number % 5 == 0 else {}
            qos = 2 if number % 11 == 0 else 1
            sender.publish("a", body, qos=qos, packet_id=number + 1, retain=number % 13 == 0, **given)
            expected.append(body)
        assert [(await sender.take()).packet_id for _ in range(400)] == list(range(1, 401))
        assert [message.body async for message in server.broker.stream("mqtt").query()] == expected


def test_what_the_log_does_not_take_is_refused(spool: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the code that says why, and nobody else's messages with it; a client of 3.1.1 is closed. The log tells."""
    run(_not_taken(spool))
    assert "a message of client" in caplog.text
    assert "0x95 PACKET_TOO_LARGE" in caplog.text


async def _not_taken(spool: Path) -> None:
    async with serving(spool) as server:
        await server.broker.alter_stream("mqtt", max_message_bytes=50_000)
        sender, other, old = await client(server), await client(server), await client(server, version=4)
        sender.publish("a", b"x" * 60_000)
        sender.publish("a", b"x" * 60_000, qos=2, packet_id=2)
        other.publish("a", b"y")
        old.publish("a", b"x" * 60_000)
        assert [(await sender.take()).code for _ in range(2)] == [0x95, 0x95]
        assert (await other.take()).code == 0
        assert await old.gone() == []
        sender.publish("a", b"z", qos=2, packet_id=2)
        assert (await sender.take()).code == 0


def test_closing_the_broker_under_the_server_ends_all(spool: Path) -> None:
    """Clients are told; nothing was confirmed that is not stored; the server can be closed then."""
    run(_closed_under(spool))


async def _closed_under(spool: Path) -> None:
    async with serving(spool) as server:
        raw = await client(server, "c", SessionExpiryInterval=100)
        await raw.subscribe("b", qos=2)
        for number in range(300):
            raw.publish("a", b"%d" % number, packet_id=number + 1)
        await raw.expect(PUBACK)
        closing = asyncio.create_task(server.broker.close())
        confirmed = 1
        while (packet := await raw.take()).kind == PUBACK:
            confirmed += packet.code == 0
        assert (packet.kind, packet.code) == (DISCONNECT, 0x8B)
        await closing
        assert await (await unconnected(server)).gone() == []
    with qflow.open(spool) as broker:
        stored = [message.body for message in broker.stream("mqtt").query()]
        assert stored == [b"%d" % number for number in range(len(stored))]
        assert len(stored) >= confirmed
