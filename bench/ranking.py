"""Ranking tables: one for each measurement and promise, engines sorted by their first column, floors below a line."""

from __future__ import annotations

from collections.abc import Iterable

from bench.engines import by_name
from bench.engines.base import PROMISES
from bench.measure import Rank, Row, show

Cells = dict[str, Row]
"""The rows of one engine, by column."""


def lines(rows: Iterable[Row]) -> list[str]:
    """Return all tables; nothing for no rows."""
    tables: dict[str, dict[str, Cells]] = {}
    for row in rows:
        if row.rank is not None:
            tables.setdefault(row.rank.table, {}).setdefault(row.rank.engine, {})[row.rank.column] = row
    found: list[str] = []
    for table, engines in tables.items():
        for promise in PROMISES:
            ranked = {name: cells for name, cells in engines.items() if _rank(cells).promise == promise}
            if ranked:
                found += ["", f"{table}; promise: {promise}", *_table(ranked)]
    if found:
        names = sorted({name for engines in tables.values() for name in engines})
        width = max(map(len, names))
        found += ["", "Why an engine promises what it does"]
        found += [f"  {name:<{width}}  {by_name(name).promise}: {by_name(name).why}" for name in names]
    return found


def _rank(cells: Cells) -> Rank:
    """Return the place of an engine's first cell; engine, promise and kind are the same for all."""
    rank = next(iter(cells.values())).rank
    assert rank is not None
    return rank


def _table(engines: dict[str, Cells]) -> list[str]:
    columns = list(dict.fromkeys(column for cells in engines.values() for column in cells))
    width = max(len(name) for name in engines) + 4
    table = [" " * (width + 4) + "  ".join(f"{column:>12}" for column in columns)]
    ordered = sorted(engines.items(), key=lambda item: _place(item[1], columns[0]))
    place = 0
    for name, cells in ordered:
        rank = _rank(cells)
        problems = {row.problem for row in cells.values() if row.figure is None}
        if rank.floor or problems:
            mark = "floor" if rank.floor else "-"
        else:
            place += 1
            mark = str(place)
        said = "; ".join(sorted(problems)) if problems else "  ".join(_cell(cells.get(column)) for column in columns)
        table.append(f"{mark:>5} {name:<{width - 4}}  {said}".rstrip())
    return table


def _place(cells: Cells, column: str) -> tuple[int, float]:
    """Sort key: engines with a figure, the best first; then floors; then what has no figure."""
    row = cells.get(column)
    figure = row.figure if row is not None else None
    if row is None or row.rank is None or figure is None:
        return 2, 0.0
    return int(row.rank.floor), -figure.median if row.rank.more else figure.median


def _cell(row: Row | None) -> str:
    if row is None or row.figure is None:
        return f"{'':>12}"
    return f"{f'{show(row.figure.median, row.figure.unit)} {row.verdict}'.strip():>12}"
