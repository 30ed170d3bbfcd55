"""Operations on streams: declared, altered, looked into."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Any

from qflow.aio.stream import AsyncStream
from qflow.errors import InvalidArgument
from qflow.options import StreamOptions
from qflow.remote.server import arguments
from qflow.remote.server.arguments import Columns
from qflow.remote.server.records import describe_messages
from qflow.remote.server.session import Reply, Session, by_name, of_calls
from qflow.streams.deliveries import StreamMessage


async def declare_stream(session: Session, head: dict[str, Any], columns: Columns) -> Any:
    name, settings = arguments.text(head, "stream"), arguments.settings(head, "settings", StreamOptions.__annotations__)
    declared = await session.broker.declare_stream(name, **settings)
    session.known["stream"].add(name)
    return declared.settings.to_dict()


async def alter_stream(session: Session, head: dict[str, Any], columns: Columns) -> Any:
    name, changes = arguments.text(head, "stream"), arguments.settings(head, "changes", StreamOptions.__annotations__)
    return (await session.broker.alter_stream(name, **changes)).settings.to_dict()


async def stream(session: Session, head: dict[str, Any], columns: Columns) -> Any:
    name = arguments.text(head, "stream")
    found = session.broker.stream(name)
    session.known["stream"].add(name)
    return found.settings.to_dict()


async def last(session: Session, head: dict[str, Any], columns: Columns) -> Reply:
    found = await _stream(session, head).last(arguments.text(head, "filter"))
    told, answer = describe_messages(list(found.values()))
    return {"result": told}, answer


async def query(session: Session, head: dict[str, Any], columns: Columns) -> Reply:
    found = _stream(session, head).stream
    options = {name: head[name] for name in ("partition", "skip", "limit", "newest") if head.get(name) is not None}
    bounds = {name: moment(head.get(name)) for name in ("start", "end")}
    begin = partial(found.query, arguments.text(head, "filter"), **bounds, **options)
    return _told(*await session.queries.begin(begin))


async def query_next(session: Session, head: dict[str, Any], columns: Columns) -> Reply:
    return _told(*await session.queries.go_on(arguments.number(head, "query")))


def _told(messages: list[StreamMessage], number: int | None) -> Reply:
    told, answer = describe_messages(messages)
    return {"result": {**told, "query": number}}, answer


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
    """Return the stream of a request. Raises NotFound: there is none. StreamDeleted: the caller has used it before."""
    return session.named("stream", arguments.text(head, "stream"), session.broker.stream)


OPERATIONS = by_name(declare_stream, alter_stream, stream, last, query, query_next) | of_calls(
    streams=lambda session, head: session.broker.streams(),
    delete_stream=lambda session, head: session.broker.delete_stream(arguments.text(head, "stream")),
    delete_subscription=lambda session, head: session.broker.delete_subscription(
        arguments.text(head, "stream"), arguments.text(head, "name")
    ),
    stream_stats=lambda session, head: _stream(session, head).stats(),
    query_close=lambda session, head: session.queries.close(arguments.number(head, "query")),
)
