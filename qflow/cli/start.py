"""Parses where a reader begins: the values of `qflow subscribe --from`."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from qflow.streams.starts import read_start

START_HELP = (
    "earliest, latest, an offset, a date or moment (2026-01-31, 2026-01-31T12:00, of this machine's time zone unless "
    "it names one: 2026-01-31T12:00Z), or how long ago, in w, d, h, m and s (-1w, -7d, -1h30m)."
)


def parse_start(_context: click.Context, _parameter: click.Parameter, value: str) -> str | int | datetime:
    """Return "earliest", "latest", an offset, or a time with its time zone: the callback of an option.

    A date stands for its beginning. Dates and times without a zone are in this machine's zone.
    """
    try:
        start = read_start(value, datetime.now(UTC))
        return start.astimezone() if isinstance(start, datetime) and start.tzinfo is None else start
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
