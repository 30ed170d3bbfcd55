"""`qflow get`."""

from __future__ import annotations

from pathlib import Path

import click

from qflow.cli import facts, options
from qflow.cli.outlet import Outlet
from qflow.cli.spool import AnyQueue, existing_queue, is_owner, reached_if_there
from qflow.cli.standard import complain
from qflow.cli.stop import Stop, Stopped
from qflow.errors import BrokerClosed

BATCH_LINES = 1000
STDOUT = 1


@click.command()
@options.existing_spool
@options.queue_name
@click.option("--max", "--limit", "maximum", type=click.IntRange(min=1), help="Stop after so many messages.")
@click.option("--follow", is_flag=True, help="When the queue is empty, wait for more.")
@options.delimiter
@options.capacity
def get(spool: Path, queue_name: str, maximum: int | None, follow: bool, delimiter: bytes, capacity: int) -> int | None:
    """Write the messages of QUEUE to stdout, each followed by the delimiter, and ack them.

    A message is acked once it is written; if stdout is a pipe, once it was read from the pipe (Linux). So
    `qflow get SPOOL QUEUE | head` loses nothing that was in the pipe; messages not acked stay in the queue, in order.

    Where another process owns the spool, messages come through it. With --follow, a spool of our own is closed whenever
    the queue is empty, so that others can open it, and an owner that lets nobody in is waited for.

    \b
    Examples:
      qflow get spool jobs --max 10
      qflow get spool jobs --follow | ./work
    """
    with Stop() as stop:
        left = maximum
        try:
            while True:
                outlet = Outlet(STDOUT, delimiter, stop, is_sure=True)
                try:
                    left = _drain(spool, queue_name, capacity, outlet, left, stop if follow else None)
                except BrokerClosed:
                    if not follow:
                        raise
                    # The owner has closed: what is not acked comes again.
                    left = None if left is None else left - outlet.acked
                if not follow or left == 0:
                    return None
                _wait_for_more(spool, queue_name, outlet, stop)
        except Stopped:
            return stop.exit_code


def _drain(
    spool: Path, queue_name: str, capacity: int, outlet: Outlet, left: int | None, stop: Stop | None
) -> int | None:
    """Write the messages of the queue, at most `left`; return how many more may follow."""
    with reached_if_there(spool, capacity, stop) as broker:
        queue = existing_queue(broker, queue_name)
        try:
            return _write(queue, outlet, left, None if is_owner(broker) else stop)
        finally:
            outlet.settle()
            outlet.settle_lines()


def _write(queue: AnyQueue, outlet: Outlet, left: int | None, stop: Stop | None) -> int | None:
    """Write messages until there is none; with `stop`, until asked to stop."""
    while left is None or left > 0:
        patience_s = 0.0 if stop is None or outlet.unread else Stop.PATIENCE_S
        batch = queue.get_many(BATCH_LINES if left is None else min(left, BATCH_LINES), timeout_s=patience_s)
        if batch:
            outlet.send(batch)
            left = None if left is None else left - len(batch)
        elif outlet.unread:  # messages not read from the pipe may fill the capacity
            outlet.wait()
        elif stop is None:
            if queue.stats().paused:
                complain(f"the queue {facts.readable(queue.name)} is paused, and delivers nothing")
            break
        else:
            stop.check()
            outlet.check()
    outlet.wait()
    return left


def _wait_for_more(spool: Path, queue_name: str, outlet: Outlet, stop: Stop) -> None:
    """Return when another process owns the spool and lets others in, or nobody owns it and the queue holds messages."""
    from qflow import inspect
    from qflow.door import is_there

    while True:
        outlet.check()
        found = inspect.read_spool(spool)
        if found.owner_pid is None:
            if any(queue.name == queue_name and queue.messages for queue in found.queues):
                return
        elif is_there(spool):
            return
        stop.sleep(Stop.PATIENCE_S)
