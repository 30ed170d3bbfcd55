"""Changes of a queue's settings as people type them, and what they would drop of it."""

from __future__ import annotations

from typing import Any

from qflow.config import Overflow, QueueSettings, check_changes, parse_size
from qflow.errors import InvalidArgument


def parse_change(text: str) -> tuple[str, Any]:
    """Return the name and value of a setting as `limit_messages=1000` says it; `none` takes a limit away.

    Raises:
        InvalidArgument: it is no NAME=VALUE, or a queue has no such setting. What is wrong with a value is found when
            it is set.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidArgument(f"{text!r} is no NAME=VALUE, such as limit_messages=1000")
    check_changes(QueueSettings, [name], "queue")
    if value.lower() == "none":
        return name, None
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value


def dropped_by(settings: QueueSettings, changes: dict[str, Any], messages: int, size_bytes: int) -> str | None:
    """Return what changed settings of a queue drop of it with the next put, in words; None for nothing."""
    after = {**settings.to_dict(), **changes}
    if after["on_overflow"] not in (Overflow.DROP_OLDEST, Overflow.DROP_OLDEST.value):
        return None
    if isinstance(limit := after["limit_messages"], int) and messages > limit:
        return f"its oldest {messages - limit:,} messages, down to {limit:,}"
    limit_bytes = after["limit_bytes"]
    if limit_bytes is not None and size_bytes > (most := parse_size(limit_bytes, "limit_bytes")):
        return f"its oldest messages, down from {size_bytes:,} bytes to {most:,}"
    return None
