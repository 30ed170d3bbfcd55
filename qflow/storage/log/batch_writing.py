"""What a batch writes into the log: one transaction, lane by lane. By the writer alone.

What it changes before the commit is the log's, and plans: lanes and queues learn of it when it holds, see `writer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

from qflow.errors import DiskFull, StorageError
from qflow.identity import new_number
from qflow.message import Record, kept_ms
from qflow.storage.blocks import BlockKey
from qflow.storage.encoding import Messages
from qflow.storage.environment import DAMAGE, CannotGrow, Environment
from qflow.storage.log import hollowing, removal
from qflow.storage.log.append import (
    RESERVED_SEQUENCES,
    TAIL_BYTES,
    append_messages,
    append_stand_ins,
    full_tail_bytes,
)
from qflow.storage.log.batch import Batch, Put
from qflow.storage.log.bodies import FEW_RELEASED, RELEASED_AT_ONCE, RELEASING_BYTES, Releases, Sharing
from qflow.storage.log.broken_lanes import LaneBroken, lane_errors
from qflow.storage.log.confirming import FEW_LANES, SMALL_BYTES, Confirming
from qflow.storage.log.hollowing import HOLLOWING_BYTES, Hollowed
from qflow.storage.log.keys import BLOCKS, DAMAGED, queue_key
from qflow.storage.log.lane import Lane, Step
from qflow.storage.log.marks import raise_all, settle_ranges
from qflow.storage.log.parts import PAGES_A_PART, PAGES_ANYWAY, REMOVED_IN_A_PART
from qflow.storage.log.placing import check_not_removed
from qflow.storage.log.rows import Row, purged_row, write_row
from qflow.storage.log.spreading import Spreading
from qflow.storage.streams import eras
from qflow.storage.topics.records import delete_within


class BatchWriting:
    """See the module. One a log."""

    def __init__(
        self,
        env: Environment,
        confirming: Confirming,
        clock: Callable[[], float],
        copying: Lock,
        reading: Lock,
        shares: bool,
    ) -> None:
        """`copying` and `reading`: see `Writer`; `shares`: there may be shared bodies."""
        self._env = env
        self._confirming = confirming
        self._copying = copying
        self._reading = reading
        self._clock = clock
        self._shares = shares
        self._releases = Releases()
        self._spreading = Spreading()
        self._era = new_number()  # which no other opening has
        self.copies: set[object] = set()
        """Somebody copies the log, or is about to: the map must not move, so nothing is confined."""
        self.gone: list[int] = []
        """Numbers of messages in lanes that were deleted, to be counted out."""

    def commit(self, batch: Batch) -> None:
        """Write and commit a batch. If it raises, nothing was done, or `batch.committing`: then it is in doubt.

        Raises:
            MapFull: it can be done again in a larger map.
            DiskFull: there is no room for it; nothing was begun.
        """
        env = self._env
        lanes = batch.lanes + len(batch.settled)
        marks = sum(map(len, batch.settled.values())) if batch.settled else 0
        if batch.units:
            parts = [ranges for unit in batch.units for _, ranges in unit.settles]
            lanes += len(parts)
            marks += sum(map(len, parts))
            marks += 4 * len(batch.shared) + sum(4 * len(unit.writes) + unit.values for unit in batch.units)
        if batch.attempts:
            marks += 2 * sum(map(len, batch.attempts.values()))
        size = batch.size - batch.saved
        value_bytes = size * 2 + batch.lanes * TAIL_BYTES
        values = lanes * 4 + marks + size // 32768 + 4 * len(batch.writes) + 20 * len(batch.damaged)
        deletes = 4 * min(len(batch.deletes), removal.owners_within(batch.removes))
        hollows = batch.hollows
        few: int | None = None
        releases = self._releases
        releases.left = RELEASED_AT_ONCE
        if hollows or self._shares:
            more = HOLLOWING_BYTES * len(hollows) + (RELEASING_BYTES if self._shares else 0)
            batch.short = False
            try:
                self._make_room(batch, value_bytes + more, values + deletes, settles_only=False)
            except StorageError:  # the reserve is for others; it is tried again later
                hollows = []
                if self._shares and not (0 < batch.removes <= REMOVED_IN_A_PART and batch.free >= 2 * PAGES_A_PART):
                    releases.left = few = self._few_releases(batch, value_bytes, values)
                    values += few
        settles_only = not batch.is_writing
        self._make_room(batch, value_bytes, values + deletes, settles_only=settles_only)
        batch.committing = False
        hollowed: dict[Lane, Hollowed] = {}
        batch.hollowed = hollowed
        confirming = self._confirming
        once = sum(spread.weight() - spread.charged for spread in batch.spreads)  # the journal has all lanes in one
        is_small = batch.size - once <= SMALL_BYTES and lanes - len(batch.spread_over) <= FEW_LANES
        txn = confirming.begin(small=is_small and not batch.applies)
        try:
            for lane in hollows:
                with lane_errors(lane, env.path):
                    hollowed[lane] = _hollow(txn, lane, releases)
            batch.plan = self._write(txn, batch)
            batch.short |= releases.left == few  # none was
            batch.committing = True
            confirming.confirm(txn)
        except BaseException:
            confirming.roll_back()
            raise
        batch.committed = True

    def grow_map(self) -> None:
        """Grow the map, or end its confinement, when nobody reads or copies."""
        self._confirming.roll_back()
        with self._copying, self._reading:
            self._env.grow_map()

    def _make_room(self, batch: Batch, value_bytes: int, values: int, *, settles_only: bool) -> None:
        """Make the file large enough for a transaction, or have it do with what is free in the file."""
        if not settles_only:
            check_not_removed(self._env)
        while self.gone:
            self._env.messages -= self.gone.pop()
        confirming = self._confirming
        written_bytes, written = confirming.written
        try:
            self._env.make_room(value_bytes + written_bytes, values + written, settles_only=settles_only)
        except CannotGrow as error:
            if confirming.pending:  # what was confirmed has its room; what is new finds some without it, or not
                confirming.apply()
                self._make_room(batch, value_bytes, values, settles_only=settles_only)
                return
            full = DiskFull(str(error))
            if self.copies or not self._copying.acquire(blocking=False):
                raise full from error
            confirming.roll_back()
            try:
                with self._reading:
                    batch.free = self._env.confine(value_bytes, values, settles_only=settles_only)
            finally:
                self._copying.release()
            fits = batch.is_part or 2 * values + PAGES_ANYWAY <= batch.free // 2  # see `parts`
            if not batch.free or (settles_only and (batch.removes > REMOVED_IN_A_PART or not fits)):
                raise full from error

    def _few_releases(self, batch: Batch, value_bytes: int, values: int) -> int:
        """Return how many references can be counted down where there is no room for many: else a full disk stays so."""
        try:
            self._make_room(batch, value_bytes, values + FEW_RELEASED, settles_only=not batch.is_writing)
        except StorageError:
            return 0
        return FEW_RELEASED

    def _write(self, txn: Any, batch: Batch) -> list[Step]:
        for write in batch.writes:
            write(txn)
        for unit in batch.units:
            for write in unit.writes:
                write(txn)
        for key in batch.damaged:
            value = txn.get(key)
            if value is not None:
                txn.put(bytes((DAMAGED,)) + key[1:], value)
        now_ms = kept_ms(self._clock())
        settled = batch.all_settled()
        sharing = None
        if batch.shared or batch.references:
            self._shares = True
            sharing = Sharing(txn, batch.shared, now_ms, self._env.join, batch.references)
        lanes: dict[Lane, Any] = {**settled, **batch.puts}
        if batch.purges:
            lanes |= dict.fromkeys(batch.purges)
        puts: dict[Lane, Sequence[Put]] = {**batch.puts}
        batch.spread_out = None  # of an attempt that failed
        if spreads := batch.spreads:
            batch.spread_out = out = self._spreading.write(
                txn, spreads, messages_of(spreads), lanes, now_ms, self._env.path
            )
            puts |= dict.fromkeys(out.rest(), spreads)
            lanes |= puts
        plan = []
        for lane in lanes:
            try:
                step = self._write_lane(txn, batch, lane, settled.get(lane), puts.get(lane, ()), sharing, now_ms)
                plan.append(step)
            except DAMAGE as error:
                raise LaneBroken(lane, error, self._env.path) from error
        for unit in batch.units:
            for note in unit.notes:
                note(txn)
        if sharing is not None:
            sharing.finish()
        if batch.attempts:
            for lane, counts in batch.attempts.items():
                with lane_errors(lane, self._env.path):
                    _write_attempts(txn, {lane: counts}, {step.lane: step.row for step in plan})
        if batch.deletes:
            batch.deleted = self._write_deletes(txn, batch.deletes, batch.removes)
        return plan

    def _write_lane(
        self,
        txn: Any,
        batch: Batch,
        lane: Lane,
        settled: list[list[int]] | None,
        puts: Sequence[Put],
        sharing: Sharing | None,
        now_ms: int,
    ) -> Step:
        if not lane.tail_is_last:
            lane.find_tail(txn)
        owner, number, row = lane.owner, lane.lane, lane.row
        if settled:
            row = settle_ranges(txn, owner, number, row, settled)
            if row.marks:
                lane.passes.count(settled, row.floor)
        first = following = lane.next
        purged_to = None
        if lane in batch.purges:
            purged_to = first
            row = purged_row(row, first)
        records: list[Record] = []
        topics: Sequence[str] | None = None
        size = 0
        if puts:
            messages = messages_of(puts)
            records, topics = messages.records, messages.topics
            if topics is not None:
                now_ms = max(now_ms, lane.time_ms)
            for put in puts:
                put.starts(lane, following)
                following += len(put.records)
                size += put.size
            key = BlockKey(BLOCKS, owner, number, first)
            if sharing is None:
                full_bytes = 0 if row.tail == lane.full_tail else full_tail_bytes(batch.lanes)
                row = append_messages(txn, key, row, messages, now_ms, full_bytes, self._env.join)
                if messages.sizes[-1] >= TAIL_BYTES:
                    lane.full_tail = row.tail
            else:
                row = append_stand_ins(txn, key, row, sharing.stand_ins(records), now_ms, topics, self._env.join)
            if first == lane.begins and topics is not None:
                eras.note(txn, owner, number, first, self._era, row.floor)
        ahead = RESERVED_SEQUENCES if lane.leaves_gaps else 0
        row = tuple.__new__(Row, (max(row.next, following + ahead), *row[1:]))  # as in `append`
        remove_at, removing = lane.remove_at, False
        if row.floor >= remove_at:
            remove_at, removing = removal.remove_settled(txn, owner, number, row, batch.removes, self._releases)
        write_row(txn, owner, number, row)
        return Step(
            lane, row, following, first, records, size, len(puts), purged_to, remove_at, removing, topics, now_ms
        )

    def _write_deletes(self, txn: Any, owners: Sequence[int], limit: int) -> tuple[int, ...]:
        """Remove what deleted queues left, as far as the limit goes; return those of which nothing is left at all."""
        gone = []
        for owner in owners[: removal.owners_within(limit)]:
            if limit <= 0:
                break
            try:
                limit, more = removal.delete_lanes(txn, owner, limit, self._releases)
                if not more:
                    limit, more = delete_within(txn, owner, limit)
                if not more:
                    txn.delete(queue_key(owner))
                    gone.append(owner)
            except DAMAGE as error:
                raise LaneBroken(None, error, self._env.path, owner) from error
        return tuple(gone)


def messages_of(puts: Sequence[Put]) -> Messages:
    """Return what some puts hold, one behind the other."""
    first = puts[0]
    if len(puts) == 1:
        return Messages(first.records, first.sizes, first.plain, first.topics)
    return Messages(
        [record for put in puts for record in put.records],
        [size for put in puts for size in put.sizes],
        all(put.plain for put in puts),
        None if first.topics is None else [topic for put in puts for topic in put.topics or ()],
    )


def _write_attempts(txn: Any, attempts: dict[Lane, list[tuple[int, int, int]]], rows: dict[Lane, Row]) -> None:
    """Write the counts of deliveries of what is not settled; `rows` are those this batch has changed."""
    for lane, ranges in attempts.items():
        floor = rows.get(lane, lane.row).floor
        left = [(max(first, floor), end, number) for first, end, number in ranges if end > floor]
        raise_all(txn, lane.owner, lane.lane, left)


def _hollow(txn: Any, lane: Lane, releases: Releases) -> Hollowed:
    """Begin a pass over a lane's blocks, or go on with it. By the writer."""
    position, steps = lane.passes.begin(), hollowing.HOLLOWING_STEPS
    return hollowing.hollow_lane(txn, lane.owner, lane.lane, lane.row, position, steps, releases)
