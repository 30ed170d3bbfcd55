"""`qflow top` in a terminal of tmux, as tests press its keys and read its screen."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

DEADLINE_S = 120
needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")


class Terminal:
    """A terminal of its own server, in which the command runs; then the shell tells how it ended."""

    def __init__(self, directory: str, spool: Path, width: int) -> None:
        self._socket = f"{directory}/tmux"
        self._pid = Path(directory, "pid")
        command = f"echo $$ >{self._pid}; exec {sys.executable} -m qflow top {spool}"
        script = f"sh -c '{command}'; code=$?; stty -a; echo code $code; exec cat"
        stale = {"COLUMNS": "80", "LINES": "24"}  # as a shell has exported them
        environment = {**os.environ, "LC_ALL": "C.UTF-8", **stale}
        size = ("-x", str(width), "-y", "30")
        arguments = ("tmux", "-u", "-S", self._socket, "-f", "/dev/null", "new-session", "-d", *size, script)
        subprocess.run(arguments, check=True, env=environment)

    def tmux(self, *arguments: str) -> str:
        done = subprocess.run(["tmux", "-S", self._socket, *arguments], capture_output=True, text=True, check=True)
        return done.stdout

    def sees(self, *parts: str, but: str = "") -> str:
        """Wait until all of these are on the screen, and that is not, and return it."""
        ends = time.monotonic() + DEADLINE_S
        while True:
            screen = self.tmux("capture-pane", "-p")
            if all(part in screen for part in parts) and not (but and but in screen):
                return screen
            assert time.monotonic() < ends, screen
            select.select((), (), (), 0.05)

    def press(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the command."""
        os.kill(int(self._pid.read_text()), number)


@contextmanager
def opened(spool: Path, width: int) -> Iterator[Terminal]:
    """Have a terminal in a directory with a short name: the address of a socket has few letters."""
    with tempfile.TemporaryDirectory(prefix="qflow-top-") as name:
        try:
            yield Terminal(name, spool, width)
        finally:
            subprocess.run(["tmux", "-S", f"{name}/tmux", "kill-server"], capture_output=True, check=False)
