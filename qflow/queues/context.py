"""What the parts of a queue have in common: who it is, how it was declared, whether it has ended; and its lock.

A queue is composed of parts. Each owns its state, and knows those below it only:

    Puts, Gets                   the ways in and out; one call on its way is a `Putting`, `Getting` or `Deleting`
    Claims, Returns, Leases      what was delivered: settled, given back, held for too long
    Exits                        all else that leaves: expired, dropped, dead letters, deleted, purged
    Spiller, Restorer            messages move between memory and disk
    Source                       messages are taken from the lanes, and put back in their place
    Held                         the table of what was delivered, or is leaving
    Admission                    limits, the line at a limit, what is on its way in
    Lanes                        where messages wait, and their number
    Gate                         memory

One lock guards all of it; under it the ledger's may be taken, and none of the log's: handing over takes none. No I/O
happens under it: a part that must read or write lets go of it meanwhile (`Unlocked`), and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from qflow.config import QueueSettings
from qflow.delivery import Segment
from qflow.errors import BrokerClosed, QflowError, QueueDeleted
from qflow.events import EventKind, Teller
from qflow.memory.waiting import StraightLock
from qflow.named_tuples import NamedTuple
from qflow.queues.dead_letters import Cause
from qflow.storage.log.transaction_log import TransactionLog


class Tick:
    """The monotonic clock as it was seen last, by maintenance or who asked: gets note that, and call nothing."""

    __slots__ = ("now_s",)

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s


class Shared(NamedTuple):
    """What all queues of a broker have in common."""

    tick: Tick
    report: Callable[[str, int], None]
    tell: Teller
    bury: Callable[[Any, list[Segment], Cause, Any, bool], bool]
    """`DeadLetterRouter.carry`."""
    max_transaction_bytes: int
    clock: Callable[[], float]
    monotonic: Callable[[], float]
    uuid: str
    """Of the spool."""
    let_pass: Callable[[], object]
    """See `TransactionLog`."""
    keys: Any
    """Puts that bear a key; see `dedupe`."""


class Context:
    """See the module. `settings` and `ended` change under the lock."""

    __slots__ = (
        "clock", "ended", "incarnation", "lock", "log", "maker", "monotonic", "name", "owner", "settings", "shared",
        "tick",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        owner: int,
        settings: QueueSettings,
        shared: Shared,
        log: TransactionLog | None,
        incarnation: int,
        maker: Any,
    ) -> None:
        self.name = name
        self.owner = owner
        """Its number."""
        self.settings = settings
        self.shared = shared
        self.log = log
        """None if it is not durable."""
        self.incarnation = incarnation
        """Of it, in this opening of the spool."""
        self.maker = maker
        """Makes its parts; None once it has them."""
        self.clock = shared.clock
        self.monotonic = shared.monotonic
        self.tick = shared.tick
        self.lock: Any = StraightLock()
        self.ended: type[QflowError] | None = None
        """Why nothing works any more: BrokerClosed or QueueDeleted."""

    @property
    def has_limit(self) -> bool:
        return self.settings.limit_bytes is not None or self.settings.limit_messages is not None

    @property
    def usable_log(self) -> TransactionLog | None:
        """The log, unless it has failed."""
        return None if self.log is None or self.log.failed else self.log

    @property
    def was_deleted(self) -> bool:
        """It takes no calls any more, and its name is free, or about to be."""
        return self.ended is QueueDeleted

    def now_ms(self) -> int:
        return int(self.clock() * 1000)

    def deadline(self, timeout: float | None) -> float | None:
        """Return when so many seconds are over, on the monotonic clock."""
        return None if timeout is None else self.monotonic() + timeout

    def is_past(self, deadline: float | None) -> bool:
        return deadline is not None and self.monotonic() >= deadline

    def check_open(self) -> None:
        """Raise BrokerClosed or QueueDeleted if that is what happened."""
        if self.ended is not None:
            raise self.gone_error()

    def check_not_closed(self) -> None:
        """Refuse a settle that comes after the broker was closed."""
        if self.ended is BrokerClosed:
            raise self.gone_error()

    def check_not_deleted(self) -> None:
        """Refuse to go on if the queue was deleted since room in it was reserved, perhaps long ago."""
        if self.was_deleted:
            raise self.gone_error()

    def gone_error(self) -> QflowError:
        if self.ended is BrokerClosed:
            return BrokerClosed(f"the broker of queue {self.name!r} is closed: open the spool again")
        return QueueDeleted(f"queue {self.name!r} was deleted: declare it again")

    def tell(self, kind: EventKind, text: str = "") -> None:
        """Have listeners told of an event."""
        self.shared.tell(kind, self.name, text)

    def note_damage(self, problem: str, damaged_blocks: int = 0) -> None:
        """Report stored messages that were found damaged, and tell of them."""
        problem = f"queue {self.name!r}: {problem}"
        self.shared.report(problem, damaged_blocks)
        self.tell(EventKind.MESSAGES_LOST, problem)


class Unlocked:
    """Lets go of a queue's lock for the length of a block; has it again afterwards, whatever interrupts.

    An interrupt can strike before or after the lock was taken again, so the lock must know whose it is: an RLock. (It
    costs the hot path nothing measurable.)
    """

    __slots__ = ("_lock",)

    def __init__(self, context: Context) -> None:
        self._lock = context.lock

    def __enter__(self) -> None:
        self._lock.release()

    def __exit__(self, *_: object) -> None:
        interrupt: BaseException | None = None
        while True:
            try:
                self._lock.acquire()
                break
            except BaseException as error:
                interrupt = error
                with suppress(RuntimeError):  # it was not taken yet
                    self._lock.release()
        if interrupt is not None:
            raise interrupt
