"""Redrive: dead letters go back to the queues they came from, each in a commit with its leaving."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from qflow.config import parse_count
from qflow.deliveries import Deliveries
from qflow.delivery import Delivery
from qflow.durations import Duration
from qflow.errors import InDoubt, InvalidArgument, NotFound, QueueFull, TransactionTooLarge
from qflow.message import DELAYED, Message, Record, body_of, expires_of, lane_of
from qflow.queues.dead_letters import headers_of, revived
from qflow.queues.looking import not_due
from qflow.queues.queue import Queue, parts_of
from qflow.queues.transaction import Transaction, gathering_of

if TYPE_CHECKING:
    from qflow.stats import RedriveReport

BATCH_MESSAGES = 100
NOT_DUE = "not due yet"
NO_ROOM = "not looked at: there is no room in memory for them beside what is held, and those before them that stay"
PAUSED = "not looked at: the queue is paused"
TAKEN = "others took the room meanwhile, at a limit or in memory"
PATIENCE_S = 1.0
"""Waited for room that others take between the look and the commit; only once."""
Revive = Callable[[Record], tuple[str | None, Record]]


class Owner(Protocol):
    """Who has the queues: the broker."""

    def queue(self, name: str) -> Queue: ...
    def transaction(self, timeout_s: Duration | None = None) -> Transaction: ...


class Redrive:
    """Moves the messages of a dead-letter queue back.

    A dead letter keeps its body, topic, headers and the count of its deaths; priority and times are those of a new put.
    What is none goes `to` a queue as it is, with its key, its priority (the highest there at most), and the moment at
    which it expires, unless it expires there before.
    One is kept that has no origin, whose queue is gone, or has no room for it; it goes back to its place, and the
    delivery is not counted. So is one that is not due yet. Where others take the room meanwhile, the hundred stay that
    were to go together.
    Those that stay are held to the end: where they fill the memory, those behind them are not looked at, which is told.

    Args:
        broker: that has both queues.
        name: of the dead-letter queue.
        to: where all of them go instead of the queues they came from.
        revive: returns where one came from, and what is put there; as `revived`.

    Raises:
        NotFound: there is no such queue. InvalidArgument: it is the same as `to`.
    """

    def __init__(self, broker: Owner, name: str, *, to: str | None = None, revive: Revive = revived) -> None:
        self._broker = broker
        self._dead = broker.queue(name)
        self._to = to
        self._revive = revive
        if to is not None:
            broker.queue(to)
            if to == name:
                raise InvalidArgument(f"messages of queue {name!r} cannot be moved to itself")
        self.moved: dict[str, int] = {}
        """How many went to each queue; of those, a commit holds."""
        self.kept: dict[str, int] = {}
        """How many stay, by reason."""
        self.in_doubt = 0
        """As many more at most have moved: of those in a commit that was interrupted, or whose end is not known."""
        self._patience_s = PATIENCE_S
        self._begin()

    def _begin(self) -> None:
        self._tx = gathering_of(self._broker.transaction(self._patience_s))
        self._going: dict[str, list[int]] = {}  # bytes of what is in the transaction

    def run(self, limit: int | None = None) -> int:
        """Move at most `limit` messages; return how many.

        Raises:
            All that a put raises. What was moved before stays so.
        Cost: a commit for each hundred messages.
        """
        looked_at: list[Deliveries] = []
        left = len(self._dead)
        before = sum(self.moved.values())
        self._begin()
        try:
            while left > 0:
                room = BATCH_MESSAGES if limit is None else limit - (sum(self.moved.values()) - before)
                if room <= 0:
                    break
                batch = self._dead.get_many(min(BATCH_MESSAGES, left, room), timeout_s=0)
                if not batch:
                    self._tell_of_rest(left)
                    break
                looked_at.append(batch)
                left -= len(batch)
                for delivery in batch:
                    self._move(delivery)
                self._commit()
        finally:
            if self._tx.state == "open":
                self._tx.rollback()
            for batch in looked_at:
                parts_of(self._dead).claims.give_up(batch.held)
        return sum(self.moved.values()) - before

    def _tell_of_rest(self, left: int) -> None:
        """Note why others stay that a get did not find, of so many at most."""
        queue = parts_of(self._dead)
        later = not_due(queue)
        unseen = min(self._dead.stats().lag_messages - later, left)
        if later:
            self.kept[NOT_DUE] = later
        if unseen > 0:
            self.kept[PAUSED if queue.lanes.paused else NO_ROOM] = unseen

    def _move(self, delivery: Delivery) -> None:
        """Add one to the transaction, or note why it stays."""
        name, record = self._revive(delivery.record)
        target = self._to or name
        reason = self._obstacle(target, record)
        if reason is None and target is not None:
            priority = lane_of(delivery.sequence) % DELAYED if name is None else 0
            try:
                self._put(target, record, priority)
            except TransactionTooLarge:
                self._commit()
                self._put(target, record, priority)
            self._tx.ack_many([delivery])
            self._going.setdefault(target, []).append(len(record))
        else:
            self.kept[reason or ""] = self.kept.get(reason or "", 0) + 1

    def _put(self, target: str, record: Record, priority: int) -> None:
        published = (record.topic, record.key or None) if isinstance(record, Message) else ("", None)
        self._tx.put_published(
            self._broker.queue(target),
            published,
            body_of(record),
            headers_of(record),
            priority=priority,
            expires_ms=expires_of(record),
        )

    def _obstacle(self, target: str | None, record: Record) -> str | None:
        """Return why a message stays; None if it can go."""
        if target is None:
            return "no dead letter: nothing says where it came from"
        if target == self._dead.name:
            return f"it came from queue {target!r} itself"
        try:
            queue = self._broker.queue(target)
        except NotFound:
            return f"queue {target!r}, where it came from, is gone"
        if len(record) > queue.settings.max_message_bytes:
            return f"queue {target!r} does not take messages of its size any more"
        going = self._going.get(target, [])
        if not parts_of(queue).puts.would_admit(len(going) + 1, sum(going) + len(record)):
            return f"queue {target!r} is at its limit"
        return None

    def _commit(self) -> None:
        """Commit what is in the transaction, and begin another one."""
        count = sum(map(len, self._going.values()))
        self.in_doubt = count  # an interrupt strikes who waits, and not the commit
        try:
            self._tx.commit()
        except QueueFull:
            self._patience_s = 0.0
            self.kept[TAKEN] = self.kept.get(TAKEN, 0) + count
        except Exception as error:
            self.in_doubt = count if isinstance(error, InDoubt) else 0
            raise
        else:
            for target, sizes in self._going.items():
                self.moved[target] = self.moved.get(target, 0) + len(sizes)
        self.in_doubt = 0
        self._begin()


def redrive(
    broker: Owner, name: str, to: str | None = None, limit: int | None = None, revive: Revive = revived
) -> RedriveReport:
    """Move the messages of a dead-letter queue back; see `Redrive`."""
    moving = Redrive(broker, name, to=to, revive=revive)
    moving.run(None if limit is None else parse_count(limit, "limit"))
    from qflow.stats import RedriveReport

    return RedriveReport(moved=moving.moved, kept=moving.kept)
