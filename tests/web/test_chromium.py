"""The page in a real Chromium: charts move, nothing comes from elsewhere, and no mouse is needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import qflow.aio
import qflow.web

pytest.importorskip("starlette")
pytest.importorskip("jinja2")
web_served = pytest.importorskip("web_served")
web_chromium = pytest.importorskip("web_chromium")
pytestmark = web_chromium.needs_chromium


@asynccontextmanager
async def browsing(spool: Path) -> AsyncIterator[tuple[qflow.aio.AsyncBroker, Any, str]]:
    """Yield a broker with a page, and a tab that shows it."""
    async with (
        qflow.aio.open(spool) as broker,
        await qflow.web.serve(broker, port=0, users=web_served.users()) as server,
    ):
        home = f"http://127.0.0.1:{server.port}"
        async with web_chromium.logged_in(home, "/queues") as tab:
            yield broker, tab, home


def test_charts_and_figures_move_while_the_page_is_open(spool: Path) -> None:
    """A point more each time, and figures that follow, without a load."""

    async def test() -> None:
        async with browsing(spool) as (broker, tab, home):
            queue = await broker.declare_queue("jobs")
            await tab.goto(home)
            await tab.wait_for_selector("[data-chart=rates] canvas")
            await tab.wait_for_selector("[data-chart=rates][data-points]:not([data-points='1'])")
            await queue.put_many([b"x"] * 37)
            await tab.locator("#tiles", has_text="37").wait_for()
            await tab.wait_for_selector("#deepest a[href='/queue?queue=jobs']")
            assert await tab.locator(".uplot").count() == 3

    asyncio.run(test())


def test_a_purge_by_the_keyboard_alone(spool: Path) -> None:
    """From the table to the queue, to the question, to the answer."""

    async def test() -> None:
        async with browsing(spool) as (broker, tab, home):
            queue = await broker.declare_queue("<img src=x onerror=alert(1)>")
            await queue.put_many([b"x", b"y"])
            await tab.goto(f"{home}/queues")
            await tab.wait_for_selector("#rows a")

            async def go_to(text: str) -> None:
                for _ in range(60):
                    await tab.keyboard.press("Tab")
                    if text in await tab.evaluate("document.activeElement.textContent"):
                        await tab.keyboard.press("Enter")
                        return
                raise AssertionError(f"no Tab leads to {text}")

            await go_to("<img src=x")
            await tab.wait_for_url("**/queue?queue=*")
            await go_to("Purge")
            await tab.wait_for_url("**/confirm/purge*")
            assert await tab.inner_text("#seen") == "2"
            await go_to("Yes, delete")
            await tab.wait_for_selector("p.done")
            assert "messages deleted: 2" in await tab.inner_text("p.done")
            assert len(queue) == 0

    asyncio.run(test())


def test_a_page_is_printed_as_a_whole(spool: Path) -> None:
    """Black on white: all columns of a table, and all lines of a body, which are scrolled to on a screen."""
    wider = "one => one.getBoundingClientRect().right > document.documentElement.clientWidth"

    async def test() -> None:
        async with browsing(spool) as (broker, tab, home):
            queue = await broker.declare_queue("wide " * 12)
            await queue.put(b"line\n" * 200)
            await tab.set_viewport_size({"width": 718, "height": 1000})  # a sheet without its margins
            await tab.emulate_media(media="print", color_scheme="dark")
            await tab.goto(f"{home}/queues")
            await tab.wait_for_selector("#rows a")
            assert await tab.locator("#rows td").evaluate_all(f"all => all.filter({wider}).length") == 0
            assert await tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
            await tab.goto(f"{home}{qflow.web.pages.link('/messages', queue=queue.name)}")
            body = tab.locator("pre")
            assert await body.evaluate("one => one.scrollHeight - one.clientHeight") == 0

    asyncio.run(test())


def test_a_name_is_drawn_over_nothing_else(spool: Path) -> None:
    """Whoever may make a queue can name it with marks that pile up."""

    async def test() -> None:
        async with browsing(spool) as (broker, tab, home):
            await broker.declare_queue("z" + "\u0300" * 300)
            await tab.goto(f"{home}/queues")
            await tab.wait_for_selector("#rows a")
            head = tab.locator("thead")
            seen = await head.screenshot()
            await tab.evaluate("document.querySelector('#rows a').textContent = 'z'")
            assert await head.screenshot() == seen

    asyncio.run(test())


def test_what_comes_after_the_end_of_the_broker_is_said_on_the_page(spool: Path) -> None:
    """The figures are old, and the page says so instead of showing them as if they were new."""

    async def test() -> None:
        async with browsing(spool) as (broker, tab, home):
            await tab.goto(f"{home}/consumers")
            await tab.evaluate("void (window.fetch = () => Promise.reject(new TypeError('gone')))")
            await tab.wait_for_selector("#offline:not([hidden])")
            assert "old" in await tab.inner_text("#offline")
            await broker.close()

    asyncio.run(test())


def test_a_server_that_hangs_is_told_with_the_time(spool: Path) -> None:
    """Its connections stay open, and nothing ever comes: the page waits ten seconds, and says since when it does."""

    async def test() -> None:
        async with browsing(spool) as (_broker, tab, home):
            await tab.goto(f"{home}/consumers")
            await tab.evaluate("""() => {
                const patience = [];
                AbortSignal.timeout = (ms) => {
                    patience.push(ms);
                    return AbortSignal.abort(new DOMException("", "TimeoutError"));
                };
                window.fetch = (_, { signal }) => patience.at(-1) === 10_000 ? Promise.reject(signal.reason) : undefined;
            }""")
            await tab.wait_for_selector("#offline:not([hidden])")
            assert "the server has not answered for " in await tab.inner_text("#offline")

    asyncio.run(test())
