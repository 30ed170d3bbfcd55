"""The context of a trace in headers of messages, as the propagators of the program write and read it.

Headers come from whoever publishes. The propagators of OpenTelemetry warn of each that they cannot read, which would
fill the log of a consumer: so those of W3C are looked at first, and left out if they are too long or malformed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote_plus, unquote_plus

from opentelemetry import baggage, propagate
from opentelemetry.context import Context

from qflow.amqp import letters
from qflow.mqtt.model.messages import USER_PROPERTIES, of_headers

_BAGGAGE = "baggage"
_MOST_BYTES, _MOST_ENTRIES, _MOST_ENTRY_BYTES = 8192, 180, 4096
"""Of `baggage`; `tracestate` has so many bytes at most, too."""
_MOST_PARENT_BYTES, _MOST_STATES = 512, 32
_BLANKS = r"[ \t]{64}"
"""The propagator takes a time that grows with the square of a run of them."""
_KEY = r"[!#-'*+\-.0-9A-Z^-z|~]+"
_VALUE = r"[!#-+\--:<-\[\]-~]+"
_PAIR = rf"[ \t]*{_KEY}[ \t]*=[ \t]*({_VALUE}[ \t]*)?"
_ENTRY = rf"{_PAIR}(;({_PAIR}|[ \t]*{_KEY}[ \t]*))*"
_STATE = (
    r"([a-z][_0-9a-z\-*/]{0,255}|[a-z0-9][_0-9a-z\-*/]{0,240}@[a-z][_0-9a-z\-*/]{0,13})"
    r"=[ -+\--<>-~]{0,255}[!-+\--<>-~]"
)


def with_context(headers: Any) -> Any:
    """Return headers with the context of the current span, unless they have one: all of it, or nothing.

    What are no headers is returned as it is: the call refuses it.
    """
    carried: dict[str, str] = {}
    propagate.inject(carried)
    if not carried or not (headers is None or isinstance(headers, Mapping)):
        return headers
    if headers is None:
        return carried
    return headers if _names(carried) & headers.keys() else {**carried, **headers}


def context_of(headers: Mapping[str, Any]) -> Context:
    """Return the context of a trace that a message carries, without baggage; empty if there is none."""
    return _extract({name: value for name, value in _told(headers).items() if name != _BAGGAGE})


def context_with_baggage(headers: Mapping[str, Any]) -> Context:
    """Return the context that a message carries, with baggage."""
    return _extract(_told(headers))


def add_baggage(found: Context, to: Context) -> Context:
    """Return a context with the baggage of another one, too."""
    for name, value in baggage.get_all(found).items():
        to = baggage.set_baggage(name, value, to)
    return to


def _extract(told: Mapping[str, str]) -> Context:
    readable = {name: value for name, value in told.items() if name not in _READABLE or _READABLE[name](value)}
    return propagate.extract(readable, Context())


def _names(carried: Iterable[str] = ()) -> set[str]:
    """Return the names of headers that say where in a trace a message is."""
    return {*propagate.get_global_textmap().fields, *carried} - {_BAGGAGE}


def _told(headers: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers of a message that are text.

    Of one that came by AMQP or MQTT, they are those that its client gave; unless a program has passed it on with a
    context of its own since, which stands beside them.
    """
    given = {name: value for name, value in headers.items() if isinstance(value, str)}
    if not (letters.PROPERTIES in headers or USER_PROPERTIES in headers) or _names() & given.keys():
        return given
    found: Iterable[tuple[str, Any]] = ()
    if letters.PROPERTIES in headers:
        message = letters.described(headers)
        found = () if message is None else message["properties"].get("headers", {}).items()
    elif USER_PROPERTIES in headers:
        found = of_headers("", b"", headers).properties.get("user_properties", ())
    return {name: value for name, value in found if isinstance(value, str)} | given


def _is_state(value: str) -> bool:
    if len(value) > _MOST_BYTES:
        return False
    members = _members(value)
    return len(members) <= _MOST_STATES and all(re.fullmatch(_STATE, one) for one in members)


def _is_baggage(value: str) -> bool:
    if not value.isascii() or len(value) > _MOST_BYTES or re.search(_BLANKS, value):
        return False
    entries = _members(value)
    if not 0 < len(entries) <= _MOST_ENTRIES or not all(re.fullmatch(_ENTRY, entry) for entry in entries):
        return False
    sizes = [max(len(entry), len(quote_plus(unquote_plus(entry)))) for entry in entries]  # as it came, and goes on
    return max(sizes) <= _MOST_ENTRY_BYTES and sum(sizes) + len(sizes) - 1 <= _MOST_BYTES


def _members(value: str) -> list[str]:
    return [member for member in (one.strip(" \t") for one in value.split(",")) if member]


_READABLE: dict[str, Callable[[str], bool]] = {
    "traceparent": lambda value: len(value) <= _MOST_PARENT_BYTES,
    "tracestate": _is_state,
    _BAGGAGE: _is_baggage,
}
