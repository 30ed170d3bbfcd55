"""What waits in a queue, looked at page by page."""

from __future__ import annotations

from functools import partial
from typing import Any

from qflow.aio.broker import in_thread
from qflow.delivery import Entry
from qflow.errors import InvalidArgument
from qflow.queues.entries import Entries
from qflow.queues.queue import parts_of
from qflow.remote.server import arguments
from qflow.remote.server.arguments import Columns
from qflow.remote.server.operations.queues import queue_of
from qflow.remote.server.session import Session, by_name


async def browse(session: Session, head: dict[str, Any], columns: Columns) -> Any:
    return _told(*await session.browsing.begin(queue_of(session, head).queue.browse))


async def browse_next(session: Session, head: dict[str, Any], columns: Columns) -> Any:
    return _told(*await session.browsing.go_on(arguments.number(head, "browse", 1)))


async def browse_close(session: Session, head: dict[str, Any], columns: Columns) -> None:
    session.browsing.close(arguments.number(head, "browse", 1))


def _told(entries: list[Entry], number: int | None) -> Any:
    page = [[entry.sequence, entry.size_bytes, entry.state, entry.due_ms] for entry in entries]
    return {"browse": number, "entries": page}


async def move_entry(session: Session, head: dict[str, Any], columns: Columns) -> Any:
    entries = Entries(parts_of(queue_of(session, head).queue))
    sequence = arguments.number(head, "sequence")
    match head.get("to"):
        case "disk":
            move = partial(entries.spill_entry, sequence)
        case "memory":
            move = partial(entries.restore_entry, sequence)
        case other:
            raise InvalidArgument(f"an entry is moved to disk or to memory, not to {other!r:.100}")
    return await in_thread(session.broker, move)


OPERATIONS = by_name(browse, browse_next, browse_close, move_entry)
