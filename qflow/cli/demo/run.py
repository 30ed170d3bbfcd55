"""The course of the demo: a worker, its kill, the next one, the check; what is shown meanwhile, and what it found."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from qflow import children, inspect
from qflow.cli import facts
from qflow.cli.demo import evidence
from qflow.cli.demo.evidence import Verdict
from qflow.cli.demo.worker import Task
from qflow.cli.exits import Exit
from qflow.cli.facts import mebibytes
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


class WorkerFailed(click.ClickException):
    """A worker ended as it should not."""

    exit_code = Exit.DIFFERS


@attrs.define
class Phase:
    """What a worker printed while it lived."""

    pid: int
    opened: dict[str, Any]
    """Its recovery report."""
    samples: list[dict[str, Any]] = attrs.field(factory=list)
    """Its progress, every 50 ms."""

    def last(self, field: str) -> Any:
        """Return the last figure of a field."""
        return self.samples[-1][field]

    def peak(self, field: str) -> int:
        """Return the highest figure of a field."""
        return max(int(sample[field]) for sample in self.samples)

    @property
    def seconds(self) -> float:
        """From opening the spool to the last sample."""
        return float(self.last("time_s") - self.opened["time_s"])


def run_phase(task: Task, watch: Callable[[Phase], None], kill_at: int | None) -> Phase:
    """Run a worker.

    Args:
        task: what it does.
        watch: called after each sample.
        kill_at: kill it with SIGKILL as soon as it said that so many flights are confirmed.

    Raises:
        WorkerFailed: it ended in another way than that.
    """
    # A group of its own, so that Ctrl-C reaches it through this process only.
    with subprocess.Popen(
        children.command("qflow.cli.demo.worker", json.dumps(attrs.asdict(task))), env=children.environment(),
        stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, process_group=0,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            phase: Phase | None = None
            for line in process.stdout:
                if phase is None:
                    phase = Phase(process.pid, json.loads(line))
                    continue
                phase.samples.append(json.loads(line))
                watch(phase)
                if kill_at is not None and phase.last("confirmed") >= kill_at:
                    break
        except BaseException:
            process.kill()
            raise
        if kill_at is not None:
            process.kill()
        status = process.wait()
    expected = 0 if kill_at is None else -signal.SIGKILL
    if phase is None or not phase.samples or status != expected:
        raise WorkerFailed(f"the demo's worker ended with {status} where {expected} was expected")
    return phase


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

_BATCHES = 100
_LARGEST_BATCH = 1000


def run(spool: Path, evidence_file: Path, count: int, capacity_bytes: int, png: Path) -> Result:
    """Send the first `count` flights through a spool that is made for them.

    Raises:
        WorkerFailed: a worker ended for another reason than being killed or finished.
    """
    started = time.monotonic()
    task = Task(
        spool=str(spool),
        evidence=str(evidence_file),
        capacity_bytes=capacity_bytes,
        batch=max(1, min(_LARGEST_BATCH, count // _BATCHES)),
        start=0,
        end=count * 3 // 4,  # the kill comes before it, however slow this process is
        linger=True,
    )
    with Live(count) as live:
        live.say(f"{count:,} flights, capacity {mebibytes(capacity_bytes)}, spool {spool}")
        before = run_phase(task, live.show, kill_at=count // 2)
        confirmed, base = before.last("confirmed"), before.last("first_sequence")
        live.say(f"killed worker {before.pid} with SIGKILL when it had said that {confirmed:,} flights are confirmed")
        evidence.cut_torn_record(evidence_file)
        (queue,) = inspect.read_spool(spool).queues
        in_log = queue.next_sequence - base
        live.say(f"the log holds {in_log:,}, of which {queue.messages:,} are not acked")
        live.next_phase(in_log, before.last("taken"))
        after = run_phase(attrs.evolve(task, start=in_log, end=count, linger=False), live.show, kill_at=None)
        live.say(
            f"worker {after.pid} opened the spool in {after.opened['seconds'] * 1000:.1f} ms: "
            f"{after.opened['messages']:,} flights ({mebibytes(after.opened['bytes'])}) waiting"
        )
        live.say("comparing what arrived with the source")
        verdict = evidence.verify(evidence_file, base, count)
    return Result(
        capacity_bytes=capacity_bytes,
        before=before,
        after=after,
        in_log=in_log,
        verdict=verdict,
        seconds=time.monotonic() - started,
        png=str(png),
    )


class Live:
    """Two bars for `total` flights, with memory beside them, and lines of events; without a terminal, the lines."""

    def __init__(self, total: int) -> None:
        console = Console(stderr=True, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._total = total
        self._confirmed = self._progress.add_task("confirmed", total=total, note="")
        self._delivered = self._progress.add_task("delivered", total=total, note="")
        self._confirmed_before = self._delivered_before = 0

    def show(self, phase: Phase) -> None:
        """Show the last sample of a phase."""
        now = phase.samples[-1]
        self._progress.update(
            self._confirmed,
            completed=self._confirmed_before + now["confirmed"],
            note=f"resident {mebibytes(now['resident_bytes'])}, spilled {mebibytes(now['spilled_bytes'])}",
        )
        self._progress.update(
            self._delivered,
            completed=min(self._total, self._delivered_before + now["taken"]),
            note=f"RssAnon {mebibytes(now['rss_anon_bytes'])}, RssFile {mebibytes(now['rss_file_bytes'])}",
        )

    def next_phase(self, confirmed: int, delivered: int) -> None:
        """Start to count at what earlier phases reached."""
        self._confirmed_before, self._delivered_before = confirmed, delivered

    def say(self, event: str) -> None:
        """Print a line above the bars."""
        self._progress.console.print(event, markup=False, soft_wrap=True)

    def __enter__(self) -> Live:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
