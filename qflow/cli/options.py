"""Arguments and options that several commands share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from qflow.config import SPILL_STORES, check_name, parse_size, spool_path
from qflow.errors import InvalidArgument

DEFAULT_CAPACITY = "64MiB"
_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|[0nrt\\])")
_ESCAPED = {b"0": b"\0", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"\\": b"\\"}


def parse_capacity(_context: click.Context, parameter: click.Parameter, value: str) -> int:
    """Turn a size such as `8MiB` into bytes: the callback of an option."""
    try:
        return parse_size(int(value) if value.lstrip("-").isdecimal() else value, parameter.name or "size")
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
    """A time within bounds; NaN lies within none."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """Return the seconds."""
        seconds = super().convert(value, parameter, context)
        if seconds != seconds:
            self.fail(f"{value} is no number of seconds", parameter, context)
        return seconds


class SpoolPath(click.Path):
    """The directory of a spool, and no URL."""

    def __init__(self, *, exists: bool = False) -> None:
        super().__init__(exists=exists, file_okay=False, path_type=Path)

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """Return the path."""
        try:
            spool_path(value)
        except InvalidArgument as error:
            self.fail(str(error), parameter, context)
        return super().convert(value, parameter, context)


new_or_old_spool = click.argument("spool", type=SpoolPath())
"""A spool, which is made if it is missing."""

existing_spool = click.argument("spool", type=SpoolPath(exists=True))
"""A spool that must exist."""

queue_name = click.argument("queue_name", metavar="QUEUE", callback=_parse_name)

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
