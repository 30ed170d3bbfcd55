"""Compares every record of a log with the others, in short transactions, with or without a live owner.

Parts of the log on pages that cannot be read are named as problems; all others are checked.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from qflow.config import spool_path
from qflow.errors import CorruptionError
from qflow.inspect.child import in_child
from qflow.inspect.facts import Examination
from qflow.inspect.logs import opened_log
from qflow.inspect.stream_check import Moments, Readable, as_problems, check_streams
from qflow.storage import last_commit
from qflow.storage.environment import Environment
from qflow.storage.files import Files
from qflow.storage.inbox import batches as sink_batches
from qflow.storage.inbox import stages
from qflow.storage.lock import owner_pid
from qflow.storage.log import bodies, facts, removal
from qflow.storage.log.keys import kept_damaged
from qflow.storage.log.overlay import count_unapplied
from qflow.storage.log.reading import behind_tail, in_words, read_unsettled, verify_plain
from qflow.storage.log.recovery import QueueRecord, Recovery, is_there
from qflow.storage.log.rows import Row, read_row
from qflow.storage.streams import eras, producers

READ_AT_ONCE = 16 * 2**20
BLOCKS_AT_ONCE = 1024
KEYS_AT_ONCE = 65_536


def check_log(env: Environment, found: Recovery, lost: Counter[str]) -> Iterator[str]:
    """Yield one text for each problem; count in `lost` the messages that cannot be read, by queue and stream.

    Cost: reads the whole log once.
    """
    yield from found.problems
    with Moments(env) as moments:
        for record in found.queues:
            for lane, row in (record.rows or {}).items():
                yield from as_problems(check_lane(moments, record, lane, row, lost), f"queue {record.name!r}: ")
        for record in (*found.queues, *found.streams):
            name = f"{record.kind} {record.name!r}"
            looked = _in_transaction(moments, partial(_set_aside, what=f"{name}: damaged block", owner=record.owner))
            yield from as_problems(looked, f"{name}: ")
        looked = _in_transaction(moments, partial(_set_aside, what="damaged shared body", owner=bodies.NOBODY))
        yield from as_problems(looked, "shared bodies: ")
        yield from as_problems(_in_transaction(moments, producers.problems), "producers: ")
        yield from as_problems(_in_transaction(moments, sink_batches.problems), "batches from outside: ")
        yield from as_problems(_in_transaction(moments, eras.problems), "eras: ")
        yield from as_problems(_in_transaction(moments, facts.problems), "facts: ")
        yield from check_streams(moments, found, lost)
    yield from as_problems(check_bodies(env), "shared bodies: ")
    yield from as_problems(_walk(env))


def check_every_page(env: Environment) -> Iterator[str]:
    """Read all pages, those too that say which are free, and that only whoever writes comes by.

    Cost: reads the log once, in one transaction: nothing is freed meanwhile.
    """
    try:
        env.copy_to(None)
    except CorruptionError as error:
        yield str(error)


def _in_transaction(env: Readable, look: Callable[[Any], Iterable[str]]) -> Iterator[str]:
    with env.reading() as txn:
        yield from look(txn)


def _walk(env: Environment) -> Iterator[str]:
    """Read every key once, in all tables, which raises where that is not possible. Cost: 0.2 µs a record."""
    start: bytes | None = b""
    while start is not None:
        with env.reading() as txn, txn.cursor() as cursor:
            found = cursor.set_range(start)
            keys: Iterator[bytes] = islice(cursor.iternext(values=False), KEYS_AT_ONCE) if found else iter(())
            start = None
            for count, key in enumerate(keys, 1):
                start = key + b"\0" if count == KEYS_AT_ONCE else None
    yield from ()


def _set_aside(txn: Any, what: str, owner: int) -> Iterator[str]:
    """Yield a text about what was set aside of an owner; nothing if there is none."""
    found = list(kept_damaged(txn, owner))
    if not found:
        return
    (first, size), *more = found
    if not more:
        yield f"{what} {first} was set aside ({size} bytes)"
        return
    total = sum(size for _, size in found)
    yield f"{what} {first} and {len(more):,} more, the last one {more[-1][0]}, were set aside ({total} bytes)"


def check_bodies(env: Environment) -> Iterator[str]:
    """Compare shared bodies with the references to them, in short transactions; stop if a live owner commits."""
    moment = env.last_transaction()
    counted: Counter[int] = Counter()
    start: bytes | None = b""
    while start is not None:
        with env.reading() as txn:
            part, start = removal.count_references(txn, start, BLOCKS_AT_ONCE)
            counted.update(part)
            problems = [] if start is not None else list(bodies.problems(txn, counted))
    if env.last_transaction() == moment:
        yield from problems


def check_lane(
    env: Readable, record: QueueRecord, lane: int, row: Row, lost: Counter[str] | None = None
) -> Iterator[str]:
    """Check one lane in transactions of a bounded number of blocks; stop early if a live owner commits meanwhile.

    What is missing of a queue that it has deleted is no damage.
    """
    position, messages, size = -1, 0, 0
    expected: int | None = None
    beyond: str | None = None
    while True:
        with env.reading() as txn:
            if not is_there(txn, record.owner):
                return
            now = read_row(txn, record.owner, lane)
            moved = now != row
            if position < 0:
                row, position, moved = now, now.floor, False
                beyond = behind_tail(txn, record.owner, lane, row)
            if moved:
                return  # counts of two states cannot be compared; all that was read is sound
            if not row.marks:
                whole = verify_plain(txn, record.owner, lane, position, row.next, READ_AT_ONCE, expected)
                messages, size = messages + whole.messages, size + whole.bytes
                position, expected = whole.position, whole.last_block
                if whole.messages and position < row.next:
                    continue
            replayed = read_unsettled(txn, record.owner, lane, row, position, row.next, READ_AT_ONCE, expected)
        yield from (f"queue {record.name!r}: {text}" for text, _ in in_words(replayed))
        messages += sum(len(records) for _, records in replayed.pieces)
        size += sum(sum(map(len, records)) for _, records in replayed.pieces)
        position, expected = replayed.position, replayed.last_block
        if position >= row.next:
            break
    if beyond is not None:
        yield f"queue {record.name!r}: {beyond}"
    if (messages, size) != (row.messages, row.bytes):
        if lost is not None and messages < row.messages:
            lost[f"queue {record.name!r}"] += row.messages - messages
        yield (
            f"queue {record.name!r}: the row says {row.messages} messages of {row.bytes} bytes, "
            f"the blocks hold {messages} of {size}"
        )


def check_spool(path: str | os.PathLike[str]) -> list[str]:
    """Return the problems that `examine` finds, one text each."""
    return examine(path).problems


def examine(path: str | os.PathLike[str]) -> Examination:
    """Read every block of the log and compare it with rows, index and cursors.

    Raises:
        NotFound: there is no spool. FormatTooNew, CorruptionError, StorageError: as `qflow.open`.
    Cost: reads the whole log once, in short transactions.
    """
    spool = spool_path(path)
    return in_child(spool, lambda: _examine(spool))


def _examine(spool: str) -> Examination:
    lost: Counter[str] = Counter()
    files = Files()
    with opened_log(spool, readahead=True) as (env, found):
        found_problems = list(check_log(env, found, lost))
        if not found_problems and owner_pid(spool) is None:  # an owner meets those pages itself, and goes on meanwhile
            found_problems += check_every_page(env)
        journal_records = count_unapplied(env, files)
        unusable = last_commit.why_unusable(env.path, files)
    found_problems += [unusable] if unusable is not None else []
    found_problems += [
        f"batch {batch.batch} of query {batch.query} was set aside in {stages.set_aside(spool, batch)}: "
        f"{stages.why_refused(files, spool, batch)}"
        for batch in stages.list_refused(files, spool)
    ]
    return Examination(problems=found_problems, lost=dict(+lost), journal_records=journal_records)
