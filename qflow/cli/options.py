"""Arguments and options that several commands share."""

from __future__ import annotations

import math
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from qflow.config import SPILL_STORES, check_name, is_url, parse_size, spool_path
from qflow.durations import seconds_of
from qflow.errors import InvalidArgument, PermissionDenied, QflowError
from qflow.streams.starts import read_start

DEFAULT_CAPACITY = "64MiB"
_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|[0nrt\\])")
_ESCAPED = {b"0": b"\0", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"\\": b"\\"}


def parse_capacity(_context: click.Context, parameter: click.Parameter, value: str) -> int:
    """Turn a size such as `8MiB` into bytes: the callback of an option."""
    try:
        return parse_size(value, parameter.name or "size")
    except InvalidArgument as error:
        raise click.BadParameter(str(error)) from error


def _parse_name(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    return check_name(value)


def _parse_delimiter(_context: click.Context, _parameter: click.Parameter, value: str) -> bytes:
    if not value:
        raise click.BadParameter(r"it must not be empty; for a zero byte, write '\0'")
    return _ESCAPE.sub(_unescape, value.encode(errors="surrogateescape"))


def _unescape(match: re.Match[bytes]) -> bytes:
    escape = match[1]
    return _ESCAPED.get(escape) or bytes.fromhex(escape[1:].decode())


class Seconds(click.FloatRange):
    """A time within bounds, in seconds or as `90s`, `1h30m`, `7d`; NaN lies within none."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """Return the seconds."""
        spoken = seconds_of(value) if isinstance(value, str) else None
        try:
            seconds = float(value) if spoken is None else spoken
        except ValueError:
            seconds = math.nan
        if seconds != seconds:
            self.fail(f"{value} is no number of seconds, and no time such as 90s, 1h30m or 7d", parameter, context)
        return super().convert(seconds, parameter, context)


class SpoolPath(click.Path):
    """The directory of a spool, and no URL."""

    def __init__(self, *, exists: bool = False) -> None:
        super().__init__(exists=exists, file_okay=False, readable=False, path_type=Path)

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """Return the path."""
        try:
            os.stat(spool_path(value))
        except InvalidArgument as error:
            self.fail(str(error), parameter, context)
        except PermissionError as error:
            remedy = "give this user access to the directory that it is in"
            raise PermissionDenied(f"cannot look at the spool ({value}): {error.strerror}; {remedy}") from error
        except OSError:
            pass  # one that is not there may be made
        return super().convert(value, parameter, context)


class SpoolOrUrl(SpoolPath):
    """The directory of a spool that must exist, or the URL of a broker on another host."""

    def __init__(self) -> None:
        super().__init__(exists=True)

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """Return the path, or the URL as a text."""
        return value if is_url(value) else super().convert(value, parameter, context)


new_or_old_spool = click.argument("spool", type=SpoolPath())
"""A spool, which is made if it is missing."""

existing_spool = click.argument("spool", type=SpoolPath(exists=True))
"""A spool that must exist."""


def _offered(context: click.Context, incomplete: str, kinds: set[str]) -> list[str]:
    """Return the names of queues or streams that a shell may offer; none where the spool cannot be read."""
    from qflow import inspect

    wanted = {"stream"} if context.params.get("is_stream") else kinds
    try:
        names = [entry.name for entry in inspect.list_spool(context.params["spool"]).entries if entry.kind in wanted]
    except (QflowError, OSError, KeyError):
        return []
    return [name for name in names if name.startswith(incomplete) and name.isprintable()]


def queues(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of queues that a shell may offer; with `--stream`, those of streams."""
    return _offered(context, incomplete, {"queue"})


def streams(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of streams that a shell may offer."""
    return _offered(context, incomplete, {"stream"})


def queues_and_streams(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the names that a shell may offer, of both."""
    return _offered(context, incomplete, {"queue", "stream"})


queue_name = click.argument("queue_name", metavar="QUEUE", callback=_parse_name, shell_complete=queues)

capacity = click.option(
    "--capacity",
    metavar="SIZE",
    callback=parse_capacity,
    default=DEFAULT_CAPACITY,
    show_default=True,
    help="Memory for messages, such as 65536 or 8MiB; what does not fit waits on disk.",
)

spill = click.option(
    "--spill",
    type=click.Choice(SPILL_STORES),
    default="files",
    show_default=True,
    help="How messages that do not fit lie on disk: a file each, or many in a file.",
)

delimiter = click.option(
    "--delimiter",
    metavar="TEXT",
    callback=_parse_delimiter,
    default=r"\n",
    show_default=True,
    help=r"What ends a line, one byte or more; \n \r \t \0 \\ and \xHH are understood.",
)

as_json = click.option("--json", "as_json", is_flag=True, help="Print facts as JSON.")


class ListingGroup(click.Group):
    """A group whose command `list` need not be named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the name of the command before what is none."""
        is_named = not args or args[0] in (*self.commands, *ctx.help_option_names)
        return super().parse_args(ctx, args if is_named else ["list", *args])


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
