"""What a broker tells of itself: statistics, to its users and in `stats.json`; and whether everything agrees."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Collection
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from qflow.adoption import Adoption
from qflow.importing import importing
from qflow.memory.ledger import Ledger
from qflow.memory.waiting import sheltered
from qflow.queues import looking
from qflow.queues.desk import Desk
from qflow.queues.making import figures
from qflow.queues.queue import Queue, parts_of
from qflow.queues.registry import Queues
from qflow.rates import NO_RATES, WINDOWS_S
from qflow.routing import Routing
from qflow.spool import Spool
from qflow.storage.files import storage_error
from qflow.streams.registry import Streams

if TYPE_CHECKING:
    from qflow.stats import BrokerStats

PACE = 200
"""`stats.json` is written so seldom that this takes one part in so many of the time of a processor."""
LONGEST_S = 10.0
"""But not more seldom than that."""
LOOK_S = 0.5
"""`changes` finds nothing anew that was found within that."""
HOLDERS_WRITTEN = 10
"""Of a queue, in `stats.json`."""
GONE_KEPT = 10_000
"""Names of queues that were deleted, for those who look at changes."""
_SUMS = ("resident_bytes", "spilled_bytes", "messages")
"""Of the broker, which are those of its queues."""
_AGEING = ("oldest_unacked_s", "blocked_longest_s", "rates", "holders", "consumers")
"""Figures that change by themselves."""


class _Shown:
    """What was told last of a queue. Memory: 4 KiB, with its part of the file."""

    __slots__ = ("_at_s", "_steady", "_text", "facts", "look", "moved_s")

    def __init__(self, facts: dict[str, Any], now_s: float, before: _Shown | None) -> None:
        self.facts = facts
        """Fields of `QueueStats`. Never changed: others keep it."""
        self._at_s = now_s
        flow = looking.flow_in(facts)
        has_moved = any(flow) if before is None else flow != looking.flow_in(before.facts)
        self.moved_s: float = now_s if has_moved else before.moved_s if before else -math.inf
        """When a look found last that messages had come or gone."""
        self.look = 0
        """The number of the look at which it was another one."""
        self._steady = self._text = ""

    def grow_older(self, now_s: float, rates: dict[str, float]) -> None:
        """So much time has passed, and nothing else happened."""
        facts, passed_s = self.facts, now_s - self._at_s
        self._at_s = now_s
        self._text = ""
        self.facts = {
            **facts,
            "rates": rates,
            "oldest_unacked_s": facts["oldest_unacked_s"] + passed_s if facts["holders"] else 0.0,
            "blocked_longest_s": facts["blocked_longest_s"] + passed_s if facts["blocked_putters"] else 0.0,
            "holders": [{**one, "oldest_s": one["oldest_s"] + passed_s} for one in facts["holders"]],
            "consumers": [{**one, "since_s": one["since_s"] + passed_s} for one in facts["consumers"]],
        }

    @property
    def ages(self) -> bool:
        """Some of its figures change by themselves until the next look, and that is news."""
        has_rates = self._at_s - self.moved_s <= WINDOWS_S[-1] or any(self.facts["rates"].values())
        return bool(has_rates or self.facts["holders"] or self.facts["blocked_putters"])

    @property
    def text(self) -> str:
        """A member of a JSON object."""
        facts = self.facts
        if not self._text:
            if not self._steady:
                steady = {name: value for name, value in facts.items() if name not in _AGEING}
                self._steady = f"{json.dumps(facts['name'])}: {json.dumps(steady)[:-1]}, "
            others = {name: facts[name] for name in _AGEING} | {"holders": facts["holders"][:HOLDERS_WRITTEN]}
            self._text = f"{self._steady}{json.dumps(others)[1:]}"
        return self._text


class Figures:
    """See the module."""

    def __init__(
        self,
        spool: Spool,
        ledger: Ledger,
        queues: Queues,
        streams: Streams,
        desk: Desk,
        routing: Routing,
        adoption: Adoption,
    ) -> None:
        self._spool = spool
        self._ledger = ledger
        self._queues = queues
        self._streams = streams
        self._desk = desk
        self._routing = routing
        self._adoption = adoption
        self._shown: dict[Queue, _Shown] = {}  # in the order of the looks at which they were other ones
        self._ageing: dict[Queue, None] = {}  # those of which figures change by themselves
        self._sums = dict.fromkeys(_SUMS, 0)  # of all that are shown
        self._texts: bytes | None = None  # of all that are shown, as long as none of them is another one
        self._changed: set[Queue] = set()
        self._gone: dict[str, int] = {}  # names of queues that are no more, and at which look that was so; in order
        self._forgotten = 0  # up to which look there may be names that are not among them any more
        self._look = int(spool.clock() * 1000)  # of a later owner of the spool it is higher
        self._looked_s = self._noted_s = spool.monotonic()
        self._has_rates = False  # they were figured at the last look
        self._lock = threading.Lock()  # held to change any of these
        self._writing = threading.Lock()  # held to renew the file
        self.troubles: dict[str, str] = {}
        """That of maintenance, which writes it."""
        self.late: Callable[[], dict[str, str]] = dict
        """What else failed when it was tried last, and why; of schedules."""
        self.due = -math.inf
        """When `stats.json` may be written again, on the monotonic clock."""

    def stats(self) -> BrokerStats:
        """Return a snapshot of the broker and each queue."""
        queues = {name: queue.stats() for name, queue in self._queues.named().items()}
        sums = {name: sum(getattr(stats, name) for stats in queues.values()) for name in _SUMS}
        return self._stats({**self._of_all(sums), "queues": queues})

    @sheltered
    def summary(self) -> BrokerStats:
        """Return `stats` without the queues, of which it knows what `changes` has found last. Cost: 0.1 ms."""
        with self._lock:
            sums = dict(self._sums)
        return self._stats({**self._of_all(sums), "queues": {}})

    def _stats(self, facts: dict[str, Any]) -> BrokerStats:
        with importing:
            from qflow.stats import BrokerStats, InboxStats, TimeStats

        times = {name: TimeStats(**facts[name]) for name in ("commit_times", "sync_times")}
        return BrokerStats(**{**facts, **times, "inbox": InboxStats(**facts["inbox"])})

    def _of_all(self, sums: dict[str, int]) -> dict[str, Any]:
        """Return what `BrokerStats` has but for the queues, of which these are the sums; plain, but for streams."""
        return {
            **sums,
            "resident_bytes": sums["resident_bytes"] + self._desk.borrowed + self._streams.room.used,
            "capacity_bytes": self._ledger.capacity,
            "commits_total": self._spool.log.commits,
            "journal_records": self._spool.log.held_back,
            "unrouted_total": self._routing.unrouted,
            "streams": {stream.name: stream.stats() for stream in self._streams.all()},
            "duplicates_total": self._streams.producers.duplicates_total,
            "inbox": self._adoption.figures(),
            "commit_times": self._spool.log.timers.commits.figures(),
            "sync_times": self._spool.log.timers.sync_figures(),
            "troubles": {**self.troubles, **self.late()},
        }

    @sheltered
    def note_changed(self, changed: Collection[Queue], awake: Collection[Queue] = ()) -> None:
        """What was written of some queues holds no more; of these, and of others that are awake, keep the totals."""
        now_s, before_s = self._spool.monotonic(), self._noted_s
        with self._lock:
            self._changed.update(changed)
            self._noted_s = now_s
        for queue in {*changed, *awake}:
            looking.note_totals(parts_of(queue), now_s, before_s)

    @sheltered
    def write(self) -> None:
        """Renew `stats.json` for those who look from outside: the figures of queues that were noted, and all others.

        Cost: 50 µs for each of those queues, 15 µs where one has rates, holders or who waits, 1 µs for any other.
        """
        with self._writing:
            began_s = time.thread_time()
            try:
                self._write()
            finally:
                self.due = self._spool.monotonic() + min(LONGEST_S, PACE * (time.thread_time() - began_s))

    def _write(self) -> None:
        spool = self._spool
        if not spool.place.is_here:
            return  # they would be those of another one
        with self._lock:
            self._renew(with_rates=True)
            if self._texts is None:
                self._texts = ", ".join([one.text for one in self._shown.values()]).encode()
            sums, queues = dict(self._sums), self._texts
        others = self._of_all(sums)
        if others["streams"]:
            with importing:
                from attrs import asdict  # a dear import, not for whoever has no streams

            others["streams"] = {name: asdict(stats) for name, stats in others["streams"].items()}
        facts = json.dumps({"pid": os.getpid(), "time_s": spool.clock(), "uuid": spool.uuid, **others})
        text = b'%s, "queues": {%s}}' % (facts[:-1].encode(), queues)
        try:
            spool.files.write_replacing(os.path.join(spool.path, "stats.json"), text)
        except OSError as error:
            raise storage_error(error, "write the statistics", spool.path) from error

    def _renew(self, *, with_rates: bool) -> None:
        """Have figured anew what may have changed: nothing is asked of any other queue. Under the lock."""
        now_s, rates = self._spool.monotonic(), looking.rates if with_rates else lambda _queue, _facts: NO_RATES
        self._changed |= self._queues.take_news()
        if self._changed or self._ageing:
            self._texts = None
        self._look += 1
        self._looked_s, self._has_rates = now_s, with_rates
        for queue in [queue for queue in self._ageing if queue not in self._changed]:
            known = self._shown[queue]
            if known.ages:
                known.look = self._look
                self._shown[queue] = self._shown.pop(queue)  # as the last one
            known.grow_older(now_s, rates(parts_of(queue), known.facts))
            self._note_ageing(queue, known)
        while self._changed:
            queue = self._changed.pop()
            if not self._queues.has(queue):
                self._forget(queue)
                continue
            facts = figures(queue, rates)
            known = _Shown(facts, now_s, self._take(queue))
            known.look = self._look
            self._shown[queue] = known
            for name in _SUMS:
                self._sums[name] += facts[name]
            self._note_ageing(queue, known)

    def _note_ageing(self, queue: Queue, known: _Shown) -> None:
        if known.ages or known.facts["consumers"]:
            self._ageing[queue] = None
        else:
            self._ageing.pop(queue, None)

    def _take(self, queue: Queue) -> _Shown | None:
        """Take what was shown of a queue out of all that is; None if nothing was."""
        known = self._shown.pop(queue, None)
        for name in _SUMS if known is not None else ():
            self._sums[name] -= known.facts[name]  # type: ignore[union-attr]
        return known

    def _forget(self, queue: Queue) -> None:
        """Show a queue no more that was deleted; those who look are told once."""
        self._ageing.pop(queue, None)
        if self._take(queue) is not None:
            self._gone.pop(queue.name, None)
            self._gone[queue.name] = self._look
            if len(self._gone) > GONE_KEPT:
                self._forgotten = self._gone.pop(next(iter(self._gone)))

    @sheltered
    def changes(self, since: int, *, with_rates: bool = True) -> tuple[int, dict[str, dict[str, Any]]]:
        """Return the number of this look, and which queues are not what they were at look number `since`.

        For those who look each second: nothing is asked of a queue that has not changed, and no more often for many who
        look. What only grows older, as a get that waits, is no change; what is held or blocked is told each time.

        Args:
            since: what the last call returned; 0 for all queues.
            with_rates: false where nobody wants them: a third of the cost is theirs. They may be 0 then.

        Returns:
            the number, and the fields of `QueueStats` as plain values, by the name of the queue; none of them for a
            queue that is no more. 0 and nothing, where it is not known any more which are gone since: begin anew.
        """
        with self._lock:
            is_old = self._spool.monotonic() - self._looked_s >= LOOK_S
            if is_old or not self._shown or (with_rates and not self._has_rates):
                self._renew(with_rates=with_rates)
            since = since if since <= self._look else 0
            if 0 < since < self._forgotten:
                return 0, {}
            gone = takewhile(lambda one: one[1] > since > 0, reversed(self._gone.items()))
            found: dict[str, dict[str, Any]] = {name: {} for name, _ in gone}
            shown = [*takewhile(lambda known: known.look > since, reversed(self._shown.values()))]
            found |= {known.facts["name"]: known.facts for known in reversed(shown)}
            return self._look, found

    def problems(self) -> list[str]:
        """Return what does not agree, in words. While no maintenance moves anything."""
        parts = (self._ledger, self._queues, self._streams, self._spool.log)
        return [problem for part in parts for problem in part.problems()]
