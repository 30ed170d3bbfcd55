"""One partition of a stream: a lane of the log with dense offsets, and who waits for what comes.

For the log it is a publisher, for `Together` a place to put messages, as a queue is. Publishing notes
where to look for each filter that matches, and wakes the cursors that wait with one of those: see `feeds`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from qflow.config import StreamSettings
from qflow.errors import MessageTooLarge, QflowError, TransactionTooLarge
from qflow.memory.line import Wake
from qflow.message import OFFSET_MASK, OVERHEAD_BYTES, Message, Record, text_bytes
from qflow.storage.log.bodies import SHARED_BYTES
from qflow.storage.log.rows import Row
from qflow.storage.log.transaction_log import Lane, Put
from qflow.streams.room import SLAB_BYTES, Asking, Slab, Tail, charge_for
from qflow.streams.shared import Shared


class Home(Protocol):
    """The stream that a partition is of."""

    name: str
    settings: StreamSettings
    ended: type[QflowError] | None
    partitions: list[Partition]
    readers: Any
    """`Feeds` of the cursors that somebody has open."""

    def check_open(self) -> None: ...


class Partition:
    """See the module. What `Together` calls is named as in `Puts`."""

    reserves_together = True
    """All partitions of all streams take their room of one place, at once: see `prepare_together`."""
    exceeds = False
    """It never takes more memory than it has reserved."""

    def __init__(self, stream: Home, number: int, owner: int, row: Row, shared: Shared) -> None:
        self.stream = stream
        self.number = number
        self.owner = owner
        self.lane = Lane(owner, number, row, self)
        self.lock = threading.Lock()
        self.tail = Tail()
        self.next = row.next
        """The sequence behind the last one that subscribers may see."""
        self.room = shared.room
        """Of all streams of the broker."""
        self.joining: set[object] = set()
        """Callers between the question whether it is there still and a batch of the log: who ends it waits for them."""
        self._max_transaction_bytes = shared.max_transaction_bytes
        self.published = 0

    @property
    def name(self) -> str:
        return self.stream.name

    @property
    def floor(self) -> int:
        """The lowest sequence that is retained."""
        return self.lane.row.floor

    # Called by the writer of the log -------------------------------------------------------------------------------

    def publish(self, first: int, records: list[Record], size: int, puts: int) -> None:
        """A stream's messages have topics: see `publish_topics`."""
        raise AssertionError("a message without a topic was put into a stream")

    def publish_transient(self, put: Put) -> None:
        """A stream's messages are logged, all of them."""
        raise AssertionError("a message that is not logged was put into a stream")

    def publish_topics(self, first: int, records: list[Record], topics: Sequence[str], size: int, time_ms: int) -> None:
        """Make confirmed messages visible, and wake cursors that wait for them."""
        charged = charge_for(len(records), size + text_bytes(topics))
        self.room.arrived(charged)
        feeds = self.stream.readers
        found: Iterable[Any] = ()
        if len(feeds):
            self.room.keep(self.tail, Slab(first, records, topics, time_ms, charged + SLAB_BYTES))
        with self.lock:  # who becomes live does so under it, and is among the readers before
            if len(feeds):
                found = feeds.match(dict.fromkeys(topics))
                for feed in found:
                    feed.hints[self.number].add(first)
            self.next = first + len(records)
            self.published += len(records)
        for feed in found:
            for cursor in list(feed.waiting):
                cursor.wake()

    def purged(self, ends: dict[int, int]) -> None:
        """Streams are not purged: retention raises their floor."""

    def refused(self, put: Put) -> None:
        """Give back the room of a put that was not confirmed; see `Room.refused`."""
        self.room.refused(put, put_charge(put))

    # Called by who publishes -----------------------------------------------------------------------------------------

    def prepare_together(self, drafts: list[Put]) -> None:
        """Reserve room for all that one commit puts into partitions, waiting for it; what is interrupted has none.

        At once: who has a part of it, and waits for the rest, could be waited for.
        """
        self.room.reserve(sum(map(put_charge, drafts)))

    def begin_joining(self, caller: object) -> None:
        """Have those wait who end the stream; refuse what comes too late.

        Raises:
            StreamDeleted, BrokerClosed, ForkedProcess: it has ended.
        """
        self.joining.add(caller)  # before the question: who ends it sees the caller, or the caller sees that it ended
        self.check_not_deleted()

    def end_joining(self, caller: object) -> None:
        """After `begin_joining`, whatever that did, also where it was interrupted; twice is fine."""
        self.joining.discard(caller)

    def draft(self, records: list[Record], plain: bool, number: int, *, dead: bool = False) -> Put:
        """Return a put, which has reserved nothing yet, of messages that carry their topic."""
        topics = [record.topic for record in records]  # type: ignore[union-attr]
        return self.put_of(list(map(_without_topic, records)), topics, False)

    def put_of(self, records: list[Record], topics: Sequence[str], plain: bool) -> Put:
        """Return a put, which has reserved nothing yet.

        Raises:
            MessageTooLarge, TransactionTooLarge: it is more than may pass.
        """
        sizes = list(map(len, records))
        size = sum(sizes)
        most = self.stream.settings.max_message_bytes
        if size > most and max(sizes) > most:
            raise MessageTooLarge(
                f"a message of {max(sizes)} bytes is more than max_message_bytes={most} of stream {self.name!r}: "
                "split it, or declare the stream with a larger one"
            )
        if size > self._max_transaction_bytes and len(records) > 1:
            raise TransactionTooLarge(
                f"{len(records)} messages of {size} bytes together are more than max_transaction_bytes="
                f"{self._max_transaction_bytes}: publish them in smaller batches"
            )
        charged = size + (OVERHEAD_BYTES + 4) * len(records) + sum(map(len, topics)) * 4
        return Put(self.lane, records, sizes, plain, size, charged, topics)

    def begin_puts(self, drafts: list[Put]) -> Asking:
        """Begin `prepare_together` by a caller who has no thread to wait with: `try_put` until they have their room."""
        return Asking(sum(map(put_charge, drafts)))

    def try_put(self, puts: list[Put], asking: Asking, wake: Wake | None, *, may_work: bool) -> float | None:
        """A step of reserving for puts; see `line`. `give_up_put` them if that raises."""
        return self.room.try_reserve(asking, wake, may_work=may_work)

    def give_up_put(self, puts: list[Put], asking: Asking) -> None:
        """Give back what was reserved for a caller who was stopped."""
        self.room.give_up(asking)

    def check_not_deleted(self) -> None:
        """Refuse what comes too late."""
        if self.stream.ended is not None:
            self.stream.check_open()

    def keep_within_bounds(self) -> None:
        """Nothing to do: see `exceeds`."""


def put_charge(put: Put) -> int:
    """Return what a put is charged while it is on its way, in bytes."""
    return charge_for(len(put.records), put.size + text_bytes(put.topics or ()))


def _without_topic(record: Record) -> Record:
    """Return a record as a stream stores it: the topic stands in the block. A large one stays as queues have it."""
    if not isinstance(record, Message) or len(record) >= SHARED_BYTES:
        return record
    header_bytes, key = record.header_bytes, record.key
    return Message(record.body, header_bytes, key=key) if header_bytes or key else record.body


def offset_of(sequence: int) -> int:
    """Return the offset in its partition that a sequence stands for."""
    return sequence & OFFSET_MASK
