"""The JSON API: a table of endpoints, of which the routes are made, and what OpenAPI says of them.

Names of queues and streams go as parameters, not in paths: they may be any text, `..` and `/` included.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import attrs
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route

from qflow import __version__
from qflow.aio.broker import at_a_glance
from qflow.errors import InvalidArgument
from qflow.web import actions, listing, peeking
from qflow.web.arguments import Arguments
from qflow.web.guard import AnyJSON
from qflow.web.openapi import Answer, Endpoint, Field, described
from qflow.web.rights import Rights, queue_of, stream_of, visible
from qflow.web.site import Site

_OF_DISK = ("log_bytes", "log_used_bytes", "disk_bytes", "disk_free_bytes")
"""Of the log's file, and of the file system it lies on; 0 as long as it is not known."""


async def _overview(site: Site, rights: Rights, _given: Arguments) -> Any:
    look, findings = await site.figures.look(), await site.findings(rights)
    return {
        "path": site.broker.path,
        "pid": os.getpid(),
        "version": __version__,
        "at_s": look.at_s,
        "totals": look.totals,
        "findings": findings,
        "disk": {name: getattr(site.inside, name) for name in _OF_DISK},
    }


async def _live(site: Site, _rights: Rights, given: Arguments) -> Any:
    look = await site.figures.look()
    since = given.fields.get("since") or 0
    try:
        return {"at_s": look.at_s, "totals": look.totals, "points": site.figures.points(float(since))}
    except ValueError as error:
        raise InvalidArgument(f"since is seconds since the epoch, not {since!r}") from error


async def _queues(site: Site, rights: Rights, given: Arguments) -> Any:
    found, count = await site.queues(rights, listing.Wanted.of(given))
    return {"queues": found, "count": count}


async def _queue(site: Site, rights: Rights, given: Arguments) -> Any:
    name = visible(rights, given.text("queue"))
    settings = queue_of(site.broker, rights, name).settings
    stats = await site.figures.one(name)
    return {"stats": stats, "settings": settings.to_dict(), "bindings": site.bindings(name)}


async def _queue_messages(site: Site, rights: Rights, given: Arguments) -> Any:
    name = given.text("queue")
    rights.check("read", name)
    queue_of(site.broker, rights, name)
    found = await peeking.first_of_queue(site.broker, name, given.number("most") or 10, site.reading)
    return {"messages": [_message(one) for one in found]}


async def _streams(site: Site, rights: Rights, _given: Arguments) -> Any:
    look = await site.figures.look()
    return {"streams": [facts for name, facts in sorted(look.streams.items()) if rights.sees(name)]}


async def _stream(site: Site, rights: Rights, given: Arguments) -> Any:
    name = visible(rights, given.text("stream"))
    stream = stream_of(site.broker, rights, name)
    stats = await at_a_glance(site.broker, lambda: attrs.asdict(stream.stream.stats()))  # of many subscriptions
    return {"stats": stats, "settings": stream.settings.to_dict()}


async def _stream_messages(site: Site, rights: Rights, given: Arguments) -> Any:
    name = given.text("stream")
    rights.check("read", name)
    stream_of(site.broker, rights, name)
    topic_filter = given.optional_text("filter") or "#"
    found = await peeking.last_of_stream(site.broker, name, given.number("most") or 10, topic_filter)
    return {"messages": [_message(one) for one in found]}


async def _consumers(site: Site, rights: Rights, _given: Arguments) -> Any:
    return {"consumers": await site.consumers(rights)}


async def _connections(site: Site, rights: Rights, _given: Arguments) -> Any:
    found = site.connections(rights)
    return {"connections": await at_a_glance(site.broker, lambda: [attrs.asdict(one) for one in found])}


async def _findings(site: Site, rights: Rights, _given: Arguments) -> Any:
    return {"findings": await site.findings(rights)}


async def _events(site: Site, rights: Rights, _given: Arguments) -> Any:
    return {"events": site.events(rights)}


def _does(action: actions.Action) -> Answer:
    async def answer(site: Site, rights: Rights, given: Arguments) -> Any:
        return await action(site.broker, rights, given)

    return answer


def _message(one: peeking.Shown) -> dict[str, Any]:
    said = attrs.asdict(one, filter=lambda field, _value: field.name != "body")
    if one.body is None:
        return said
    try:
        return said | {"body": one.body.decode()}
    except UnicodeDecodeError:
        return said | {"body_base64": base64.b64encode(one.body).decode()}


_QUEUE = Field("queue", "Its name.", needed=True)
_STREAM = Field("stream", "Its name.", needed=True)
_MOST = Field("most", "How many messages, 1 to 100; 10.", "integer")
_LIMIT = Field("limit", "At most so many.", "integer")
_MESSAGE = (
    Field("body", "As text."),
    Field("body_base64", "Instead of `body`, for bytes."),
    Field("headers", "Values by name.", "object"),
)
_GUARDS = (
    Field("seen", "How many messages you have seen: nothing is done if there are more.", "integer"),
    Field("newer", "More may be there than were seen.", "boolean"),
)
ENDPOINTS = (
    Endpoint("GET", "/api/overview", "The whole broker, and what is wrong.", _overview),
    Endpoint(
        "GET", "/api/live", "What the charts show: rates and sums of the last minutes, where somebody looked.", _live,
        (Field("since", "Points later than so many seconds since the epoch.", "number"),),
    ),
    Endpoint(
        "GET", "/api/queues", "Queues with their figures, a hundred at once.", _queues,
        (
            Field("text", "In their names."),
            Field("sort", f"One of {', '.join(listing.SORTS)}."),
            Field("descending", "The largest first.", "boolean"),
            Field("page", "From 1.", "integer"),
        ),
    ),
    Endpoint("GET", "/api/queue", "A queue: figures, settings, the topics that lead to it.", _queue, (_QUEUE,)),
    Endpoint(
        "DELETE", "/api/queue", "Delete a queue with its messages.", _does(actions.delete), (_QUEUE, *_GUARDS),
    ),
    Endpoint(
        "GET", "/api/queue/messages",
        "The first messages, of 64 MiB at most; nothing is taken. Bodies are cut at 64 KiB.",
        _queue_messages, (_QUEUE, _MOST),
    ),
    Endpoint(
        "POST", "/api/queue/messages", "Put a message.", _does(actions.put),
        (
            _QUEUE, *_MESSAGE, Field("priority", "From 0.", "integer"),
            Field("ttl_s", "Seconds until it expires.", "number"),
            Field("delay_s", "Seconds until it is delivered.", "number"),
        ),
    ),
    Endpoint("POST", "/api/queue/purge", "Delete its messages.", _does(actions.purge), (_QUEUE, *_GUARDS)),
    Endpoint(
        "POST", "/api/queue/move", "Move messages to another queue.", _does(actions.move),
        (_QUEUE, Field("to", "The other queue.", needed=True), _LIMIT),
    ),
    Endpoint(
        "POST", "/api/queue/redrive", "Move dead letters back to where they came from.", _does(actions.redrive),
        (_QUEUE, Field("to", "All of them to this queue instead."), _LIMIT),
    ),
    Endpoint("POST", "/api/queue/pause", "Deliver nothing until it is resumed.", _does(actions.pause), (_QUEUE,)),
    Endpoint("POST", "/api/queue/resume", "Deliver again.", _does(actions.resume), (_QUEUE,)),
    Endpoint(
        "POST", "/api/queue/alter", "Change settings: those that are named.", _does(actions.alter),
        (
            _QUEUE, *(Field(name, f"`{name}` of `alter_queue`.", "any") for name in actions.CHANGES),
            Field("dropping", "Also if that drops messages, at once.", "boolean"),
        ),
    ),
    Endpoint(
        "POST", "/api/publish", "Publish a message to a topic.", _does(actions.publish),
        (Field("topic", "Where to.", needed=True), Field("key", "Of the message."), *_MESSAGE),
    ),
    Endpoint("GET", "/api/streams", "Streams with their figures and subscriptions.", _streams),
    Endpoint("GET", "/api/stream", "A stream.", _stream, (_STREAM,)),
    Endpoint("DELETE", "/api/stream", "Delete a stream with its messages.", _does(actions.delete_stream), (_STREAM,)),
    Endpoint(
        "GET", "/api/stream/messages", "The last messages, the newest first.", _stream_messages,
        (_STREAM, _MOST, Field("filter", "Of their topics.")),
    ),
    Endpoint(
        "DELETE", "/api/subscription", "Delete a durable subscription, with its position.",
        _does(actions.delete_subscription), (_STREAM, Field("subscription", "Its name.", needed=True)),
    ),
    Endpoint("GET", "/api/consumers", "Who is there to take messages, and who holds some.", _consumers),
    Endpoint("GET", "/api/connections", "Clients of the other doors of this process.", _connections),
    Endpoint("GET", "/api/findings", "What is wrong, worst first.", _findings),
    Endpoint("GET", "/api/events", "What happened lately, the latest first.", _events),
)  # fmt: skip


def routes() -> list[Route]:
    """Return the routes of all endpoints, and of what OpenAPI says of them."""
    text = described(ENDPOINTS)

    async def document(_request: Request) -> AnyJSON:
        return AnyJSON(text)

    made = [Route(one.path, _handler(one), methods=[one.method]) for one in ENDPOINTS]
    return [*made, Route("/api/openapi.json", document, methods=["GET"])]


def _handler(endpoint: Endpoint) -> Callable[[Request], Awaitable[AnyJSON]]:
    async def handle(request: Request) -> AnyJSON:
        fields = await _fields(request, endpoint)
        endpoint.check_known(fields)
        found = await endpoint.answer(request.app.state.site, request.state.rights, Arguments(fields))
        return AnyJSON(found)

    return handle


async def _fields(request: Request, endpoint: Endpoint) -> Mapping[str, Any]:
    """Return what is asked for. Raises InvalidArgument: some of it is where it would be passed over."""
    asked = dict(request.query_params)
    if endpoint.has_body:
        if asked:
            raise InvalidArgument(f"{min(asked)!r} goes into the body of {endpoint.method} {endpoint.path}")
        return await _object(request)
    if await request.body():
        raise InvalidArgument(f"{endpoint.method} {endpoint.path} takes no body: its fields are parameters")
    return asked


async def _object(request: Request) -> dict[str, Any]:
    """Return the JSON object of a body."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "the body must be JSON: Content-Type: application/json")
    try:
        found = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"the body is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidArgument("the body must be a JSON object {...}")
    return found
