"""`qflow pipe --batch`: the command runs once per batch, and its exit code decides."""

from __future__ import annotations

from collections.abc import Sequence

from qflow.cli.flow import CommandFailed, Flow, how_it_ended, started
from qflow.cli.stop import Stop
from qflow.delivery import Deliveries

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 30.0


def to_runs(flow: Flow, command: Sequence[str], size: int, retries: int) -> None:
    """Run a command for every `size` lines until stdin has ended and nothing is left.

    Raises:
        CommandFailed: a run failed, and so did its repetitions.
        Stopped: asked to stop.
    """
    while batch := _collect(flow, size):
        lines = [body for part in batch for body in part.bodies]
        try:
            _run_until_done(flow, command, lines, retries)
        except BaseException:
            for part in batch:
                part.nack()
            raise
        for part in batch:
            part.ack()
        flow.delivered += len(lines)


def _collect(flow: Flow, size: int) -> list[Deliveries]:
    """Return `size` lines, fewer at the end of stdin or when no more fit into the capacity."""
    batch: list[Deliveries] = []
    count = 0
    while count < size:
        part = flow.take(size - count, Stop.PATIENCE_S)
        if part is None:
            break
        if part:
            batch.append(part)
            count += len(part)
        elif len(flow.queue) > count:
            # More lines wait, perhaps since this moment: if they still do not come, memory is full of this batch.
            part = flow.take(size - count, Stop.PATIENCE_S)
            if not part:
                break
            batch.append(part)
            count += len(part)
    return batch


def _run_until_done(flow: Flow, command: Sequence[str], lines: list[bytes], retries: int) -> None:
    data = b"".join(line + flow.delimiter for line in lines)
    for attempt in range(retries + 1):
        if attempt:
            flow.stop.sleep(min(_FIRST_PAUSE_S * 2 ** (attempt - 1), _LONGEST_PAUSE_S))
        with started(command) as process:
            process.communicate(data)  # it may leave without reading all: its exit code is what counts
        if process.returncode == 0:
            return
    tries = f" at the last of {retries + 1} tries" if retries else ""
    raise CommandFailed(
        f"{command[0]} {how_it_ended(process.returncode)}{tries}; its {len(lines):,} lines are back in the queue"
    )
