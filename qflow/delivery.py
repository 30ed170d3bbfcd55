"""What a consumer holds until it is settled: a `Delivery`; for a batch of them see `deliveries`.

It does not know a queue: it is given a *settler*, an object that acks and returns by value. The first settling counts;
later ones raise `AlreadySettled` (after a purge or delete they do nothing).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, Self

from qflow.config import parse_span
from qflow.durations import Duration
from qflow.errors import AlreadySettled, ForkedProcess, InvalidArgument
from qflow.inherited import shows
from qflow.message import HeaderValue, Message, Record, decode_headers
from qflow.named_tuples import NamedTuple
from qflow.pickling import Unpicklable

MAY_BE_REPEATED = 1
"""The low bit of a delivery's *marks*; the rest count its earlier deliveries."""
ONE_ATTEMPT = 2
MAX_REASON_BYTES = 1024
"""A reason of a `nack` is cut there, in UTF-8."""


class Raised(str):
    """What an exception said; as the reason of a `nack` it is told apart from what somebody wrote."""

    __slots__ = ()


def reason_of(error: BaseException) -> Raised:
    """Return what an exception says, as the last lines of its traceback: the reason of a message that it failed."""
    return Raised("".join(traceback.format_exception_only(error)).strip())


class Return(NamedTuple):
    """How messages are given back; see `Delivery.nack`."""

    requeue: bool = True
    delay_s: float = 0.0
    reason: str | None = None


AT_ONCE = Return()


def parse_return(requeue: bool, delay_s: object, reason: object) -> Return:
    return Return(requeue, parse_span(delay_s, "delay_s"), _parse_reason(reason))


def _parse_reason(value: object) -> str | None:
    """Return a reason of a `nack`, cut to `MAX_REASON_BYTES`; what is not Unicode is written with backslashes.

    Raises:
        InvalidArgument: it is neither text nor None.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidArgument(f"reason must be str, or None, not {type(value).__name__}: give it str(error), or repr()")
    cut = value.encode("utf-8", "backslashreplace")[:MAX_REASON_BYTES].decode("utf-8", "ignore")
    return Raised(cut) if isinstance(value, Raised) else cut


class Settler(Protocol):
    """What settles a delivery: its queue, or the batch it came in."""

    @property
    def name(self) -> str: ...
    def settle_one(self, delivery: Delivery, wait: bool) -> None: ...
    def return_one(self, delivery: Delivery, how: Return) -> None: ...
    def extend_one(self, delivery: Delivery, seconds: float) -> None: ...


@shows("ack body delivery_count expires_at_s extend headers nack queue redelivered sequence topic")
class Delivery(Unpicklable):
    """One message, acquired. As a context manager it acks on success and goes back on an exception."""

    # Its queue sets the slots itself: that takes half the time of a call of `__init__`.
    __slots__ = ("marks", "record", "sequence", "settler", "taker")

    record: Record
    sequence: int
    settler: Settler
    marks: int
    taker: Any
    """Who took it, as its queue notes that; not set of one that is made of a batch, which knows."""

    @property
    def body(self) -> bytes:
        """The bytes that were put."""
        record = self.record
        return record if type(record) is bytes else record.body  # type: ignore[attr-defined]

    @property
    def headers(self) -> dict[str, HeaderValue]:
        """The headers that were put, decoded at each call."""
        record = self.record
        return decode_headers(record.header_bytes) if type(record) is Message else {}

    @property
    def topic(self) -> str:
        """What it was published under; empty for a message that was put."""
        record = self.record
        return record.topic if isinstance(record, Message) else ""

    @property
    def expires_at_s(self) -> float | None:
        """When it expires, in seconds since the epoch; None = never."""
        record = self.record
        return record.expires_ms / 1000 if isinstance(record, Message) and record.expires_ms else None

    @property
    def queue(self) -> str:
        """The queue's name."""
        return self.settler.name

    @property
    def delivery_count(self) -> int:
        """1 at the first delivery, one more after each return."""
        return (self.marks >> 1) + 1

    @property
    def redelivered(self) -> bool:
        """It was, or before a crash may have been, delivered before."""
        return self.marks != 0

    def ack(self, wait: bool = False) -> None:
        """Settle the message.

        Args:
            wait: return only when the ack is synced in the log; else it rides the next commit, within milliseconds.

        Raises:
            AlreadySettled: it was acked or returned before.
            BrokerClosed: the message went back to its queue when the broker was closed.
        Cost: 0.3 µs; with `wait`, a commit.
        """
        self.settler.settle_one(self, wait)

    def nack(self, requeue: bool = True, delay_s: Duration = 0.0, reason: str | None = None) -> None:
        """Give the message back to its original place, to be delivered again.

        Args:
            requeue: False = it is not wanted: it becomes a dead letter, or is dropped where there is no such queue;
                one of a stream is settled.
            delay_s: it is not delivered again before; it comes then before what waits. A restart ends the delay.
            reason: what went wrong, in words. If the message becomes a dead letter with this call, that is its header
                `dead_letter_nack_reason`, cut to 1,024 bytes; else the reason is not kept.

        A message that was delivered `max_deliveries` times becomes a dead letter, or is dropped, too.

        Raises:
            AlreadySettled, BrokerClosed: as `ack`.
        """
        self.settler.return_one(self, parse_return(requeue, delay_s, reason))

    def extend(self, seconds: Duration) -> None:
        """Hold the message for so many seconds from now, if its queue's `ack_timeout_s` would take it back earlier.

        Raises:
            InvalidArgument: it is no time span, or below 0. AlreadySettled, BrokerClosed: as `ack`, or it went back.
        """
        self.settler.extend_one(self, parse_span(seconds, "seconds"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None:
                self.ack()
            else:
                self.nack(reason=None if error is None else reason_of(error))
        except AlreadySettled:
            pass  # the block settled it itself
        except ForkedProcess:
            if kind is None:
                raise  # what a child is done with is not acked

    def __repr__(self) -> str:
        return f"<Delivery {self.sequence} of {self.queue!r}, {len(self.record)} B>"


class Segment(NamedTuple):
    """Messages of a batch with consecutive sequences and equal marks."""

    first: int
    records: list[Record]
    marks: int


class Keeper(Protocol):
    """What moves a waiting message between memory and disk when asked to: its queue."""

    def spill_entry(self, sequence: int) -> str: ...
    def restore_entry(self, sequence: int) -> str: ...


class Entry:
    """One waiting message as `browse()` shows it: its place in line and where its body lies."""

    __slots__ = ("_keeper", "due_ms", "sequence", "size_bytes", "state")

    def __init__(
        self, sequence: int, size_bytes: int | None, state: str, keeper: Keeper, due_ms: int | None = None
    ) -> None:
        self.sequence: int = sequence
        self.size_bytes: int | None = size_bytes
        """Body and headers; None where only the disk knows."""
        self.state: str = state
        """`"resident"`, `"spilled"` or `"logged"`, as of `browse`, or of the last move.

        `"delayed"` after `spill` or `restore` of a delayed message, which do not move it.
        """
        self.due_ms: int | None = due_ms
        """When a delayed message is due, milliseconds since the epoch, where memory knows that."""
        self._keeper = keeper

    @property
    def spilled(self) -> bool:
        """Its body lies in the spill store."""
        return self.state == "spilled"

    def spill(self) -> None:
        """Move the message from memory to the spill store, whatever room there is.

        Nothing if it is not in memory, or delayed, or one of hundreds that came back singly: those move by themselves.

        Raises:
            NotFound: it waits no more; it was delivered or dropped.
            StorageError: the disk did not take it; it is where it was.
        """
        self.state = self._keeper.spill_entry(self.sequence)

    def restore(self) -> None:
        """Move the message from the spill store into memory; others may have to leave it for that.

        What is only in the log, or delayed, comes by itself when its turn does, and not before.

        Raises: NotFound: as `spill`. QueueFull: what is acquired takes all the room.
        """
        self.state = self._keeper.restore_entry(self.sequence)

    def __repr__(self) -> str:
        return f"<Entry {self.sequence}, {self.state}>"


ONE, SEVERAL = "ack takes a delivery", "ack_many takes a batch or deliveries"
"""What these say of anything else."""


def each_of(deliveries: Iterable[Any]) -> Iterator[Any]:
    """Return what goes through deliveries that `ack_many` was given. Raises InvalidArgument: there are none in it."""
    try:
        return iter(deliveries)
    except TypeError as error:
        raise InvalidArgument(f"{SEVERAL}, not {type(deliveries).__name__}") from error
