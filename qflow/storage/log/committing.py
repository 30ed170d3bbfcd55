"""Committing a batch: as a whole, or in parts where the disk is full; and publishing it after that."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import cast

from qflow.errors import DiskFull, StorageError
from qflow.storage.environment import Environment, MapFull
from qflow.storage.log.batch import Batch
from qflow.storage.log.batch_writing import BatchWriting
from qflow.storage.log.broken_lanes import LaneBroken, refuse_lane
from qflow.storage.log.calls import Calls
from qflow.storage.log.confirming import Confirming
from qflow.storage.log.lane import Publisher, Step, TopicPublisher
from qflow.storage.log.parts import REMOVED_IN_A_PART, cut, joined
from qflow.storage.log.placing import Removed
from qflow.storage.log.recovery import touch
from qflow.storage.log.removal import REMOVED_AT_ONCE


class Committing:
    """See the module. One a log, of the writer alone."""

    def __init__(
        self,
        env: Environment,
        confirming: Confirming,
        writing: BatchWriting,
        failed: Callable[[BaseException], None],
    ) -> None:
        """`failed` is told of what leaves the log, or those behind it, in a state that nobody knows."""
        self._env = env
        self._confirming = confirming
        confirming.failed = failed
        self._writing = writing
        self._failed = failed
        self.commits = 0

    def commit(self, batch: Batch) -> None:
        while True:
            began_s = perf_counter()
            try:
                self._writing.commit(batch)
            except MapFull:
                batch.committing = False
                if not self._env.confined:
                    self._grow_map()
                elif not self._goes_on(batch, error := _full(self._env.path)):
                    raise error from None
            except LaneBroken as error:
                calls = Calls()
                refuse_lane(batch, error, calls)
                calls.raise_first()
            except (DiskFull, Removed) as error:
                if not self._goes_on(batch, error if isinstance(error, DiskFull) else StorageError(str(error))):
                    raise
            else:
                self.commits += 1
                self._confirming.timers.commits.note(perf_counter() - began_s)
                return

    def apply(self) -> None:
        """Have everything in the log that was confirmed."""
        while True:
            try:
                return self._confirming.apply()
            except MapFull:
                self._grow_map()

    def _goes_on(self, batch: Batch, error: StorageError) -> bool:
        """Leave out of a batch what finds no room on the disk, or no disk; return whether to write what is left."""
        if batch.is_writing:
            if batch.deletes and batch.removes > 1:
                batch.removes = 1  # what was deleted can wait, what is put is not refused for it
                return True
            if batch.free and self._turn_over(batch):
                return True
            calls = Calls()
            batch.refuse_messages(error, calls)
            if calls.error is not None:
                self._failed(calls.error)
                raise calls.error
            batch.removes = REMOVED_AT_ONCE  # what is left settles, in parts if need be
            return True
        if batch.removes > REMOVED_IN_A_PART:
            return self._commit_parts(batch)
        if batch.removes:
            batch.removes = 1 if batch.removes > 1 else 0
            return True
        return False

    def _turn_over(self, batch: Batch) -> bool:
        """Commit next to nothing, so that pages the last commit freed can be used; return False the second time."""
        if batch.turned:
            return False
        batch.turned = True
        part = Batch()
        part.is_part, part.removes, part.writes = True, 0, [touch]
        return self._commit_part(batch, part)

    def _commit_part(self, batch: Batch, part: Batch) -> bool:
        """Commit a part of a batch; return whether it found room."""
        try:
            self.commit(part)
        except DiskFull:
            return False
        except BaseException:
            batch.committing = part.committing
            raise
        calls = Calls()
        publish(part, self._env, calls)
        calls.raise_first()
        return True

    def _commit_parts(self, batch: Batch) -> bool:
        """Commit what a batch settles in parts, and leave them out of it; return whether all of them found room."""
        rows = {lane: ranges for lane, ranges in batch.settled.items() if batch.writes and not ranges}
        settled = {lane: ranges for lane, ranges in batch.settled.items() if lane not in rows}
        parts = cut(settled, batch.attempts, batch.free)
        while parts:
            part = Batch()
            part.settled, part.attempts = parts[0]
            part.is_part, part.removes = True, REMOVED_IN_A_PART
            if not self._commit_part(batch, part):
                return False
            del parts[0]
            left = joined(parts)
            batch.settled, batch.attempts = rows | left.settled, left.attempts
        batch.removes = REMOVED_IN_A_PART
        return True

    def _grow_map(self) -> None:
        try:
            self._writing.grow_map()
        except BaseException as error:  # it may not be mapped at all any more
            self._failed(error)
            raise


def _full(path: str) -> DiskFull:
    return DiskFull(f"the log {path} is full, and the disk has no room for more: free some space and try again")


def conclude(batch: Batch, env: Environment) -> None:
    """Publish what was committed, or refuse what was not; raise what was raised meanwhile, when all is done."""
    calls = Calls()
    if batch.committed:
        publish(batch, env, calls)
    else:
        error = batch.error or StorageError("the batch was not written")
        for request in batch.requests:
            if request.error is None:
                request.refuse(error, calls)
    calls.raise_first()


def publish(batch: Batch, env: Environment, call: Calls) -> None:
    """Make visible what was committed."""
    plan = batch.plan
    _tell_purged(plan, call)  # before anything that came later is visible
    for lane, row, following, first, records, size, puts, _, remove_at, removing, topics, time_ms in plan:
        env.messages += row.messages - lane.row.messages
        lane.remove_at, lane.removing, lane.row = remove_at, removing, row  # who sees the row sees what it leads to
        lane.written = True
        if removing or lane.hollow_due or lane.leaves_gaps:  # there, figures tell how much is in no log
            call(lane.publisher.note_left)
        if puts:
            lane.next = following
            if topics is None:
                call(lane.publisher.publish, first, records, size, puts)
            else:
                lane.time_ms = time_ms
                publisher = cast(TopicPublisher, lane.publisher)
                call(publisher.publish_topics, first, records, topics, size, time_ms)
    if batch.spread_out is not None:
        batch.spread_out.publish(env, call)
    for lane, hollowed in batch.hollowed.items():
        lane.passes.note(hollowed, lane.row.tail)
        if lane.hollow_due:
            call(lane.publisher.note_left)
    for unit in batch.units:
        unit.publish(call)


def _tell_purged(plan: list[Step], call: Calls) -> None:
    """Have the queues drop what is purged, each all its lanes at once."""
    ends: dict[Publisher, dict[int, int]] = {}
    for step in plan:
        if step.purged_to is not None:
            step.lane.border = step.purged_to
            ends.setdefault(step.lane.publisher, {})[step.lane.lane] = step.purged_to
    for publisher, below in ends.items():
        call(publisher.purged, below)
