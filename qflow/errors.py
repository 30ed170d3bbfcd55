"""Every error qflow raises on purpose, grouped by whose move is next.

The caller's mistake: `InvalidArgument`, `NotFound`, `SettingsConflict`, `MessageTooLarge`, `AlreadySettled`.
Nothing wrong, only full or empty: `QueueFull`, `QueueEmpty` (they are the standard library's, too); `ProducerBusy`.
The object is gone: `BrokerClosed`, `QueueDeleted`, `StreamDeleted`, `ForkedProcess`, `SpoolInUse`.
The disk: `StorageError` and below. Bytes that are not what was written: `CorruptionError`.
"""

from __future__ import annotations

import queue
from functools import partial
from typing import Any

NO_MORE_THREADS = (
    "the system starts no more threads for this process: look at `ulimit -u` and `ulimit -v`, and at the limits of its "
    "container or service (`pids.max`, `TasksMax`)"
)
"""What there is to say where Python says `NO_THREAD`: there are too many, or no memory for another."""
NO_THREAD = "can't start new thread"
"""What Python says, in an error that has no kind of its own."""


class QflowError(Exception):
    """The base of every error of this package."""


class InvalidArgument(QflowError, ValueError):
    """An argument has a wrong type or value; nothing was done."""


class NotFound(QflowError):
    """No queue or message of that name or number exists."""


class SettingsConflict(QflowError):
    """A queue, stream or subscription of this name is open already, or has other settings; give those, or alter it."""


class MessageTooLarge(QflowError):
    """A message is larger than its queue admits; nothing was done."""


class TransactionTooLarge(QflowError):
    """One batch or transaction holds more than `max_transaction_bytes`; nothing was done."""


class QueueFull(QflowError, queue.Full):
    """The queue is at its limit and no room came up in time; nothing was done."""


class TooManyUnsettled(QflowError):
    """A subscriber holds as much as it may; it gets no more before it has settled some of it."""


class QueueEmpty(QflowError, queue.Empty):
    """No message came up in time."""


class ProducerBusy(QflowError, TimeoutError):
    """Another call has the same producer's number or `dedupe_key`, and did not end in time; nothing was done."""


class BrokerClosed(QflowError):
    """The broker was closed; open the spool again."""


class Reentered(QflowError):
    """A finalizer called the broker in the middle of a call of it, in the same thread; nothing was done."""


class QueueDeleted(QflowError):
    """The queue was deleted; declare it again."""


class StreamDeleted(QflowError):
    """The stream was deleted, or its subscription was; declare it again, or subscribe anew."""


class AlreadySettled(QflowError):
    """The delivery was acked or nacked before, or was held for too long and went back; the first one counts."""


class ForkedProcess(QflowError):
    """A broker was used, or its spool opened, in a child that was forked while it was open; fork before, or connect."""


class SpoolInUse(QflowError):
    """Another process owns the spool, or this one; use it by `qflow.connect`, or open it when its owner has closed."""


class GroupInUse(QflowError):
    """Another process reads as this group of readers outside the broker; stop it, or name another group."""


class StorageError(QflowError):
    """A file or directory could not be used, for the reason in the text; mend that, and try again."""


class PermissionDenied(StorageError):
    """This user may not use a file or directory of the spool; give it access, or run as the spool's user."""


class DiskFull(StorageError):
    """There is no room on the disk for the message; nothing was done, try again when there is."""


class InDoubt(StorageError):
    """A commit failed half-way; whether it holds is known when the spool is opened again."""


class BrokerFailed(StorageError):
    """The log failed earlier; durable work is refused until the spool is opened again."""


class FormatTooNew(StorageError):
    """The spool was written by a newer qflow; upgrade to open it."""


class FormatTooOld(StorageError):
    """The spool was written by a qflow from before the first release; this one does not read it."""


class CorruptionError(QflowError):
    """Stored bytes do not match their checksum or place."""


class GapError(QflowError):
    """Messages a subscriber was to get are gone: retention took them, or their block is damaged.

    The subscription goes on behind them: the next call returns what is there.
    """

    def __init__(self, text: str, *, partition: int, first: int, end: int, messages: int | None = None) -> None:
        super().__init__(text)
        self.partition = partition
        self.first = first
        """The first offset that is gone."""
        self.end = end
        """The offset behind the last one."""
        self.messages: int = end - first if messages is None else messages
        """How many offsets that are, of all topics, without those that were settled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), *self.args, **vars(self)), ()


def in_doubt(error: BrokerFailed) -> InDoubt:
    """Return what is told of settles before the log failed, by whoever is to wait for them only now."""
    return InDoubt(f"what was settled before may hold or not, which is known when the spool is opened again: {error}")


def said_by(error: BaseException) -> str:
    """Return the text of an error; of one without, as a `MemoryError` is, its kind."""
    return str(error) or type(error).__name__


def again(error: BaseException) -> BaseException:
    """Return an error of a batch for one more caller to raise."""
    fresh = type(error)(*error.args)
    fresh.__cause__ = error.__cause__
    return fresh
