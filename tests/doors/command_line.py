"""The command line as its users have it: a process of its own."""

from __future__ import annotations

import array
import fcntl
import json
import shutil
import subprocess
import sys
import termios
from pathlib import Path
from typing import IO, Any

from doors.forking import forking
from qflow import inspect

WATCHDOG_S = 300
"""Ends a test that hangs; nothing is measured by it."""
POLLS = 1_000_000


class CommandLine:
    """Runs `qflow` in a directory of the test.

    Args:
        directory: where it runs; the spool is `spool` in it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.spool = directory / "spool"
        self._started: list[subprocess.Popen[bytes]] = []

    def run(
        self, *arguments: object, stdin: bytes = b"", stdout: Any = subprocess.PIPE, shell: str = ""
    ) -> subprocess.CompletedProcess[bytes]:
        """Run `qflow` to its end; `shell` is a script that starts it, if it is not to be forked."""
        if not shell:
            return forking().run(list(map(str, arguments)), stdin, stdout, self.directory, WATCHDOG_S)
        return subprocess.run(
            ["sh", "-c", shell, "sh", *_command(arguments)],
            input=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            cwd=self.directory,
            timeout=WATCHDOG_S,
            check=False,
        )

    def json(self, *arguments: object) -> Any:
        """Run `qflow` with --json and return what it prints."""
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def start(self, *arguments: object) -> subprocess.Popen[bytes]:
        """Start `qflow` with pipes to talk to it."""
        return self.start_on(subprocess.PIPE, subprocess.PIPE, *arguments)

    def start_on(
        self, stdin: Any, stdout: Any, *arguments: object, stderr: Any = subprocess.PIPE
    ) -> subprocess.Popen[bytes]:
        """Start `qflow` on files, pipes or terminals."""
        process = subprocess.Popen(
            _command(arguments), stdin=stdin, stdout=stdout, stderr=stderr, bufsize=0, cwd=self.directory
        )
        self._started.append(process)
        return process

    def wait_until_stored(self, count: int) -> None:
        """Return when the log has handed out so many sequences of queue `q`."""
        for _ in range(POLLS):
            if (self.spool / "log").is_dir():
                queues = inspect.read_spool(self.spool).queues
                if any(queue.name == "q" and queue.next_sequence >= count for queue in queues):
                    return
        raise AssertionError(f"{count} messages never came")

    def wait_until_full(self, pipe: IO[bytes]) -> None:
        """Return when at least half of what a pipe can hold lies in it."""
        held = array.array("i", [0])
        for _ in range(POLLS):
            fcntl.ioctl(pipe, termios.FIONREAD, held)
            if held[0] >= fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) // 2:
                return
        raise AssertionError(f"the pipe held {held[0]} bytes and no more came")

    def waiting(self) -> list[bytes]:
        """Take everything out of queue `q`."""
        done = self.run("get", self.spool, "q")
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def discard_spool(self) -> None:
        """Remove a spool that a test damaged."""
        shutil.rmtree(self.spool)

    def end(self) -> None:
        """Kill what still runs."""
        for process in self._started:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


def _command(arguments: tuple[object, ...]) -> list[str]:
    return [sys.executable, "-m", "qflow", *map(str, arguments)]


def numbers(start: int, end: int) -> list[bytes]:
    """Return the numbers from `start` to below `end` as lines without their end."""
    return [b"%d" % number for number in range(start, end)]


def text(lines: list[bytes]) -> bytes:
    """Return lines with their ends."""
    return b"".join(line + b"\n" for line in lines)


def python(program: str) -> list[str]:
    """Return the command that runs a Python program."""
    return [sys.executable, "-u", "-c", program]


NOT_READING = python("import select\nprint('ready', flush=True)\nend = select.poll()\nend.register(0, 0)\nend.poll()")
"""A command that reads nothing of its input, and ends with who writes it."""


def summary(done: subprocess.CompletedProcess[bytes]) -> dict[str, int]:
    """Return the summary that `qflow pipe --json` writes to stderr."""
    (line,) = (line for line in done.stderr.splitlines() if line.startswith(b"{"))
    facts: dict[str, int] = json.loads(line)
    return facts


def error_line(done: subprocess.CompletedProcess[bytes]) -> str:
    """Return the one line on stderr that says what went wrong."""
    lines = done.stderr.decode().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("qflow: "), lines
    return lines[0]
