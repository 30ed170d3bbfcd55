"""The lag of a streaming query, from the progress that Spark reports."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import StreamingQueryProgress


def lag(progress: StreamingQueryProgress) -> int:
    """Return how many messages of its streams a query had not read yet at the end of a batch.

    Args:
        progress: `query.lastProgress`, or `event.progress` of a listener. Sources of other formats do not count.

    Spark takes no metrics from a source in Python; this is computed from the offsets in its progress.
    """
    from qflow.spark.offsets import Position

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
