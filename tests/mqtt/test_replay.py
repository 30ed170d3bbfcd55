"""Subscriptions that begin in the past: what is in the stream comes first, then what is published, without a seam."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import qflow
from mqtt_loop import Raw, client, serving
from qflow.mqtt import Server
from qflow.mqtt.errors import MqttError
from qflow.mqtt.model.filters import LATEST, start_of, wish_of
from qflow.mqtt.wire.packets import Subscription

run = asyncio.run


@pytest.mark.parametrize(
    ("text", "start"),
    [
        (None, None),
        ("earliest", 0),
        ("12", 12),
        ("latest", LATEST),
        ("9" * 41, LATEST),
        ("-1h30m", datetime(2030, 1, 1, 10, 30, tzinfo=UTC)),
        ("-1w", datetime(2029, 12, 25, 12, tzinfo=UTC)),
        ("2029-12-31Z", datetime(2029, 12, 31, tzinfo=UTC)),
        ("-999999999999999w", datetime(1970, 1, 1, tzinfo=UTC)),
        ("-1h", datetime(2030, 1, 1, 11, tzinfo=UTC)),
        ("-90s", datetime(2030, 1, 1, 11, 58, 30, tzinfo=UTC)),
        ("-999999999d", datetime(1970, 1, 1, tzinfo=UTC)),
        ("2030-01-01T12:00:00+01:00", datetime(2030, 1, 1, 11, tzinfo=UTC)),
        ("2030-01-01T12:00:00Z", datetime(2030, 1, 1, 12, tzinfo=UTC)),
        ("0001-01-01T00:00:00Z", datetime(1970, 1, 1, tzinfo=UTC)),
    ],
)
def test_a_start_is_an_offset_a_time_or_an_age(text: str | None, start: Any) -> None:
    """As text."""
    assert start_of(text, datetime(2030, 1, 1, 12, tzinfo=UTC).timestamp()) == start


@pytest.mark.parametrize(
    "text",
    ["", "-1y", "-", "--1h", "2030-01-01T12:00:00", "2030-01-01", "yesterday", "1e3", "٣", "-" + "9" * 5000 + "s"],
)
def test_what_is_no_start_is_refused(text: str) -> None:
    """By name, with what is one."""
    with pytest.raises(MqttError, match="is no start: give earliest, latest, an offset"):
        start_of(text, 0)


def wished(topic_filter: str, *starts: str) -> Any:
    properties: Any = {"user_properties": [("qflow-start", start) for start in starts]}
    return wish_of(Subscription(topic_filter, 1), properties, 0).start


def test_of_two_starts_that_of_the_filter_holds() -> None:
    """The property is for those filters of the packet that say none; of several the last one, as paho adds to them."""
    assert wished("$replay/7/a", "earliest") == 7
    assert wished("$share/g/$replay/7/a", "yesterday") == 7
    assert wished("a", "earliest", "9") == 9


async def replaying(server: Server, version: int, start: str, topic_filter: str, qos: int = 1, **given: Any) -> Raw:
    """Return a client that subscribes from a start on."""
    raw = await client(server, version=version, **given)
    if version == 5:
        suback = await raw.subscribe(topic_filter, qos=qos, UserProperty=("qflow-start", start))
    else:
        suback = await raw.subscribe(f"$replay/{start}/{topic_filter}", qos=qos)
    assert suback.codes == [qos]
    return raw


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_what_is_in_the_stream_comes_first(version: int, qos: int, spool: Path) -> None:
    """Through wildcards, in order, each once, while others publish."""
    run(_first(version, qos, spool))


async def _first(version: int, qos: int, spool: Path) -> None:
    async with serving(spool) as server:
        sender = await client(server)
        for number in range(600):
            server.broker.submit_publish(f"a/{number % 7}/b", b"%d" % number)
        await sender.published("a/0/b", b"600")
        all_of_them = await replaying(server, version, "earliest", "a/+/b", qos)
        some = await replaying(server, version, "500", "a/3/#", qos)
        aged = await replaying(server, version, "-1h", "#", qos)
        none = await replaying(server, version, "999999", "#", qos)
        latest = await replaying(server, version, "latest", "#", qos)
        for number in range(601, 650):
            await sender.published(f"a/{number % 7}/b", b"%d" % number)
        assert await all_of_them.messages(650) == [b"%d" % number for number in range(650)]
        expected = [b"%d" % number for number in range(500, 650) if number % 7 == 3]
        assert await some.messages(len(expected)) == expected
        assert await aged.messages(650) == [b"%d" % number for number in range(650)]
        assert await none.messages(49) == [b"%d" % number for number in range(601, 650)]
        assert await latest.messages(49) == [b"%d" % number for number in range(601, 650)]
        for raw in (all_of_them, some, aged, none, latest):
            await raw.nothing()


def test_a_replay_beside_others(spool: Path) -> None:
    """Other subscriptions of the client go on; subscribing again begins the replay anew."""
    run(_beside(spool))


async def _beside(spool: Path) -> None:
    async with serving(spool) as server:
        raw = await client(server)
        await raw.subscribe("live")
        for number in range(5):
            await raw.published("a", b"%d" % number)
        for _ in range(2):
            await raw.subscribe("a", UserProperty=("qflow-start", "1"))
            assert await raw.messages(4) == [b"1", b"2", b"3", b"4"]
        await raw.published("live", b"x")
        assert await raw.messages(1) == [b"x"]
        for start in ("noon", ""):
            assert (await raw.subscribe("a", UserProperty=("qflow-start", start))).codes == [0x8F]
        for wrong in ("$replay", "$replay/1", "$replay//a", "$replay/1/$share/g/a", "$replay/1/$SYS/#"):
            assert (await raw.subscribe(wrong)).codes == [0x8F], wrong
        await raw.published("a", b"5")
        assert await raw.messages(1) == [b"5"]


def test_a_replay_with_many_filters(spool: Path) -> None:
    """Is one pass over the stream; each message once, whatever matches it."""
    run(_many(spool))


async def _many(spool: Path) -> None:
    async with serving(spool) as server:
        for number in range(3000):
            server.broker.submit_publish(f"a/{number % 100}", b"%d" % number)
        raw = await client(server)
        filters = [*(f"a/{number}" for number in range(0, 100, 5)), "a/5/#"]
        await raw.subscribe(*filters, UserProperty=("qflow-start", "earliest"))
        assert await raw.messages(600) == [b"%d" % number for number in range(0, 3000, 5)]
        await raw.published("a/7")
        await raw.published("a/10", b"live")
        assert await raw.messages(1) == [b"live"]


@pytest.mark.parametrize("version", [4, 5])
def test_a_replay_goes_on_after_a_break(version: int, spool: Path) -> None:
    """Of a session that lasts: where it was, whatever the start was."""
    run(_break(version, spool))


async def _break(version: int, spool: Path) -> None:
    kept = {"clean": False} | ({"SessionExpiryInterval": 1000} if version == 5 else {})
    async with serving(spool) as server:
        for number in range(400):
            server.broker.submit_publish("a", b"%d" % number)
        raw = await replaying(server, version, "100", "a", client_id="c", **kept)
        assert await raw.messages(150) == [b"%d" % number for number in range(100, 250)]
        await raw.disconnect()
    async with serving(spool) as server:
        raw = await client(server, "c", version=version, **kept)
        got = await raw.messages(150)
        assert got == [b"%d" % number for number in range(250, 400)]
        await raw.nothing()


def test_a_replay_holds_no_other_subscription_up(spool: Path) -> None:
    """Those that are there, and new ones, get what is published while it is under way, in order."""
    run(_no_other(spool))


async def _no_other(spool: Path) -> None:
    async with serving(spool) as server:
        await server.broker.publish_many([("old", b"%d" % number) for number in range(5000)])
        raw = await client(server, ReceiveMaximum=4)
        sender = await client(server)
        await raw.subscribe("one")
        await raw.subscribe("old", UserProperty=("qflow-start", "earliest"))
        await raw.subscribe("two")
        for number in range(10):
            await sender.published("one" if number % 2 else "two", b"%d" % number)
        got: dict[str, list[bytes]] = {"old": [], "one": [], "two": []}
        both: list[int] = []
        while len(both) < 10:
            message = await raw.message()
            got[message.topic].append(message.payload)
            if message.topic != "old":
                both.append(int(message.payload))
        assert both == list(range(10))
        assert len(got["old"]) < 100
        rest = 5000 - len(got["old"])
        assert got["old"] + await raw.messages(rest) == [b"%d" % number for number in range(5000)]
        await raw.nothing()


@pytest.mark.parametrize("group", ["", "$share/g/"])
def test_a_replay_begins_with_what_retention_has_left(group: str, spool: Path) -> None:
    """Not with what the server still has in its memory; a group that slept goes on there, too."""
    run(_left(group, spool))


async def _left(group: str, spool: Path) -> None:
    with qflow.open(spool) as broker:
        broker.declare_stream("mqtt", topics=["#"], retention_messages=10)
    async with serving(spool) as server:
        sleeper = await client(server, "sleeper", SessionExpiryInterval=60)
        await sleeper.subscribe(f"{group}a")
        await sleeper.disconnect()
        for number in range(50):
            await server.broker.publish("a", b"%d" % number)
        while (await server.broker.stream("mqtt").stats()).first_offsets[0] < 40:
            await asyncio.sleep(0)
        late = await client(server, version=4)
        assert (await late.subscribe("$replay/earliest/a")).codes == [1]
        sleeper = await client(server, "sleeper", clean=False)
        for one in (late, sleeper):
            assert await one.messages(10) == [b"%d" % number for number in range(40, 50)]
            await one.nothing()
        assert server.house.hub.counts.lost == 40
