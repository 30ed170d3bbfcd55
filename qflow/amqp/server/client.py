"""What a channel, and what it does for its client, see of the connection."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any, Protocol

from qflow.amqp.errors import AmqpError
from qflow.amqp.server.budget import Share
from qflow.amqp.server.host import Host
from qflow.amqp.wire.connection import Connection
from qflow.queues.queue import parts_of
from qflow.serving.users import Action

BLOCKED_S = 0.5
"""A publisher that waits so long for room is told that it is blocked."""


class Client(Protocol):
    """A connection that has opened a virtual host."""

    @property
    def number(self) -> int:
        """No other connection of the server has had it."""

    @property
    def machine(self) -> Connection: ...
    @property
    def host(self) -> Host: ...
    @property
    def is_full(self) -> bool:
        """There is a lot to write already."""

    @property
    def holds(self) -> bool:
        """The client has messages that it has not settled."""

    @property
    def is_draining(self) -> bool:
        """The server ends: no message is sent any more."""

    @property
    def cancels_consumers(self) -> bool:
        """The client wants to be told when a consumer's queue is gone."""

    @property
    def max_unit_bytes(self) -> int:
        """The most that a transaction may hold."""

    @property
    def share(self) -> Share:
        """What it holds of the budget that connections have together."""

    async def drain(self) -> None:
        """Return when there is less to write."""

    def flush(self) -> None:
        """Write what is to be written now."""

    def flush_soon(self) -> None:
        """Write what is to be written, together with what other tasks have until they all wait."""

    def new_tag(self) -> str:
        """Return a consumer tag."""

    def may(self, what: Action, name: str) -> None:
        """Refuse what the user may not do."""

    def check_user_id(self, name: str) -> None:
        """Refuse a message that names another user than its connection has."""

    def blocked(self, reason: str) -> AbstractContextManager[None]:
        """Tell the client, for as long as this lasts, that it is not read from."""

    def warn(self, text: str, *values: object) -> None:
        """Write a warning to the log, unless there was one a short time ago."""

    def fail_channel(self, channel: Any, error: AmqpError) -> None:
        """End a channel with an error, from any task."""

    def fail(self, error: AmqpError) -> None:
        """End the connection with an error."""


async def until_done(client: Client, work: Collection[asyncio.Future[Any]]) -> None:
    """Return when work is done that may wait for room; the client is told when it is blocked by that."""
    _, left = await asyncio.wait(work, timeout=BLOCKED_S)
    if left:
        with client.blocked(_what_is_full(client.host)):
            await asyncio.wait(left)


def _what_is_full(host: Host) -> str:
    """Return what publishers wait for, in words. Cost: O(queues of the broker)."""
    parts = map(parts_of, host.broker.broker.engine.queues.all())
    disk = next((one.spiller.error for one in parts if one.spiller.error is not None), None)
    reason = "a queue, or the memory of the broker, is full"
    return reason if disk is None else f"{reason}, and the disk takes nothing more: {disk}"
