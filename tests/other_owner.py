"""A spool whose owner is another process, for who is connected to it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

End = Callable[[], None]
_OWNER = (
    "import qflow, sys\nbroker = qflow.open(sys.argv[1])\nbroker.declare_queue('jobs')\nprint('up', flush=True)\n"
    "sys.stdin.read()\nbroker.close()"
)


@contextmanager
def owned(spool: Path, how: str = "closed") -> Iterator[End]:
    """Have another process own a spool with a queue, until the end; provide what has it closed, or killed, before."""
    command = [sys.executable, "-c", _OWNER, str(spool)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdin is not None
        owner.stdout.readline()
        yield owner.stdin.close if how == "closed" else owner.kill
