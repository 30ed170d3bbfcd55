"""`qflow delete`."""

from __future__ import annotations

from pathlib import Path

import click

from qflow.cli import asking, facts, foreseen, options
from qflow.cli.spool import existing_queue, reached_if_there
from qflow.errors import NotFound
from qflow.names import choices


@click.command(short_help="Delete a queue, or a stream.")
@options.existing_spool
@click.argument("name", metavar="NAME")
@click.option("--stream", "is_stream", is_flag=True, help="NAME is a stream.")
@asking.yes
@foreseen.dry_run
@options.capacity
def delete(spool: Path, name: str, is_stream: bool, is_sure: bool, dry_run: bool, capacity: int) -> None:
    """Delete the queue NAME with all its messages, also while another process owns the spool.

    With --stream, the stream NAME, with its messages and subscriptions. Whoever waits for its messages gets an error.
    Without --yes it asks, at a terminal.

    \b
        qflow delete SPOOL jobs.old --dry-run
        qflow delete SPOOL plant --stream --yes
    """
    kind = "stream" if is_stream else "queue"
    with reached_if_there(spool, capacity) as broker:
        if is_stream:
            if name not in broker.streams():
                raise NotFound(f"there is no stream {name!r} in {broker.path}; {choices(name, broker.streams())}")
            count = broker.stream(name).stats().messages
        else:
            count = len(existing_queue(broker, name))
        if dry_run:
            click.echo(f"would delete the {kind} {facts.readable(name)}, with {facts.counted(count, 'message')}")
            return
        question = f"Delete the {kind} {facts.readable(name)} with {facts.counted(count, 'message')}?"
        asking.make_sure(is_sure, question)
        if is_stream:
            broker.delete_stream(name)
        else:
            broker.delete_queue(name)
    click.echo(f"{kind} {facts.readable(name)} deleted, with {facts.counted(count, 'message')}")
