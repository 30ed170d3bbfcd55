"""`qflow pipe`."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import click

from qflow.cli import options
from qflow.cli.flow import Flow
from qflow.cli.pipe_batch import to_runs
from qflow.cli.pipe_stream import to_command, to_stdout
from qflow.cli.spool import owned, queue_to_fill
from qflow.cli.stop import Stop, Stopped


@click.command(short_help="Buffer stdin durably on its way to a command.")
@options.new_or_old_spool
@options.queue_name
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--batch", type=click.IntRange(min=1), metavar="N", help="Run COMMAND once for every N lines.")
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="With --batch: how often a run that failed is repeated before giving up.",
)
@options.delimiter
@options.capacity
@options.spill
@options.as_json
def pipe(
    spool: Path,
    queue_name: str,
    command: tuple[str, ...],
    batch: int | None,
    retries: int,
    delimiter: bytes,
    capacity: int,
    spill: str,
    as_json: bool,
) -> int | None:
    """Buffer stdin durably in QUEUE on its way to COMMAND's stdin, or to stdout.

    \b
        producer | qflow pipe SPOOL QUEUE | consumer
        producer | qflow pipe SPOOL QUEUE -- consumer --its-option
        producer | qflow pipe SPOOL QUEUE --batch 500 -- load-into-database

    The producer waits for the consumer only at a limit of the queue or on a full disk. What an earlier run left in the
    queue goes out first. It ends when stdin has ended and the queue is empty; a summary goes to stderr.

    A line is safe once it is synced in QUEUE, which happens as fast as lines arrive, for all that are there at once.

    When a line is acked, and so never goes out again:

    \b
    - without --batch: once it is written; if that is to a pipe (COMMAND's stdin
      always is), once the other end has taken it out of the pipe (Linux). What
      lay in the pipe when the other end died stays in the queue.
    - with --batch N: when the run of COMMAND that got it on stdin has exited
      with 0. A run gets N lines, fewer at the end of stdin, or as many as fit
      into --capacity. A run that fails is repeated with the same lines,
      --retries times, after 0.2 s, 0.4 s, 0.8 s and so on; if the last one
      fails, they go back to their place in the queue.

    When COMMAND fails for good, or leaves before it was given everything, the lines read from stdin so far are stored
    and qflow exits with 5; the next run continues with the first line not acked. The first SIGINT, SIGTERM or SIGHUP
    stores what was read and lets COMMAND finish with what it has: it runs in a process group of its own, so Ctrl-C does
    not reach it. A second signal ends COMMAND. After SIGKILL or a power cut, lines that were synced and not acked go
    out again: at least once, in order.
    """
    if batch and not command:
        raise click.UsageError("--batch needs a COMMAND to run")
    if command and shutil.which(command[0]) is None:
        raise click.UsageError(f"there is no command {command[0]!r}")
    with Stop() as stop, owned(spool, capacity, None, spill=spill) as broker:
        flow = Flow(queue_to_fill(broker, queue_name), delimiter, stop)
        try:
            with suppress(Stopped), ThreadPoolExecutor(1) as threads:
                flow.start(threads)
                try:
                    _send(flow, command, batch, retries)
                finally:
                    stop.request()
            flow.finish()
        finally:
            _print(flow, as_json)
        return stop.exit_code


def _send(flow: Flow, command: tuple[str, ...], batch: int | None, retries: int) -> None:
    if batch:
        to_runs(flow, command, batch, retries)
    elif command:
        to_command(flow, command)
    else:
        to_stdout(flow)


def _print(flow: Flow, as_json: bool) -> None:
    left = len(flow.queue)
    if as_json:
        summary = {"queue": flow.queue.name, "found": flow.found, "stored": flow.stored}
        click.echo(json.dumps({**summary, "delivered": flow.delivered, "left": left}), err=True)
    else:
        click.echo(
            f"qflow: {flow.found:,} lines found, {flow.stored:,} stored, {flow.delivered:,} delivered, {left:,} left",
            err=True,
        )
