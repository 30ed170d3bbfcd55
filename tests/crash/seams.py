"""Seams that count the steps of the engine at the disk, and kill the process or fail at a chosen one."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qflow.broker import Broker, make_broker
from qflow.config import BrokerSettings
from qflow.storage.environment import Environment
from qflow.storage.files import Files

HOT = ("open", "close", "read", "pread", "preadv", "pwrite", "pwritev", "lseek", "ftruncate", "unlink", "sync_data")
COLD = (
    "lstat", "exists", "make_directory", "remove_directory", "rename", "list", "scan", "allocate", "sync_file",
    "sync_directory", "sync_opened", "write_replacing",
)  # fmt: skip
LOG = ("begin", "commit", "make_room", "copy_to", "exchange")
CHANGING = (
    *("open", "pwrite", "pwritev", "ftruncate", "unlink"),
    *("make_directory", "remove_directory", "rename", "allocate", "write_replacing"),
    *LOG,
)
"""What leaves other files behind than there were; `open` where it may create or cut one."""
TELLING = ("rename", "write_replacing", "commit", "copy_to", "exchange")
"""Those after which something holds that did not hold before."""


class Steps:
    """Counts steps; the `kill_at`-th one is not taken: the process dies of SIGKILL there."""

    def __init__(self, kill_at: int = 2**60) -> None:
        self.kill_at = kill_at
        self.taken: list[str] = []
        self.counting = True

    def take(self, name: str) -> None:
        if not self.counting:
            return
        if len(self.taken) == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.taken.append(name)

    def watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **named: Any) -> Any:
            self.take(name)
            result = real(*arguments, **named)
            self.take("after " + name)
            return result

        return operation


class Kills(Steps):
    """Counts the steps between which a kill finds other files: before each change, and after those that tell of it.

    A kill leaves what the kernel has. Operations that only read, sync or close change nothing of it: killed before one
    of them, or after it, the process leaves what it leaves before its next change, when it has promised no less.
    """

    def watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        if name not in CHANGING:
            return real

        def operation(*arguments: Any, **named: Any) -> Any:
            if name != "open" or arguments[1] & (os.O_CREAT | os.O_TRUNC):
                self.take(name)
            result = real(*arguments, **named)
            if name in TELLING:
                self.take("after " + name)
            return result

        return operation


class SteppedFiles(Files):
    """Files each operation of which is two steps: before it and after it."""

    def __init__(self, steps: Steps) -> None:
        for name in HOT:
            setattr(self, name, steps.watched(name, getattr(Files, name)))
        for name in COLD:
            setattr(self, name, steps.watched(name, getattr(super(), name)))


def open_stepped(path: Any, steps: Steps, **settings: Any) -> Broker:
    """Open a spool whose every operation on files and log is counted."""

    def environment(log: str, files: Files) -> Environment:
        env = Environment(log, files)
        for name in LOG:
            setattr(env, name, steps.watched(name, getattr(env, name)))
        return env

    return make_broker(path, BrokerSettings(**settings), files=SteppedFiles(steps), open_environment=environment)


def open_before_steps(path: Any, steps: Steps, **settings: Any) -> Broker:
    """Open a spool as `open_stepped` does, whose operations count from then on.

    A kill in the opening of a spool that was closed is the same whatever comes after it: the tests of puts have it.
    """
    steps.counting = False
    broker = open_stepped(path, steps, **settings)
    steps.counting = True
    return broker


def run_in_child(task: Callable[[], None]) -> int:
    """Run a task in a forked child and return its wait status; an exception there is status 1 << 8."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    code = 1
    try:
        faulthandler.dump_traceback_later(30, exit=True)  # a child that hangs says where
        task()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)
    raise AssertionError("a child never comes here")


def ended_by_a_kill(task: Callable[[Steps, Path], None], spool: Path, step: int) -> bool:
    """Run a task in a child, killed at a step, the last of which is the end of the task; tell whether there was such."""

    def run() -> None:
        steps = Kills(step)
        task(steps, spool)
        steps.take("the end")

    return was_killed(run_in_child(run))


def was_killed(status: int) -> bool:
    """Tell whether a child died of SIGKILL; anything but that or a clean exit fails the test."""
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, f"the child died of signal {os.WTERMSIG(status)}"
        return True
    assert os.WEXITSTATUS(status) == 0, "the child failed, see its traceback"
    return False
