"""What Spark keeps of a streaming query's progress: offsets as JSON, with which log and which streams they are of.

    {"uuid": "…", "streams": {"plants": {"number": 4, "offsets": {"0": 23}, "eras": {"0": "9f…"}}}}

A log that was made anew has another uuid, a stream that was deleted and declared again another number: offsets of the
one before say nothing of it. `eras` say in which era the last message before each offset was written: in a copy of the
log that went on by itself, that message is of another one (see `storage.eras`). Where a query began in a stream stands
beside the end of the first batch that has it, as `began`, so that this batch, repeated, begins there, too: Spark keeps
no beginning of batch 0, nor of a stream that appeared under way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from qflow.errors import InvalidArgument
from qflow.message import LANE_SHIFT
from qflow.storage.log.rows import read_row
from qflow.storage.streams import eras


class Progress(NamedTuple):
    """How far a query is in one stream."""

    number: int
    offsets: dict[int, int]
    began: dict[int, int] | None = None
    eras: dict[int, str] | None = None
    """Of the last message before each offset, as far as they are known."""


class Position(NamedTuple):
    """How far a query is."""

    uuid: str
    streams: dict[str, Progress]

    def to_json(self) -> dict[str, Any]:
        """Return it as Spark keeps it; equal positions are equal text, too."""
        streams: dict[str, Any] = {}
        for name in sorted(self.streams):
            one = self.streams[name]
            streams[name] = {"number": one.number, "offsets": _named(one.offsets)}
            if one.began is not None:
                streams[name]["began"] = _named(one.began)
            if one.eras:
                streams[name]["eras"] = {str(number): one.eras[number] for number in sorted(one.eras)}
        return {"uuid": self.uuid, "streams": streams}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Position:
        """Return what `to_json` was called on.

        Raises:
            InvalidArgument: it was not written by this source.
        """
        try:
            return cls(
                found["uuid"],
                {
                    name: Progress(
                        one["number"],
                        _numbered(one["offsets"]),
                        _numbered(one["began"]) if "began" in one else None,
                        {int(number): str(era) for number, era in one.get("eras", {}).items()},
                    )
                    for name, one in found["streams"].items()
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidArgument(
                f"the offsets in the checkpoint are not those of format qflow ({error!r}): nothing can go on from a "
                "checkpoint of another source; give this query a directory of its own"
            ) from error


def eras_of(txn: Any, owner: int, offsets: Mapping[int, int]) -> dict[int, str]:
    """Return the era of the last message before each offset. Cost: 5 µs a partition."""
    found = {
        number: eras.era_of(txn, owner, number, (number << LANE_SHIFT) + offset - 1)
        for number, offset in offsets.items()
        if offset
    }
    return {number: f"{era:016x}" for number, era in found.items() if era is not None}


def other_era(txn: Any, owner: int, offsets: Mapping[int, int], known: Mapping[int, str] | None) -> int | None:
    """Return a partition in which the last message before an offset is of another era than is known; None for none.

    Of messages that retention took long ago it is asked no more.
    """
    found = eras_of(txn, owner, offsets)
    for number, era in (known or {}).items():
        sequence = (number << LANE_SHIFT) + offsets[number]
        if found.get(number) != era and sequence >= read_row(txn, owner, number).floor:
            return number
    return None


def _named(offsets: dict[int, int]) -> dict[str, int]:
    return {str(number): offsets[number] for number in sorted(offsets)}


def _numbered(named: dict[str, int]) -> dict[int, int]:
    return {int(number): int(offset) for number, offset in named.items()}
