"""Fixtures of the tests of workers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from doors.command_line import CommandLine

JOBS = Path(__file__).with_name("jobs.py")

OWNER = """
import sys, qflow
with qflow.open(sys.argv[1]):
    print("owns", flush=True)
    sys.stdin.read()
"""


class Working:
    """`qflow work` on queue `jobs`, and what it prints."""

    def __init__(
        self, cli: CommandLine, function: str, *options: object, spool: object = None, file: Path = JOBS
    ) -> None:
        arguments = ("work", spool or cli.spool, "jobs", f"{file}:{function}", "--retry-delay", 0, *options)
        self.process = cli.start_on(subprocess.DEVNULL, subprocess.PIPE, *arguments, stderr=subprocess.STDOUT)
        self.lines: list[str] = []

    def until(self, pattern: str) -> re.Match[str]:
        """Return the first match of an expression in a line to come."""
        assert self.process.stdout is not None
        for line in iter(self.process.stdout.readline, b""):
            self.lines.append(line.decode().rstrip("\n"))
            found = re.search(pattern, self.lines[-1])
            if found is not None:
                return found
        raise AssertionError(f"no line with {pattern!r} came, but {self.lines}")

    def found(self, pattern: str) -> re.Match[str]:
        """Return the first match of an expression in a line that has come, or is to come."""
        came = (re.search(pattern, line) for line in self.lines)
        return next(filter(None, came), None) or self.until(pattern)

    def until_all(self, *texts: str) -> None:
        """Read until each of these texts has come, before or now."""
        for text in texts:
            if not any(text in line for line in self.lines):
                self.until(re.escape(text))

    def workers(self) -> list[int]:
        """Return the numbers of its processes, as far as it has some now."""
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(number) for children in threads for number in children.read_text().split()]

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Read to the end; return the exit code."""
        assert self.process.stdout is not None
        self.lines += self.process.stdout.read().decode().splitlines()
        return self.process.wait()


def kill(number: int) -> None:
    os.kill(number, signal.SIGKILL)


@contextmanager
def owner(spool: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that owns the spool."""
    process = subprocess.Popen([sys.executable, "-c", OWNER, spool], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"owns\n"
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[CommandLine]:
    """The command line, in a directory of its own."""
    cli = CommandLine(tmp_path)
    yield cli
    cli.end()
