"""The process of a local server: it owns a spool and serves it on a loopback port, until nobody is connected any more.

In order, and what a crash between two of them leaves:

    1. fork, so that the client that started it has no child to wait for
    2. lock `serving`                      nothing: the lock ends with the process
    3. open the spool, listen              nothing
    4. publish port and secret             text in `serving` that nobody takes, because it is not locked
    5. say to the client that it listens

The end is asked for by a signal, or begins by itself: a server without connections withdraws what it has published,
and ends if no client comes that had read it before.
"""

from __future__ import annotations

import asyncio
import json
import logging
import logging.handlers
import os
import secrets
import signal
import ssl
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import qflow.aio
import qflow.amqp
from qflow.amqp.local.joining import BUSY
from qflow.amqp.local.place import LOG, USER, Place, Serving, Where
from qflow.amqp.local.settings import LocalSettings
from qflow.errors import QflowError
from qflow.loggers import get_logger
from qflow.options import BrokerOptions
from qflow.serving.addresses import Address
from qflow.serving.doors import Opening, Secrets, Service
from qflow.serving.loops import loop_factory
from qflow.serving.passwords import PasswordHash
from qflow.serving.users import ACTIONS, ADMINISTRATOR, DEFAULT_VIRTUAL_HOST, Account, Permission, User, Users

GRACE_S = 2.0
"""What clients have to settle what they hold, once a signal came."""
LOCK_S = 1.0
"""Clients that look whether there is a server hold its lock for a moment."""
LOOK_S = 0.25
LAST_S = 0.2
"""Seconds between the last look at where a server listens and its end."""
_MOST_LOG_BYTES = 2**20
_SECRET_BYTES = 32

_logger = get_logger("qflow")


def main(spool: str, given: str) -> int:
    """Serve a spool as `joining` asks for; return the exit code, which nobody sees."""
    if os.fork():
        os._exit(0)
    settings = LocalSettings(spool, **json.loads(given))
    place = Place(settings.spool)
    teller = _Teller()
    logging.getLogger("qflow").addHandler(_log(place))
    try:
        serving = _lock(place)
        if serving is None:
            teller.tell({"kind": BUSY, "text": "another server was there first"})
            return 1
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve(settings, serving, teller))
    except (QflowError, OSError) as error:
        _logger.error("the server ends: %s", error)
        teller.tell({"kind": type(error).__name__, "text": str(error)})
        return 1
    return 0


async def serve(settings: LocalSettings, serving: Serving, teller: _Teller) -> None:
    """Serve a spool until a signal, or until nobody is connected.

    Raises:
        BrokerFailed: the log has failed; the next client starts a process that opens the spool again.
    """
    options: BrokerOptions = {} if settings.capacity_bytes is None else {"capacity_bytes": settings.capacity_bytes}
    async with qflow.aio.open(settings.spool, **options) as broker:
        secret = secrets.token_urlsafe(_SECRET_BYTES)
        doors: list[_LocalDoor] = []

        async def listen(address: Address, users: Users | None, _: ssl.SSLContext | None) -> _LocalDoor:
            server = await qflow.amqp.serve(broker, host=address.host, port=address.port, users=users)
            doors.append(_LocalDoor(server, serving, secret))
            return doors[-1]

        def ready(_: str) -> None:
            doors[0].publish()
            teller.tell({})
            watching.append(asyncio.create_task(end_when_left(doors[0], settings.idle_s, service)))

        watching: list[asyncio.Task[None]] = []
        service = Service(
            [Opening("amqp", Address("127.0.0.1", 0), listen)],
            partial(Secrets, _users(secret), None),
            grace_s=GRACE_S,
            tell=ready,
            warn=_logger.info,
            notify=_tell_nobody,
            check=broker.broker.engine.log.check_usable,
        )
        try:
            await service.run()
        finally:
            for task in watching:
                task.cancel()
            for failure in await asyncio.gather(*watching, return_exceptions=True):
                if isinstance(failure, Exception):
                    _logger.error("the server ends: %s", failure)


async def end_when_left(door: _LocalDoor, idle_s: float, service: Service) -> None:
    """Ask the server to end when no client has been connected for so long, or when it cannot say where it listens.

    Raises:
        OSError: it could not.
    """
    try:
        while True:
            since_s = time.monotonic()
            while not door.connections and time.monotonic() - since_s < idle_s:
                await asyncio.sleep(LOOK_S)
            if not door.connections:
                door.withdraw()
                await asyncio.sleep(LAST_S)
                if not door.connections:
                    return
                door.publish()
            while door.connections:
                await asyncio.sleep(LOOK_S)
    finally:
        service.receive(signal.SIGTERM)


class _LocalDoor:
    """A server of AMQP whose clients find it in the spool."""

    def __init__(self, server: qflow.amqp.Server, serving: Serving, secret: str) -> None:
        self._server = server
        self._serving = serving
        self._secret = secret

    @property
    def sockets(self) -> Sequence[Any]:
        return self._server.sockets

    @property
    def connections(self) -> int:
        return self._server.connections

    def publish(self) -> None:
        """Have clients come."""
        self._serving.publish(Where(self._server.port, self._secret))

    def withdraw(self) -> None:
        """Have clients wait for the next server."""
        self._serving.withdraw()

    async def drain(self, grace_s: float) -> None:
        self.withdraw()
        await self._server.drain(grace_s)

    async def close(self) -> None:
        self.withdraw()
        await self._server.close()

    def reload(self, *, users: Users | None, ssl: ssl.SSLContext | None) -> None:
        """Its users are those it began with."""


class _Teller:
    """Says one thing to the client that has started this process: an empty object when it listens, or what failed."""

    def __init__(self) -> None:
        self._is_told = False

    def tell(self, said: dict[str, str]) -> None:
        """Say it, unless something was said before; the client may have gone."""
        if self._is_told:
            return
        self._is_told = True
        try:
            os.write(sys.stdout.fileno(), json.dumps(said).encode())
        except BrokenPipeError:
            _logger.info("who started the server has gone")
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _lock(place: Place) -> Serving | None:
    end_s = time.monotonic() + LOCK_S
    while (serving := place.serve()) is None and time.monotonic() < end_s:
        time.sleep(LOOK_S / 25)
    return serving


def _users(secret: str) -> Users:
    """Return the one user that there is. The secret has 256 random bits: a slow hash would protect nothing."""
    everything = Permission(**dict.fromkeys(ACTIONS, ".*"))
    user = User(USER, frozenset({ADMINISTRATOR}), {DEFAULT_VIRTUAL_HOST: everything})
    return Users({USER: Account(user, PasswordHash.of(secret, n=2))})


def _tell_nobody(_: str) -> None:
    """A service manager that the client has is not this process's."""


def _log(place: Place) -> logging.Handler:
    handler = logging.handlers.RotatingFileHandler(place.path(LOG), maxBytes=_MOST_LOG_BYTES, backupCount=1, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(message)s"))
    return handler
