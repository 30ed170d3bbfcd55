"""The picture: memory beside backlog."""

from __future__ import annotations

from pathlib import Path

from bench.measure import Curve

MIB = 2**20


def draw(curves: list[Curve], path: Path) -> None:
    """Draw memory and backlog over time, one panel a process. Needs matplotlib (ImportError says so)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(curves), figsize=(7 * len(curves), 4.5), squeeze=False, layout="constrained"
    )
    for axes, curve in zip(panels[0], curves, strict=True):
        axes.plot(curve.seconds, [value / MIB for value in curve.backlog_bytes], label="backlog, bytes of bodies")
        axes.plot(
            curve.seconds, [value / MIB for value in curve.anonymous_bytes], label="RssAnon over a bare interpreter"
        )
        axes.axhline(curve.bound_bytes / MIB, linestyle="--", color="grey", label="64 MiB + 48 MiB")
        axes.set(title=curve.name, xlabel="seconds", ylabel="MiB", ylim=(0, None))
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
