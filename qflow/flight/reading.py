"""Streams as record batches: what there is, ranges of it, and what comes from now on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic
from typing import Any

import pyarrow as pa
import pyarrow.flight as pf

from qflow.arrow.eras import Known, is_other
from qflow.arrow.ranges import Span
from qflow.arrow.reading import Request, read_span
from qflow.arrow.schema import NAMES, Column, arrow_schema
from qflow.arrow.states import StreamState
from qflow.errors import CorruptionError, GapError, InvalidArgument, NotFound, StorageError, StreamDeleted
from qflow.flight.owner import Owner
from qflow.flight.words import Command, as_json
from qflow.message import LANE_SHIFT
from qflow.streams.stream import Stream
from qflow.streams.topic_filter import check_filter

ALL = tuple(map(Column, NAMES))
_OF_TICKETS = (
    "stream", "partition", "start", "end", "filter", "columns", "max_bytes", "follow", "uuid", "number", "era",
    "fail_on_data_loss",
)  # fmt: skip
QUIET_S = 10.0
"""A read that finds nothing for so long yields a batch without messages.

The server of gRPC ends the connection of a client that has asked three times whether it is there, and was sent nothing.
"""
SHORTEST_LOOK_S, LONGEST_LOOK_S = 0.002, 0.05
"""Between two looks of who follows a stream: at first, and after a while in which nothing came."""
MOST_TOLD = 1000
"""Losses that are told one by one beside a batch; of others, how many they are."""


class Losses:
    """What becomes of messages that are gone: errors, or else they are told as metadata beside the next batch."""

    def __init__(self, *, fail: bool) -> None:
        self._fail = fail
        self._told: list[dict[str, Any]] = []
        self._more = 0

    def _tell(self, loss: str, **facts: Any) -> None:
        if len(self._told) < MOST_TOLD:
            self._told.append({"loss": loss} | facts)
        else:
            self._more += 1

    def stream(self, span: Span) -> None:
        """Raises StreamDeleted."""
        if self._fail:
            raise StreamDeleted(
                f"stream {span.stream!r} was deleted, perhaps before it was read to its end: ask with "
                "fail_on_data_loss false to go on without it"
            )
        self._tell("stream")

    def gap(self, span: Span, start: int, first: int) -> int:
        """Raises GapError."""
        end = min(first, span.end)
        if start >= end:
            return end
        if self._fail:
            raise GapError(
                f"stream {span.stream!r}, partition {span.partition}: offsets {start} to {end - 1} are gone, retention "
                f"took them; the first that is there is {first}. Ask with fail_on_data_loss false to go on there",
                partition=span.partition,
                first=start,
                end=end,
            )
        self._tell("gap", start=start, end=end, first=first)
        return end

    def damage(self, span: Span, start: int, end: int, problem: str) -> None:
        """Raises CorruptionError, with `start`, `end` and `problem` as facts."""
        if self._fail:
            error = CorruptionError(
                f"stream {span.stream!r}, partition {span.partition}: offsets {start} to {end - 1} cannot be read: "
                f"{problem}. See `qflow check`; ask with fail_on_data_loss false to go on behind them"
            )
            vars(error).update(start=start, end=end, problem=problem)
            raise error
        self._tell("damage", start=start, end=end, problem=problem)

    def beside(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, bytes | None]:
        """Return a batch, and what is to be told beside it."""
        told, more = self._told, self._more
        if not told:
            return batch, None
        self._told, self._more = [], 0
        return batch, as_json({"losses": told, "more": more})

    @property
    def is_told(self) -> bool:
        """Everything was told."""
        return not self._told


class Read:
    """What a ticket asks for."""

    def __init__(self, owner: Owner, ticket: Command) -> None:
        """Check it.

        Raises:
            InvalidArgument: it makes no sense. NotFound: there is no such stream. StorageError: it means another log.
            StreamDeleted: it was deleted meanwhile.
        """
        ticket.check_known(*_OF_TICKETS)
        owner.check_uuid(ticket.maybe_text("uuid"))
        self._owner = owner
        stream = owner.stream(ticket.text("stream"), ticket.maybe_number("number"))
        self._number = ticket.number("partition", 0 if len(stream.rows) == 1 else None)
        check_partition(stream, self._number)
        if "era" in ticket:
            self._check_era(stream, Known(*ticket.row("era", int, str)))
        first, there = stream.bounds(self._number)
        follows = ticket.flag("follow", default=False)
        self._stream = self._live(stream) if follows else None
        """The one that is followed."""
        start = ticket.number("start", there if follows else first)
        end = 2**62 if follows else ticket.number("end", max(start, there))
        if start > there or (end > there and not follows):
            raise InvalidArgument(
                f"stream {stream.name!r}, partition {self._number}, ends at {there}, which the next message gets: "
                f"{start if start > there else end} is past that"
            )
        self._span = Span(stream.name, stream.owner, self._number, start, min(end, there))
        self._filter = check_filter(ticket.text("filter", "#"))
        self._most_bytes = ticket.maybe_number("max_bytes", least=1)
        self._losses = Losses(fail=ticket.flag("fail_on_data_loss", default="start" in ticket))
        self._columns = _columns(ticket)

    def _check_era(self, stream: StreamState, known: Known) -> None:
        if not 0 < known.offset < 2**LANE_SHIFT:
            raise InvalidArgument(f"'era' of a ticket is of an offset from 1 on, not {known.offset}")
        with self._owner.transaction() as txn:
            if is_other(txn, stream.owner, self._number, known):
                raise StorageError(
                    f"stream {stream.name!r}, partition {self._number}: what is asked for was planned up to offset "
                    f"{known.offset}, and the spool at {self._owner.path} does not hold the same there: it was "
                    "replaced by an older copy of it. Bring the newer one back, or plan anew with this one"
                )

    def _live(self, stream: StreamState) -> Stream:
        """Return the stream that the log had as this."""
        live = self._owner.broker.stream(stream.name)
        if self._owner.stream(stream.name).owner != stream.owner:
            raise _deleted(stream.name)
        return live

    @property
    def schema(self) -> pa.Schema:
        return arrow_schema(self._columns)

    def answers(self, stay: Callable[[], None]) -> Iterator[tuple[pa.RecordBatch, bytes | None]]:
        """Yield each of `batches` with the metadata that tells what is lost before it; see there."""
        return map(self._losses.beside, self.batches(stay))

    def batches(self, stay: Callable[[], None]) -> Iterator[pa.RecordBatch]:
        """Yield what was asked for; `stay` raises what ends it.

        One may be empty: for what is to be told beside it, or because nothing was found for `QUIET_S`.

        Raises:
            GapError, StreamDeleted, CorruptionError, StorageError, BrokerClosed.
        """
        left, yielded_s = self._most_bytes, monotonic()
        for span in self._spans(stay):
            for batch in self._read(span, stay):
                stay()
                size = batch.nbytes
                yield batch
                del batch  # gRPC has taken it
                yielded_s = monotonic()
                if left is not None and (left := left - size) <= 0:
                    return
            if not self._losses.is_told or monotonic() - yielded_s > QUIET_S:
                yield pa.RecordBatch.from_pylist([], self.schema)
                yielded_s = monotonic()

    def _read(self, span: Span, stay: Callable[[], None]) -> Iterator[pa.RecordBatch]:
        if span.start < span.end:
            request = Request(span, self._filter, self._columns)
            with self._owner.room.share(stay) as share:
                yield from read_span(self._owner.transaction, request, self._losses, share, QUIET_S)

    def _spans(self, stay: Callable[[], None]) -> Iterator[Span]:
        """Yield what is to be read; where the stream is followed, an empty span after each look that finds nothing."""
        span = self._span
        yield span
        stream = self._stream
        if stream is None:
            return
        pause_s = SHORTEST_LOOK_S
        while True:
            stay()
            end = stream.stats().next_offsets[self._number]
            if end > span.end:
                span = span._replace(start=span.end, end=end)
                pause_s = SHORTEST_LOOK_S
                yield span
            else:
                self._owner.draining.wait(pause_s)
                self._owner.check_open()
                pause_s = min(2 * pause_s, LONGEST_LOOK_S)
                self._check_there(stream)
                yield span._replace(start=span.end)

    def _check_there(self, stream: Stream) -> None:
        name = self._span.stream
        if name not in self._owner.broker.streams() or self._owner.broker.stream(name) is not stream:
            raise _deleted(name)


def _deleted(name: str) -> StreamDeleted:
    return StreamDeleted(f"stream {name!r} was deleted: declare it again, and follow it anew")


def _columns(ticket: Command) -> tuple[Column, ...]:
    found = []
    for one in ticket.items("columns", list(NAMES)):
        name, nullable = one if isinstance(one, list) and len(one) == 2 else (one, True)
        if name not in NAMES or not isinstance(nullable, bool):
            raise InvalidArgument(f"there is no column {name!r:.100}; there are: {', '.join(NAMES)}")
        found.append(Column(name, nullable))
    if not found or len({column.name for column in found}) < len(found):
        raise InvalidArgument(f"'columns' of {ticket.what} must name columns, each once: {', '.join(NAMES)}")
    return tuple(found)


def check_partition(stream: StreamState, number: int) -> None:
    """Raises NotFound: the stream has no such partition."""
    if number >= len(stream.rows):
        raise NotFound(f"stream {stream.name!r} has no partition {number}; it has {len(stream.rows)}, numbered from 0")


# What there is --------------------------------------------------------------------------------------------------------


def list_infos(owner: Owner) -> Iterator[pf.FlightInfo]:
    """Yield what is told of each stream."""
    for stream in owner.streams():
        yield _info(owner.uuid, stream, list(range(len(stream.rows))), [stream.name])


def info_of(owner: Owner, descriptor: pf.FlightDescriptor) -> pf.FlightInfo:
    """Return what is told of a stream, or of one of its partitions.

    Raises:
        InvalidArgument: the descriptor is no path of a stream. NotFound: there is no such stream or partition.
    """
    path = [name.decode(errors="backslashreplace") for name in descriptor.path or ()]
    if not 1 <= len(path) <= 2:
        raise InvalidArgument(f"a stream is asked for by the path [name] or [name, partition], not {path}")
    stream = owner.stream(path[0])
    numbers = list(range(len(stream.rows)))
    if len(path) == 2:
        if not (path[1].isascii() and path[1].isdecimal() and len(path[1]) < 10):
            raise InvalidArgument(f"the second part of the path of a stream is a partition, not {path[1]!r}")
        check_partition(stream, int(path[1]))
        numbers = [int(path[1])]
    return _info(owner.uuid, stream, numbers, path)


def _info(uuid: str, stream: StreamState, numbers: list[int], path: list[str]) -> pf.FlightInfo:
    endpoints = []
    for number in numbers:
        start, end = stream.bounds(number)
        ticket = {"uuid": uuid, "stream": stream.name, "partition": number, "start": start, "end": end}
        endpoints.append(pf.FlightEndpoint(as_json(ticket), []))
    rows = sum(stream.rows[number].messages for number in numbers)
    size = sum(stream.rows[number].bytes for number in numbers)
    descriptor = pf.FlightDescriptor.for_path(*path)
    return pf.FlightInfo(arrow_schema(ALL), descriptor, endpoints, rows, size)


def data_of(owner: Owner, ticket: Command, stay: Callable[[], None], guard: Callable[..., Any]) -> pf.GeneratorStream:
    """Return the answer to a ticket; `guard` makes sentences of its errors."""
    read = Read(owner, ticket)
    return pf.GeneratorStream(read.schema, _guarded(partial(read.answers, stay), guard))


def _guarded(answers: Callable[[], Iterator[Any]], guard: Callable[..., Any]) -> Iterator[Any]:
    with guard("a read"):
        yield from answers()
