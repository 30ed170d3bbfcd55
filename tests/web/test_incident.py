"""The incident of the runbook, seen and solved in a Chromium, by what the page offers to click."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

import incident

pytest.importorskip("starlette")
pytest.importorskip("jinja2")
pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")
web_chromium = pytest.importorskip("web_chromium")
pytestmark = web_chromium.needs_chromium


async def solve(happening: incident.Incident, tab: Any, home: str) -> None:
    """What is wrong stands on the overview; each finding leads to its remedy."""

    async def sees(place: str, *parts: str) -> None:
        for part in parts:
            await tab.locator(place, has_text=part).first.wait_for()

    async def has(tile: str, value: str) -> None:
        await tab.locator(".tile", has_text=tile).locator(f"b:text-is('{value}')").wait_for()

    async def follow(finding: str, link: str) -> None:
        await tab.get_by_role("link", name="Overview").click()
        await tab.locator(".finding", has_text=finding).get_by_role("link", name=link).click()

    await sees(
        ".finding.urgent",
        f"consumer 'mailer-3' of process {happening.mailer} has held a message of queue 'mail' for 40 minutes",
        "5 producers blocked for up to 12 s at limit_messages of queue 'payments' (100); nobody takes from it",
    )
    await sees(
        ".finding.problem",
        "nobody consumes queue 'audit', and it grows: 300 messages wait",
        "4 dead letters in queue 'dead'; 3 for the commonest reason: 'card declined'",
    )
    await sees(".tile", " live of ", " free of ")

    await follow("mailer-3", "Open the queue")
    assert await tab.locator("#consumers td").all_inner_texts() == [
        "mailer-3", str(happening.mailer), "1", "40 min", "gone, or not waiting now", "-",
    ]  # fmt: skip
    happening.end_mailer(signal.SIGTERM)
    happening.let_pass(1.0)
    await sees("#consumers", "nobody")

    await follow("5 producers", "Alter…")
    await sees(".tile", "Blocked at limit_messages for")
    await tab.fill("[name=limit_messages]", "200")
    await tab.get_by_role("button", name="Alter").click()
    await sees("p.done", "payments: changed: limit_messages: 200")
    await has("Blocked producers", "0")

    await follow("queue 'audit'", "Purge…")
    assert await tab.inner_text("#seen") == "300"
    await tab.get_by_role("button", name="Yes, delete").click()
    await sees("p.done", "audit: messages deleted: 300")

    await follow("dead letters", "Look at messages")
    reasons = await tab.locator("dt:text-is('dead_letter_nack_reason') + dd").all_inner_texts()
    assert reasons == ["card declined"] * 3 + ["no such customer"]
    await follow("dead letters", "Redrive…")
    await tab.get_by_role("button", name="Redrive to where they came from").click()
    await sees("p.done", "dead: moved: orders: 4; kept: nothing")

    happening.start_consumers()
    happening.let_pass(1.0)
    await tab.get_by_role("link", name="Overview").click()
    await has("Messages in queues", "0")


def test_an_incident_is_seen_and_solved_by_clicks(tmp_path: Path) -> None:
    """By TLS, as from another machine; then nothing is left."""

    async def test() -> None:
        with incident.made(tmp_path / "spool", "https") as happening:
            home = f"https://localhost:{happening.ports[0]}"
            async with web_chromium.logged_in(home, ignore_https_errors=True) as tab:
                await solve(happening, tab, home)
            assert happening.left() == []

    asyncio.run(test())
