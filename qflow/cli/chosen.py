"""Messages that a verb is about, and no others: those with some headers, by `--where`, or of some sequences."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import click

from qflow.cli import facts, messages
from qflow.cli.progress import counting
from qflow.cli.spool import AnyQueue

AT_ONCE = 500
"""Asked of an owner at once: it goes on with so many when the command is interrupted."""


@attrs.define
class Chosen:
    """What of a queue is wanted."""

    sequences: list[int] = attrs.field(factory=list)
    later: int = 0
    """How many of those are left out that are not due yet."""
    problems: list[str] = attrs.field(factory=list)
    """Why some messages cannot be read."""


def choose(spool: Path, queue_name: str, conditions: Sequence[str], *, due: bool) -> Chosen:
    """Return the messages of a durable queue that have these headers, as the log has them, without what has expired.

    Nobody may have opened the spool in this process. What a consumer holds is among them.

    Args:
        due: leave out those that are not due yet.

    Raises:
        NotFound: there is no such queue.
    """
    chosen = Chosen()
    now_ms = time.time() * 1000
    with counting("looking", None) as advance:
        for page in messages.pages(spool, queue_name, keep=messages.wanted(conditions), body_bytes=0):
            for message in page.messages:
                if 0 < message.expires_ms <= now_ms:
                    continue
                if due and message.due_ms > now_ms:
                    chosen.later += 1
                else:
                    chosen.sequences.append(message.sequence)
            chosen.problems += page.problems
            advance(page.looked_at)
    return chosen


def delete(queue: AnyQueue, sequences: Sequence[int], json_key: str | None) -> set[int]:
    """Delete messages that wait, and print how many, in JSON under `json_key`, whatever happens; return which."""
    deleted: set[int] = set()
    in_doubt = 0
    try:
        for start in range(0, len(sequences), AT_ONCE):
            some = sequences[start : start + AT_ONCE]
            in_doubt = len(some)
            deleted.update(queue.delete_many(some))
            in_doubt = 0
    finally:
        if json_key is not None:
            doubt = {"in_doubt": in_doubt} if in_doubt else {}
            left = len(sequences) - len(deleted) - in_doubt
            facts.print_json({"queue": queue.name, json_key: len(deleted), "left": left, **doubt})
        else:
            click.echo(f"messages deleted from {facts.readable(queue.name)}: {len(deleted):,}")
            if in_doubt:
                click.echo(f"not known of up to {in_doubt:,} more: they were being deleted when this ended")
    return deleted
