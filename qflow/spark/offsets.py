"""The progress of a streaming query as Spark keeps it: offsets as JSON, with the identities of the log and the streams.

    {"uuid": "…", "streams": {"plants": {"number": 4, "offsets": {"0": 23}, "eras": {"0": "9f…"}}}}

A query that reads several logs keeps one such object for each, in the order of their uuids: {"logs": [...]}.

A log made anew has another uuid, a stream deleted and declared again another number: older offsets do not apply to it.
`eras` holds the era of the last message before each offset: in a copy of the log that was written on, that message has
another one (see `storage.streams.eras`). `began`, where a query began in a stream, is kept beside the end of the first
batch with that stream, so that this batch, repeated, begins there, too: Spark keeps no beginning of batch 0, nor of a
stream that appears later.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from qflow.errors import InvalidArgument
from qflow.named_tuples import NamedTuple

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import StreamingQueryProgress


class Progress(NamedTuple):
    """The position of a query in one stream."""

    number: int
    offsets: dict[int, int]
    began: dict[int, int] | None = None
    eras: dict[int, str] | None = None
    """Eras of the last messages before the offsets, by partition, as far as they are known."""


class LogPosition(NamedTuple):
    """The position of a query in all its streams of one log."""

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
    def from_json(cls, found: dict[str, Any]) -> LogPosition:
        """Return the position that `to_json` wrote; KeyError, TypeError, ValueError, AttributeError: it did not."""
        streams = {
            name: Progress(
                one["number"],
                _numbered(one["offsets"]),
                _numbered(one["began"]) if "began" in one else None,
                {int(number): str(era) for number, era in one.get("eras", {}).items()},
            )
            for name, one in found["streams"].items()
        }
        return cls(found["uuid"], streams)


class Position(NamedTuple):
    """The position of a query in all its logs, by their uuids."""

    logs: dict[str, LogPosition]

    @classmethod
    def of(cls, logs: Iterable[LogPosition]) -> Position:
        """Return the position made of these."""
        return cls({one.uuid: one for one in logs})

    def in_log(self, uuid: str) -> LogPosition:
        """Return the position in a log: at its beginning, if it is new to the query."""
        return self.logs.get(uuid) or LogPosition(uuid, {})

    def names(self) -> set[str]:
        """Return the names of all streams."""
        return {name for one in self.logs.values() for name in one.streams}

    def to_json(self) -> dict[str, Any]:
        """Return the position as Spark keeps it; equal positions give equal JSON."""
        found = [self.logs[uuid].to_json() for uuid in sorted(self.logs)]
        return found[0] if len(found) == 1 else {"logs": found}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Position:
        """Return the position that `to_json` wrote. Raises InvalidArgument: it was not written by this source."""
        try:
            return cls.of(map(LogPosition.from_json, found.get("logs", [found])))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidArgument(
                f"the offsets in the checkpoint are not those of format qflow ({error!r}): nothing can go on from a "
                "checkpoint of another source; give this query a directory of its own"
            ) from error


def _named(offsets: dict[int, int]) -> dict[str, int]:
    return {str(number): offsets[number] for number in sorted(offsets)}


def _numbered(named: dict[str, int]) -> dict[int, int]:
    return {int(number): int(offset) for number, offset in named.items()}


def lag(progress: StreamingQueryProgress) -> int:
    """Return how many messages of its streams a query had not read yet at the end of a batch.

    Args:
        progress: `query.lastProgress`, or `event.progress` of a listener. Sources of other formats do not count.

    Spark takes no metrics from a source in Python; this is computed from the offsets in its progress.
    """
    behind = 0
    for source in json.loads(progress.json)["sources"]:
        end, latest = _offset(source["endOffset"]), _offset(source["latestOffset"])
        if isinstance(end, dict) and isinstance(latest, dict) and end.keys() & {"uuid", "logs"}:
            read = Position.from_json(end)
            for uuid, log in Position.from_json(latest).logs.items():
                for name, there in log.streams.items():
                    known = read.in_log(uuid).streams.get(name)
                    offsets = known.offsets if known is not None and known.number == there.number else {}
                    behind += sum(offset - offsets.get(number, 0) for number, offset in there.offsets.items())
    return behind


def _offset(said: Any) -> Any:
    """Return what JSON says of an offset; by Spark Connect it comes as text."""
    try:
        return json.loads(said) if isinstance(said, str) else said
    except ValueError:  # of another source
        return said
