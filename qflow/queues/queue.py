"""A queue: what its users call. The whole of it: purge, browse, figures, checks, its end. Above `Outlet`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice, repeat
from typing import Any

from qflow import config
from qflow.config import Overflow, QueueSettings, SlowConsumer
from qflow.delivery import ONE_ATTEMPT, Entry, Segment
from qflow.errors import BrokerClosed, InvalidArgument, NotFound, QflowError, QueueDeleted, QueueFull, again
from qflow.events import EventKind
from qflow.memory.ledger import Account
from qflow.memory.run import NOTHING, Place, Run
from qflow.memory.run_list import RunList
from qflow.memory.schedule import Schedule
from qflow.memory.waiting import shelter, sheltered
from qflow.message import DELAYED, OVERHEAD_BYTES, SINGLE_BYTES, expires_of, is_logged, lane_of
from qflow.queues.backlog import NOWHERE, READ_AHEAD_BYTES, Unlocked
from qflow.queues.consumer import Consumer, Listed
from qflow.queues.holding import Held
from qflow.queues.outlet import Outlet, by_expiry
from qflow.queues.overflow import Depth, excess
from qflow.stats import QueueStats
from qflow.storage import block_log
from qflow.storage.log.transaction_log import Lane

EXPIRED_AT_ONCE = 10_000
DUE_AT_ONCE = 1_000

_logger = logging.getLogger("qflow")


class Queue(Outlet):
    """A named queue. Made by `Broker.declare_queue`; every method is thread-safe."""

    reserves_together = False
    """It has limits of its own; see `Together`."""

    def __init__(self, *arguments: Any, **parts: Any) -> None:
        """Made by `Broker`; the arguments are those of `Intake`."""
        super().__init__(*arguments, **parts)
        self._purged = 0
        self._start = self._messages()  # found at open
        self._oldest: tuple[Held | None, float] = (None, 0.0)
        self._slow_policy = SlowConsumer.NOTIFY
        self._refilling = False  # the capacity was raised: what is on disk may come back
        self._consumers: dict[Listed, None] = {}
        with self._lock:
            self._refresh()

    def __repr__(self) -> str:
        return f"<Queue {self._name!r}{', ended' if self._ended else ''}>"

    @property
    def account(self) -> Account:
        return self._account

    @property
    def lanes(self) -> list[Lane]:
        """Its lanes in the log; none if it is not durable."""
        return list(self._lanes.values())

    # Called by the writer of the log ------------------------------------------------------------------------------

    def purged(self, ends: dict[int, int]) -> None:
        """Drop everything: that all lanes are settled below these ends is committed, and nothing after that visible."""
        with self._lock:
            if any(self._purged_below.get(number, -1) < end for number, end in ends.items()):
                self._drop_all(ends)

    # Whole queue --------------------------------------------------------------------------------------------------

    @sheltered
    def purge(self) -> int:
        """Settle every message, acquired ones included; return how many. Late acks of them do nothing.

        Cost: one commit, whatever the depth; disk is given back in the background.
        """
        log = self._log
        with self._lock:
            self._check_open()
            before = self._purged
            if log is None:
                self._drop_all()
                return self._purged - before
            self._pending += 1  # what is not logged waits in line behind it
        try:
            batch = log.purge(self._lanes.values())
            log.wait(batch)
        finally:
            with self._lock:
                self._pending -= 1
        if batch.error is not None:
            raise again(batch.error)
        return self._purged - before

    def _drop_all(self, ends: dict[int, int] | None = None) -> None:
        """Forget every message, acquired ones included, and every number of a lane below its end. Under the lock."""
        ends = ends or {}
        dropped = self._messages()
        charged = self._visible_charge()
        self._purged += dropped
        self._gone += dropped
        self._message_bytes = 0
        self._acquired.clear()
        self._batches.clear()
        self._kept.clear()
        self._extended.clear()
        self._leaving.clear()
        for number, runs in self._lists.items():
            for run in runs.drop_all(ends.get(number, 0)):
                run.claim = None
                if run.place is Place.SPILLED:
                    self._trash.append(run.slots)
                run.records = NOTHING
            self._purged_below[number] = runs.next
        for schedule in self._schedules.values():
            self._trash += schedule.drop_all()
        self._skipped += self._messages()
        if self._front is not NOWHERE:
            self._choose_front()
        self._discharge(charged)

    # Entries by hand ---------------------------------------------------------------------------------------------

    def browse(self) -> Iterator[Entry]:
        """Yield every waiting entry in order, as it was when this was called; nothing is promoted or acquired.

        Priorities come from the highest, each followed by what is delayed in it. The sizes of spilled ones are on disk,
        and None here. Cost: 0.3 µs an entry, more for those in the log; memory 8 bytes for each resident message.
        """
        return self._entries(self._browsed())

    @sheltered
    def _browsed(self) -> list[Any]:
        """Return what `browse` shows, in parts."""
        with self._lock:
            self._check_open()
            parts: list[Any] = []
            for runs in self._ranked:
                number = runs.number
                for line in (runs, self._lists.get(number + DELAYED, ())):
                    places = [
                        (run.first, run.stop, run.place, [len(record) for record in run.records])
                        for run in line
                        if run.waiting
                    ]
                    if line is runs and number in self._schedules:
                        places += (
                            (sequence, sequence + 1, Place(state), [] if size is None else [size])
                            for sequence, size, state, _ in self._schedules[number].entries()
                        )
                        places.sort()
                    parts += places
                if number + DELAYED in self._schedules:
                    parts.append(list(self._schedules[number + DELAYED].entries()))
        return parts

    def _entries(self, parts: list[Any]) -> Iterator[Entry]:
        for part in parts:
            if isinstance(part, list):
                yield from (Entry(sequence, size, state, self, due_ms) for sequence, size, state, due_ms in part)
                continue
            first, stop, place, sizes = part
            if place is Place.LOGGED:
                yield from self._logged_entries(first, stop)
            else:
                known: Iterable[int | None] = sizes or repeat(None, stop - first)
                yield from (Entry(sequence, size, place.value, self) for sequence, size in enumerate(known, first))

    def _logged_entries(self, position: int, stop: int) -> Iterator[Entry]:
        while position < stop:
            found = shelter(partial(self._read_logged_entries, position, stop))
            if found is None:
                return
            for first, records in found.pieces:
                for sequence, record in enumerate(records, first):
                    yield Entry(sequence, len(record), Place.LOGGED.value, self)
            position = found.position

    def _read_logged_entries(self, position: int, stop: int) -> block_log.Replayed | None:
        log = self._log
        assert log is not None
        owner, number = self._owner, lane_of(position)
        with log.read() as txn:
            if self._ended is not None:
                return None
            row = block_log.read_row(txn, owner, number)
            return block_log.read(txn, owner, number, row, position, stop, READ_AHEAD_BYTES)

    @sheltered
    def spill_entry(self, sequence: int) -> str:
        """Spill one message; see `Entry.spill`."""
        claim = object()
        with self._lock:
            run = self._waiting_run(sequence)
            if run is None or run.place is not Place.RESIDENT or run.claim is not None:
                return self._state_of(run, sequence)
            runs = self._list_of(sequence)
            run = runs.cut_out(run, sequence)
            run.claim = claim
            self._refresh()
            records = list(run.records)
        slots = None
        try:
            slots = self._area.write(sequence, records)
        finally:
            with self._lock:
                freed = self._install_spilled(lane_of(sequence), run, claim, slots)
                installed = freed is not None
                if installed:
                    self._discharge(freed or 0)
                elif run.claim is None and run.records:
                    runs.join(run)
            if slots is not None and not installed:
                self._area.free(slots)
        with self._lock:
            return self._state_of(self._waiting_run(sequence), sequence)

    @sheltered
    def restore_entry(self, sequence: int) -> str:
        """Restore one message; see `Entry.restore`."""
        claim = object()
        with self._lock:
            run = self._waiting_run(sequence)
            if run is None or run.place is not Place.SPILLED or run.claim is not None:
                return self._state_of(run, sequence)
            runs = self._list_of(sequence)
            run = runs.cut_out(run, sequence)
            run.claim = claim
            try:
                need = run.largest + OVERHEAD_BYTES
                while self._borrow_room(need, need) < need:
                    if run.claim is claim and not self._room_for_head(need):
                        raise QueueFull(
                            f"message {sequence} of queue {self._name!r} finds no room in memory: what is acquired, or "
                            "on its way, takes it; settle some of it first"
                        )
                    if run.claim is not claim:
                        return self._state_of(self._waiting_run(sequence), sequence)
                self._read_in(runs, run, claim, need, False)
            finally:
                if run.claim is claim:
                    run.claim = None
                    runs.join(run)
                self._look_around()
            return self._state_of(self._waiting_run(sequence), sequence)

    def _waiting_run(self, sequence: int) -> Run | None:
        """Return the run of a waiting message; None if it is in a schedule. Under the lock.

        Raises:
            NotFound: it does not wait.
        """
        self._check_open()
        runs = self._lists.get(lane_of(sequence))
        run = runs.find(sequence) if runs is not None else None
        if run is None and not any(
            entry[0] == sequence for schedule in self._schedules.values() for entry in schedule.entries()
        ):
            raise NotFound(f"message {sequence} does not wait in queue {self._name!r} any more")
        return run

    def _state_of(self, run: Run | None, sequence: int) -> str:
        if run is not None:
            return run.place.value
        scattered = self._schedules.get(lane_of(sequence))
        entries = iter(()) if scattered is None else scattered.entries()
        return next((state for number, _, state, _ in entries if number == sequence), "delayed")

    def __len__(self) -> int:
        """Messages not settled: waiting and acquired."""
        if len(self._lists) > 1:
            return self._length()
        with self._lock:  # a straight line; see `waiting`
            return self._runs.next - self._skipped - self._gone - self._acked

    @sheltered
    def _length(self) -> int:
        with self._lock:
            return self._messages()

    @sheltered
    def stats(self) -> QueueStats:
        """Return a snapshot. Cost: O(runs + acquired), most of it outside the queue's lock."""
        counters = self._area.counters()
        with self._lock:
            tallies = {
                place: [
                    sum(column) for column in zip(*(runs.tally(place) for runs in self._lists.values()), strict=True)
                ]
                for place in Place
            }
            delayed = {number: schedule.tally() for number, schedule in self._schedules.items()}
            held = [list(batch.left()) for batch in self._batches]
            singles = [delivery.record for delivery in self._acquired]
            leaving = [part for one in self._leaving for part in one.segments]
            overhead = sum(schedule.overhead_bytes for schedule in self._schedules.values())
            visible, used = self._visible_charge() - overhead - SINGLE_BYTES * len(singles), self._used
            put_total = self._messages() + self._acked + self._gone - self._start
            acked, returned, purged = self._acked, self._returned, self._purged
            lost, quarantined, repaired = self._lost, self._quarantined, self._repaired
            lost_ranges = tuple(self._lost_ranges)
            expired, dropped, dead_lettered = self._expired, self._dropped, self._dead_lettered
            oldest = self._oldest_unacked_s()
        held_segments = [*chain.from_iterable(held), *leaving]
        acquired = len(singles) + sum(len(records) for _, records, _ in held_segments)
        acquired_bytes = sum(map(len, singles)) + sum(sum(map(len, records)) for _, records, _ in held_segments)
        resident = tallies[Place.RESIDENT][0] + sum(part.resident_messages for part in delayed.values())
        spilled = tallies[Place.SPILLED][0] + sum(part.spilled_messages for part in delayed.values())
        spilled_bytes = tallies[Place.SPILLED][1] - OVERHEAD_BYTES * tallies[Place.SPILLED][0]
        spilled_bytes += sum(part.spilled_bytes for part in delayed.values())
        logged, logged_charge = tallies[Place.LOGGED]
        logged_bytes = logged_charge - OVERHEAD_BYTES * logged
        messages = resident + spilled + logged + acquired
        settings = self.settings
        return QueueStats(
            name=self._name,
            durable=settings.durable,
            messages=messages,
            bytes=visible - OVERHEAD_BYTES * (resident + acquired) + spilled_bytes + logged_bytes,
            resident_messages=resident,
            resident_bytes=used,
            spilled_messages=spilled,
            spilled_bytes=spilled_bytes,
            logged_messages=logged,
            acquired_messages=acquired,
            acquired_bytes=acquired_bytes,
            lag_messages=messages - acquired,
            delayed_messages=sum(
                part.resident_messages + part.spilled_messages for number, part in delayed.items() if number >= DELAYED
            ),
            oldest_unacked_s=oldest,
            capacity_bytes=self._account.capacity,
            limit_messages=settings.limit_messages,
            limit_bytes=settings.limit_bytes,
            put_total=put_total,
            delivered_total=acked + returned + acquired,
            acked_total=acked,
            redelivered_total=returned,
            expired_total=expired,
            dropped_total=dropped,
            dead_lettered_total=dead_lettered,
            purged_total=purged,
            lost_total=lost,
            quarantined_total=quarantined,
            lost_ranges=lost_ranges,
            spill_repaired_total=repaired,
            spill_files_created_total=counters.created,
            spill_files_overwritten_total=counters.overwritten,
            spill_files_read_total=counters.read,
            spill_files_unlinked_total=counters.unlinked,
        )

    @sheltered
    def problems(self) -> list[str]:
        """Check every invariant; return what is wrong, in words."""
        with self._lock:
            found = list(self._backlog_problems())
            if min(self._pending, self._pending_messages, self._incoming, self._restoring) < 0:
                found.append("something on its way was given back twice")
            counted = self._count_bytes()
            if self.settings.limit_bytes is not None and self._message_bytes != counted:
                found.append(f"{self._message_bytes} bytes are counted for the limit, a recount gives {counted}")
            held = self._held_segments()
            runs = list(chain.from_iterable(self._lists.values()))
            delayed = [entry for schedule in self._schedules.values() for entry in schedule.entries()]
            waiting = sum(run.waiting for run in runs) + len(delayed) + sum(len(records) for _, records, _ in held)
            if waiting != self._messages():
                found.append(f"{self._messages()} messages by the counters, {waiting} by the list")
            for batch in self._batches:
                left = [record for _, records, _ in batch.left() for record in records]
                if batch.left_size() != (len(left), sum(map(len, left))):
                    found.append(
                        f"{batch!r} counts {batch.left_size()} unsettled messages and bytes, a recount differs"
                    )
            spilled = sorted(slot for run in runs if run.place is Place.SPILLED for slot in run.slots)
            spilled += [
                slot for schedule in self._schedules.values() for chunk in schedule.spilled for slot in chunk.slots
            ]
            spilled += [slot for slots in self._trash for slot in slots]
            found += self._area.problems(spilled)
            log = self._log
            if log is not None and not self._pending and not self._leaving and not log.busy and not log.failed:
                found += self._row_problems()
            return [f"queue {self._name!r}: {problem}" for problem in found]

    def _row_problems(self) -> Iterator[str]:
        """Compare rows and messages. Under the lock, while nothing is on its way."""
        held = [(first, records) for first, records, _ in self._held_segments()]
        for schedule in self._schedules.values():
            held += [(sequence, []) for sequence, *_ in schedule.entries()]
        in_rows = in_memory = 0
        for number, lane in self._lanes.items():
            row, runs = lane.row, self._lists[number]
            in_rows += row.messages
            in_memory += sum(run.waiting for run in runs if run.place is not Place.RESIDENT)
            in_memory += sum(is_logged(record) for run in runs for record in run.records)
            lowest = min((run.first for run in runs if run.waiting), default=runs.next)
            lowest = min([lowest, *(first for first, _ in held if lane_of(first) == number)])
            if row.floor > lowest or row.next < runs.next:
                yield (
                    f"the row of lane {number} has floor {row.floor} and next {row.next}, "
                    f"memory {lowest} and {runs.next}"
                )
        in_memory += sum(is_logged(record) for _, records in held for record in records)
        in_memory += sum(not records for _, records in held)
        if not any(lane.leaves_gaps for lane in self._lanes.values()) and in_memory != in_rows:
            yield f"the rows say {in_rows} messages, memory {in_memory}"

    # Ending ------------------------------------------------------------------------------------------------------

    def refuse_calls(self, reason: type[QflowError]) -> None:
        """End the queue: no new puts and gets, waiters are woken."""
        with self._lock:
            self._ended = self._ended or reason
            for consumer in self._consumers:
                consumer.end()
            if self._ended is BrokerClosed:
                self._keep_held()
            self._refresh()
            self._room.notify_all()
            self._arrived.notify_all()

    @property
    def was_deleted(self) -> bool:
        """It takes no calls any more, and its name is free, or about to be."""
        return self._ended is QueueDeleted

    @property
    def hides_attempts(self) -> bool:
        """Spilled delayed messages know how often they were delivered, and memory does not."""
        with self._lock:
            return any(schedule.tally().spilled_messages for schedule in self._schedules.values())

    def attempts(self) -> dict[int, tuple[int, list[tuple[int, int, int]]]]:
        """Return (below, ranges) by lane: earlier deliveries as they stand if everything acquired goes back now.

        Of messages below `below` memory knows all there is to know; a range is (first, end, number).
        """
        with self._lock:
            return {number: self._lane_attempts(number) for number in self._lanes}

    def _lane_attempts(self, number: int) -> tuple[int, list[tuple[int, int, int]]]:
        runs = self._lists[number]
        known = [
            (run.first, run.stop, run.marks // ONE_ATTEMPT)
            for run in runs
            if run.waiting and run.place is not Place.LOGGED
        ]
        for first, records, marks in self._held_segments():
            known.append((first, first + len(records), marks // ONE_ATTEMPT + 1))
        for schedule in self._schedules.values():
            known += ((first, end, marks // ONE_ATTEMPT) for first, end, marks in schedule.marked())
        below = next((run.first for run in runs if run.place is Place.LOGGED), runs.next)
        known = sorted(entry for entry in known if entry[2] and lane_of(entry[0]) == number)
        joined: list[tuple[int, int, int]] = []
        for first, end, count in known:
            if joined and joined[-1][1] == first and joined[-1][2] == count:
                joined[-1] = (joined[-1][0], end, count)
            else:
                joined.append((first, end, count))
        return below, joined

    def settle_down(self, drain: Callable[[], None], patience_s: float) -> None:
        """After `refuse_calls`: return when nothing is on its way; a put may have reserved and not joined yet."""
        deadline = self._monotonic() + patience_s
        while True:
            drain()
            with self._lock:
                if not (self._pending or self._leaving) or self._monotonic() > deadline:
                    return
            threading.Event().wait(0.01)

    def let_go(self) -> None:
        """Drop everything from memory: the broker is closed or the queue deleted."""
        with self._lock:
            self._drop_all()
        self._ledger.close(self._account)

    def remove_spill(self) -> None:
        """Give the spill files to the wiper: the queue is deleted."""
        self._area.remove()

    def die(self, stub: object) -> None:
        """In a forked child: every call that takes the lock now says so."""
        self._lock = stub  # type: ignore[assignment]

    def alter(self, settings: QueueSettings) -> None:
        """Apply other settings: a lower capacity spills from the tail, a lower limit of a ring drops from the head."""
        with self._lock:
            self.settings = settings
            self._largest = settings.max_message_bytes + OVERHEAD_BYTES
            if settings.limit_bytes is not None:
                self._message_bytes = self._count_bytes()
            before = self._account.capacity
            self._ledger.set_capacity(self._account, settings.capacity_bytes)
            self._refilling = self._refilling or self._account.capacity > before
            self._look_around()
            self._room.notify_all()
            self._arrived.notify_all()
        self.spill_excess()
        self.fit()

    def fit(self) -> bool:
        """Take a step of what follows from an opening or an `alter`; return whether there may be more to do.

        Read what the log holds of delayed messages, drop what a ring has too much, restore what there is room for.
        """
        with self._lock:
            if self._ended is not None:
                return False
            for number in self._schedules:
                runs = self._lists[number]
                if number < DELAYED:
                    continue
                if runs.settle_head().place is not Place.RESIDENT and self._restore_head(runs):
                    return True
            if self.settings.on_overflow is Overflow.DROP_OLDEST:
                surplus = excess(self.settings, self._depth(), Depth(0, 0))
                if (surplus.messages > 0 or surplus.bytes > 0) and self._drop_oldest(surplus):
                    return True
        if self._refilling:
            self._refilling = self.refill()
        return self._refilling

    def _count_bytes(self) -> int:
        """Return the bytes of all messages. Cost: O(runs). Under the lock."""
        elsewhere = size = overhead = 0
        for runs in self._lists.values():
            for place in (Place.SPILLED, Place.LOGGED):
                count, charged = runs.tally(place)
                elsewhere += count
                size += charged - OVERHEAD_BYTES * count
        for schedule in self._schedules.values():
            part = schedule.tally()
            elsewhere += part.spilled_messages
            size += part.spilled_bytes
            overhead += schedule.overhead_bytes
        overhead += SINGLE_BYTES * len(self._acquired)
        return self._visible_charge() - overhead - OVERHEAD_BYTES * (self._messages() - elsewhere) + size

    # Consumers ---------------------------------------------------------------------------------------------------

    def consume(self, callback: Callable[[Any], object], *, prefetch: int = 100) -> Consumer:
        """Have a thread of its own call `callback(delivery)` for each message, until the consumer is closed.

        The delivery is acked when the callback returns and goes back when it raises, unless it settled it itself.

        Args:
            prefetch: how many messages are acquired at once, at most: the callback's slowness is the queue's
                back-pressure. What was acquired and not handed out goes back when the consumer is closed.

        Returns:
            The running `Consumer`, a context manager; `close()` waits for the callback that is running.
        """
        if not callable(callback):
            raise InvalidArgument(f"callback must be callable, not {type(callback).__name__}")
        config.parse_count(prefetch, "prefetch")
        consumer = Consumer(self, callback, prefetch)
        try:
            self._list_and_start(consumer)
        except BaseException:
            consumer.stop()  # nobody will close it
            raise
        return consumer

    @sheltered
    def _list_and_start(self, consumer: Consumer) -> None:
        self.list_consumer(consumer)
        consumer.start()

    @sheltered
    def list_consumer(self, consumer: Listed) -> None:
        """A consumer begins."""
        with self._lock:
            self._check_open()
            self._consumers[consumer] = None

    def tell_failure(self, sequence: int | None, error: BaseException) -> None:
        """A consumer's callback has raised; or, without a sequence, the consumer could not get a message."""
        what = "to get a message, and tries again" if sequence is None else f"with message {sequence}"
        _logger.error("the consumer of queue %r failed %s", self._name, what, exc_info=error)
        self._tell(EventKind.CONSUMER_FAILED, self._name, f"{what}: {error!r}")

    @sheltered
    def wake(self) -> None:
        """Let every waiting getter look whether it is to stop."""
        with self._lock:
            self._arrived.notify_all()

    @sheltered
    def forget_consumer(self, consumer: Listed) -> None:
        """A consumer has ended."""
        with self._lock:
            self._consumers.pop(consumer, None)

    @sheltered
    def on_slow_consumer(self, after_s: float | None, policy: SlowConsumer = SlowConsumer.NOTIFY) -> None:
        """Watch for messages that are held for longer than `after_s` seconds; None stops that.

        Each time there is one, the event `SLOW_CONSUMER` tells of it, and the policy is applied. Looked at once a
        second. While it is on, gets take 3 µs more: the time of each is kept.
        """
        if after_s is not None:
            after_s = config.parse_span(after_s, "after_s")
        try:
            policy = SlowConsumer(policy)
        except ValueError:
            choices = ", ".join(f"SlowConsumer.{one.name}" for one in SlowConsumer)
            raise InvalidArgument(f"policy must be one of {choices}, got {policy!r}") from None
        with self._lock:
            self._check_open()
            self._slow_after_s, self._slow_policy = after_s, policy
            self._refresh()

    def tick(self) -> bool:
        """What time does: expire, take back what is held for too long, tell of slow consumers. Once a second.

        Returns whether more is to expire than one call does.
        """
        more = False
        slow: list[Listed] = []
        with self._lock:
            if self._ended is not None:
                return False
            batches = (batch for batch in self._batches if batch.total)  # others belong to who waits for a message
            held = next(iter(self._acquired), None) or next(batches, None)
            if held is not self._oldest[0]:
                self._oldest = (held, self._monotonic())
            if self._is_leased():
                self._release_late()
            slow = self._look_for_slow()
            self._look_at_mark()
            for settled in [one for one in self._extended if one not in self._acquired and one not in self._batches]:
                del self._extended[settled]
            if self._timed or self.settings.ttl_s is not None:
                more = self._expire()
            if self._has_spilled and self._has_nothing_spilled():
                self._has_spilled = False
                self._tell(EventKind.SPILL_STOPPED, self._name)
            moment = self._next_due_ms()
            if self._getters and moment is not None and moment <= self._now_ms():
                self._arrived.notify_all()
        for consumer in slow:
            consumer.stop()
        return more

    def _oldest_unacked_s(self) -> float:
        since = min(
            (
                since
                for held in (self._acquired, self._batches)
                for since in islice(held.values(), 1)
                if since is not None
            ),
            default=None,
        )
        if since is None:
            held, since = self._oldest
            if held is None or (held not in self._acquired and held not in self._batches):
                return 0.0
        return max(0.0, self._monotonic() - since)

    def _look_for_slow(self) -> list[Listed]:
        """Tell of messages that are held for too long, apply the policy; return the consumers that are to stop."""
        after_s = self._slow_after_s
        age = self._oldest_unacked_s()
        if after_s is None or age <= after_s or not self._is_in_flight():
            return []
        depth = self._messages()
        self._tell(
            EventKind.SLOW_CONSUMER, self._name, f"a message is held for {age:.1f} s; {depth} messages are not settled"
        )
        if self._slow_policy is SlowConsumer.NOTIFY:
            return []
        everything = self._slow_policy is SlowConsumer.CLOSE
        late = self._release(after_s, f"on_slow_consumer allows, {after_s} s", respect_extensions=False)
        return [consumer for consumer in self._consumers if everything and consumer.holds(late)]

    def _expire(self) -> bool:
        """Let expired messages go that are first in their lane; return whether there may be more.

        Called with the lock held; lets go of it to restore, and to carry dead letters away.
        """
        for runs in self._ranked:
            gone = 0
            while gone < EXPIRED_AT_ONCE:
                run = runs.settle_head()
                now_ms = self._now_ms()
                if run.place is not Place.RESIDENT:
                    if run.place is Place.SPILLED and not 0 < run.expires_ms <= now_ms:
                        break
                    if run.place is Place.SPILLED and self.settings.dead_letter is None and run.claim is None:
                        gone += run.count
                        self._drop_run(runs, run)
                    elif not self._restore_head(runs):
                        if self._log is None or not self._leaving:
                            break
                        with Unlocked(self._lock):  # what has left memory makes room for the next
                            self._log.drain()
                        if self._ended is not None:
                            return False
                    continue
                late = 0
                for record in islice(run.records, EXPIRED_AT_ONCE):
                    if not 0 < expires_of(record) <= now_ms:
                        break
                    late += 1
                if not late:
                    break
                segments: list[Segment] = []
                gone += runs.take(late, segments)
                if not self._let_go_of((segments, "expired", "_expired")):
                    return False
            else:
                return True
        for number, schedule in self._schedules.items():
            if self._lists[number].settle_head().place is Place.RESIDENT:
                self._expire_delayed(schedule)
        return False

    def _expire_delayed(self, schedule: Schedule) -> None:
        """The same of what was delayed, as far as it is in memory. (Nothing expires before it is due.)"""
        late: list[Segment] = []
        segments: list[Segment] = []
        now_ms = self._now_ms()
        while not segments and len(late) < DUE_AT_ONCE and self._take_due(schedule, DUE_AT_ONCE, now_ms, segments):
            parts = [part for segment in segments for part in by_expiry(segment, now_ms)]
            first_kept = next((place for place, (_, is_late) in enumerate(parts) if not is_late), len(parts))
            late += [part for part, _ in parts[:first_kept]]
            segments = [part for part, _ in parts[first_kept:]]
        self._give_back(segments)
        self._let_go_of((late, "expired", "_expired"))

    def _drop_run(self, runs: RunList, run: Run) -> None:
        """Drop a spilled run without reading it: everything in it has expired. Under the lock."""
        count, size = run.count, run.charged - OVERHEAD_BYTES * run.count
        if self._log is not None and not self._log.failed:
            settled = block_log.Settled(run.first, run.end, run.logged_count, run.logged_bytes)
            self._log.settle(self._log_lane(run.first), [settled])
        self._trash.append(run.slots)
        runs.drop_front(run, run.end, count, run.charged)
        self._gone += count
        self._expired += count
        self._message_bytes -= size
        self._look_around()
