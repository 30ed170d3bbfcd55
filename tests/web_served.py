"""The page on a broker, for tests: users with one password, and clients that talk to the application without a socket."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

import qflow.aio
from qflow.serving.passwords import PasswordHash
from qflow.serving.users import Account, Permission, Topics, User, Users
from qflow.web.app import application
from qflow.web.site import Site

PASSWORD = "secret"
HOST = "http://127.0.0.1:7480"


def users(**permissions: tuple[str, str, str]) -> Users:
    """Return users by name with (configure, write, read); `anna` is an administrator who may do everything."""
    password = PasswordHash.of(PASSWORD, n=2)
    accounts = {
        name: Account(
            User(
                name,
                frozenset({"administrator"} if name == "anna" else ()),
                {"/": Permission(configure=granted[0], write=granted[1], read=granted[2])},
                Topics(publish=["news/%u"]),
            ),
            password,
        )
        for name, granted in ({"anna": (".*", ".*", ".*")} | permissions).items()
    }
    return Users(MappingProxyType(accounts))


class Served:
    """A broker, the site on it, and clients."""

    def __init__(self, broker: qflow.aio.AsyncBroker, site: Site) -> None:
        self.broker = broker
        self.site = site
        self.app = application(site)
        self.clients: list[httpx.AsyncClient] = []

    def client(self, **options: Any) -> httpx.AsyncClient:
        """Return a client that nobody has logged in with."""
        transport = httpx.ASGITransport(self.app, client=("127.0.0.1", 4000), raise_app_exceptions=False)
        self.clients.append(httpx.AsyncClient(transport=transport, base_url=HOST, **options))
        return self.clients[-1]

    def api(self, name: str = "anna") -> httpx.AsyncClient:
        """Return a client of the API, by HTTP Basic."""
        return self.client(auth=(name, PASSWORD))

    async def browser(self, name: str = "anna") -> httpx.AsyncClient:
        """Return a client that has logged in by the form, as a browser does."""
        client = self.client(headers={"Accept": "text/html", "Origin": HOST, "Sec-Fetch-Site": "same-origin"})
        answer = await client.post("/login", data={"name": name, "password": PASSWORD, "next": "/queues"})
        assert (answer.status_code, answer.headers["location"]) == (303, "/queues"), answer.text
        return client


async def token(browser: httpx.AsyncClient, page: str = "/publish", **query: str) -> str:
    """Return the token of a form on a page."""
    found = re.search(r'name="csrf" value="([^"]+)"', (await browser.get(page, params=query)).text)
    assert found is not None
    return found[1]


@asynccontextmanager
async def served(path: Path, of: Users | None = None) -> AsyncIterator[Served]:
    """Open a spool, and the site on it."""
    async with qflow.aio.open(path) as broker:
        site = Site(broker, of)
        site.begin()
        talked = Served(broker, site)
        try:
            yield talked
        finally:
            for client in talked.clients:
                await client.aclose()
            site.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test in an event loop."""

    async def whole() -> None:
        await test()

    asyncio.run(whole())
