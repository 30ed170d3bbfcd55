"""A SUBSCRIBE that the log does not take changes nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mqtt_loop import client, serving
from qflow.errors import DiskFull
from qflow.mqtt.server import session as session_module

run = asyncio.run


@pytest.mark.parametrize("given", [{}, {"UserProperty": [("qflow-start", "earliest")]}], ids=["options", "replay"])
def test_a_subscription_that_cannot_be_changed_stays(
    given: dict[str, Any], spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(_stays(given, spool, monkeypatch))


async def _stays(given: dict[str, Any], spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(spool) as server:
        sender = await client(server)
        await sender.published("a", b"before")
        raw = await client(server, "c", clean=False, SessionExpiryInterval=1000)
        await raw.subscribe("a", qos=1)
        await raw.nothing()

        def full(*_: Any) -> Any:
            raise DiskFull("no space")

        with monkeypatch.context() as patch:
            patch.setattr(session_module, "keep", full)
            assert (await raw.subscribe("a", "b", qos=0, **given)).codes == [0x97, 0x97]
        await sender.published("b", b"2")
        await sender.published("a", b"1")
        message = await raw.message()
        assert (message.payload, message.qos) == (b"1", 1)
        await raw.nothing()
