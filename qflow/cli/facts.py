"""How commands print what they found: JSON for programs, aligned columns for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import click


def print_json(facts: Any) -> None:
    """Print one JSON value on one line."""
    click.echo(json.dumps(facts))


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under headings; numbers are aligned to the right, None is a dash."""
    shown = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headings, *shown, strict=True)]
    numeric = [all(cell[0] in "-0123456789" for cell in column) for column in zip(*shown, strict=True)]
    for line in [list(headings), *shown]:
        cells = zip(line, widths, numeric or [False] * len(widths), strict=True)
        click.echo(
            "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells).rstrip()
        )


def readable(text: str) -> str:
    """Return a name as a terminal may show it: quoted and escaped unless it is plain."""
    return text if text.isprintable() and text.strip() == text and text else ascii(text)


def counted(number: int, thing: str) -> str:
    """Return a count in words, such as `1 line` or `2,000 lines`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


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
