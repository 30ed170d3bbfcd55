"""The picture: the backlog rising, what is resident beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.measure import Curve

MIB = 2**20


def draw(curves: list[Curve], path: Path) -> None:
    """Draw memory and backlog over time, one column a process. Needs matplotlib (ImportError says so).

    Above, the backlog with the memory at its foot; below, the memory alone.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        2, len(curves), figsize=(6 * len(curves), 8), squeeze=False, sharex="col", layout="constrained"
    )
    for above, below, curve in zip(panels[0], panels[1], curves, strict=True):
        above.plot(curve.seconds, _mib(curve.backlog), color="C0", label="backlog, bytes of bodies")
        above.set(title=curve.name, ylabel="MiB")
        below.set(xlabel="seconds", ylabel="MiB")
        for axes in (above, below):
            axes.plot(curve.seconds, _mib(curve.anonymous), color="C1", label="RssAnon over a bare interpreter")
        below.plot(curve.seconds, _mib(curve.file), color="C2", linewidth=1, label="RssFile")
        if curve.cgroup:
            below.plot(curve.seconds, _mib(curve.cgroup), color="C3", linewidth=1, label="charge of the cgroup")
        bound = curve.bound_bytes / MIB
        below.axhline(bound, linestyle="--", color="grey", label=f"bound of RssAnon, {bound:.0f} MiB")
        for axes in (above, below):
            axes.set_ylim(0, None)
            axes.legend()
            axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _mib(values: Sequence[int]) -> list[float]:
    return [value / MIB for value in values]
