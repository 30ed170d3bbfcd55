"""The progress of a streaming query as Spark keeps it: offsets as JSON, with the identities of the log and the streams.

    {"uuid": "…", "streams": {"plants": {"number": 4, "offsets": {"0": 23}, "eras": {"0": "9f…"}}}}

A log made anew has another uuid, a stream deleted and declared again another number: older offsets do not apply to it.
`eras` holds the era of the last message before each offset: in a copy of the log that was written on, that message has
another one (see `storage.eras`). `began`, where a query began in a stream, is kept beside the end of the first batch
with that stream, so that this batch, repeated, begins there, too: Spark keeps no beginning of batch 0, nor of a stream
that appears later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from qflow.errors import InvalidArgument
from qflow.message import LANE_SHIFT
from qflow.storage.log.rows import read_row
from qflow.storage.streams import eras


class Progress(NamedTuple):
    """The position of a query in one stream."""

    number: int
    offsets: dict[int, int]
    began: dict[int, int] | None = None
    eras: dict[int, str] | None = None
    """Eras of the last messages before the offsets, by partition, as far as they are known."""


class Position(NamedTuple):
    """The position of a query in all its streams."""

    uuid: str
    streams: dict[str, Progress]

    def to_json(self) -> dict[str, Any]:
        """Return the position as Spark keeps it; equal positions give equal JSON."""
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
        """Return the position that `to_json` wrote.

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
    """Return a partition whose last message before the offset has another era than `known`; None if there is none.

    Messages that retention dropped long ago are not checked.
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
