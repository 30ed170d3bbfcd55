"""Messages that came by AMQP, as the page shows them."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("jinja2")
pytest.importorskip("httpx")
pytest.importorskip("pamqp")

from pamqp.commands import Basic

from web_served import run, served


def test_a_dead_letter_of_amqp_says_why_it_is_dead(spool: Path) -> None:
    """Its headers stand where the properties stood that they lie in; the API has what is in the message."""

    async def test() -> None:
        properties = Basic.Properties(headers={"x-first-death-reason": "expired", "tenant": "<i>"})
        raw = properties.marshal()
        headers = {"amqp.exchange": "", "amqp.routing_key": "dead", "amqp.properties": b64encode(raw).decode()}
        async with served(spool) as site:
            await (await site.broker.declare_queue("dead")).put(b"x", headers=headers)
            shown = (await site.client().get("/messages", params={"queue": "dead"})).text
            assert "<dt>x-first-death-reason</dt><dd>expired</dd>" in shown
            assert "<dt>tenant</dt><dd>&lt;i&gt;</dd>" in shown
            assert "amqp.properties" not in shown
            answer = await site.client().get("/api/queue/messages", params={"queue": "dead"})
            assert answer.json()["messages"][0]["headers"] == headers

    run(test)
