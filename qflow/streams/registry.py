"""All streams of a broker and their subscriptions: made, found again, kept in order, deleted.

In the log each stream, and each durable cursor, has a record and rows as a queue has, under a number of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any
from uuid import uuid4

import attrs

from qflow.config import StreamSettings, check_changes, check_name, parse_span
from qflow.errors import (
    CorruptionError,
    DiskFull,
    ForkedProcess,
    InvalidArgument,
    NotFound,
    SettingsConflict,
    StreamDeleted,
)
from qflow.memory.waiting import sheltered
from qflow.storage.blocks import NO_PREVIOUS
from qflow.storage.log import recovery
from qflow.storage.log.ending import Piece, of_row
from qflow.storage.log.keys import queue_key
from qflow.storage.log.marks import settled_ranges
from qflow.storage.log.records import Records
from qflow.storage.log.recovery import CURSOR, STREAM, QueueRecord
from qflow.storage.log.rows import Row, new_row
from qflow.storage.log.table import Forgotten
from qflow.storage.log.transaction_log import Lane, TransactionLog
from qflow.storage.streams import producers as table
from qflow.streams.cursor import Cursor
from qflow.streams.producers import Producers
from qflow.streams.room import Room
from qflow.streams.stream import QUIET_S, Stream
from qflow.streams.subscription import Subscription, position_for
from qflow.streams.topic_filter import FilterTrie, check_filter

_logger = logging.getLogger("qflow")

GROUP_ACK_TIMEOUT_S = 60.0
"""A member of a group holds a message so long at most, unless it says otherwise."""
FORGET_S = 3600.0
"""How often those producers are looked for that were not seen for long."""
STARTS = ("latest", "earliest", "committed")

Start = str | int | datetime
Attempt = Callable[[str, Callable[[], bool]], bool]
"""Does a job, given what it is; returns whether there is more to do at once."""


def at_once(_what: str, job: Callable[[], bool]) -> bool:
    """Do a job; its errors are the caller's."""
    return job()


class _CursorFacts:
    """What is known of a durable cursor beside where it is."""

    def __init__(self, cursor: Cursor, expiry_s: float | None, seen_s: float) -> None:
        self.cursor = cursor
        self.expiry_s = expiry_s
        self.seen_s = seen_s
        """When somebody last had it open, on the wall clock."""
        self.written_s = seen_s


class _NoLane:
    """The publisher of a cursor's lanes: nothing is ever put into them."""

    def refused(self, put: object) -> None: ...
    def purged(self, ends: dict[int, int]) -> None: ...


class Streams:
    """See the module. Every method that changes what there is is called by one thread at a time."""

    def __init__(
        self,
        log: TransactionLog,
        records: Records,
        room: Room,
        *,
        max_transaction_bytes: int,
        new_owner: Callable[[], int],
        report: Callable[[str, int], None],
        reroute: Callable[[], None],
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        held: Callable[[int], Mapping[int, int]] | None = None,
    ) -> None:
        self.room = room
        self.routes: FilterTrie[Stream] = FilterTrie()
        """Which streams take a topic."""
        self.deleted: list[int] = []
        """Numbers of what was deleted, for the broker to clear away."""
        self._log = log
        self._records = records
        self._max_transaction_bytes = max_transaction_bytes
        self._new_owner = new_owner
        self._report = report
        self._reroute = reroute
        self._clock = clock
        self._held = held
        self._monotonic = monotonic
        self.producers = Producers(log.read, clock)
        self._forgotten_to = b""
        self._forget_at = 0.0
        self._streams: dict[str, Stream] = {}
        self._facts: dict[Cursor, _CursorFacts] = {}
        self._broken: dict[str, QueueRecord] = {}
        self._lock = threading.Lock()  # held while subscriptions come and go

    # Found again -----------------------------------------------------------------------------------------------------

    def recover(
        self, streams: list[QueueRecord], cursors: list[QueueRecord], unread: AbstractSet[int], *, clean: bool
    ) -> list[str]:
        """Take over what the log holds; return what cannot be served, in words: it stays in the log.

        Args:
            unread: numbers of records that cannot be read. Cursors of such a stream stay, too.
        """
        problems: list[str] = []
        by_owner: dict[int, Stream] = {}
        for record in streams:
            if record.deleted:
                self.deleted.append(record.owner)
            elif record.name in self._streams or record.name in self._broken:
                problems.append(
                    f"the log has a second stream {record.name!r}, number {record.owner}, which is not served: it is "
                    "when the first one was deleted, and the spool is opened again"
                )
            elif record.rows is None:
                self._broken[record.name] = record
            else:
                try:
                    settings = _settings_of(record)
                except InvalidArgument as error:  # a setting of a later version
                    self._broken[record.name] = record
                    problems.append(f"stream {record.name!r} cannot be served: {error}")
                else:
                    stream = self._build(record.name, settings, record.owner, record.rows)
                    by_owner[record.owner] = stream
                    self._register(stream)
        kept = unread | {record.owner for record in streams if not record.deleted}
        for record in cursors:
            owner = record.settings.get("stream")
            if record.deleted or owner not in kept:
                self.deleted.append(record.owner)
            elif owner in by_owner:
                problem = self._recover_cursor(by_owner[owner], record, clean=clean)
                if problem is not None:
                    problems.append(f"subscription {record.name!r} of stream {by_owner[owner].name!r} {problem}")
        return problems

    def _recover_cursor(self, stream: Stream, record: QueueRecord, *, clean: bool) -> str | None:
        """Take over a cursor; return why it cannot be served."""
        facts = record.settings
        if record.name in stream.cursors or record.name in stream.pinned:
            return f"is in the log a second time, as number {record.owner}, which is not served"
        if record.rows is None:
            stream.pinned[record.name] = record.owner
            return "is damaged: it holds back what is retained until it is consumed; delete_subscription removes it"
        lanes = [self._lane(record.owner, number, record.rows.get(number)) for number in range(len(stream.partitions))]
        try:
            check_filter(facts["filter"])
            cursor = self._build_cursor(stream, record.name, facts["filter"], lanes, record.owner, group=facts["group"])
            self._know(cursor, _CursorFacts(cursor, facts["expiry_s"], facts["seen_s"]))
        except (InvalidArgument, KeyError) as error:  # of a later version
            stream.pinned[record.name] = record.owner
            return f"cannot be served: {error}"
        for part, lane in zip(cursor.parts, lanes, strict=True):
            part.doubtful = lane.row.next if clean else part.partition.next
        return None

    def _recall(self, cursor: Cursor) -> None:
        """Have a durable cursor that nobody has open begin where what is settled ends."""
        cursor.stand_still()
        self._log.drain()
        with self._log.read() as txn:
            skips = [
                list(settled_ranges(txn, cursor.owner, part.partition.number, part.lane.row.floor, NO_PREVIOUS))
                for part in cursor.parts
                if part.lane is not None
            ]
        cursor.recall(skips)

    def _lane(self, owner: int, number: int, row: Row | None) -> Lane:
        return Lane(owner, number, new_row(number) if row is None else row, _NoLane())  # type: ignore[arg-type]

    # Streams ---------------------------------------------------------------------------------------------------------

    @sheltered
    def declare(self, name: str, settings: StreamSettings) -> Stream:
        """Return the stream of this name, making it if there is none."""
        check_name(name, "stream")
        for topic_filter in settings.topics:
            check_filter(topic_filter)
        self._records.make_sure()
        known = self._streams.get(name)
        if known is not None and known.ended is StreamDeleted:
            self.delete(name)  # that was begun, and failed
            known = None
        if known is not None:
            conflicts = known.settings.conflicts(settings)
            if conflicts:
                setting, mine, theirs = conflicts[0]
                raise SettingsConflict(
                    f"stream {name!r} has {setting}={mine!r}, declared now with {setting}={theirs!r}: declare it as it "
                    "is, or change it with alter_stream"
                )
            return known
        if name in self._broken:
            raise self._broken_error(name)
        owner = self._new_owner()
        rows = {number: new_row(number) for number in range(settings.partitions)}
        value = recovery.queue_value(name, uuid4().int >> 64, settings.to_dict(), kind=STREAM)
        stream = self._build(name, settings, owner, rows)
        self._records.add(owner, value, rows, partial(self._register, stream))
        return stream

    def _build(self, name: str, settings: StreamSettings, owner: int, rows: dict[int, Row]) -> Stream:
        return Stream(
            name,
            settings,
            owner=owner,
            rows=rows | {number: new_row(number) for number in range(settings.partitions) if number not in rows},
            log=self._log,
            room=self.room,
            max_transaction_bytes=self._max_transaction_bytes,
            report=self._report,
            clock=self._clock,
            held=self._held,
        )

    def _register(self, stream: Stream) -> None:
        """Have a stream known; twice is fine."""
        self._streams[stream.name] = stream
        for topic_filter in stream.settings.topics:
            self.routes.add(topic_filter, stream)

    @sheltered
    def alter(self, of: Stream | str, /, **changes: Any) -> Stream:
        """Change what a stream takes, or how long it keeps it."""
        stream = self.own(of)
        name = stream.name
        check_changes(StreamSettings, changes, "stream")
        if "partitions" in changes:
            raise InvalidArgument("partitions of a stream cannot be changed: its keys would lose their order")
        settings = attrs.evolve(stream.settings, **changes)
        for topic_filter in settings.topics:
            check_filter(topic_filter)
        value = recovery.queue_value(name, 0, settings.to_dict(), kind=STREAM)
        self._records.replace(stream.owner, value, partial(self._apply, stream, settings))
        return stream

    def _apply(self, stream: Stream, settings: StreamSettings) -> None:
        """Have a stream follow other settings; twice is fine."""
        gone = set(stream.settings.topics) - set(settings.topics)
        for topic_filter in settings.topics:  # before others go, so that what is published meanwhile finds its way
            self.routes.add(topic_filter, stream)
        for topic_filter in gone:
            self.routes.remove(topic_filter, stream)
        stream.settings = settings

    def get(self, name: str) -> Stream:
        """Return a stream that exists.

        Raises:
            NotFound: there is none of this name. CorruptionError: its record is damaged.
        """
        stream = self._streams.get(check_name(name, "stream"))
        if stream is None and name in self._broken:
            raise self._broken_error(name)
        if stream is None:
            names = ", ".join(map(repr, sorted(self._streams))) or "none"
            raise NotFound(f"there is no stream {name!r}: declare it first; there are: {names}")
        return stream

    def _broken_error(self, name: str) -> CorruptionError:
        return CorruptionError(
            f"stream {name!r} is in the log, but its record is damaged, or of a later version: see `qflow check`; "
            "delete_stream removes it with its messages"
        )

    def names(self) -> list[str]:
        """Return the names of all streams, sorted."""
        return sorted(self._streams)

    def all(self) -> list[Stream]:
        """Return all streams."""
        return list(self._streams.values())

    @sheltered
    def delete(self, of: Stream | str) -> None:
        """Delete a stream with its messages and subscriptions. Cost: one commit."""
        if isinstance(of, Stream):
            name = of.name
            if self._streams.get(name) is not of:
                self.own(of)  # which raises
        else:
            name = of
        self._records.make_sure()
        broken = self._broken.get(check_name(name, "stream"))
        if broken is not None:
            self._write_deleted([broken.owner])
            del self._broken[name]
            self.deleted.append(broken.owner)
            return
        stream = self.get(name)
        for topic_filter in stream.settings.topics:
            self.routes.remove(topic_filter, stream)
        self._reroute()
        with self._lock:
            stream.end(StreamDeleted)  # before it is gone: what is published from now on finds that
        stream.settle_down()
        with self._lock:
            cursors = list(stream.cursors.values())
            owners = [stream.owner, *(cursor.owner for cursor in cursors), *stream.pinned.values()]
            self._write_deleted(owners)  # it is known until that holds: if it fails, delete it again
            for cursor in cursors:
                self._facts.pop(cursor, None)
            self._streams.pop(name, None)
            self._log.forget(stream.lanes)
            self.deleted += owners

    def _write_deleted(self, owners: list[int]) -> None:
        self._records.delete(owners)

    # Subscriptions ---------------------------------------------------------------------------------------------------

    @sheltered
    def subscribe(
        self,
        name_of_stream: Stream | str,
        topic_filter: str,
        *,
        name: str | None,
        start: Start,
        group: str | None,
        session_expiry_s: float | None,
        follow: bool,
        ack_timeout_s: float | None,
        on_gap: str,
    ) -> Subscription:
        """Return a subscription; see `Broker.subscribe`."""
        stream = self.own(name_of_stream)
        if isinstance(topic_filter, str) and topic_filter.startswith("$share/"):
            raise InvalidArgument(
                f"filter {topic_filter:.120} is a shared subscription of MQTT: give its filter alone, and its name as "
                "group="
            )
        check_filter(topic_filter)
        if on_gap not in ("raise", "skip"):
            raise InvalidArgument(f'on_gap must be "raise" or "skip", got {on_gap!r}')
        if not isinstance(follow, bool):
            raise InvalidArgument(f"follow must be True or False, got {follow!r}")
        if name is not None and group is not None:
            raise InvalidArgument(
                "name= and group= do not go together: a group is known by its own name, and its members have none"
            )
        if name is not None:
            check_name(name, "subscription")
        if group is not None:
            check_name(group, "group")
        if isinstance(start, str) and start not in STARTS:
            raise InvalidArgument(f"start must be one of {', '.join(STARTS)}, an offset or a datetime, got {start!r}")
        title = name if group is None else group
        if title is None and session_expiry_s is not None:
            raise InvalidArgument(
                "session_expiry_s is for subscriptions with a name or a group: others end when closed"
            )
        if ack_timeout_s is None and group is not None:
            ack_timeout_s = GROUP_ACK_TIMEOUT_S
        if ack_timeout_s is not None and not parse_span(ack_timeout_s, "ack_timeout_s") > 0:
            raise InvalidArgument("ack_timeout_s must be more than 0 seconds; None is no time-out")
        expiry_s = None if session_expiry_s is None else parse_span(session_expiry_s, "session_expiry_s")
        if expiry_s == 0:
            raise InvalidArgument(
                "session_expiry_s must be more than 0 seconds: what ends when it is closed needs no name, and None "
                "leaves it as it is"
            )
        with self._lock:
            if title is None:
                cursor = self._ephemeral(stream, topic_filter, start)
            else:
                with stream.held_back():  # retention has to know of it before it drops what it begins with
                    cursor = self._durable(stream, title, topic_filter, start, expiry_s, group=group is not None)
                if ack_timeout_s is not None or not cursor.members:
                    cursor.ack_timeout_s = ack_timeout_s
                self._facts[cursor].seen_s = self._clock()
            if title is None:
                cursor.ack_timeout_s = ack_timeout_s
            return Subscription(cursor, follow=follow, skip_gaps=on_gap == "skip", ended=self._left)

    def own(self, stream: Stream | str) -> Stream:
        """Return a stream of this broker, given itself or by name.

        Raises:
            NotFound, CorruptionError: as `get`. StreamDeleted: it was deleted.
            InvalidArgument: it is one of another broker.
        """
        if not isinstance(stream, Stream):
            return self.get(stream)
        stream.check_open()
        if self._streams.get(stream.name) is not stream:
            raise InvalidArgument(f"{stream!r} is a stream of another broker: use the one it came from")
        return stream

    def _ephemeral(self, stream: Stream, topic_filter: str, start: Start) -> Cursor:
        if start == "committed":
            raise InvalidArgument('start="committed" needs the name of a subscription, or of a group')
        return Cursor(
            stream,
            None,
            stream.interest(topic_filter),
            self._starts(stream, start),
            None,
            log=self._log,
            room=self.room,
            monotonic=self._monotonic,
        )

    def _durable(
        self, stream: Stream, title: str, topic_filter: str, start: Start, expiry_s: float | None, *, group: bool
    ) -> Cursor:
        self._records.make_sure()
        if title in stream.pinned:
            raise CorruptionError(
                f"subscription {title!r} of stream {stream.name!r} is in the log, but cannot be served: nobody knows "
                "where it was: see `qflow check`; delete_subscription removes it, and it can begin anew"
            )
        cursor = stream.cursors.get(title)
        if cursor is not None and cursor.ended is StreamDeleted:
            self._delete_cursor(cursor)  # that was begun, and failed
            cursor = None
        if cursor is None:
            if start == "committed":
                raise NotFound(
                    f"stream {stream.name!r} has no subscription {title!r} yet: say where it starts, for example "
                    'start="earliest"'
                )
            return self._new_durable(stream, title, topic_filter, start, expiry_s, group=group)
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

    def _new_durable(
        self, stream: Stream, title: str, topic_filter: str, start: Start, expiry_s: float | None, *, group: bool
    ) -> Cursor:
        owner = self._new_owner()
        rows = {number: Row(next=at, floor=at) for number, at in enumerate(self._starts(stream, start))}
        now = self._clock()
        lanes = [self._lane(owner, number, row) for number, row in rows.items()]
        cursor = self._build_cursor(stream, title, topic_filter, lanes, owner, group=group)
        know = partial(self._know, cursor, _CursorFacts(cursor, expiry_s, now))
        self._records.add(owner, _cursor_value(stream, title, topic_filter, group, expiry_s, now), rows, know)
        return cursor

    def _know(self, cursor: Cursor, facts: _CursorFacts) -> None:
        """Have a durable cursor known; twice is fine."""
        self._facts[cursor] = facts
        cursor.stream.cursors[cursor.title or ""] = cursor

    def _build_cursor(
        self, stream: Stream, title: str, topic_filter: str, lanes: list[Lane], owner: int, *, group: bool
    ) -> Cursor:
        return Cursor(
            stream,
            title,
            stream.interest(topic_filter),
            [lane.row.floor for lane in lanes],
            lanes,
            log=self._log,
            room=self.room,
            owner=owner,
            group=group,
            monotonic=self._monotonic,
        )

    def _starts(self, stream: Stream, start: Start) -> list[int]:
        """Return where a new subscription begins, by partition."""
        if start == "latest":
            return [partition.next for partition in stream.partitions]
        if start == "earliest":
            return [partition.floor for partition in stream.partitions]
        if isinstance(start, int) and not isinstance(start, bool) and len(stream.partitions) > 1:
            raise InvalidArgument(
                f"stream {stream.name!r} has {len(stream.partitions)} partitions: start at a datetime, or seek each"
            )
        return [position_for(stream, number, start) for number in range(len(stream.partitions))]  # type: ignore[arg-type]

    @sheltered
    def _left(self, subscription: Subscription) -> None:
        """Somebody closed a subscription."""
        with self._lock:
            cursor = subscription.cursor
            last = cursor.leave(subscription)
            facts = self._facts.get(cursor)
            if last and facts is not None and cursor.ended is None:
                facts.seen_s = self._clock()
                if facts.expiry_s is not None:
                    with suppress(DiskFull):  # maintenance writes it, or the end
                        self._write_facts(facts)

    def _write_facts(self, facts: _CursorFacts) -> None:
        """Write when a cursor was last open, and what else is known of it.

        Raises:
            DiskFull: there is no room beside what acks need.
        """
        cursor = facts.cursor
        seen_s = facts.seen_s
        value = _cursor_value(
            cursor.stream, cursor.title or "", cursor.interest.filter, cursor.is_group, facts.expiry_s, seen_s
        )
        self._records.renew(cursor.owner, value)
        facts.written_s = seen_s

    @sheltered
    def delete_subscription(self, stream: Stream | str, name: str) -> None:
        """Delete a durable subscription, or a group, with where it was; who has it open gets `StreamDeleted`."""
        owner = self.own(stream)
        check_name(name, "subscription")
        with self._lock:
            self._records.make_sure()
            pinned = owner.pinned.get(name)
            if pinned is not None:
                self._write_deleted([pinned])
                del owner.pinned[name]
                self.deleted.append(pinned)
                return
            cursor = owner.cursors.get(name)
            if cursor is None:
                names = ", ".join(map(repr, sorted({*owner.cursors, *owner.pinned}))) or "none"
                raise NotFound(f"stream {owner.name!r} has no subscription {name!r}; there are: {names}")
            self._delete_cursor(cursor)

    def _delete_cursor(self, cursor: Cursor) -> None:
        """Delete a cursor: end it and have done what is on its way, so that nothing of it is written afterwards.

        It is known until that holds: if it fails, delete it again. Holding the lock.
        """
        cursor.end(StreamDeleted)
        cursor.stand_still()
        self._log.drain()
        self._write_deleted([cursor.owner])
        del cursor.stream.cursors[cursor.title or ""]
        self._facts.pop(cursor, None)
        self.deleted.append(cursor.owner)

    # Upkeep ----------------------------------------------------------------------------------------------------------

    @sheltered
    def tick(self, attempt: Attempt = at_once) -> bool:
        """Apply retention, take back leases, let sessions expire; return whether there is more to do at once.

        Args:
            attempt: does each job, given what it is; one that takes care of errors lets all others be done.
        """
        more = [attempt("leases", self._take_back), attempt("sessions", self._expire_sessions)]
        more.append(attempt("producers", self._forget_producers))
        for stream in self.all():
            more.append(attempt(f"retention of stream {stream.name!r}", stream.retain))
            more.append(attempt(f"the index of stream {stream.name!r}", stream.index))
        return any(more)

    def _take_back(self) -> bool:
        for stream in self.all():
            for _, cursor in list(stream.readers):
                cursor.tick()
        return False

    def _forget_producers(self) -> bool:
        """Forget producers that were not seen for long, some of them each time; all once in a while."""
        now = self._monotonic()
        if now < self._forget_at or self._log.failed:
            return False
        with self._log.read() as txn:
            if not table.any_stored(txn):
                self._forget_at = now + FORGET_S
                return False
        found: list[Forgotten] = []
        now_ms, start = int(self._clock() * 1000), self._forgotten_to
        self._log.commit(self._log.write(lambda txn: found.append(table.forget(txn, now_ms, start))))
        self._forgotten_to = found[-1].position
        if not self._forgotten_to:
            self._forget_at = now + FORGET_S
        return False

    def _expire_sessions(self) -> bool:
        now = self._clock()
        with self._lock:
            for facts in list(self._facts.values()):
                if facts.expiry_s is None or facts.cursor.ended is not None:
                    continue
                if facts.cursor.members:
                    facts.seen_s = now
                if facts.seen_s - facts.written_s > max(1.0, facts.expiry_s / 4):
                    with suppress(DiskFull):  # it is tried again next time
                        self._write_facts(facts)
                if facts.cursor.members:
                    continue
                if now - facts.seen_s > facts.expiry_s:
                    _logger.info("subscription %r of stream %r expired", facts.cursor.title, facts.cursor.stream.name)
                    self._delete_cursor(facts.cursor)
        return False

    @property
    def lanes(self) -> list[Lane]:
        """All lanes of streams and of durable cursors."""
        found = [lane for stream in self.all() for lane in stream.lanes]
        return found + [part.lane for cursor in list(self._facts) for part in cursor.parts if part.lane is not None]

    @sheltered
    def problems(self) -> list[str]:
        """Return what does not agree, in words."""
        found = [f"stream {name!r} has a damaged record and is not served" for name in sorted(self._broken)]
        for stream in self.all():
            found += [
                f"subscription {title!r} of stream {stream.name!r} is damaged and is not served"
                for title in sorted(stream.pinned)
            ]
        found += self.room.problems()
        with self._log.read() as txn:
            found += table.problems(txn)
        for stream in self.all():
            found += stream.problems()
        return found

    @sheltered
    def end(self, error: Any) -> None:
        """Serve nobody any more; wake who waits."""
        self.room.close()
        with self._lock:
            self._records.make_sure()
            for stream in self.all():
                stream.end(error)

    @sheltered
    def settle_down(self) -> None:
        """After `end`: return when nothing is on its way any more."""
        deadline = time.monotonic() + QUIET_S
        while self.room.busy and time.monotonic() < deadline and not self._log.failed:
            self._log.drain()
            threading.Event().wait(0.001)

    def die(self, lock: Any) -> None:
        """In a forked child: refuse everything."""
        self._lock = lock
        self.room.die(lock)
        self.producers.die(lock)
        for stream in self.all():
            stream.ended = ForkedProcess
            for cursor in {*stream.cursors.values(), *(cursor for _, cursor in stream.readers)}:
                cursor.die(lock)

    def endings(self) -> Iterator[Piece]:
        """Yield what a clean end leaves: when subscriptions were last open, and how far they were delivered."""
        for facts in self._facts.values():
            cursor = facts.cursor
            for part in cursor.parts:
                lane = part.lane
                if lane is not None:
                    shown = max(lane.row.next, part.seen, part.doubtful)
                    yield of_row(lane.owner, lane.lane, lane.row._replace(next=shown))
            value = _cursor_value(
                cursor.stream, cursor.title or "", cursor.interest.filter, cursor.is_group, facts.expiry_s, facts.seen_s
            )
            yield Piece(1, 0, partial(_put_record, owner=cursor.owner, value=value))


def _put_record(txn: Any, *, owner: int, value: bytes) -> None:
    txn.put(queue_key(owner), value)


def _settings_of(record: QueueRecord) -> StreamSettings:
    """Return a stream's settings, which may be those of a later version.

    Raises:
        InvalidArgument: they are, and this one cannot serve them.
    """
    settings = StreamSettings.from_dict(record.settings)
    for topic_filter in settings.topics:
        check_filter(topic_filter)
    return settings


def _cursor_value(
    stream: Stream, title: str, topic_filter: str, group: bool, expiry_s: float | None, seen_s: float
) -> bytes:
    facts = {"stream": stream.owner, "filter": topic_filter, "group": group, "expiry_s": expiry_s, "seen_s": seen_s}
    return recovery.queue_value(title, 0, facts, kind=CURSOR)
