"""A child that does what it is told: lines to its stdin, and an answer to each, a line of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.errors import CannotRun

READY = "ready"
"""What the child says first."""


@contextmanager
def started(module: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run `python -m MODULE ARGUMENTS`, from the moment it is ready; at the end its stdin is closed, and it ends."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        if child.stdout.readline().strip() != READY:
            raise CannotRun(f"{module} did not start")
        try:
            yield child
        finally:
            child.stdin.close()


def tell(child: subprocess.Popen[str], what: str) -> None:
    assert child.stdin is not None
    child.stdin.write(what + "\n")
    child.stdin.flush()


def answer(child: subprocess.Popen[str]) -> Any:
    """Return what the child says to what it was told first of all that it has not answered."""
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise CannotRun(f"{child.args!r} ended before it answered")
    return json.loads(line)


def ask(child: subprocess.Popen[str], what: str) -> Any:
    tell(child, what)
    return answer(child)
