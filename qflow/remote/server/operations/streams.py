"""Operations on streams: declared, altered, looked into."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from qflow.aio.stream import AsyncStream
from qflow.errors import InvalidArgument, NotFound
from qflow.options import StreamOptions
from qflow.remote.server import arguments
from qflow.remote.server.arguments import Columns
from qflow.remote.server.records import MOST_BYTES
from qflow.remote.server.session import Operation, Reply, Session
from qflow.remote.server.stream_records import describe_messages
from qflow.remote.wire.values import plain
from qflow.streams.deliveries import StreamMessage

MOST_QUERIES = 100
"""Of one connection that have not come to their end."""
MOST_MESSAGES = 256
"""In one page of a query."""


async def declare_stream(session: Session, head: dict[str, Any], columns: Columns) -> Reply:
    name, settings = arguments.text(head, "stream"), arguments.settings(head, "settings", StreamOptions.__annotations__)
    declared = await session.broker.declare_stream(name, **settings)
    session.known["stream"].add(name)
    return {"result": declared.settings.to_dict()}, []


async def alter_stream(session: Session, head: dict[str, Any], columns: Columns) -> Reply:
    name, changes = arguments.text(head, "stream"), arguments.settings(head, "changes", StreamOptions.__annotations__)
    return {"result": (await session.broker.alter_stream(name, **changes)).settings.to_dict()}, []


async def stream(session: Session, head: dict[str, Any], columns: Columns) -> Reply:
    name = arguments.text(head, "stream")
    found = session.broker.stream(name)
    session.known["stream"].add(name)
    return {"result": found.settings.to_dict()}, []


async def streams(session: Session, head: dict[str, Any], columns: Columns) -> Reply:
    return {"result": session.broker.streams()}, []


async def delete_stream(session: Session, head: dict[str, Any], columns: Columns) -> Reply:
    await session.broker.delete_stream(arguments.text(head, "stream"))
    return {"result": None}, []


async def delete_subscription(session: Session, head: dict[str, Any], columns: Columns) -> Reply:
    await session.broker.delete_subscription(arguments.text(head, "stream"), arguments.text(head, "name"))
    return {"result": None}, []


async def stream_stats(session: Session, head: dict[str, Any], columns: Columns) -> Reply:
    return {"result": plain(await _stream(session, head).stats())}, []


async def last(session: Session, head: dict[str, Any], columns: Columns) -> Reply:
    found = await _stream(session, head).last(arguments.text(head, "filter"))
    told, answer = describe_messages(list(found.values()))
    return {"result": told}, answer


class Query:
    """A query that goes on page by page."""

    def __init__(self, messages: AsyncIterator[StreamMessage]) -> None:
        self._messages: Any = messages

    async def page(self) -> tuple[list[StreamMessage], bool]:
        """Return the next messages, and whether there may be more."""
        found: list[StreamMessage] = []
        size = 0
        async for message in self._messages:
            found.append(message)
            size += len(message.body)
            if len(found) == MOST_MESSAGES or size >= MOST_BYTES:
                return found, True
        return found, False

    async def close(self) -> None:
        async with aclosing(self._messages):
            pass


async def query(session: Session, head: dict[str, Any], columns: Columns) -> Reply:
    stream = _stream(session, head)
    if len(session.queries) >= MOST_QUERIES:
        raise InvalidArgument(f"{MOST_QUERIES} queries of this connection have not come to their end: end some of them")
    options = {name: head[name] for name in ("partition", "skip", "limit", "newest") if head.get(name) is not None}
    bounds = {name: moment(head.get(name)) for name in ("start", "end")}
    begun = Query(stream.query(arguments.text(head, "filter"), **bounds, **options))
    return await _page(session, begun, next(session.numbers))


async def query_next(session: Session, head: dict[str, Any], columns: Columns) -> Reply:
    number = arguments.number(head, "query")
    begun = session.queries.pop(number, None)
    if begun is None:
        raise NotFound(f"there is no query {number} of this connection: it has come to its end")
    return await _page(session, begun, number)


async def query_close(session: Session, head: dict[str, Any], columns: Columns) -> Reply:
    begun = session.queries.pop(arguments.number(head, "query"), None)
    if begun is not None:
        await begun.close()
    return {"result": None}, []


async def _page(session: Session, begun: Query, number: int) -> Reply:
    found, goes_on = await begun.page()
    told, answer = describe_messages(found)
    if goes_on:
        session.queries[number] = begun
    return {"result": {**told, "query": number if goes_on else None}}, answer


def moment(value: Any) -> Any:
    """Return an offset, or the moment that `{"time": seconds}` is."""
    if not isinstance(value, dict):
        return value
    seconds = value.get("time")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise InvalidArgument(f"a moment is {{'time': seconds since the epoch}}, got {value!r}")
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise InvalidArgument(f"a moment is seconds since the epoch, got {seconds!r}: {error}") from error


def _stream(session: Session, head: dict[str, Any]) -> AsyncStream:
    """Return the stream of a request.

    Raises:
        NotFound: there is none. StreamDeleted: the caller has used it before.
    """
    return session.named("stream", arguments.text(head, "stream"), session.broker.stream)


OPERATIONS: dict[str, Operation] = {
    "declare_stream": declare_stream,
    "alter_stream": alter_stream,
    "stream": stream,
    "streams": streams,
    "delete_stream": delete_stream,
    "delete_subscription": delete_subscription,
    "stream_stats": stream_stats,
    "last": last,
    "query": query,
    "query_next": query_next,
    "query_close": query_close,
}
