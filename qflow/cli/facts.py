"""How commands print what they found: JSON for programs, aligned columns for people."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from typing import Any

import click

from qflow.cli.tables import laid_out, terminal_cells


def print_json(facts: Any) -> None:
    """Print one JSON value on one line."""
    click.echo(json_of(facts))


def json_of(facts: Any) -> str:
    """Return one JSON value on one line, in ASCII: no terminal obeys it."""
    return json.dumps(facts)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under headings; numbers are aligned to the right, None is a dash. Names are to be `readable`."""
    for line in laid_out(headings, [[_cell(value) for value in row] for row in rows], terminal_cells()):
        click.echo(line)


def print_next_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print an empty line and a table; nothing where there are no rows."""
    if listed := list(rows):
        click.echo()
        print_table(headings, listed)


def readable(text: str) -> str:
    """Return a name as a terminal may show it: quoted and escaped unless it is plain."""
    return text if text.isprintable() and text.strip() == text and text else ascii(text)


def text_of(body: bytes) -> str | None:
    """Return a body as text; None if it is not UTF-8."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


def text_fields(name: str, value: bytes | None) -> dict[str, str | None]:
    """Return bytes as JSON has them: under this name if they are UTF-8 text, or None, else under `NAME_base64`."""
    text = None if value is None else text_of(value)
    return {name: text} if value is None or text is not None else {f"{name}_base64": base64.b64encode(value).decode()}


def counted(number: int, thing: str) -> str:
    """Return a count in words, such as `1 line` or `2,000 lines`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def of_journal(records: int) -> str:
    """Return in words how many records a journal holds that its log does not."""
    return f"{counted(records, 'record')} in the journal that the log does not hold yet"


def mebibytes(size_bytes: float) -> str:
    """Return a size such as `8.0 MiB`."""
    return f"{size_bytes / 2**20:,.1f} MiB"


def _cell(value: object) -> str:
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case _:
            return str(value)
