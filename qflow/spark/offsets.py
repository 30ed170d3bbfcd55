"""What Spark keeps of a streaming query's progress: offsets as JSON, with which log and which streams they are of.

    {"uuid": "…", "streams": {"plants": {"number": 4, "offsets": {"0": 23}}}}

A log that was made anew has another uuid, a stream that was deleted and declared again another number: offsets of the
one before say nothing of it. What a stream began with that appeared under way stands beside its first offsets, as
`began`, so that a batch that is repeated begins there, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from qflow.errors import InvalidArgument


class Progress(NamedTuple):
    """How far a query is in one stream."""

    number: int
    offsets: dict[int, int]
    began: dict[int, int] | None = None


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
                        one["number"], _numbered(one["offsets"]), _numbered(one["began"]) if "began" in one else None
                    )
                    for name, one in found["streams"].items()
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidArgument(
                f"the offsets in the checkpoint are not those of format qflow ({error!r}): nothing can go on from a "
                "checkpoint of another source; give this query a directory of its own"
            ) from error


def _named(offsets: dict[int, int]) -> dict[str, int]:
    return {str(number): offsets[number] for number in sorted(offsets)}


def _numbered(named: dict[str, int]) -> dict[int, int]:
    return {int(number): int(offset) for number, offset in named.items()}
