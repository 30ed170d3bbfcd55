"""`qflow pipe --batch`: the command runs once per batch, and its exit code decides."""

from __future__ import annotations

import math
import os
import select
import time
from contextlib import suppress

from qflow.cli.command import Command, Restarts, Run, RunFailed
from qflow.cli.flow import Flow
from qflow.cli.stop import Stop
from qflow.deliveries import Deliveries

_PATIENCE_MS = int(Stop.PATIENCE_S * 1000)


def to_runs(flow: Flow, command: Command, restarts: Restarts, size: int) -> None:
    """Run a command for every `size` lines until stdin has ended and nothing is left.

    Raises:
        CommandFailed: a run failed, and so did its repetitions.
        Stopped: asked to stop.
    """
    while batch := _collect(flow, size):
        lines = [body for part in batch for body in part.bodies]
        try:
            _run_until_done(flow, command, restarts, lines)
        except BaseException:
            for part in batch:
                part.nack()
            flow.handed_out -= len(lines)
            raise
        for part in batch:
            part.ack()
        flow.delivered += len(lines)


def _collect(flow: Flow, size: int) -> list[Deliveries]:
    """Return batches of `size` lines together, fewer at the end of stdin or if no more fit into the capacity."""
    batch: list[Deliveries] = []
    count = 0
    while count < size:
        part = flow.take(size - count, Stop.PATIENCE_S)
        if not part and not flow.is_empty(count):
            # More lines wait, perhaps since this moment: if they still do not come, memory is full of this batch.
            part = flow.take(size - count, Stop.PATIENCE_S)
            if not part and batch:
                break
        if part:
            batch.append(part)
            count += len(part)
        elif part is None and flow.is_empty(count):
            break
    return batch


def _run_until_done(flow: Flow, command: Command, restarts: Restarts, lines: list[bytes]) -> None:
    data = b"".join(line + flow.delimiter for line in lines)
    back = flow.back_in_words(len(lines))
    done = False
    while not done:
        try:
            _run(command, data)
        except RunFailed as failure:
            restarts.failed(str(failure), back)
        else:
            done = True
    restarts.succeeded()


def _run(command: Command, data: bytes) -> None:
    most_s = command.timeout_s
    deadline = math.inf if most_s is None else time.monotonic() + most_s
    with command.started() as run:
        with suppress(BrokenPipeError):  # it may exit without reading everything: its exit code counts
            _write(run, data, deadline)
        run.stdin.close()
        if not run.ends_within(None if most_s is None else max(0, deadline - time.monotonic())):
            run.end()
            raise RunFailed(f"{command.name} did not end within {most_s:g} s, and was ended")
        run.process.wait()
    if run.process.returncode != 0:
        raise RunFailed(run.how_it_ended())


def _write(run: Run, data: bytes, deadline: float) -> None:
    """Write to a run until it has taken all, has exited, or the deadline comes."""
    descriptor = run.stdin.fileno()
    os.set_blocking(descriptor, False)
    writable = select.poll()
    writable.register(descriptor, select.POLLOUT)
    left = memoryview(data)
    while left and not run.has_ended() and time.monotonic() < deadline:
        if writable.poll(_PATIENCE_MS):
            left = left[os.write(descriptor, left) :]
