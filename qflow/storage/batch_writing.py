"""What a batch writes into the log: one transaction, lane by lane. By the writer alone.

What it changes before the commit is the log's, and plans: lanes and queues learn of it when it holds, see `writer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

from qflow.errors import DiskFull, StorageError
from qflow.message import Record
from qflow.storage import block_log, eras
from qflow.storage.batch import NOWHERE, Batch, Lane, Step
from qflow.storage.block_log import HOLLOWING_BYTES, RESERVED_SEQUENCES, TAIL_BYTES, Hollowed, Row, Settled
from qflow.storage.bodies import RELEASED_AT_ONCE, RELEASING_BYTES, Releases, Sharing
from qflow.storage.broken_lanes import LaneBroken, lane_errors
from qflow.storage.environment import DAMAGE, CannotGrow, Environment, LmdbError
from qflow.storage.parts import PAGES_A_PART, PAGES_ANYWAY, REMOVED_IN_A_PART
from qflow.storage.topic_records import delete_index


class BatchWriting:
    """See the module. One a log."""

    def __init__(
        self, env: Environment, clock: Callable[[], float], copying: Lock, reading: Lock, shares: bool
    ) -> None:
        """`copying` and `reading`: see `Writer`; `shares`: there may be shared bodies."""
        self._env = env
        self._copying = copying
        self._reading = reading
        self._clock = clock
        self._shares = shares
        self._releases = Releases()
        self._era = eras.new_era()
        self.gone: list[int] = []
        """Numbers of messages in lanes that were deleted, to be counted out."""

    def commit(self, batch: Batch) -> None:
        """Write and commit a batch. If it raises, nothing was done, or `batch.committing`: then it is in doubt.

        Raises:
            MapFull: it can be done again in a larger map.
            DiskFull: there is no room for it; nothing was begun.
        """
        env = self._env
        lanes = len(batch.puts) + len(batch.settled)
        marks = sum(map(len, batch.settled.values())) if batch.settled else 0
        if batch.units:
            parts = [ranges for unit in batch.units for _, ranges in unit.settles]
            lanes += len(parts)
            marks += sum(map(len, parts))
            marks += 4 * len(batch.shared) + sum(4 * len(unit.writes) + unit.values for unit in batch.units)
        if batch.attempts:
            marks += 2 * sum(map(len, batch.attempts.values()))
        size = batch.size - batch.saved
        value_bytes = size * 2 + len(batch.puts) * TAIL_BYTES
        values = lanes * 4 + marks + size // 32768 + 4 * len(batch.writes) + 20 * len(batch.damaged)
        hollows = batch.hollows
        releases = self._releases
        releases.left = RELEASED_AT_ONCE
        if hollows or self._shares:
            more = HOLLOWING_BYTES * len(hollows) + (RELEASING_BYTES if self._shares else 0)
            batch.short = False
            try:
                self._make_room(batch, value_bytes + more, values + 4 * len(batch.deletes), settles_only=False)
            except StorageError:  # the reserve is for others; it is tried again later
                hollows = []
                if self._shares and not (0 < batch.removes <= REMOVED_IN_A_PART and batch.free >= 2 * PAGES_A_PART):
                    releases.left, batch.short = 0, True
        settles_only = not batch.is_writing
        self._make_room(batch, value_bytes, values + 4 * len(batch.deletes), settles_only=settles_only)
        batch.committing = False
        hollowed: dict[Lane, Hollowed] = {}
        batch.hollowed = hollowed
        txn = env.begin(write=True)
        try:
            for lane in hollows:
                with lane_errors(lane, env.path):
                    hollowed[lane] = _hollow(txn, lane, releases)
            batch.plan = self._write(txn, batch, releases)
            batch.committing = True
            env.commit(txn)
        except BaseException:
            with suppress(LmdbError):  # raised where it has ended
                txn.abort()
            raise
        batch.committed = True

    def _make_room(self, batch: Batch, value_bytes: int, values: int, *, settles_only: bool) -> None:
        """Make the file large enough for a transaction, or have it do with what is free in the file."""
        while self.gone:
            self._env.messages -= self.gone.pop()
        try:
            self._env.make_room(value_bytes, values, settles_only=settles_only)
        except CannotGrow as error:
            full = DiskFull(str(error))
            if not self._copying.acquire(blocking=False):  # the map must not move while it is copied
                raise full from error
            try:
                with self._reading:
                    batch.free = self._env.confine(value_bytes, values, settles_only=settles_only)
            finally:
                self._copying.release()
            fits = batch.is_part or 2 * values + PAGES_ANYWAY <= batch.free // 2  # see `parts`
            if not batch.free or (settles_only and (batch.removes > REMOVED_IN_A_PART or not fits)):
                raise full from error

    def _write(self, txn: Any, batch: Batch, releases: Releases) -> list[Step]:
        for write in batch.writes:
            write(txn)
        for unit in batch.units:
            for write in unit.writes:
                write(txn)
        for key in batch.damaged:
            value = txn.get(key)
            if value is not None:
                txn.put(bytes((block_log.DAMAGED,)) + key[1:], value)
        now_ms = int(self._clock() * 1000)
        settled = batch.all_settled()
        sharing = None
        if batch.shared:
            self._shares = True
            sharing = Sharing(txn, batch.shared, now_ms)
        lanes: dict[Lane, Any] = {**settled, **batch.puts}
        if batch.purges:
            lanes |= dict.fromkeys(batch.purges)
        plan = []
        for lane in lanes:
            try:
                plan.append(self._write_lane(txn, batch, lane, settled.get(lane), sharing, releases, now_ms))
            except DAMAGE as error:
                raise LaneBroken(lane, error, self._env.path) from error
        if sharing is not None:
            sharing.finish()
        if batch.attempts:
            for lane, counts in batch.attempts.items():
                with lane_errors(lane, self._env.path):
                    _write_attempts(txn, {lane: counts}, {step.lane: step.row for step in plan})
        if batch.deletes:
            with lane_errors(None, self._env.path):
                batch.deleted = _write_deletes(txn, batch.deletes, batch.removes, releases)
        return plan

    def _write_lane(
        self,
        txn: Any,
        batch: Batch,
        lane: Lane,
        settled: list[list[int]] | None,
        sharing: Sharing | None,
        releases: Releases,
        now_ms: int,
    ) -> Step:
        owner, number, row = lane.owner, lane.lane, lane.row
        if settled:
            row = block_log.settle(txn, owner, number, row, [Settled(*part) for part in settled])
            if row.marks:
                lane.count_settled(settled, row.floor)
        first = following = lane.next
        purged_to = None
        if lane in batch.purges:
            purged_to = first
            row = block_log.purge(row, first)
        puts = batch.puts.get(lane, [])
        records: list[Record] = []
        topics: Sequence[str] | None = None
        size = 0
        if puts:
            records, sizes, plain, topics = puts[0].records, puts[0].sizes, puts[0].plain, puts[0].topics
            if topics is not None:
                now_ms = max(now_ms, lane.time_ms)
            if len(puts) > 1:
                if topics is not None:
                    topics = [topic for put in puts for topic in put.topics or ()]
                records = [record for put in puts for record in put.records]
                sizes = [size for put in puts for size in put.sizes]
                plain = all(put.plain for put in puts)
            for put in puts:
                put.first = following
                following += len(put.records)
                size += put.size
            if sharing is None:
                lanes = len(batch.puts)
                row = block_log.append(txn, owner, number, row, first, records, sizes, plain, now_ms, lanes, topics)
            else:
                stand_ins = sharing.stand_ins(records)
                row = block_log.append_stand_ins(txn, owner, number, row, first, stand_ins, now_ms, topics)
            if first == lane.begins and topics is not None:
                eras.note(txn, owner, number, first, self._era, row.floor)
        ahead = RESERVED_SEQUENCES if lane.leaves_gaps else 0
        row = tuple.__new__(Row, (max(row.next, following + ahead), *row[1:]))  # as in `append`
        remove_at, removing = lane.remove_at, False
        if row.floor >= remove_at:
            remove_at, removing = block_log.remove_settled(txn, owner, number, row, batch.removes, releases)
        block_log.write_row(txn, owner, number, row)
        return Step(
            lane, row, following, first, records, size, len(puts), purged_to, remove_at, removing, topics, now_ms
        )


def _write_attempts(txn: Any, attempts: dict[Lane, list[tuple[int, int, int]]], rows: dict[Lane, Row]) -> None:
    """Write the counts of deliveries of what is not settled; `rows` are those this batch has changed."""
    for lane, ranges in attempts.items():
        floor = rows.get(lane, lane.row).floor
        for first, end, number in ranges:
            block_log.raise_attempts(txn, lane.owner, lane.lane, max(first, floor), end, number)


def _write_deletes(txn: Any, owners: Iterable[int], limit: int, releases: Releases) -> tuple[int, ...]:
    """Remove a part of what deleted queues left; return those of which nothing is left, their names included."""
    gone = tuple(
        owner
        for owner in owners
        if not block_log.delete_lanes(txn, owner, limit, releases) and not delete_index(txn, owner)
    )
    for owner in gone:
        txn.delete(block_log.queue_key(owner))
    return gone


def _hollow(txn: Any, lane: Lane, releases: Releases) -> Hollowed:
    """Begin a pass over a lane's blocks, or go on with it. By the writer."""
    if lane.hollow_at == NOWHERE:
        lane.hollow_at, lane.hollow_from = lane.hollow_from, NOWHERE
        lane.settled_messages = lane.settled_bytes = lane.hollow_steps = 0
    return block_log.hollow(txn, lane.owner, lane.lane, lane.row, lane.hollow_at, block_log.HOLLOWING_STEPS, releases)
