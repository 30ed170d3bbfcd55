"""How a figure is made: rounds that take turns, series of rounds, a ratio per round, a bound.

The machine may be shared and noisy, so no figure stands on its own. The sides of a comparison run in the same process
and take turns in small chunks (A B A B ...). A round's figure is the median of its chunks, so that a stall of the disk
that hits one side counts once; a ratio is formed within each round, and the median of rounds is reported with the whole
spread. The first round warms up and is thrown away.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from statistics import median

import attrs

from bench.engines.base import Engine
from bench.errors import CannotRun


@attrs.frozen
class Series:
    """One figure in each round."""

    name: str
    unit: str
    values: list[float]

    @property
    def median(self) -> float:
        return median(self.values)


@attrs.frozen
class Bound:
    """What a median must reach."""

    limit: float
    unit: str
    at_most: bool

    def holds(self, value: float) -> bool:
        return value <= self.limit if self.at_most else value >= self.limit

    def __str__(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {show(self.limit, self.unit)}"


def at_most(limit: float, unit: str = "x") -> Bound:
    return Bound(limit, unit, at_most=True)


def at_least(limit: float, unit: str = "x") -> Bound:
    return Bound(limit, unit, at_most=False)


@attrs.frozen(kw_only=True)
class Rank:
    """The place of a row in a ranking table, where only equal promises stand beside each other."""

    table: str
    column: str
    engine: str
    promise: str
    floor: bool = False
    """It shows what the bare operations cost, and promises nothing else: listed, not ranked."""
    more: bool = False
    """The larger figure is the better one."""


@attrs.frozen(kw_only=True)
class Row:
    """One line of the first table, or a cell of a ranking table, and its details."""

    name: str
    figure: Series | None = None
    """What is compared with the bound; the table shows its median."""
    bound: Bound | None = None
    or_figure: Series | None = None
    or_bound: Bound | None = None
    """A second figure and its bound, where reaching either is enough."""
    details: list[Series] = attrs.field(factory=list)
    notes: list[str] = attrs.field(factory=list)
    problem: str = ""
    """Why there is no figure."""
    rank: Rank | None = None
    """Its place in a ranking table; None: it belongs to the first table."""
    verdict: str = ""
    """What is said beside the figure in a ranking table."""

    @property
    def reached(self) -> bool | None:
        """Whether the median reaches the bound; None if there is none, or no figure."""
        pairs = [(self.figure, self.bound), (self.or_figure, self.or_bound)]
        verdicts = [bound.holds(figure.median) for figure, bound in pairs if figure is not None and bound is not None]
        return any(verdicts) if verdicts else None


@attrs.frozen
class Workload:
    """A named measurement; gives one row or more."""

    name: str
    meaning: str
    """One line."""
    run: Callable[[Setup], Iterator[Row]]


@attrs.frozen(kw_only=True)
class Curve:
    """Memory over time, for the picture."""

    name: str
    seconds: list[float]
    backlog: list[int]
    """Bytes of bodies waiting."""
    anonymous: list[int]
    """RssAnon over that of a bare interpreter, in bytes."""
    file: list[int]
    """RssFile in bytes: pages of mapped files, which the kernel takes back when it needs them."""
    cgroup: list[int]
    """What the cgroup is charged, page cache included, in bytes; empty without one."""
    bound_bytes: int
    """What the anonymous memory must stay under."""


@attrs.frozen(kw_only=True)
class Setup:
    """Where and how much to measure."""

    directory: Path
    quick: bool
    engines: Sequence[Engine] = ()
    """Those to measure, in the order of the list."""
    kept_rounds: int | None = None
    """How many rounds to keep; None: as many as the workload asks for."""
    curves: list[Curve] = attrs.field(factory=list)
    """Filled by the memory workloads."""

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    @property
    def rounds(self) -> int:
        return self.kept_rounds or self.size(15, 3)

    @property
    def few_rounds(self) -> int:
        """For workloads whose rounds take seconds."""
        return self.kept_rounds or self.size(5, 2)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A directory that is removed afterwards."""
        with tempfile.TemporaryDirectory(dir=self.directory) as path:
            yield Path(path)

    def need_disk(self, size: int) -> None:
        """Raise `CannotRun` unless so many bytes are free, with a tenth to spare."""
        free = shutil.disk_usage(self.directory).free
        if free < size * 1.1:
            raise CannotRun(f"needs {size / 2**30:.1f} GiB of disk, {free / 2**30:.1f} are free")


def interleave(rounds: int, chunks: int, *sides: Callable[[], float]) -> list[list[float]]:
    """Let sides take turns.

    Args:
        rounds: how many are kept; one more runs first.
        chunks: how often each side runs in a round.
        sides: each does one chunk of its work and returns the seconds that count.

    Returns:
        For each side, its seconds for a chunk in each round: the median of the round's chunks.
    """
    seconds: list[list[float]] = [[] for _ in sides]
    for number in range(rounds + 1):
        taken: list[list[float]] = [[] for _ in sides]
        gc.collect()
        for chunk in range(chunks):
            turns = range(len(sides)) if (number + chunk) % 2 else reversed(range(len(sides)))
            for turn in turns:
                taken[turn].append(sides[turn]())
        if number:
            for values, chunk_seconds in zip(seconds, taken, strict=True):
                values.append(median(chunk_seconds))
    return seconds


def by_side(
    figure: Callable[[str, int, Sequence[float]], Series],
    names: Sequence[str],
    messages: int,
    measured: Sequence[Sequence[float]],
) -> list[Series]:
    """Return the series of each side, as `rates` or `micros` makes them."""
    return [figure(name, messages, seconds) for name, seconds in zip(names, measured, strict=True)]


def rates(name: str, messages: int, seconds: Sequence[float]) -> Series:
    """Messages per second in each round."""
    return Series(name, "/s", [messages / value for value in seconds])


def micros(name: str, messages: int, seconds: Sequence[float]) -> Series:
    """Microseconds per message in each round."""
    return Series(name, "µs", [value / messages * 1e6 for value in seconds])


def ratio(over: Series, under: Series) -> Series:
    """Divide two series round by round."""
    values = [one / other for one, other in zip(over.values, under.values, strict=True)]
    return Series(f"{over.name} / {under.name}", "x", values)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` of the values, 0 to 1, do not exceed (nearest rank)."""
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def bytes_name(size: int) -> str:
    """Write a size of a message."""
    return f"{size // 1024} KiB" if size % 1024 == 0 else f"{size} B"


def show(value: float, unit: str) -> str:
    """Write a figure with three digits or so."""
    if unit == "/s" and value >= 1e6:
        return f"{value / 1e6:.2f} M/s"
    if unit == "/s" and value >= 1e4:
        return f"{value / 1e3:.1f} k/s"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 0.1 or not value else 4
    return f"{value:.{digits}f}/s" if unit == "/s" else f"{value:.{digits}f} {unit}".rstrip()
