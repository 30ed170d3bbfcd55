"""What waits in a queue that another process owns, page by page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from qflow.delivery import Entry
from qflow.errors import BrokerClosed
from qflow.remote.client.link import Request
from qflow.remote.client.threads import Connection


def browse(name: str) -> Request:
    """Its reply has the first page."""
    return Request({"op": "browse", "queue": name}, undo=_left)


def browse_next(number: int) -> Request:
    return Request({"op": "browse_next", "browse": number}, undo=_left)


def browse_close(number: int) -> Request:
    return Request({"op": "browse_close", "browse": number})


def _left(page: dict[str, Any]) -> Request | None:
    """A page was handed to nobody: those that follow are not asked for."""
    return browse_close(page["browse"]) if page["browse"] else None


def move_entry(name: str, sequence: int, to: str) -> Request:
    """Its reply is the state of the entry."""
    return Request({"op": "move_entry", "queue": name, "sequence": sequence, "to": to})


class Keeper:
    """Moves entries of a queue, for threads; as `delivery.Keeper` says."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._name = name

    def spill_entry(self, sequence: int) -> str:
        return self._connection.call(move_entry(self._name, sequence, "disk"))

    def restore_entry(self, sequence: int) -> str:
        return self._connection.call(move_entry(self._name, sequence, "memory"))


def entries_of(page: dict[str, Any], keeper: Any) -> list[Entry]:
    """Return the entries of a page."""
    return [Entry(sequence, size, state, keeper, due_ms) for sequence, size, state, due_ms in page["entries"]]


def entries(connection: Connection, name: str) -> Iterator[Entry]:
    """Yield what waits in a queue, as it was when this was called."""
    page: dict[str, Any] = connection.call(browse(name))
    return _pages(connection, Keeper(connection, name), page)


def _pages(connection: Connection, keeper: Keeper, page: dict[str, Any]) -> Iterator[Entry]:
    try:
        yield from entries_of(page, keeper)
        while page["browse"] is not None:
            page = connection.call(browse_next(page["browse"]))
            yield from entries_of(page, keeper)
    finally:
        number = page["browse"]
        if number is not None:
            with suppress(BrokerClosed):
                connection.tell(lambda: browse_close(number))
