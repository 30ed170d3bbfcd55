"""The command that `qflow pipe` writes to: how a run of it starts and ends, and when it is started again."""

from __future__ import annotations

import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO

import attrs

from qflow.cli.flow import Flow
from qflow.cli.standard import complaining
from qflow.cli.stop import Stop

_LONGEST_PAUSE_S = 30.0
_RETRIES_AT_THE_END = 2
"""Retries in a row once stdin has ended, without `--retries`."""
_LONGEST_LOOK_S = 0.05
"""Seconds between two looks whether a run has ended, at most."""
_TERMINATE_S = 5.0
"""Seconds from SIGTERM to SIGKILL, for a run that does not end."""


class CommandFailed(Exception):
    """The command is not started again."""


class RunFailed(Exception):
    """A run of the command failed; the message begins with its name and says how."""


@attrs.frozen
class Command:
    """A command line, and how its runs are watched.

    Args:
        words: its name and arguments.
        timeout_s: seconds after which a run that takes none of its stdin, or does not exit, is ended; None = never.
        stop: tells whether a signal asked to stop.
    """

    words: Sequence[str]
    timeout_s: float | None = None
    stop: Stop = attrs.field(factory=Stop)

    @property
    def name(self) -> str:
        return shlex.quote(self.words[0])

    @contextmanager
    def started(self) -> Iterator[Run]:
        """Start a run; the second signal ends it. Raises RunFailed: it cannot be started."""
        try:
            run = Run(self)
        except OSError as error:
            raise RunFailed(f"{self.name} cannot be started: {error.strerror}") from error
        try:
            yield run
        except KeyboardInterrupt:
            run.signal(signal.SIGTERM)
            raise


class Run:
    """A process that reads what is written to its stdin.

    It has a process group of its own, so that Ctrl-C does not reach it.
    """

    def __init__(self, command: Command) -> None:
        self.command = command
        self._said = False
        self.process = subprocess.Popen(command.words, stdin=subprocess.PIPE, bufsize=0, process_group=0)

    @property
    def stdin(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    def has_ended(self) -> bool:
        """Tell whether it has exited; after a signal, say once on stderr that its end is waited for."""
        if self.process.returncode is not None:
            return True
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        if not ended and self.command.stop.signal is not None and not self._said:
            self._said = True
            name, number = self.command.name, self.process.pid
            say(f"waiting for {name} (process {number}) to finish; a second signal ends it")
        return ended

    def ends_within(self, seconds: float | None) -> bool:
        """Wait until it exits, None = for ever; return whether it has. It is not reaped: its number stays its own."""
        deadline, pause_s = math.inf if seconds is None else time.monotonic() + seconds, 0.0005
        while not self.has_ended():
            if (left := deadline - time.monotonic()) <= 0:
                return False
            time.sleep(min(left, pause_s))
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
        return True

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its process group, unless its exit code was read: its number may be in use again."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def end(self) -> None:
        """End it, and all processes of its group."""
        self.signal(signal.SIGTERM)
        if not self.ends_within(_TERMINATE_S):
            self.signal(signal.SIGKILL)
        self.process.wait()

    def how_it_ended(self) -> str:
        """Return how it ended, in words; after it has exited."""
        status = self.process.returncode
        ended = f"exited with {status}" if status >= 0 else f"was ended by signal {-status}"
        return f"{self.command.name} {ended}"


def say(sentence: str) -> None:
    """Print a line on stderr, above the line of progress if there is one."""
    if sys.stderr is not None:  # closed from the start
        with complaining():
            sys.stderr.write(f"qflow: {sentence}\n")


class Restarts:
    """Decides how often, and after which pause, the command is started again.

    Args:
        retries: failures in a row, without a line acked, that are followed by another try; None = any
            number while stdin is open, `_RETRIES_AT_THE_END` when it has ended.
        backoff_s: the first pause in seconds; the next ones in a row are twice as long, up to 30 s.
        flow: the lines that go into the command.
    """

    def __init__(self, retries: int | None, backoff_s: float, flow: Flow) -> None:
        self._retries = retries
        self._backoff_s = backoff_s
        self._flow = flow
        self._failures = 0
        self.leaves_early = False
        """A run has exited with 0 before the end of its input."""

    def succeeded(self) -> None:
        """A run ended well."""
        self._failures = 0

    def failed(self, how: str, back: str, *, progressed: bool = False, final: bool = False) -> None:
        """Pause before another try.

        Args:
            how: how the run ended, in words.
            back: where its lines are now, in words.
            progressed: some of its lines are acked, so this is the first failure in a row.
            final: another try would not help.

        Raises:
            CommandFailed: it is given up.
            Stopped: asked to stop during the pause.
        """
        flow = self._flow
        self._failures = 1 if progressed else self._failures + 1
        most = self._retries
        if most is None and flow.input_ended:
            most = _RETRIES_AT_THE_END
        if final or (most is not None and self._failures > most):
            tries = f" at the last of {self._failures} tries" if self._failures > 1 else ""
            raise CommandFailed(f"{how}{tries}; {back}")
        pause_s = min(self._backoff_s * 2 ** min(self._failures - 1, 30), max(_LONGEST_PAUSE_S, self._backoff_s))
        say(f"{how}; {back}; it is started again after {pause_s:g} s")
        flow.stop.sleep(pause_s)
        flow.restarts += 1

    def left_early(self, how: str, back: str) -> None:
        """Note a run that exited with 0 before the end of its input, for a restart at once; say so the first time.

        Raises:
            CommandFailed: it is not to be started again.
        """
        remedy = "if it is meant for N lines a run, say --batch N"
        if self._retries == 0:
            raise CommandFailed(f"{how}; {back}; {remedy}")
        if not self.leaves_early:
            say(f"{how}; {back}; it is started again each time; {remedy}")
        self.leaves_early = True
        self._failures = 0
        self._flow.restarts += 1
