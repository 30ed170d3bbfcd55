"""Reads a stream from outside of its owner, live or not, and keeps its own position in memory.

It is not a subscription: nothing is settled or written, and retention does not wait for it. Each read is a short
transaction, so that the owner can reuse pages. If a compaction has replaced the log, the new file is opened; sequences
stay the same.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from datetime import datetime
from functools import partial
from operator import attrgetter
from typing import Any

import attrs

from qflow.config import parse_count, parse_moment, spool_path
from qflow.errors import CorruptionError, InvalidArgument, NotFound, StorageError, StreamDeleted
from qflow.inspect.logs import opened_log
from qflow.inspect.stream_facts import find_stream
from qflow.message import offset_of, sequence_of
from qflow.named_tuples import NamedTuple
from qflow.names import choices
from qflow.storage.environment import Environment
from qflow.storage.files import storage_error
from qflow.storage.log import recovery
from qflow.storage.log.recovery import QueueRecord, Recovery
from qflow.storage.log.rows import Row, read_row
from qflow.storage.streams import partitions
from qflow.storage.streams.partitions import Found
from qflow.streams.deliveries import StreamMessage, message_of
from qflow.streams.interest import Interest, leave_to_check

READ_BYTES, READ_MESSAGES = 256 * 1024, 4096
"""A read of a partition ends with the block that reaches one of these."""

OpenLog = Callable[[], AbstractContextManager[tuple[Environment, Recovery]]]


@attrs.frozen
class Gap:
    """Offsets of a partition that cannot be read any more, of all topics."""

    partition: int
    first: int
    end: int
    reason: str
    damaged: bool
    """Their blocks are damaged; False = retention dropped them."""

    @property
    def messages(self) -> int:
        return self.end - self.first


class _Opened(NamedTuple):
    env: Environment
    found: Recovery
    place: tuple[int, int] | None
    """Device and inode of the log's file."""


class StreamReader:
    """Made by `inspect.read_stream`; a context manager. Used by one thread at a time."""

    def __init__(
        self,
        spool: str,
        open_log: OpenLog,
        stream: str,
        topic_filter: str | None,
        *,
        partition: int | None,
        start: str | int | datetime,
        on_gap: Callable[[Gap], object],
    ) -> None:
        self._spool = spool
        self._open_log = open_log
        self._on_gap = on_gap
        self._stack = ExitStack()
        self._opened = self._open()
        try:
            record = self._stream(self._opened.found, stream)
            self.name = stream
            self.topics: list[str] = record.settings["topics"]
            self._owner = record.owner
            self._interest = None if topic_filter is None else Interest(topic_filter, record.owner, leave_to_check)
            self._positions = self._starts(record, partition, start)
        except BaseException:
            self.close()
            raise

    # Opening ---------------------------------------------------------------------------------------------------------

    def _open(self) -> _Opened:
        while True:
            place = self._place()
            env, found = self._stack.enter_context(self._open_log())
            if self._place() == place:
                return _Opened(env, found, place)
            self._stack.close()  # replaced meanwhile: it is not known which one was opened

    def _place(self) -> tuple[int, int] | None:
        data = os.path.join(self._spool, "log", "data.mdb")
        try:
            found = os.stat(data)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_error(error, "look at the log", data) from error
        return found.st_dev, found.st_ino

    def _renew(self) -> Environment:
        """Return the environment of the current log file."""
        opened, place = self._opened, self._place()
        if place is None and not os.path.isdir(self._spool):
            raise NotFound(f"the spool at {self._spool} is gone")
        if place in (None, opened.place):  # None: it is just being replaced
            return opened.env
        self._stack.close()  # LMDB opens a file once in a process
        self._opened = self._open()
        if self._opened.found.uuid != opened.found.uuid:
            raise StorageError(f"{self._spool} is another spool now: begin anew")
        return self._opened.env

    def _stream(self, found: Recovery, name: str) -> QueueRecord:
        record = find_stream(found, name)
        if record is None:
            names = (one.name for one in found.streams if not one.deleted)
            queues = (one.name for one in found.queues if not one.deleted)
            raise NotFound(f"there is no stream {name!r} in {self._spool}; {choices(name, names, queues=queues)}")
        if record.rows is None:
            raise CorruptionError(f"the rows of stream {name!r} are damaged: see `qflow check`")
        return record

    def _starts(self, record: QueueRecord, partition: int | None, start: str | int | datetime) -> dict[int, int]:
        count = record.settings["partitions"]
        if partition is not None and parse_count(partition, "partition", least=0) >= count:
            raise InvalidArgument(f"stream {self.name!r} has partitions 0 to {count - 1}, not {partition}")
        if count > 1 and partition is None and isinstance(start, int):
            raise InvalidArgument(
                f"stream {self.name!r} has {count} partitions, and each its own offsets: say which partition, or start "
                "at a moment"
            )
        numbers = range(count) if partition is None else [partition]
        with self._opened.env.reading() as txn:
            return {number: self._position(txn, number, start) for number in numbers}

    def _position(self, txn: Any, number: int, start: str | int | datetime) -> int:
        row = self._row(txn, number)
        if start == "earliest":
            return row.floor
        if start == "latest":
            return row.next
        if isinstance(start, datetime):
            time_ms = int(parse_moment(start, "a start") * 1000)
            return partitions.find_time(txn, self._owner, number, row, row.next, time_ms)
        if isinstance(start, str):
            raise InvalidArgument(f"a start is earliest, latest, an offset or a datetime, not {start!r}")
        position = sequence_of(number, parse_count(start, "an offset", least=0))
        if position > row.next:
            raise InvalidArgument(
                f"offset {start} is past the end of stream {self.name!r}, partition {number}: the next message gets "
                f"{offset_of(row.next)}"
            )
        return position

    @property
    def offsets(self) -> dict[int, int]:
        """Where it goes on, by partition."""
        return {number: offset_of(position) for number, position in self._positions.items()}

    # Reading ---------------------------------------------------------------------------------------------------------

    def new(self) -> Iterator[list[StreamMessage]]:
        """Yield, in batches, the messages confirmed by now and not read yet; to be iterated to its end.

        In order within a partition; several partitions are merged by the times of their messages.

        Raises:
            StreamDeleted, NotFound, StorageError: the stream, or the spool, is gone.
        Cost: 0.5 µs a message; blocks without a match are not read.
        """
        ends = self._ends()
        if len(ends) == 1:
            ((number, end),) = ends.items()
            yield from filter(None, self._batches(number, end))
            return
        lines = [(message for batch in self._batches(number, end) for message in batch) for number, end in ends.items()]
        yield from _in_batches(heapq.merge(*lines, key=attrgetter("time_ms")))

    def _ends(self) -> dict[int, int]:
        env = self._renew()
        with env.reading() as txn:
            ends = {number: self._row(txn, number).next for number in self._positions}
        if any(end < self._positions[number] for number, end in ends.items()):
            raise StorageError(f"{self._spool} was replaced by an older copy of it: begin anew")
        return {number: end for number, end in ends.items() if end > self._positions[number]}

    def _batches(self, number: int, end: int) -> Iterator[list[StreamMessage]]:
        while self._positions[number] < end:
            found = self._read(number, self._positions[number], end)
            self._positions[number] = found.position
            yield [
                message_of(self.name, sequence, record, topic, time_ms)
                for piece in found.pieces
                for sequence, record, topic, time_ms in zip(*piece[2:], strict=True)
            ]

    def _read(self, number: int, position: int, end: int) -> Found:
        env = self._renew()
        with env.reading() as txn:
            floor = self._row(txn, number).floor
            if position < floor:
                self._miss(number, position, floor, "retention took them", damaged=False)
                return Found([], None, floor, 0)
            query = partitions.Query(self._owner, number, position, end, READ_BYTES, self._interest, READ_MESSAGES)
            found = partitions.read(txn, query)
        if found.hole is not None:
            self._miss(number, found.hole.start, found.hole.end, found.hole.problem, damaged=True)
        return found

    def _miss(self, number: int, first: int, end: int, reason: str, *, damaged: bool) -> None:
        self._on_gap(Gap(number, offset_of(first), offset_of(end), reason, damaged))

    def _row(self, txn: Any, number: int) -> Row:
        if not recovery.is_there(txn, self._owner):
            raise StreamDeleted(f"stream {self.name!r} was deleted")
        return read_row(txn, self._owner, number)

    def close(self) -> None:
        """Close the log; twice is fine."""
        self._stack.close()

    def __enter__(self) -> StreamReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_stream(
    path: str | os.PathLike[str],
    stream: str,
    topic_filter: str | None = "#",
    *,
    partition: int | None = None,
    start: str | int | datetime = "earliest",
    on_gap: Callable[[Gap], object],
) -> StreamReader:
    """Return a reader of a stream, which goes on from call to call; it leaves no trace in the spool.

    Args:
        topic_filter: as in MQTT; None = every message, also those of topics that `#` leaves out.
        partition: number of the only one to read; None = all.
        start: `"earliest"`, `"latest"`, an offset, or the first message not earlier than a datetime with a time zone.
        on_gap: called with each `Gap`, before the messages behind it are returned.

    Raises:
        NotFound: there is no spool, or no such stream. InvalidArgument: the filter is not valid, or an offset is past
        the end. FormatTooNew, CorruptionError, StorageError: as `qflow.open`.
    """
    spool = spool_path(path)
    return StreamReader(
        spool, partial(opened_log, spool), stream, topic_filter, partition=partition, start=start, on_gap=on_gap
    )


def _in_batches(messages: Iterable[StreamMessage]) -> Iterator[list[StreamMessage]]:
    batch: list[StreamMessage] = []
    size = 0
    for message in messages:
        batch.append(message)
        size += len(message.body)
        if size >= READ_BYTES or len(batch) >= READ_MESSAGES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
