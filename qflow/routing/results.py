"""What a publish returns: where each message went."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, overload

from qflow.message import offset_of
from qflow.named_tuples import NamedTuple
from qflow.streams.partition import Partition


class _Places(NamedTuple):
    """The pair that a `PublishResult` is."""

    offsets: dict[str, int]
    sequences: dict[str, int | None]


class PublishResult(_Places):
    """Where a published message went: a pair.

    offsets: by stream; of one with several partitions, in the partition that `partitions` tells.
    sequences: by queue; None where its overflow policy dropped it, or made it a dead letter.
    """

    partitions: Mapping[str, int] = MappingProxyType({})
    """By stream, where it has several."""
    duplicate: bool = False
    """Its producer had published it before: nothing was stored."""

    def __repr__(self) -> str:
        shown = f"{type(self).__name__}(offsets={self.offsets!r}, sequences={self.sequences!r}"
        if self.partitions:
            shown += f", partitions={dict(self.partitions)!r}"
        return shown + (", duplicate=True)" if self.duplicate else ")")


def duplicate_result() -> PublishResult:
    """Return what is told of a message that was published before."""
    result = PublishResult({}, {})
    result.duplicate = True
    return result


def result_in_partitions(
    offsets: dict[str, int], sequences: dict[str, int | None], partitions: dict[str, int]
) -> PublishResult:
    """Return where a message went, and in which partitions."""
    result = PublishResult(offsets, sequences)
    if partitions:
        result.partitions = partitions
    return result


class Target(NamedTuple):
    """Where messages go."""

    name: str
    """Of the queue, or the stream."""
    partition: int | None
    """None: it is a queue."""
    is_one_of_several: bool


def target_of(owner: Any) -> Target:
    """Return what a result tells of a queue, or of a partition of a stream."""
    if isinstance(owner, Partition):
        return Target(owner.name, owner.number, len(owner.stream.partitions) > 1)
    return Target(owner.name, None, False)


def result_of(
    places: Iterable[tuple[Target, int | None]], sequences: dict[str, int | None] | None = None
) -> PublishResult:
    """Return where a message went: its sequence in each place. `sequences`: those in queues that are known by name."""
    offsets: dict[str, int] = {}
    sequences = {} if sequences is None else sequences
    partitions: dict[str, int] = {}
    for target, sequence in places:
        if target.partition is None:
            sequences[target.name] = sequence
        else:
            assert sequence is not None
            offsets[target.name] = offset_of(sequence)
            if target.is_one_of_several:
                partitions[target.name] = target.partition
    return result_in_partitions(offsets, sequences, partitions)


class PublishResults(Sequence[PublishResult]):
    """Where many messages went; each result is made on access."""

    __slots__ = ()

    @abstractmethod
    def _at(self, index: int) -> PublishResult: ...

    @overload
    def __getitem__(self, index: int) -> PublishResult: ...
    @overload
    def __getitem__(self, index: slice) -> list[PublishResult]: ...
    def __getitem__(self, index: int | slice) -> PublishResult | list[PublishResult]:
        places = range(len(self))[index]
        return [self._at(place) for place in places] if isinstance(places, range) else self._at(places)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


class InOneStream(PublishResults):
    """All of them went into one stream, one behind the other."""

    __slots__ = ("_name", "_offsets")

    def __init__(self, name: str, first: int, count: int) -> None:
        self._name = name
        self._offsets = range(first, first + count)

    def __len__(self) -> int:
        return len(self._offsets)

    def _at(self, index: int) -> PublishResult:
        return PublishResult({self._name: self._offsets[index]}, {})
