"""What an export holds: declarations, then messages, each of which is one line of JSON."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from typing import Any, TypeVar

import attrs

from qflow.cli import facts
from qflow.cli.messages import moment
from qflow.errors import InvalidArgument
from qflow.restoring import Item

KINDS = ("queue", "stream")
_NUMBERS = ("number", "partition", "priority", "expires_ms", "due_ms")
_OF_MESSAGES = (*_NUMBERS, "time", "topic", "key", "key_base64", "headers", "body", "body_base64")
T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Declared:
    """A queue or stream, and how it is declared."""

    kind: str
    name: str
    settings: dict[str, Any]


def line_of(one: Declared | Item) -> str:
    """Return one line of JSON, in ASCII."""
    if isinstance(one, Declared):
        return json.dumps({"declare": one.kind, "name": one.name, "settings": one.settings})
    found: dict[str, Any] = {one.kind: one.name, "number": one.number}
    if one.kind == "stream":
        found["partition"] = one.partition
    if one.time_ms:
        found["time"] = moment(one.time_ms)
    for name in ("priority", "expires_ms", "due_ms", "topic"):
        if value := getattr(one, name):
            found[name] = value
    if one.key:
        found |= facts.text_fields("key", one.key)
    if one.headers:
        found["headers"] = one.headers
    return json.dumps(found | facts.text_fields("body", one.body))


def parsed(line: bytes) -> Declared | Item:
    """Return what a line of an export says. Raises InvalidArgument: it is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"it is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidArgument("it is no JSON object")
    if "declare" in found:
        return declared(found, "declare")
    kinds = [kind for kind in KINDS if kind in found]
    if len(kinds) != 1:
        raise InvalidArgument("it names no queue and no stream, or both")
    _check_known(found, kinds[0], *_OF_MESSAGES)
    return Item(
        kind=kinds[0],
        name=_taken(found, kinds[0], str, None),
        **{name: _number(found, name) for name in _NUMBERS},
        topic=_taken(found, "topic", str, lambda: ""),
        key=_bytes(found, "key"),
        headers=_taken(found, "headers", dict, dict),
        body=_bytes(found, "body"),
    )


def declared(found: dict[str, Any], kind_key: str = "kind") -> Declared:
    """Return how a queue or stream is declared. Raises InvalidArgument: that is not said."""
    _check_known(found, kind_key, "name", "settings")
    kind = _taken(found, kind_key, str, None)
    if kind not in KINDS:
        raise InvalidArgument(f"{kind_key} is queue or stream, not {kind!r:.40}")
    return Declared(kind=kind, name=_taken(found, "name", str, None), settings=_taken(found, "settings", dict, None))


def _check_known(found: dict[str, Any], *names: str) -> None:
    """Raises InvalidArgument: it says something else, which would be lost."""
    for name in found:
        if name not in names:
            raise InvalidArgument(f"{name!r:.40} is none of {', '.join(names)}")


def _taken(found: dict[str, Any], name: str, kind: type[T], default: Callable[[], T] | None) -> T:
    if name not in found and default is not None:
        return default()
    value = found.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InvalidArgument(f"{name} is missing, or no {kind.__name__}")
    return value


def _number(found: dict[str, Any], name: str) -> int:
    number = _taken(found, name, int, int)
    if not 0 <= number < 2**64:
        raise InvalidArgument(f"{name} is not from 0 to 2**64 - 1")
    return number


def _bytes(found: dict[str, Any], name: str) -> bytes:
    if f"{name}_base64" in found:
        try:
            return base64.b64decode(_taken(found, f"{name}_base64", str, None), validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidArgument(f"{name}_base64 is no base64: {error}") from error
    try:
        return _taken(found, name, str, str).encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{name} is no text: {error.reason}") from error
