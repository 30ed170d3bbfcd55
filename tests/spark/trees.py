"""Trees of processes that Spark starts, killed as a whole; and how far a batch of theirs has come."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from qflow.storage import stages


def left_in_inbox(spool: Path) -> list[str]:
    """Return the files that lie in the inbox."""
    return [str(path) for path in (spool / "inbox").rglob("*") if path.is_file()]


def in_flight(spool: Path, moment: int) -> bool:
    """Tell whether a batch is at some moment of its way: being written, handed in, or gone on since."""
    inbox = spool / "inbox"
    names = set(os.listdir(inbox)) if inbox.exists() else set()
    staged = inbox / stages.STAGING
    if moment == 0:
        return any(any(path.iterdir()) for path in staged.iterdir() if path.exists()) if staged.exists() else False
    return bool(names - {stages.STAGING, stages.REFUSED})


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a worker, its Java, and all that this has started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
