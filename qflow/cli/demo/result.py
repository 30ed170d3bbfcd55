"""What a demo found out, as a table, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import click

from qflow.cli import facts
from qflow.cli.demo.evidence import Verdict
from qflow.cli.demo.phase import Phase
from qflow.message import BATCH_BYTES

_FIGURES: dict[str, Callable[[Phase], object]] = {
    "flights confirmed": lambda phase: phase.last("confirmed"),
    "flights delivered": lambda phase: phase.last("taken"),
    "seconds": lambda phase: f"{phase.seconds:.1f}",
    "peak backlog": lambda phase: facts.mebibytes(phase.peak("backlog_bytes")),
    "peak resident": lambda phase: facts.mebibytes(phase.peak("resident_bytes")),
    "peak spilled": lambda phase: facts.mebibytes(phase.peak("spilled_bytes")),
    "RssAnon before opening": lambda phase: facts.mebibytes(phase.opened["rss_anon_before_bytes"]),
    "peak RssAnon": lambda phase: facts.mebibytes(phase.peak("rss_anon_bytes")),
    "peak RssFile": lambda phase: facts.mebibytes(phase.peak("rss_file_bytes")),
}
_PEAKS = ("backlog_bytes", "resident_bytes", "spilled_bytes", "rss_anon_bytes", "rss_file_bytes")


@attrs.frozen(kw_only=True)
class Result:
    """A demo that ran to its end."""

    capacity_bytes: int
    before: Phase
    """The worker that was killed."""
    after: Phase
    """The one that took over."""
    in_log: int
    """Flights the log held right after the kill: what was confirmed, perhaps one batch more."""
    verdict: Verdict
    seconds: float
    png: str

    @property
    def problems(self) -> list[str]:
        """What is not as promised; empty if all is well."""
        verdict = self.verdict
        found = []
        if not verdict.same:
            found.append(
                f"{verdict.arrived:,} of {verdict.flights:,} flights arrived, {verdict.out_of_order:,} out of order, "
                f"{verdict.differing:,} with another content"
            )
        if self.in_log < self.before.last("confirmed"):
            found.append(f"{self.before.last('confirmed'):,} flights were confirmed, the log holds {self.in_log:,}")
        resident = max(self.before.peak("resident_bytes"), self.after.peak("resident_bytes"))
        if resident > self.capacity_bytes + BATCH_BYTES:  # a batch passes above it until the tail is spilled for it
            found.append(f"{resident:,} bytes were resident, the capacity is {self.capacity_bytes:,}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "ok": not self.problems,
            "problems": self.problems,
            "capacity_bytes": self.capacity_bytes,
            **attrs.asdict(self.verdict),
            "in_log_after_kill": self.in_log,
            "phases": [_phase_dict(phase) for phase in (self.before, self.after)],
            "seconds": self.seconds,
            "png": self.png,
        }

    def print(self) -> None:
        """Print the table and the verdict."""
        phases = (self.before, self.after)
        click.echo()
        facts.print_table(
            ["", "before the kill", "after it"],
            ([name, *(figure(phase) for phase in phases)] for name, figure in _FIGURES.items()),
        )
        verdict = self.verdict
        click.echo(f"\ncapacity {facts.mebibytes(self.capacity_bytes)}; {self.seconds:.1f} s in all, check included")
        if verdict.repeats:
            click.echo(
                f"came twice because of the kill: {verdict.repeats:,} flights, sequences {verdict.first_repeat:,} to "
                f"{verdict.last_repeat:,}: delivered before it, not acked"
            )
        else:
            click.echo("no flight came twice")
        click.echo(f"sha256 of the source   {verdict.source_sha256}")
        click.echo(f"sha256 of what arrived {verdict.arrived_sha256}")
        click.echo(f"memory against backlog: {self.png}")
        if self.problems:
            click.echo("NOT AS IT SHOULD BE: " + "; ".join(self.problems))
        else:
            click.echo(f"all {verdict.flights:,} flights arrived, in order, byte for byte")

    def draw(self) -> None:
        """Write the picture."""
        from matplotlib.figure import Figure  # without pyplot: no window system is touched

        figure = Figure(figsize=(10, 5.5), layout="constrained")
        axes = figure.add_subplot()
        start = self.before.samples[0]["time_s"]
        samples = [*self.before.samples, *self.after.samples]
        seconds = [sample["time_s"] - start for sample in samples]
        for field, label in (
            ("backlog_bytes", "backlog: confirmed, not acked"),
            ("spilled_bytes", "of it spilled"),
            ("rss_anon_bytes", "RssAnon: all memory of the process"),
            ("resident_bytes", "resident messages"),
        ):
            axes.plot(seconds, [sample[field] / 2**20 for sample in samples], label=label)
        axes.axhline(self.capacity_bytes / 2**20, color="tab:red", linestyle=":", label="capacity")
        axes.axvline(self.before.last("time_s") - start, color="black", linestyle="--", linewidth=1, label="SIGKILL")
        axes.set(
            title=f"{self.verdict.flights:,} flights through {facts.mebibytes(self.capacity_bytes)} of memory",
            xlabel="seconds",
            ylabel="MiB",
            ylim=(0, None),
        )
        axes.legend()
        figure.savefig(self.png, dpi=120)


def _phase_dict(phase: Phase) -> dict[str, Any]:
    return {
        "pid": phase.pid,
        "recovery": {name: value for name, value in phase.opened.items() if name not in _NOT_RECOVERY},
        "rss_anon_before_bytes": phase.opened["rss_anon_before_bytes"],
        "confirmed": phase.last("confirmed"),
        "delivered": phase.last("taken"),
        "seconds": phase.seconds,
        **{f"peak_{field}": phase.peak(field) for field in _PEAKS},
    }


_NOT_RECOVERY = ("time_s", "rss_anon_before_bytes")
