"""Changes of settings of a queue or a stream as people type them, and what they would drop of it."""

from __future__ import annotations

from typing import Any

from qflow.config import Overflow, QueueSettings, StreamSettings, parse_size
from qflow.errors import InvalidArgument

_WORDS = {"none": None, "true": True, "false": False}
_OVERFLOW = [policy.value for policy in Overflow]


def parse_change(text: str, kind: type[QueueSettings] | type[StreamSettings] = QueueSettings) -> tuple[str, Any]:
    """Return the name and value of a setting as `limit_messages=1000` says it; `none` takes a limit away.

    Raises:
        InvalidArgument: it is no NAME=VALUE, or nothing of this kind has such a setting, or `on_overflow` is no word
            for what is done. What is wrong with another value is found when it is set.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidArgument(f"{text!r} is no NAME=VALUE, such as limit_messages=1000")
    kind.check_names([name], "queue" if kind is QueueSettings else "stream")
    if name == "topics":
        return name, value.split(",")
    if name == "on_overflow" and value not in _OVERFLOW:
        raise InvalidArgument(f"on_overflow is one of {', '.join(_OVERFLOW)}, not {value!r}")
    if value.lower() in _WORDS:
        return name, _WORDS[value.lower()]
    for number in (int, float):
        try:
            return name, number(value)
        except ValueError:
            continue
    return name, value


def as_typed(value: Any) -> str:
    """Return the value of a setting as `parse_change` takes it."""
    return "none" if value is None else ",".join(value) if isinstance(value, list | tuple) else str(value)


def dropped_by(settings: QueueSettings, changes: dict[str, Any], messages: int, size_bytes: int) -> str | None:
    """Return what changed settings of a queue drop of it at once, in words; None for nothing."""
    before = settings.to_dict()
    after = {**before, **changes}
    if not _is_ring(after):
        return None
    known: tuple[int | None, int | None] = (None, None)  # limits above which it drops what it has, whatever is changed
    if _is_ring(before):
        known = settings.limit_messages, settings.limit_bytes
    if isinstance(limit := after["limit_messages"], int) and _is_lower(limit, known[0], messages):
        return f"its oldest {messages - limit:,} messages, down to {limit:,}"
    if (size := after["limit_bytes"]) is not None:
        limit = parse_size(size, "limit_bytes")
        if _is_lower(limit, known[1], size_bytes):
            return f"its oldest messages, down from {size_bytes:,} bytes to {limit:,}"
    return None


def _is_ring(settings: dict[str, Any]) -> bool:
    return settings["on_overflow"] in (Overflow.DROP_OLDEST, Overflow.DROP_OLDEST.value)


def _is_lower(limit: int, before: int | None, depth: int) -> bool:
    return limit < depth and (before is None or limit < before)


def keeps_less(settings: StreamSettings, changes: dict[str, Any]) -> bool:
    """Tell whether a stream would keep less with changed settings, so that messages may be dropped at once."""
    limits = ("retention_s", "retention_bytes", "retention_messages")
    before, after = settings.to_dict(), StreamSettings.from_dict({**settings.to_dict(), **changes}).to_dict()
    return any(after[name] is not None and (before[name] is None or after[name] < before[name]) for name in limits)
