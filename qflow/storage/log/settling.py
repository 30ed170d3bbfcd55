"""Requests that settle what was acked, expired or dropped; see `batch`."""

from __future__ import annotations

from qflow.storage.log.batch import RANGE_WEIGHT, Batch, Request
from qflow.storage.log.lane import Lane
from qflow.storage.log.notes import Noting, joint_note, settle_note
from qflow.storage.log.rows import Settled


class Settling(Request):
    """Settled ranges of some lanes."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[tuple[Lane, list[Settled]]]) -> None:
        super().__init__()
        self.parts = parts

    def weight(self) -> int:
        parts = self.parts
        return RANGE_WEIGHT * (len(parts[0][1]) if len(parts) == 1 else sum(len(ranges) for _, ranges in parts))

    def join(self, batch: Batch) -> None:
        for lane, ranges in self.parts:
            batch.settle(lane, ranges)

    def note(self, now_ms: int) -> Noting | None:
        parts = self.parts
        return settle_note(*parts[0]) if len(parts) == 1 else joint_note(settle_note(*part) for part in parts)


class SettlingOne(Request):
    """One settled message. Many single acks wait at a time: one object each, for collections of garbage walk them."""

    __slots__ = ("is_logged", "lane", "sequence", "size")

    def __init__(self, lane: Lane, sequence: int, size: int, is_logged: bool) -> None:
        super().__init__()
        self.lane, self.sequence, self.size, self.is_logged = lane, sequence, size, is_logged

    def _settled(self) -> tuple[Settled]:
        first = self.sequence
        return (Settled(first, first + 1, 1, self.size) if self.is_logged else Settled(first, first + 1, 0, 0),)

    def weight(self) -> int:
        return RANGE_WEIGHT

    def join(self, batch: Batch) -> None:
        batch.settle(self.lane, self._settled())

    def note(self, now_ms: int) -> Noting | None:
        return settle_note(self.lane, self._settled())
