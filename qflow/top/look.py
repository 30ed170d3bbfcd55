"""What there is to see of a spool: looks at it one after the other, their history, and the rows they make."""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, Literal

import attrs

from qflow import doctor
from qflow.doctor import Finding
from qflow.events import Event

KEPT = 120
"""Looks whose rates are kept."""
EVENTS_KEPT = 500
NOT_SEEN = doctor.Look(path="")

Flow = Literal["in", "out", "acked"]
FLOWS: tuple[Flow, ...] = ("in", "out", "acked")


class Mode(enum.Enum):
    """Where a look comes from."""

    LIVE = "live"
    """From the owner, through its door."""
    TOLD = "read-only"
    """From what the owner writes for others; it lets nobody in."""
    DEAD = "not owned"
    """From the log; nobody owns the spool."""
    FAILED = "unreadable"
    """There is nothing to be read."""


@attrs.frozen(kw_only=True)
class Look:
    """A spool at one moment. What has not changed since the look before is the same object in both."""

    mode: Mode
    note: str = ""
    """What a reader should know of it, as a sentence."""
    pid: int | None = None
    """Who owns what lies at the path."""
    time_s: float
    """When the figures were true, on a clock that only `time_s` of other looks compares with."""
    age_s: float = 0.0
    """How old the figures were when they were read."""
    broker: dict[str, Any] = attrs.field(factory=dict)
    """Fields of `BrokerStats`."""
    queues: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    """Fields of `QueueStats`, by name; of a queue on disk only some."""
    streams: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    events: tuple[Event, ...] = ()
    """What has happened since the look before."""
    findings: tuple[Finding, ...] = ()
    """What `qflow.doctor` makes of it, worst first."""
    inside: doctor.Look = NOT_SEEN
    """What its log and its disk tell, some seconds old."""

    @property
    def is_removed(self) -> bool:
        """Tell whether the owner answers, and what lies at the path is not its own."""
        return self.mode is Mode.LIVE and self.pid is None


@attrs.frozen
class Key:
    """Which queue or stream."""

    kind: Literal["queue", "stream"]
    name: str


@attrs.frozen(kw_only=True)
class Row:
    """One queue or stream as a line shows it. None: not known."""

    key: Key
    messages: int
    lag: int
    unacked: int
    oldest_s: float | None = None
    resident_bytes: int | None = None
    capacity_bytes: int | None = None
    spilled_bytes: int | None = None
    consumers: int | None = None
    blocked: int = 0
    is_paused: bool = False
    rates: dict[Flow, float | None]
    """A second, between the last two looks."""


class History:
    """Totals of one queue or stream at the looks that saw them change."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: deque[tuple[int, tuple[int, int, int]]] = deque(maxlen=KEPT + 1)

    def note(self, number: int, totals: tuple[int, int, int]) -> None:
        """Keep the totals of a look, if they differ from those before."""
        if not self._samples or self._samples[-1][1] != totals:
            self._samples.append((number, totals))

    def moved(self, number: int) -> tuple[int, int, int] | None:
        """Return by how much the totals grew up to a look, the last one; None if there was none before."""
        if not self._samples:
            return None
        if self._samples[-1][0] != number:
            return (0, 0, 0)
        if len(self._samples) < 2:
            return None
        (_, before), (_, now) = self._samples[-2], self._samples[-1]
        return (_grown(before[0], now[0]), _grown(before[1], now[1]), _grown(before[2], now[2]))

    def growths(self, first: int, end: int, which: int) -> list[int]:
        """Return by how much one total grew up to each look from `first` to before `end`."""
        found = [0] * (end - first)
        samples = list(self._samples)
        for (_, before), (number, now) in pairwise(samples):
            if first <= number < end:
                found[number - first] = _grown(before[which], now[which])
        return found


def _grown(before: int, now: int) -> int:
    """Return by how much a total grew; one that is smaller began anew."""
    return max(0, now - before)


class Board:
    """All that was seen so far. Used by one thread. Memory: 10 KiB a queue that moves all the time."""

    def __init__(self) -> None:
        self.look = Look(mode=Mode.FAILED, note="reading the spool ...", time_s=0.0)
        self.rows: dict[Key, Row] = {}
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._histories: dict[Key, History] = {}
        self._whole = History()
        self._times: deque[float] = deque(maxlen=KEPT + 1)
        self._number = -1
        """Of the last look that counts: one of new figures."""
        self._moving: set[Key] = set()
        """Whose rates may be others at the next look, though nothing else has changed."""

    def take(self, look: Look) -> None:
        """Show this look from now on. Cost: 10 µs for each queue that changed, a fraction of one for any other."""
        before, self.look = self.look, look
        self.events.extend(look.events)
        latest_s = self._times[-1] if self._times else -math.inf
        if (look.mode, look.pid) != (before.mode, before.pid) or look.time_s < latest_s:
            self._begin_anew()  # or their clock was set back
        elif look.time_s == latest_s:
            return  # the same figures, read again
        self._number += 1
        self._times.append(look.time_s)
        known = {Key("queue", name): (facts, before.queues.get(name)) for name, facts in look.queues.items()}
        known |= {Key("stream", name): (facts, before.streams.get(name)) for name, facts in look.streams.items()}
        for gone in self.rows.keys() - known.keys():
            del self.rows[gone], self._histories[gone]
            self._moving.discard(gone)
        for key, (facts, earlier) in known.items():
            if key not in self.rows or facts is not earlier or key in self._moving:
                self._renew(key, facts)
        self._whole.note(self._number, self._sums(look))

    def _begin_anew(self) -> None:
        """Forget what another owner counted, or what no rate can be reckoned from."""
        self.rows.clear()
        self._histories.clear()
        self._moving.clear()
        self._times.clear()
        self._whole = History()
        self._number = -1

    def _renew(self, key: Key, facts: dict[str, Any]) -> None:
        make, totals = (_queue_row, _queue_totals) if key.kind == "queue" else (_stream_row, _stream_totals)
        history = self._histories.setdefault(key, History())
        if self.look.mode is not Mode.DEAD:
            history.note(self._number, totals(facts))
        rates = self._rates(history)
        is_still = all(rate == 0 for rate in rates.values())
        (self._moving.discard if is_still else self._moving.add)(key)
        self.rows[key] = make(key, facts, rates)

    def _sums(self, look: Look) -> tuple[int, int, int]:
        totals = [_queue_totals(facts) for facts in look.queues.values()]
        totals += [_stream_totals(facts) for facts in look.streams.values()]
        return (sum(one[0] for one in totals), sum(one[1] for one in totals), sum(one[2] for one in totals))

    def _rates(self, history: History) -> dict[Flow, float | None]:
        moved = history.moved(self._number) if len(self._times) > 1 else None
        if moved is None:
            return dict.fromkeys(FLOWS)
        passed_s = self._times[-1] - self._times[-2]
        return {flow: grown / passed_s for flow, grown in zip(FLOWS, moved, strict=True)}

    def whole(self) -> dict[Flow, float | None]:
        """Return the rates of all queues and streams together."""
        return self._rates(self._whole)

    def series(self, key: Key | None, flow: Flow, most: int) -> list[float]:
        """Return the rates of the last looks, at most so many, the newest last. No key: of all together."""
        count = min(most, len(self._times) - 1)
        history = self._whole if key is None else self._histories.get(key)
        if count <= 0 or history is None:
            return []
        grown = history.growths(self._number + 1 - count, self._number + 1, FLOWS.index(flow))
        times = list(self._times)[-count - 1 :]
        return [one / (end - begin) for one, begin, end in zip(grown, times, times[1:], strict=False)]

    def shown(self, order: Order, wanted: str = "", kinds: Iterable[str] = ("queue", "stream")) -> list[Row]:
        """Return the rows to show, in order: those with `wanted` in the name, in small or capital letters."""
        part, some = wanted.casefold(), set(kinds)
        found = [row for row in self.rows.values() if row.key.kind in some and part in row.key.name.casefold()]
        return order.sort(found)


def _queue_totals(facts: dict[str, Any]) -> tuple[int, int, int]:
    return (facts.get("put_total", 0), facts.get("delivered_total", 0), facts.get("acked_total", 0))


def _stream_totals(facts: dict[str, Any]) -> tuple[int, int, int]:
    subscriptions = facts.get("subscriptions", ())
    return (
        facts.get("published_total", 0),
        sum(one.get("delivered_total", 0) for one in subscriptions),
        sum(one.get("acked_total", 0) for one in subscriptions),
    )


def _queue_row(key: Key, facts: dict[str, Any], rates: dict[Flow, float | None]) -> Row:
    held = facts.get("acquired_messages", 0)
    return Row(
        key=key,
        messages=facts["messages"],
        lag=facts.get("lag_messages", facts["messages"]),
        unacked=held,
        oldest_s=facts.get("oldest_unacked_s") if held else None,
        resident_bytes=facts.get("resident_bytes"),
        capacity_bytes=facts.get("capacity_bytes"),
        spilled_bytes=facts.get("spilled_bytes"),
        consumers=facts.get("consumers_total"),
        blocked=facts.get("blocked_putters", 0),
        is_paused=bool(facts.get("paused", False)),
        rates=rates,
    )


def _stream_row(key: Key, facts: dict[str, Any], rates: dict[Flow, float | None]) -> Row:
    subscriptions = facts.get("subscriptions", ())
    return Row(
        key=key,
        messages=facts["messages"],
        lag=max((one.get("lag_messages", 0) for one in subscriptions), default=0),
        unacked=sum(one.get("unsettled_messages", 0) for one in subscriptions),
        consumers=sum(one["members"] for one in subscriptions)
        if all("members" in one for one in subscriptions)
        else None,
        rates=rates,
    )


def _known(value: float | None) -> float:
    return -1.0 if value is None else value


MEASURES: dict[str, Callable[[Row], float]] = {
    "lag": lambda row: row.lag,
    "unacked": lambda row: row.unacked,
    "oldest": lambda row: _known(row.oldest_s),
    "in/s": lambda row: _known(row.rates["in"]),
    "out/s": lambda row: _known(row.rates["out"]),
    "acked/s": lambda row: _known(row.rates["acked"]),
    "memory": lambda row: _known(row.resident_bytes),
    "spilled": lambda row: _known(row.spilled_bytes),
    "consumers": lambda row: _known(row.consumers),
    "blocked": lambda row: row.blocked,
}
"""What rows are sorted by, besides their names."""
ORDERS = ("name", *MEASURES)


@attrs.frozen
class Order:
    """How rows are sorted: names from the first on, figures from the largest on; or the other way round."""

    by: str = "lag"
    is_reversed: bool = False

    def sort(self, rows: list[Row]) -> list[Row]:
        """Return the rows in order; those that are equal by name."""
        found = sorted(rows, key=lambda row: (row.key.name, row.key.kind))
        if self.by == "name":
            return found[::-1] if self.is_reversed else found
        found.sort(key=MEASURES[self.by], reverse=not self.is_reversed)
        return found

    def moved(self, steps: int) -> Order:
        """Return the order that sorts by another column, to the right or to the left."""
        return Order(ORDERS[(ORDERS.index(self.by) + steps) % len(ORDERS)])

    def turned(self) -> Order:
        """Return it the other way round."""
        return attrs.evolve(self, is_reversed=not self.is_reversed)
