"""Checks the streams of a log: blocks, rows, the index of topics, and cursors, compared with each other.

Transactions are short, so that a live owner can go on; its changes meanwhile are never taken for damage.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

from qflow.errors import CorruptionError
from qflow.inspect.stream_facts import rows_of
from qflow.message import offset_of
from qflow.storage.environment import Environment
from qflow.storage.log import recovery
from qflow.storage.log.marks import count_marks
from qflow.storage.log.reading import behind_tail
from qflow.storage.log.recovery import QueueRecord, Recovery
from qflow.storage.log.rows import Row, read_row, read_rows
from qflow.storage.streams import partitions
from qflow.storage.streams.partitions import Hole
from qflow.storage.topics.check import IndexCheck

SHARED_S = 0.05
"""A transaction that is older is not given to another look: it pins what is freed meanwhile."""
_READ_AT_ONCE = 16 * 2**20


class Readable(Protocol):
    """An environment, or `Moments` of one."""

    def reading(self) -> AbstractContextManager[Any]:
        """Give a transaction that reads one moment."""


class Moments:
    """Transactions that many looks at a log share: to begin one takes longer than a look, more so beside a busy owner.

    A context, in which one look after the other is made, by one thread.
    """

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._open: ExitStack | None = None
        self._txn: Any = None
        self._since_s = 0.0

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """Give a transaction for a look, as that of the environment, which may be that of the look before."""
        if self._open is None or time.monotonic() - self._since_s >= SHARED_S:
            self._end()
            begun = ExitStack()
            self._txn = begun.enter_context(self._env.reading())
            self._open, self._since_s = begun, time.monotonic()
        try:
            yield self._txn
        except BaseException:
            failed, self._open = self._open, None
            if failed is None or not failed.__exit__(*sys.exc_info()):  # which puts errors of LMDB into words
                raise

    def _end(self) -> None:
        ended, self._open = self._open, None
        if ended is not None:
            ended.close()

    def __enter__(self) -> Moments:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()


def check_streams(env: Readable, found: Recovery, lost: Counter[str]) -> Iterator[str]:
    """Yield one text for each problem; count in `lost` the messages that cannot be read, by stream.

    Cost: reads each stream once, and its index.
    """
    streams = {record.owner: record for record in found.streams if not record.deleted}
    for record in streams.values():
        if record.rows is None:
            continue  # recovery has named it
        name = f"stream {record.name!r}"
        for number in range(record.settings["partitions"]):
            holes: list[Hole] = []
            problems = list(as_problems(_check_partition(env, record.owner, number, holes)))
            lost[name] += sum(hole.end - hole.start for hole in holes)
            for problem in [*_in_words(holes), *problems]:
                yield f"{name}, partition {number}: {problem}"
        for problem in as_problems(_check_index(env, record)):
            yield f"{name}: {problem}"
    for cursor in found.cursors:
        stream = streams.get(cursor.settings["stream"])
        if not cursor.deleted and cursor.rows is not None and stream is not None and stream.rows is not None:
            for problem in as_problems(_check_cursor(env, cursor, stream)):
                yield f"subscription {cursor.name!r} of stream {stream.name!r}: {problem}"


def _in_words(holes: list[Hole]) -> Iterator[str]:
    """Yield a text for each hole; holes in a row with the same reason are one."""
    start = 0
    for index, hole in enumerate(holes):
        following = holes[index + 1] if index + 1 < len(holes) else None
        if following is not None and (following.start, _reason(following)) == (hole.end, _reason(hole)):
            continue
        first, count = holes[start], index - start + 1
        where = f"offsets {offset_of(first.start)} to {offset_of(hole.end - 1)}, {count} blocks: {_reason(hole)}"
        yield first.problem if count == 1 else where
        start = index + 1


def _reason(hole: Hole) -> str:
    return hole.problem.partition(": ")[2]


def as_problems(problems: Iterable[str], where: str = "") -> Iterator[str]:
    """Yield problems; if the log cannot be read on, that is one, too, and the last."""
    try:
        yield from problems
    except CorruptionError as error:
        yield f"{where}{error}"


def _check_partition(env: Readable, owner: int, number: int, holes: list[Hole]) -> Iterator[str]:
    """Read all blocks from the floor to the end the partition had at first, and compare them with the row.

    Ranges that cannot be read are added to `holes`.
    """
    messages = size = 0
    position = end = -1
    before = Row()
    beyond: str | None = None
    while position < end or position < 0:
        with env.reading() as txn:
            if not recovery.is_there(txn, owner):
                return
            row = read_row(txn, owner, number)
            if position < 0:
                before, position, end = row, row.floor, row.next
                beyond = behind_tail(txn, owner, number, row)
            position = max(position, row.floor)
            query = partitions.Query(owner, number, position, end, _READ_AT_ONCE)
            read = partitions.read(txn, query) if position < end else None
        if read is not None:
            if read.hole is not None:
                holes.append(read.hole)
                before = Row()  # counts cannot be compared
            messages += sum(len(piece.records) for piece in read.pieces)
            size += sum(piece.size for piece in read.pieces)
            position = read.position
    if row == before and beyond is not None:
        yield beyond
    if row == before and (messages, size) != (row.messages, row.bytes):
        yield f"the row says {row.messages} messages of {row.bytes} bytes, the blocks hold {messages} of {size}"


def _check_index(env: Readable, record: QueueRecord) -> Iterator[str]:
    """Check the index step by step; stop if the owner rebuilds it, or deletes the stream, meanwhile."""
    check = IndexCheck(record.owner)
    more = True
    while more:
        with env.reading() as txn:
            more = recovery.is_there(txn, record.owner) and check.step(txn)
        yield from check.take_problems()


def _check_cursor(env: Readable, cursor: QueueRecord, stream: QueueRecord) -> Iterator[str]:
    """Compare the position of a subscription with the stream, and the count of its marks with the marks."""
    count = stream.settings["partitions"]
    with env.reading() as txn:
        if not (recovery.is_there(txn, cursor.owner) and recovery.is_there(txn, stream.owner)):
            return
        ends = [read_row(txn, stream.owner, number).next for number in range(count)]
        rows = rows_of(cursor._replace(rows=read_rows(txn, cursor.owner)), count)
        for number, (row, end) in enumerate(zip(rows, ends, strict=True)):
            if row.floor > end:
                yield (
                    f"in partition {number} it is settled up to {offset_of(row.floor)}, where the stream ends with "
                    f"{offset_of(end)}"
                )
            marks = count_marks(txn, cursor.owner, number, row.floor)
            if marks != row.marks:
                yield (
                    f"in partition {number} the row says that {row.marks} windows or ranges are settled out of order, "
                    f"found {marks}"
                )
