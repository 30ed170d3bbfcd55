"""Progress on stderr, if that is a terminal, of whatever takes more than a second."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PATIENCE_S = 1.0
"""What ends within that shows nothing."""


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show that one call goes on, and since when; nobody knows how long it takes."""
    if not is_wanted():
        yield
        return
    ended = threading.Event()
    shower = threading.Thread(target=_show, args=(what, ended), daemon=True)
    shower.start()
    try:
        yield
    finally:
        ended.set()
        shower.join()


@contextmanager
def counting(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show how much is done of a total, None = not known; the function that is given is told of each step."""
    counter = _Counter(what, total)
    try:
        yield counter.advance if is_wanted() else _nothing
    finally:
        counter.end()


def is_wanted() -> bool:
    """Tell whether somebody sees it: stderr is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


class _Counter:
    """A bar, from the first step on that comes after the patience has ended."""

    def __init__(self, what: str, total: int | None) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._since_s = time.monotonic()
        self._bar: tuple[Progress, TaskID] | None = None

    def advance(self, steps: int) -> None:
        self._done += steps
        if self._bar is None:
            if time.monotonic() - self._since_s < PATIENCE_S:
                return
            bar = _bar()
            bar.start()
            self._bar = bar, bar.add_task(self._what, total=self._total)
        bar, task = self._bar
        bar.update(task, completed=self._done)

    def end(self) -> None:
        if self._bar is not None:
            self._bar[0].stop()


def _show(what: str, ended: threading.Event) -> None:
    if ended.wait(PATIENCE_S):
        return
    with _bar() as bar:
        bar.add_task(what, total=None)
        ended.wait()


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        expand=True,
    )


def _nothing(_steps: int) -> None: ...
