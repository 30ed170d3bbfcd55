"""What is printed: facts, the table of ratios, rankings, details; or all of it as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from bench import ranking
from bench.measure import Row, Series, Workload, show

Results = list[tuple[Workload, list[Row]]]

_VERDICTS = {True: "reached", False: "NOT REACHED", None: ""}


def text(facts: Mapping[str, str], results: Results, remarks: Iterable[str]) -> str:
    """Return the whole report."""
    lines = [f"{name:<12} {value}" for name, value in facts.items()]
    lines += ["", *remarks] if remarks else []
    rows = [row for _, found in results for row in found]
    compared = [row for row in rows if row.rank is None]
    if compared:
        width = max(len(row.name) for row in compared)
        lines += ["", f"{'row':<{width}}  {'median':>12}  {'bound':>12}"]
        lines.append("-" * (width + 44))
        for row in compared:
            lines += _table_lines(row, width)
    lines += ranking.lines(row for row in rows if row.rank is not None)
    lines += ["", "Details: median, spread (lowest to highest round), rounds"]
    for workload, found in results:
        lines += ["", f"{workload.name}: {workload.meaning}"]
        for row in found:
            lines += _ranked_lines(row) if row.rank else _detail_lines(row)
    return "\n".join(lines) + "\n"


def _table_lines(row: Row, width: int) -> list[str]:
    if row.figure is None:
        return [f"{row.name:<{width}}  {row.problem}"]
    median, bound = show(row.figure.median, row.figure.unit), row.bound or ""
    lines = [f"{row.name:<{width}}  {median:>12}  {bound!s:>12}  {_VERDICTS[row.reached]}".rstrip()]
    if row.or_figure is not None:
        median = show(row.or_figure.median, row.or_figure.unit)
        lines.append(f"{'  or ' + row.or_figure.name:<{width}}  {median:>12}  {row.or_bound or ''!s:>12}")
    return lines


def _ranked_lines(row: Row) -> list[str]:
    """A cell of a ranking table in one line, unless it has more to say."""
    said = row.problem if row.figure is None else _series_line(row.figure).partition(": ")[2]
    lines = [f"  {row.name}: {said} {row.verdict}".rstrip()]
    lines += [f"    {note}" for note in row.notes]
    return lines + [f"    {_series_line(one)}" for one in row.details]


def _detail_lines(row: Row) -> list[str]:
    lines = [f"  {row.name}"]
    lines += [f"    {note}" for note in row.notes]
    if row.problem:
        lines.append(f"    {row.problem}")
    series = [row.figure, row.or_figure, *row.details]
    lines += [f"    {_series_line(one)}" for one in series if one is not None]
    return lines


def _series_line(series: Series) -> str:
    low, high = show(min(series.values), series.unit), show(max(series.values), series.unit)
    line = f"{series.name}: {show(series.median, series.unit)}"
    if len(series.values) == 1:
        return line
    return f"{line} ({low} to {high})  [{' '.join(f'{value:.4g}' for value in series.values)}]"


def as_json(facts: Mapping[str, str], results: Results, remarks: Iterable[str]) -> str:
    """Return the same as JSON."""
    workloads = [
        {"name": workload.name, "meaning": workload.meaning, "rows": [_row(row) for row in found]}
        for workload, found in results
    ]
    return json.dumps({"machine": dict(facts), "remarks": list(remarks), "workloads": workloads}, indent=1) + "\n"


def _row(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "figure": _series(row.figure),
        "bound": str(row.bound) if row.bound else None,
        "or_figure": _series(row.or_figure),
        "or_bound": str(row.or_bound) if row.or_bound else None,
        "reached": row.reached,
        "engine": row.rank.engine if row.rank else None,
        "promise": row.rank.promise if row.rank else None,
        "verdict": row.verdict or None,
        "details": [_series(one) for one in row.details],
        "notes": row.notes,
        "problem": row.problem or None,
    }


def _series(series: Series | None) -> dict[str, Any] | None:
    if series is None:
        return None
    return {"name": series.name, "unit": series.unit, "median": series.median, "values": series.values}
