"""Values as JSON has them: settings and reports as objects, enums by value, time spans, paths."""

from __future__ import annotations

import enum
import os
from datetime import timedelta
from typing import Any
from uuid import UUID

import attrs

from qflow.settings import Settings

_PLAIN = frozenset((str, int, float, bool, type(None)))


def plain(value: Any) -> Any:
    """Return a value as JSON has it; what JSON cannot say is left for its encoder to refuse."""
    if type(value) in _PLAIN:  # nearly all: 100,000 names take 10 ms, not 100
        return value
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Settings):
        return plain(value.to_dict())
    if attrs.has(type(value)):
        return {field.name: plain(getattr(value, field.name)) for field in attrs.fields(type(value))}
    if isinstance(value, dict):
        return {str(plain(key)): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(one) for one in value]
    return value


def ranges(places: list[int]) -> list[list[int]]:
    """Return positions as [first, end] ranges, in order."""
    found: list[list[int]] = []
    for place in sorted(places):
        if found and found[-1][1] == place:
            found[-1][1] = place + 1
        else:
            found.append([place, place + 1])
    return found
