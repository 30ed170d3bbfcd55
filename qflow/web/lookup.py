"""Queues and streams by the names that requests give, with the nearest names in the answer if there is none."""

from __future__ import annotations

from qflow.aio.broker import AsyncBroker
from qflow.aio.queue import AsyncQueue
from qflow.aio.stream import AsyncStream
from qflow.errors import NotFound
from qflow.names import choices
from qflow.web.rights import Rights


def queue_of(broker: AsyncBroker, rights: Rights, name: str) -> AsyncQueue:
    """Return a queue. Raises NotFound: there is none; the text names those that the user may know of."""
    try:
        return broker.queue(name)
    except NotFound as error:
        known = filter(rights.sees, broker.queues())
        raise NotFound(f"there is no queue {name!r}; {choices(name, known)}") from error


def stream_of(broker: AsyncBroker, rights: Rights, name: str) -> AsyncStream:
    """Return a stream; as `queue_of`."""
    try:
        return broker.stream(name)
    except NotFound as error:
        known = filter(rights.sees, broker.streams())
        raise NotFound(f"there is no stream {name!r}; {choices(name, known)}") from error


def visible(rights: Rights, name: str) -> str:
    """Return a name that the user may know of. Raises Forbidden."""
    if not rights.sees(name):
        rights.check("read", name)
    return name
