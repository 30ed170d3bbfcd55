"""Retained messages that are replaced while somebody searches, or is away."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from mqtt_loop import PUBCOMP, PUBLISH, PUBREC, PUBREL, client, serving, slept
from qflow.mqtt.model.marks import Marks
from qflow.mqtt.model.messages import of_headers

run = asyncio.run


def test_what_was_given_is_not_replaced_by_what_was_read_before(spool: Path) -> None:
    """Whoever subscribes while a message with QoS 0 replaces another has the new one in the end."""
    run(_order(spool))


async def _order(spool: Path) -> None:
    async with serving(spool) as server:
        raw = await client(server, "c")
        sender = await client(server)
        loop = asyncio.get_running_loop()
        log = server.broker.broker.engine.log
        await sender.published("a", b"old", retain=True)
        page = log.facts_page

        async def come() -> None:
            sender.publish("a", b"new", retain=True, qos=0)
            await sender.nothing()

        def slow(*args: Any, **given: Any) -> Any:
            found = page(*args, **given)
            if len(args) == 3:  # a search: neither what measures, nor maintenance
                asyncio.run_coroutine_threadsafe(come(), loop).result(60)
            return found

        log.facts_page = slow  # type: ignore[method-assign]
        await raw.subscribe("a", qos=0)
        log.facts_page = page  # type: ignore[method-assign]
        assert await raw.messages(1) == [b"new"]
        await raw.nothing()


def test_messages_that_pass_at_once_overtake_none_that_wait_for_their_commit() -> None:
    """Those come live to whoever subscribes by then."""
    marks, stored, at_once = Marks(), of_headers("a", b"", {}), of_headers("b", b"", {})
    marks.give(stored)
    marks.give_at_once(at_once)
    passed = marks.passed
    assert marks.is_later(stored, passed)
    assert not marks.is_later(at_once, passed)
    marks.passes(stored)
    assert not marks.is_later(stored, marks.passed)
    marks.give_at_once(at_once)
    assert marks.is_later(at_once, passed)


def test_what_is_retained_while_a_client_is_away_comes_once(spool: Path) -> None:
    """It has not got all that was retained when it leaves, and gets the rest when it is back; QoS 2."""
    run(_away(spool))


async def _away(spool: Path) -> None:
    async with serving(spool) as server:
        sender = await client(server, "s")
        for name in "abcdef":
            await sender.released(name, b"old " + name.encode(), retain=True)
        given = {"SessionExpiryInterval": 1000, "ReceiveMaximum": 2}
        raw = await client(server, "c", **given)
        await raw.subscribe("#", qos=2)
        assert await raw.messages(2) == [b"old a", b"old b"]
        first = await raw.message(ack=False)  # and one more that it has not taken
        raw.ack(PUBREC, first.packet_id)
        await raw.cut()
        await slept(server, 1)
        for name in "acde":
            await sender.released(name, b"new " + name.encode(), retain=True)
        raw = await client(server, "c", clean=False, **given)
        found, ended = [], 0
        while len(found) < 5 or ended < 6:  # that of the message it had not released, too
            one = await raw.take()
            if one.kind == PUBLISH:
                found.append(one.payload)
                raw.ack(PUBREC, one.packet_id)
            else:
                assert one.kind == PUBREL
                ended += 1
                raw.ack(PUBCOMP, one.packet_id)
        await raw.nothing()
        assert sorted(found) == [b"new a", b"new c", b"new d", b"new e", b"old f"]
