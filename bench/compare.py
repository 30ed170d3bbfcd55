"""Two saved reports side by side, or two commits measured in turns.

A change counts as beyond the spread when the middle halves of the rounds, from the lower to the upper quartile, do not
overlap, so one stray round decides nothing. Commits are checked out into scratch work trees, get the bench of *this*
tree, and run in turns, one kept round each, so that both meet the same weather; a value is one pair's round.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import attrs

from bench.errors import CannotRun
from bench.measure import Series, show

PAIRS, QUICK_PAIRS = 20, 3
_ROOT = Path(__file__).parent.parent
Figures = dict[str, Series]
"""Figures by the name of their row."""


@attrs.frozen
class Change:
    """A row's figure before and after."""

    name: str
    old: Series | None
    new: Series | None

    @property
    def percent(self) -> float | None:
        """By how much the median changed; None if one side has no figure."""
        if self.old is None or self.new is None or not self.old.median:
            return None
        return (self.new.median / self.old.median - 1) * 100

    @property
    def beyond_spread(self) -> bool | None:
        """Whether it is more than the rounds differ among themselves; None if they cannot tell."""
        if self.old is None or self.new is None or min(len(self.old.values), len(self.new.values)) < 2:
            return None
        (low, high), (new_low, new_high) = _middle(self.old), _middle(self.new)
        return high < new_low or new_high < low


def _middle(series: Series) -> tuple[float, float]:
    low, _, high = quantiles(series.values, n=4, method="inclusive")
    return low, high


@attrs.frozen
class Comparison:
    """All rows of two sides."""

    what: str
    changes: list[Change]
    whole: bool = True
    """It was not interrupted."""


def are_reports(old: str, new: str) -> bool:
    """Tell whether both are files; commits otherwise."""
    return Path(old).is_file() and Path(new).is_file()


def reports(old: Path, new: Path) -> Comparison:
    """Compare two reports; CannotRun if one is none."""
    return Comparison(f"{old.name} and {new.name}", _changes(_read(old), _read(new)))


def _read(path: Path) -> Figures:
    try:
        return figures(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise CannotRun(f"{path} is not a report written with --json: {error}") from error


def figures(report: Mapping[str, Any]) -> Figures:
    """Return the figures of a report's rows, those without left out."""
    rows = [row for workload in report["workloads"] for row in workload["rows"] if row["figure"]]
    return {row["name"]: Series(row["name"], row["figure"]["unit"], row["figure"]["values"]) for row in rows}


def _changes(old: Figures, new: Figures) -> list[Change]:
    return [Change(name, old.get(name), new.get(name)) for name in dict.fromkeys([*old, *new])]


# Commits -----------------------------------------------------------------------------------------------------------


def commits(
    old: str, new: str, workloads: Sequence[str], engines: Sequence[str], directory: Path, *, quick: bool
) -> Comparison:
    """Measure two commits in turns; Ctrl-C ends it with the pairs there are."""
    command = [sys.executable, "-m", "bench", *workloads, "--json", "--rounds", "1", "--directory", "."]
    command += ["--quick"] * quick + (["--engines", *engines] if engines else [])
    found: list[dict[str, list[Series]]] = [{}, {}]
    pairs, whole = QUICK_PAIRS if quick else PAIRS, True
    with _work_trees(old, new, directory) as trees:
        try:
            for pair in range(pairs):
                print(f"pair {pair + 1} of {pairs} ...", file=sys.stderr, flush=True)
                for side in (0, 1) if pair % 2 else (1, 0):
                    for name, series in _measured(command, trees[side]).items():
                        found[side].setdefault(name, []).append(series)
        except KeyboardInterrupt:
            whole = False
    sides = [{name: _joined(name, series) for name, series in side.items()} for side in found]
    return Comparison(f"{old} and {new}, {pairs} pairs in turns", _changes(*sides), whole)


def _joined(name: str, series: Sequence[Series]) -> Series:
    return Series(name, series[0].unit, [median(one.values) for one in series])


@contextmanager
def _work_trees(old: str, new: str, directory: Path) -> Iterator[list[Path]]:
    """Check two commits out, with the bench of this tree; remove them again, whatever happens."""
    with tempfile.TemporaryDirectory(dir=directory, prefix=".bench-") as scratch:
        trees = [Path(scratch).absolute() / name for name in ("old", "new")]
        try:
            for tree, commit in zip(trees, (old, new), strict=True):
                _git("worktree", "add", "--detach", str(tree), commit)
                shutil.rmtree(tree / "bench", ignore_errors=True)
                shutil.copytree(
                    _ROOT / "bench", tree / "bench", ignore=shutil.ignore_patterns("results", "__pycache__")
                )
            yield trees
        finally:
            for tree in trees:
                if tree.exists():
                    _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> None:
    found = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        last = found.stderr.strip().splitlines()[-1:]
        raise CannotRun(f"neither two reports nor two commits: git says {' '.join(last)}")


def _measured(command: list[str], tree: Path) -> Figures:
    found = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if found.returncode:
        raise CannotRun(f"a run ended with {found.returncode}: {' '.join(found.stderr.strip().splitlines()[-1:])}")
    return figures(json.loads(found.stdout))


# Writing -----------------------------------------------------------------------------------------------------------


def text(comparison: Comparison) -> str:
    """Return the table, changes beyond the spread first."""
    changes = sorted(comparison.changes, key=lambda change: not change.beyond_spread)
    width = max((len(change.name) for change in changes), default=0)
    lines = [comparison.what] + ["INTERRUPTED: some pairs are missing"] * (not comparison.whole)
    lines += ["", f"{'row':<{width}}  {'old':>12}  {'new':>12}  {'change':>8}  beyond the spread"]
    lines.append("-" * (width + 59))
    for change in changes:
        percent = "" if change.percent is None else f"{change.percent:+.1f} %"
        verdict = {True: "yes", False: "no", None: "cannot tell"}[change.beyond_spread]
        lines.append(
            f"{change.name:<{width}}  {_shown(change.old):>12}  {_shown(change.new):>12}  {percent:>8}  {verdict}"
        )
    return "\n".join(lines) + "\n"


def _shown(series: Series | None) -> str:
    return "-" if series is None else show(series.median, series.unit)


def as_json(comparison: Comparison) -> str:
    """Return the same as JSON."""
    rows = [
        {
            "name": change.name,
            "old": attrs.asdict(change.old) if change.old else None,
            "new": attrs.asdict(change.new) if change.new else None,
            "change_percent": change.percent,
            "beyond_spread": change.beyond_spread,
        }
        for change in comparison.changes
    ]
    return json.dumps({"what": comparison.what, "whole": comparison.whole, "rows": rows}, indent=1) + "\n"
