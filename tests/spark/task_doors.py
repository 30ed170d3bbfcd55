"""Doors of brokers as tasks use them, and the time that waits for them go by."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from qflow.arrow.ranges import Span
from qflow.arrow.schema import Column
from qflow.spark.places.place import Place, Reading

if TYPE_CHECKING:
    from qflow.spark.places.flight import FlightPlace

At = Callable[..., "FlightPlace"]
"""Opens doors: returns the place behind one."""


class Time:
    """What waits go by: it passes where somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept.append(seconds)


def asked(place: Place, start: int, end: int, *, fail: bool = False, wanted: str = "#") -> Reading:
    """Return what a task reads of stream `plants`."""
    seen = place.look()
    span = Span("plants", seen.streams["plants"].owner, 0, start, end)
    return Reading(seen.uuid, span, wanted, (Column("value"),), fail)


def values(place: Place, reading: Reading) -> list[int]:
    """Return the numbers that a task reads."""
    return [int(value) for batch in place.read(reading) for value in batch.column("value").to_pylist()]
