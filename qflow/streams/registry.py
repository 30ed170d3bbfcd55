"""All streams of a broker: declared, recovered, maintained, deleted; their subscriptions are in `sessions`.

In the log a stream has a record and rows as a queue has, under a number of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from qflow.config import APART_IN_STREAMS, StreamSettings, check_name
from qflow.errors import (
    CorruptionError,
    ForkedProcess,
    InvalidArgument,
    NotFound,
    StreamDeleted,
)
from qflow.identity import new_number, of_another_broker
from qflow.memory.waiting import sheltered
from qflow.names import choices
from qflow.storage.log import recovery
from qflow.storage.log.ending import Piece
from qflow.storage.log.records import NewRecord, Records
from qflow.storage.log.recovery import STREAM, QueueRecord
from qflow.storage.log.rows import Row, new_row
from qflow.storage.log.table import Forgotten
from qflow.storage.log.transaction_log import Lane
from qflow.storage.streams import producers as table
from qflow.streams.producers import Producers
from qflow.streams.sessions import Sessions
from qflow.streams.shared import Shared
from qflow.streams.stream import Stream
from qflow.streams.topic_filter import FilterTrie, check_filter

if TYPE_CHECKING:
    from qflow.streams.stream_log import StreamLog
    from qflow.streams.subscription import Subscription
    from qflow.streams.terms import Terms

FORGET_S = 3600.0
"""Seconds between two searches for producers to forget."""

Attempt = Callable[[str, Callable[[], bool]], bool]
"""Runs a named job; returns whether there is more to do at once."""


def at_once(_what: str, job: Callable[[], bool]) -> bool:
    """Run a job; its errors are raised."""
    return job()


def _make_ready() -> None:
    """Import what a stream and its subscriptions are made of: most spools have none. Called without a lock."""
    from qflow.streams import stream_log, subscription  # noqa: F401 - they import the rest


class Streams:
    """See the module. Methods that declare, alter or delete are called by one thread at a time."""

    def __init__(
        self, shared: Shared, records: Records, *, new_owner: Callable[[], int], reroute: Callable[[], None]
    ) -> None:
        self.room = shared.room
        self.routes: FilterTrie[StreamLog] = FilterTrie(apart=APART_IN_STREAMS)
        """Streams by the filters of their topics."""
        self.deleted: list[int] = []
        """Numbers of deleted streams and cursors, whose rows the broker still has to remove."""
        self._shared = shared
        self._log = shared.log
        self._clock = shared.clock
        self._monotonic = shared.monotonic
        self._records = records
        self._new_owner = new_owner
        self._reroute = reroute
        self.producers = Producers(self._log.read, self._clock)
        self._forgotten_to = b""
        self._forget_at = 0.0
        self._noted_s = shared.monotonic()
        self._streams: dict[str, StreamLog] = {}
        self._broken: dict[str, QueueRecord] = {}
        self._sessions = Sessions(shared, records, new_owner, self.deleted)

    # Found again -----------------------------------------------------------------------------------------------------

    def recover(
        self, streams: list[QueueRecord], cursors: list[QueueRecord], unread: AbstractSet[int], *, clean: bool
    ) -> list[str]:
        """Take over what the log holds; return one text for each record that cannot be served, and stays in the log.

        Args:
            unread: numbers of records that cannot be read. Cursors of such a stream stay, too.
        """
        if streams:
            _make_ready()
        problems: list[str] = []
        by_owner: dict[int, StreamLog] = {}
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
                    settings = _checked(StreamSettings.from_dict(record.settings))
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
                problem = self._sessions.recover(by_owner[owner], record, clean=clean)
                if problem is not None:
                    problems.append(f"subscription {record.name!r} of stream {by_owner[owner].name!r} {problem}")
        return problems

    # Streams ---------------------------------------------------------------------------------------------------------

    @staticmethod
    def wanted(given: Mapping[str, object]) -> StreamSettings:
        """Return what `declare` takes, of the arguments of a call. Called without a lock: it may import."""
        _make_ready()
        return StreamSettings.from_call(given, "stream")

    @sheltered
    def declare(self, name: str, settings: StreamSettings) -> StreamLog:
        """Return the stream of this name, making it if there is none."""
        check_name(name, "stream")
        _checked(settings)
        self._records.make_sure()
        known = self._streams.get(name)
        if known is not None and known.ended is StreamDeleted:
            self.delete(name)  # an earlier delete failed half-way
            known = None
        if known is not None:
            known.settings.check_same(settings, "stream", name)
            return known
        if name in self._broken:
            raise self._broken_error(name)
        owner = self._new_owner()
        rows = {number: new_row(number) for number in range(settings.partitions)}
        value = recovery.queue_value(name, new_number(), settings.to_dict(), kind=STREAM)
        stream = self._build(name, settings, owner, rows)
        self._records.add([NewRecord(owner, value, rows)], partial(self._register, stream))
        return stream

    def _build(self, name: str, settings: StreamSettings, owner: int, rows: dict[int, Row]) -> StreamLog:
        from qflow.streams.stream_log import StreamLog

        rows = {number: rows.get(number) or new_row(number) for number in range(settings.partitions)}
        return StreamLog(name, settings, owner, rows, self._shared)

    def _register(self, stream: StreamLog) -> None:
        """Add a stream; twice is fine."""
        self._streams[stream.name] = stream
        for topic_filter in stream.settings.topics:
            self.routes.add(topic_filter, stream)

    @sheltered
    def alter(self, of: Stream | str, changes: dict[str, Any]) -> StreamLog:
        """Change the settings of a stream; see `Broker.alter_stream`."""
        stream = self.own(of)
        name = stream.name
        settings = altered(stream.settings, changes)
        if not set(stream.settings.topics) <= set(settings.topics):
            self._shared.used.check("stream", name)
        value = recovery.queue_value(name, 0, settings.to_dict(), kind=STREAM)
        self._records.replace(stream.owner, value, partial(self._apply, stream, settings))
        return stream

    def _apply(self, stream: StreamLog, settings: StreamSettings) -> None:
        """Apply settings to a stream; twice is fine."""
        gone = set(stream.settings.topics) - set(settings.topics)
        for topic_filter in settings.topics:  # before others are removed, so that a publish meanwhile finds the stream
            self.routes.add(topic_filter, stream)
        for topic_filter in gone:
            self.routes.remove(topic_filter, stream)
        stream.settings = settings

    def get(self, name: str) -> StreamLog:
        """Return a stream. Raises NotFound: there is none of this name. CorruptionError: its record is damaged."""
        stream = self._streams.get(check_name(name, "stream"))
        if stream is None and name in self._broken:
            raise self._broken_error(name)
        if stream is None:
            raise NotFound(f"there is no stream {name!r}: declare it first; {choices(name, self._streams)}")
        return stream

    def _broken_error(self, name: str) -> CorruptionError:
        return CorruptionError(
            f"stream {name!r} is in the log, but its record is damaged, or of a later version: see `qflow check`; "
            "delete_stream removes it with its messages"
        )

    def names(self) -> list[str]:
        """Return the names of all streams, sorted."""
        return sorted(self._streams)

    def all(self) -> list[StreamLog]:
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
            self._records.delete([broken.owner])
            del self._broken[name]
            self.deleted.append(broken.owner)
            return
        stream = self.get(name)
        self._shared.used.check("stream", name)
        for topic_filter in stream.settings.topics:
            self.routes.remove(topic_filter, stream)
        self._reroute()
        self._sessions.end([stream], StreamDeleted)  # first, so that a publish from now on is refused
        stream.settle_down()
        owners = self._sessions.delete_with(stream)
        self._streams.pop(name, None)
        self._log.forget(stream.lanes)
        self.deleted += owners

    # Subscriptions ---------------------------------------------------------------------------------------------------

    @staticmethod
    def terms(topic_filter: str, given: Mapping[str, object]) -> Terms:
        """Return what `subscribe` takes, of the arguments of a call. Called without a lock: it may import."""
        from qflow.streams.terms import Terms

        return Terms.from_call({"filter": topic_filter, **given}, "subscription")

    @sheltered
    def subscribe(self, name_of_stream: Stream | str, terms: Terms) -> Subscription:
        """Return a subscription; see `Broker.subscribe`."""
        stream = self.own(name_of_stream)
        return self._sessions.open(stream, terms.checked())

    @sheltered
    def delete_subscription(self, stream: Stream | str, name: str) -> None:
        """Delete a durable subscription, or a group, with its position; its gets raise `StreamDeleted`."""
        own = self.own(stream)
        self._shared.used.check("subscription", own.name, check_name(name, "subscription"))
        self._sessions.delete(own, name)

    def own(self, stream: Stream | str) -> StreamLog:
        """Return a stream of this broker, by name or as it is.

        Raises:
            NotFound, CorruptionError: as `get`. StreamDeleted: it was deleted.
            InvalidArgument: it belongs to another broker.
        """
        if not isinstance(stream, Stream):
            return self.get(stream)
        known = cast("StreamLog", stream)
        known.check_open()
        if self._streams.get(known.name) is not known:
            raise of_another_broker("stream", known)
        return known

    # Upkeep ----------------------------------------------------------------------------------------------------------

    @sheltered
    def tick(self, attempt: Attempt = at_once) -> bool:
        """Apply retention, end leases, expire sessions; return whether there is more to do at once.

        Args:
            attempt: runs each job; one that handles errors lets the other jobs run.
        """
        more = [attempt("leases", self._take_back), attempt("sessions", self._sessions.expire)]
        more.append(attempt("producers", self._forget_producers))
        now_s, before_s = self._monotonic(), self._noted_s
        self._noted_s = now_s
        for stream in self.all():
            stream.note_published(now_s, before_s)
            more.append(attempt(f"retention of stream {stream.name!r}", stream.retain))
            more.append(attempt(f"the index of stream {stream.name!r}", stream.index))
        return any(more)

    def _take_back(self) -> bool:
        for stream in self.all():
            for cursor in stream.open_cursors():
                cursor.tick()
        return False

    def _forget_producers(self) -> bool:
        """Forget producers that have not published for long, some in each call."""
        now = self._monotonic()
        if now < self._forget_at or self._log.failed:
            return False
        with self._log.read() as txn:
            if not table.any_stored(txn):
                self._forget_at = now + FORGET_S
                return False
        found: list[Forgotten] = []
        now_ms, start, moment = int(self._clock() * 1000), self._forgotten_to, self._sessions.moment_ms
        self._log.commit(self._log.write(lambda txn: found.append(table.forget(txn, now_ms, start, moment=moment))))
        self._forgotten_to = found[-1].position
        if not self._forgotten_to:
            self._forget_at = now + FORGET_S
        return False

    @property
    def lanes(self) -> list[Lane]:
        """All lanes of streams and of durable cursors."""
        return [lane for stream in self.all() for lane in stream.lanes] + self._sessions.lanes

    @sheltered
    def problems(self) -> list[str]:
        """Return one text for each disagreement."""
        found = [f"stream {name!r} has a damaged record and is not served" for name in sorted(self._broken)]
        for stream in self.all():
            found += [
                f"subscription {title!r} of stream {stream.name!r} is damaged and is not served"
                for title in sorted(stream.pinned)
            ]
        found += self.room.problems() + self._tails_left()
        with self._log.read() as txn:
            found += table.problems(txn)
        for stream in self.all():
            found += stream.history.problems()
        return found

    def _tails_left(self) -> list[str]:
        """Return a text where something is kept that belongs to no stream any more."""
        tails = self.room.tails  # before the streams: one that ends from now on has dropped its own
        known = {partition.tail for stream in self.all() for partition in stream.partitions}
        left = sum(tail.charged for tail in tails if tail not in known)
        return [f"live tails of streams that are gone hold {left} bytes"] if left else []

    @sheltered
    def end(self, error: Any) -> None:
        """End all streams; waiting calls raise the error."""
        self.room.close()
        self._sessions.end(self.all(), error)

    def die(self, lock: Any) -> None:
        """In a forked child: refuse everything."""
        self._sessions.die(lock)
        self.room.die(lock)
        self.producers.die(lock)
        for stream in self.all():
            stream.ended = ForkedProcess
            for cursor in {*stream.cursors.values(), *stream.open_cursors()}:
                cursor.die(lock)

    def endings(self) -> Iterator[Piece]:
        """Yield what a clean close writes; see `Sessions.endings`."""
        return self._sessions.endings()


def altered(settings: StreamSettings, changes: dict[str, Any]) -> StreamSettings:
    """Return changed settings of a stream. Raises InvalidArgument: they cannot be changed so."""
    StreamSettings.check_names(changes, "stream")
    if "partitions" in changes:
        raise InvalidArgument("partitions of a stream cannot be changed: its keys would lose their order")
    return _checked(settings.changed(**changes))


def _checked(settings: StreamSettings) -> StreamSettings:
    """Return settings whose topics are filters. Raises InvalidArgument."""
    for topic_filter in settings.topics:
        check_filter(topic_filter)
    return settings
