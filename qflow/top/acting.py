"""What is asked of a spool, and done to it, when somebody at the terminal says so. Each returns what to tell them."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import attrs

from qflow import inspect
from qflow.altering import as_typed, dropped_by, parse_change
from qflow.errors import InvalidArgument, NotFound, QflowError
from qflow.names import printable
from qflow.top.look import Key
from qflow.top.one import BODY_BYTES, Inside
from qflow.top.source import Source

if TYPE_CHECKING:
    from qflow.delivery import Entry
    from qflow.inspect.facts import MessageFacts
    from qflow.remote.client.broker import RemoteBroker

PEEKED = 20
"""Messages that are read of a queue that is opened: fewer, if they are large."""


def _broker(source: Source) -> RemoteBroker:
    broker = source.broker
    if broker is None:
        raise InvalidArgument("read-only: nobody owns the spool, or its owner lets nobody in")
    return broker


def look_inside(source: Source, key: Key, is_durable: bool) -> Inside:
    """Return settings and first messages; what cannot be had is said in a note."""
    notes, settings, messages = [], {}, []
    try:
        settings = _settings(source, key)
        messages = _messages(source, key.name, is_durable) if key.kind == "queue" else []
    except (QflowError, OSError) as error:
        notes.append(" ".join(str(error).split()))
    return Inside(settings=settings, messages=messages, note="; ".join(notes))


def _settings(source: Source, key: Key) -> dict[str, Any]:
    if source.broker is not None:
        found = source.broker.queue(key.name) if key.kind == "queue" else source.broker.stream(key.name)
        return found.settings.values()
    facts = inspect.read_spool(source.path)
    kept = facts.queues if key.kind == "queue" else facts.streams
    return next((one.settings for one in kept if one.name == key.name), {})


def _messages(source: Source, name: str, is_durable: bool) -> list[MessageFacts | Entry]:
    """Return the first messages: with their bodies from the log, else as their owner tells of them."""
    if is_durable:
        found = inspect.read_page(source.path, name, most=PEEKED, body_bytes=BODY_BYTES).messages
        return [attrs.evolve(one, headers=dict(source.legible(one.headers))) for one in found]
    if source.broker is None:
        raise NotFound("only its owner has the messages of a queue that is not durable")
    return [*islice(source.broker.queue(name).browse(), PEEKED)]


def purge(source: Source, name: str) -> str:
    """Delete all messages of a queue."""
    return f"messages deleted from {printable(name)}: {_broker(source).queue(name).purge():,}"


def redrive(source: Source, name: str) -> str:
    """Move dead letters back to where they came from."""
    report = _broker(source).redrive(name)
    said = f"messages moved from {printable(name)}: {sum(report.moved.values()):,}"
    if report.kept:
        reasons = "; ".join(f"{count:,}: {reason}" for reason, count in sorted(report.kept.items()))
        said += f"; kept: {sum(report.kept.values()):,} ({printable(reasons)})"
    return said


def pause_or_resume(source: Source, name: str, is_paused: bool) -> str:
    """Let a queue deliver nothing, or let it go on."""
    queue = _broker(source).queue(name)
    if is_paused:
        queue.resume()
        return f"{printable(name)} goes on"
    queue.pause()
    return f"{printable(name)} is paused: it takes messages and delivers none, until it goes on or its owner ends"


def alter(source: Source, name: str, change: str) -> str:
    """Change a setting of a queue, given as `limit_messages=1000`.

    Raises:
        InvalidArgument: there is no such setting or value, or messages would be dropped.
    """
    setting, value = parse_change(change.strip())
    queue, shown = _broker(source).queue(name), printable(name)
    before, depth = queue.settings, queue.stats()
    if dropped := dropped_by(before, {setting: value}, depth.messages, depth.bytes):
        raise InvalidArgument(f"that would drop {dropped}, at once: `qflow alter` does that where it is meant")
    after = _broker(source).alter_queue(name, **{setting: value}).settings.to_dict()
    now, was = as_typed(after[setting]), as_typed(before.to_dict()[setting])
    return f"{shown}: {printable(setting)} is {printable(now)} now, and was {printable(was)}"
