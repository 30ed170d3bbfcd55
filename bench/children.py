"""Child processes: what has to be measured in, or killed with, a process of its own.

A child is `python -m bench.roles [--cgroup PATH] ROLE ARGUMENTS`; it prints lines of JSON. What it cannot do it says
in such a line, and the parent raises it as `CannotRun`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from bench.cgroup import Group
from bench.errors import CannotRun

_ROOT = Path(__file__).parent.parent
_BARE = "print([line for line in open('/proc/self/status') if line.startswith('RssAnon')])"
CANNOT = "cannot run"
NO_RSS = "this system does not tell RssAnon in /proc/self/status"


def memory_now() -> tuple[int, int]:
    """Return (RssAnon, RssFile) of this process in bytes."""
    found = {}
    try:
        with open("/proc/self/status", "rb") as file:
            for line in file:
                if line.startswith((b"RssAnon:", b"RssFile:")):
                    name, value = line.split()[:2]
                    found[name] = int(value) * 1024
    except OSError as error:
        raise CannotRun(NO_RSS) from error
    if len(found) != 2:
        raise CannotRun(NO_RSS)
    return found[b"RssAnon:"], found[b"RssFile:"]


def bare_interpreter_bytes() -> int:
    """Return the RssAnon of an interpreter that has imported nothing of ours."""
    found = subprocess.run([sys.executable, "-c", _BARE], capture_output=True, text=True, check=False)
    digits = "".join(filter(str.isdigit, found.stdout))
    if found.returncode or not digits:
        raise CannotRun(NO_RSS)
    return int(digits) * 1024


@attrs.frozen
class Ended:
    """What a child printed, and how it ended."""

    lines: list[Any]
    code: int

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


def run(role: str, *arguments: object, group: Group | None = None, environment: Mapping[str, str] | None = None) -> Any:
    """Run a child to its end, with more in its environment; return its last line."""
    ended = watch(role, *arguments, group=group, environment=environment)
    if ended.killed:
        raise CannotRun(f"the child {role} was killed" + " for want of memory" * bool(group and group.killed()))
    if ended.code or not ended.lines:
        raise CannotRun(f"the child {role} ended with {ended.code}")
    return ended.lines[-1]


def watch(
    role: str, *arguments: object, group: Group | None = None, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run a child to its end, whichever it is; return all it printed."""
    with _start(role, *arguments, group=group, environment=environment) as child:
        lines = [json.loads(line) for line in child.stdout or () if line.endswith("\n")]
    for line in lines:
        if isinstance(line, dict) and CANNOT in line:
            raise CannotRun(line[CANNOT])
    return Ended(lines, child.returncode)


def run_and_kill(role: str, *arguments: object) -> Any:
    """Run a child until it has printed its line, then kill it with SIGKILL; return the line."""
    with alive(role, *arguments) as found:
        return found


@contextmanager
def alive(role: str, *arguments: object) -> Iterator[Any]:
    """Run a child beside what follows, from the line it prints on; give the line. Killed with SIGKILL at the end."""
    with _start(role, *arguments) as child:
        line = child.stdout.readline() if child.stdout else ""
        if not line:
            raise CannotRun(f"the child {role} ended with {child.wait()} before it was killed")
        found = json.loads(line)
        if isinstance(found, dict) and CANNOT in found:
            raise CannotRun(found[CANNOT])
        yield found
        child.kill()


@contextmanager
def _start(
    role: str, *arguments: object, group: Group | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start a child; whatever happens, it is gone afterwards."""
    command = [sys.executable, "-m", "bench.roles"]
    command += ["--cgroup", str(group.path)] if group is not None else []
    with subprocess.Popen(
        [*command, role, *map(str, arguments)],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    ) as child:
        try:
            yield child
        except BaseException:
            child.kill()
            raise


# In a child --------------------------------------------------------------------------------------------------------


def report(value: object) -> None:
    """Print a line of the child's."""
    print(json.dumps(value), flush=True)


def wait_to_be_killed() -> None:
    while True:
        signal.pause()


def joined_group() -> Group | None:
    """Return the cgroup this child was told to join."""
    return Group(Path(sys.argv[2])) if sys.argv[1] == "--cgroup" else None
