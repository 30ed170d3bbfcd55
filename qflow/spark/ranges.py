"""Plans reads as ranges of offsets: which streams of which logs, and into how many tasks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import attrs
from pyspark.sql.datasource import InputPartition

from qflow.arrow.bounds import COMMITTED, OFFSETS, Bound, Offsets
from qflow.arrow.eras import Known
from qflow.arrow.ranges import Cutting, Span
from qflow.arrow.states import SpoolState, StreamState
from qflow.errors import CorruptionError, InvalidArgument, NotFound
from qflow.loggers import get_logger
from qflow.names import command
from qflow.spark.offsets import Progress
from qflow.spark.options import ReadOptions
from qflow.spark.parallelism import parallelism
from qflow.spark.places.place import Place, check_apart
from qflow.spark.words import Away

_logger = get_logger("qflow.spark")

Ranges = list[tuple[StreamState, int, int, int]]
"""(stream, partition, start, end)."""


class Range(InputPartition):
    """Offsets [start, end) of one partition of a stream: what one task reads."""

    def __init__(self, place: Place, uuid: str, span: Span, known: Known | None = None) -> None:
        self.place = place
        self.uuid = uuid
        self.span = span
        self.known = known
        """Of its partition."""


@attrs.frozen
class Seen:
    """A place, and what was there when it was looked at."""

    place: Place
    state: SpoolState
    elsewhere: frozenset[str] = frozenset()
    """Names of streams of the query's other logs."""

    @property
    def uuid(self) -> str:
        return self.state.uuid


def look_at(places: Sequence[Place], *, skip_away: bool = False) -> list[Seen]:
    """Look at all places; with `skip_away`, leave out those that are away, if not all are.

    Raises:
        InvalidArgument: two of them are the same. Away, NotFound, StorageError: see `Place`.
    """
    found: list[tuple[Place, SpoolState]] = []
    away: Away | None = None
    for place in places:
        try:
            if skip_away and place.rests:
                raise Away(f"the broker at {place.where} is away")
            found.append((place, place.look()))
        except Away as error:
            if not skip_away:
                raise
            away = error
            _logger.warning("%s; it goes on without it for now, for failOnDataLoss is false", error)
    if away is not None and not found:
        raise away
    check_apart(found)
    return [
        Seen(place, state, frozenset(name for _, other in found if other is not state for name in other.streams))
        for place, state in found
    ]


def selected(seen: Seen, options: ReadOptions, *, all_named: bool = True) -> list[StreamState]:
    """Return the streams to be read, sorted by name.

    Args:
        all_named: streams that options name must exist, in one of the logs.

    Raises:
        NotFound: a stream that is named does not exist. CorruptionError: one cannot be read.
    """
    state, where = seen.state, seen.place.where
    for name in options.streams or () if all_named else ():
        if name not in state.streams and name not in seen.elsewhere:
            names = ", ".join(map(repr, sorted(state.streams.keys() | seen.elsewhere))) or "none"
            raise NotFound(
                f"there is no stream {name!r} in {options.path}; there are: {names}. (subscribe names streams; topics "
                "are chosen with filter)"
            )
    found = [state.streams[name] for name in sorted(state.streams) if options.selects(name)]
    for stream in found:
        if not stream.rows:
            raise CorruptionError(f"the rows of stream {stream.name!r} are damaged: see {command('check', where)}")
        missing = options.partitions.get(stream.name, frozenset()) - set(range(len(stream.rows)))
        if missing and all_named:
            raise NotFound(
                f"option 'assign' names partition {min(missing)} of stream {stream.name!r}, which has "
                f"{len(stream.rows)}, numbered from 0: leave it out"
            )
    return [stream._replace(assigned=options.partitions.get(stream.name)) for stream in found]


def bound_at(seen: Seen, bound: Bound, which: str, options: ReadOptions) -> Bound:
    """Return a bound for one of the logs. Raises InvalidArgument: it gives offsets, which are those of one log."""
    if len(options.places) == 1:
        return bound
    if bound.kind == OFFSETS and any(offset >= 0 for parts in bound.numbers.values() for offset in parts.values()):
        raise InvalidArgument(
            f"{which} gives offsets, and each of {options.path} has its own: give earliest, latest, committed, a time, "
            "or -2 and -1 for the beginning and the end"
        )
    elsewhere = seen.elsewhere - seen.state.streams.keys()
    return attrs.evolve(bound, numbers={name: one for name, one in bound.numbers.items() if name not in elsewhere})


def starts_of(seen: Seen, streams: list[StreamState], options: ReadOptions) -> Offsets:
    """Return where to begin in each partition, by `startingOffsets` and its like."""
    which = "startingOffsets"
    committed: Offsets = {}
    if options.starting.kind == COMMITTED and options.group is not None:
        known = seen.place.committed(seen.uuid, options.group)
        committed = {stream.name: known.get(stream.owner, {}) for stream in streams}
    bound = bound_at(seen, options.starting, which, options)
    return seen.place.resolve(seen.uuid, bound, which, streams, committed)


def cut(planned: Collection[tuple[Place, str, Ranges]], options: ReadOptions) -> Iterator[Range]:
    """Cut the ranges of some logs, (place, uuid, ranges) each, for tasks; see `arrow.ranges.cut`."""
    wanted = [one for one in planned if any(start < end for _, _, start, end in one[2])]
    logs = max(1, len(wanted))
    least = options.min_partitions
    share = Cutting(
        max(1, parallelism() // logs), None if least is None else -(-least // logs), options.max_records_per_partition
    )
    for place, uuid, ranges in wanted:
        known = _known(place, uuid, ranges)
        for span in place.cut(uuid, ranges, share):
            yield Range(place, uuid, span, known.get((span.stream, span.partition)))


def _known(place: Place, uuid: str, ranges: Ranges) -> dict[tuple[str, int], Known]:
    """Return what is known of partitions at the ends of ranges, by stream and partition."""
    ends: dict[str, Progress] = {}
    for stream, number, start, end in ranges:
        if start < end:
            ends.setdefault(stream.name, Progress(stream.owner, {})).offsets[number] = end
    return {
        (name, number): Known(one.offsets[number], era)
        for name, one in place.with_eras(uuid, ends).streams.items()
        for number, era in (one.eras or {}).items()
    }
