"""One worker process, watched from its start to its end or its kill."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import attrs
import click

from qflow import children
from qflow.cli.demo.worker import Task
from qflow.cli.exits import Exit


class WorkerFailed(click.ClickException):
    """A worker ended as it should not."""

    exit_code = Exit.DIFFERS


@attrs.define
class Phase:
    """What a worker printed while it lived."""

    pid: int
    opened: dict[str, Any]
    """Its recovery report."""
    samples: list[dict[str, Any]] = attrs.field(factory=list)
    """Its progress, every 50 ms."""

    def last(self, field: str) -> Any:
        """Return the last figure of a field."""
        return self.samples[-1][field]

    def peak(self, field: str) -> int:
        """Return the highest figure of a field."""
        return max(int(sample[field]) for sample in self.samples)

    @property
    def seconds(self) -> float:
        """From opening the spool to the last sample."""
        return float(self.last("time_s") - self.opened["time_s"])


def run_phase(task: Task, watch: Callable[[Phase], None], kill_at: int | None) -> Phase:
    """Run a worker.

    Args:
        task: what it does.
        watch: called after each sample.
        kill_at: kill it with SIGKILL as soon as it said that so many flights are confirmed.

    Raises:
        WorkerFailed: it ended in another way than that.
    """
    # A group of its own, so that Ctrl-C reaches it through this process only.
    with subprocess.Popen(
        children.command("qflow.cli.demo.worker", json.dumps(attrs.asdict(task))), env=children.environment(),
        stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, process_group=0,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            phase: Phase | None = None
            for line in process.stdout:
                if phase is None:
                    phase = Phase(process.pid, json.loads(line))
                    continue
                phase.samples.append(json.loads(line))
                watch(phase)
                if kill_at is not None and phase.last("confirmed") >= kill_at:
                    break
        except BaseException:
            process.kill()
            raise
        if kill_at is not None:
            process.kill()
        status = process.wait()
    expected = 0 if kill_at is None else -signal.SIGKILL
    if phase is None or not phase.samples or status != expected:
        raise WorkerFailed(f"the demo's worker ended with {status} where {expected} was expected")
    return phase
