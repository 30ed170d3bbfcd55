"""Messages that are retained for who subscribes later."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amqp_loop import turns_noted
from inside import copy_as_killed
from mqtt_loop import PINGRESP, PUBACK, PUBREC, PUBREL, Raw, Server, SetClock, client, serving, serving_at, slept
from qflow import DiskFull
from qflow.mqtt.model.filters import Search
from qflow.mqtt.model.messages import Message
from qflow.mqtt.server import feeding, retaining
from qflow.mqtt.server.storing import RETAINED, Measured
from qflow.storage.log.facts import fact_key
from qflow.streams.topic_filter import matches

run = asyncio.run
LEVELS = st.sampled_from(["", "a", "b", "a-", "a!", "ab", "ä", "0", "$x", "z" * 450])
TOPICS = st.lists(LEVELS, min_size=1, max_size=4).map("/".join).filter(bool)
FILTERS = st.tuples(
    st.lists(LEVELS | st.just("+"), min_size=0, max_size=3), st.sampled_from(["#", "+", "a", "b", ""])
).map(lambda pair: "/".join([*pair[0], pair[1]])).filter(bool)  # fmt: skip


@given(st.sets(TOPICS, max_size=40), FILTERS)
def test_a_search_finds_what_matches_and_passes_over_nothing_else(topics: set[str], topic_filter: str) -> None:
    """As one that looks at all topics; what it passes over lies before where it goes on."""
    search = Search(topic_filter)
    found: set[str] = set()
    place = b""
    for topic in sorted(topics, key=str.encode):
        if topic.encode() < place or not topic.startswith(search.prefix):
            continue
        verdict = search.wanted(topic)
        if verdict is True:
            found.add(topic)
        elif isinstance(verdict, str):
            assert verdict.encode() > topic.encode()
            place = verdict.encode()
    assert found == {topic for topic in topics if matches(topic_filter, topic)}


def test_filters_are_made_ready_for_their_searches_one_by_one(spool: Path) -> None:
    """A SUBSCRIBE has a thousand, at 0.1 ms each: it held up all clients for that, and one that came back with more."""

    async def scenario() -> None:
        async with serving(spool) as server:
            one = await client(server, "one", SessionExpiryInterval=1000)
            async with turns_noted(Search, "__init__") as made:
                await one.subscribe(*(f"a/{number}/+" for number in range(50)))
                await one.cut()
                await slept(server, 0)
                one = await client(server, "one", clean=False, SessionExpiryInterval=1000)
                sender = await client(server)
                for number in (0, 49):
                    await sender.published(f"a/{number}/b", retain=True)
                assert len(await one.messages(2)) == 2
            assert made
            assert len(set(made)) == len(made)

    run(scenario())


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_the_latest_is_retained(version: int, qos: int, spool: Path) -> None:
    """For who subscribes later, with a flag that live ones do not have; an empty one takes it away."""
    run(_latest(version, qos, spool))


async def _latest(version: int, qos: int, spool: Path) -> None:
    async with serving(spool) as server:
        sender = await client(server, version=version)

        async def retain(topic: str, payload: bytes) -> None:
            if qos == 2:
                await sender.released(topic, payload, retain=True)
            elif qos == 1:
                await sender.published(topic, payload, retain=True)
            else:
                sender.publish(topic, payload, qos=0, retain=True)
                await sender.nothing()

        there = await client(server, version=version)
        await there.subscribe("a/#", qos=qos)
        for topic, payload in (("a/1", b"old"), ("a/1", b"new"), ("a/2", b"two"), ("b", b"b"), ("a", b"a")):
            await retain(topic, payload)
        assert [(await there.message()).retain for _ in range(4)] == [False] * 4
        late = await client(server, version=version)
        await late.subscribe("a/#", qos=2)
        got = [await late.message() for _ in range(3)]
        assert [(one.topic, one.payload, one.qos, one.retain) for one in got] == [
            ("a", b"a", qos, True), ("a/1", b"new", qos, True), ("a/2", b"two", qos, True),
        ]  # fmt: skip
        await retain("a/1", b"")
        assert (await late.message()).payload == b""
        again = await client(server, version=version)
        await again.subscribe("a/+", qos=0)
        assert [(one.topic, one.qos) for one in [await again.message()]] == [("a/2", 0)]
        await again.nothing()


def test_retain_handling(spool: Path) -> None:
    """0: with each SUBSCRIBE, 1: with a new subscription, 2: never."""
    run(_handling(spool))


async def _handling(spool: Path) -> None:
    async with serving(spool) as server:
        raw = await client(server)
        await raw.published("a", b"x", retain=True)
        for flags, comes in ((0x20, 0), (0x10, 0), (0, 1), (0, 1), (0x20, 0)):
            await raw.subscribe("a", flags=flags)
            assert await raw.messages(comes) == [b"x"] * comes
            await raw.nothing()
        await raw.unsubscribe("a")
        await raw.subscribe("a", flags=0x10)
        assert await raw.messages(1) == [b"x"]


def test_many_retained_messages_come_as_there_is_room(spool: Path) -> None:
    """Each once, in the order of their topics, and what is published meanwhile after them."""
    run(_many(spool))


async def _many(spool: Path) -> None:
    async with serving(spool) as server:
        log = server.broker.broker.engine.log
        sender = await client(server)
        await sender.published("t/0", b"0", retain=True)
        packed = log.facts(RETAINED)["t/0"]
        topics = [f"t/{number:05}" for number in range(5000)]
        log.keep_facts(RETAINED, {"t/0": None, **dict.fromkeys(topics, packed)})
        raw = await client(server, ReceiveMaximum=30)
        await raw.subscribe("t/+")
        first = [await raw.message(ack=False) for _ in range(30)]
        await raw.nothing()
        await sender.published("t/1", b"live")
        for one in first:
            raw.ack(PUBACK, one.packet_id)
        rest = [await raw.message() for _ in range(4971)]
        assert [one.topic for one in [*first, *rest]] == [*topics, "t/1"]
        assert [one.retain for one in rest] == [True] * 4970 + [False]


def test_a_retained_message_expires(spool: Path) -> None:
    """Its age is counted, also while it is only kept."""
    run(_expires(spool))


async def _expires(spool: Path) -> None:
    clock = SetClock()
    async with serving_at(clock, spool) as server:
        raw = await client(server)
        await raw.published("a", retain=True, MessageExpiryInterval=100)
        clock.now_s += 40
        await raw.subscribe("a")
        assert (await raw.message()).properties["MessageExpiryInterval"] == 60
        clock.now_s += 60
        await raw.subscribe("a")
        await raw.nothing()


@pytest.mark.parametrize("qos", [1, 2])
def test_one_that_is_not_acknowledged_comes_again(qos: int, spool: Path) -> None:
    """To a session that lasts; if it is not retained any more, there is nothing left to say but the end."""
    run(_again(qos, spool))


async def _again(qos: int, spool: Path) -> None:
    async with serving(spool) as server:
        sender = await client(server)
        for topic in ("a", "b"):
            await sender.released(topic, topic.encode(), retain=True)
        raw = await client(server, "c", SessionExpiryInterval=100)
        await raw.subscribe("#", qos=qos)
        first = [await raw.message(ack=False) for _ in range(2)]
        await raw.cut()
        await slept(server, 1)
        await sender.released("b", b"", retain=True)
        killed = copy_as_killed(server.broker.broker, spool.with_name("killed"))
    async with serving(killed) as server:
        raw = await client(server, "c", clean=False, SessionExpiryInterval=100)
        one = await raw.message(ack=False)
        assert (one.packet_id, one.payload, one.dup, one.retain) == (first[0].packet_id, b"a", True, True)
        if qos == 2:
            assert (await raw.expect(PUBREL)).packet_id == first[1].packet_id
        assert (await raw.message()).payload == b""
        await raw.nothing()


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("taken", [0, 7])
def test_what_a_session_had_not_been_sent_of_what_is_retained_comes_when_it_is_back(
    taken: int, is_killed: bool, spool: Path
) -> None:
    """Behind what it had; and not a second time when it comes again."""
    run(_rest(taken, is_killed, spool))


async def _begun(server: Server, topics: list[str]) -> tuple[Raw, Raw]:
    """Return who has published retained messages, and who is being sent them, five at once."""
    sender = await client(server)
    for topic in topics:
        await sender.published(topic, b"x", retain=True)
    raw = await client(server, "c", SessionExpiryInterval=100, ReceiveMaximum=5)
    await raw.subscribe("t/#")
    return sender, raw


async def _rest(taken: int, is_killed: bool, spool: Path) -> None:
    topics = [f"t/{number:03}" for number in range(40)]
    async with serving(spool) as server:
        sender, raw = await _begun(server, topics)
        had = [(await raw.message()).topic for _ in range(taken)]
        if is_killed:
            server.tick()  # once a second
            await sender.published("other", b"")  # what was kept before is in the log now
            spool = copy_as_killed(server.broker.broker, spool.with_name("killed"))
        await raw.cut()
        await slept(server, 1)
    async with serving(spool) as server:
        raw = await client(server, "c", clean=False, SessionExpiryInterval=100)
        rest: list[str] = []
        while len({*had, *rest}) < 40:
            one = await raw.message()
            assert one.dup or one.topic not in [*had, *rest]  # an acknowledgement may have come too late
            rest.append(one.topic)
        await raw.nothing()
        await raw.disconnect()
        await (await client(server, "c", clean=False, SessionExpiryInterval=100)).nothing()


def test_a_client_that_subscribes_again_is_sent_all_that_is_retained_once_more(spool: Path) -> None:
    """Not what the first time had left alone, which goes on meanwhile."""
    run(_once_more(spool))


async def _once_more(spool: Path) -> None:
    topics = [f"t/{number:03}" for number in range(40)]
    async with serving(spool) as server:
        _, raw = await _begun(server, topics)
        for one in [await raw.message(ack=False) for _ in range(5)]:
            raw.ack(PUBACK, one.packet_id)
        await raw.subscribe("t/#")  # while the first time goes on
        rest = [(await raw.message()).topic for _ in range(75)]
        assert rest == topics[5:] + topics
        await raw.nothing()


def test_what_a_session_kept_its_subscription_for_is_not_sent_again(spool: Path) -> None:
    """A client that comes back to its session gets what it missed, not what was retained before."""
    run(_back(spool))


async def _back(spool: Path) -> None:
    async with serving(spool) as server:
        raw = await client(server, "c", SessionExpiryInterval=100)
        await raw.published("a", b"1", retain=True)
        await raw.subscribe("a")
        assert await raw.messages(1) == [b"1"]
        await raw.disconnect()
        await (await client(server)).published("a", b"2", retain=True)
        raw = await client(server, "c", clean=False, SessionExpiryInterval=100)
        one = await raw.message()
        assert (one.payload, one.retain) == (b"2", False)
        await raw.nothing()


@pytest.mark.parametrize("looks_late", [False, True])
@pytest.mark.parametrize("qos", [0, 1])
def test_what_is_retained_while_a_search_is_under_way_comes_once(
    qos: int, looks_late: bool, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is published, not among what was retained before; and what it replaces does not come behind it."""
    run(_once(qos, looks_late, spool, monkeypatch))


async def _once(qos: int, looks_late: bool, spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_look, looks = asyncio.Event(), asyncio.Event()
    in_thread = feeding.in_thread

    async def look(*arguments: Any) -> Any:
        found = None if looks_late else await in_thread(*arguments)
        looks.set()
        await may_look.wait()
        return await in_thread(*arguments) if looks_late else found

    async with serving(spool) as server:
        sender, late = await client(server), await client(server)
        await sender.published("a", b"old", retain=True)
        await sender.published("b", b"kept", retain=True)
        monkeypatch.setattr(feeding, "in_thread", look)
        await late.subscribe("#", qos=1)
        await looks.wait()
        if qos:
            await sender.published("a", b"new", retain=True)
        else:
            sender.publish("a", b"new", qos=0, retain=True)
            await sender.nothing()
        may_look.set()
        expected = [(b"old", True)] if qos and not looks_late else []
        expected += [(b"kept", True), (b"new", False)] if qos else [(b"new", False), (b"kept", True)]
        assert [(one.payload, one.retain) for one in [await late.message() for _ in expected]] == expected
        await late.nothing()


def test_what_has_expired_is_deleted(spool: Path) -> None:
    """Once a minute at the most; what never expires, does later, or was retained in its place meanwhile, stays."""
    run(_deleted(spool))


async def _deleted(spool: Path) -> None:
    clock = SetClock()
    async with serving_at(clock, spool) as server:
        hub = server.house.hub
        log = hub.broker.broker.engine.log
        raw = await client(server)
        await raw.published("soon", retain=True, MessageExpiryInterval=5)
        await raw.published("again", b"old", retain=True, MessageExpiryInterval=5)
        await raw.published("later", retain=True, MessageExpiryInterval=300)
        await raw.published("never", retain=True)
        raw.publish("zero", qos=0, retain=True, MessageExpiryInterval=5)
        await raw.nothing()
        await hub.retaining

        async def left(after_s: float) -> set[str]:
            """Return what the log has some seconds later, once the server has looked."""
            clock.now_s += after_s
            server.tick()
            while hub.retained.is_measuring:
                await asyncio.sleep(0)
            return set(log.facts(RETAINED))

        everything = {"soon", "again", "later", "never", "zero"}
        assert await left(4) == everything
        measuring = hub.records.measure_retained

        def meanwhile(position: bytes, now_ms: int) -> Measured:
            found = measuring(position, now_ms)
            log.keep_facts(RETAINED, {"again": Message("again", b"new", 1, True, {}).pack()})
            return found

        hub.records.measure_retained = meanwhile
        assert await left(57) == {"again", "later", "never"}
        hub.records.measure_retained = measuring
        await raw.published("short", retain=True, MessageExpiryInterval=1)
        assert await left(58) == {"again", "later", "never", "short"}
        assert await left(3) == {"again", "later", "never"}
        assert await left(300) == {"again", "never"}
        late = await client(server)
        await late.subscribe("#")
        assert {(await late.message()).payload for _ in range(2)} == {b"new", b"x"}
        await late.nothing()


def test_what_expired_while_no_server_ran_is_deleted(spool: Path) -> None:
    """At its start."""

    async def scenario() -> None:
        clock = SetClock()
        async with serving_at(clock, spool) as server:
            raw = await client(server)
            await raw.published("soon", retain=True, MessageExpiryInterval=5)
        clock.now_s += 10
        async with serving_at(clock, spool) as server:
            hub = server.house.hub
            while hub.retained.is_measuring:
                await asyncio.sleep(0)
            assert hub.broker.broker.engine.log.facts(RETAINED) == {}

    run(scenario())


def test_a_log_that_takes_no_deletion_is_asked_again(
    spool: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A minute later."""

    async def scenario() -> None:
        clock = SetClock()
        async with serving_at(clock, spool) as server:
            hub = server.house.hub
            raw = await client(server)
            await raw.published("soon", retain=True, MessageExpiryInterval=5)

            def refuse(*_: object) -> None:
                raise DiskFull("no room")

            with monkeypatch.context() as patched:
                patched.setattr(retaining, "forget_unchanged", refuse)
                clock.now_s += 61
                server.tick()
                while hub.retained.is_measuring:
                    await asyncio.sleep(0)
            clock.now_s += 61
            server.tick()
            while hub.retained.is_measuring:
                await asyncio.sleep(0)
            assert hub.broker.broker.engine.log.facts(RETAINED) == {}

    run(scenario())
    assert "retained messages that have expired are deleted later: no room" in caplog.text


def test_what_is_retained_is_bounded(spool: Path) -> None:
    """More is refused, until what is there was taken away; messages that replace others count once."""
    run(_bounded(spool))


async def _bounded(spool: Path) -> None:
    clock = SetClock()
    async with serving_at(clock, spool) as server:
        retained = server.house.hub.retained
        retained.most_bytes = 50_000
        raw = await client(server)
        await raw.subscribe("#", qos=0, flags=0x20)

        async def retain(topic: str, payload: bytes = b"x" * 1_000, qos: int = 1) -> int:
            """Publish it, wait until what that began is done, and return the code of the answer."""
            raw.publish(topic, payload, qos=qos, packet_id=3, retain=True)
            code = (await raw.expect(PUBACK if qos == 1 else PUBREC, skip=True)).code
            while retained.is_measuring:
                await asyncio.sleep(0)
            return code

        for _ in range(200):
            assert await retain("same") == 0
        codes = [await retain(f"t/{number}") for number in range(60)]
        assert 40 < codes.index(0x97) < 50
        assert set(codes[codes.index(0x97) :]) == {0x97}
        assert await retain("two", qos=2) == 0x97
        raw.publish("zero", b"live", qos=0, retain=True)
        raw.send(b"\xc0\0")
        await raw.expect(PINGRESP, skip=True)
        assert await retain("t/0", b"") == await retain("t/1", b"") == 0
        assert await retain("new") == 0x97
        clock.now_s += 10
        assert await retain("new") == 0x97
        assert await retain("new") == 0
        late = await client(server)
        await late.subscribe("zero", "two")
        await late.nothing()


def test_one_that_is_damaged_is_left_out(spool: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And named in the log; the others come, also to a session that had it in flight."""
    run(_damaged(spool))
    assert "the fact 'b' of 'mqtt.retained' does not match its checksum: it is left out" in caplog.text


async def _damaged(spool: Path) -> None:
    async with serving(spool) as server:
        log = server.broker.broker.engine.log
        sender = await client(server)
        for topic in "abc":
            await sender.published(topic, topic.encode(), retain=True)
        raw = await client(server, "c", SessionExpiryInterval=100)
        await raw.subscribe("+")
        for _ in range(3):
            await raw.message(ack=False)
        await raw.cut()
        await slept(server, 1)
        log.commit(log.write(lambda txn: txn.put(fact_key(RETAINED, "b"), b"no checksum at all")))
        late = await client(server)
        await late.subscribe("+")
        assert await late.messages(2) == [b"a", b"c"]
        again = await client(server, "c", clean=False, SessionExpiryInterval=100)
        assert await again.messages(2) == [b"a", b"c"]
        log.keep_facts(RETAINED, {"b": None})
