"""A process that has looked into logs and stays: LMDB keeps their lock files, and what stands in them.

    python beside.py

It takes lines from its standard input, each a sign and the directory of a log: `+` opens and reads it, `-` closes it.
Each is answered by a line. It ends with its standard input.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from qflow.storage.environment import Environment
from qflow.storage.files import Files


class Beside:
    """The process. Made when it is first needed, in each process of pytest."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def tell(self, sign: str, log: Path) -> None:
        """Have it open a log, or close it."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{sign}{log}\n")
        assert process.stdout.readline() == "done\n", "the process beside could not read the log"

    def end(self) -> None:
        """End it."""
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()


@cache
def beside() -> Beside:
    """Return the one of this process."""
    return Beside()


def end() -> None:
    """End that of this process, if there is one."""
    if beside.cache_info().currsize:
        beside().end()
        beside.cache_clear()


@contextmanager
def reader_beside(spool: Path, wanted: bool = True) -> Iterator[None]:
    """Have another process read a spool's log, and keep it open; nothing unless it is wanted, and there is a log."""
    log = spool / "log"
    if not (wanted and (log / "data.mdb").is_file()):
        yield
        return
    beside().tell("+", log)
    try:
        yield
    finally:
        beside().tell("-", log)


def main() -> None:
    held: dict[str, Environment] = {}
    for line in sys.stdin:
        sign, log = line[0], line[1:].rstrip("\n")
        if sign == "+":
            held[log] = Environment(log, Files(), read_only=True)
            held[log].begin().abort()
        else:
            held.pop(log).close()
        print("done", flush=True)


if __name__ == "__main__":
    main()
