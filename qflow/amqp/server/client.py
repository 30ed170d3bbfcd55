"""What a channel, and what it does for its client, see of the connection: rights, turns, and a share of memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, Protocol

from qflow.amqp.errors import AmqpError, ReplyCode
from qflow.amqp.server.host import Host
from qflow.amqp.wire.connection import Connection
from qflow.queues.queue import parts_of
from qflow.serving.budget import Budget
from qflow.serving.tasks import Turns
from qflow.serving.users import Action, User

MOST_IN_A_TURN = 512
"""Messages that consumers send in one turn of the loop, before others wait for the next: some 20 ms of work."""
REMEMBERED = 1024
DEFAULT_EXCHANGE = "amq.default"
"""The name of the default exchange, in permissions."""


class Permissions:
    """What a user may do in a virtual host, remembered by name: an expression is looked at once for each."""

    def __init__(self, user: User, host_name: str) -> None:
        self.user = user
        self._where = f"in vhost '{host_name}' refused for user '{user.name}'"
        self._may = lru_cache(REMEMBERED)(lambda what, name: user.may(what, host_name, name))

    def check(self, what: Action, name: str) -> None:
        """Refuse what the user may not do: "configure", "write" or "read". Raises AmqpError: ACCESS_REFUSED."""
        name = name or DEFAULT_EXCHANGE
        if not self._may(what, name):
            raise AmqpError(ReplyCode.ACCESS_REFUSED, f"{what} access to '{name}' {self._where}")


class Share:
    """What one connection holds beside the capacity: bodies that are not whole yet, or of a transaction."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._uncommitted = self._noted = 0

    def hold(self, size: int) -> None:
        """Have a transaction hold so many bytes more, or less."""
        self._uncommitted += size

    def excess(self, assembling: int) -> AmqpError | None:
        """Note what is held, with what is not whole; return why the connection is to end, if it holds too much."""
        held = assembling + self._uncommitted
        if held == self._noted:
            return None
        self._noted = held
        if self._budget.allows(self, held):
            return None
        most = f"{self._budget.most_bytes:,} bytes of messages that are not whole, or not committed"
        return AmqpError(ReplyCode.RESOURCE_ERROR, f"connections hold more than {most}, and this one {held:,} of them")

    def end(self) -> None:
        """The connection holds nothing any more."""
        self._budget.allows(self, 0)


BLOCKED_S = 0.5
"""A publisher that waits so long for room is told that it is blocked."""


class Client(Protocol):
    """A connection that has opened a virtual host, as its channels see it; see `session.Session`."""

    @property
    def number(self) -> int: ...
    @property
    def machine(self) -> Connection: ...
    @property
    def host(self) -> Host: ...
    @property
    def is_full(self) -> bool: ...
    @property
    def holds(self) -> bool: ...
    @property
    def is_draining(self) -> bool: ...
    @property
    def cancels_consumers(self) -> bool: ...
    @property
    def max_unit_bytes(self) -> int: ...
    @property
    def share(self) -> Share: ...
    @property
    def turns(self) -> Turns: ...
    async def drain(self) -> None: ...
    def flush(self) -> None: ...
    def flush_soon(self) -> None: ...
    def new_tag(self) -> str: ...
    def may(self, what: Action, name: str) -> None: ...
    def check_user_id(self, name: str) -> None: ...
    def blocked(self, reason: str) -> AbstractContextManager[None]: ...
    def warn(self, text: str, *values: object) -> None: ...
    def fail_channel(self, channel: Any, error: AmqpError) -> None: ...
    def fail(self, error: AmqpError) -> None: ...


async def until_done(client: Client, work: Collection[asyncio.Future[Any]]) -> None:
    """Return when work is done that may wait for room; the client is told when it is blocked by that."""
    _, left = await asyncio.wait(work, timeout=BLOCKED_S)
    if left:
        with client.blocked(what_is_full(client.host)):
            await asyncio.wait(left)


def what_is_full(host: Host) -> str:
    """Return what publishers wait for, in words: many begin to at once, and are told the same.

    Cost: once in `BLOCKED_S`, 0.7 µs for each queue of the broker.
    """
    now = time.monotonic()
    if now >= host.is_told_until_s:
        host.is_told_until_s, host.what_is_full = now + BLOCKED_S, _what_is_full(host)
    return host.what_is_full


def _what_is_full(host: Host) -> str:
    parts = map(parts_of, host.broker.broker.engine.queues.used())
    disk = next((one.spiller.error for one in parts if one.spiller.error is not None), None)
    reason = "a queue, or the memory of the broker, is full"
    return reason if disk is None else f"{reason}, and the disk takes nothing more: {disk}"
