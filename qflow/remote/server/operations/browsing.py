"""What waits in a queue, looked at page by page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from itertools import count
from typing import Any

from qflow.aio.broker import in_thread
from qflow.delivery import Entry
from qflow.errors import InvalidArgument, NotFound
from qflow.queues.entries import Entries
from qflow.queues.queue import parts_of
from qflow.remote.server import arguments
from qflow.remote.server.arguments import Columns
from qflow.remote.server.operations.queues import queue_of
from qflow.remote.server.session import Operation, Reply, Session

PAGE = 1000
MOST_OPEN = 100
"""Of one connection; beyond that the first one is closed."""
_numbers = count(1)


async def browse(session: Session, head: dict[str, Any], columns: Columns) -> Reply:
    entries = queue_of(session, head).browse()
    return await _page(session, next(_numbers), entries)


async def browse_next(session: Session, head: dict[str, Any], columns: Columns) -> Reply:
    number = arguments.number(head, "browse", 1)
    entries = session.browsing.pop(number, None)
    if entries is None:
        raise NotFound(f"there is no browse {number} of this connection any more: begin anew")
    return await _page(session, number, entries)


async def browse_close(session: Session, head: dict[str, Any], columns: Columns) -> Reply:
    session.browsing.pop(arguments.number(head, "browse", 1), None)
    return {"result": None}, []


async def _page(session: Session, number: int, entries: AsyncIterator[Entry]) -> Reply:
    page: list[list[Any]] = []
    async for entry in entries:
        page.append([entry.sequence, entry.size_bytes, entry.state, entry.due_ms])
        if len(page) == PAGE:
            session.browsing[number] = entries
            if len(session.browsing) > MOST_OPEN:
                del session.browsing[next(iter(session.browsing))]
            return {"result": {"browse": number, "entries": page}}, []
    return {"result": {"browse": None, "entries": page}}, []


async def move_entry(session: Session, head: dict[str, Any], columns: Columns) -> Reply:
    entries = Entries(parts_of(queue_of(session, head).queue))
    sequence = arguments.number(head, "sequence")
    match head.get("to"):
        case "disk":
            move = partial(entries.spill_entry, sequence)
        case "memory":
            move = partial(entries.restore_entry, sequence)
        case other:
            raise InvalidArgument(f"an entry is moved to disk or to memory, not to {other!r:.100}")
    return {"result": await in_thread(session.broker, move)}, []


OPERATIONS: dict[str, Operation] = {
    "browse": browse,
    "browse_next": browse_next,
    "browse_close": browse_close,
    "move_entry": move_entry,
}
