"""What `qflow serve` runs: a spool, the doors to it, an event loop, and the log on stderr."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, Unpack

import click

import qflow.aio
from qflow.cli.command import say
from qflow.errors import InvalidArgument, NotFound
from qflow.options import BrokerOptions
from qflow.serving.addresses import Address, is_loopback
from qflow.serving.certificates import Certificates
from qflow.serving.doors import Door, Opening, Secrets, Service
from qflow.serving.loops import loop_factory
from qflow.serving.users import Users

LOOK_S = 1.0
"""How often it is looked whether the broker has failed."""
Serve = Callable[..., Awaitable[Door]]
"""Opens a door: `serve(broker, host=, port=, ssl=, users=)` returns it when it listens."""


class Wanted(NamedTuple):
    """A door that options ask for."""

    name: str
    address: Address
    has_tls: bool


def run(
    spool: Path,
    wanted: Sequence[Wanted],
    users_file: Path | None,
    certificates: Certificates | None,
    grace_s: float,
    **settings: Unpack[BrokerOptions],
) -> int:
    """Serve a spool until a signal; return the exit code, 128 and the number of the signal.

    What is wrong with users, certificates or addresses is said before a spool is made.
    """
    if users_file is None:
        _check_loopback([one.address for one in wanted])
    read = partial(_read, users_file, certificates)
    read()
    open_door = _amqp()
    with _log_on_stderr(), asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(spool, wanted, open_door, read, grace_s, **settings))


async def _serve(
    spool: Path,
    wanted: Sequence[Wanted],
    open_door: Serve,
    read: Callable[[], Secrets],
    grace_s: float,
    **settings: Unpack[BrokerOptions],
) -> int:
    """Serve a spool until a signal; return the exit code."""
    async with qflow.aio.open(spool, **settings) as broker:
        openings = [Opening(one.name, one.address, partial(_open, open_door, broker), one.has_tls) for one in wanted]
        service = Service(openings, read, grace_s=grace_s, tell=click.echo, warn=say)
        serving, failing = asyncio.ensure_future(service.run()), asyncio.ensure_future(_until_failed(broker))
        try:
            await asyncio.wait({serving, failing}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                failing.result()
            return 128 + await serving
        finally:
            serving.cancel()
            failing.cancel()
            await asyncio.wait({serving, failing})


async def _until_failed(broker: qflow.aio.AsyncBroker) -> None:
    """Raise `BrokerFailed` when the broker can do nothing more: a new process opens the spool again."""
    while not broker.closed:
        broker.broker.engine.log.check_usable()
        await asyncio.sleep(LOOK_S)
    await asyncio.Event().wait()


async def _open(
    open_door: Serve,
    broker: qflow.aio.AsyncBroker,
    address: Address,
    users: Users | None,
    context: ssl.SSLContext | None,
) -> Door:
    return await open_door(broker, host=address.host, port=address.port, ssl=context, users=users)


def _amqp() -> Serve:
    """Return `qflow.amqp.serve`, which has a dependency that only some install."""
    try:
        from qflow.amqp.server.server import serve
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "pamqp":
            raise
        raise NotFound("AMQP needs the package pamqp, which is not installed: pip install pamqp") from error
    return serve


def _read(users_file: Path | None, certificates: Certificates | None) -> Secrets:
    users = None if users_file is None else Users.load(users_file)
    return Secrets(users, None if certificates is None else certificates.context())


def _check_loopback(addresses: Sequence[Address]) -> None:
    """Refuse addresses that others can reach.

    Raises:
        InvalidArgument: one of them is, or is none.
    """
    for address in addresses:
        try:
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise InvalidArgument(f"{address.host!r} is no address of this machine: {why}") from error
        if not all(is_loopback(str(sockaddr[0])) for *_, sockaddr in found):
            raise InvalidArgument(
                f"{address} can be reached by others than this machine, so it needs --users FILE; "
                "`qflow users add FILE NAME` makes one"
            )


@contextmanager
def _log_on_stderr() -> Iterator[None]:
    """Have the log on stderr, one line for each record."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine("qflow: %(message)s"))
    logger = logging.getLogger("qflow")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _OneLine(logging.Formatter):
    """Puts a record on one line: what comes from a client may have line ends."""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(super().format(record).split()) if record.exc_info is None else super().format(record)
