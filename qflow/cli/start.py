"""Parses where a reader begins: the values of `qflow subscribe --from`."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import click

START_HELP = (
    "earliest, latest, an offset, a date or moment (2026-01-31, 2026-01-31T12:00, of this machine's time zone unless "
    "it names one: 2026-01-31T12:00Z), or how long ago, in w, d, h, m and s (-1w, -7d, -1h30m)."
)
_UNITS = {"w": "weeks", "d": "days", "h": "hours", "m": "minutes", "s": "seconds"}
_AGO = re.compile(r"-((?:\d+[wdhms])+)", re.ASCII)
_DATE_WITH_ZONE = re.compile(r"(\d{4}-\d\d-\d\d)(Z|[+-]\d\d(?::?\d\d)?)", re.ASCII)


def parse_start(_context: click.Context, _parameter: click.Parameter, value: str) -> str | int | datetime:
    """Return "earliest", "latest", an offset, or a time with its time zone: the callback of an option.

    A date stands for its beginning. Dates and times without a zone are in this machine's zone.
    """
    if value in ("earliest", "latest"):
        return value
    if value.isascii() and value.isdecimal():
        return int(value[:40])  # more digits are past any end, too
    try:
        return _ago(value) or _moment(value)
    except (ValueError, OverflowError, OSError):
        raise click.BadParameter(
            "it is earliest, latest, an offset, a date such as 2026-01-31, a moment such as 2026-01-31T12:00:00Z, or "
            f"how long ago in weeks, days, hours, minutes and seconds, such as -7d or -1h30m, not {value!r}"
        ) from None


def date_meant(start: str | int | datetime) -> str:
    """Return a hint for an offset that looks like a date without hyphens; else an empty text."""
    try:
        meant = datetime.strptime(str(start), "%Y%m%d") if isinstance(start, int) and len(str(start)) == 8 else None
    except ValueError:
        return ""
    return "" if meant is None else f"; if a date is meant, it is {meant:%Y-%m-%d}"


def _ago(value: str) -> datetime | None:
    """Return the time so long ago, of a text such as `2h`; None for any other text."""
    found = _AGO.fullmatch(value)
    if found is None:
        return None
    parts = re.findall(r"(\d+)(\w)", found[1], re.ASCII)
    return datetime.now(UTC) - sum((timedelta(**{_UNITS[unit]: int(count)}) for count, unit in parts), timedelta())


def _moment(value: str) -> datetime:
    """Return the time of an ISO 8601 text; a date, which may have a zone, stands for its beginning."""
    dated = _DATE_WITH_ZONE.fullmatch(value)
    moment = datetime.fromisoformat(value if dated is None else f"{dated[1]}T00:00{dated[2]}")
    return moment.astimezone() if moment.tzinfo is None else moment
