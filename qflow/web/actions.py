"""What can be done from the page and by the API: a function an action, which checks rights and says what became of it.

Each takes the broker, the rights of who asks, and the arguments, and returns plain values; what cannot be done is a
`QflowError` whose text says why.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from qflow.aio.broker import AsyncBroker, at_length
from qflow.altering import dropped_by
from qflow.amqp.letters import reviving
from qflow.config import QueueSettings
from qflow.errors import InvalidArgument, QflowError
from qflow.queues import redrive as redriving
from qflow.web.arguments import Arguments
from qflow.web.rights import Rights, queue_of, stream_of

Action = Callable[[AsyncBroker, Rights, Arguments], Awaitable[dict[str, Any]]]
PUT_S = 2.0
"""How long a test message waits for room."""
SIZES = ("capacity_bytes", "limit_bytes", "max_message_bytes")
COUNTS = ("limit_messages", "max_deliveries")
SPANS = ("ttl_s", "ack_timeout_s", "dedupe_window_s")
CHANGES = (*COUNTS, *SIZES, *SPANS, "on_overflow", "dead_letter", "resume_ratio")


class Changed(QflowError):
    """More is there than whoever asked has seen; nothing was done."""

    def __init__(self, text: str, now: int) -> None:
        super().__init__(text)
        self.now = now


class WouldDrop(QflowError):
    """Messages would be dropped, and whoever asked has not said that they may be; nothing was done."""


async def put(broker: AsyncBroker, rights: Rights, given: Arguments) -> dict[str, Any]:
    """Put a message into a queue."""
    name = given.text("queue")
    rights.check("write", name)
    queue = queue_of(broker, rights, name)
    options: dict[str, Any] = {"headers": given.headers(), "priority": given.number("priority") or 0}
    for one in ("ttl_s", "delay_s"):
        value = given.fields.get(one)
        if value not in (None, ""):
            options[one] = _seconds(value)
    sequence = await queue.put(given.body(), timeout_s=PUT_S, **options)
    return {"queue": name, "sequence": sequence if isinstance(sequence, int) else None}


async def publish(broker: AsyncBroker, rights: Rights, given: Arguments) -> dict[str, Any]:
    """Publish a message to a topic."""
    topic = given.text("topic")
    rights.check_publish(topic)
    key = given.optional_text("key")
    found = await broker.publish(topic, given.body(), key=key, headers=given.headers())
    return {"topic": topic, "streams": dict(found.offsets), "queues": dict(found.sequences)}


async def purge(broker: AsyncBroker, rights: Rights, given: Arguments) -> dict[str, Any]:
    """Delete the messages of a queue; with `seen`, only if there are no more than that, or `newer` is ticked."""
    name = given.text("queue")
    rights.check("read", name)
    if rights.is_read_only:
        rights.check("configure", name)
    queue = queue_of(broker, rights, name)
    _check_seen(given, len(queue), f"messages in {name!r}")
    return {"queue": name, "purged": await queue.purge()}


async def move(broker: AsyncBroker, rights: Rights, given: Arguments) -> dict[str, Any]:
    """Move messages of a queue to another one."""
    return await _redrive(broker, rights, given, given.text("to"))


async def redrive(broker: AsyncBroker, rights: Rights, given: Arguments) -> dict[str, Any]:
    """Move dead letters back to where they came from, or to one queue."""
    return await _redrive(broker, rights, given, given.optional_text("to"))


async def _redrive(broker: AsyncBroker, rights: Rights, given: Arguments, to: str | None) -> dict[str, Any]:
    name, limit = given.text("queue"), given.number("limit")
    rights.check("read", name)
    queue_of(broker, rights, name)
    if to is None:
        rights.check_administrator("redrive to wherever letters came from")
    else:
        rights.check("write", to)
        queue_of(broker, rights, to)
    work = partial(redriving.redrive, broker.broker, name, to, limit, revive=reviving(name, to))
    report = await at_length(broker, work)
    return {"queue": name, "moved": report.moved, "kept": report.kept}


async def pause(broker: AsyncBroker, rights: Rights, given: Arguments) -> dict[str, Any]:
    """Deliver nothing of a queue until it is resumed, or the broker is closed."""
    name = given.text("queue")
    rights.check("configure", name)
    await queue_of(broker, rights, name).pause()
    return {"queue": name, "paused": True}


async def resume(broker: AsyncBroker, rights: Rights, given: Arguments) -> dict[str, Any]:
    """Deliver again."""
    name = given.text("queue")
    rights.check("configure", name)
    await queue_of(broker, rights, name).resume()
    return {"queue": name, "paused": False}


async def alter(broker: AsyncBroker, rights: Rights, given: Arguments) -> dict[str, Any]:
    """Change settings of a queue: those that are named, an empty one to its default; `dropping`: it may lose some."""
    name = given.text("queue")
    rights.check("configure", name)
    queue = queue_of(broker, rights, name)
    changes = {one: _setting(one, value) for one, value in given.fields.items() if one in CHANGES}
    target = changes.get("dead_letter")
    if isinstance(target, str):  # messages can be made to go there
        rights.check("read", name)
        rights.check("write", target)
    before, depth = queue.settings, await queue.stats()
    dropped = dropped_by(before, changes, depth.messages, depth.bytes)
    if dropped is not None and not given.flag("dropping"):
        raise WouldDrop(f"{name!r} would drop {dropped}, at once: say that it may, by `dropping`")
    after = (await broker.alter_queue(name, **changes)).settings
    changed = {one: value for one, value in after.to_dict().items() if value != before.to_dict()[one]}
    return {"queue": name, "changed": changed}


async def delete(broker: AsyncBroker, rights: Rights, given: Arguments) -> dict[str, Any]:
    """Delete a queue with its messages; `seen` and `newer` as for purging."""
    name = given.text("queue")
    rights.check("configure", name)
    _check_seen(given, len(queue_of(broker, rights, name)), f"messages in {name!r}")
    await broker.delete_queue(name)
    return {"queue": name, "deleted": True}


async def delete_stream(broker: AsyncBroker, rights: Rights, given: Arguments) -> dict[str, Any]:
    """Delete a stream with its messages and subscriptions."""
    name = given.text("stream")
    rights.check("configure", name)
    await broker.delete_stream(stream_of(broker, rights, name))
    return {"stream": name, "deleted": True}


async def delete_subscription(broker: AsyncBroker, rights: Rights, given: Arguments) -> dict[str, Any]:
    """Delete a durable subscription of a stream."""
    stream, name = given.text("stream"), given.text("subscription")
    rights.check("configure", stream)
    await broker.delete_subscription(stream_of(broker, rights, stream), name)
    return {"stream": stream, "subscription": name, "deleted": True}


def _check_seen(given: Arguments, now: int, what: str) -> None:
    seen = given.number("seen")
    if seen is not None and now > seen and not given.flag("newer"):
        raise Changed(f"nothing was done: there are {now:,} {what} now, and were {seen:,}; look again", now)


def _setting(name: str, value: Any) -> Any:
    """Return a setting as the broker takes it; what comes from a form is text."""
    if value == "":
        default = getattr(QueueSettings(), name)
        return default.value if hasattr(default, "value") else default
    if not isinstance(value, str):
        return value
    try:
        if name in COUNTS:
            return int(value)
        if name in SIZES and value.isascii() and value.isdecimal():
            return int(value)
        return float(value) if name == "resume_ratio" else value
    except ValueError as error:
        raise InvalidArgument(f"{name} must be a number, not {value!r}") from error


def _seconds(value: Any) -> Any:
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value  # a text such as 5m, which the queue reads or refuses
