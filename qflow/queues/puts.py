"""The way into a queue: what is put is checked, reserves room and depth, joins the log's open batch, and is published.

For the log a `Puts` is the publisher of the queue's lanes, for `Together` a place to put messages.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Any

from qflow import config
from qflow.config import QueueSettings
from qflow.delivery import Segment
from qflow.durations import Duration
from qflow.errors import MessageTooLarge, TransactionTooLarge, again
from qflow.memory.group import GROUP_BYTES, Group, groups_of
from qflow.memory.line import Wake
from qflow.memory.run import note_expiry
from qflow.memory.run_list import OWN_RUN
from qflow.memory.waiting import attend, collecting, is_main, refuse_finalizer, shelter, sheltered, straight
from qflow.message import (
    DELAYED,
    OVERHEAD_BYTES,
    Headers,
    Message,
    Record,
    by_due,
    charge,
    encode_headers,
    is_plain,
    lane_of,
)
from qflow.queues.admission import Admission
from qflow.queues.dead_letters import Cause
from qflow.queues.envelope import PLAIN, Envelope, Moment, check_durable, check_priority, times
from qflow.queues.exits import Exits
from qflow.queues.lanes import NOWHERE, TIMED, Lanes
from qflow.queues.overflow import Decision, Depth, check_can_ever_fit, when_full
from qflow.queues.putting import Putting, TurnedAway, depth_of
from qflow.queues.ring import Ring
from qflow.queues.showing import put_at_once, show_alone
from qflow.queues.spiller import Spiller
from qflow.storage.log.transaction_log import Put

NOTHING = Depth(0, 0)


class Puts:
    """See the module."""

    __slots__ = ("admission", "context", "exits", "gate", "lane", "lanes", "name", "owner", "ring", "spiller")

    reserves_together = False
    """It has limits of its own; see `Together`."""

    def __init__(self, lanes: Lanes, admission: Admission, spiller: Spiller, exits: Exits, ring: Ring) -> None:
        self.context = lanes.context
        self.name, self.owner = self.context.name, self.context.owner
        self.gate = lanes.gate
        self.lanes, self.admission = lanes, admission
        self.spiller = spiller
        self.exits, self.ring = exits, ring
        self.lane: Any = None
        """Its first lane as the log knows it; None if it is not durable."""

    @property
    def settings(self) -> QueueSettings:
        return self.context.settings

    # Checked ---------------------------------------------------------------------------------------------------------

    def envelope(
        self,
        headers: Headers | None,
        durable: bool | None,
        priority: int,
        ttl_s: Duration | None,
        delay_s: Duration | None,
        not_before: Moment | None,
        published: tuple[str, bytes | None] = ("", None),
    ) -> Envelope:
        """Return what the messages of one call have in common, after checking it; `published`: topic and key."""
        settings, lanes = self.context.settings, self.lanes
        logged = check_durable(durable, settings, self.name) or not settings.durable
        if priority:
            check_priority(priority, settings, self.name)
        number = priority or 0
        expires_ms = due_ms = 0
        if not (ttl_s is delay_s is not_before is settings.ttl_s is None):
            expires_ms, due_ms = times(settings, self.context.clock(), ttl_s, delay_s, not_before)
        if expires_ms and not lanes.closed & TIMED:
            self._begin_times()
        if due_ms:
            number += DELAYED
            if number not in lanes.schedules:
                self._begin_delayed(number)
        topic, key = published
        if not (headers or expires_ms or due_ms or topic or key) and logged:
            return Envelope(number, b"") if number else PLAIN
        lanes.mixed |= not logged
        prefix = Message(
            b"", encode_headers(headers), logged, expires_ms=expires_ms, due_ms=due_ms, topic=topic, key=key or b""
        )
        return Envelope(number, bytes(prefix), expires_ms)

    @sheltered
    def _begin_times(self) -> None:
        """From now on messages may expire."""
        with self.context.lock:
            self.lanes.close_front(TIMED, True)
            self.lanes.refresh()

    @sheltered
    def _begin_delayed(self, number: int) -> None:
        """Have a lane for delayed messages."""
        with self.context.lock:
            if number not in self.lanes.schedules:  # nobody opened it meanwhile
                self.lanes.open_delayed(number)

    def draft_all(self, lots: list[tuple[int, list[Record]]], *, dead: bool = False) -> list[Put]:
        """Return puts that have reserved nothing yet, after checking that they may pass together; see `begin`."""
        puts = [self.draft(records, is_plain(records), number, dead=dead) for number, records in lots]
        if len(puts) > 1 and self.context.has_limit and not dead:
            check_can_ever_fit(self.name, self.settings, *depth_of(puts))
        return puts

    def draft(
        self, records: list[Record], plain: bool, number: int, *, sizes: list[int] | None = None, dead: bool = False
    ) -> Put:
        """Return a put that has reserved nothing yet, after checking that it may pass; `sizes`: if they are known."""
        sizes = list(map(len, records)) if sizes is None else sizes
        size = sum(sizes)
        charged = self._charge_for(records, size, number, dead=dead)
        return Put(self.lanes.commit_lane(number), records, sizes, plain, size, charged)

    def draft_one(self, body: bytes) -> Put:
        """`draft` of a body and nothing else, for the first lane."""
        charged = len(body) + OVERHEAD_BYTES
        if charged > self.gate.largest or self.context.settings.limit_bytes is not None:
            self._charge_for([body], len(body), 0)  # refuses it, perhaps
        return Put(self.lane or self.lanes.commit_lane(0), [body], [len(body)], True, len(body), charged)

    def _charge_for(self, records: list[Record], size: int, number: int, *, dead: bool = False) -> int:
        """Return what records of `size` bytes together are charged, after checking that they may pass."""
        settings = self.context.settings
        if not dead:
            if size > settings.max_message_bytes:
                largest = max(map(len, records))
                if largest > settings.max_message_bytes:
                    raise MessageTooLarge(
                        f"a message of {largest} bytes is more than max_message_bytes={settings.max_message_bytes} of "
                        f"queue {self.name!r}: split it, or declare the queue with a larger one"
                    )
            most = self.context.shared.max_transaction_bytes
            if size > most and len(records) > 1:
                raise TransactionTooLarge(
                    f"{len(records)} messages of {size} bytes together are more than max_transaction_bytes="
                    f"{most}: put them in smaller batches"
                )
            if self.context.has_limit:
                check_can_ever_fit(self.name, settings, len(records), size)
        return size + OVERHEAD_BYTES * len(records) + (_for_groups(1, len(records)) if number >= DELAYED else 0)

    # Reserved --------------------------------------------------------------------------------------------------------

    def begin(
        self, puts: list[Put], timeout_s: Duration | None, *, leaving: Depth = NOTHING, dead: bool = False, own: int = 0
    ) -> Putting:
        """Begin to reserve for puts: all lanes at once, for one after the other might wait for each other.

        What is leaving the queue in the same commit makes room for them at its limits. Dead letters pass the limits:
        they were confirmed before, and have nowhere else to go. `own`: bytes that the commit has in the queue already.
        """
        size = depth_of(puts)
        depth = size if leaving is NOTHING else Depth(size.messages - leaving.messages, size.bytes - leaving.bytes)
        return Putting(self, puts, size, depth, self.context.deadline(config.parse_timeout(timeout_s)), dead, own)

    def reserve_at_once(self, put: Put) -> bool:
        """Reserve room for one put that was drafted, if nothing stands in its way; else False, and nothing was done.

        Callers who may be interrupted say before that it is `refused`, which is so no more where it has its room.
        """
        with self.context.lock:
            return self.admission.reserve(1, len(put.records), put.size, put.charged, put)

    @sheltered
    def would_admit(self, messages: int, size: int) -> bool:
        """Tell whether so many messages, of so many bytes together, pass the limits as things are."""
        with self.context.lock:
            return self.admission.admits(Depth(messages, size))

    def check_not_deleted(self) -> None:
        """Refuse to go on if the queue was deleted since room in it was reserved, perhaps long ago."""
        self.context.check_not_deleted()

    # Put -------------------------------------------------------------------------------------------------------------

    put_at_once = put_at_once

    def put(
        self, records: list[Record], plain: bool, number: int, timeout_s: Duration | None, expires_ms: int = 0
    ) -> int | None:
        """Put messages, which all expire then; return the first sequence, None if a limit turned them away."""
        log = self.context.log
        if log is not None and type(records[0]) is Message and not records[0].logged:
            direct = shelter(partial(self.put_unlogged, records, number))
            if direct is not None:
                return direct
        put = self.enter(records, plain, number, timeout_s, expires_ms=expires_ms)
        if put is None:
            return None
        if log is not None:
            log.wait(put)
            if put.error is not None:
                raise again(put.error)
        self.spiller.keep_within_bounds()
        return put.first

    def put_unlogged(self, records: list[Record], number: int) -> int | None:
        """Append messages that are not logged at once, if nothing of the queue is on its way before them."""
        size = sum(map(len, records))
        charged = self._charge_for(records, size, number)
        admission = self.admission
        with self.context.lock:
            lane = self.lanes.logged[number]
            lane.leaves_gaps = True
            beyond = lane.next + len(records) > lane.row.next
            if admission.pending or beyond or not admission.reserve(0, len(records), size, charged):
                return None
            first = lane.next
            lane.next = first + len(records)
            self._publish(first, records, size, charged, 0)
            return first

    def enter(
        self,
        records: list[Record],
        plain: bool,
        number: int,
        timeout_s: Duration | None,
        future: Future[int | None] | None = None,
        expires_ms: int = 0,
    ) -> Put | None:
        """Hand messages over, or make them visible where they are not logged; None if a limit turned them away."""
        config.parse_timeout(timeout_s)
        put = self.draft(records, plain, number)
        put.future, put.expires_ms = future, expires_ms
        if self.enter_at_once(put, urgent=future is None, waits=future is None):
            return put
        putting = self.begin([put], timeout_s)
        putting.alone = not put.lane.is_logged
        putting.in_turn = putting.alone and not is_main()
        try:
            attend(partial(self._try_enter, put, putting), putting.give_up)
        except TurnedAway as turned:
            shelter(partial(self.turn_away, records, turned.decision))
            return None
        return put

    def _try_enter(self, put: Put, putting: Putting, wake: Wake) -> float | None:
        """A step of `enter`: reserve room, then enter."""
        wait_s = putting.step(wake, may_work=True)
        if wait_s is None and not putting.given_up:
            if put.lane.is_logged:
                assert self.context.log is not None
                self.context.log.put(put)  # refused by `give_up`, if that fails
            elif put.first < 0:  # else another thread has done it
                self.publish_transient(put)
        return wait_s

    def turn_away(self, records: list[Record], decision: Decision) -> None:
        """Do with what was not admitted what the policy says."""
        if decision is Decision.DEAD_LETTER:
            self.exits.bury(self.context, [Segment(-1, records, 0)], Cause("limit"), None, True)
        self.count_turned_away(len(records), dropped=decision is Decision.DROP)

    @sheltered
    def count_turned_away(self, messages: int, *, dropped: bool) -> None:
        """Count what was not admitted at a limit."""
        self.exits.count_turned_away(messages, dropped=dropped)

    @straight
    def enter_at_once(self, put: Put, *, urgent: bool | None = None, waits: bool = False) -> bool:
        """Have a put handed over, or visible where it is not logged, if nothing stands in its way. Cost: 1 µs.

        A straight line. `urgent`: somebody waits for it; None if the log is called by itself, `now`. `waits`: the
        calling thread does so next, and may confirm it by itself.
        """
        if collecting:
            refuse_finalizer()
        records, size, charged, lane = put.records, put.size, put.charged, put.lane
        messages = len(records)
        number = lane.lane
        context, gate, admission = self.context, self.gate, self.admission
        if lane.is_logged:
            log = context.log
            assert log is not None
            log.check_usable()
            requests, one, turn = log.requests, (put,), log.turn
            alone, arrived = waits and messages < OWN_RUN and not number, gate.arrived
            entered = False
            try:
                with context.lock:  # a straight line; see `waiting`
                    used = gate.used + charged
                    if used > gate.passing:
                        return False
                    gate.used = used
                    gate.incoming += charged
                    admission.pending_messages += messages
                    admission.pending_bytes += size
                    admission.pending += 1
                    entered = put.joined = True
                    gate.changed[gate.place] = True
                    is_told = arrived.bell is not None or not (arrived.fresh or arrived.order)
                    if alone and turn.open and turn.request is None and not requests and is_told:
                        turn.request = put
                    else:
                        requests += one
                log.handed_over(put, urgent=urgent)
            except BaseException:
                log.interrupted(put)
                if entered and not put.joined:  # it came too late
                    shelter(partial(self.refused, put))
                raise
            return True
        first = self.put_at_once(records, size, number, plain=False, expires_ms=put.expires_ms)
        if first is not None:
            put.first = first
        return first is not None

    # Published -------------------------------------------------------------------------------------------------------

    def publish(self, first: int, records: list[Record], size: int, puts: int) -> None:
        """Make confirmed messages of `size` bytes together visible. Called by the writer of the log."""
        charged = size + OVERHEAD_BYTES * len(records)
        if lane_of(first) >= DELAYED:
            charged += _for_groups(puts, len(records))
        with self.context.lock:
            self._publish(first, records, size, charged, puts)

    show = show_alone

    def publish_transient(self, put: Put) -> None:
        """Make the messages of a queue that is not logged visible, with their batch if they have one."""
        try:
            with self.context.lock:
                first = self.lanes.lists[put.lane.lane].next
                self._publish(first, put.records, put.size, put.charged, 1, put)
        except BaseException:
            if put.visible:  # a handler that raises came before others were told
                with self.context.lock:
                    self._tell(len(put.records))
            raise

    def purged(self, ends: dict[int, int]) -> None:
        """Drop everything below these ends, by lane: their settling is committed, and nothing after that visible."""
        self.exits.purged(ends)

    def refused(self, put: Put) -> None:
        """Give back the room of a put that was not confirmed; callers who are interrupted at that may do it again."""
        with self.context.lock:
            self.admission.take_back(put)

    def note_left(self) -> None:
        """Have maintenance look: settled blocks of the log are left to be removed."""
        self.gate.note_change()

    @property
    def exceeds(self) -> bool:
        """Something passed on slack, and is to be spilled."""
        return self.spiller.exceeds

    def keep_within_bounds(self) -> None:
        """Spill what is above the bounds, if anything is."""
        self.spiller.keep_within_bounds()

    def _publish(
        self, first: int, records: list[Record], size: int, charged: int, puts: int, put: Put | None = None
    ) -> None:
        """Append what was reserved. Under the lock. `put`: that which is visible then."""
        gate, lanes, admission = self.gate, self.lanes, self.admission
        number = lane_of(first)
        runs = lanes.lists[number]
        count = len(records)
        gap = first - runs.next
        gone = self.context.ended is not None
        schedule = lanes.schedules[number] if number >= DELAYED and not gone else None
        groups: list[Group] = []
        overhead = 0
        if schedule is not None:
            groups = [
                group
                for due_ms, start, stop in by_due(records)
                for group in groups_of(due_ms, first + start, records[start:stop], 0)
            ]
            overhead = schedule.overhead_bytes
            runs.renew_open(first + count)
        elif gap or count >= OWN_RUN:
            tail = runs.tail_for(first, count)
        else:
            tail = runs.tail
        # No call from here on, so that an interrupt finds all of it done or nothing.
        runs.next = first + count
        if gone:
            runs.open.first = runs.next
            gate.used -= charged
            lanes.gone += count
        elif schedule is not None:
            schedule.shelves.incoming += groups
        else:
            tail += records
        if number:
            lanes.arrivals += 1
            if lanes.front_number < number < DELAYED and lanes.looked is not NOWHERE:
                lanes.front = runs if lanes.front is lanes.looked else NOWHERE
                lanes.looked, lanes.front_number = runs, number
        lanes.skipped += gap
        lanes.message_bytes += size
        gate.incoming -= charged
        gate.changed[gate.place] = True
        admission.pending -= puts
        admission.pending_messages -= count
        admission.pending_bytes -= size
        if put is not None:
            put.first, put.visible = first, True
        if schedule is not None:  # what was reserved for its groups, against what they take
            lanes.cover(schedule.overhead_bytes - overhead - (charged - charge(records)))
        elif put is not None and put.expires_ms:
            note_expiry(runs.open, first, count, put.expires_ms)
        self._tell(count)
        gate.borrow_ahead(charged)

    def _tell(self, count: int) -> None:
        """After messages have become visible: wake who waits for them, or for what they no longer stand before."""
        gate, admission = self.gate, self.admission
        if gate.getters:
            gate.arrived.notify(count)
        if gate.room.watching:
            gate.room.notify()
        if admission.line and when_full(self.context.settings) is Decision.MAKE_ROOM:
            admission.admit_line()  # what was on its way in is there now, and may be dropped


def _for_groups(puts: int, messages: int) -> int:
    """Return what puts of delayed messages reserve for their groups in the schedule, which take that or less."""
    return GROUP_BYTES * puts + messages
