"""The course of the demo: a worker, its kill, the next worker, the check; and what it shows meanwhile, on stderr."""

from __future__ import annotations

import time
from pathlib import Path

import attrs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from qflow import inspect
from qflow.cli.demo import evidence
from qflow.cli.demo.phase import Phase, run_phase
from qflow.cli.demo.result import Result
from qflow.cli.demo.worker import Task
from qflow.cli.facts import mebibytes

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
