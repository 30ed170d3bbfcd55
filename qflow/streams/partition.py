"""One partition of a stream: a lane of the log with dense offsets, and the readers that wait for its messages.

For the log it is a publisher, for `Together` a place to put messages, as a queue is. A publish gives a hint to each
filter that matches, and wakes the cursors that wait with one of those: see `feeds`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from qflow.config import StreamSettings
from qflow.errors import MessageTooLarge, QflowError, TransactionTooLarge
from qflow.memory.waiting import StraightLock
from qflow.message import OVERHEAD_BYTES, Message, Record, text_bytes
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
    """`Feeds` of the open cursors."""

    def check_open(self) -> None: ...


class Partition:
    """See the module. What `Together` calls is named as in `Puts`."""

    reserves_together = True
    """Partitions of all streams reserve memory in one place, at once: calls that each hold a part and wait for the rest
    could wait for each other."""
    exceeds = False
    """It never takes more memory than it has reserved."""

    def __init__(self, stream: Home, number: int, owner: int, row: Row, shared: Shared) -> None:
        self.stream = stream
        self.number = number
        self.owner = owner
        self.lane = Lane(owner, number, row, self)
        self.lock = StraightLock()
        self.tail = Tail()
        self.next = row.next
        """The sequence of the next message to become visible."""
        self.room = shared.room
        """The memory of all streams of the broker."""
        self.joining: set[object] = set()
        """Calls between `begin_joining` and `end_joining`: an end of the stream waits for them."""
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

    def show(self, put: Any, turn: Any, first: int) -> bool:
        """What is published has no thread that confirms it by itself."""
        return False

    def publish_transient(self, put: Put) -> None:
        """A stream's messages are logged, all of them."""
        raise AssertionError("a message that is not logged was put into a stream")

    def publish_topics(self, first: int, records: list[Record], topics: Sequence[str], size: int, time_ms: int) -> None:
        """Make confirmed messages visible, give hints to filters that match, and wake the cursors that wait."""
        charged = charge_for(len(records), size + text_bytes(topics))
        self.room.arrived(charged)
        feeds = self.stream.readers
        found: Iterable[Any] = ()
        if len(feeds):
            self.room.keep(self.tail, Slab(first, records, topics, time_ms, charged + SLAB_BYTES))
        with self.lock:  # a part becomes live under it, and has joined its feed before
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
        """Give back the memory of a put that was not confirmed; see `Room.refused`."""
        self.room.refused(put, put_charge(put))

    def note_left(self) -> None:
        """Nothing: maintenance looks at all partitions."""

    # Called by publishers -------------------------------------------------------------------------------------------

    def begin_joining(self, caller: object) -> None:
        """Have an end of the stream wait until `end_joining`; refuse a stream that has ended.

        Raises:
            StreamDeleted, BrokerClosed, ForkedProcess: it has ended.
        """
        self.joining.add(caller)  # before the check: either the end sees the caller, or the caller sees the end
        self.check_not_deleted()

    def end_joining(self, caller: object) -> None:
        """Undo `begin_joining`, also one that failed or was interrupted; twice is fine."""
        self.joining.discard(caller)

    def draft(self, records: list[Record], plain: bool, number: int, *, dead: bool = False) -> Put:
        """Return a put, for which nothing is reserved yet, of messages that carry their topic."""
        topics = [record.topic for record in records]  # type: ignore[union-attr]
        return self.put_of(list(map(_without_topic, records)), topics, False)

    def put_of(self, records: list[Record], topics: Sequence[str], plain: bool) -> Put:
        """Return a put, with nothing reserved yet. Raises MessageTooLarge: one is. TransactionTooLarge: together."""
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

    def reserve_puts_at_once(self, drafts: list[Put]) -> bool:
        """Reserve memory for what one commit puts into partitions, if there is some; an interrupted call has none."""
        return self.room.reserve_at_once(sum(map(put_charge, drafts)))

    def reserving(self, drafts: list[Put]) -> tuple[Callable[..., float | None], Callable[[], None]]:
        """Return what takes steps to reserve memory for them, see `line`, and what gives that up if one raises."""
        asking = Asking(sum(map(put_charge, drafts)))
        return partial(self.room.try_reserve, asking), partial(self.room.give_up, asking)

    def check_not_deleted(self) -> None:
        """Raise `StreamDeleted` if the stream was deleted."""
        if self.stream.ended is not None:
            self.stream.check_open()

    def keep_within_bounds(self) -> None:
        """Nothing to do: see `exceeds`."""


def put_charge(put: Put) -> int:
    """Return the bytes charged for a put until it is confirmed."""
    return charge_for(len(put.records), put.size + text_bytes(put.topics or ()))


def _without_topic(record: Record) -> Record:
    """Return a record as a stream stores it: the topic is in the block. A large record stays as queues have it."""
    if not isinstance(record, Message) or len(record) >= SHARED_BYTES:
        return record
    header_bytes, key = record.header_bytes, record.key
    return Message(record.body, header_bytes, key=key) if header_bytes or key else record.body
