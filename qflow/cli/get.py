"""`qflow get`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from qflow.cli import options
from qflow.cli.outlet import Outlet
from qflow.cli.spool import owned_if_there, queue_to_empty
from qflow.cli.stop import Stop, Stopped

if TYPE_CHECKING:
    from qflow.queues.queue import Queue

BATCH_LINES = 1000
STDOUT = 1


@click.command(short_help="Write messages to stdout and ack them.")
@options.existing_spool
@options.queue_name
@click.option("--max", "maximum", type=click.IntRange(min=1), help="Stop after so many messages.")
@click.option("--follow", is_flag=True, help="When the queue is empty, wait for more.")
@options.delimiter
@options.capacity
def get(spool: Path, queue_name: str, maximum: int | None, follow: bool, delimiter: bytes, capacity: int) -> int | None:
    """Write the messages of QUEUE to stdout, each followed by the delimiter, and ack them.

    A message is acked once it is written; if stdout is a pipe, once it was read from the pipe (Linux). So
    `qflow get SPOOL QUEUE | head` loses nothing that was in the pipe; messages not acked stay in the queue, in order.

    With --follow, the spool is closed whenever the queue is empty, so that `qflow put` can add to it, and a
    spool that is in use is waited for.
    """
    with Stop() as stop:
        outlet = Outlet(STDOUT, delimiter, stop)
        left = maximum
        try:
            while True:
                left = _drain(spool, queue_name, capacity, outlet, left, stop if follow else None)
                if not follow or left == 0:
                    return None
                _wait_for_more(spool, queue_name, outlet, stop)
        except Stopped:
            return stop.exit_code


def _drain(
    spool: Path, queue_name: str, capacity: int, outlet: Outlet, left: int | None, stop: Stop | None
) -> int | None:
    """Write the messages of the queue, at most `left`; return how many more may follow."""
    with owned_if_there(spool, capacity, stop) as broker:
        queue = queue_to_empty(broker, queue_name)
        try:
            return _write(queue, outlet, left)
        finally:
            outlet.settle()
            outlet.settle_lines()


def _write(queue: Queue, outlet: Outlet, left: int | None) -> int | None:
    while left is None or left > 0:
        batch = queue.get_many(BATCH_LINES if left is None else min(left, BATCH_LINES), timeout_s=0)
        if batch:
            outlet.send(batch)
            left = None if left is None else left - len(batch)
        elif outlet.unread:  # messages not read from the pipe may fill the capacity
            outlet.wait()
        else:
            break
    outlet.wait()
    return left


def _wait_for_more(spool: Path, queue_name: str, outlet: Outlet, stop: Stop) -> None:
    """Return when the queue holds messages and no process owns the spool."""
    from qflow import inspect

    while True:
        outlet.check()
        found = inspect.read_spool(spool)
        if found.owner_pid is None and any(queue.name == queue_name and queue.messages for queue in found.queues):
            return
        stop.sleep(Stop.PATIENCE_S)
