"""What a transaction gathers: puts and settled deliveries of queues of one broker, until one commit holds all of it.

Bodies that wait for that are charged to the broker's memory; where there is none left, they wait in the spill store.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from qflow.deliveries import Deliveries
from qflow.delivery import ONE, Delivery, each_of
from qflow.durations import Duration
from qflow.errors import AlreadySettled, InvalidArgument, TransactionTooLarge
from qflow.held_batch import AnyBatch
from qflow.memory.waiting import shelter, sheltered
from qflow.message import OVERHEAD_BYTES, Headers, Record, charge
from qflow.queues import in_steps
from qflow.queues.apart import HeldOne
from qflow.queues.assembly import Assembly, Insert, Receipt
from qflow.queues.desk import Desk, SeatedInsert, Tab
from qflow.queues.envelope import Moment
from qflow.queues.exits import Leaving
from qflow.queues.queue import Queue, parts_of
from qflow.queues.together import Together

RUN_BYTES = 64 * 1024
"""Charged at once for puts that follow each other."""


class Router(Protocol):
    """Who knows the queues, and where a topic leads: `Publisher`."""

    def own(self, queue: Queue | str) -> Queue: ...
    def inserts_of(
        self, topic: str, body: Any, headers: Headers | None, key: bytes | str | None = None
    ) -> list[Insert]: ...
    def result_of(self, receipts: list[Receipt]) -> Any: ...


Options = tuple[Headers | None, bool | None, int, Duration | None, Duration | None, Moment | None]
"""Of a put: headers, durable, priority, ttl_s, delay_s, not_before."""


class _Call:
    """What one call of a transaction, or some puts in a row, are in the end: some inserts, and what they return."""

    __slots__ = ("kind", "start", "stop")

    def __init__(self, kind: str, start: int, stop: int) -> None:
        self.kind = kind
        self.start = start
        self.stop = stop


class Gathering:
    """See the module. Of the thread that made it, or that has adopted it."""

    def __init__(
        self, router: Router, together: Together, desk: Desk, max_bytes: int, timeout_s: float | None = None
    ) -> None:
        self._tab = Tab()
        self._desk = desk
        self._router = router
        self.together = together
        """What it commits by."""
        self._max_bytes = max_bytes
        self._most_charged = max_bytes + OVERHEAD_BYTES  # as large a message passes alone
        self.timeout_s = timeout_s
        """How long its commit waits for room."""
        self.thread = threading.get_ident()
        self.state = "open"
        """Or `"being committed"`, `"committed"`, `"rolled back"`, `"interrupted"` or, for a task, `"cancelled"`.

        Interrupted: whether it was committed is not known.
        """
        self._calls: list[_Call] = []
        self._charged = 0
        self._held: list[tuple[Any, HeldOne]] = []
        self._seen: set[tuple[int, int]] = set()
        self._leavings: list[Leaving] = []
        """What leaves its queue in the commit that has begun."""
        self._assembly: Assembly | None = None
        """That commit, of a thread."""
        self._result: list[Any] | None = None
        self.run_queue: Queue | str | None = None  # where plain puts go, one after the other
        self.run: list[Record] = []
        self.credit = 0  # charged for more of them

    # What it holds -----------------------------------------------------------------------------------------------

    def put(self, queue: Queue | str, body: Any, options: Options) -> None:
        """Take a message; see `Transaction.put`."""
        self.check_open()
        puts = parts_of(self._router.own(queue)).puts
        envelope = puts.envelope(*options)
        record = envelope.record(body)
        plain = type(record) is bytes and not envelope.number
        self._add("puts", [Insert(puts, envelope.number, [record])], queue if plain else None)

    def put_many(self, queue: Queue | str, bodies: Iterable[Any], options: Options) -> None:
        """Take messages for one queue; see `Transaction.put_many`."""
        self.check_open()
        puts = parts_of(self._router.own(queue)).puts
        envelope = puts.envelope(*options)
        records = envelope.records(bodies)[0]
        self._add("put_many", [Insert(puts, envelope.number, records)] if records else [])

    def inserts_of(
        self, topic: str, body: bytes | bytearray | memoryview, headers: Headers | None, key: bytes | str | None = None
    ) -> list[Insert]:
        """Return what a publish is to put where."""
        return self._router.inserts_of(topic, body, headers, key)

    def publish(self, inserts: list[Insert]) -> None:
        """Take what a publish puts where."""
        self.check_open()
        self._add("publish", inserts)

    def add(self, insert: Insert) -> None:
        """Take what is to go into a queue of the broker."""
        self.check_open()
        self._add("puts", [insert])

    def ack_many(self, deliveries: Deliveries | AnyBatch | Iterable[Delivery]) -> None:
        """Take deliveries to be settled, all or none; see `Transaction.ack_many`."""
        self.check_open()
        seen: set[tuple[int, int]] = set()
        held: list[tuple[Any, HeldOne]] = []
        if isinstance(deliveries, Deliveries | AnyBatch):
            batch: Any = deliveries.held if isinstance(deliveries, Deliveries) else deliveries
            if batch.total:
                held.append(self._checked(batch.settler, batch, (id(batch), -1), seen))
        else:
            held += [self._checked_one(delivery, seen) for delivery in each_of(deliveries)]
        # Nothing is called from here on, so that an interrupt finds all of it in the transaction, or nothing.
        self._seen |= seen
        self._held += held

    def _checked_one(self, delivery: Delivery, seen: set[tuple[int, int]]) -> tuple[Any, HeldOne]:
        """Return a delivery that can be acked, and where it is from."""
        if not isinstance(delivery, Delivery):
            raise InvalidArgument(f"{ONE}, not {type(delivery).__name__}")
        batch = delivery.settler
        if isinstance(batch, AnyBatch):
            position = batch.position(delivery.sequence)
            batch.check_unsettled(position, delivery.sequence)
            return self._checked(batch.settler, delivery, (id(batch), position), seen)
        return self._checked(batch, delivery, (id(delivery), -1), seen)

    def _checked(
        self, queue: Any, one: HeldOne, key: tuple[int, int], seen: set[tuple[int, int]]
    ) -> tuple[Any, HeldOne]:
        if key in self._seen or key in seen or not hasattr(queue, "begin_leaving"):
            raise AlreadySettled(f"{one!r} was settled before, or is acked in this transaction already")
        if queue.ledger is not self._desk.ledger:
            raise InvalidArgument(f"{one!r} is of another broker: a transaction is of one")
        seen.add(key)
        return queue, one

    def _begin_run(self, queue: Queue | str) -> None:
        """Charge a chunk at once for the puts that may follow, to the same queue."""
        last = self._tab.waiting[-1]
        chunk = min(RUN_BYTES, self._most_charged - self._charged)
        if last.records is not None and chunk > 0 and self._desk.charge(chunk):
            self.run_queue, self.run, self.credit = queue, last.records, chunk
            self._tab.charged += chunk
            last.charged += chunk

    def _end_run(self) -> None:
        """Give back what was not used of the chunk."""
        if self.run_queue is None:
            return
        last = self._tab.waiting[-1]
        self._desk.discharge(self.credit)
        self._tab.charged -= self.credit
        last.charged -= self.credit
        last.largest = max(map(len, self.run))
        self._charged += last.charged - charge(self.run[:1])
        self.run_queue, self.run, self.credit = None, [], 0

    @sheltered
    def _add(self, kind: str, inserts: list[Insert], run: Queue | str | None = None) -> None:
        """Take the inserts of a call; more plain puts into the queue `run` may follow it."""
        self._desk.tabs.setdefault(self._tab, weakref.ref(self))
        self._end_run()
        seated = list(map(SeatedInsert, inserts))
        charged = self._charged + sum(one.charged for one in seated)
        if charged > self._most_charged:
            raise TransactionTooLarge(
                f"the transaction would hold {charged} bytes, {OVERHEAD_BYTES} of them for each message, more than "
                f"max_transaction_bytes={self._max_bytes}: commit more often"
            )
        start = len(self._tab.waiting)
        try:
            for one in seated:
                self._tab.waiting.append(self._seat(one))
        except BaseException:
            self._unseat(start)
            raise
        self._charged = charged
        self._calls.append(_Call(kind, start, len(self._tab.waiting)))
        if run is not None:
            self._begin_run(run)

    def _seat(self, waiting: SeatedInsert) -> SeatedInsert:
        """Find room for bodies: in memory, if need be for that by spilling those before them; else on disk."""
        desk = self._desk
        if desk.charge(waiting.charged):
            self._tab.charged += waiting.charged
            return waiting
        for other in [*self._tab.waiting, waiting]:
            if other.records is None:
                continue
            other.position, other.slots = desk.spill(other.records)
            other.records = None
            if other is not waiting:
                self._tab.charged -= other.charged
                desk.discharge(other.charged)
        return waiting

    def _unseat(self, start: int) -> None:
        """Give up what waits from some place on."""
        for waiting in self._tab.waiting[start:]:
            if waiting.records is None:
                self._desk.free(waiting.slots)
            else:
                self._tab.charged -= waiting.charged
                self._desk.discharge(waiting.charged)
        del self._tab.waiting[start:]

    # Its end -----------------------------------------------------------------------------------------------------

    @property
    def result(self) -> list[Any]:
        """See `Transaction.result`."""
        if self._result is None:
            raise InvalidArgument(f"the transaction has no result: it is {self.state}")
        return self._result

    def commit(self) -> list[Any]:
        """See `Transaction.commit`."""
        self.check_open()
        try:
            assembly = shelter(self._commit_at_once)
            self.together.go_on(assembly, self.timeout_s)
            if self._result is None:
                shelter(lambda: self.committed(assembly.receipts))
            return self.result
        except BaseException as error:
            try:
                self._fail(error)
            finally:  # see `attend`
                self._fail(error)
            raise

    def _commit_at_once(self) -> Assembly:
        """Begin to commit, and come to its end if nothing has to be waited for. Where nothing strikes."""
        self._assembly = assembly = Assembly(*self._begin_commit())
        self.together.begin(assembly, alone=True)
        if assembly.is_done:
            self.committed(assembly.receipts)
        return assembly

    @sheltered
    def _fail(self, error: BaseException) -> None:
        """End it when its commit was refused, or a handler's exception has ended that: it may hold all the same."""
        assembly = self._assembly
        if self.state not in ("open", "being committed"):
            state = self.state
        elif assembly is None or not assembly.is_handed_over:
            state = "rolled back" if isinstance(error, Exception) else "interrupted"
        else:
            state = "rolled back" if assembly.is_refused else "interrupted"
        self.undo(self._leavings, state)

    def begin_commit(self) -> tuple[list[Insert], list[Leaving]]:
        """Return what is to be committed together: all bodies in memory, and charged until it has ended.

        Each queue charges them as well, once it has room: until then they may wait at a limit for long.

        Raises:
            As `commit`; it is rolled back then.
        """
        self.check_open()
        try:
            return self._begin_commit()
        except BaseException as error:
            self.undo(self._leavings, "rolled back" if isinstance(error, Exception) else "interrupted")
            raise

    @sheltered
    def _begin_commit(self) -> tuple[list[Insert], list[Leaving]]:
        self.state = "being committed"  # first: between two portions a signal handler may ask for something
        self._end_run()
        inserts = [Insert(one.queue, one.number, self._records_of(one)) for one in self._tab.waiting]
        by_queue: dict[Any, list[HeldOne]] = {}
        for queue, one in self._held:
            by_queue.setdefault(queue, []).append(one)
        for queue, held in sorted(by_queue.items(), key=lambda item: item[0].owner):
            for some in in_steps.to_leave(queue, held):
                self._leavings.append(queue.begin_leaving(some))
        return inserts, self._leavings

    def committed(self, receipts: list[Receipt]) -> list[Any]:
        """Note where everything went, once it is committed; returns `result`."""
        result: list[Any] = []
        for call in self._calls:
            result += self._results_of(call, receipts[call.start : call.stop])
        self._result = result
        self.end("committed")
        return result

    def rollback(self) -> None:
        """See `Transaction.rollback`."""
        self.check_open()
        self.end("rolled back")

    def _records_of(self, waiting: SeatedInsert) -> list[Record]:
        if waiting.records is not None:
            return waiting.records
        if self._desk.charge(waiting.charged):  # else they pass without room, as a batch does that is too large for it
            self._tab.charged += waiting.charged
        return self._desk.read(waiting.position, waiting.slots, waiting.largest)

    def _results_of(self, call: _Call, receipts: list[Receipt]) -> Iterable[Any]:
        if call.kind == "publish":
            return [self._router.result_of(receipts)]
        count = receipts[0].count if receipts else 0
        first = receipts[0].first if receipts else None
        if call.kind == "puts":
            return [None] * count if first is None else range(first, first + count)
        return [range(0) if first is None else range(first, first + count)]

    @sheltered
    def undo(self, leavings: list[Leaving], state: str) -> None:
        """End it when its commit has begun and did not come to its end: what was leaving stays."""
        if self.state == "committed":
            return  # an interrupt came at the very end
        if self._assembly is not None:
            self.together.clear_up(self._assembly)
        for leaving in leavings:
            leaving.give_up()
        self.end(state)

    def adopt(self) -> None:
        """The calling thread goes on with it; whoever had it before does not."""
        self.thread = threading.get_ident()

    def takes(self, size: int) -> bool:
        """Tell whether bodies of so many bytes find room without the disk, as things are."""
        return self._desk.has_room(size + RUN_BYTES)

    @property
    def ends_slowly(self) -> bool:
        """Some of it waits on disk, or a great many deliveries are to leave: no event loop should do that."""
        return len(self._held) > in_steps.SETTLED_AT_ONCE or any(waiting.slots for waiting in self._tab.waiting)

    @sheltered
    def end(self, state: str) -> None:
        """Give back what it took."""
        self.state = state
        self.run_queue, self.run, self.credit = None, [], 0
        self._desk.close(self._tab)
        self._calls, self._held, self._leavings, self._assembly = [], [], [], None

    def check_open(self) -> None:
        if threading.get_ident() != self.thread:
            raise InvalidArgument("a transaction belongs to the thread that made it: make one in each thread")
        if self.state != "open":
            raise InvalidArgument(f"the transaction is {self.state}: make another one with broker.transaction()")

    def __len__(self) -> int:
        return len(self._tab.waiting)
