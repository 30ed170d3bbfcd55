"""Maintenance: the thread `qflow-maintenance`, and the steps it takes, a bounded part at a time.

It hands events to callbacks, adopts batches, does what time does, wipes, spills what nobody else spilled, removes from
the log what is settled or was deleted, and renews `stats.json`.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from qflow.adoption import Adoption
from qflow.errors import QflowError, again
from qflow.figures import Figures
from qflow.listeners import Bell, Listeners
from qflow.loggers import get_logger
from qflow.memory.changed import Changed
from qflow.memory.waiting import sheltered
from qflow.queues.parts import Parts
from qflow.queues.queue import Queue, parts_of
from qflow.queues.registry import Queues
from qflow.queues.tending import fit, has_something_to_do, tick
from qflow.spool import Spool
from qflow.starting import start
from qflow.streams.registry import Attempt, Streams, at_once
from qflow.troubles import LOG_TAKES, SPOOL_THERE

MAINTENANCE_S = 1.0
REST = 4
"""Maintenance that has much to do rests so many times as long as it worked: a fifth of the time is its share."""
LONGEST_REST_S = 0.1
"""But not longer: what took long because others were at work would else rest five times for them."""
REPORTED_S = 60.0
"""The same error of the same part is reported once in so long, though it came and went."""
WIPED_AT_ONCE = 256
REMOVING_S = 0.05
"""How long settled blocks are removed at once, a bounded number each commit."""
HOLLOWED_AT_ONCE = 4
CLEARED_AT_ONCE = 64
"""Deleted owners that are handed over for one commit: as many as it takes, see `removal.owners_within`."""

_logger = get_logger("qflow")


class Watch:
    """Which queues maintenance looks at: those that have changed since it did, and those that time does something to.

    Whoever changes a queue tells that, see `Changed`; what is under way while it is looked at is found in the next
    round. By one thread at a time.
    """

    def __init__(self, changed: Changed[Queue]) -> None:
        self._changed = changed
        self._awake: dict[Queue, bool] = {}  # what is to be looked at, and whether it has changed since it was

    def look(self) -> None:
        """Find what has changed. Cost: O(queues that have, or that are awake), and 1 ns for any other."""
        for queue in [queue for queue in self._awake if parts_of(queue).context.was_deleted]:
            del self._awake[queue]
        self._awake |= dict.fromkeys(self._changed.take(), True)

    def awake(self) -> list[Queue]:
        """Return what is to be looked at, as it was found last."""
        return list(self._awake)

    def changed(self) -> list[Queue]:
        """Return those of them that have changed since time did to them what it does."""
        return [queue for queue, has_changed in self._awake.items() if has_changed]

    def let_rest(self, queue: Queue) -> None:
        """Time has done to a queue what it does: look at it no more, if it has not changed since the last time."""
        if self._awake.get(queue):
            self._awake[queue] = False  # once more, for what was under way
        elif not has_something_to_do(parts_of(queue)):
            self._awake.pop(queue, None)


class Upkeep:
    """See the module. Its steps are taken by one thread at a time, which holds `moving`."""

    def __init__(
        self,
        spool: Spool,
        bell: Bell,
        queues: Queues,
        streams: Streams,
        adoption: Adoption,
        figures: Figures,
        listeners: Listeners,
    ) -> None:
        self._spool = spool
        self._bell = bell
        self._queues = queues
        self._watch = Watch(queues.changed)
        self._has_looked = False
        self._streams = streams
        self._adoption = adoption
        self._figures = figures
        self._listeners = listeners
        self.moving = threading.Lock()
        """Held while anything is moved by maintenance, and while everything is compared."""
        self._deleted: deque[int] = deque()
        """Numbers of what is to be removed from the log."""
        self._begun: deque[int] = deque()
        """Numbers of what one commit was not enough for."""
        self._turns = itertools.cycle((self._deleted, self._begun))
        """Each has every other commit: neither what is large nor what is many waits for the other."""
        self._ticked = -math.inf
        self._troubles = figures.troubles
        """Errors of parts of maintenance, until the part succeeds."""
        self._reported: dict[tuple[str, str], float] = {}
        """When a part was reported with an error, in the last minute."""
        self._tried: set[str] = set()  # what time did in the last round
        self.jobs: list[tuple[str, Callable[[], bool]]] = []
        """What else is done each second, under its name."""
        self._busy = True
        self._took = 0.0
        self._rest_s = self._rest_after(self._busy, self._took)
        self._due = self._written = -math.inf
        self._thread = threading.Thread(target=self._run, name="qflow-maintenance", daemon=True)

    def start(self) -> None:
        """Begin, in a thread."""
        start(self._thread)

    def end(self) -> None:
        """End, after the step that is being taken; a callback that asks for that goes on."""
        self._bell.end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def hurry(self) -> None:
        """Do at once what time does."""
        self._ticked = -math.inf
        self._bell.ring()

    # The thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._bell.wait(self._rest_s):
            self._rest_s = MAINTENANCE_S  # after a round that fails as a whole
            self.attempt("a round", self._take_round)

    def _take_round(self) -> None:
        """Do what is to be done each time the thread wakes, and what is due."""
        started = time.perf_counter()
        attempt, spool = self.attempt, self._spool
        self._queues.tick.now_s = spool.monotonic()
        attempt("where the spool lies", spool.follow)
        attempt(SPOOL_THERE, spool.check_there)
        attempt(LOG_TAKES, spool.log.check_usable)
        attempt("telling what was noted", spool.tell_noted)
        attempt("events", partial(self._listeners.tell_all, BaseException))  # also where a callback calls `sys.exit()`
        if spool.released:
            return  # a callback has closed the broker: the spool may be somebody else's by now
        attempt("the inbox", self._adoption.look)
        if self._busy or self._bell.rung or started >= self._due:  # else it was for the inbox alone
            self._due = started + MAINTENANCE_S
            with self.moving:
                self._busy = self._take_steps()
            self._look_after()
            self._took = time.perf_counter() - started
        self._rest_s = self._rest_after(self._busy, self._took)

    def _look_after(self) -> None:
        """Do what is done once a second, of the log and of what is told outside."""
        now_s = self._spool.monotonic()
        if now_s - self._written < MAINTENANCE_S:
            return
        self._written = now_s
        self._reported = {one: then_s for one, then_s in self._reported.items() if now_s - then_s < REPORTED_S}
        self.attempt("what was handed over", self._spool.log.look_after)
        self.attempt("readers that were killed", self._spool.log.forget_dead_readers)
        if now_s >= self._figures.due:
            self.attempt("statistics", self._figures.write)

    def _take_steps(self) -> bool:
        """Take each step once; return whether there is more to do at once."""
        attempt = self.attempt
        attempt("finding what has changed", self._watch.look)
        self._has_looked = True
        busy = attempt("what time does", lambda: self.tick(attempt))
        busy |= attempt("wiping", lambda: self._spool.wiper.step(WIPED_AT_ONCE))
        busy |= attempt("spilling", self.sweep)
        attempt("whether the disk takes what does not fit in memory", self.check_spilled)
        busy |= attempt("removing what is settled", self.remove_settled)
        busy |= attempt("removing what was deleted", self.remove_deleted)
        busy |= attempt("giving back what is settled", self.hollow)
        self._has_looked = False
        return busy

    def _rest_after(self, busy: bool, took: float) -> float:
        if busy:
            return min(max(0.01, REST * took), LONGEST_REST_S)
        soon = self._adoption.rest_s
        return MAINTENANCE_S if soon is None else soon

    def attempt(self, what: str, job: Callable[[], object]) -> bool:
        """Do a part of maintenance; one that fails is reported, tried again, and stops no other.

        The same error of the same part is reported once in a minute at most, and once until the part succeeds.

        Returns:
            whether there is more to do at once.
        """
        try:
            more = bool(job())
        except BaseException as error:  # `SystemExit`, too: the thread is to go on
            text = f"{type(error).__name__}: {error}"
            expected = isinstance(error, QflowError)
            if self._troubles.get(what) != text and not (expected and self._bell.ended):
                self._troubles[what] = text
                self._report(what, text, error, trace=not expected)
            return False
        self._troubles.pop(what, None)
        return more

    def _report(self, what: str, text: str, error: BaseException, *, trace: bool) -> None:
        """Tell the log of the process, unless it was told a little while ago."""
        now_s, path = self._spool.monotonic(), self._spool.path
        if now_s - self._reported.get((what, text), -math.inf) >= REPORTED_S:
            self._reported[what, text] = now_s
            words = "%s: maintenance (%s) failed and is tried again: %s"
            _logger.warning(words, path, what, error, exc_info=trace, spool=path, event="maintenance_failed")

    def _awake(self) -> list[Queue]:
        """Return the queues to look at, as they were when the thread began to take steps, or as they are."""
        if not self._has_looked:
            self._watch.look()
        return self._watch.awake()

    # Its steps ---------------------------------------------------------------------- each tells whether there is more

    def tick(self, attempt: Attempt = at_once) -> bool:
        """What time does to queues and streams, at most each half second."""
        now = self._spool.monotonic()
        if now - self._ticked < MAINTENANCE_S / 2:
            return False
        queues, tried = self._awake(), set()

        def each(what: str, job: Callable[[], bool]) -> bool:
            tried.add(what)
            return attempt(what, job)

        self._figures.note_changed(self._watch.changed(), queues)
        more = [each(f"queue {queue.name!r}", partial(self._tick, queue)) for queue in queues]
        more.append(self._streams.tick(each))
        more.append(each("keys that have expired", self._queues.keys.forget_expired))
        more += [each(what, job) for what, job in list(self.jobs)]
        for what in self._tried - tried:  # of what failed, only what is gone is not tried again
            self._troubles.pop(what, None)
        self._tried = tried
        self._ticked = -math.inf if any(more) else now
        return any(more)

    def _tick(self, queue: Queue) -> bool:
        more = tick(parts_of(queue))
        self._watch.let_rest(queue)  # not one that failed
        return more

    def sweep(self) -> bool:
        """Free spill files of purged messages, and spill what nobody else did."""
        more = False
        for queue in self._awake():
            spiller = parts_of(queue).spiller
            parts_of(queue).exits.let_go_of_dropped()  # whose purge was interrupted
            more |= spiller.sweep(WIPED_AT_ONCE) | fit(parts_of(queue)) | spiller.spill_left_over()
        return more

    def check_spilled(self) -> None:
        """Raises StorageError: puts wait for memory, and the disk did not take what was to be spilled last."""
        queues = [parts_of(queue) for queue in self._awake()]
        errors = [error for queue in queues if (error := queue.spiller.error) is not None]
        if errors and any(map(_waits_for_memory, queues)):
            raise again(errors[0])

    def remove_settled(self) -> bool:
        """Remove blocks below floors that one commit was not enough for."""
        log = self._spool.log
        lanes = [lane for queue in self._awake() for lane in parts_of(queue).logged_lanes if lane.removing]
        lanes += [lane for lane in self._streams.lanes if lane.removing]
        lanes = [lane for lane in lanes if lane.broken is None]
        if log.failed:
            return False
        ends = time.perf_counter() + REMOVING_S
        batch = None
        while lanes and time.perf_counter() < ends:
            for lane in lanes:
                batch = log.settle(lane, [])
            assert batch is not None
            log.commit(batch)
            lanes = [] if batch.short else [lane for lane in lanes if lane.removing and lane.broken is None]
        return batch is not None and not batch.short

    def hollow(self) -> bool:
        """Give back what is settled above floors; False also where there is no room."""
        log = self._spool.log
        lanes = [lane for queue in self._awake() for lane in parts_of(queue).logged_lanes if lane.hollow_due]
        if not lanes or log.failed:
            return False
        for lane in lanes[:HOLLOWED_AT_ONCE]:
            batch = log.hollow(lane)
        log.commit(batch)
        return batch.hollowed

    def remove_deleted(self) -> bool:
        """Remove what deleted queues and streams left in the log, many in each commit."""
        for deleted in (self._queues.deleted, self._streams.deleted):
            while deleted:
                self._deleted.append(deleted.pop())
        if self._spool.log.failed:
            return False
        ends = time.perf_counter() + REMOVING_S
        is_short = False
        while self._deleted or (self._begun and not is_short):
            waiting = next(self._turns)
            if not waiting or (waiting is self._begun and is_short):
                continue
            has_room, short = self._remove_some(waiting)
            if not has_room:
                return False
            is_short |= short
            if time.perf_counter() >= ends:
                break
        return bool(self._deleted or (self._begun and not is_short))

    def _remove_some(self, waiting: deque[int]) -> tuple[bool, bool]:
        """Remove in one commit as much as it may hold of the first of some.

        Returns:
            whether the disk has room for any, and whether some were left for want of it; see `Request.short`.
        """
        owners = list(itertools.islice(waiting, CLEARED_AT_ONCE))
        request = self._spool.log.delete(*owners)
        self._spool.log.commit(request)
        batch = request.batch
        assert batch is not None
        gone = set(batch.deleted)
        if batch.damage is not None:
            owner, error = batch.damage
            self._spool.report(f"what the deleted queue or stream number {owner} left stays in the log: {error}", 0)
            gone.add(owner)  # the next opening finds it again
        for _ in owners:
            waiting.popleft()
        left = [owner for owner in owners if owner not in gone]
        if left and batch.damage is None and batch.removes:
            self._begun.append(left.pop(0))  # the commit was full with it, or it is short of room
        waiting.extendleft(reversed(left))
        return batch.removes > 0, batch.short

    # What callers have done at once ------------------------------------------------------------------------------

    @sheltered
    def finish_wiping(self, most_s: float = math.inf) -> None:
        """Unlink spill files of before until none is left, or for about so long."""
        self._spool.check_open()
        ends = time.perf_counter() + most_s
        for _ in range(2):  # a round that was under way has not seen what was set aside since
            more = True
            while more:
                with self.moving:
                    more = self._spool.wiper.step(WIPED_AT_ONCE)
                if more and time.perf_counter() >= ends:
                    return

    def finish_removing(self) -> None:
        """Remove all that is settled below floors, or was deleted."""
        more = True
        while more:
            with self.moving:
                more = self.remove_settled() | self.remove_deleted()

    def check(self) -> list[str]:
        """Compare everything; return what does not agree, in words."""
        self._spool.check_open()
        with self.moving:
            return self._figures.problems()


def _waits_for_memory(queue: Parts) -> bool:
    """Tell whether puts wait, and the first of them for memory."""
    with queue.context.lock:
        return queue.admission.told_blocked()[2] == "capacity"
