"""Processes that a test run has begun, and whether one of them outlives it."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

MARK = "QFLOW_TEST_RUN"
PATIENCE_S = 30.0
"""What a process that was told to end is given for that."""

KEPT = ("org.apache.spark", "pyspark", "multiprocessing.resource_tracker")
"""What is in the commands of those that are kept for all tests of a process."""


class Process(NamedTuple):
    """One that runs now."""

    pid: int
    parent: int
    command: str
    environment: bytes


def mark_children() -> bytes:
    """Mark the environment of all processes to come, and of theirs; return the mark."""
    os.environ[MARK] = uuid4().hex
    return f"{MARK}={os.environ[MARK]}".encode()


def left_over(mark: bytes) -> list[Process]:
    """Return the processes of this run that are alive, once those that are about to end had time for it.

    Those that a run has begun are known by their mark, also where who began them is gone, or by their parents, where
    they were forked. Spark's Java ends with the session, and so do its workers; what `multiprocessing` keeps beside a
    process of pytest ends with that.
    """
    deadline = time.monotonic() + PATIENCE_S
    while (found := _living(mark)) and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    return found


def end(processes: list[Process]) -> None:
    """Kill processes, so that none outlives the run after all."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _living(mark: bytes) -> list[Process]:
    known = {process.pid: process for entry in os.listdir("/proc") if entry.isdigit() for process in _look(entry)}
    return [
        process
        for process in known.values()
        if process.pid != os.getpid() and _is_ours(process, mark, known) and not _ends_with_pytest(process, known)
    ]


def _look(entry: str) -> list[Process]:
    """Return a process; nothing if it is gone, has ended and nobody asked for its end, or is of another user."""
    path = Path("/proc", entry)
    try:
        command = path.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        parent = int(path.joinpath("stat").read_text().rpartition(")")[2].split()[1])
        environment = path.joinpath("environ").read_bytes()
    except OSError:
        return []
    return [Process(int(entry), parent, command, environment)] if command else []


def _is_ours(process: Process, mark: bytes, known: dict[int, Process]) -> bool:
    return mark in process.environment.split(b"\0") or _line(process, known)[-1].parent == os.getpid()


def _ends_with_pytest(process: Process, known: dict[int, Process]) -> bool:
    return any(name in one.command for one in _line(process, known) for name in KEPT)


def _line(process: Process, known: dict[int, Process]) -> list[Process]:
    """Return a process and those above it, below this one."""
    line = [process]
    while (above := known.get(line[-1].parent)) is not None and above.pid != os.getpid():
        line.append(above)
    return line


def free_port() -> int:
    """Return a port for a server that is started on it again and again.

    The system gives it to no client: one that tries while there is no server might connect to itself.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", port))
            return port
