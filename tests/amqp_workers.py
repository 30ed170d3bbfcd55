"""Workers of Celery and dramatiq, as processes beside a test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

WATCHDOG_S = 120.0


@contextmanager
def worker(
    directory: Path, ready: str, *command: str, path: tuple[Path, ...] = (), **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """Run a worker beside a block, from when it says that it is ready; all its processes are killed at the end.

    Args:
        directory: where it runs; its modules are found there.
        ready: a text that it says when it is.
        command: the arguments of Python.
        path: where else modules are found.
    """
    found_in = [*map(str, (directory, *path)), os.environ.get("PYTHONPATH", "")]
    with subprocess.Popen(
        [sys.executable, *command],
        cwd=directory,
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(found_in)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        said: list[str] = []
        is_ready = threading.Event()

        def listen() -> None:
            for line in process.stdout or ():
                said.append(line)
                if ready in line:
                    is_ready.set()
            is_ready.set()

        listening = threading.Thread(target=listen)
        listening.start()
        try:
            assert is_ready.wait(WATCHDOG_S), "".join(said)
            assert process.poll() is None, "".join(said)
            yield process
        except BaseException:
            print("".join(said[-50:]))
            raise
        finally:
            kill(process)
            listening.join()


def end(process: subprocess.Popen[str]) -> None:
    """Have a worker end what it does, and itself."""
    process.send_signal(signal.SIGTERM)
    assert process.wait(WATCHDOG_S) == 0


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a worker with all its processes."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(WATCHDOG_S)


def wait_for(holds: Callable[[], object]) -> None:
    """Return when something holds, which must come."""
    deadline, tick = time.monotonic() + WATCHDOG_S, threading.Event()
    while not holds():
        assert time.monotonic() < deadline, "it did not come"
        tick.wait(0.02)
