"""The columns of the table: what each shows, how wide it is, and which there are at a width."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
from rich.cells import cell_len
from rich.text import Text

from qflow.names import printable
from qflow.top import words
from qflow.top.look import Board, Flow, Order, Row

NAME_LEAST, NAME_MOST = 12, 48
CURVE_LEAST = 8
NEAR = 0.9
"""Of the capacity: a bar gets another colour."""

Cell = Callable[[Board, Row, int], str]


@attrs.frozen
class Column:
    """One column beside the name; `rank` tells which go first where there is no room for all."""

    title: str
    width: int
    rank: int
    cell: Cell
    sorts: str = ""
    """What `look.ORDERS` calls it."""
    style: Callable[[Row], str] = lambda row: ""


def _rate(flow: Flow) -> Cell:
    return lambda board, row, width: words.count(row.rates[flow]).rjust(width)


def _curve(flow: Flow) -> Cell:
    return lambda board, row, width: words.curve(board.series(row.key, flow, width), width)


def _memory(board: Board, row: Row, width: int) -> str:
    return words.bar(row.resident_bytes, row.capacity_bytes, width)


def _memory_style(row: Row) -> str:
    is_near = (row.resident_bytes or 0) >= NEAR * (row.capacity_bytes or 1)
    return "yellow" if is_near else "green"


COLUMNS = (
    Column("lag", 6, 1, lambda board, row, width: words.count(row.lag).rjust(width), "lag"),
    Column("unack", 6, 9, lambda board, row, width: words.count(row.unacked).rjust(width), "unacked"),
    Column("oldest", 6, 4, lambda board, row, width: words.age(row.oldest_s).rjust(width), "oldest"),
    Column("in/s", 6, 2, _rate("in"), "in/s"),
    Column("", CURVE_LEAST, 13, _curve("in"), style=lambda row: "cyan"),
    Column("out/s", 6, 6, _rate("out"), "out/s"),
    Column("", CURVE_LEAST, 14, _curve("out"), style=lambda row: "blue"),
    Column("ack/s", 6, 3, _rate("acked"), "acked/s"),
    Column("", CURVE_LEAST, 7, _curve("acked"), style=lambda row: "green"),
    Column("memory", 8, 8, _memory, "memory", style=_memory_style),
    Column("spill", 6, 11, lambda board, row, width: words.size(row.spilled_bytes).rjust(width), "spilled"),
    Column("cons", 5, 10, lambda board, row, width: words.count(row.consumers).rjust(width), "consumers"),
    Column(
        "blkd",
        5,
        5,
        lambda board, row, width: (words.count(row.blocked) if row.blocked else "").rjust(width),
        "blocked",
        style=lambda row: "bold red" if row.blocked else "",
    ),
)


@attrs.frozen
class Layout:
    """The columns at a width, with their widths."""

    name_width: int
    columns: tuple[tuple[Column, int], ...]

    def heading(self, order: Order) -> Text:
        """Return the line above the rows; the column that sorts has an arrow."""
        arrow = "▴" if order.is_reversed != (order.by == "name") else "▾"
        line = Text("  ", "bold", no_wrap=True)
        line.append(words.fitted("name" + arrow * (order.by == "name"), self.name_width))
        for column, width in self.columns:
            title = column.title + arrow * (bool(column.sorts) and column.sorts == order.by)
            line.append(" ")
            line.append(title[-width:].rjust(width) if column.sorts != "memory" else words.fitted(title, width))
        return line

    def line(self, board: Board, row: Row) -> Text:
        """Return one row: a mark, the name and the cells."""
        mark, style = _mark(row)
        line = Text(f"{mark} ", style, no_wrap=True)
        line.append(words.fitted(row.key.name, self.name_width), "bold")
        for column, width in self.columns:
            line.append(" ")
            line.append(column.cell(board, row, width), column.style(row))
        return line


def _mark(row: Row) -> tuple[str, str]:
    if row.blocked:
        return "!", "bold red"
    if row.is_paused:
        return "P", "yellow"
    return ("~", "cyan") if row.key.kind == "stream" else (" ", "")


def layout(width: int, names: Sequence[str]) -> Layout:
    """Return what fits a width: columns by rank, the names of these rows as whole as there is room, then longer curves.

    Cost: a sort of the columns.
    """
    longest = max((cell_len(printable(name)) for name in names), default=0)
    name_width = max(NAME_LEAST, min(NAME_MOST, longest))
    left = width - 2 - NAME_LEAST
    chosen: set[int] = set()
    for number in sorted(range(len(COLUMNS)), key=lambda number: COLUMNS[number].rank):
        needed = COLUMNS[number].width + 1
        if needed > left:
            break
        left -= needed
        chosen.add(number)
    named = min(name_width - NAME_LEAST, left)
    left -= named
    curves = [number for number in chosen if not COLUMNS[number].title]
    longer = left // len(curves) if curves else 0
    columns = tuple(
        (COLUMNS[number], COLUMNS[number].width + (longer if number in curves else 0)) for number in sorted(chosen)
    )
    return Layout(NAME_LEAST + named, columns)
