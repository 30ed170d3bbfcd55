"""Which queues, streams and subscriptions have series of their own: so many at most, and what the others are together.

Whoever has a series keeps it, and whoever was summed stays so: if one changed over, the sum would fall, which for a
counter reads as a restart. What was counted of one that is gone stays in the sum.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from qflow.metrics.names import OTHER, Figure
from qflow.named_tuples import NamedTuple

Name = TypeVar("Name", bound=Hashable)
Labels = tuple[str, ...]
Row = tuple[Any, ...]
"""A value for each figure; None where there is none."""


class Divided(NamedTuple):
    """What is told of queues, of streams, or of subscriptions."""

    named: dict[Labels, Row]
    """Of each that has series, by its labels."""
    together: Row | None
    """Of the others; None if there never was one."""
    summed: int
    """How many those are now."""


def label_of(name: str) -> str:
    """Return a name as a label has it, which may be shown on a terminal: escaped where it is not printable."""
    return name if name.isprintable() else ascii(name)[1:-1]


class Naming(Generic[Name]):
    """See the module. Memory: 0.5 KiB for each that is summed.

    Args:
        figures: what is told of each; counters stand behind all others.
        most: as many have series.
    """

    def __init__(self, figures: Sequence[Figure], most: int) -> None:
        self._figures = figures
        self._first = sum(figure.kind != "counter" for figure in figures)
        """Where counters begin."""
        self._most = most
        self._named: dict[Name, Labels] = {}
        """Name -> its labels."""
        self._counted: dict[Name, Row] = {}
        """Of each that is summed, what its counters were when it was last seen."""
        self._gone: Row | None = None
        """What was counted of those that are gone; None as long as nobody was summed."""

    def divide(self, told: Mapping[Name, Row], labels: Iterable[tuple[Name, Labels | None]]) -> Divided:
        """Return what each has that is named, and what the others are together.

        Args:
            told: what is told of each now.
            labels: those that each would have, None for one that gets no series; in order of their right to one.
        """
        self._named = {name: own for name, own in self._named.items() if name in told}
        taken = set(self._named.values())
        none = (0,) * (len(self._figures) - self._first)
        for name, wanted in labels:
            if name in self._named or name in self._counted:
                continue
            if wanted is None or OTHER in wanted or wanted in taken or len(self._named) >= self._most:
                self._counted[name] = none
                self._gone = self._gone or none
            else:
                self._named[name] = wanted
                taken.add(wanted)
        for name in [name for name in self._counted if name not in told]:
            self._keep(self._counted.pop(name))
        return Divided({own: told[name] for name, own in self._named.items()}, self._sum(told), len(self._counted))

    def _sum(self, told: Mapping[Name, Row]) -> Row | None:
        """Return what those are together that have no series. Cost: 2 µs for each of them."""
        if self._gone is None:
            return None
        first, rows = self._first, []
        for name, before in self._counted.items():
            row = told[name]
            counters = tuple([value or 0 for value in row[first:]]) if None in row else row[first:]
            if counters != before:
                if any(map(operator.lt, counters, before)):
                    self._keep(before)  # it was deleted and made anew
                self._counted[name] = counters
            rows.append(row)
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(self._figures)
        gauges = [_together(*pair) for pair in zip(self._figures[:first], columns, strict=False)]
        return (*gauges, *map(operator.add, map(_sum, columns[first:]), self._gone))

    def _keep(self, counters: Row) -> None:
        assert self._gone is not None
        self._gone = tuple(map(operator.add, self._gone, counters))


def _together(figure: Figure, column: Sequence[Any]) -> Any:
    """Return what a gauge of several is."""
    match figure.together:
        case "sum":
            return _sum(column)
        case "max":
            return max(filter(None, column), default=0)
    return None


def _sum(column: Sequence[Any]) -> Any:
    return sum(filter(None, column))
