"""Retained messages with QoS 0 and those who search meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from mqtt_loop import client, serving

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
            asyncio.run_coroutine_threadsafe(come(), loop).result(20)
            return found

        log.facts_page = slow  # type: ignore[method-assign]
        await raw.subscribe("a", qos=0)
        log.facts_page = page  # type: ignore[method-assign]
        assert await raw.messages(1) == [b"new"]
        await raw.nothing()
