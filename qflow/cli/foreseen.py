"""What a command would do, for `--dry-run`: nothing is taken for it, and nothing is changed.

An owner that answers is asked; else the log is read, which has what is durable, and which nobody opens for that.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qflow.cli import messages
from qflow.cli.spool import asked_if_there, existing_queue, existing_stream, named
from qflow.config import QueueSettings, StreamSettings, parse_size
from qflow.errors import CorruptionError, InvalidArgument
from qflow.names import command

if TYPE_CHECKING:
    from qflow.inspect import MessageFacts, QueueFacts
    from qflow.message import Record

dry_run = click.option("--dry-run", is_flag=True, help="Change nothing; say what would happen.")


def redrive(
    spool: Path, name: str, to: str | None, limit: int | None, keep: Callable[[MessageFacts], bool] | None = None
) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """Return how many messages of a durable queue would go to which queue, how many stay for which reason, and why
    some of them cannot be read. Those alone of which `keep` is true, if it is given.

    As the log has it: what a consumer holds is counted in, though it stays. What has expired is neither.

    Raises:
        NotFound: one of the queues is not there.
    """
    from qflow import inspect
    from qflow.amqp.letters import reviving
    from qflow.message import Message, encode_headers
    from qflow.queues.redrive import NOT_DUE

    now_ms = time.time() * 1000
    found = inspect.read_spool(spool)
    queues = {queue.name: queue for queue in found.queues}
    for needed in (name, *([] if to is None else [to])):
        named(spool, needed, "durable queue", queues, streams=[stream.name for stream in found.streams])
    if to == name:
        raise InvalidArgument(f"messages of queue {name!r} cannot be moved to itself")
    revive = reviving(name, to)
    moved: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    problems: list[str] = []
    for message in _messages(spool, name, problems, keep):
        if 0 < message.expires_ms <= now_ms:
            continue
        if message.due_ms > now_ms:
            kept[NOT_DUE] += 1
            continue
        headers = encode_headers(message.headers)
        origin, record = revive(Message(message.body, headers, topic=message.topic))
        target = to or origin
        reason = _obstacle(name, target, record, queues, moved)
        if reason is None and target is not None:
            moved[target] += 1
        else:
            kept[reason or ""] += 1
        if limit is not None and sum(moved.values()) >= limit:
            break
    if limit is not None and sum(moved.values()) >= limit:
        kept.pop(NOT_DUE, None)  # nobody looks whether there are
    return dict(moved), dict(kept), problems


def _messages(
    spool: Path, name: str, problems: list[str], keep: Callable[[MessageFacts], bool] | None
) -> Iterator[MessageFacts]:
    """Yield what a queue holds, or what of it is to be kept, and note what of it cannot be read."""
    for page in messages.pages(spool, name, keep=keep):
        problems += page.problems
        yield from page.messages


def depth(spool: Path, name: str, kind: str = "queue") -> tuple[int, int | None]:
    """Return how many messages are in a queue or stream, and how many of them consumers hold; None: nobody tells.

    Raises:
        NotFound: there is no such queue, or stream.
    """
    from qflow import inspect

    with asked_if_there(spool) as owner:
        if owner is not None and kind == "queue":
            queue = existing_queue(owner, name)
            return len(queue), queue.stats().acquired_messages
        if owner is not None:
            return existing_stream(owner, name).stats().messages, 0
    listing = inspect.list_spool(spool)
    entries = {entry.name: entry for entry in listing.entries if entry.kind == kind}
    others = [entry.name for entry in listing.entries if entry.kind != kind]
    found = named(spool, name, kind, entries, **{"streams" if kind == "queue" else "queues": others})
    if found.messages is None:
        raise CorruptionError(f"a row of {kind} {name!r} is damaged: {command('check', str(spool))} tells more")
    return found.messages, 0 if listing.owner_pid is None else found.held_messages


def waiting(spool: Path, name: str, sequences: Iterable[int]) -> set[int]:
    """Return which of some messages wait in a queue; from the log, those that a consumer holds are among them."""
    wanted = set(sequences)
    with asked_if_there(spool) as owner:
        if owner is not None:
            return wanted & {entry.sequence for entry in existing_queue(owner, name).browse()}
    pages = messages.pages(spool, name, keep=lambda one: one.sequence in wanted, body_bytes=0)
    return {message.sequence for page in pages for message in page.messages}


def altered_queue(spool: Path, name: str, changes: dict[str, Any]) -> tuple[QueueSettings, int, int]:
    """Return the settings of a queue as they are, how many messages it has, and their bytes.

    Raises:
        NotFound: there is no such queue. InvalidArgument: they cannot be changed so.
    """
    from qflow import inspect

    with asked_if_there(spool) as owner:
        if owner is not None:
            queue = existing_queue(owner, name)
            names = set(owner.queues())
            _alter(name, queue.settings, changes, lambda other: owner.queue(other).settings if other in names else None)
            stats = queue.stats()
            return queue.settings, stats.messages, stats.bytes
    read = inspect.read_spool(spool)
    queues = {queue.name: queue for queue in read.queues}
    found = named(spool, name, "queue", queues, streams=[stream.name for stream in read.streams])
    before = QueueSettings.from_dict(found.settings)
    _alter(
        name,
        before,
        changes,
        lambda other: QueueSettings.from_dict(queues[other].settings) if other in queues else None,
    )
    return before, found.messages, found.bytes


def _alter(
    name: str, before: QueueSettings, changes: dict[str, Any], settings_of: Callable[[str], QueueSettings | None]
) -> None:
    from qflow.queues.dead_letters import check_durable, check_no_cycle
    from qflow.queues.tending import altered

    def target_of(queue: str) -> str | None:
        found = settings_of(queue)
        return None if found is None else found.dead_letter

    after = altered(before, changes)
    check_no_cycle(name, after.dead_letter, target_of)
    if after.dead_letter is not None and (target := settings_of(after.dead_letter)) is not None:
        check_durable(name, after, target)


def altered_stream(spool: Path, name: str, changes: dict[str, Any]) -> StreamSettings:
    """Return the settings of a stream as they are. Raises InvalidArgument: they cannot be changed so."""
    from qflow import inspect
    from qflow.streams.registry import altered

    with asked_if_there(spool) as owner:
        before = None if owner is None else existing_stream(owner, name).settings
    if before is None:
        read = inspect.read_spool(spool)
        streams = {stream.name: stream for stream in read.streams}
        found = named(spool, name, "stream", streams, queues=[queue.name for queue in read.queues])
        before = StreamSettings.from_dict(found.settings)
    altered(before, changes)
    return before


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
