"""`qflow top` on a pseudo-terminal, as long as it is watched."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from bench.errors import CannotRun

LINES = 50
PATIENCE_S = 60.0
PAUSE_S = 0.3
"""What comes after so long a pause is drawn after another look."""
CHUNK = 2**16


class Screen:
    """Reads what is drawn, so that whoever draws never waits, and tells when a word was among it.

    Args:
        pid: the process that draws.
    """

    def __init__(self, pid: int, terminal: int, word: bytes) -> None:
        self.pid = pid
        self.draws = 0
        """How often something was drawn."""
        self._drawn_s = 0.0
        self._terminal = terminal
        self._word = word
        self._seen = threading.Event()
        self._drawn = b""
        self._ended = False
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while more := self._more():
            self.draws += monotonic() - self._drawn_s > PAUSE_S
            self._drawn_s = monotonic()
            self._drawn = (self._drawn + more)[-CHUNK:]
            if self._word in self._drawn:
                self._seen.set()
        self._ended = True
        self._seen.set()

    def _more(self) -> bytes:
        try:
            return os.read(self._terminal, CHUNK)
        except OSError:  # nobody has the other side any more
            return b""

    def wait(self) -> None:
        """Return when the word was drawn."""
        if not self._seen.wait(PATIENCE_S):
            raise CannotRun(f"qflow top showed no queue after {PATIENCE_S:.0f} s")
        if self._ended:
            said = self._drawn.decode(errors="replace").strip().splitlines() or ["it said nothing"]
            raise CannotRun(f"qflow top ended before it showed a queue: {said[-1]}")

    def join(self) -> None:
        self._thread.join()


@contextmanager
def top(spool: Path, columns: int, word: str) -> Iterator[Screen]:
    """Run `qflow top` on a terminal of so many columns; give its screen from the moment it has drawn a word on."""
    terminal, inside = pty.openpty()
    termios.tcsetwinsize(inside, (LINES, columns))
    process = subprocess.Popen(
        [sys.executable, "-m", "qflow", "top", str(spool)],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        env={**os.environ, "TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(inside)
    screen = Screen(process.pid, terminal, word.encode())
    try:
        screen.wait()
        yield screen
        os.write(terminal, b"q")
        process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()
        screen.join()
        os.close(terminal)
