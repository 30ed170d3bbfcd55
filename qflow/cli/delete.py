"""`qflow delete`."""

from __future__ import annotations

from itertools import filterfalse
from pathlib import Path

import click

from qflow.cli import asking, chosen, facts, foreseen, options
from qflow.cli.exits import Exit
from qflow.cli.spool import AnyBroker, AnyQueue, existing_queue, existing_stream, reached_if_there
from qflow.cli.standard import complain


@click.command()
@options.existing_spool
@click.argument("name", metavar="NAME", shell_complete=options.queues)
@click.option("--stream", "is_stream", is_flag=True, help="NAME is a stream.")
@click.option(
    "--sequence",
    "sequences",
    metavar="N",
    type=click.IntRange(min=0),
    multiple=True,
    help="Delete this message of the queue, and nothing else; may be given several times.",
)
@asking.yes
@foreseen.dry_run
@options.capacity
@options.as_json
def delete(
    spool: Path,
    name: str,
    is_stream: bool,
    sequences: tuple[int, ...],
    is_sure: bool,
    dry_run: bool,
    capacity: int,
    as_json: bool,
) -> int:
    """Delete the queue NAME with all its messages, also while another process owns the spool.

    With --stream, the stream NAME, with its messages and subscriptions. Whoever waits for its messages gets an error.
    Without --yes it asks, at a terminal.

    With --sequence, that message of the queue alone, if it waits: what a consumer holds stays. Exits with 1 if one does
    not wait, and names it. `qflow peek` and `qflow grep` show sequences. --json says how many messages are deleted.

    --dry-run asks the owner; if none answers, it reads the log, which has durable queues alone, and counts what
    consumers hold as if it waited.

    \b
        qflow delete SPOOL jobs.old --dry-run
        qflow delete SPOOL plant --stream --yes
        qflow delete SPOOL jobs --sequence 7 --sequence 12
    """
    if sequences and is_stream:
        raise click.UsageError("--sequence is for queues: what a stream retains goes by its retention")
    kind = "stream" if is_stream else "queue"
    if dry_run:
        return _foresee(spool, name, kind, list(dict.fromkeys(sequences)), as_json)
    if not is_sure:
        with reached_if_there(spool, capacity) as broker:
            count = _depth(broker, name, is_stream)
        what = f"the {kind} {facts.readable(name)} with {facts.counted(count, 'message')}"
        if sequences:
            what = f"{facts.counted(len(set(sequences)), 'message')} of the queue {facts.readable(name)}"
        asking.make_sure(is_sure, f"Delete {what}?")
    with reached_if_there(spool, capacity) as broker:
        if sequences:
            return _delete_messages(existing_queue(broker, name), list(dict.fromkeys(sequences)), as_json)
        count = _depth(broker, name, is_stream)
        if is_stream:
            broker.delete_stream(name)
        else:
            broker.delete_queue(name)
    if as_json:
        facts.print_json({kind: name, "deleted": count})
    else:
        click.echo(f"{kind} {facts.readable(name)} deleted, with {facts.counted(count, 'message')}")
    return Exit.FINE


def _foresee(spool: Path, name: str, kind: str, sequences: list[int], as_json: bool) -> int:
    """Print what would be deleted."""
    waiting = foreseen.waiting(spool, name, sequences) if sequences else set()
    count = len(waiting) if sequences else foreseen.depth(spool, name, kind)[0]
    if as_json:
        facts.print_json({kind: name, "would_delete": count})
    elif sequences:
        click.echo(f"would delete {facts.counted(count, 'message')} of the queue {facts.readable(name)}")
    else:
        click.echo(f"would delete the {kind} {facts.readable(name)}, with {facts.counted(count, 'message')}")
    return _tell_of_left(name, sequences, waiting)


def _depth(broker: AnyBroker, name: str, is_stream: bool) -> int:
    """Return how many messages are in a queue or stream. Raises NotFound: it is not there."""
    return existing_stream(broker, name).stats().messages if is_stream else len(existing_queue(broker, name))


def _delete_messages(queue: AnyQueue, sequences: list[int], as_json: bool) -> int:
    """Delete messages that wait, and name those that do not."""
    return _tell_of_left(queue.name, sequences, chosen.delete(queue, sequences, "deleted" if as_json else None))


def _tell_of_left(name: str, sequences: list[int], gone: set[int]) -> int:
    """Name the messages that did not wait; return the exit code."""
    left = list(map(str, filterfalse(gone.__contains__, sequences)))
    if left:
        complain(f"not waiting in {facts.readable(name)}, and left alone: {', '.join(left)}")
    return Exit.DIFFERS if left else Exit.FINE
