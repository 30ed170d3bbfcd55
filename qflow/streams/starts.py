"""Where a reader of a stream begins, as text: what `qflow subscribe --from` takes, and `qflow-start` of MQTT.

earliest, latest           the oldest message that is left; what comes from now on
1234                       an offset
2026-01-31                 a date, which stands for its beginning, in a time zone or in none: 2026-01-31Z
2026-01-31T12:00+01:00     a moment, as in ISO 8601
-1w, -7d, -1h30m, -90s     so long ago
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta

_UNITS = {"w": "weeks", "d": "days", "h": "hours", "m": "minutes", "s": "seconds"}
_AGO = re.compile(r"-((?:\d+[wdhms])+)", re.ASCII)
_DATE_WITH_ZONE = re.compile(r"(\d{4}-\d\d-\d\d)(Z|[+-]\d\d(?::?\d\d)?)", re.ASCII)


def read_start(text: str, now: datetime) -> str | int | datetime:
    """Return "earliest", "latest", an offset, or a time; without a time zone if it names none.

    Raises:
        ValueError: the text is none of them. OverflowError: it is a time that is too long ago.
    """
    if text in ("earliest", "latest"):
        return text
    if text.isascii() and text.isdecimal():
        return int(text[:40])  # more digits are past any end, too
    if _AGO.fullmatch(text):
        parts = re.findall(r"(\d+)(\w)", text, re.ASCII)
        return now - sum((timedelta(**{_UNITS[unit]: int(count)}) for count, unit in parts), timedelta())
    dated = _DATE_WITH_ZONE.fullmatch(text)
    return datetime.fromisoformat(text if dated is None else f"{dated[1]}T00:00{dated[2]}")
