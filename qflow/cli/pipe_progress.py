"""The progress line that `qflow pipe` shows on a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from qflow.cli.flow import STDIN, Flow

STDERR = 2
_PER_SECOND = 4


@contextmanager
def shown(flow: Flow) -> Iterator[None]:
    """Show progress on stderr, if that is a terminal and stdin is not."""
    if not os.isatty(STDERR) or os.isatty(STDIN):
        yield
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    def line() -> Text:
        return Text(describe(flow), no_wrap=True, overflow="ellipsis")

    console = Console(stderr=True, highlight=False)
    with Live(get_renderable=line, console=console, refresh_per_second=_PER_SECOND, redirect_stdout=False):
        yield


def describe(flow: Flow) -> str:
    """Return the progress of a pipe in words.

    Lines stored from stdin, lines handed out, lines waiting, how many of these are not in memory, and restarts of the
    command.
    """
    stats = flow.queue.stats()
    on_disk = stats.spilled_messages + stats.logged_messages
    return (
        f"in {flow.stored:,}  out {flow.handed_out:,}  waiting {stats.lag_messages:,}  spilled {on_disk:,}  "
        f"restarts {flow.restarts:,}"
    )
