"""The options of `format("qflow")` for writing: Kafka's names, and a few of our own. Every wrong one is a sentence."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping

import attrs

from qflow.errors import InvalidArgument
from qflow.spark.options import OF_KAFKA, parse_path
from qflow.streams.topic_filter import check_topic

NAMES = ("path", "topic", "stream", "commitTimeout")
_OF_SPARK = frozenset({"checkpointlocation", "queryname"})
"""What Spark hands on of its own."""
COMMIT_TIMEOUT_S = 60.0


@attrs.frozen(kw_only=True)
class WriteOptions:
    """What a writer is asked for."""

    path: str
    topic: str | None
    """Of all rows, whatever a column says."""
    stream: str | None
    """Each row is to be in this one, perhaps among others."""
    commit_timeout_s: float


def parse_for_writing(options: Mapping[str, str]) -> WriteOptions:
    """Return the options of a writer.

    Raises:
        InvalidArgument: one of them makes no sense.
    """
    given = {name.lower(): value for name, value in options.items()}
    known = {name.lower(): name for name in NAMES}
    for name in given:
        if name not in known and name not in _OF_SPARK and not OF_KAFKA.fullmatch(name):
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {known[close[0]]!r}?" if close else f"there are: {', '.join(NAMES)}"
            raise InvalidArgument(f"format qflow has no option {name!r} for writing; {hint}")
    topic = given.get("topic")
    if topic is not None:
        try:
            check_topic(topic)
        except InvalidArgument as error:
            raise InvalidArgument(f"option 'topic': {error}") from error
    stream = given.get("stream")
    if stream is not None and not stream:
        raise InvalidArgument("option 'stream' is empty: name a stream, or leave it out")
    return WriteOptions(
        path=parse_path(given), topic=topic, stream=stream, commit_timeout_s=_seconds(given.get("committimeout"))
    )


def _seconds(text: str | None) -> float:
    if text is None:
        return COMMIT_TIMEOUT_S
    try:
        seconds = float(text.strip().removesuffix("s"))
    except ValueError:
        seconds = -1.0
    if seconds <= 0 or not math.isfinite(seconds):
        raise InvalidArgument(f"option 'commitTimeout' is {text!r}: give seconds, such as 60 or 60s")
    return seconds
