"""A process that has looked into a log and stays: LMDB keeps its lock file, and what stands in it, as long as it lives.

    python beside.py LOG

It says `ready` when it has read, and ends with its standard input.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qflow.storage.environment import Environment
from qflow.storage.files import Files


@contextmanager
def reader_beside(spool: Path, wanted: bool = True) -> Iterator[None]:
    """Have another process read a spool's log, and keep it open; nothing unless it is wanted, and there is a log."""
    if not (wanted and (spool / "log").is_dir()):
        yield
        return
    process = subprocess.Popen(
        [sys.executable, __file__, str(spool / "log")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield
        finally:
            process.stdin.close()


def main(log: str) -> None:
    env = Environment(log, Files(), read_only=True)
    env.begin().abort()
    print("ready", flush=True)
    sys.stdin.read()
    env.close()


if __name__ == "__main__":
    main(sys.argv[1])
