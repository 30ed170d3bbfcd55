"""`qflow pipe` without --batch: lines run into one command, or to stdout."""

from __future__ import annotations

from collections.abc import Sequence

from qflow.cli.flow import CommandFailed, Flow, how_it_ended, started
from qflow.cli.outlet import Outlet
from qflow.cli.stop import Stop, Stopped

BATCH_LINES = 1000
STDOUT = 1
_UNREAD_CHECK_S = 0.01


def to_stdout(flow: Flow) -> None:
    """Write lines to stdout until stdin has ended and everything was taken.

    Raises:
        BrokenPipeError: the reader is gone.
        Stopped: asked to stop.
    """
    outlet = Outlet(STDOUT, flow.delimiter, flow.stop)
    try:
        _copy(flow, outlet)
    finally:
        outlet.settle()
        outlet.settle_lines()
        flow.delivered = outlet.acked


def to_command(flow: Flow, command: Sequence[str]) -> None:
    """Write lines to the stdin of a command, then wait for its end.

    Raises:
        CommandFailed: it failed, or left before it was given everything.
        Stopped: asked to stop.
    """
    left_early = stopped = False
    with started(command) as process:
        assert process.stdin is not None
        outlet = Outlet(process.stdin.fileno(), flow.delimiter, flow.stop)
        try:
            _copy(flow, outlet)
        except BrokenPipeError:
            left_early = True
        except Stopped:
            stopped = True
        finally:
            outlet.settle()
            process.stdin.close()
        status = process.wait()
    outlet.settle_lines(everything_was_read=status == 0 and not left_early)
    flow.delivered = outlet.acked
    if left_early or status != 0:
        early = " before it was given everything" if left_early else ""
        raise CommandFailed(f"{command[0]} {how_it_ended(status)}{early}; what it did not read is in the queue")
    if stopped:
        raise Stopped


def _copy(flow: Flow, outlet: Outlet) -> None:
    while True:
        batch = flow.take(BATCH_LINES, _UNREAD_CHECK_S if outlet.pending else Stop.PATIENCE_S)
        if batch:
            outlet.send(batch)
        elif batch is not None:
            outlet.settle()
            outlet.check()
        elif outlet.pending:  # what the reader has not taken may be all that fits into the capacity
            outlet.wait()
        else:
            return
