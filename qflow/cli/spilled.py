"""`qflow spilled`."""

from __future__ import annotations

from pathlib import Path

import attrs
import click

from qflow.cli import facts, options


@click.command(short_help="List what lies in the spill directory.")
@options.existing_spool
@click.argument("queue_name", metavar="[QUEUE]", required=False)
@options.as_json
def spilled(spool: Path, queue_name: str | None, as_json: bool) -> None:
    """List the messages that lie in the spill directory, of all queues or of one.

    A line a message: queue, sequence, size in bytes, path (and +BYTE, where in a segment its block begins); with
    --json, a JSON object a line. What was settled since is listed, too: files that are kept still hold their last
    messages, and segments all they were given since they were filled again; `qflow stats` counts what waits. Beside a
    live owner a file can change while it is read, and then shows a problem that is none. Without an owner, these are
    the remains of the last one: the log has what matters, and the next owner removes them.
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
