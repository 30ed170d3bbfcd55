"""What becomes of sessions at their edges."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from inside import copy_as_killed
from mqtt_loop import PUBLISH, SetClock, client, serving, serving_at, slept, unconnected
from qflow.mqtt.model.messages import Message
from qflow.mqtt.server.outbound import Outbound

run = asyncio.run
LASTS: dict[str, Any] = {"clean": False, "SessionExpiryInterval": 1000}


def test_a_session_that_is_to_end_with_its_connection_ends_with_a_kill(spool: Path, tmp_path: Path) -> None:
    """Also if it lasted before: what it has got is not sent again."""
    run(_shortened(spool, tmp_path / "killed"))


async def _shortened(spool: Path, killed: Path) -> None:
    async with serving(spool) as server:
        raw = await client(server, "c", **LASTS)
        await raw.subscribe("a", qos=2)
        await raw.disconnect()
        sender = await client(server)
        await sender.released("a", b"1")
        again = await unconnected(server)
        assert (await again.connect("c", clean=False)).present
        assert await again.messages(1) == [b"1"]
        await again.nothing()
        copy_as_killed(server.broker.broker, killed)
    async with serving(killed) as server:
        again = await unconnected(server)
        assert not (await again.connect("c", **LASTS)).present
        await again.nothing()


def test_a_will_that_cannot_be_stored_does_not_cost_the_session(spool: Path) -> None:
    run(_will(spool))


async def _will(spool: Path) -> None:
    clock = SetClock()
    async with serving_at(clock, spool) as server:
        await server.broker.alter_stream("mqtt", max_message_bytes=1000)
        clock.now_s += 10_000
        raw = await client(server, "c", will={"topic": "w", "payload": b"x" * 2000, "qos": 1}, **LASTS)
        await raw.subscribe("a", qos=1)
        await raw.cut()
        await slept(server)
        sender = await client(server)
        await sender.published("a", b"1")
        again = await unconnected(server)
        assert (await again.connect("c", **LASTS)).present
        assert await again.messages(1) == [b"1"]


def test_many_filters_are_added_in_linear_time() -> None:
    from qflow.mqtt.model.sessions import SessionState, Subscribed

    class Counted(dict):  # type: ignore[type-arg]
        looked = 0

        def values(self) -> Any:
            Counted.looked += len(self)
            return super().values()

    state = SessionState("c", 10)
    state.subscriptions = Counted()
    for number in range(2000):
        state.subscribe(Subscribed(f"a/{number}", f"a/{number}"))
    assert Counted.looked < 100_000


def test_a_start_that_is_now_misses_nothing(spool: Path) -> None:
    """What comes between the look at the log and the answer is sent, once."""
    run(_now(spool))


async def _now(spool: Path) -> None:
    async with serving(spool) as server:
        raw = await client(server, "c")
        sender = await client(server)
        hub = server.house.hub
        loop = asyncio.get_running_loop()
        stream = hub.stream

        class Slow:
            def __getattr__(self, name: str) -> Any:
                return getattr(stream, name)

            def query(self, *args: Any, **given: Any) -> Any:
                found = list(stream.query(*args, **given))
                if "limit" in given:
                    asyncio.run_coroutine_threadsafe(come(), loop).result(60)
                return iter(found)

        async def come() -> None:
            before = hub.next
            await sender.published("a", b"between")
            while hub.next == before:
                await asyncio.sleep(0)

        hub.stream = Slow()  # type: ignore[assignment]
        await raw.subscribe("a", qos=1, UserProperty=[("qflow-start", "2100-01-01T00:00:00Z")])
        hub.stream = stream
        assert await raw.messages(1) == [b"between"]


@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("is_again", [False, True])
def test_what_is_retained_comes_before_what_replaces_it(qos: int, is_again: bool, spool: Path) -> None:
    """Whoever subscribes meanwhile has the latest in the end."""
    run(_latest(qos, is_again, spool))


async def _latest(qos: int, is_again: bool, spool: Path) -> None:
    async with serving(spool) as server:
        raw = await client(server, "c")
        sender = await client(server)
        hub = server.house.hub
        loop = asyncio.get_running_loop()
        log = server.broker.broker.engine.log
        if is_again:
            await raw.subscribe("a", qos=qos)
        await sender.published("a", b"old", retain=True)
        if is_again:
            await raw.messages(1)
        page = log.facts_page

        async def come() -> None:
            before = hub.next
            await sender.published("a", b"new", retain=True)
            while hub.next == before:
                await asyncio.sleep(0)

        def slow(*args: Any, **given: Any) -> Any:
            found = page(*args, **given)
            if len(args) == 3:  # a search: neither what measures, nor maintenance
                asyncio.run_coroutine_threadsafe(come(), loop).result(60)
            return found

        log.facts_page = slow  # type: ignore[method-assign]
        await raw.subscribe("a", qos=qos)
        got = [await raw.message() for _ in range(2)]
        log.facts_page = page  # type: ignore[method-assign]
        assert [one.payload for one in got] == [b"old", b"new"]


@pytest.mark.parametrize("qos", [1, 2])
def test_what_is_sent_again_as_the_connection_closes_is_sent_once_more(
    qos: int, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for too large, and forgotten."""
    run(_closed_meanwhile(qos, spool, monkeypatch))


async def _closed_meanwhile(qos: int, spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resend, is_struck = Outbound.resend, asyncio.Event()

    def struck(self: Outbound, packet_id: int, message: Message | None) -> None:
        self.machine.close()
        resend(self, packet_id, message)
        is_struck.set()

    async with serving(spool) as server:
        raw = await client(server, "c", **LASTS)
        await raw.subscribe("a", qos=qos)
        sender = await client(server)
        await sender.released("a", b"1")
        assert (await raw.take()).payload == b"1"
        await raw.cut()
        with monkeypatch.context() as patch:
            patch.setattr(Outbound, "resend", struck)
            raw = await client(server, "c", **LASTS)
            await is_struck.wait()
            await raw.cut()
            await slept(server, others=1)
        again = await client(server, "c", **LASTS)
        packet = await again.take()
        assert (packet.kind, packet.payload, packet.dup) == (PUBLISH, b"1", True)
