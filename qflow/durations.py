"""Time spans as callers write them: seconds, a text such as `"1h30m"`, or a timedelta."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any, TypeAlias

Duration: TypeAlias = float | str | timedelta
"""A time span: seconds, a text such as `"250ms"`, `"1h30m"` or `"7d"` (units `w d h m s ms`), or a timedelta."""

_UNITS = {"w": 604_800.0, "d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_NUMBER = r"(\d{1,20}(?:\.\d{1,20})?)"
_TEXT = r"\s*" + "".join(rf"(?:{_NUMBER}\s*{unit}\s*)?" for unit in _UNITS)
"""Each unit at most once, the largest first. Compiled when the first text is met, and kept by `re`; likewise below."""
_PLAIN = rf"\s*{_NUMBER}\s*"

TIME_BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""The upper bounds of the buckets in which time spans are counted, each included: see `qflow.stats.TimeStats`."""

EXPECTED = 'a number of seconds, a text such as "90s", "1h30m" or "7d" (units w, d, h, m, s, ms), or a timedelta'


def seconds_of(value: Any) -> float | None:
    """Return the seconds of a duration, which may be negative or NaN; None if it is no duration."""
    if isinstance(value, int | float):
        return None if isinstance(value, bool) else value
    if not isinstance(value, str):
        return value.total_seconds() if isinstance(value, timedelta) else None
    plain = re.fullmatch(_PLAIN, value, re.ASCII)
    if plain is not None:
        return float(plain[1])
    found = re.fullmatch(_TEXT, value, re.ASCII)
    if found is None or not any(found.groups()):
        return None
    return round(sum(float(one) * unit for one, unit in zip(found.groups(), _UNITS.values(), strict=True) if one), 9)
