"""How commands print what they found: JSON for programs, aligned columns for people."""

from __future__ import annotations

import base64
import json
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import click


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


LEAST = 12
"""Columns of text are cut to so many cells before a table is stacked."""
PADDED = 64
"""Where nothing is cut, a cell is padded to so many cells at most: one long name would make each line as long."""
_CUT = "..."
_MARKS = ("Mn", "Me")


def terminal_cells() -> int | None:
    """Return the width of the terminal that stdout is; None if it is none: a program gets whole lines."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def laid_out(headings: Sequence[str], rows: Sequence[Sequence[str]], most: int | None) -> list[str]:
    """Return the lines of a table that is at most so many cells wide; None = as wide as it is."""
    columns = list(zip(headings, *rows, strict=True))
    widths = [max(map(cells, column)) for column in columns]
    numeric = [bool(rows) and all(cell[0] in "-0123456789" for cell in column[1:]) for column in columns]
    if most is not None:
        widths = _narrowed(widths, numeric, most)
        if _total(widths) > most:
            return _stacked(headings, rows, most)
    else:
        widths = [min(width, PADDED) for width in widths]
    lines = []
    for row in [headings, *rows]:
        fitted = row if most is None else [cut(cell, width) for cell, width in zip(row, widths, strict=True)]
        padded = [
            " " * (width - cells(cell)) + cell if right else cell + " " * (width - cells(cell))
            for cell, width, right in zip(fitted, widths, numeric, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return [click.style(lines[0], bold=True), *lines[1:]]


def cut(text: str, most: int) -> str:
    """Return a text of at most so many cells; what is cut off is told by dots."""
    if cells(text) <= most:
        return text
    room, kept = max(0, most - len(_CUT)), 0
    for index, letter in enumerate(text):
        kept += cells(letter)
        if kept > room:
            return text[:index] + _CUT[:most]
    return text


def cells(text: str) -> int:
    """Return how many cells of a terminal a text takes: letters of East Asia take two, marks on letters none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.category(letter) in _MARKS else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )


def _narrowed(widths: list[int], numeric: list[bool], most: int) -> list[int]:
    """Return widths with the widest columns of text made narrower, as far as it is needed and they can be."""
    widths = list(widths)
    texts = [index for index, is_number in enumerate(numeric) if not is_number]
    while texts and _total(widths) > most:
        widest = max(texts, key=widths.__getitem__)
        if widths[widest] <= LEAST:
            break
        widths[widest] -= 1
    return widths


def _total(widths: list[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _stacked(headings: Sequence[str], rows: Sequence[Sequence[str]], most: int) -> list[str]:
    """Return each row as lines of a heading and a value, an empty line between rows."""
    width = max(map(cells, headings))
    lines: list[str] = []
    for row in rows:
        if lines:
            lines.append("")
        for heading, cell in zip(headings, row, strict=True):
            label = click.style(heading + " " * (width - cells(heading)), bold=True)
            lines.append(f"{label}  {cut(cell, max(1, most - width - 2))}")
    return lines
