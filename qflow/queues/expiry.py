"""Expiry: messages whose time is over leave, whether or not somebody gets. Under the queue's lock.

What is first in its lane goes at once. What lies behind messages that stay is looked for by maintenance, a part of a
run, or of a schedule, at a time; a run, or a shelf of a schedule, remembers when the first of its messages expires, and
is not looked at before.
"""

from __future__ import annotations

from itertools import islice

from qflow.delivery import Segment
from qflow.memory.run import Place, Run
from qflow.memory.run_list import OWN_RUN, RunList
from qflow.memory.schedule import Schedule
from qflow.message import OVERHEAD_BYTES, RETURNED, expiries, lane_of
from qflow.queues.context import Unlocked
from qflow.queues.dead_letters import Cause
from qflow.queues.exits import FOREVER_MS, Exits, Fate
from qflow.queues.held import Held
from qflow.queues.lanes import Lanes, by_expiry, sorted_out
from qflow.queues.restorer import Restorer
from qflow.queues.source import Source
from qflow.queues.spiller import Spiller
from qflow.storage.log.rows import Settled

EXPIRED_AT_ONCE = 10_000
DUE_AT_ONCE = 1_000
DROPPED = 100
"""To drop a run that was spilled takes as long as to look at so many runs;"""
ASIDE = 16
"""to set a run aside takes about as long as to let so many messages go."""


class Expiry:
    """See the module."""

    def __init__(
        self, lanes: Lanes, held: Held, source: Source, spiller: Spiller, restorer: Restorer, exits: Exits
    ) -> None:
        self._context = lanes.context
        self._lanes = lanes
        self._held = held
        self._source = source
        self._spiller = spiller
        self._restorer = restorer
        self.exits = exits
        self._looked_to: dict[int, int] = {}  # by lane: where `expire_behind` goes on
        self.is_under_way = False
        """A thread lets messages go: it lets go of the lock meanwhile."""

    def expire(self, *, hurries: bool = False) -> bool:
        """Let expired messages go that are first in their lane; return whether there may be more.

        Who `hurries` waits for what is behind them: what is known to have expired is left to `expire_behind`.
        """
        sets_aside = hurries and self._context.settings.dead_letter is None  # those go in their order
        for runs in self._lanes.ranked:
            gone = 0
            while gone < EXPIRED_AT_ONCE:
                run = runs.settle_head()
                now_ms = self._context.now_ms()
                if run.place is not Place.RESIDENT:
                    if run.place is Place.SPILLED and not 0 < run.expires_ms <= now_ms:
                        break
                    if run.place is Place.SPILLED and self._context.settings.dead_letter is None and run.claim is None:
                        gone += run.count
                        self._drop_run(runs, run)
                    elif not self._restorer.restore_head(runs) and not self._have_left():
                        break
                    continue
                late = run.late(now_ms)
                if late and sets_aside and _set_aside(runs, run, late):
                    gone += ASIDE
                    continue
                late = min(late, EXPIRED_AT_ONCE) or _count_late(run, now_ms)
                if not late:
                    break
                segments: list[Segment] = []
                gone += runs.take(late, segments)
                if not self.exits.let_go_of((segments, Cause("expired"), Fate.EXPIRED)):
                    return False
            else:
                return True
        more = False
        for number, schedule in list(self._lanes.schedules.items()):  # others may come meanwhile
            unread = self._lanes.lists.get(number)
            if unread is None or unread.settle_head().place is Place.RESIDENT:
                more |= self._expire_delayed(number, schedule)
        return more

    def drop_head(self, runs: RunList) -> bool:
        """Drop what is first in a lane if it is spilled and all of it has expired, unread; tell whether it was."""
        run = runs.head
        if run.place is not Place.SPILLED or not self._may_expire(run, self._context.now_ms()):
            return False
        self._drop_run(runs, run)
        return True

    def _have_left(self) -> bool:
        """Return whether some of what expired has left memory, when the log has done what it was handed for that.

        Lets go of the lock. What is leaving and was not handed over may wait for room itself, for ever.
        """
        log, leaving = self._context.log, self._held.leaving
        late = [one for one in leaving if one.fate is Fate.EXPIRED and one.unit is not None and one.unit.joined]
        if log is None or not late:
            return False
        with Unlocked(self._context):
            log.drain()
        return self._context.ended is None and any(one.has_left for one in late)

    def expire_behind(self) -> bool:
        """Let expired messages go that lie behind others, some of them; return whether there may be more."""
        more = any(self._expire_in(runs) for runs in self._lanes.ranked)
        schedules = list(self._lanes.schedules.values())  # others may come meanwhile
        return any(self._expire_scheduled(schedule) for schedule in schedules) or more

    def _expire_in(self, runs: RunList) -> bool:
        now_ms = self._context.now_ms()
        looked = 0
        at = self._looked_to.pop(runs.number, 0)
        while looked < EXPIRED_AT_ONCE:
            if runs.aside:
                segment = runs.take_aside(EXPIRED_AT_ONCE - looked)
                looked += len(segment.records)
                if not self.exits.let_go_of(([segment], Cause("expired"), Fate.EXPIRED)):
                    return False
                continue
            for run in islice(runs.behind(at), EXPIRED_AT_ONCE - looked):
                looked += 1
                at = run.first
                if self._may_expire(run, now_ms):
                    break
            else:
                if looked < EXPIRED_AT_ONCE:
                    return False
                break
            if run.place is Place.SPILLED:
                looked += DROPPED
                self._drop_run(runs, run)
                continue
            if (late := run.late(now_ms)) and _set_aside(runs, run, late):
                continue
            part = runs.cut_right(run, EXPIRED_AT_ONCE)
            looked += len(part.records)
            soonest_ms = min(filter(None, expiries(part.records)), default=FOREVER_MS)
            if soonest_ms <= now_ms:
                if not self._expire_from(runs, part, now_ms):
                    return False
            elif part is runs.open:
                return False  # it remembers nothing, for more may come
            else:
                part.soonest_ms = soonest_ms
        self._looked_to[runs.number] = at
        return True

    def _may_expire(self, run: Run, now_ms: int) -> bool:
        """Tell whether a run may hold something that has expired, which can go without being read."""
        if run.claim is not None or run.place is Place.LOGGED:
            return False
        if run.place is Place.SPILLED:
            return 0 < run.expires_ms <= now_ms and self._context.settings.dead_letter is None
        return bool(run.records) and run.soonest_ms <= now_ms

    def _expire_from(self, runs: RunList, run: Run, now_ms: int) -> bool:
        """Let go of what has expired of a run in memory; the others go back, so that few runs are left of it.

        Returns:
            False if some could not leave now.
        """
        kept, late, _ = sorted_out([runs.remove(run)], None, now_ms)
        self._source.give_back(kept)
        return self.exits.let_go_of((late, Cause("expired"), Fate.EXPIRED))

    def _expire_scheduled(self, schedule: Schedule) -> bool:
        """The same of a schedule, due or not, as far as it is in memory.

        (What was put with a delay expires after that; what was given back with one may do so meanwhile.)
        """
        late: list[Segment] = []
        more = self._source.take_expired(schedule, self._context.now_ms(), EXPIRED_AT_ONCE, late)
        return self.exits.let_go_of((late, Cause("expired"), Fate.EXPIRED)) and more

    def _expire_delayed(self, number: int, schedule: Schedule) -> bool:
        """Let go of what is due first of a schedule, in memory, and has expired; return whether there may be more."""
        late: list[Segment] = []
        segments: list[Segment] = []
        due_ms: int | None = None
        now_ms = self._context.now_ms()
        gone, more = 0, False
        while not segments and not more:
            due_ms = schedule.next_due_ms()
            if due_ms is None or due_ms > self._lanes.now_ms(number):
                break
            taken = self._source.take_due(schedule, DUE_AT_ONCE, due_ms, segments)
            if not taken:
                break
            parts = [part for segment in segments for part in by_expiry(segment, now_ms)]
            first_kept = next((place for place, (_, is_late) in enumerate(parts) if not is_late), len(parts))
            late += [part for part, _ in parts[:first_kept]]
            segments = [part for part, _ in parts[first_kept:]]
            gone += taken
            more = not segments and (gone >= EXPIRED_AT_ONCE or len(late) >= DUE_AT_ONCE)
        self._source.give_back(segments, due_ms or 0 if number >= RETURNED else 0, was_due=False)  # where they were
        return self.exits.let_go_of((late, Cause("expired"), Fate.EXPIRED)) and more

    def _drop_run(self, runs: RunList, run: Run) -> None:
        """Drop a spilled run without reading it: everything in it has expired."""
        lanes, count, charged = self._lanes, run.count, run.charged
        log = self._context.usable_log
        if log is not None:
            settled = Settled(run.first, run.end, run.logged_count, run.logged_bytes)
            log.settle(lanes.logged[lane_of(run.first)], [settled])
        self._spiller.trash.append(run.slots)
        runs.drop_front(run, run.end, count, charged)
        self.exits.count_off(count, charged - OVERHEAD_BYTES * count, Fate.EXPIRED)


def _set_aside(runs: RunList, run: Run, late: int) -> bool:
    """Set the front of a run aside, all of which has expired, for `Expiry.expire_behind`; if that is soon done."""
    behind = len(run.records) - late
    if behind > EXPIRED_AT_ONCE or late < OWN_RUN:
        return False
    if behind:
        runs.cut_right(run, behind)
    runs.set_aside(run)
    return True


def _count_late(run: Run, now_ms: int) -> int:
    """Return how many messages at the front of a run in memory have expired, as many as go at once at most."""
    late, wanted = 0, 1
    while wanted:
        moments = expiries(list(islice(run.records, late, late + wanted)))
        found = len(moments)
        if found and not 0 < min(moments) <= max(moments) <= now_ms:
            found = next(place for place, moment in enumerate(moments) if not 0 < moment <= now_ms)
        late += found
        if found < wanted:
            break
        wanted = min(8 * wanted, EXPIRED_AT_ONCE - late)  # as they are found: mostly it is none, or all
    return late
