"""How the cost of a step grows, measured at three or four sizes of what lies beside it.

A row's figure is the cost at the largest size over that at the smallest; the notes have the exponent of the growth, the
slope of the costs over the sizes where both are logarithms: 0 is flat, 1 in proportion. Sizes are measured one after
the other, so a shared machine shows in the ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import log
from pathlib import Path
from statistics import linear_regression

from bench.measure import Row, Series, Setup, ratio

Sizes = tuple[int, ...]
Costs = Callable[[Setup, Path, int], list[float]]
"""Given a size: seconds of one step, in each round."""


def scaled(setup: Setup, step: str, beside: str, sizes: Sizes, costs: Costs) -> Iterator[Row]:
    """Measure a step at each size."""
    found = []
    for size in sizes:
        with setup.scratch() as path:
            found.append([seconds * 1e6 for seconds in costs(setup, path / "spool", size)])
    yield grown(step, beside, sizes, "µs", found)


def grown(step: str, beside: str, sizes: Sequence[int], unit: str, found: Sequence[list[float]]) -> Row:
    """Return the row of a step that was measured at each size, in some rounds."""
    series = [Series(f"{step}, {size:,} {beside}", unit, values) for size, values in zip(sizes, found, strict=True)]
    growth, _ = linear_regression([log(size) for size in sizes], [log(one.median) for one in series])
    return Row(
        name=f"{step}: with {sizes[-1]:,} {beside} over {sizes[0]:,}",
        figure=ratio(series[-1], series[0]),
        details=series,
        notes=[f"grows with the power {growth:.2f} of the number"],
    )
