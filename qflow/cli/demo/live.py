"""What the demo shows while it runs, on stderr."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from qflow.cli.demo.phase import Phase
from qflow.cli.facts import mebibytes


class Live:
    """Two bars with memory beside them, and a line for each event; without a terminal, only the lines.

    Args:
        total: number of flights.
    """

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
