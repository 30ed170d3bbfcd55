"""What becomes of messages that were to be read and are gone: by option `failOnDataLoss`, an error, or a warning."""

from __future__ import annotations

import json

import attrs

from qflow.arrow.ranges import Span
from qflow.errors import CorruptionError, GapError, StreamDeleted
from qflow.loggers import get_logger

_logger = get_logger("qflow.spark")


def check_floor(stream: str, number: int, start: int, first: int, *, fail: bool, end: int | None = None) -> int:
    """Return where to begin in a partition whose first retained offset is `first`; at most `end`, if given.

    Raises:
        GapError: retention dropped messages that were to be read, and `fail`.
    """
    lost_to = first if end is None else min(first, end)
    if start >= lost_to:
        return start
    there = f"; the first that is there is {first}" if first != end else ""  # else it may be further on
    text = (
        f"stream {stream!r}, partition {number}: offsets {start} to {lost_to - 1} are gone, retention took them before "
        f"this query has read them{there}"
    )
    if fail:
        raise GapError(
            f"{text}. Set option failOnDataLoss to false to go on behind them; to have retention wait for the query, "
            "give it a group",
            partition=number,
            first=start,
            end=lost_to,
        )
    _logger.warning("%s; it goes on behind them, for failOnDataLoss is false", text)
    return lost_to


def miss_stream(name: str, *, fail: bool) -> None:
    """Go on without a stream that does not exist any more. Raises StreamDeleted: `fail` is set."""
    text = f"stream {name!r} was deleted, perhaps before this query has read it to its end"
    if fail:
        raise StreamDeleted(f"{text}: set option failOnDataLoss to false to go on without it")
    _logger.warning("%s; it goes on without it, for failOnDataLoss is false", text)


@attrs.frozen
class ByOption:
    """`reading.Losses`, by option failOnDataLoss."""

    fail: bool
    check: str
    """What looks at the spool, for errors."""

    def stream(self, span: Span) -> None:
        """Raise that the stream was deleted, or warn."""
        miss_stream(span.stream, fail=self.fail)

    def gap(self, span: Span, start: int, first: int) -> int:
        """Raise that offsets are gone, or warn and return where to go on."""
        return check_floor(span.stream, span.partition, start, first, fail=self.fail, end=span.end)

    def damage(self, span: Span, start: int, end: int, problem: str) -> None:
        """Raise that offsets cannot be read, or warn."""
        where = f"stream {span.stream!r}, partition {span.partition}"
        text = f"{where}: offsets {start} to {end - 1} cannot be read: {problem}"
        if self.fail:
            raise CorruptionError(f"{text}. See {self.check}; set option failOnDataLoss to false to go on behind them")
        _logger.warning("%s; it goes on behind them, for failOnDataLoss is false", text)

    def told(self, span: Span, metadata: bytes) -> None:
        """Raise or warn of what a door tells beside a batch; see `qflow.flight.reading`."""
        found = json.loads(metadata)
        for loss in found["losses"]:
            if loss["loss"] == "gap":
                self.gap(span, loss["start"], loss["first"])
            elif loss["loss"] == "damage":
                self.damage(span, loss["start"], loss["end"], loss["problem"])
            else:
                self.stream(span)
        if found["more"]:
            _logger.warning("and so it is at %d more places of stream %r", found["more"], span.stream)

    def raised(self, span: Span, error: GapError | CorruptionError) -> None:
        """Raise in words of the option what a door has raised; return if it is no loss."""
        if isinstance(error, GapError):
            self.gap(span, error.first, error.end)
        elif {"start", "end", "problem"} <= vars(error).keys():
            facts = vars(error)
            self.damage(span, facts["start"], facts["end"], facts["problem"])
