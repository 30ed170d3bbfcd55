"""All streams of a broker and their subscriptions: made, found again, kept in order, deleted.

In the log each stream, and each durable cursor, has a record and rows as a queue has, under a number of its own.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any
from uuid import uuid4

import attrs

from qflow.config import StreamSettings, check_name, parse_span
from qflow.errors import CorruptionError, ForkedProcess, InvalidArgument, NotFound, SettingsConflict, StreamDeleted
from qflow.storage import block_log, recovery
from qflow.storage import producers as table
from qflow.storage.block_log import Row
from qflow.storage.blocks import NO_PREVIOUS
from qflow.storage.recovery import CURSOR, STREAM, QueueRecord
from qflow.storage.transaction_log import Lane, TransactionLog
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

    def recover(self, streams: list[QueueRecord], cursors: list[QueueRecord], *, clean: bool) -> None:
        """Take over what the log holds."""
        by_owner: dict[int, Stream] = {}
        for record in streams:
            if record.deleted:
                self.deleted.append(record.owner)
            elif record.rows is None:
                self._broken[record.name] = record
            else:
                settings = StreamSettings.from_dict(record.settings)
                by_owner[record.owner] = self._make(record.name, settings, record.owner, record.rows)
        for record in cursors:
            stream = by_owner.get(record.settings["stream"])
            if record.deleted or (stream is None and record.settings["stream"] not in self._broken_owners()):
                self.deleted.append(record.owner)
            elif stream is not None and record.rows is not None:
                self._recover_cursor(stream, record, record.rows, clean=clean)

    def _broken_owners(self) -> set[int]:
        return {record.owner for record in self._broken.values()}

    def _recover_cursor(self, stream: Stream, record: QueueRecord, rows: dict[int, Row], *, clean: bool) -> None:
        facts = record.settings
        lanes = [self._lane(record.owner, number, rows.get(number)) for number in range(len(stream.partitions))]
        cursor = self._make_cursor(stream, record.name, facts["filter"], lanes, record.owner, group=facts["group"])
        for part, lane in zip(cursor.parts, lanes, strict=True):
            part.doubtful = lane.row.next if clean else part.partition.next
        self._facts[cursor] = _CursorFacts(cursor, facts["expiry_s"], facts["seen_s"])

    def _recall(self, cursor: Cursor) -> None:
        """Have a durable cursor that nobody has open begin where what is settled ends."""
        cursor.stand_still()
        self._log.drain()
        with self._log.read() as txn:
            skips = [
                list(
                    block_log.settled_ranges(txn, cursor.owner, part.partition.number, part.lane.row.floor, NO_PREVIOUS)
                )
                for part in cursor.parts
                if part.lane is not None
            ]
        cursor.recall(skips)

    def _lane(self, owner: int, number: int, row: Row | None) -> Lane:
        return Lane(owner, number, block_log.new_row(number) if row is None else row, _NoLane())  # type: ignore[arg-type]

    # Streams ---------------------------------------------------------------------------------------------------------

    def declare(self, name: str, settings: StreamSettings) -> Stream:
        """Return the stream of this name, making it if there is none."""
        check_name(name, "stream")
        for topic_filter in settings.topics:
            check_filter(topic_filter)
        known = self._streams.get(name)
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
        rows = {number: block_log.new_row(number) for number in range(settings.partitions)}
        self._write_new(owner, recovery.queue_value(name, uuid4().int >> 64, settings.to_dict(), kind=STREAM), rows)
        return self._make(name, settings, owner, rows)

    def _write_new(self, owner: int, value: bytes, rows: dict[int, Row]) -> None:
        def write(txn: Any) -> None:
            txn.put(block_log.queue_key(owner), value)
            for number, row in rows.items():
                block_log.write_row(txn, owner, number, row)

        self._log.commit(self._log.write(write))

    def _make(self, name: str, settings: StreamSettings, owner: int, rows: dict[int, Row]) -> Stream:
        stream = Stream(
            name,
            settings,
            owner=owner,
            rows=rows
            | {number: block_log.new_row(number) for number in range(settings.partitions) if number not in rows},
            log=self._log,
            room=self.room,
            max_transaction_bytes=self._max_transaction_bytes,
            report=self._report,
            clock=self._clock,
            held=self._held,
        )
        self._streams[name] = stream
        for topic_filter in settings.topics:
            self.routes.add(topic_filter, stream)
        return stream

    def alter(self, name: str, **changes: Any) -> Stream:
        """Change what a stream takes, or how long it keeps it."""
        stream = self.get(name)
        known = {field.name for field in attrs.fields(StreamSettings)}
        unknown = changes.keys() - known
        if unknown:
            raise InvalidArgument(f"a stream has no setting {min(unknown)!r}; there are {', '.join(sorted(known))}")
        if "partitions" in changes:
            raise InvalidArgument("partitions of a stream cannot be changed: its keys would lose their order")
        settings = attrs.evolve(stream.settings, **changes)
        for topic_filter in settings.topics:
            check_filter(topic_filter)
        self._write_record(stream.owner, recovery.queue_value(name, 0, settings.to_dict(), kind=STREAM))
        gone = set(stream.settings.topics) - set(settings.topics)
        stream.settings = settings
        for topic_filter in settings.topics:  # before others go, so that what is published meanwhile finds its way
            self.routes.add(topic_filter, stream)
        for topic_filter in gone:
            self.routes.remove(topic_filter, stream)
        return stream

    def _write_record(self, owner: int, value: bytes) -> None:
        self._log.commit(self._log.write(lambda txn: txn.put(block_log.queue_key(owner), value)))

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
            f"stream {name!r} is in the log, but its record is damaged: see `qflow check`; delete_stream removes it "
            "with its messages"
        )

    def names(self) -> list[str]:
        """Return the names of all streams, sorted."""
        return sorted(self._streams)

    def all(self) -> list[Stream]:
        """Return all streams."""
        return list(self._streams.values())

    def delete(self, name: str) -> None:
        """Delete a stream with its messages and subscriptions. Cost: one commit."""
        broken = self._broken.pop(check_name(name, "stream"), None)
        if broken is not None:
            self._write_deleted([broken.owner])
            return
        stream = self.get(name)
        for topic_filter in stream.settings.topics:
            self.routes.remove(topic_filter, stream)
        self._reroute()
        stream.end(StreamDeleted)  # before it is gone: what is published from now on finds that
        stream.settle_down()
        cursors = list(stream.cursors.values())
        del self._streams[name]
        self._write_deleted([stream.owner, *(cursor.owner for cursor in cursors)])
        for cursor in cursors:
            self._facts.pop(cursor, None)

    def _write_deleted(self, owners: list[int]) -> None:
        def write(txn: Any) -> None:
            for owner in owners:
                record = json.loads(block_log.unseal(txn.get(block_log.queue_key(owner)), "a record"))
                value = recovery.queue_value(record["name"], 0, record["settings"], deleted=True, kind=record["kind"])
                txn.put(block_log.queue_key(owner), value)

        self._log.commit(self._log.write(write))
        self.deleted += owners

    # Subscriptions ---------------------------------------------------------------------------------------------------

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
        stream = self._own(name_of_stream)
        check_filter(topic_filter)
        if on_gap not in ("raise", "skip"):
            raise InvalidArgument(f'on_gap must be "raise" or "skip", got {on_gap!r}')
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
        with self._lock:
            if title is None:
                cursor = self._ephemeral(stream, topic_filter, start)
            else:
                cursor = self._durable(stream, title, topic_filter, start, expiry_s, group=group is not None)
                if ack_timeout_s is not None or not cursor.members:
                    cursor.ack_timeout_s = ack_timeout_s
                self._facts[cursor].seen_s = self._clock()
            if title is None:
                cursor.ack_timeout_s = ack_timeout_s
            return Subscription(cursor, follow=follow, skip_gaps=on_gap == "skip", ended=self._left)

    def _own(self, stream: Stream | str) -> Stream:
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
        cursor = stream.cursors.get(title)
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
        if facts.expiry_s != expiry_s and not cursor.members:
            facts.expiry_s = expiry_s
            self._write_facts(facts)
        return cursor

    def _new_durable(
        self, stream: Stream, title: str, topic_filter: str, start: Start, expiry_s: float | None, *, group: bool
    ) -> Cursor:
        owner = self._new_owner()
        rows = {number: Row(next=at, floor=at) for number, at in enumerate(self._starts(stream, start))}
        now = self._clock()
        self._write_new(owner, _cursor_value(stream, title, topic_filter, group, expiry_s, now), rows)
        lanes = [self._lane(owner, number, row) for number, row in rows.items()]
        cursor = self._make_cursor(stream, title, topic_filter, lanes, owner, group=group)
        self._facts[cursor] = _CursorFacts(cursor, expiry_s, now)
        return cursor

    def _make_cursor(
        self, stream: Stream, title: str, topic_filter: str, lanes: list[Lane], owner: int, *, group: bool
    ) -> Cursor:
        cursor = Cursor(
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
        stream.cursors[title] = cursor
        return cursor

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

    def _left(self, subscription: Subscription) -> None:
        """Somebody closed a subscription."""
        with self._lock:
            cursor = subscription.cursor
            last = cursor.leave(subscription)
            facts = self._facts.get(cursor)
            if last and facts is not None and cursor.ended is None:
                facts.seen_s = self._clock()
                if facts.expiry_s is not None:
                    self._write_facts(facts)

    def _write_facts(self, facts: _CursorFacts) -> None:
        cursor = facts.cursor
        facts.written_s = facts.seen_s
        value = _cursor_value(
            cursor.stream, cursor.title or "", cursor.interest.filter, cursor.is_group, facts.expiry_s, facts.seen_s
        )
        self._write_record(cursor.owner, value)

    def delete_subscription(self, stream: Stream | str, name: str) -> None:
        """Delete a durable subscription, or a group, with where it was; who has it open gets `StreamDeleted`."""
        owner = self._own(stream)
        with self._lock:
            cursor = owner.cursors.get(name)
            if cursor is None:
                names = ", ".join(map(repr, sorted(owner.cursors))) or "none"
                raise NotFound(f"stream {owner.name!r} has no subscription {name!r}; there are: {names}")
            self._delete_cursor(cursor)

    def _delete_cursor(self, cursor: Cursor) -> None:
        self._write_deleted([cursor.owner])
        del cursor.stream.cursors[cursor.title or ""]
        self._facts.pop(cursor, None)
        cursor.end(StreamDeleted)

    # Upkeep ----------------------------------------------------------------------------------------------------------

    def tick(self) -> bool:
        """Apply retention, take back leases, let sessions expire; return whether there is more to do at once."""
        for stream in self.all():
            for _, cursor in list(stream.readers):
                cursor.tick()
        self._expire_sessions()
        self._forget_producers()
        more = [stream.retain() | stream.index() for stream in self.all()]
        return any(more)

    def _forget_producers(self) -> None:
        """Forget producers that were not seen for long, some of them each time; all once in a while."""
        now = self._monotonic()
        if now < self._forget_at or self._log.failed:
            return
        with self._log.read() as txn:
            if not table.any_stored(txn):
                self._forget_at = now + FORGET_S
                return
        found: list[table.Forgotten] = []
        now_ms, start = int(self._clock() * 1000), self._forgotten_to
        self._log.commit(self._log.write(lambda txn: found.append(table.forget(txn, now_ms, start))))
        self._forgotten_to = found[-1].position
        if not self._forgotten_to:
            self._forget_at = now + FORGET_S

    def _expire_sessions(self) -> None:
        now = self._clock()
        with self._lock:
            for facts in list(self._facts.values()):
                if facts.expiry_s is None:
                    continue
                if facts.cursor.members:
                    facts.seen_s = now
                    if now - facts.written_s > max(1.0, facts.expiry_s / 4):
                        self._write_facts(facts)
                elif now - facts.seen_s > facts.expiry_s:
                    _logger.info("subscription %r of stream %r expired", facts.cursor.title, facts.cursor.stream.name)
                    self._delete_cursor(facts.cursor)

    @property
    def lanes(self) -> list[Lane]:
        """All lanes of streams and of durable cursors."""
        found = [lane for stream in self.all() for lane in stream.lanes]
        return found + [part.lane for cursor in list(self._facts) for part in cursor.parts if part.lane is not None]

    def problems(self) -> list[str]:
        """Return what does not agree, in words."""
        found = [f"stream {name!r} has a damaged record and is not served" for name in sorted(self._broken)]
        found += self.room.problems()
        with self._log.read() as txn:
            found += table.problems(txn)
        for stream in self.all():
            found += stream.problems()
        return found

    def end(self, error: Any) -> None:
        """Serve nobody any more; wake who waits."""
        self.room.close()
        for stream in self.all():
            stream.end(error)

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

    def write_ending(self, txn: Any) -> None:
        """Write what a clean end leaves: when subscriptions were last open, and how far they were delivered."""
        for facts in self._facts.values():
            cursor = facts.cursor
            for part in cursor.parts:
                lane = part.lane
                if lane is not None:
                    shown = max(lane.row.next, part.seen, part.doubtful)
                    block_log.write_row(txn, lane.owner, lane.lane, lane.row._replace(next=shown))
            value = _cursor_value(
                cursor.stream, cursor.title or "", cursor.interest.filter, cursor.is_group, facts.expiry_s, facts.seen_s
            )
            txn.put(block_log.queue_key(cursor.owner), value)


def _cursor_value(
    stream: Stream, title: str, topic_filter: str, group: bool, expiry_s: float | None, seen_s: float
) -> bytes:
    facts = {"stream": stream.owner, "filter": topic_filter, "group": group, "expiry_s": expiry_s, "seen_s": seen_s}
    return recovery.queue_value(title, 0, facts, kind=CURSOR)
