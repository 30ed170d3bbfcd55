"""What every request passes: who asks, from where, how much, and what no answer may be used for."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from types import MappingProxyType

import pytest

pytest.importorskip("starlette")
pytest.importorskip("jinja2")
pytest.importorskip("httpx")

import qflow
from qflow.serving.users import Account, Users
from qflow.web.site import IDLE_S, LONGEST_S, MOST, Sessions
from web_served import HOST, PASSWORD, run, served, token, users


def test_a_name_of_somebody_else_is_refused_without_users(spool: Path) -> None:
    """A page of another site cannot look here by a name that leads to 127.0.0.1."""

    async def test() -> None:
        async with served(spool) as site:
            browser = site.client()
            for host in ("evil.example", "evil.example:7480", "", "127.0.0.1.evil.example", "[::1", "localhost.evil"):
                assert (await browser.get("/", headers={"Host": host})).status_code == 421, host
            for host in ("localhost:7480", "127.0.0.1", "[::1]:7480"):
                assert (await browser.get("/", headers={"Host": host})).status_code == 200, host

    run(test)


def test_every_answer_has_the_headers_that_keep_a_browser_safe(spool: Path) -> None:
    """Pages, errors, refusals and files."""

    async def test() -> None:
        async with served(spool) as site:
            browser = site.client()
            for path, host in (
                ("/", "localhost"),
                ("/nothing", "localhost"),
                ("/", "evil"),
                ("/static/page.js", "localhost"),
            ):
                headers = (await browser.get(path, headers={"Host": host})).headers
                assert "script-src 'self';" in headers["content-security-policy"]
                assert "unsafe-inline" not in headers["content-security-policy"]
                assert headers["x-frame-options"] == "DENY"
                assert headers["x-content-type-options"] == "nosniff"
            assert headers["cache-control"] == "public, max-age=3600"
            assert (await browser.get("/")).headers["cache-control"] == "no-store"
            page = (await browser.get("/")).text
            assert "style=" not in page
            assert "<script>" not in page
            assert "http" not in page.replace("</html>", "").split("<body>")[0]

    run(test)


def test_a_large_body_is_refused_before_it_is_read(spool: Path) -> None:
    """By its length, or when it turns out to be longer."""

    async def test() -> None:
        async with served(spool, users()) as site:
            api = site.api()
            await site.broker.declare_queue("jobs")
            read = 0

            async def pieces(total: int) -> AsyncIterator[bytes]:
                nonlocal read
                for _ in range(total):
                    read += 2**16
                    yield b" " * 2**16

            headers = {"Content-Type": "application/json", "Content-Length": str(100 * 2**20)}
            answer = await api.post("/api/queue/messages", content=pieces(1600), headers=headers)
            assert (answer.status_code, read) == (413, 0)
            assert "larger than 2 MiB" in answer.json()["error"]
            answer = await api.post(
                "/api/queue/messages", content=pieces(1600), headers={"Content-Type": "application/json"}
            )
            assert answer.status_code == 413
            assert read <= 3 * 2**20
            stranger, read = site.client(), 0
            form = {"Content-Type": "application/x-www-form-urlencoded"}
            for headers in (form, form | {"Content-Length": str(2**20)}):
                answer = await stranger.post("/login", content=pieces(16), headers=headers)
                assert (answer.status_code, read) == (413, 2**16)
                assert "larger than 16 KiB, and you have not logged in" in answer.text

    run(test)


def test_a_client_that_goes_in_the_middle_of_a_body_is_no_fault_of_the_server(spool: Path) -> None:
    """Nothing is raised, so the log has no word of it, which anybody could send by the thousand."""

    async def test() -> None:
        async with served(spool) as site:
            for path in ("/login", "/api/publish"):
                kind = b"application/json" if path.startswith("/api") else b"application/x-www-form-urlencoded"
                scope = {
                    "type": "http",
                    "method": "POST",
                    "path": path,
                    "query_string": b"",
                    "headers": [(b"host", b"localhost"), (b"content-type", kind), (b"content-length", b"9")],
                }
                sent: list[object] = []
                comes = iter(({"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}))

                async def receive(comes: Iterator[dict[str, object]] = comes) -> dict[str, object]:
                    return next(comes)

                async def send(message: object, sent: list[object] = sent) -> None:
                    sent.append(message)

                await site.app(scope, receive, send)
                assert sent

    run(test)


def test_forged_forms_do_nothing(spool: Path) -> None:
    """Of another site, without a token, with that of another session; by the API as well."""

    async def test() -> None:
        async with served(spool, users()) as site:
            queue = await site.broker.declare_queue("jobs")
            await queue.put(b"one")
            browser, other = await site.browser(), await site.browser()
            csrf, form = await token(browser), {"queue": "jobs", "newer": "on"}
            forged = [
                ({"csrf": csrf}, {"Origin": "http://evil.example"}),
                ({"csrf": csrf}, {"Origin": "null"}),
                ({"csrf": csrf}, {"Origin": "http://127.0.0.1:9999"}),
                ({"csrf": csrf}, {"Origin": "http://["}),
                ({"csrf": csrf}, {"Sec-Fetch-Site": "cross-site"}),
                ({"csrf": csrf}, {"Sec-Fetch-Site": "same-site"}),
                ({}, {}),
                ({"csrf": await token(other)}, {}),
            ]
            for fields, headers in forged:
                answer = await browser.post("/do/purge", data=form | fields, headers=headers)
                assert answer.status_code == 403, (fields, headers)
            assert (await browser.get("/do/purge", params=form | {"csrf": csrf})).status_code == 405
            assert (await browser.post("/logout", data={"csrf": ""})).status_code == 403
            for headers in ({}, {"X-CSRF-Token": "no"}, {"X-CSRF-Token": csrf, "Origin": "http://evil.example"}):
                answer = await browser.post("/api/queue/purge", json={"queue": "jobs"}, headers=headers)
                assert answer.status_code == 403, headers
            assert len(queue) == 1
            answer = await browser.post("/api/queue/purge", json={"queue": "jobs"}, headers={"X-CSRF-Token": csrf})
            assert answer.json()["purged"] == 1
            by_password = await site.api().post(
                "/api/queue/purge", json={"queue": "jobs"}, headers={"Origin": "http://evil"}
            )
            assert by_password.status_code == 403

    run(test)


def test_nobody_gets_in_without_a_password(spool: Path) -> None:
    """Pages lead to the form, which leads back to a page of here alone; programs are told to log in."""

    async def test() -> None:
        async with served(spool, users()) as site:
            stranger = site.client(headers={"Accept": "text/html"})
            answer = await stranger.get("/queue", params={"queue": "a b"})
            assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=%2Fqueue%3Fqueue%3Da%2Bb")
            for page in ("/login", "/static/nothing"):
                text = (await stranger.get(page)).text
                assert [word for word in (str(spool), "process", qflow.__version__) if word in text] == [], page
            answer = await site.client().get("/api/queues")
            assert (answer.status_code, answer.headers["www-authenticate"][:5]) == (401, "Basic")
            asked = await stranger.get("/api/live", headers={"Sec-Fetch-Mode": "cors"})
            assert "www-authenticate" not in asked.headers
            for wanted in ("//evil.example", "https://evil.example", "/\\evil.example", "javascript:alert(1)"):
                answer = await stranger.post("/login", data={"name": "anna", "password": PASSWORD, "next": wanted})
                assert answer.headers["location"] == "/", wanted
            cookie = answer.headers["set-cookie"]
            assert "HttpOnly" in cookie
            assert "SameSite=strict" in cookie
            stranger.cookies.clear()
            answer = await stranger.post("/login", data={"name": "anna", "password": "wrong"})
            assert (answer.status_code, "set-cookie" in answer.headers) == (401, False)
            for packed in ("Basic !!!", "Basic ", "Basic " + "A" * 5000, "Bearer x", "Basic Og=="):
                assert (await site.client().get("/api/queues", headers={"Authorization": packed})).status_code == 401

    run(test)


@pytest.mark.parametrize(
    ("referer", "page"),
    [
        (f"{HOST}/queue?queue=a+b", "/queue?queue=a+b"),
        (f"{HOST}", "/"),
        ("", "/"),
        ("http://evil.example/queue", "/"),
        ("http://[", "/"),
        (f"{HOST}/do/put", "/"),
        ("/queue", "/"),
    ],
)
def test_a_form_of_a_session_that_is_over_does_nothing_and_says_so(spool: Path, referer: str, page: str) -> None:
    """Whoever logs in comes back to the page of the form, and not to the place that takes forms alone."""

    async def test() -> None:
        async with served(spool, users()) as site:
            browser = await site.browser()
            await site.broker.declare_queue("a b")
            browser.cookies.clear()
            answer = await browser.post("/do/put", data={"queue": "a b", "body": "x"}, headers={"Referer": referer})
            assert answer.status_code == 303
            login = await browser.get(answer.headers["location"])
            assert "You were logged out: nothing was done." in login.text
            wanted = html.unescape(re.search(r'name="next" value="([^"]*)"', login.text)[1])  # type: ignore[index]
            assert wanted == page
            answer = await browser.post("/login", data={"name": "anna", "password": PASSWORD, "next": wanted})
            assert answer.headers["location"] == page
            assert (await browser.get(page)).status_code == 200
            assert "nothing was done" not in (await site.client().get("/login")).text

    run(test)


def test_a_user_who_is_taken_out_of_the_file_is_logged_out_and_so_is_who_logs_out(spool: Path) -> None:
    """The cookie is worth nothing then."""

    async def test() -> None:
        granted = users(bob=("", "", ".*"))
        async with served(spool, granted) as site:
            bob, anna = await site.browser("bob"), await site.browser()
            assert (await bob.get("/queues")).status_code == 200
            site.site.logins.users = Users(MappingProxyType({"anna": granted.accounts["anna"]}))
            assert (await bob.get("/queues")).status_code == 303
            kept = dict(anna.cookies)
            assert (await anna.post("/logout", data={"csrf": await token(anna)})).headers["location"] == "/login"
            assert (await site.client(cookies=kept, headers={"Accept": "text/html"}).get("/")).status_code == 303
            assert (await site.client(headers={"Host": "name.example"}).get("/login")).status_code == 200

    run(test)


def test_another_password_ends_the_logins_that_were_made_with_the_one_before(spool: Path) -> None:
    """Other permissions do not; they hold from then on."""

    async def test() -> None:
        before = users(bob=("", "", ".*"))
        async with served(spool, before) as site:
            await site.broker.declare_queue("jobs")

            def replace(account: Account) -> None:
                site.site.logins.users = Users(MappingProxyType({**before.accounts, "bob": account}))

            known, less = before.accounts["bob"], users(bob=("", "", "^other$")).accounts["bob"]
            checking = site.site.open_session("bob", PASSWORD, "127.0.0.1")
            session = site.site.sessions.find(await overtaken(checking, lambda: replace(less)))
            assert session is not None
            assert site.site.rights_of(session) is None
            replace(known)
            bob = await site.browser("bob")
            replace(Account(less.user, known.password))
            assert (await bob.get("/queue", params={"queue": "jobs"})).status_code == 403
            replace(less)
            assert (await bob.get("/queues")).status_code == 303

    run(test)


async def overtaken(work: Coroutine[object, None, str | None], change: Callable[[], None]) -> str:
    """Return what is done while something changes, after it has begun."""
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    assert not task.done()
    change()
    found = await task
    assert found is not None
    return found


def test_sessions_end_by_time_and_by_number() -> None:
    """Unused for half an hour, after twelve hours, or as the oldest of too many."""
    now = 0.0
    sessions = Sessions(lambda: now)
    key, session = sessions.open("anna", "hash")
    assert sessions.find(key) is session
    now += IDLE_S + 1
    assert sessions.find(key) is None
    key, _ = sessions.open("anna", "hash")
    end = now + LONGEST_S
    while now < end:
        assert sessions.find(key) is not None
        now += IDLE_S / 2
    now += 1
    assert sessions.find(key) is None
    first, _ = sessions.open("anna", "hash")
    for _ in range(MOST):
        last, _ = sessions.open("bob", "hash")
    assert sessions.find(first) is None
    assert sessions.find(last) is not None


def test_wrong_passwords_are_answered_later_and_later(spool: Path) -> None:
    """Whoever guesses waits; who knows the password, and is known, does not."""

    async def test() -> None:
        async with served(spool, users()) as site:
            waited: list[float] = []

            async def sleep(seconds: float) -> None:
                waited.append(seconds)
                await asyncio.sleep(0)

            site.site.logins._sleep = sleep
            stranger = site.client()
            for number in range(6):
                await stranger.post(
                    "/login", data={"name": "anna", "password": f"guess {number}"}, headers={"Origin": HOST}
                )
            assert max(waited) >= 8 * min(one for one in waited if one > 0)

    run(test)
