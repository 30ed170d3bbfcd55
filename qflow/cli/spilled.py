"""`qflow spilled`."""

from __future__ import annotations

from pathlib import Path

import attrs
import click

from qflow.cli import facts, options


@click.command()
@options.existing_spool
@click.argument("queue_name", metavar="[QUEUE]", required=False, shell_complete=options.queues)
@options.as_json
def spilled(spool: Path, queue_name: str | None, as_json: bool) -> None:
    """List the messages that lie in the spill directory, of all queues or of one.

    A line a message: queue, sequence, size in bytes, path (and +BYTE, where in a segment its block begins); with
    --json, a JSON object a line. Messages settled since are listed, too: files kept for reuse still hold their last
    messages, and segments all messages since they were reused; `qflow stats` counts those that wait. With a live owner
    a file can change while it is read, and then shows a problem that does not exist. Without an owner, the files are
    left by the last one: the log has all that matters, and the next owner removes them.

    \b
    Examples:
      qflow spilled spool jobs
    """
    from qflow import inspect

    for found in inspect.spilled(spool, queue_name):
        if as_json:
            facts.print_json(attrs.asdict(found))
        else:
            queue = "?" if found.queue is None else facts.readable(found.queue)
            sequence = "?" if found.sequence is None else found.sequence
            problem = f"  ({found.problem})" if found.problem else ""
            place = f"+{found.position}" if found.position else ""
            click.echo(f"{queue}  {sequence}  {found.size_bytes}  {found.file}{place}{problem}")
