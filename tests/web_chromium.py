"""A Chromium for tests of the page: a tab that has logged in by the keyboard, in which nothing may go wrong."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import web_served

playwright = pytest.importorskip("playwright.async_api")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")
PATIENCE_MS = 60_000


@asynccontextmanager
async def logged_in(home: str, path: str = "/", **options: Any) -> AsyncIterator[Any]:
    """Yield a tab at a page of a server. At the end: nothing was asked of anybody else, and no error was shown."""
    wrong: list[str] = []
    async with playwright.async_playwright() as driver:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        chromium = await driver.chromium.launch(executable_path=CHROMIUM, args=arguments, timeout=2 * PATIENCE_MS)
        try:
            tab = await chromium.new_page(**options)
            tab.set_default_timeout(PATIENCE_MS)
            tab.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
            tab.on("pageerror", lambda error: wrong.append(str(error)))
            tab.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith(home) else None)
            await tab.goto(f"{home}{path}")
            await tab.keyboard.type("anna")
            await tab.keyboard.press("Tab")
            await tab.keyboard.type(web_served.PASSWORD)
            await tab.keyboard.press("Enter")
            await tab.wait_for_url(f"{home}{path}")
            yield tab
        finally:
            await chromium.close()
    assert wrong == []
