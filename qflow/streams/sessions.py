"""Subscriptions of the streams of a broker: opened, recovered, expired, deleted.

In the log a durable cursor has a record and rows as a queue has, under a number of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

from qflow.config import check_name
from qflow.errors import (
    CorruptionError,
    DiskFull,
    InvalidArgument,
    NotFound,
    QflowError,
    SettingsConflict,
    StreamDeleted,
)
from qflow.loggers import get_logger
from qflow.memory.line import PAUSE_S
from qflow.memory.waiting import StraightLock, sheltered
from qflow.steps import Steps
from qflow.storage.blocks import NO_PREVIOUS
from qflow.storage.log import recovery
from qflow.storage.log.ending import Piece, of_row
from qflow.storage.log.keys import queue_key
from qflow.storage.log.marks import settled_ranges
from qflow.storage.log.records import NewRecord, Records
from qflow.storage.log.recovery import CURSOR, QueueRecord
from qflow.storage.log.rows import Row, new_row
from qflow.storage.log.transaction_log import Lane
from qflow.streams.shared import Shared
from qflow.streams.topic_filter import check_filter

if TYPE_CHECKING:
    from qflow.options import Start
    from qflow.streams.cursor import Cursor
    from qflow.streams.member import Member
    from qflow.streams.stream_log import StreamLog
    from qflow.streams.subscription import Subscription
    from qflow.streams.terms import Terms

SET_S = 60.0
"""By more than that the wall clock goes ahead if it is set."""
AT_ONCE_S = 0.05
"""How long subscriptions are looked at, and expire, at once: a bounded number each time."""
LOOKED_AT_ONCE = 2000
EXPIRED_AT_ONCE = 128
"""Subscriptions that are written or deleted in one commit, at most."""

_logger = get_logger("qflow")


class _Facts:
    """A durable cursor with what is recorded of it beside its position."""

    def __init__(self, stream: StreamLog, cursor: Cursor, expiry_s: float | None, seen_s: float) -> None:
        self.stream = stream
        self.cursor = cursor
        self.expiry_s = expiry_s
        self.seen_s = seen_s
        """When it was last open, on the wall clock."""
        self.written_s = seen_s
        self.is_left = False
        """It was closed since its record was written."""

    @property
    def record(self) -> bytes:
        cursor = self.cursor
        facts = {
            "stream": self.stream.owner,
            "filter": cursor.interest.filter,
            "group": cursor.is_group,
            "expiry_s": self.expiry_s,
            "seen_s": self.seen_s,
        }
        return recovery.queue_value(cursor.title or "", 0, facts, kind=CURSOR)


class _NoLane:
    """The publisher of a cursor's lanes: nothing is ever put into them."""

    def refused(self, put: object) -> None: ...
    def purged(self, ends: dict[int, int]) -> None: ...
    def note_left(self) -> None: ...


class Sessions:
    """See the module. Methods that open, delete or expire are called by one thread at a time."""

    def __init__(self, shared: Shared, records: Records, new_owner: Callable[[], int], deleted: list[int]) -> None:
        """`deleted` gets the numbers of deleted cursors, whose rows the broker removes."""
        self._shared = shared
        self._log = shared.log
        self._clock = shared.clock
        self._steps = Steps(shared.clock, shared.monotonic, SET_S)
        self._records = records
        self._new_owner = new_owner
        self._deleted = deleted
        self._expiring = Records(self._log)
        """Of `expire` alone: others write records meanwhile, and know nothing of this lock."""
        self._facts: dict[Cursor, _Facts] = {}
        self._unseen: list[_Facts] = []
        """What is still to be looked at whether it has expired, in this round."""
        self._expired: list[_Facts] = []
        """What has, and is not deleted yet."""
        self._most = EXPIRED_AT_ONCE
        """How many are deleted in one commit: fewer where the disk is full."""
        self._lock = StraightLock()
        """Held while subscriptions come and go. It comes before that of retention, and those of cursors."""

    def recover(self, stream: StreamLog, record: QueueRecord, *, clean: bool) -> str | None:
        """Take over a cursor from the log; return why it cannot be served, None if it can."""
        facts = record.settings
        if record.name in stream.cursors or record.name in stream.pinned:
            return f"is in the log a second time, as number {record.owner}, which is not served"
        if record.rows is None:
            stream.pinned[record.name] = record.owner
            return "is damaged: it holds back what is retained until it is consumed; delete_subscription removes it"
        rows = {number: record.rows.get(number) or new_row(number) for number in range(len(stream.partitions))}
        try:
            check_filter(facts["filter"])
            cursor = self._build(stream, record.name, facts["filter"], record.owner, rows, group=facts["group"])
            self._know(_Facts(stream, cursor, facts["expiry_s"], facts["seen_s"]))
        except (InvalidArgument, KeyError) as error:  # a later version wrote it
            stream.pinned[record.name] = record.owner
            return f"cannot be served: {error}"
        for part, lane in zip(cursor.parts, cursor.lanes, strict=True):
            part.doubtful = lane.row.next if clean else part.partition.next
        return None

    def _recall(self, cursor: Cursor) -> None:
        """Move a durable cursor that is not open to the first message that is not settled."""
        cursor.place.stand_still()
        self._log.drain()
        with self._log.read() as txn:
            skips = [
                list(settled_ranges(txn, cursor.owner, lane.lane, lane.row.floor, NO_PREVIOUS)) for lane in cursor.lanes
            ]
        cursor.place.recall(skips)

    def open(self, stream: StreamLog, terms: Terms) -> Subscription:
        """Return a subscription; `terms` are checked already."""
        from qflow.streams.member import Member
        from qflow.streams.subscription import subscription_of

        with self._lock:
            if terms.title is None:
                cursor = self._ephemeral(stream, terms)
            else:
                with stream.retention.held_back():  # it has to know the cursor before it drops its messages
                    cursor = self._durable(stream, terms.title, terms)
                self._facts[cursor].seen_s = self._clock()
            member = Member(cursor, terms, self._left)
            return subscription_of(stream, member)

    def _ephemeral(self, stream: StreamLog, terms: Terms) -> Cursor:
        from qflow.streams.cursor import Cursor

        if terms.start == "committed":
            raise InvalidArgument('start="committed" needs the name of a subscription, or of a group')
        starts = self._starts(stream, terms.start)
        return Cursor(stream.history, stream.history.interest(terms.filter), self._shared, starts)

    def _durable(self, stream: StreamLog, title: str, terms: Terms) -> Cursor:
        topic_filter, group, expiry_s = terms.filter, terms.group is not None, terms.session_expiry_s
        self._records.make_sure()
        if title in stream.pinned:
            raise CorruptionError(
                f"subscription {title!r} of stream {stream.name!r} is in the log, but cannot be served: nobody knows "
                "where it was: see `qflow check`; delete_subscription removes it, and it can begin anew"
            )
        cursor = stream.cursors.get(title)
        if cursor is not None and cursor.ended is StreamDeleted:
            self._delete(self._records, [self._facts[cursor]])  # an earlier delete failed half-way
            cursor = None
        if cursor is None:
            if terms.start == "committed":
                raise NotFound(
                    f"stream {stream.name!r} has no subscription {title!r} yet: say where it starts, for example "
                    'start="earliest"'
                )
            return self._new_durable(stream, title, terms)
        if cursor.interest.filter != topic_filter or cursor.is_group is not group:
            raise SettingsConflict(
                f"subscription {title!r} of stream {stream.name!r} has filter={cursor.interest.filter!r}, "
                f"group={cursor.is_group}, asked for now with filter={topic_filter!r}, group={group}: use another "
                "name, or delete it with delete_subscription"
            )
        if cursor.members and not group:
            raise SettingsConflict(
                f"subscription {title!r} of stream {stream.name!r} is open already: close it first, or share the work "
                "with group="
            )
        if not cursor.members:
            self._recall(cursor)
        facts = self._facts[cursor]
        if expiry_s is not None and facts.expiry_s != expiry_s and not cursor.members:
            was, facts.expiry_s = facts.expiry_s, expiry_s
            try:
                self._write_facts(facts)
            except BaseException:
                facts.expiry_s = was
                raise
        return cursor

    def _new_durable(self, stream: StreamLog, title: str, terms: Terms) -> Cursor:
        owner = self._new_owner()
        rows = {number: Row(next=at, floor=at) for number, at in enumerate(self._starts(stream, terms.start))}
        cursor = self._build(stream, title, terms.filter, owner, rows, group=terms.group is not None)
        facts = _Facts(stream, cursor, terms.session_expiry_s, self._clock())
        self._records.add([NewRecord(owner, facts.record, rows)], partial(self._know, facts))
        return cursor

    def _know(self, facts: _Facts) -> None:
        """Add a durable cursor; twice is fine."""
        cursor = facts.cursor
        self._facts[cursor] = facts
        facts.stream.cursors[cursor.title or ""] = cursor

    def _build(
        self, stream: StreamLog, title: str, topic_filter: str, owner: int, rows: dict[int, Row], *, group: bool
    ) -> Cursor:
        from qflow.streams.cursor import Cursor, Kept

        lanes = [Lane(owner, number, row, _NoLane()) for number, row in rows.items()]  # type: ignore[arg-type]
        interest = stream.history.interest(topic_filter)
        starts = [row.floor for row in rows.values()]
        return Cursor(stream.history, interest, self._shared, starts, Kept(title, owner, group, lanes))

    def _starts(self, stream: StreamLog, start: Start) -> list[int]:
        """Return where a new subscription begins, by partition."""
        if start == "latest":
            return [partition.next for partition in stream.partitions]
        if start == "earliest":
            return [partition.floor for partition in stream.partitions]
        if isinstance(start, int) and not isinstance(start, bool) and len(stream.partitions) > 1:
            raise InvalidArgument(
                f"stream {stream.name!r} has {len(stream.partitions)} partitions: start at a datetime, or seek each"
            )
        return [stream.history.position_for(number, start) for number in range(len(stream.partitions))]  # type: ignore[arg-type]

    @sheltered
    def _left(self, member: Member) -> None:
        with self._lock:
            cursor = member.cursor
            last = cursor.leave(member)
            facts = self._facts.get(cursor)
            if last and facts is not None and cursor.ended is None:
                facts.seen_s = self._clock()
                facts.is_left = True  # maintenance writes it, or the end: many that are left have a commit together

    def _write_facts(self, *written: _Facts) -> None:
        """Write the records of some cursors, with when they were last open, in one commit. Under the lock.

        Raises:
            DiskFull: the disk has no room but what is reserved for acks.
        """
        self._records.renew({facts.cursor.owner: facts.record for facts in written})
        for facts in written:
            facts.written_s, facts.is_left = facts.seen_s, False

    def delete(self, stream: StreamLog, name: str) -> None:
        """Delete a durable subscription, or a group, with its position; its gets raise `StreamDeleted`."""
        check_name(name, "subscription")
        with self._lock:
            self._records.make_sure()
            pinned = stream.pinned.get(name)
            if pinned is not None:
                self._records.delete([pinned])
                del stream.pinned[name]
                self._deleted.append(pinned)
                return
            cursor = stream.cursors.get(name)
            if cursor is None:
                names = ", ".join(map(repr, sorted({*stream.cursors, *stream.pinned}))) or "none"
                raise NotFound(f"stream {stream.name!r} has no subscription {name!r}; there are: {names}")
            self._delete(self._records, [self._facts[cursor]])

    def _delete(self, records: Records, gone: list[_Facts]) -> None:
        """Delete cursors in one commit: end them, and wait for settles under way, so that nothing is written later.

        They stay known until that is committed: if it fails, delete them again. Under the lock.
        """
        for facts in gone:
            facts.cursor.end(StreamDeleted)
        for facts in gone:
            facts.cursor.place.stand_still()
        self._log.drain()
        records.delete([facts.cursor.owner for facts in gone])
        for facts in gone:
            cursor = facts.cursor
            del facts.stream.cursors[cursor.title or ""], self._facts[cursor]
            self._deleted.append(cursor.owner)

    def end(self, streams: list[StreamLog], error: type[QflowError]) -> None:
        """End all cursors of these streams; their gets raise the error."""
        with self._lock:
            self._records.make_sure()
            for stream in streams:
                stream.end(error)

    def delete_with(self, stream: StreamLog) -> list[int]:
        """Delete a stream that has ended, with its subscriptions; return their numbers."""
        with self._lock:
            cursors = list(stream.cursors.values())
            owners = [stream.owner, *(cursor.owner for cursor in cursors), *stream.pinned.values()]
            self._records.delete(owners)  # it stays known until this is committed: if it fails, delete it again
            for cursor in cursors:
                self._facts.pop(cursor, None)
            return owners

    def expire(self) -> bool:
        """Delete subscriptions that were not open for `session_expiry_s`, for a while; return whether there are more.

        The lock is let go of after each commit, for others.
        """
        self._steps.look()
        ends = perf_counter() + AT_ONCE_S
        with self._lock:
            if not self._unseen:
                self._unseen = list(reversed(self._facts.values()))
        while True:
            with self._lock:
                self._look_at_some()
                gone = self._delete_expired()
                more = bool(self._unseen or self._expired)
            for facts in gone:
                _logger.info("subscription %r of stream %r expired", facts.cursor.title, facts.stream.name)
            if not more or perf_counter() >= ends:
                return more
            sleep(PAUSE_S)

    def _look_at_some(self) -> None:
        """Find what has expired; write of the rest when it was last open, where that has changed. Under the lock."""
        now = self._clock()
        outdated: list[_Facts] = []
        for _ in range(min(LOOKED_AT_ONCE, len(self._unseen))):
            if len(outdated) >= EXPIRED_AT_ONCE or len(self._expired) >= self._most:
                break
            facts = self._unseen.pop()
            cursor = facts.cursor
            if facts.expiry_s is None or cursor.ended is not None or cursor not in self._facts:
                continue
            facts.seen_s = now if cursor.members else self._steps.moment(facts.seen_s)
            if not cursor.members and now - facts.seen_s > facts.expiry_s:
                self._expired.append(facts)
            elif facts.is_left or facts.seen_s - facts.written_s > max(1.0, facts.expiry_s / 4):
                outdated.append(facts)
        if outdated:
            with suppress(DiskFull):  # it is tried again next time
                self._write_facts(*outdated)

    def _delete_expired(self) -> list[_Facts]:
        """Delete some of what has expired, in one commit; return it. Under the lock."""
        self._expired = [facts for facts in self._expired if facts.cursor in self._facts]
        gone = self._expired[: self._most]
        if not gone:
            return []
        for facts in gone:
            facts.cursor.end(StreamDeleted)  # from here on it is not found again
        for facts in gone:
            try:
                self._expiring.check(facts.cursor.owner)
            except CorruptionError:
                self._expired.remove(facts)  # the others go next time
                raise
        try:
            self._delete(self._expiring, gone)
        except DiskFull:
            if self._most == 1:
                raise
            self._most = max(1, self._most // 4)
            return []
        self._most = min(2 * self._most, EXPIRED_AT_ONCE)
        del self._expired[: len(gone)]
        return gone

    def moment_ms(self, moment_ms: int) -> int:
        """Return a moment that was written down, by the clock as it is set now."""
        moment_s = self._steps.moment(moment_ms / 1000)
        return moment_ms if moment_s == moment_ms / 1000 else int(moment_s * 1000)

    @property
    def lanes(self) -> list[Lane]:
        """All lanes of durable cursors."""
        return [lane for cursor in list(self._facts) for lane in cursor.lanes]

    def die(self, lock: Any) -> None:
        """In a forked child: refuse everything."""
        self._lock = lock

    def endings(self) -> Iterator[Piece]:
        """Yield what a clean close writes: when subscriptions were last open, and how far they were delivered."""
        for facts in self._facts.values():
            cursor = facts.cursor
            for part in cursor.parts:
                lane = part.lane
                if lane is not None:
                    yield of_row(lane, max(part.seen, part.doubtful))
            yield Piece(1, 0, partial(_put_record, owner=cursor.owner, value=facts.record))


def _put_record(txn: Any, *, owner: int, value: bytes) -> None:
    txn.put(queue_key(owner), value)
