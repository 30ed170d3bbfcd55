"""What a command would do, for `--dry-run`: nothing is taken for it, and nothing is changed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qflow.config import parse_size
from qflow.errors import InvalidArgument, NotFound
from qflow.names import choices

if TYPE_CHECKING:
    from qflow.inspect import MessageFacts, QueueFacts
    from qflow.message import Record

dry_run = click.option("--dry-run", is_flag=True, help="Change nothing; say what would happen.")


def redrive(spool: Path, name: str, to: str | None, limit: int | None) -> tuple[dict[str, int], dict[str, int]]:
    """Return how many messages of a durable queue would go to which queue, and how many stay for which reason.

    As the log has it: what a consumer holds is counted in, though it stays.

    Raises:
        NotFound: one of the queues is not there.
    """
    from qflow import inspect
    from qflow.amqp.letters import reviving

    queues = {queue.name: queue for queue in inspect.read_spool(spool).queues}
    for needed in (name, *([] if to is None else [to])):
        if needed not in queues:
            raise NotFound(f"there is no durable queue {needed!r} in {spool}; {choices(needed, queues)}")
    if to == name:
        raise InvalidArgument(f"messages of queue {name!r} cannot be moved to itself")
    revive = reviving(name, to)
    moved: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    positions: dict[int, int] | None = None
    while limit is None or sum(moved.values()) < limit:
        page = inspect.read_page(spool, name, positions)
        for message in page.messages:
            if limit is not None and sum(moved.values()) >= limit:
                break
            origin, record = revive(_record(message))
            target = to or origin
            reason = _obstacle(name, target, record, queues, moved)
            if reason is None and target is not None:
                moved[target] += 1
            else:
                kept[reason or ""] += 1
        positions = page.positions
        if not page.more:
            break
    return dict(moved), dict(kept)


def _record(message: MessageFacts) -> Record:
    from qflow.message import Message, encode_headers

    return Message(message.body, encode_headers(message.headers), topic=message.topic)


def _obstacle(
    name: str, target: str | None, record: Record, queues: dict[str, QueueFacts], moved: Counter[str]
) -> str | None:
    if target is None:
        return "no dead letter: nothing says where it came from"
    if target == name:
        return f"it came from queue {target!r} itself"
    if target not in queues:
        return f"queue {target!r}, where it came from, is gone, or not durable"
    queue = queues[target]
    if len(record) > parse_size(queue.settings["max_message_bytes"], "max_message_bytes"):
        return f"queue {target!r} does not take messages of its size any more"
    limit = queue.settings["limit_messages"]
    if limit is not None and queue.messages + moved[target] >= limit:
        return f"queue {target!r} is at its limit"
    return None
