"""Redrive: dead letters go back to the queues they came from, each in a commit with its leaving."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from qflow.config import parse_count, parse_sequences
from qflow.deliveries import Deliveries
from qflow.delivery import Delivery
from qflow.durations import Duration
from qflow.errors import InDoubt, InvalidArgument, NotFound, QueueFull, TransactionTooLarge
from qflow.importing import imported
from qflow.memory.waiting import attend, shelter
from qflow.message import DELAYED, Message, Record, body_of, expires_of, lane_of
from qflow.queues.assembly import Insert
from qflow.queues.dead_letters import headers_of, revived
from qflow.queues.deleting import Deleting
from qflow.queues.exits import Leaving
from qflow.queues.looking import not_due
from qflow.queues.queue import Queue, parts_of
from qflow.queues.tending import read_delayed
from qflow.queues.transaction import Transaction, gathering_of
from qflow.storage.log.transaction_log import Unit
from qflow.takers import Taker, named, this_thread

if TYPE_CHECKING:
    from qflow.stats import RedriveReport

BATCH_MESSAGES = 100
NOT_DUE = "not due yet"
NO_ROOM = "not looked at: there is no room in memory for them beside what is held, and those before them that stay"
PAUSED = "not looked at: the queue is paused"
TAKEN = "others took the room meanwhile, at a limit or in memory"
NOT_WAITING = "not waiting any more: a consumer holds them, or they are gone"
_SHORTEST_S = 0.001
"""What a message has left that has just expired."""
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
    Of chosen messages none is held: each is taken out of its place, and leaves with a commit or is there again.

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
        self._taker = Taker(named(this_thread())[0], "get", in_hand=0)  # what it looks at was delivered to nobody
        self._flying: list[tuple[Queue, Leaving]] = []  # chosen ones in commits, and where they go
        self._begin()

    def _begin(self) -> None:
        self._tx = gathering_of(self._broker.transaction(self._patience_s))
        self._going: dict[str, list[int]] = {}  # bytes of what is in the transaction

    def run(self, limit: int | None = None) -> None:
        """Move at most `limit` messages. It is called once, or `run_chosen` is.

        Raises:
            All that a put raises. What was moved before stays so.
        Cost: a commit for each hundred messages.
        """
        looked_at: list[Deliveries] = []
        left = len(self._dead)
        self._begin()
        try:
            while left > 0:
                room = BATCH_MESSAGES if limit is None else limit - sum(self.moved.values())
                if room <= 0:
                    break
                most = min(BATCH_MESSAGES, left, room)
                looked_at.append(self._dead.get_many(most, timeout_s=0))  # at once, so that an interrupt finds it there
                batch = looked_at[-1]
                batch.held.taker = self._taker
                if not batch:
                    if read_delayed(parts_of(self._dead)):
                        continue  # a get has not seen all that is due
                    self._tell_of_rest(left)
                    break
                left -= len(batch)
                for delivery in batch:
                    self._move(delivery)
                self._commit()
        finally:
            try:
                shelter(partial(self._put_back, looked_at))
            finally:  # see `attend`
                shelter(partial(self._put_back, looked_at))

    def _put_back(self, looked_at: list[Deliveries]) -> None:
        """Put back what has not moved; twice is fine."""
        if self._tx.state == "open":
            self._tx.end("rolled back")
        for batch in looked_at:
            parts_of(self._dead).claims.give_up(batch.held)

    def run_chosen(self, sequences: Sequence[int], limit: int | None = None) -> None:
        """Move these messages alone, as far as they wait, due or not, at most `limit`.

        Raises:
            As `run`.
        Cost: 150 µs a message, more where it is not in memory; and a commit for each hundred at most.
        """
        if parts_of(self._dead).lanes.paused:
            self.kept = {PAUSED: len(sequences)} if sequences else {}
            return
        try:
            for sequence in sequences:
                room = BATCH_MESSAGES if limit is None else limit - sum(self.moved.values())
                if len(self._flying) >= min(room, BATCH_MESSAGES):
                    self._land()
                if limit is not None and sum(self.moved.values()) >= limit:
                    break
                self._choose(Deleting(parts_of(self._dead), sequence, moves=True))
            self._land()
        finally:
            self._count_landed()

    def _choose(self, chosen: Deleting) -> None:
        """Have a message leave for where it goes, or note why it stays."""
        try:
            attend(partial(chosen.step, may_work=True), chosen.give_up)
            if chosen.leaving is None:
                self._stays(NOT_WAITING)
                return
            name, record = self._revive(chosen.record)
            target = self._to or name
            reason = self._obstacle(target, record)
            if reason is None and target is not None:
                priority = lane_of(chosen.sequence) % DELAYED if name is None else 0
                queue = self._broker.queue(target)
                self._flying.append((queue, chosen.leaving))
                inserts = [_insert(queue, record, priority)]
                leavings: list[Any] = [chosen.leaving]
                self._tx.together.commit(inserts, leavings, timeout=self._patience_s, wait=False)
            else:
                shelter(chosen.give_up)
                self._stays(reason or "")
        except BaseException as error:
            try:
                shelter(chosen.give_up)
            finally:  # see `attend`
                shelter(chosen.give_up)
            if not isinstance(error, QueueFull) or _commit_of(chosen.leaving) is not None:
                raise
            self._patience_s = 0.0
            self._stays(TAKEN)

    def _land(self) -> None:
        """Wait for the commits of chosen messages that have begun."""
        for queue in {self._dead, *(queue for queue, _ in self._flying)}:
            parts_of(queue).spiller.keep_within_bounds()
        for _, leaving in self._flying:
            unit = _commit_of(leaving)
            if unit is not None:
                self._tx.together.finish(unit)
        self._count_landed()

    def _count_landed(self) -> None:
        """Count chosen messages that have moved; the others on their way may."""
        flying, self._flying = self._flying, []
        for queue, leaving in flying:
            unit = _commit_of(leaving)
            if leaving.has_left or (unit is not None and unit.done and unit.error is None):  # after a purge, perhaps
                self.moved[queue.name] = self.moved.get(queue.name, 0) + 1
            elif unit is not None and (not unit.done or isinstance(unit.error, InDoubt)):
                self.in_doubt += 1

    def _stays(self, reason: str) -> None:
        self.kept[reason] = self.kept.get(reason, 0) + 1

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
            self._stays(reason or "")

    def _put(self, target: str, record: Record, priority: int) -> None:
        self._tx.add(_insert(self._broker.queue(target), record, priority))

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


def _commit_of(leaving: Leaving | None) -> Unit | None:
    """Return the commit that takes a message away, if the log has it."""
    unit = None if leaving is None else leaving.unit
    return unit if unit is not None and unit.joined else None


def _insert(queue: Queue, record: Record, priority: int) -> Insert:
    """Return what a commit is to put into a queue: a message as it was published, or put, into another one.

    Its priority is that of the queue at most; it expires when it would have, unless it does before in the queue.
    """
    puts = parts_of(queue).puts
    expires_ms, left_s = expires_of(record), None
    if expires_ms:  # half a millisecond more: the envelope cuts to a whole one
        left_s = max(_SHORTEST_S, expires_ms / 1000 - puts.context.clock()) + _SHORTEST_S / 2
    published = (record.topic, record.key or None) if isinstance(record, Message) else ("", None)
    priority = min(priority, queue.settings.priorities - 1)
    envelope = puts.envelope(headers_of(record), None, priority, left_s, None, None, published)
    return Insert(puts, envelope.number, [envelope.record(body_of(record))])


def redrive(
    broker: Owner,
    name: str,
    to: str | None = None,
    limit: int | None = None,
    sequences: Iterable[int] | None = None,
    *,
    revive: Revive = revived,
) -> RedriveReport:
    """Move the messages of a dead-letter queue back, all or those of these sequences; see `Redrive`."""
    moving = Redrive(broker, name, to=to, revive=revive)
    most = None if limit is None else parse_count(limit, "limit")
    if sequences is None:
        moving.run(most)
    else:
        moving.run_chosen(parse_sequences(sequences), most)
    report: RedriveReport = imported("qflow.stats").RedriveReport(moved=moving.moved, kept=moving.kept)
    return report
