"""Child processes: what has to be measured in, or killed with, a process of its own.

A child is `python -m bench.children ROLE ARGUMENTS`, and prints one line of JSON.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.measure import CannotRun

_ROOT = Path(__file__).parent.parent
_BARE = "print([line for line in open('/proc/self/status') if line.startswith('RssAnon')])"


def memory_now() -> tuple[int, int]:
    """Return (RssAnon, RssFile) of this process in bytes."""
    found = {}
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith((b"RssAnon:", b"RssFile:")):
                name, value = line.split()[:2]
                found[name] = int(value) * 1024
    if len(found) != 2:
        raise CannotRun("this system does not tell RssAnon in /proc/self/status")
    return found[b"RssAnon:"], found[b"RssFile:"]


def bare_interpreter_bytes() -> int:
    """Return the RssAnon of an interpreter that has imported nothing of ours."""
    output = subprocess.run([sys.executable, "-c", _BARE], capture_output=True, text=True, check=True).stdout
    digits = "".join(filter(str.isdigit, output))
    if not digits:
        raise CannotRun("this system does not tell RssAnon in /proc/self/status")
    return int(digits) * 1024


def run(role: str, *arguments: object) -> Any:
    """Run a child to its end; return what it printed."""
    with _start(role, *arguments) as child:
        output = child.stdout.read() if child.stdout else ""
    if child.returncode:
        raise CannotRun(f"the child {role} ended with {child.returncode}")
    return json.loads(output)


def run_and_kill(role: str, *arguments: object) -> Any:
    """Run a child until it has printed its line, then kill it with SIGKILL; return the line."""
    with _start(role, *arguments) as child:
        line = child.stdout.readline() if child.stdout else ""
        child.kill()
    if child.returncode != -signal.SIGKILL:
        raise CannotRun(f"the child {role} ended with {child.returncode} before it was killed")
    return json.loads(line)


@contextmanager
def _start(role: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Start a child; whatever happens, it is gone afterwards."""
    command = [sys.executable, "-m", "bench.children", role, *map(str, arguments)]
    with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        except BaseException:
            child.kill()
            raise


def report(value: object) -> None:
    """Print the child's line."""
    print(json.dumps(value), flush=True)


def wait_to_be_killed() -> None:
    while True:
        signal.pause()


def main(role: str, *arguments: str) -> None:
    from bench import memory, restart

    {**memory.ROLES, **restart.ROLES}[role](*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
