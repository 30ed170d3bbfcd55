"""Messages of a durable queue, as the log has them: one, or all, page by page, as many as a process holds at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from typing import Any, TypeVar

import attrs

from qflow.config import spool_path
from qflow.errors import CorruptionError, NotFound
from qflow.inspect.child import in_child
from qflow.inspect.facts import MessageFacts, QueueFacts
from qflow.inspect.logs import as_now, opened_environment, queue_of
from qflow.message import DELAYED, LANE_SHIFT, Message, Record, body_of, decode_headers, lane_of
from qflow.storage import blocks
from qflow.storage.blocks import BlockKey
from qflow.storage.environment import Environment
from qflow.storage.log import recovery
from qflow.storage.log.keys import BLOCKS, LAST_LANE, scan
from qflow.storage.log.marks import is_settled
from qflow.storage.log.reading import find_message, in_words, read_unsettled
from qflow.storage.log.recovery import QueueRecord
from qflow.storage.log.rows import Row
from qflow.storage.log.table import number_of

READ_BYTES = 256 * 1024
"""Read at once, or one block."""


def unsettled(txn: Any, record: QueueRecord) -> Iterator[tuple[int, Record]]:
    """Yield sequence and record of what nobody has settled, those of high priority first."""
    for lane, row in sorted((record.rows or {}).items(), key=lambda row: (row[0] >= DELAYED, -row[0])):
        position, expected = row.floor, None
        while position < row.next:
            read = read_unsettled(txn, record.owner, lane, row, position, row.next, READ_BYTES, expected)
            for first, records in read.pieces:
                yield from enumerate(records, first)
            position, expected = read.position, read.last_block


Result = TypeVar("Result")
PAGE_BYTES = 16 * 2**20
"""Of the log, that a page is made of; about so much of it may be in memory."""
MESSAGE_BYTES = 1024
"""What a message of a page takes in memory beside its body: a page has no more small ones than fit."""
Keep = Callable[[MessageFacts], bool]


@attrs.define
class Page:
    """Some messages of a queue, and where the next page begins."""

    positions: dict[int, int]
    """By lane: what is below was looked at."""
    number: int | None = None
    """That of the queue: see `QueueFacts`."""
    messages: list[MessageFacts] = attrs.field(factory=list)
    looked_at: int = 0
    """Messages that were read, kept or not."""
    problems: list[str] = attrs.field(factory=list)
    more: bool = False
    """Something was left that was there."""


def read_message(path: str | os.PathLike[str], queue: str, sequence: int) -> MessageFacts:
    """Return one message of a durable queue from the log, settled or not, as long as its block is there.

    Raises:
        NotFound: no such queue, or the log does not hold the message (any more).
        CorruptionError: its block is damaged.
    """
    return _in_queue(spool_path(path), queue, lambda txn, record: _message(txn, record, sequence))


def _message(txn: Any, record: QueueRecord, sequence: int) -> MessageFacts:
    lane = lane_of(sequence)
    message: Record | None = None
    settled = False
    rows = record.rows or {min(lane, LAST_LANE): Row()}  # a damaged row does not prevent a look
    if lane in rows:
        settled = is_settled(txn, record.owner, lane, rows[lane], sequence)
        with suppress(NotFound):
            message, time_ms = find_message(txn, record.owner, lane, sequence)
    if message is None or (settled and not message):
        where = "it was settled and its bytes are gone" if settled else "it was never logged"
        raise NotFound(f"message {sequence} of queue {record.name!r} is not in the log: {where}")
    return attrs.evolve(_facts(record.name, sequence, message, time_ms), settled=settled)


def read_page(
    path: str | os.PathLike[str],
    queue: str,
    positions: Mapping[int, int] | None = None,
    *,
    keep: Keep | None = None,
    most: int | None = None,
    body_bytes: int | None = None,
    number: int | None = None,
) -> Page:
    """Return the next messages of a durable queue that nobody settled: high priority first, delayed ones at the end.

    Args:
        positions: of the page before; None = from the beginning.
        keep: tells which messages are returned; it runs in another process.
        most: ends a page with so many messages.
        body_bytes: bodies are cut to so many; None = they are whole.
        number: of the page before, or of `QueueFacts`; None, or that of another queue = it is looked for by its name.

    Raises:
        NotFound: there is no spool, or no such queue. FormatTooNew, CorruptionError, StorageError: as `qflow.open`.
    Cost: a child process, 10 µs a message, and 50 µs for each queue and subscription of the spool without the number.
    """

    def read(txn: Any, record: QueueRecord) -> Page:
        known = positions if positions and number in (None, record.owner) else {}
        return _Reading(txn, record, Page(dict(known), record.owner), keep, most, body_bytes).run()

    return _in_queue(spool_path(path), queue, read, number)


def read_first_pages(
    path: str | os.PathLike[str], queues: Sequence[QueueFacts], *, keep: Keep | None = None, most: int | None = None
) -> list[Page]:
    """Return the first page of each of the first of these queues: as many as are together no larger than one page.

    That of a queue which was deleted meanwhile is empty. See `read_page`.

    Cost: one child process for all of them.
    """
    spool = spool_path(path)

    def read() -> list[Page]:
        pages: list[Page] = []
        left_bytes = PAGE_BYTES
        with opened_environment(spool) as env:
            for queue in queues:
                page = Page({}, queue.number)
                with suppress(NotFound), _found(env, queue.name, queue.number) as (txn, record):
                    reading = _Reading(txn, record, page, keep, most)
                    reading.left_bytes = left_bytes
                    page, left_bytes = reading.run(), reading.left_bytes
                pages.append(page)
                if left_bytes <= 0:
                    break
        return pages

    return in_child(spool, read)


def read_newest(
    path: str | os.PathLike[str],
    queue: str,
    count: int,
    *,
    keep: Keep | None = None,
    body_bytes: int | None = None,
) -> Page:
    """Return the last messages of a queue that nobody settled, in the order of their times, to the millisecond.

    See `read_page`. Its positions are the ends of the lanes, for what comes next.
    """
    return _in_queue(spool_path(path), queue, lambda txn, record: _newest(txn, record, count, keep, body_bytes))


def _in_queue(spool: str, queue: str, work: Callable[[Any, QueueRecord], Result], number: int | None = None) -> Result:
    """Return what is made of a transaction and of the record of a queue in it, in a child process."""

    def read() -> Result:
        with opened_environment(spool) as env, _found(env, queue, number) as (txn, record):
            return work(txn, record)

    return in_child(spool, read)


@contextmanager
def _found(env: Environment, queue: str, number: int | None) -> Iterator[tuple[Any, QueueRecord]]:
    record = _numbered(env, queue, number) or queue_of(recovery.read_log(env), queue)
    with env.reading() as txn:
        yield txn, as_now(txn, record)


def _numbered(env: Environment, queue: str, number: int | None) -> QueueRecord | None:
    """Return the record of a queue by its number; None where that is not known any more, or something is damaged."""
    record = None
    if number is not None:
        with suppress(CorruptionError), env.reading() as txn:
            record = recovery.read_record(txn, number)
    return record if record is not None and record.rows is not None and record.name == queue else None


def _newest(txn: Any, record: QueueRecord, count: int, keep: Keep | None, body_bytes: int | None) -> Page:
    """Look at four times as many sequences each time, until enough are found or all were looked at."""
    rows = record.rows or {}
    span = count
    while True:
        starts = {lane: max(row.floor, row.next - span) for lane, row in rows.items()}
        found = Page(dict(starts), record.owner, more=True)
        while found.more:
            page = _Reading(txn, record, Page(found.positions, record.owner), keep, None, body_bytes).run()
            page.messages = sorted([*found.messages, *page.messages], key=lambda one: (one.time_ms, one.sequence))
            del page.messages[:-count]
            page.looked_at += found.looked_at
            page.problems = found.problems + page.problems
            found = page
        if len(found.messages) >= count or all(starts[lane] <= row.floor for lane, row in rows.items()):
            return found
        span *= 4


def read_whole(
    path: str | os.PathLike[str], queue: str, found: Sequence[MessageFacts]
) -> Iterator[Sequence[MessageFacts]]:
    """Yield messages with whole bodies where `found` has them cut, about `PAGE_BYTES` at once.

    What was settled since then is left out.
    """
    spool = spool_path(path)
    part: list[MessageFacts] = []
    size = 0
    for one in found:
        part.append(one)
        size += one.size_bytes
        if size >= PAGE_BYTES:
            yield _whole(spool, queue, part)
            part, size = [], 0
    yield _whole(spool, queue, part)


def _whole(spool: str, queue: str, part: list[MessageFacts]) -> list[MessageFacts]:
    cut = sorted(one.sequence for one in part if len(one.body) < one.size_bytes)
    if not cut:
        return part

    def read(txn: Any, record: QueueRecord) -> list[MessageFacts]:
        reading = _Reading(txn, record, Page({}), None)
        for _, run in groupby(enumerate(cut), lambda one: one[1] - one[0]):
            sequences = [sequence for _, sequence in run]
            reading.read_range(sequences[0], sequences[-1] + 1)
        return reading.page.messages

    whole = {one.sequence: one for one in _in_queue(spool, queue, read)}
    return [whole.get(one.sequence, one) for one in part if len(one.body) == one.size_bytes or one.sequence in whole]


class _Reading:
    """One page in the making."""

    def __init__(
        self,
        txn: Any,
        record: QueueRecord,
        page: Page,
        keep: Keep | None,
        most: int | None = None,
        body_bytes: int | None = None,
    ) -> None:
        self._txn = txn
        self._record = record
        self.page = page
        self._keep = keep
        self._most = most
        self._body_bytes = body_bytes
        self.left_bytes = PAGE_BYTES

    def run(self) -> Page:
        """Fill the page."""
        page = self.page
        if self._record.rows is None:
            page.problems.append(f"the row of queue {self._record.name!r} is damaged")
            return page
        for lane, row in sorted(self._record.rows.items(), key=lambda row: (row[0] >= DELAYED, -row[0])):
            position = page.positions.get(lane, row.floor)
            if not row.floor <= position <= row.next:  # settled meanwhile; or another queue of that name
                position = row.floor
            page.positions[lane] = position
            if not self._read(lane, row, row.next):
                page.more = True
                break
        return page

    def read_range(self, first: int, end: int) -> None:
        """Add the messages of a lane in [first, end), however many bytes they have."""
        lane = lane_of(first)
        row = (self._record.rows or {}).get(lane)
        if row is not None:
            self.page.positions[lane] = max(first, row.floor)
            while not self._read(lane, row, min(end, row.next)):
                pass

    def _read(self, lane: int, row: Row, end: int) -> bool:
        """Read on in a lane; return whether `end` was reached."""
        page, expected = self.page, None
        times = _Times(self._txn, self._record.owner)
        while (position := page.positions[lane]) < end:
            read = read_unsettled(self._txn, self._record.owner, lane, row, position, end, READ_BYTES, expected)
            page.problems += [text for text, _count in in_words(read)]
            for first, records in read.pieces:
                for sequence, record in enumerate(records, first):
                    self._note(sequence, record, times)
                    if self._most is not None and len(page.messages) >= self._most:
                        page.positions[lane] = sequence + 1
                        return False
            page.positions[lane], expected = read.position, read.last_block
            if self.left_bytes <= 0:
                return read.position >= end
        return True

    def _note(self, sequence: int, record: Record, times: _Times) -> None:
        self.left_bytes -= len(record)
        self.page.looked_at += 1
        message = _facts(self._record.name, sequence, record, times.of(sequence))
        if self._keep is None or self._keep(message):
            if self._body_bytes is not None:
                message = attrs.evolve(message, body=message.body[: self._body_bytes])
            self.page.messages.append(message)
            self.left_bytes -= MESSAGE_BYTES


def _facts(queue: str, sequence: int, record: Record, time_ms: int) -> MessageFacts:
    facts = MessageFacts(
        queue=queue,
        sequence=sequence,
        body=body_of(record),
        headers={},
        time_ms=time_ms,
        settled=False,
        size_bytes=len(body_of(record)),
        priority=(sequence >> LANE_SHIFT) % DELAYED,
    )
    if not isinstance(record, Message):
        return facts
    return attrs.evolve(
        facts,
        headers=decode_headers(record.header_bytes),
        expires_ms=record.expires_ms,
        due_ms=record.due_ms,
        topic=record.topic,
        key=record.key,
    )


class _Times:
    """When messages were confirmed, asked for in order."""

    def __init__(self, txn: Any, owner: int) -> None:
        self._txn = txn
        self._owner = owner
        self._of_block: dict[int, int] = {}

    def of(self, sequence: int) -> int:
        """Return the time of one, in milliseconds since the epoch; 0 if its block is gone."""
        if sequence not in self._of_block:
            self._of_block = dict(self._times(sequence))
        return self._of_block.get(sequence, 0)

    def _times(self, sequence: int) -> Iterator[tuple[int, int]]:
        lane = lane_of(sequence)
        for key, value in scan(self._txn, self._owner, lane, sequence, sequence + 1):
            first = number_of(key)
            block = blocks.decode(value, BlockKey(BLOCKS, self._owner, lane, first), where=f"block {first}")
            yield from zip((first + offset for offset in block.offsets), block.times_ms, strict=True)
