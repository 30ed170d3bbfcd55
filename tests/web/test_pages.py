"""The pages and their forms: what is there, what is done, what is said if it cannot be."""

from __future__ import annotations

import asyncio
import html
import re
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("jinja2")
pytest.importorskip("httpx")

import httpx

import inside
import qflow
from planted import plant
from qflow.doctor.judging import MOST
from qflow.web import listing, reading
from qflow.web.figures import Figures
from qflow.web.listing import AT_ONCE
from qflow.web.site import Site
from web_served import run, served, token, users

HOSTILE = "pay/<script>alert(1)</script>\x1b[31m\u202e&\"'"


def test_every_page_is_shown_without_users_and_has_no_form_that_changes_anything(spool: Path) -> None:
    """Whoever comes from this machine looks; hostile names are escaped."""

    async def test() -> None:
        async with served(spool) as site:
            browser = site.client(headers={"Accept": "text/html"})
            queue = await site.broker.declare_queue(HOSTILE)
            await queue.put(b"<b>\x00body", headers={"<i>": "\x1b]0;x\x07"})
            await site.broker.declare_stream("log", topics=["log/#"])
            await site.broker.publish("log/a", b"one")
            pages: list[tuple[str, dict[str, str]]] = [
                *((page, {}) for page in ("/", "/queues", "/streams", "/consumers", "/connections", "/publish")),
                ("/queue", {"queue": HOSTILE}),
                ("/messages", {"queue": HOSTILE}),
                ("/messages", {"queue": HOSTILE, "as": "hex"}),
                ("/stream", {"stream": "log"}),
                ("/messages", {"stream": "log", "filter": "log/+"}),
            ]
            for page, query in pages:
                answer = await browser.get(page, params=query)
                assert answer.status_code == 200, (page, answer.text)
                hidden = html.escape(HOSTILE).replace("&quot;", "&#34;").replace("&#x27;", "&#39;")
                assert "<script>alert" not in answer.text
                assert "\x1b" not in answer.text.replace(f'value="{hidden}"', ""), page
                assert 'method="post"' not in answer.text

    run(test)


def test_queues_are_listed_beside_the_loop(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand of them take half a second, in which no client of any door would be answered."""
    threads: list[int] = []

    def noting(work: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            threads.append(threading.get_ident())
            return work(*arguments)

        return noted

    for name in ("listed", "consumers"):
        monkeypatch.setattr(listing, name, noting(getattr(listing, name)))

    async def test() -> None:
        async with served(spool) as site:
            await site.broker.declare_queue("jobs")
            browser = site.client(headers={"Accept": "text/html"})
            pages = ("/", "/queues", "/consumers", "/api/queues", "/api/consumers")
            for page in pages:
                assert (await browser.get(page)).status_code == 200
            assert len(threads) == len(pages)
            assert threading.get_ident() not in threads

    run(test)


def test_thousands_of_subscriptions_and_consumers_are_not_all_shown(spool: Path) -> None:
    """A page with all of them had two megabytes, and held up the clients of all doors for half a second."""
    count = AT_ONCE + 1

    async def test() -> None:
        async with served(spool) as site:
            browser = site.client(headers={"Accept": "text/html"})
            await site.broker.declare_stream("log", topics=["log/#"])
            await site.broker.publish_many([(f"log/{number}", b"x") for number in range(count)])
            queue = await site.broker.declare_queue("jobs")
            await queue.put_many(count * [b"x"])
            for number in range(count):
                await queue.get(consumer=f"holder-{number:03}")
                async with site.broker.subscribe("log", name=f"s{number:03}", start="earliest") as one:
                    await one.seek(number)

            async def shown(page: str, row: str, **query: str) -> list[str]:
                text = html.unescape((await browser.get(page, params=query)).text)
                assert f"{AT_ONCE} of {count} are shown" in text
                return re.findall(row, text)

            for page in ("/consumers", "/stream"):
                names = await shown(page, r"\bs\d{3}\b", stream="log")
                assert set(names) == {f"s{number:03}" for number in range(AT_ONCE)}  # those furthest behind
            assert len(set(await shown("/consumers", r"holder-\d{3}"))) == AT_ONCE

    with inside.without_maintenance():  # which takes what has changed, and tells of it a moment later
        run(test)


def test_thousands_of_findings_are_not_all_shown(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with served(spool) as site:
            one = {"severity": "notice", "kind": "k", "queue": None, "sentence": "It is so.", "remedy": "do this"}

            async def many(_site: Site, _rights: object) -> list[dict[str, str | None]]:
                return (AT_ONCE + 1) * [one]

            monkeypatch.setattr(Site, "findings", many)
            text = (await site.client(headers={"Accept": "text/html"}).get("/")).text
            assert text.count("It is so.") == AT_ONCE
            assert f"{AT_ONCE} of {AT_ONCE + 1} are shown" in text
            assert f"qflow doctor {spool}" in text

    run(test)


def test_findings_that_are_alike_are_gathered_as_far_as_the_user_may_know_of_them(spool: Path) -> None:
    """The API had all of them, megabytes for thousands, in the loop. The page of a queue has its own."""

    async def test() -> None:
        async with served(spool, users(bob=("", "", "bobs-.*"))) as site:
            for number in range(MOST + 3):
                for whose in ("annas", "bobs"):
                    await (await site.broker.declare_queue(f"{whose}-{number:02}")).pause()
            for name, more in (("anna", MOST + 6), ("bob", 3)):
                for endpoint in ("/api/findings", "/api/overview"):
                    found = (await site.api(name).get(endpoint)).json()["findings"]
                    assert [one["kind"] for one in found] == (MOST + 1) * ["paused"]
                    assert found[-1]["facts"]["count"] == len(found[-1]["facts"]["names"]) == more
                    shown = found[-1]["facts"]["names"] + [one["queue"] for one in found[:-1]]
                    assert all(queue.startswith("bobs") for queue in shown) is (name == "bob")
            for queue in ("bobs-00", f"bobs-{MOST + 2}"):
                page = html.unescape((await site.api("bob").get("/queue", params={"queue": queue})).text)
                assert f"queue '{queue}' is paused" in page

    with inside.without_maintenance():  # which takes what has changed, and tells of it a moment later
        run(test)


def test_a_body_is_shown_as_text_json_and_hex_and_is_cut(spool: Path) -> None:
    """Control characters are escaped; what is longer than is shown says so; nothing is taken."""

    async def test() -> None:
        async with served(spool) as site:
            browser = site.client()
            queue = await site.broker.declare_queue("jobs")
            await queue.put_many([b'{"a": [1, "\\u001b"]}', b"\x1b[2J\xff", b"x" * 10_000])

            async def shown(form: str) -> str:
                return html.unescape((await browser.get("/messages", params={"queue": "jobs", "as": form})).text)

            text, as_json, as_hex = await shown("text"), await shown("json"), await shown("hex")
            assert "\\x1b[2J\\xff" in text
            assert "the body has 10,000 bytes" in text
            assert '"a": [\n    1,\n    "\\u001b"' in as_json
            assert "(not JSON)" in as_json
            assert "00000000  1b 5b 32 4a ff" in as_hex
            assert ".[2J." in as_hex
            assert len(queue) == 3
            answer = await browser.get("/messages", params={"queue": "jobs", "as": "yaml"})
            assert answer.status_code == 400
            assert "not as &#39;yaml&#39;" in answer.text

    run(test)


def test_a_user_puts_moves_alters_and_redrives_by_forms(spool: Path) -> None:
    """Each goes back to the page, which says what was done, once."""

    async def test() -> None:
        async with served(spool, users()) as site:
            browser = await site.browser()
            jobs = await site.broker.declare_queue("jobs", max_deliveries=1, dead_letter="dead")
            await site.broker.declare_queue("other")
            csrf = await token(browser, "/queue", queue="jobs")

            async def do(action: str, **fields: str) -> str:
                answer = await browser.post(f"/do/{action}", data={"csrf": csrf, **fields})
                assert answer.status_code == 303, answer.text
                return html.unescape((await browser.get(answer.headers["location"])).text)

            assert "jobs: put as message 0" in await do(
                "put", queue="jobs", body="one", headers="a: b\nc: d", ttl_s="60"
            )
            async with await jobs.get() as delivery:
                assert delivery.headers == {"a": "b", "c": "d"}
            await do("put", queue="jobs", body="two")
            assert "jobs: moved: other: 1; kept: nothing" in await do("move", queue="jobs", to="other")
            page = await do("alter", queue="other", limit_messages="7", ttl_s="1h", dedupe_window_s="1d")
            assert "limit_messages: 7" in page
            settings = site.broker.queue("other").settings
            assert (settings.ttl_s, settings.dedupe_window_s) == (3600, 86400)
            assert "delivers nothing" in await do("pause", queue="other")
            assert (await browser.get("/queue", params={"queue": "other"})).text.count("/do/resume") == 1
            assert "delivers again" in await do("resume", queue="other")
            await do("alter", queue="other", limit_messages="", ttl_s="")
            assert site.broker.queue("other").settings.limit_messages is None
            assert "put as" not in (await browser.get("/queue", params={"queue": "other"})).text
            await do("put", queue="jobs", body="three")
            await (await jobs.get()).nack(requeue=False)
            await (await site.broker.queue("dead").get()).nack()
            page = await do("redrive", queue="dead")
            assert "dead: moved: jobs: 1" in page, page

    run(test)


def test_a_form_with_a_name_that_is_no_text_leads_somewhere(spool: Path) -> None:
    """What it asks for is done, and no fault of the server."""

    async def test() -> None:
        async with served(spool, users()) as site:
            browser = await site.browser()
            await site.broker.declare_stream("log", topics=["log/#"])
            sent = f"csrf={await token(browser)}&topic=log/a&body=x&queue=%FF"
            kind = {"Content-Type": "application/x-www-form-urlencoded"}
            answer = await browser.post("/do/publish", content=sent, headers=kind)
            assert (answer.status_code, answer.headers["location"]) == (303, "/queue?queue=%FF")

    run(test)


def test_a_purge_says_how_many_it_saw_and_asks_again_if_there_are_more(spool: Path) -> None:
    """Two browsers at once: what came since is not deleted unseen."""

    async def test() -> None:
        async with served(spool, users()) as site:
            browser = await site.browser()
            queue = await site.broker.declare_queue("jobs")
            await queue.put_many([b"1", b"2"])
            asked = (await browser.get("/confirm/purge", params={"queue": "jobs"})).text
            assert '<b id="seen">2</b>' in asked, asked
            assert 'name="seen" value="2"' in asked
            await queue.put(b"3")
            form = {"csrf": await token(browser), "queue": "jobs", "seen": "2"}
            answer = await browser.post("/do/purge", data=form)
            assert answer.status_code == 409
            assert "there are 3 messages" in answer.text
            assert len(queue) == 3
            answer = await browser.post("/do/purge", data=form | {"newer": "on"})
            assert answer.status_code == 303
            assert len(queue) == 0
            assert "messages deleted: 3" in (await browser.get(answer.headers["location"])).text

    run(test)


def test_only_what_was_changed_in_a_form_is_altered(spool: Path) -> None:
    """Two browsers at once: the second one, which was opened before, does not take back what the first has set."""

    async def test() -> None:
        async with served(spool, users()) as site:
            one, other = await site.browser(), await site.browser()
            jobs = await site.broker.declare_queue("jobs", limit_messages=7)

            async def opened(browser: httpx.AsyncClient) -> dict[str, str]:
                page = (await browser.get("/queue", params={"queue": "jobs"})).text
                form = page[page.index('action="/do/alter"') :].partition("</form>")[0]
                fields = dict(re.findall(r'<input[^>]* name="([^"]+)" value="([^"]*)"', form))
                return fields | {"on_overflow": re.findall(r'<option value="([^"]+)" selected', form)[0]}

            first, second = await opened(one), await opened(other)
            assert first["limit_messages"] == "7"
            await one.post("/do/alter", data=first | {"limit_messages": "9"})
            await other.post("/do/alter", data=second | {"ttl_s": "60"})
            assert (jobs.settings.limit_messages, jobs.settings.ttl_s) == (9, 60.0)
            third = await opened(other)
            await other.post("/do/alter", data=third | {"limit_messages": ""})
            assert (jobs.settings.limit_messages, jobs.settings.ttl_s) == (None, 60.0)

    run(test)


def test_a_change_that_drops_messages_is_asked_about(spool: Path) -> None:
    """Nothing is done until that is ticked."""

    async def test() -> None:
        async with served(spool, users()) as site:
            browser, api = await site.browser(), site.api()
            ring = await site.broker.declare_queue("ring", on_overflow="drop_oldest")
            await ring.put_many([b"x"] * 5)
            form = {"csrf": await token(browser), "queue": "ring", "limit_messages": "3"}
            answer = await browser.post("/do/alter", data=form)
            assert answer.status_code == 409
            assert "would drop its oldest 2 messages, down to 3, at once" in answer.text
            assert (await api.post("/api/queue/alter", json={"queue": "ring", "limit_messages": 3})).status_code == 409
            assert ring.settings.limit_messages is None
            answer = await browser.post("/do/alter", data=form | {"dropping": "on"})
            assert (answer.status_code, ring.settings.limit_messages) == (303, 3)
            answer = await api.post("/api/queue/alter", json={"queue": "ring", "limit_messages": 2, "dropping": True})
            assert (answer.status_code, ring.settings.limit_messages) == (200, 2)

    run(test)


def test_a_finding_leads_to_its_remedy(spool: Path) -> None:
    """With what only the log tells, which comes a moment later; whoever may do nothing is led to look."""

    async def test() -> None:
        for who in (users(), None):
            async with served(spool, who) as site:
                browser = site.client() if who is None else await site.browser()
                orders = await site.broker.declare_queue("orders", dead_letter="<dead>`&")
                await orders.put(b"x")
                await (await orders.get()).nack(requeue=False, reason="card `declined` <b>")
                page = ""
                while "the commonest reason" not in page or "Log on disk</span><b>-" in page:
                    page = (await browser.get("/")).text
                assert "card `declined` &lt;b&gt;" in page
                assert " live of " in page
                assert re.search(r"<code>qflow redrive \S+ [$]&#39;&lt;dead&gt;\\x60&amp;&#39;</code>, or", page)
                assert '<a href="/messages?queue=%3Cdead%3E%60%26">Look at messages</a>' in page
                for link in ("/confirm/purge?queue=%3Cdead%3E%60%26", "/queue?queue=%3Cdead%3E%60%26#move"):
                    assert (f'<a href="{link}"' in page) == (who is not None)

    run(test)


def test_a_name_from_right_to_left_turns_no_number_beside_it(spool: Path) -> None:
    """Neither in a sentence nor in a command, which can be copied as it is."""

    async def test() -> None:
        async with served(spool) as site:
            queue = await site.broker.declare_queue("תור שני (5)", limit_messages=1)
            await queue.put(b"x")
            blocked = asyncio.create_task(queue.put(b"y"))
            page = ""
            while "blocked for" not in page:
                page = (await site.client().get("/")).text
            blocked.cancel()
            assert "of queue &#39;<bdi>תור שני</bdi> (5)&#39; (1)" in page
            assert re.search(r"<code>qflow [^<]+ &#39;<bdi>תור שני</bdi> \(5\)&#39;", page) is not None

    run(test)


def test_what_is_asked_about_is_named_as_a_whole(spool: Path) -> None:
    """Of two long names that differ in the middle, it is clear which one is deleted; tables cut both."""

    async def test() -> None:
        async with served(spool, users()) as site:
            browser = await site.browser()
            name = "x" * 200 + "<here>" + "y" * 200
            await site.broker.declare_queue(name)
            await site.broker.declare_stream(name, topics=["log/#"])
            shown = html.escape(name)
            for page, seen in (("/queue", f"Queue {shown}</h1>"), ("/messages", f"Messages of {shown}</h1>")):
                assert seen in (await browser.get(page, params={"queue": name})).text
            assert f"Stream {shown}</h1>" in (await browser.get("/stream", params={"stream": name})).text
            for action, kind in (("purge", "queue"), ("delete", "queue"), ("delete_stream", "stream")):
                assert f"<b>{shown}</b>?" in (await browser.get(f"/confirm/{action}", params={kind: name})).text

    run(test)


def test_a_page_behind_the_last_is_the_last(spool: Path) -> None:
    """As when queues were deleted meanwhile; and one queue is no plural."""

    async def test() -> None:
        async with served(spool) as site:
            await site.broker.declare_queue("lone")
            page = ""
            while "/queue?queue=lone" not in page:
                page = (await site.client().get("/queues")).text
            behind = (await site.client().get("/queues", params={"page": "7"})).text
            assert "/queue?queue=lone" in behind
            assert "data-live>1 queue</p>" in behind

    run(test)


def test_messages_of_a_queue_of_any_name_are_shown(spool: Path) -> None:
    """Also with what no argument of a process can have."""

    async def test() -> None:
        async with served(spool) as site:
            for name in ("a\x00b", "--help", "-", "[1]", '"', "é\u202e"):
                await (await site.broker.declare_queue(name)).put(b"the body")
                answer = await site.client().get("/messages", params={"queue": name})
                assert (answer.status_code, "the body" in answer.text) == (200, True), (name, answer.text)

    run(test)


@pytest.mark.parametrize("is_named", [False, True])
def test_reading_runs_no_file_of_the_current_directory(
    spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    """Whatever modules lie where a server was started, and though the program looks for its own there."""
    with qflow.open(spool) as broker:
        broker.declare_queue("jobs").put(b"x")
        monkeypatch.chdir(plant(tmp_path))
        monkeypatch.setattr(sys, "path", [str(tmp_path) if is_named else "", *sys.path])
        assert [one["size_bytes"] for one in reading.first_messages(broker.path, "jobs", 1)] == [1]
        assert reading.health(broker.path).letters == []


def test_a_process_that_cannot_read_is_told_by_its_last_words(
    spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or by how it ended, where it had none."""
    failing = tmp_path / "python"
    failing.touch(0o700)
    monkeypatch.setattr(sys, "executable", str(failing))
    failing.write_text("#!/bin/sh\necho Traceback >&2; printf 'OSError: %01000d' 0 >&2; exit 1\n")
    with pytest.raises(qflow.StorageError, match=r"could not be read: OSError: 0{291}$"):
        reading.health(str(spool))
    failing.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(qflow.StorageError, match="the process that reads it ended with 3"):
        reading.health(str(spool))


def test_what_is_gone_is_said(spool: Path) -> None:
    """An action on a queue that somebody else has deleted is an error that is shown, with the nearest names."""

    async def test() -> None:
        async with served(spool, users()) as site:
            one, other = await site.browser(), await site.browser()
            await site.broker.declare_queue("orders")
            await site.broker.declare_queue("jobs")
            form = {"queue": "jobs", "seen": "0"}
            answer = await one.post("/do/delete", data=form | {"csrf": await token(one)})
            assert (answer.status_code, answer.headers["location"]) == (303, "/queues")
            for action in ("delete", "purge", "put", "alter"):
                answer = await other.post(f"/do/{action}", data={"queue": "jobs", "csrf": await token(other)})
                assert (answer.status_code, "&#39;jobs&#39;" in answer.text) == (404, True), (action, answer.text)
            answer = await other.get("/queue", params={"queue": "order"})
            assert answer.status_code == 404
            assert "orders" in answer.text
            assert (await other.get("/confirm/nothing")).status_code == 404

    run(test)


def test_a_directory_that_was_removed_under_its_owner_is_told(spool: Path) -> None:
    """The pages are shown as before, and say it first."""

    async def test() -> None:
        async with served(spool) as site:
            browser = site.client()
            await (await site.broker.declare_queue("jobs")).put(b"x")
            shutil.rmtree(spool.rename(spool.with_name("gone")))  # figures are written there at any moment
            for path in ("/", "/queues", "/queue?queue=jobs"):
                assert (await browser.get(path)).status_code == 200, path
            (found, *_) = (await browser.get("/api/findings")).json()["findings"]
            assert (found["kind"], found["severity"]) == ("removed", "urgent")

    run(test)


def test_a_broker_that_is_closed_is_said(spool: Path) -> None:
    """The owner ends while a page is open."""

    async def test() -> None:
        async with served(spool, users()) as site:
            browser, api = await site.browser(), site.api()
            await site.broker.declare_queue("jobs")
            csrf = await token(browser)
            await site.broker.close()
            for page in ("/", "/queues", "/queue?queue=jobs"):
                answer = await browser.get(page)
                assert answer.status_code == 503
                assert "closed" in answer.text
            answer = await browser.post("/do/put", data={"queue": "jobs", "csrf": csrf})
            assert answer.status_code == 503
            assert (await api.get("/api/live")).status_code == 503

    run(test)


def test_a_thousand_queues_are_sorted_filtered_and_shown_a_hundred_at_once(spool: Path) -> None:
    """Orders go round at the second click."""

    async def test() -> None:
        async with served(spool) as site:
            browser = site.client()
            queues = await site.broker.declare_queues([f"q{number:04}" for number in range(1000)], durable=False)
            await queues[777].put_many([b"x", b"y"], durable=False)
            page = ""
            while "q0777" not in page or "1,000 queues" not in page:  # as of a moment ago, when there were fewer
                page = (await browser.get("/queues", params={"sort": "messages", "descending": "1"})).text
            assert page.index("q0777") < page.index("q0000")
            assert page.count("/queue?queue=") == 100
            assert "1,000 queues, page 1 of 10" in page
            assert (await browser.get("/queues", params={"text": "Q09"})).text.count("/queue?queue=") == 100
            assert "q0999" in (await browser.get("/queues", params={"page": "10"})).text
            assert (await browser.get("/queues", params={"sort": "colour"})).status_code == 400

    run(test)


def test_large_messages_are_read_as_far_as_they_fit(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are asked for; what is shown says of how many that is."""
    monkeypatch.setattr("qflow.inspect.pages.PAGE_BYTES", 500_000)  # in this process, which reads in place of the other
    monkeypatch.setattr("qflow.web.reading.MOST_BYTES", 2_500_000)
    monkeypatch.setattr("qflow.web.reading._told", lambda path, *words: reading.main(copy, *words))
    copy = str(spool.with_name("copy"))

    async def test() -> None:
        async with served(spool) as site:
            queue = await site.broker.declare_queue("jobs")
            await queue.put_many([b"%d" % number + bytes(1_000_000) for number in range(5)])
            await site.broker.snapshot(copy)
            page = html.unescape((await site.client().get("/messages", params={"queue": "jobs", "most": "100"})).text)
            assert "The first 3 of 5 messages" in page
            assert page.count("1,000,001 bytes") == 3

    run(test)


@pytest.mark.parametrize(("cost_s", "apart_s"), [(0.001, 1.0), (0.03, 1.5), (5.0, 10.0)])
def test_looks_are_the_more_seldom_the_more_they_cost(
    cost_s: float, apart_s: float, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many pages are open, and queues change."""
    read = Figures._timed
    monkeypatch.setattr(Figures, "_timed", lambda figures: (read(figures)[0], cost_s))
    now_s = [100.0]

    async def test() -> None:
        async with await qflow.aio.open(spool) as broker:
            figures = Figures(broker, clock=lambda: now_s[0], now=lambda: now_s[0])
            first = await figures.look()
            now_s[0] += apart_s - 0.01
            assert await figures.look() is first
            now_s[0] += 0.02
            assert await figures.look() is not first
            assert figures.points()[-1]["put"] == 0  # a rate, however long the pause was

    run(test)


def test_queues_that_are_gone_are_not_shown_however_many_went(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qflow.figures.LOOK_S", 0.0)
    monkeypatch.setattr("qflow.figures.GONE_KEPT", 1)
    now_s = [100.0]

    async def test() -> None:
        async with await qflow.aio.open(spool) as broker:
            figures = Figures(broker, clock=lambda: now_s[0], now=lambda: now_s[0])
            before = await figures.look()
            for name in ("new", "newer", "newest"):
                await broker.declare_queue(name)
            now_s[0] += 60
            assert (await figures.look()).queues.keys() - before.queues.keys() == {"new", "newer", "newest"}
            await broker.delete_queue("new")
            await broker.delete_queue("newer")
            now_s[0] += 60
            assert (await figures.look()).queues.keys() - before.queues.keys() == {"newest"}

    run(test)
