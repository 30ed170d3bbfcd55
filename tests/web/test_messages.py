"""Messages as the page and the API show them: cut before they are made legible, and beside the loop."""

from __future__ import annotations

import html
import json
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("jinja2")
pytest.importorskip("httpx")

from qflow.web import reading, text
from qflow.web.peeking import last_of_stream
from web_served import run, served

NESTED = b"[" * 200 + b"1," * 30_000 + b"1" + b"]" * 200
"""Of 60 KiB, which with its indents are 12 MB."""


def test_what_is_not_shown_is_not_made_legible(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred bodies as JSON, or headers of megabytes, took seconds, in which no client of any door was answered."""
    lengths = [0]
    printable = text.printable

    def noting(whole: str, keep: str = "") -> str:
        lengths.append(len(whole))
        return printable(whole, keep)

    monkeypatch.setattr(text, "printable", noting)
    for body in (NESTED, json.dumps(["x" * 100] * 500).encode(), json.dumps("x" * 60_000).encode()):
        shown = text.body(body, "json")
        assert shown.endswith(f"… cut: the body has {len(body):,} bytes")
        assert len(shown) < 2 * text.SHOWN_BYTES
    told = text.headers(
        {f"h{number}": "\n" * 1_000_000 for number in range(3)} | dict.fromkeys(map(str, range(5000)), 1)
    )
    assert len(told) == text.SHOWN_HEADERS
    assert told[0] == ("h0", "\\n" * 400 + "…")
    assert max(lengths) <= text.SHOWN_BYTES


def test_bodies_and_headers_are_made_legible_beside_the_loop(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred of them take a tenth of a second; of many headers a page says that it has not all."""
    threads: list[int] = []

    def noting(work: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            threads.append(threading.get_ident())
            return work(*arguments)

        return noted

    for name in ("body", "headers"):
        monkeypatch.setattr(text, name, noting(getattr(text, name)))

    async def test() -> None:
        async with served(spool) as site:
            queue = await site.broker.declare_queue("jobs")
            await queue.put(b"[1]", headers={f"h{number}": number for number in range(text.SHOWN_HEADERS + 1)})
            page = html.unescape((await site.client().get("/messages", params={"queue": "jobs", "as": "json"})).text)
            assert "100 of its headers are shown" in page
            assert page.count("<dt>") == text.SHOWN_HEADERS
            assert len(threads) == 2
            assert threading.get_ident() not in threads

    run(test)


def test_headers_count_as_what_is_read(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept as a whole: a hundred messages of 5 MB of them were gigabytes in the process of the broker."""
    monkeypatch.setattr("qflow.inspect.pages.PAGE_BYTES", 50_000)  # in this process, which reads in place of the other
    monkeypatch.setattr("qflow.web.reading.MOST_KEPT_BYTES", 250_000)
    copy = str(spool.with_name("copy"))

    async def test() -> None:
        async with served(spool) as site:
            queue = await site.broker.declare_queue("jobs")
            for _ in range(5):
                await queue.put(b"x", headers={"long": "y" * 100_000})
            await site.broker.snapshot(copy)
            assert len(reading.main(copy, "jobs", "100")["messages"]) == 3

    run(test)


def test_large_messages_of_a_stream_are_not_all_in_memory(spool: Path) -> None:
    """The page asks for a hundred, of which it shows the beginnings; each may be as large as memory allows."""
    size, count = 500_000, 12

    async def test() -> None:
        async with served(spool) as site:
            await site.broker.declare_stream("log", topics=["log/#"], partitions=2)
            for number in range(count):
                await site.broker.publish(f"log/{number % 2}", b"%d " % number + bytes(size), key=b"%d" % (number % 3))
            tracemalloc.start()
            try:
                found = await last_of_stream(site.broker, "log", count - 2)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert len(found) == count - 2
            for partition in "01":  # two of one millisecond are in any order
                offsets = [int(one.place[2:]) for one in found if one.place[0] == partition]
                assert offsets == [max(offsets) - number for number in range(len(offsets))]
            assert {one.size_bytes for one in found} == {size + 2, size + 3}
            assert peak < 6 * size
            some = await last_of_stream(site.broker, "log", 2, "log/1")
            assert [one.topic for one in some] == ["log/1"] * 2
            answer = await site.client().get("/api/stream/messages", params={"stream": "log", "filter": "a/#/b"})
            assert answer.status_code == 400
            await site.broker.declare_stream("none", topics=["none"])
            answer = await site.client().get("/api/stream/messages", params={"stream": "none", "filter": "a/#/b"})
            assert answer.status_code == 400

    run(test)
