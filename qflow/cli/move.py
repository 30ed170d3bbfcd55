"""`qflow move`."""

from __future__ import annotations

from pathlib import Path

import click

from qflow.cli import asking, facts, foreseen, messages, options
from qflow.cli.redrive import Errand


@click.command()
@options.existing_spool
@options.queue_name
@click.argument("to", metavar="TO", shell_complete=options.queues)
@click.option("--limit", "--max", "limit", type=click.IntRange(min=1), help="Move at most so many.")
@messages.where
@asking.yes
@foreseen.dry_run
@options.capacity
@options.as_json
def move(
    spool: Path,
    queue_name: str,
    to: str,
    limit: int | None,
    conditions: tuple[str, ...],
    is_sure: bool,
    dry_run: bool,
    capacity: int,
    as_json: bool,
) -> int:
    """Move the messages of QUEUE to the queue TO, in order, also while another process owns the spool.

    Each commit moves up to a hundred, so a message is always in one queue or in the other. It keeps its body, topic,
    key, headers, priority (the highest of TO at most) and the moment at which it expires, unless it expires in TO
    before; its deliveries are counted anew. A dead letter is put as `qflow redrive` does.

    What a consumer holds is not moved. A message stays if it is not due yet, or if TO is at its limit or takes none of
    that size; how many stay, and why, is printed. An owner is asked for some hundreds at a time: after Ctrl-C it ends
    with those, which are printed as not known.

    At a terminal it asks, without --yes. With --dry-run it reads the log, which has durable messages alone, and
    counts what consumers hold as if it were moved. With --where it looks there for what it moves, so no transient
    message is found.

    \b
        qflow move SPOOL jobs jobs.later --dry-run
        qflow move SPOOL jobs jobs.later --limit 100
        qflow move SPOOL jobs jobs.acme --where tenant=acme
    """
    errand = Errand(spool, queue_name, to, limit, conditions, capacity, as_json)
    return errand.foresee() if dry_run else errand.do(is_sure, facts.readable(to))
