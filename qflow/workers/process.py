"""A worker's process, as its supervisor sees it: `python -P .../qflow/workers/__main__.py`, and three descriptors.

    stdin      the order, one line; its end means: finish what is at hand, and end. It ends with the supervisor, too
    a pipe     what the worker reports, a line of JSON each
    a mapping  what it has at hand; see `desk`

It has a process group of its own: Ctrl-C does not reach it, and what a function has started in that is killed with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Collection
from contextlib import suppress

from qflow.children import interpreter
from qflow.workers.job import Job, Order

MAIN = os.path.join(os.path.dirname(__file__), "__main__.py")
"""What it runs. What a function starts has the environment of the supervisor."""


class Process:
    """See the module."""

    def __init__(self, job: Job, seat: int, desk: int) -> None:
        """Raises OSError: it cannot be started."""
        self._reports, theirs = os.pipe()
        self._rest = b""
        try:
            os.set_blocking(self._reports, False)
            self._process = subprocess.Popen(
                [interpreter(), "-P", MAIN],
                stdin=subprocess.PIPE,
                stdout=_shared(1),
                stderr=_shared(2),
                pass_fds=(theirs, desk),
                bufsize=0,
                process_group=0,
            )
        except BaseException:
            os.close(self._reports)
            raise
        finally:
            os.close(theirs)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it is dead already, which is seen soon
            self._process.stdin.write(Order(job, seat, theirs, desk).encode())

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Return the descriptor that can be read when it has reported something, or is dead."""
        return self._reports

    def reports(self) -> list[tuple[str, str]]:
        """Return what it has reported since: kinds and texts."""
        data = self._rest
        while True:
            try:
                more = os.read(self._reports, 65_536)
            except BlockingIOError:
                break
            if not more:
                break
            data += more
        *lines, self._rest = data.split(b"\n")
        said = map(json.loads, lines)
        return [(one["kind"], one["text"]) for one in said]

    def exit_code(self) -> int | None:
        """Return how it has ended, as `Popen` has it; None while it lives."""
        return self._process.poll()

    def drain(self) -> None:
        """Have it finish the message at hand, and end."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def kill(self) -> None:
        """Kill it, and what it has started."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Wait for its end, and forget it."""
        self._process.wait()
        self.drain()
        if self._reports >= 0:
            os.close(self._reports)
            self._reports = -1


def bury_orphans(ours: Collection[int]) -> None:
    """As process 1, such as a container's first, take note of the end of what others have left; not of `ours`."""
    with suppress(ChildProcessError):  # there is none
        while (dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and dead.si_pid not in ours:
            os.waitpid(dead.si_pid, 0)


def _shared(descriptor: int) -> int | None:
    """Return what a worker has as stdout or stderr: None = what this process has, if that is open and passed on."""
    with suppress(OSError):
        if os.get_inheritable(descriptor):
            return None
    return subprocess.DEVNULL
