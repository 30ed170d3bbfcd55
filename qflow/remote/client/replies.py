"""Replies read: the classes that the same calls return beside the owner."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import attrs

from qflow.config import QueueSettings
from qflow.delivery import MAY_BE_REPEATED, Segment
from qflow.message import Message, Record
from qflow.named_tuples import NamedTuple
from qflow.remote.client.link import Reply
from qflow.remote.wire.errors import decode_error
from qflow.restoring import Refused
from qflow.takers import ConsumerClosed

T = TypeVar("T")


def report(kind: type[T], values: Any) -> T:
    """Return an attrs object from plain values; names that are not known here are left out.

    Raises:
        TypeError: an older owner does not tell something that is to be there.
    """
    hints = _hints(kind)  # type: ignore[arg-type]
    known = [(name, hints[name], value) for name, value in values.items() if name in hints]
    return kind(**{name: value if hint is None else _typed(hint, value) for name, hint, value in known})


def reporting(kind: type[T]) -> Callable[[Reply], T]:
    """Return what reads a reply that is an object of an attrs class."""
    return lambda reply: report(kind, reply.result)


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Return the types of an attrs class's fields, by name; None for those that JSON has as they are."""
    hints = get_type_hints(kind)
    return {field.name: None if _is_plain(hints[field.name]) else hints[field.name] for field in attrs.fields(kind)}


def _is_plain(hint: Any) -> bool:
    kinds = set(get_args(hint) or (hint,))
    return kinds <= {int, float, str, bool, type(None)} and get_origin(hint) in (None, types.UnionType, typing.Union)


def _typed(hint: Any, value: Any) -> Any:
    """Return a value as a field of this type has it: tuples, and reports in reports."""
    if value is None:
        return None
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _typed(next(one for one in inner if one is not type(None)), value)
    if isinstance(hint, type) and attrs.has(hint):
        return report(hint, value)
    if origin is tuple and isinstance(value, list):
        kinds = [inner[0]] * len(value) if len(inner) == 2 and inner[1] is Ellipsis else inner
        return tuple(_typed(kind, one) for kind, one in zip(kinds, value, strict=False))
    if origin is not None and issubclass(origin, typing.Mapping) and isinstance(value, dict):
        return {key: _typed(inner[1], one) for key, one in value.items()}
    if isinstance(value, list) and origin is not None:
        return [_typed(inner[0], one) for one in value]
    return value


def queue_settings(reply: Reply) -> QueueSettings:
    return QueueSettings.from_dict(reply.result)


def all_queue_settings(reply: Reply) -> list[QueueSettings]:
    return [QueueSettings.from_dict(one) for one in reply.result]


def figures(reply: Reply) -> tuple[int, dict[str, dict[str, Any]]]:
    number, found = reply.result
    return number, found


def first(reply: Reply) -> int | None:
    sequence: int | None = reply.result["first"]
    return sequence


def placed(reply: Reply) -> range:
    sequence = reply.result["first"]
    return range(0) if sequence is None else range(sequence, sequence + reply.result["count"])


class Granted(NamedTuple):
    """Messages that were delivered over a connection."""

    number: int
    """Of the grant; 0 where nothing came."""
    leased: bool
    """They may be taken back, so that whoever settles them must hear of it."""
    segments: list[Segment]


def granted(reply: Reply) -> Granted:
    told = reply.result
    if told.get("closed"):
        raise ConsumerClosed("this consumer was too slow, and is given no more")
    if not told["sequences"]:
        return Granted(0, False, [])
    bodies: list[Any] = reply.columns[0]
    records = bodies if len(reply.columns) == 1 else _records(bodies, told.get("expires"), reply.columns[1:])
    counts, repeated = told["counts"], told["redelivered"]
    segments, place = [], 0
    for sequence, messages in told["sequences"]:
        count = counts[place] if isinstance(counts, list) else counts
        again = repeated[place] if isinstance(repeated, list) else repeated
        marks = (count - 1) << 1 | (MAY_BE_REPEATED if again and count == 1 else 0)
        part = records if len(told["sequences"]) == 1 else records[place : place + messages]
        segments.append(Segment(sequence, part, marks))
        place += messages
    return Granted(told["grant"], told["leased"], segments)


def _records(bodies: list[bytes], expires: Any, columns: list[list[Any]]) -> list[Record]:
    """Return messages with what came beside their bodies."""
    total = len(bodies)
    moments = expires if isinstance(expires, list) else [expires] * total
    headers, topics = (columns[place] if len(columns) > place and columns[place] else [b""] * total for place in (0, 1))
    return [
        Message(body, head, expires_ms=round(moment * 1000) if moment else 0, topic=topic.decode())
        if head or moment or topic
        else body
        for body, moment, head, topic in zip(bodies, moments, headers, topics, strict=True)
    ]


def restored(reply: Reply) -> int:
    """Return how many messages have expired. Raises Refused: one of them is not taken."""
    found = reply.result
    if "refused" in found:
        raise Refused(found["refused"], decode_error(found))
    return int(found["expired"])
