"""One queue's messages: in memory as far as there is room, else in the spill store or the log.

The lower half of a queue. It owns the run list and the charge against the ledger, and moves runs between memory and
disk. The rules of room:

    used ≤ borrowed + slack        charged bytes: waiting in memory, acquired, on the way in, being restored
    borrowed ≤ capacity            what the ledger lent; the broker's queues together never more than its capacity

What a schedule keeps of delayed messages it has spilled, 8 bytes each, is charged and cannot be spilled in its turn:
where that alone is more than the capacity, it is on slack.

*Slack* is the documented exception, so that nothing is ever stuck: one put at a time may pass when nothing can be
spilled, to be spilled as soon as it is visible, and a queue with no delivery in flight may hand out one message.

When there is no room, the tail-most chunk of this queue is spilled, or, where the broker's capacity is the bound, of
the queue that has most. No I/O happens under a lock: a run on the move carries a claim, and what was moved counts only
if the claim still stands.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from typing import Any, Protocol

from qflow.delivery import MAY_BE_REPEATED, ONE_ATTEMPT
from qflow.errors import CorruptionError, NotFound, StorageError
from qflow.events import EventKind, Teller
from qflow.memory.chunk import Chunk
from qflow.memory.group import GROUP_BYTES, Group
from qflow.memory.ledger import Account, Ledger
from qflow.memory.line import Line
from qflow.memory.run import Place, Run
from qflow.memory.run_list import RunList
from qflow.memory.schedule import Schedule, index_charge
from qflow.message import (
    DELAYED,
    LANE_SHIFT,
    OVERHEAD_BYTES,
    Record,
    by_due,
    charge,
    due_of,
    is_logged,
    is_plain,
    lane_of,
)
from qflow.stats import PROBLEMS_KEPT
from qflow.storage import block_log
from qflow.storage.block_log import Row, Settled
from qflow.storage.log.transaction_log import Lane, TransactionLog
from qflow.storage.spill.store import Slots, SpillArea

READ_AHEAD_BYTES = 1024 * 1024
"""Restored at once, at most; and no more than an eighth of the capacity."""
RETRY_S = 0.5
"""A spill that failed is tried again after so long, while somebody waits for it."""
NEVER = -1
ALWAYS = 2**62


SPARED_CHUNKS = 8
"""What a queue keeps of what it has borrowed and does not use, until others need it: its next batch borrows nothing."""
NOWHERE = RunList(-1)
"""Where a fast get finds nothing, and goes the long way."""


class Relief(Protocol):
    """Who can make other queues give way: the broker."""

    def __call__(self, account: Account, missing: int) -> bool: ...


class Unlocked:
    """Lets go of a lock for the length of a block; has it again afterwards, whatever interrupts.

    An interrupt can strike before or after the lock was taken again, so the lock must know whose it is: an RLock. (It
    costs the hot path nothing measurable.)
    """

    __slots__ = ("_lock",)

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.release()

    def __exit__(self, *_: object) -> None:
        interrupt: BaseException | None = None
        while not self._lock._is_owned():
            try:
                self._lock.acquire()
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


class Backlog:
    """See the module. Methods without a lock in their description take it themselves."""

    __slots__ = (
        "__dict__", "__weakref__", "_account", "_acked", "_acquired", "_ceiling", "_front", "_getters",
        "_give_back_below", "_largest", "_lock", "_log", "_passing", "_runs", "_tail", "_used",
    )  # fmt: skip
    """What the hot path of a queue reads and writes; the rest, too much for an inline dictionary, is in `__dict__`."""

    def __init__(
        self,
        name: str,
        *,
        account: Account,
        ledger: Ledger,
        area: SpillArea,
        log: TransactionLog | None,
        rows: dict[int, Row] | None,
        owner: int,
        priorities: int,
        relief: Relief,
        report: Callable[[str, int], None],
        tell: Teller,
    ) -> None:
        self._name = name
        self._account = account
        self._ledger = ledger
        self._area = area
        self._log = log
        self._relief = relief
        self._report = report
        self._tell = tell
        self._lock = threading.RLock()
        self._arrived = Line(self._lock)
        """Getters wait here: for a message, for a restore that somebody else does, for room to restore."""
        self._getters = 0
        self._starved = 0
        """Those of them who wait for room, not for a message."""
        self._room = Line(self._lock)
        """Putters wait here: for room in memory, or for depth below a limit."""
        self._putters = 0
        self._at_limit = False
        """A put was not admitted at once, and the depth has not come down to the mark since."""
        self._used = 0
        self._ceiling = NEVER
        """A plain put is admitted at once while `_used` stays at or below; NEVER sends it the long way."""
        self._passing = NEVER
        """The same for a put that takes its way through the log, or has a priority or headers."""
        self._give_back_below = NEVER
        """A settle that leaves less than this used looks for something to do."""
        self._put_slack = 0
        self._get_slack = 0
        self._incoming = 0  # charged for puts not yet visible
        self._restoring = 0  # charged for records being read
        self._spilling = False
        self._has_spilled = False  # something was spilled, and since then not everything has been found in memory
        self._spill_error: StorageError | None = None
        self._skipped = 0
        """Sequences below the `next` of all lanes that were never waiting here: next - skipped - gone = messages."""
        self._gone = 0
        self._message_bytes = 0  # kept where there is a limit in bytes
        self._trash: list[Slots] = []  # of messages that were purged; freed by maintenance
        self._lost = self._quarantined = self._repaired = 0
        self._lost_ranges: list[tuple[int, int]] = []
        self._undercounted = False  # the log was found to hold more than its row says
        self._owner = owner
        self._lists: dict[int, RunList] = {}
        """Each lane's messages, by number; of a delayed lane, what the log holds and the schedule does not know yet."""
        self._schedules: dict[int, Schedule] = {}
        """What waits for its time, by the number of its lane.

        And, by the number of a priority, what of it came back scattered: single messages, too many to be runs. Those
        are due at once, and come in order of sequence with what the lane's list holds.
        """
        self._lanes: dict[int, Lane] = {}
        """The same lanes as the log knows them."""
        for number in {**dict.fromkeys(range(priorities)), **(rows or {})}:
            self._open_lane(number, rows)
        self._runs = self._lists[0]
        self._ranked = [self._lists[number] for number in reversed(range(priorities))]
        """Lanes to take from, the highest priority first."""
        self._lane = self._lanes.get(0)
        self._tail = self._runs.open.records
        """Where plain messages are appended."""
        self._front = NOWHERE
        """The lane a fast get takes from."""
        self._front_number = 0

    # Lanes ---------------------------------------------------------------------------------------- under the lock

    def _open_lane(self, number: int, rows: dict[int, Row] | None) -> None:
        """Begin a lane, with what the log holds of it."""
        first = number << LANE_SHIFT
        row = Row(next=first, floor=first)
        if rows is not None:
            row = rows.get(number, row)
            if not row.messages:
                row = block_log.purge(row, row.next)  # numbers that were reserved, and nothing else
            self._lanes[number] = Lane(self._owner, number, row, self)  # type: ignore[arg-type]
        runs = self._lists[number] = RunList(row.next)
        self._skipped += row.next - row.messages
        self._message_bytes += row.bytes
        if row.messages:
            runs.add(Run.logged(row.floor, row.next, row.messages, row.bytes, 0))
        if number >= DELAYED:
            self._schedules[number] = Schedule()

    def _list_of(self, sequence: int) -> RunList:
        """Return the messages of a sequence's lane."""
        return self._lists[sequence >> LANE_SHIFT]

    def _log_lane(self, sequence: int) -> Lane:
        """Return a sequence's lane of the log."""
        return self._lanes[sequence >> LANE_SHIFT]

    def _all_next(self) -> int:
        """Return the sum of what each lane's next sequence is."""
        lists = self._lists
        return self._runs.next if len(lists) == 1 else sum(runs.next for runs in lists.values())

    def _choose_front(self) -> None:
        """Let fast gets take from the highest priority that has something in memory, or nothing above it."""
        for runs in self._ranked:
            head = runs.head
            if head.records or runs is self._runs or (head is not runs.open and runs.settle_head().waiting):
                self._front = runs
                self._front_number = runs.number
                return

    # Charging --------------------------------------------------------------------------------------- under the lock

    def _charge(self, amount: int) -> bool:
        """Charge bytes if there is room, borrowing where that helps. Under the lock."""
        account = self._account
        missing = self._used + amount - account.borrowed
        if missing > 0:
            if not self._ledger.borrow(account, missing):
                return False
            self._refresh()
        self._used += amount
        return True

    def _cover(self) -> int:
        """Borrow for what is charged above the bounds; return how much still is. Under the lock."""
        excess = self._used - self._account.borrowed
        if excess > 0:
            self._ledger.borrow_most(self._account, excess)
        elif not (self._put_slack or self._get_slack):
            return 0
        return self._trim_slack()

    def _trim_slack(self) -> int:
        """Give up slack that is not needed any more, wake waiters; return what is above the bounds. Under the lock."""
        over = max(0, self._used - self._account.borrowed)
        self._get_slack = min(self._get_slack, over)
        self._put_slack = min(self._put_slack, over - self._get_slack)
        if self._putters and self._wakes_putters():
            self._room.notify_all()
        self._refresh()
        return over

    def _discharge(self, amount: int) -> None:
        """Give charged bytes back, wake who waits for them. Under the lock."""
        self._used -= amount
        self._look_around()

    def _look_around(self) -> None:
        """After something was settled or spilled: return slack, lend less, wake waiters. Under the lock."""
        used, account = self._used, self._account
        spare = account.borrowed - used
        spared = SPARED_CHUNKS * self._ledger.chunk
        if spare > spared or account.borrowed > account.capacity:
            keep = max(used, min(used + spared // 2, account.capacity))
            if keep < account.borrowed:
                self._ledger.give_back(account, account.borrowed - keep)
        self._trim_slack()
        if self._starved:
            self._arrived.notify_all()

    def _refresh(self) -> None:
        """Recompute the two numbers the hot path compares with. Under the lock."""
        self._tail = self._runs.open.records
        account = self._account
        self._passing = account.borrowed if self._puts_pass() else NEVER
        self._ceiling = self._passing if self._log is None and self._passes_plain() else NEVER
        slack = self._put_slack or self._get_slack
        if slack or self._must_look():
            self._front, self._front_number = NOWHERE, 0  # getters go the long way
        elif self._front is NOWHERE:
            self._choose_front()
        if slack or self._putters or self._starved or self._at_limit or account.borrowed > account.capacity:
            self._give_back_below = ALWAYS
        else:
            self._give_back_below = account.borrowed - SPARED_CHUNKS * self._ledger.chunk

    def _puts_pass(self) -> bool:
        """Tell whether a put that finds memory need look at nothing else. Under the lock."""
        raise NotImplementedError

    def _passes_plain(self) -> bool:
        """Tell whether messages are nothing but their bodies here. Under the lock."""
        raise NotImplementedError

    def _must_look(self) -> bool:
        """Tell whether a message may not be handed out before it was looked at: it may be late, or early."""
        raise NotImplementedError

    def _has_limit(self) -> bool:
        raise NotImplementedError

    def _wakes_putters(self) -> bool:
        """Tell whether putters who wait would not look for nothing. Under the lock."""
        raise NotImplementedError

    # Spilling ----------------------------------------------------------------------------------------------------

    def _spill_tail(self, wanted: int) -> bool:
        """Move about `wanted` bytes from the tail to the spill store; False if there was nothing to move, or it failed.

        Only one caller spills at a time; the others see False and wait at `_room`.
        """
        claim = object()
        with self._lock:
            if self._spilling:
                return False
            capacity = self._account.capacity
            chunk = max(wanted, capacity // 64, min(self._area.chunk_bytes, capacity // 8))
            number, moving = self._claim_victim(claim, chunk)
            self._tail = self._runs.open.records
            if moving is None:
                self._spill_error = None  # nothing waits for the disk any more
                return False
            self._spilling = True
            first, records = moving.first, list(moving.records) if isinstance(moving, Run) else []
        slots = None
        error: StorageError | None = None
        try:
            if isinstance(moving, Run):
                slots = self._area.write(first, records)
            else:
                slots = self._area.write(_position(number, first), moving.packed())
        except StorageError as failure:
            error = failure
        finally:
            with self._lock:
                self._spilling = False
                self._note_spill(error)
                freed = self._install_spilled(number, moving, claim, slots)
                installed = freed is not None
                if installed and not self._has_spilled:
                    self._has_spilled = True
                    self._tell(EventKind.SPILL_STARTED, self._name)
                self._discharge(freed or 0)
            if slots is not None and not installed:
                self._area.free(slots)
        return installed

    def _claim_victim(self, claim: object, wanted: int) -> tuple[int, Run | Chunk | None]:
        """Claim what is needed last: what is delayed, then the tail of the lowest priority. Under the lock."""
        for number in self._schedules:
            if number >= DELAYED and (chunk := self._claim_far(number, claim, wanted)) is not None:
                return number, chunk
        for runs in reversed(self._ranked):
            number = runs.number
            if runs.ends_small and (chunk := self._claim_far(number, claim, wanted)) is not None:
                return number, chunk
            run = runs.claim_tail(claim, wanted)
            if run is not None:
                return number, run
            if (chunk := self._claim_far(number, claim, wanted)) is not None:
                return number, chunk
        return 0, None

    def _claim_far(self, number: int, claim: object, wanted: int) -> Chunk | None:
        """Claim the far end of a schedule, if there is one and that frees something. Under the lock."""
        schedule = self._schedules.get(number)
        chunk = None if schedule is None else schedule.claim_far(claim, wanted)
        if schedule is None or chunk is None:
            return None
        if chunk.charged + chunk.groups_bytes > index_charge(chunk.count):
            return chunk
        schedule.unclaim(claim)  # so little that its place in the index would take more
        return None

    def _install_spilled(self, number: int, moving: Run | Chunk, claim: object, slots: Slots | None) -> int | None:
        """Make what was written leave memory; return what it was charged, None if it stays there. Under the lock."""
        if isinstance(moving, Chunk):
            schedule = self._schedules[number]
            if slots is None:
                schedule.unclaim(claim)
                return None
            groups = moving.groups
            freed = schedule.chunk_spilled(claim, slots)
            if freed is not None and number < DELAYED:
                self._log_hidden_attempts(number, groups)
            return freed
        if moving.claim is not claim:
            return None
        if slots is None:
            moving.claim = None
            return None
        freed = moving.become_spilled(slots)
        self._lists[number].spilled(moving)
        return freed

    def _log_hidden_attempts(self, number: int, groups: list[Group]) -> None:
        """Have it in the log how often spilled messages were delivered: memory does not know it any more."""
        if self._log is None or self._log.failed:
            return
        ranges = [(first, first + len(records), marks // ONE_ATTEMPT) for _, first, marks, *records in groups]
        counted = [part for part in ranges if part[2]]
        if counted:
            self._log.attempts(self._lanes[number], counted)

    def _note_damage(self, problem: str, damaged_blocks: int) -> None:
        """Report stored messages that were found damaged, and tell of them."""
        self._report(problem, damaged_blocks)
        self._tell(EventKind.MESSAGES_LOST, self._name, problem)

    def _note_lost(self, ranges: list[tuple[int, int]]) -> None:
        """Remember where messages were lost, as [first, end) of sequences; neighbours are one. Under the lock."""
        known = self._lost_ranges
        for first, end in ranges:
            if known and known[-1][1] == first - 1:
                known[-1] = known[-1][0], end - 1
            elif len(known) < PROBLEMS_KEPT:
                known.append((first, end - 1))

    def _note_spill(self, error: StorageError | None) -> None:
        """Remember whether the disk took what was spilled, and tell. Under the lock."""
        before, self._spill_error = self._spill_error, error
        if error is not None and before is None:
            self._tell(EventKind.DISK_FULL, self._name, str(error))
        elif error is None and before is not None:
            self._tell(EventKind.DISK_RECOVERED, self._name)

    def sweep(self, most: int) -> bool:
        """Free at most so many spill files of purged messages; return whether more are left."""
        with self._lock:
            if not self._trash:
                return False
            slots, rest = self._trash.pop().take(most)
            if rest:
                self._trash.append(rest)
        self._area.free(slots)
        return True

    def give_way(self, wanted: int, spill: bool) -> bool:
        """Return memory to the broker: what is borrowed and not used, else what spilling a chunk frees."""
        if spill and not self._spill_tail(wanted):
            return False
        with self._lock:
            account = self._account
            spare = account.borrowed - max(self._used, 0)
            if spare <= 0:
                return False
            self._ledger.give_back(account, spare)
            self._refresh()
            return True

    def _find_room(self, missing: int) -> bool:
        """Free `missing` bytes for this queue: others give way, or the own tail is spilled."""
        account = self._account
        if account.borrowed < account.capacity and self._ledger.free() < missing and self._relief(account, missing):
            return True
        return self._spill_tail(missing)

    # Restoring ---------------------------------------------------------------------------------------------------

    def _restore_head(self, runs: RunList, *, to_drop: bool = False) -> bool:
        """Bring a lane's head into memory, as much as there is room for. Called with the lock held; lets go of it.

        One message that is to be dropped at once comes whatever room there is.

        Returns False if it has to wait until something is settled, spilled, or restored by somebody else.
        """
        claim = object()
        run = runs.claim_head(claim)
        if run is None:
            return False
        try:
            return self._restore(runs, run, claim, to_drop)
        finally:
            if run.claim is claim:
                run.claim = None
                self._look_around()

    def _restore(self, runs: RunList, run: Run, claim: object, to_drop: bool = False) -> bool:
        """Restore the front of a claimed run; as `_restore_head`."""
        need = run.needs + OVERHEAD_BYTES
        want = max(need, min(READ_AHEAD_BYTES, self._account.capacity // 8, run.charged))
        alone = False
        if self._borrow_room(need, want) < need:
            if self._room_for_head(need) or run.claim is not claim:
                return True
            if self._is_in_flight() and not to_drop:
                return False
            alone = True
        return self._read_in(runs, run, claim, want, alone)

    def refill(self) -> bool:
        """Bring back a part of what is first on disk, while less than half of the capacity is used; False at the end.

        After the capacity was raised: else nothing comes back before its turn.
        """
        claim = object()
        with self._lock:
            if 2 * self._used >= self._account.capacity:
                return False
            for runs in self._ranked:
                run = runs.claim_first_away(claim)
                if run is not None:
                    break
            else:
                return False
            try:
                need = max(run.largest, run.needs) + OVERHEAD_BYTES
                if self._borrow_room(need, need) < need:  # nobody gives way for what nobody has asked for
                    return False
                return self._restore(runs, run, claim)
            finally:
                if run.claim is claim:
                    run.claim = None
                    self._look_around()

    def _has_nothing_spilled(self) -> bool:
        """Tell whether all lies in memory, or in the log. Under the lock."""
        return not any(runs.tally(Place.SPILLED)[0] for runs in self._lists.values()) and not any(
            schedule.tally().spilled_messages for schedule in self._schedules.values()
        )

    def _read_in(self, runs: RunList, run: Run, claim: object, want: int, alone: bool) -> bool:
        """Read what there is room for of the front of a claimed run, at most `want` bytes; as `_restore_head`."""
        budget = max(0, min(self._account.borrowed - self._used, want))
        self._used += budget
        self._restoring += budget
        moved: _Moved | None = None
        try:
            with Unlocked(self._lock):
                moved = self._read_head(run, budget, alone)
        finally:
            self._used -= budget
            self._restoring -= budget
        if run.claim is not claim:
            return True
        run.claim = None
        if moved.purged:
            self._look_around()
            return False
        slots = self._install(runs, run, moved)
        self._get_slack = max(0, self._used - self._account.borrowed - self._put_slack)
        self._look_around()
        if slots:
            with Unlocked(self._lock):
                self._area.free(slots)
        return True

    def _borrow_room(self, need: int, want: int) -> int:
        """Borrow for `want` bytes, or at least for `need`; return how many fit. Under the lock."""
        account = self._account
        room = account.borrowed - self._used
        for amount in (want, need):
            if room < amount and self._ledger.borrow(account, amount - room):
                self._refresh()
                return account.borrowed - self._used
        return room

    def _room_for_head(self, needed: int) -> bool:
        """Free `needed` bytes for the head. Called with the lock held; it lets go of it."""
        missing = max(1, self._used + needed - self._account.borrowed)
        with Unlocked(self._lock):
            return self._find_room(missing)

    @property
    def name(self) -> str:
        """The name it was declared under."""
        return self._name

    def shares(self, ledger: Ledger) -> bool:
        """Tell whether it is one of those who share this ledger: of the same broker."""
        return self._ledger is ledger

    @property
    def owner(self) -> int:
        """Its number."""
        return self._owner

    def _is_in_flight(self) -> bool:
        raise NotImplementedError

    def _read_head(self, run: Run, budget: int, alone: bool) -> _Moved:
        """Read the front of a claimed run, as much as `budget` bytes hold; without the lock."""
        spilled = run.place is Place.SPILLED
        moved = self._read_spilled(run, budget, alone) if spilled else self._read_logged(run, budget, alone)
        for problem, damaged_blocks in moved.problems:
            self._note_damage(f"queue {self._name!r}: {problem}", damaged_blocks)
        return moved

    def _read_spilled(self, run: Run, budget: int, alone: bool) -> _Moved:
        first = run.first
        records, problems = self._area.read(first, run.slots, budget, run.largest)
        moved = _Moved(first + len(records))
        if not alone and len(records) == 1 and records[0] is not None and charge([records[0]]) > budget:
            moved.position, moved.needs = first, len(records[0])  # does not fit; now it is known what does
            return moved
        if None not in records:
            moved.pieces.append((first, records, run.marks))  # type: ignore[arg-type]
            return moved
        outcomes: list[tuple[int, str]] = []
        for sequence, problem in problems:
            record = self._repair(sequence)
            outcome = "read from the log instead" if record is not None else "lost"
            outcomes.append((sequence, f"{problem}; {outcome}"))
            if record is None:
                moved.lost.append((sequence, sequence + 1))
                moved.damaged_ranges.append((sequence, sequence + 1))
            else:
                moved.repaired += 1
                records[sequence - first] = record
        moved.problems += [(text, 0) for text in _told_once(outcomes)]
        for sequence, found in enumerate(records, first):
            if found is not None:
                moved.add(sequence, [found], run.marks)
        return moved

    def _repair(self, sequence: int) -> Record | None:
        """Read a message from the log whose spill file is damaged; None if the log does not have it."""
        if self._log is None:
            return None
        try:
            with self._log.read() as txn:
                return block_log.find(txn, self._owner, lane_of(sequence), sequence)[0]
        except (NotFound, CorruptionError):
            return None  # reported as lost by the caller

    def _read_logged(self, run: Run, budget: int, alone: bool) -> _Moved:
        assert self._log is not None
        first = run.first
        lane = self._log_lane(first)
        owner, number = lane.owner, lane.lane
        with self._log.read() as txn:
            row = block_log.read_row(txn, owner, number)._replace(doubtful=lane.row.doubtful)
            replayed = block_log.read(txn, owner, number, row, first, run.end, budget)
            attempts = block_log.attempts(txn, owner, number, first, replayed.position)
            tail_waits = not block_log.is_settled(txn, owner, number, row, row.tail)
        moved = _Moved(replayed.position)
        moved.purged = row.floor > first
        if moved.purged:
            return moved
        size = 0
        following = first
        for start, records in replayed.pieces:
            room = len(records)
            if size + charge(records) > budget:
                room, total = 0, size
                for record in records:
                    total += len(record) + OVERHEAD_BYTES
                    if total > budget and not (alone and not moved.pieces and not room):
                        break
                    room += 1
                moved.needs = len(records[room]) if room < len(records) and not (moved.pieces or room) else 0
            if start > following and (room or moved.pieces):
                moved.lost.append((following, start))
            for piece in _by_marks(start, records[:room], attempts, row.doubtful):
                moved.pieces.append(piece)
            size += charge(records[:room])
            following = start + room
            if room < len(records):
                moved.position = start + room if room or moved.pieces else first
                break
        else:
            if following < replayed.position:
                moved.lost.append((following, replayed.position))
        read = sum(len(records) for _, records, _ in moved.pieces)
        beyond = moved.position <= row.tail < run.end and tail_waits
        moved.more = beyond or read < sum(len(records) for _, records in replayed.pieces)
        seen = replayed._replace(problems=[one for one in replayed.problems if one[0] < moved.position])
        moved.problems += block_log.in_words(seen)
        moved.damaged += [key for _, _, key in seen.problems if key]
        moved.damaged_ranges += filter(None, (_damaged_part(*lost, replayed.problems) for lost in moved.lost))
        return moved

    def _install(self, runs: RunList, run: Run, moved: _Moved) -> Slots | None:
        """Put what was read before what is left of its run; return the slots it had. Under the lock."""
        logged = run.place is Place.LOGGED
        slots: Slots | None = None
        if not logged:
            slots, run.slots = run.slots.take(moved.position - run.first)
        count = sum(len(records) for _, records, _ in moved.pieces)
        charged = sum(charge(records) for _, records, _ in moved.pieces)
        vanished = 0
        if not logged:
            vanished = sum(end - first for first, end in moved.lost)
            self._lost += vanished
            self._repaired += moved.repaired
        self._note_lost(moved.damaged_ranges)
        last = moved.position >= run.end
        settled = [Settled(first, end, 0, 0) for first, end in moved.lost]
        if logged and count >= run.count and moved.more:
            settled.append(self._count_up(run, count, charged))
        if not logged:
            if moved.lost:
                run.expires_ms = 0  # what the log holds of the rest is not known any more
            for _, records, _ in moved.pieces:
                logged_records = [record for record in records if is_logged(record)]
                run.logged_count -= len(logged_records)
                run.logged_bytes -= sum(map(len, logged_records))
        left = run.count - count - vanished
        if logged and last and left:  # the row and the blocks disagree
            size = run.charged - charged - OVERHEAD_BYTES * left
            settled.append(Settled(run.first, run.first, left, size))
            self._note_damage(
                f"queue {self._name!r}: the log should hold {left} more messages below {run.end}, {size} bytes", 0
            )
            self._quarantined += max(left, 0)
            self._message_bytes -= size
            vanished = left
        self._gone += vanished
        if self._log is not None:
            if settled and not self._log.failed:
                self._log.settle(self._log_lane(run.first), settled)
            if moved.damaged and not self._log.failed:
                self._log.quarantine(moved.damaged)
        if moved.position > run.first:
            if logged:
                runs.drop_front(run, moved.position, count, charged)
            else:
                runs.drop_front(run, moved.position, count + vanished, charged + OVERHEAD_BYTES * vanished)
                if last:
                    self._message_bytes -= run.leave_pool()  # what is left of it was lost
        for first, records, marks in moved.pieces:
            if logged and not is_plain(records):
                self._note_times(records)
            if lane_of(first) >= DELAYED:
                self._add_delayed(first, records, marks)
                continue
            if runs.scatters(len(records)):
                self._add_scattered(first, records, marks)
                continue
            piece = Run(first, marks)
            piece.records += records
            runs.add(piece)
        self._used += charged
        run.needs = moved.needs
        return slots

    def _count_up(self, run: Run, count: int, charged: int) -> Settled:
        """Correct a LOGGED run that holds more than the row said: a mark is damaged. Under the lock.

        One more than was read is counted, so that nobody takes the queue for empty before the run's end.
        """
        more = count + 1 - run.count
        size = max(0, charged - OVERHEAD_BYTES * count - (run.charged - OVERHEAD_BYTES * run.count))
        if not self._undercounted:
            self._undercounted = True
            self._note_damage(f"queue {self._name!r}: the log holds more messages below {run.end} than its row says", 0)
        run.count += more
        run.charged += size + OVERHEAD_BYTES * more
        self._gone -= more
        self._message_bytes += size
        return Settled(run.first, run.first, -more, -size)

    # Delayed -----------------------------------------------------------------------------------------------------

    def _add_delayed(self, first: int, records: list[Record], marks: int, due_ms: int = 0) -> None:
        """Put messages into the schedule of their lane, by their own due times, or by another one. Under the lock.

        Charges what the schedule takes beyond the messages.
        """
        number = lane_of(first)
        number = number if number >= DELAYED else number + DELAYED
        schedule = self._schedules.get(number)
        if schedule is None:
            self._open_delayed(number)
            schedule = self._schedules[number]
        before = schedule.overhead_bytes
        if due_ms:
            schedule.add(due_ms, first, records, marks)
        else:
            for due, start, stop in by_due(records):
                schedule.add(due, first + start, records[start:stop], marks)
        self._used += schedule.overhead_bytes - before
        self._cover_delayed()

    def _add_scattered(self, first: int, records: list[Record], marks: int) -> None:
        """Put messages back that are single ones among many. Under the lock.

        Charges what that takes beyond the messages.
        """
        schedule = self._schedules.setdefault(lane_of(first), Schedule())
        before = schedule.overhead_bytes
        schedule.add(0, first, records, marks)
        self._used += schedule.overhead_bytes - before
        self._cover_delayed()

    def _cover_singles(self) -> None:
        """After deliveries became single ones: borrow for what that takes, or have it on slack. Under the lock."""
        missing = self._used - self._account.borrowed
        if missing > 0 and self._ledger.borrow(self._account, missing):
            self._refresh()
        elif missing > 0:
            self._cover_delayed()

    def _cover_delayed(self) -> None:
        """After messages came into a schedule: what it takes may be on slack; what is due goes before what waits."""
        self._get_slack = max(self._get_slack, self._used - self._account.borrowed - self._put_slack)
        self._refresh()

    def _open_delayed(self, number: int) -> None:
        """Begin a lane for delayed messages. Under the lock."""
        self._open_lane(number, None if self._log is None else {})

    def _restore_delayed(self, number: int, now_ms: int) -> bool:
        """Bring what is due next into memory; as `_restore_head`."""
        schedule = self._schedules[number]
        claim = object()
        chunk = schedule.claim_next(claim, now_ms)
        if chunk is None:
            return False
        try:
            need = chunk.largest + OVERHEAD_BYTES + GROUP_BYTES
            want = max(need, min(READ_AHEAD_BYTES, self._account.capacity // 8))
            alone = False
            if self._borrow_room(need, want) < need:
                if self._room_for_head(need) or chunk.claim is not claim:
                    return True
                if self._is_in_flight():
                    return False
                alone = True
            budget = max(0, min(self._account.borrowed - self._used, want))
            self._used += budget
            self._restoring += budget
            slots, first = chunk.slots, chunk.first
            readable = need if alone else max(chunk.readable(budget), chunk.largest + OVERHEAD_BYTES)
            try:
                with Unlocked(self._lock):
                    pieces, problems = self._area.read(_position(number, first), slots, readable, chunk.largest)
                    unpacked = chunk.unpacked(pieces)
                    found = [(sequence, self._repair(sequence)) for sequence in unpacked.lost]
            finally:
                self._used -= budget
                self._restoring -= budget
            before, spilled_bytes = _charge_of(schedule), schedule.tally().spilled_bytes
            freed = schedule.restored(claim, unpacked)
            if freed is None:
                return True
            for (sequence, record), (_, text) in zip(found, problems, strict=True):
                self._install_repaired(number, sequence, record, text)
            self._used += _charge_of(schedule) - before
            if spilled_bytes - schedule.tally().spilled_bytes != unpacked.message_bytes or unpacked.lost:
                self._message_bytes = self._count_bytes()  # some were lost: now, or earlier of this chunk
            self._get_slack = max(0, self._used - self._account.borrowed - self._put_slack)
            self._look_around()
            with Unlocked(self._lock):
                self._area.free(freed)
            return True
        finally:
            if chunk.claim is claim:
                schedule.unclaim(claim)
                self._look_around()

    def _install_repaired(self, number: int, sequence: int, record: Record | None, problem: str) -> None:
        """Take a message of a schedule from the log whose spill file is damaged; None if the log does not have it."""
        outcome = "lost" if record is None else "read from the log instead"
        what = "delayed message" if number >= DELAYED else "message"
        self._note_damage(f"queue {self._name!r}: {what} {sequence}: {problem}; {outcome}", 0)
        if record is None:
            self._lost += 1
            self._gone += 1
            self._note_lost([(sequence, sequence + 1)])
            return
        self._repaired += 1
        self._schedules[number].add(due_of(record) if number >= DELAYED else 0, sequence, [record], 0)

    def _next_due_ms(self) -> int | None:
        """Return when the next delayed message may be due. Under the lock."""
        return min(
            (due for schedule in self._schedules.values() if (due := schedule.next_due_ms()) is not None), default=None
        )

    def _count_bytes(self) -> int:
        raise NotImplementedError

    def _note_times(self, records: list[Record]) -> None:
        """Remember that messages may expire. Under the lock."""
        raise NotImplementedError

    # Looking -----------------------------------------------------------------------------------------------------

    def _backlog_problems(self) -> Iterator[str]:
        """Check the rules of room and of the list. Under the lock."""
        account = self._account
        resident = sum(charge(list(run.records)) for runs in self._lists.values() for run in runs)
        resident += sum(map(_charge_of, self._schedules.values()))
        expected = resident + self._incoming + self._restoring + self._acquired_charge()
        if self._used != expected:
            yield f"{self._used} bytes are charged, a recount gives {expected}"
        if self._used < 0 or self._used > self._account.borrowed + self._put_slack + self._get_slack:
            yield (
                f"{self._used} bytes are charged, more than the {account.borrowed} borrowed and a slack of "
                f"{self._put_slack} + {self._get_slack}"
            )
        if account.borrowed > max(account.capacity, self._used):
            yield f"{account.borrowed} bytes are borrowed of a capacity of {account.capacity}, {self._used} are charged"
        for runs in self._lists.values():
            yield from runs.problems()
        for schedule in self._schedules.values():
            yield from schedule.problems()

    def _visible_charge(self) -> int:
        """What is charged for messages that wait in memory or are acquired. Under the lock."""
        return self._used - self._incoming - self._restoring

    def _acquired_charge(self) -> int:
        raise NotImplementedError


def _charge_of(schedule: Schedule) -> int:
    """Return what a schedule is charged: its messages in memory, and what it needs for all of them."""
    tally = schedule.tally()
    return tally.resident_bytes + OVERHEAD_BYTES * tally.resident_messages + schedule.overhead_bytes


def _position(number: int, position: int) -> int:
    """Return what stands for a sequence in the spill store, for a chunk of delayed messages of this lane."""
    return (2 * DELAYED + number) << LANE_SHIFT | position


class _Moved:
    """What was read for a run's front, to be installed if the claim still stands."""

    __slots__ = (
        "damaged",
        "damaged_ranges",
        "lost",
        "more",
        "needs",
        "pieces",
        "position",
        "problems",
        "purged",
        "repaired",
    )

    def __init__(self, position: int) -> None:
        self.position = position
        """Everything below was looked at."""
        self.pieces: list[tuple[int, list[Record], int]] = []
        """(first, records, marks), in order."""
        self.lost: list[tuple[int, int]] = []
        """Ranges that hold no message any more, and must not hold the floor down."""
        self.problems: list[tuple[str, int]] = []
        """(what is wrong, blocks of the log it is wrong with)."""
        self.damaged: list[bytes] = []
        self.damaged_ranges: list[tuple[int, int]] = []
        """Those of `lost` where something was damaged, or has vanished."""
        self.more = False
        """The log is known to hold something of the run behind this."""
        self.repaired = 0
        self.needs = 0
        self.purged = False
        """A purge is committed, and about to drop the run."""

    def add(self, first: int, records: list[Record], marks: int) -> None:
        if self.pieces:
            before, known, known_marks = self.pieces[-1]
            if before + len(known) == first and known_marks == marks:
                known += records
                return
        self.pieces.append((first, records, marks))


def _damaged_part(first: int, end: int, problems: list[tuple[int, str, bytes]]) -> tuple[int, int] | None:
    """Return the part of [first, end), which holds no message, where some were lost; None if nothing is wrong there."""
    damaged = [place for place, _, key in problems if key and first <= place < end]
    if any(not key and first <= place <= end for place, _, key in problems):
        return first, end  # what has vanished is missed by what comes behind it
    return (min(damaged), end) if damaged else None


def _told_once(outcomes: list[tuple[int, str]]) -> Iterator[str]:
    """Yield a line for each stretch of spilled messages that had the same fate for the same reason."""
    for (text, _), group in groupby(enumerate(outcomes), key=lambda item: (item[1][1], item[1][0] - item[0])):
        sequences = [sequence for _, (sequence, _) in group]
        which = f"message {sequences[0]}" if len(sequences) == 1 else f"messages {sequences[0]} to {sequences[-1]}"
        yield f"spilled {which}: {text}"


def _by_marks(
    first: int, records: list[Record], attempts: list[tuple[int, int, int]], doubtful: int
) -> Iterator[tuple[int, list[Record], int]]:
    """Cut records where their earlier deliveries differ."""
    stop = first + len(records)
    cuts = {first, stop, *(edge for low, high, _ in attempts for edge in (low, high)), doubtful}
    edges = sorted(edge for edge in cuts if first <= edge <= stop)
    for low, high in pairwise(edges):
        number = max((count for start, end, count in attempts if start <= low < end), default=0)
        marks = ONE_ATTEMPT * number + (MAY_BE_REPEATED if low < doubtful else 0)
        yield low, records[low - first : high - first], marks
