"""Trees of processes that Spark starts, killed as a whole; and how far a batch of theirs has come."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from qflow.storage.inbox import stages


def left_in_inbox(spool: Path) -> list[str]:
    """Return the files that lie in the inbox; an owner that tries a batch again moves it meanwhile."""
    return [os.path.join(path, name) for path, _, names in os.walk(spool / "inbox") for name in names]


def in_flight(spool: Path, moment: int) -> bool:
    """Tell whether a batch is at some moment of its way: being written, handed in, or gone on since."""
    inbox = spool / "inbox"
    names = set(os.listdir(inbox)) if inbox.exists() else set()
    staged = inbox / stages.STAGING
    if moment == 0:
        return any(any(path.iterdir()) for path in staged.iterdir() if path.exists()) if staged.exists() else False
    return bool(names - {stages.STAGING, stages.REFUSED})


class Trees:
    """Workers of this folder, each with all that it starts in a session of its own; all that run are killed at the end."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[str]] = []

    def start(self, worker: str, *arguments: object) -> subprocess.Popen[str]:
        """Start a worker, with pipes to talk to it."""
        command = [sys.executable, str(Path(__file__).parent / worker), *map(str, arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._running.append(subprocess.Popen(command, start_new_session=True, text=True, **pipes))
        return self._running[-1]

    def kill(self, process: subprocess.Popen[str]) -> list[str]:
        """Kill a worker, its Java, and all that this has started; return the lines it has said and nobody has read."""
        kill_session(process.pid)
        self._running.remove(process)
        said, _ = process.communicate()
        return said.splitlines()

    def kill_all(self) -> None:
        """Kill those that run."""
        for process in self._running.copy():
            self.kill(process)


def said(process: subprocess.Popen[str]) -> str:
    """Return the next line that a worker says."""
    assert process.stdout is not None
    return process.stdout.readline()


def tell(process: subprocess.Popen[str], line: str) -> None:
    """Say a line to a worker."""
    assert process.stdin is not None
    print(line, file=process.stdin, flush=True)


def copy_the_rest(spark: Any, source: Path, target: Path, checkpoint: Path) -> None:
    """Do what `sink_worker.py` does with all that is there, and end."""
    frame = (
        spark.readStream.format("qflow")
        .option("subscribe", "plants")
        .option("startingOffsets", "earliest")
        .option("group", "copier")
        .load(str(source))
        .selectExpr("key", "value", "concat('copy/', topic) as topic")
    )
    query = frame.writeStream.format("qflow").option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    query.start(str(target)).awaitTermination()


def kill_session(session: int) -> None:
    """Kill every process of a session: Spark's workers have left the group of the one that began it."""
    while members := [
        pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if session_of(pid) == session
    ]:
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def session_of(pid: int) -> int | None:
    """Return the session of a process, None if it is dead."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if after_name[0] in "ZX" else int(after_name[3])
