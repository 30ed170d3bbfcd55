"""What a query asks of the place that holds a log, on the driver and in tasks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from qflow.arrow.bounds import Bound, Offsets
from qflow.arrow.eras import Known
from qflow.arrow.ranges import Cutting, Span
from qflow.arrow.states import SpoolState, StreamState
from qflow.arrow.takers import Taker
from qflow.errors import InvalidArgument
from qflow.named_tuples import NamedTuple
from qflow.spark.offsets import LogPosition, Progress
from qflow.storage.inbox.stage_files import StageFile
from qflow.storage.inbox.stages import Batch, Manifest

if TYPE_CHECKING:
    import pyarrow as pa

    from qflow.arrow.schema import Column

OfOwners = dict[int, dict[int, int]]
"""Offsets by number of the stream and partition."""


class Reading(NamedTuple):
    """What a task reads."""

    uuid: str
    span: Span
    filter: str
    columns: Sequence[Column]
    fail_on_data_loss: bool
    known: Known | None = None
    """Of the partition, when it was planned: tells a copy of the log that was put in its place since."""


class Staging(NamedTuple):
    """What a task writes into."""

    uuid: str
    batch: Batch
    token: str
    name: str
    """Of the file."""
    topic: str | None
    stream: str | None
    replaces: bool = False
    """Its query makes one attempt at a batch after the other: stages of earlier ones are removed."""


class Written(NamedTuple):
    """What a task has written."""

    file: StageFile | None
    """None = it had no rows."""
    takers: frozenset[Taker]
    """Streams and queues that take the rows."""


class Lease(Protocol):
    """A group of readers, which is this query's."""

    def committed(self) -> OfOwners:
        """Return where the group has come to; streams it has never read are missing."""

    def acknowledge(self, offsets: Mapping[int, Mapping[int, int]]) -> None:
        """Keep that everything below these offsets is done."""

    def close(self) -> None:
        """Give it back."""


class Stage(Protocol):
    """One file that a task writes."""

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows, with columns `value`, and as there are `key`, `topic`, `headers`."""

    def finish(self) -> Written:
        """Have them on the disk."""

    def discard(self) -> None:
        """Remove what was written, as far as that can be done."""


class Place(Protocol):
    """Where a log is. Pickled to the tasks.

    Each call that is given a uuid raises StorageError if the log there has another one; each raises `NotFound` or
    `Away` if there is none, or nobody answers.
    """

    @property
    def where(self) -> str:
        """The path or URL."""

    @property
    def rests(self) -> bool:
        """Nobody answered a short time ago, for long: whoever can goes on without it for now."""

    def look(self, uuid: str | None = None) -> SpoolState:
        """Return the streams and queues there are."""

    def resolve(
        self, uuid: str, bound: Bound, which: str, streams: list[StreamState], committed: Mapping[str, dict[int, int]]
    ) -> Offsets:
        """Return the offsets that a bound stands for."""

    def cut(self, uuid: str, ranges: Sequence[tuple[StreamState, int, int, int]], cutting: Cutting) -> list[Span]:
        """Cut (stream, partition, start, end) into spans for tasks."""

    def with_eras(self, uuid: str, streams: Mapping[str, Progress]) -> LogPosition:
        """Return a position with eras, which tell a copy of the log that was written on."""

    def other_era(self, known: Progress) -> int | None:
        """Return a partition whose last message that was read has another era now."""

    def offsets_after(self, uuid: str, asked: Collection[tuple[Span, int]]) -> list[int]:
        """Return, for each (span, bytes), the offset at the end of the block that reaches so many bytes."""

    def committed(self, uuid: str, group: str) -> OfOwners:
        """Return where a group has come to."""

    def lease(self, uuid: str, group: str) -> Lease:
        """Take a group's lease; GroupInUse: another query has it."""

    def read(self, asked: Reading) -> Iterator[pa.RecordBatch]:
        """Yield the matching messages of a span, in order."""

    def stage(self, asked: Staging) -> Stage:
        """Begin a file of a batch."""

    def check_hand_over(self, manifest: Manifest) -> None:
        """See that a batch would not be refused for its number or its plan: StorageError, if it would."""

    def hand_over(self, manifest: Manifest, staged: Batch, timeout_s: float) -> None:
        """Return when a batch is in the log, by this attempt or an earlier one; `staged` is its stage's name so far."""

    def discard(self, tokens: Collection[str]) -> None:
        """Remove the stages of these tokens that are not handed in."""

    def __getstate__(self) -> Any: ...


def check_apart(found: Sequence[tuple[Place, SpoolState]]) -> None:
    """Raises InvalidArgument: two places are the same, by the uuids of the logs that were found there."""
    known: dict[str, Place] = {}
    for place, state in found:
        if (other := known.setdefault(state.uuid, place)) is not place:
            raise InvalidArgument(
                f"{other.where} and {place.where} are the same spool, or copies of one: name each once"
            )
