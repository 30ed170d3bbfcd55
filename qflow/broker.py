"""The broker: what users call. It holds the parts of an engine, and leaves the work to them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Unpack, overload

from qflow.collector import without_collections
from qflow.config import BrokerSettings, QueueSettings, check_name, check_names, parse_timeout
from qflow.durations import Duration
from qflow.engine import Engine
from qflow.events import Event
from qflow.importing import imported
from qflow.inherited import called_after
from qflow.memory.waiting import shelter, shelter_made, sheltered
from qflow.message import Headers
from qflow.periodic import Scheduling
from qflow.pickling import Made
from qflow.queues.making import has_parts
from qflow.queues.queue import Queue, parts_of
from qflow.queues.redrive import redrive
from qflow.queues.transaction import Transaction
from qflow.routing.results import PublishResult
from qflow.spool import Spool
from qflow.streams.stream import Stream

if TYPE_CHECKING:
    from uuid import UUID

    from qflow.options import (
        Admits,
        Body,
        Key,
        Publication,
        QueueChanges,
        QueueOptions,
        StreamChanges,
        StreamOptions,
        SubscriptionOptions,
    )
    from qflow.stats import BrokerStats, CompactionReport, RecoveryReport, RedriveReport, SnapshotReport
    from qflow.streams.subscription import Subscription


@called_after
class Broker(Made, Scheduling, by="qflow.open"):
    """A spool and its queues. Made by `qflow.open`; a context manager; every method is thread-safe."""

    engine: Engine
    """Its parts, for other rooms and for tests: they change from one version to the next."""

    @property
    def path(self) -> str:
        """The directory of the spool."""
        return self.engine.spool.path

    @property
    def uuid(self) -> UUID:
        """The uuid of the spool, which it keeps as long as it exists; a snapshot has one of its own."""
        uuid: UUID = imported("uuid").UUID(self.engine.spool.uuid)
        return uuid

    @property
    def settings(self) -> BrokerSettings:
        """How it was opened."""
        return self.engine.spool.settings

    @property
    def closed(self) -> bool:
        """Whether it was closed, by any thread."""
        return self.engine.spool.closed

    @property
    def recovery(self) -> RecoveryReport:
        """What was found when the spool was opened, and what was found damaged since; a plain value, as of now."""
        return self.engine.spool.recovery

    # Queues -------------------------------------------------------------------------------------------------------

    @overload
    def declare_queue(self, name: str, **settings: Unpack[QueueOptions[Admits]]) -> Queue[int]: ...
    @overload
    def declare_queue(self, name: str, **settings: Unpack[QueueOptions]) -> Queue: ...
    def declare_queue(self, name: str, **settings: Unpack[QueueOptions]) -> Queue:
        """Return the queue of this name, making it if there is none.

        Args:
            name: any text of 1 to 1,024 bytes in UTF-8.
            settings: how it behaves and performs, such as `durable=True`: see `qflow.QueueOptions`.

        Raises:
            InvalidArgument: a setting is unknown or makes no sense, or dead letters would go round in a cycle.
            SettingsConflict: the queue exists and behaves differently. Other performance settings are applied silently.
            CorruptionError: its record in the log is damaged.
        Cost: one commit for a new durable queue; 20 µs for another one, whose first use takes 0.1 ms more.
        """
        queues, given = self.engine.queues, QueueSettings.from_call(settings, "queue")
        queue = queues.declare_at_once(check_name(name), given)
        return self._declare([name], given)[0] if queue is None else queue

    @overload
    def declare_queues(self, names: Iterable[str], **settings: Unpack[QueueOptions[Admits]]) -> list[Queue[int]]: ...
    @overload
    def declare_queues(self, names: Iterable[str], **settings: Unpack[QueueOptions]) -> list[Queue]: ...
    def declare_queues(self, names: Iterable[str], **settings: Unpack[QueueOptions]) -> list[Queue[Any]]:
        """Return the queues of these names, made where there are none, all with the settings of `declare_queue`.

        Raises: as `declare_queue`, before any is made. Cost: one commit for all new durable ones, 0.2 ms a queue.
        """
        wanted, given = check_names(names), QueueSettings.from_call(settings, "queue")
        return self._declare(wanted, given)

    def _declare(self, names: list[str], settings: QueueSettings) -> list[Queue]:
        declared = shelter(lambda: self.engine.queues.declare(names, settings))
        for queue in declared:
            if has_parts(queue):  # of the others nothing is in memory
                parts_of(queue).spiller.keep_within_capacity()
        return declared

    def alter_queue(self, name: Queue | str, **changes: Unpack[QueueChanges]) -> Queue:
        """Change settings of a queue that exists, behaviour and performance alike, while it is used.

        A lower capacity spills from the tail, a higher one lets the head come back as it is read. A lower limit holds
        puts back until the depth is below it, and refuses those that could never fit any more; a queue with DROP_OLDEST
        drops down to it at once. A new `ttl_s` holds for messages put from now on.

        Args:
            changes: settings of `declare_queue` but `durable` and `priorities`, which stay: see `qflow.QueueChanges`.

        Raises:
            NotFound: there is no such queue.
            InvalidArgument: a setting is unknown, cannot be changed, or makes no sense; nothing was changed.
        Cost: one commit for a durable queue.
        """
        queue = shelter(lambda: self.engine.queues.alter(name, dict(changes)))
        parts_of(queue).spiller.keep_within_capacity()
        return queue

    def queue(self, name: str) -> Queue:
        """Return a queue that exists.

        Raises: NotFound: none of this name does. CorruptionError: its record in the log is damaged.
        """
        return self.engine.queues.get(name)

    @sheltered
    def queues(self) -> list[str]:
        """Return the names of all queues, sorted."""
        return self.engine.queues.names()

    @sheltered
    def delete_queue(self, name: Queue | str) -> None:
        """Delete a queue, damaged or not, with all its messages. Raises: NotFound: there is none. Cost: one commit.

        Waiters get `QueueDeleted`, late acks do nothing.
        """
        self.engine.queues.delete(name)

    def redrive(
        self, name: str, *, to: str | None = None, limit: int | None = None, sequences: Iterable[int] | None = None
    ) -> RedriveReport:
        """Move dead letters, all or those of `sequences`, back to where they came from, or `to` one queue.

        Raises: NotFound: a queue is not there. InvalidArgument: it is the same. Cost: a commit per hundred.
        """
        return redrive(self, name, to, limit, sequences)

    # Topics -------------------------------------------------------------------------------------------------------

    @sheltered
    def bind(self, queue: Queue | str, topic_filter: str) -> None:
        """Send what is published to matching topics to a queue, too; a durable queue's bindings survive.

        Args:
            topic_filter: as in MQTT: levels between `/`, `+` for any one of them, `#` at the end for all that follow.

        Raises:
            NotFound: there is no such queue. InvalidArgument: the filter is not valid.
        Cost: one commit for a durable queue.
        """
        self.engine.queues.bind(queue, topic_filter)

    @sheltered
    def unbind(self, queue: Queue | str, topic_filter: str) -> None:
        """Undo `bind`. Raises `NotFound` if there is no such queue, or it is not bound with that filter."""
        self.engine.queues.unbind(queue, topic_filter)

    def publish(
        self, topic: str, body: Body, *, key: Key | None = None, headers: Headers | None = None,
        producer: str | None = None, number: int | None = None, timeout_s: Duration | None = None,
    ) -> PublishResult:  # fmt: skip
        """Put a message into every stream that takes its topic and every queue bound to it, in one commit.

        Returns once it is synced. Each queue's own settings hold: one that drops at its limit does so, one that blocks
        holds all of it back, one that refuses refuses all of it. A body of 4 KiB or more is logged once.

        Args:
            key: messages of one key are in one partition of a stream, in order; without one, those of a topic are.
            producer, number: the name of the publisher, and its number for this call: what it published before under
                that number is not stored again. Both or neither; see `docs/howto/streams.md`.
            timeout_s: seconds to wait for room in queues, and for another call with the same number; None = no end.
                A dead letter waits two seconds at most for memory: `QueueFull` then, or `DiskFull` if the disk is why.

        Returns:
            The offset in each stream, and the sequence in each queue, None where its policy dropped the message. Both
            are empty where no stream and no queue takes the topic, which `stats().unrouted_total` counts.

        Raises:
            InvalidArgument: the topic is not valid, or has wildcards. All that `Queue.put` raises.
            ProducerBusy: another call was publishing the same number, and its outcome was not known in time.
        Cost: transient 0.3 µs for each queue; durable a share of one commit, and 6 µs for each queue.
        """
        timeout_s = None if timeout_s is None else parse_timeout(timeout_s)  # refused also where nothing is waited for
        if headers is None and key is None and producer is None:
            quick = self.engine.routing.publish_quickly(topic, body)
            if quick is not None:
                return quick
        return self.engine.publisher.publish([(topic, body, key)], headers, producer, number, timeout_s)[0]

    def publish_many(
        self, messages: Iterable[Publication], *, headers: Headers | None = None, producer: str | None = None,
        number: int | None = None, timeout_s: Duration | None = None,
    ) -> Sequence[PublishResult]:  # fmt: skip
        """Publish (topic, body) pairs, or (topic, body, key), in one commit: all of them or none; see `publish`.

        Cost: a commit, and 0.4 µs a message that goes to one stream; 2 µs where there are partitions or queues.
        """
        return self.engine.publisher.publish(messages, headers, producer, number, timeout_s)

    def submit_publish(
        self, topic: str, body: Body, *, key: Key | None = None, headers: Headers | None = None,
        producer: str | None = None, number: int | None = None, timeout_s: Duration | None = None,
    ) -> Future[PublishResult]:  # fmt: skip
        """`publish` that waits for room but not for the sync: the future has the result once it is confirmed."""
        return self.engine.publisher.submit((topic, body, key), headers, producer, number, timeout_s)

    # Streams ------------------------------------------------------------------------------------------------------

    @sheltered
    def declare_stream(self, name: str, **settings: Unpack[StreamOptions]) -> Stream:
        """Return the stream of this name, making it if there is none: a log of all that is published to some topics.

        Args:
            name: any text of 1 to 1,024 bytes in UTF-8.
            settings: `topics`, which must be given, `partitions=1`, and `retention_s`, `retention_bytes`,
                `retention_messages`, `retain_until_consumed`, `max_message_bytes`: see `qflow.StreamOptions`.

        Raises:
            InvalidArgument: a setting is unknown, or it or a filter makes no sense.
            SettingsConflict: the stream exists with other settings.
            CorruptionError: its record is damaged.
        Cost: one commit for a new stream. Retention is applied once a second.
        """
        wanted = self.engine.streams.wanted(settings)
        with self.engine.spool.changing:
            self.engine.spool.check_open()
            stream = self.engine.streams.declare(name, wanted)
            self.engine.routing.forget()
            return stream

    @sheltered
    def alter_stream(self, stream: Stream | str, /, **changes: Unpack[StreamChanges]) -> Stream:
        """Change settings of a stream that exists, while it is used. Cost: one commit.

        Args:
            changes: settings of `declare_stream` but `partitions`; see `qflow.StreamChanges`.

        Raises:
            NotFound: there is no such stream.
            InvalidArgument: a setting is unknown, cannot be changed, or makes no sense; nothing was changed.
        """
        with self.engine.spool.changing:
            self.engine.spool.check_open()
            altered = self.engine.streams.alter(stream, dict(changes))
            self.engine.routing.forget()
            self.engine.upkeep.hurry()
            return altered

    def stream(self, name: Stream | str) -> Stream:
        """Return a stream that exists, by name; one of this broker is returned as it is.

        Raises: NotFound: none of this name does. CorruptionError: its record in the log is damaged.
        """
        self.engine.spool.check_open()
        return self.engine.streams.own(name)

    @sheltered
    def streams(self) -> list[str]:
        """Return the names of all streams, sorted."""
        self.engine.spool.check_open()
        return self.engine.streams.names()

    @sheltered
    def delete_stream(self, name: Stream | str) -> None:
        """Delete a stream with its messages and subscriptions; gets that wait raise `StreamDeleted`.

        If this fails, repeat it: until then the stream takes no more messages, and is still in the log.

        Raises:
            NotFound: there is none of this name.
        Cost: one commit; disk is given back in the background.
        """
        with self.engine.spool.changing:
            self.engine.spool.check_open()
            self.engine.streams.delete(name)
            self.engine.routing.forget()

    def subscribe(
        self, stream: Stream | str, filter: str = "#", **options: Unpack[SubscriptionOptions]
    ) -> Subscription:
        """Return messages of a stream that a filter matches, each once and in order: replayed, then as they come.

        With a name it is *durable*: its position, and what it has settled, is in the log, and it goes on there when it
        is opened again, whatever `start` says. Without a name there is nothing to ack: the next get of a thread acks
        what its previous one returned. Members of a *group* share one position: each message goes to one of them.

        Args:
            filter: as in MQTT: `flights/+/UA`, `plant/#`; `#` is all but topics that begin with `$`.
            options: `start="latest"`, `follow=True`, `on_gap="raise"`, and `name`, `group`, `session_expiry_s`,
                `ack_timeout_s`: see `qflow.SubscriptionOptions`.

        Raises:
            NotFound: there is no such stream, or no such subscription where `start="committed"`.
            InvalidArgument: an option is unknown, the filter is not valid, an offset is past the end, or arguments do
                not go together.
            SettingsConflict: the name is open already, or has another filter.
            CorruptionError: its position is damaged: `delete_subscription` removes it.
            DiskFull: it is a new durable one.
        Cost: a new durable one, one commit.
        """
        terms = self.engine.streams.terms(filter, options)

        def subscribe() -> Subscription:
            with self.engine.spool.changing:
                self.engine.spool.check_open()
                return self.engine.streams.subscribe(stream, terms)

        return shelter_made(subscribe)

    @sheltered
    def delete_subscription(self, stream: Stream | str, name: str) -> None:
        """Delete a durable subscription, or a group, with its position; its gets raise `StreamDeleted` from then on.

        Raises: NotFound: there is none of this name. Cost: one commit.
        """
        with self.engine.spool.changing:
            self.engine.spool.check_open()
            self.engine.streams.delete_subscription(stream, name)

    # Transactions and events --------------------------------------------------------------------------------------

    def transaction(self, timeout_s: Duration | None = None) -> Transaction:
        """Return a transaction over any queues; its commit waits `timeout_s` for room at limits, None = without end."""
        return self.engine.transaction(timeout_s)

    def on_event(self, callback: Callable[[Event], object]) -> None:
        """Have `callback(event)` called for each event from now on, one after the other, by the maintenance thread.

        It may use the broker; no event and no maintenance comes meanwhile. Logger `qflow` has what it raises.
        Raises: InvalidArgument: it is not callable. BrokerClosed.
        """
        self.engine.spool.check_open()
        self.engine.listeners.add(callback)

    # Looking, and copies ------------------------------------------------------------------------------------------

    @sheltered
    def stats(self) -> BrokerStats:
        """Return a snapshot of the broker and each queue. Cost: see `Queue.stats`."""
        self.engine.spool.check_open()
        return self.engine.figures.stats()

    @sheltered
    def check(self) -> list[str]:
        """Compare ledger, runs, files, rows and blocks with each other; return one text for each disagreement.

        Puts, gets and acks go on meanwhile: it looks in steps, and looks again at what may only have been on its way.
        Cost: O(resident messages + spilled files + blocks). Meant for tests and trouble.
        """
        return self.engine.upkeep.check()

    @sheltered
    def snapshot(self, path: str | os.PathLike[str]) -> SnapshotReport:
        """Copy the log to a new spool, as of one moment, while puts, gets and acks go on.

        Everything that was confirmed before the call is in it: messages, acks, queues, streams, settings, bindings, and
        the positions of durable subscriptions. What is not logged is not: transient queues and messages, and which
        consumer holds what. The copy has a uuid of its own and opens as this spool would after a crash: messages of
        queues are `redelivered`.

        Args:
            path: a directory that does not exist, or is empty; outside of the spool.

        Raises:
            InvalidArgument: it is no path, inside the spool, or not empty.
            DiskFull, StorageError: it could not be written; the part that was written is removed.
            SpoolInUse: another snapshot is being made there.
        Cost: reads and writes as many bytes as the log holds. Only other snapshots, `compact` and `close` wait for it.
            Pages that were in use when it began are not used again before it ends, so the log may grow by what is
            written meanwhile.
        """
        return self.engine.spool.snapshot(path)

    @sheltered
    def compact(self) -> CompactionReport:
        """Shrink the log: replace it by a copy without free pages; and unlink spill files of an earlier owner.

        Without it the file keeps its largest size, and its free pages are used again: it pays after a backlog that will
        not come again. If the call is interrupted, it is completed in the background, or nothing is changed.

        Raises:
            DiskFull, StorageError: the copy could not be written beside the log; nothing has changed.
            InDoubt: the directory could not be synced; nothing is lost, but the spool must be opened again.
        Cost: reads and writes as many bytes as the log holds, 10 µs a spill file; commits wait for that, gets do not.
        """
        self.engine.upkeep.finish_wiping()  # first: what it frees may be the room for the copy
        self.engine.upkeep.finish_removing()
        return self.engine.spool.compact()

    # Closing ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the spool: commit what was handed over, put unacked messages back, mark it clean. Twice is fine.

        Raises:
            StorageError: the log failed; the spool is released all the same, and is recovered at the next open.
            Reentered: a finalizer calls this in the middle of a call of the broker.
        Cost: one commit. An interrupt is raised when the spool is closed, not before.
        """
        self.engine.close()
        self.engine.listeners.tell_all()

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: object) -> None:
        None if self.engine.disowned else self.close()

    def __repr__(self) -> str:
        return f"<Broker {self.path!r}{', closed' if self.closed else ''}>"


def make_broker(path: str | os.PathLike[str], settings: BrokerSettings, **others: Any) -> Broker:
    """Open a spool as `qflow.open` does; in tests with `others` of what `Spool` has by default, such as clocks."""
    broker = object.__new__(Broker)
    with without_collections():
        broker.engine = Engine(Spool(path, settings, **others))
    return broker
