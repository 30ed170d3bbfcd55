"""The log of a spool: what callers hand over to be written, and wait for; and what reads it. See `writer`.

What hands over returns a *request*: it is written within milliseconds, or at once if somebody waits for it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

from qflow.errors import BrokerClosed, BrokerFailed, Reentered
from qflow.storage.environment import BROKEN, Environment, log_error
from qflow.storage.log import bodies, facts, removal
from qflow.storage.log.batch import Order, Party, Put, Request, Unit, Work
from qflow.storage.log.confirming import Confirming
from qflow.storage.log.direct import Direct
from qflow.storage.log.facts import PAGE_FACTS, Facts, Page
from qflow.storage.log.journal import NO_JOURNAL
from qflow.storage.log.lane import Lane
from qflow.storage.log.placing import check_there
from qflow.storage.log.rows import Settled
from qflow.storage.log.settling import Settling
from qflow.storage.log.table import LAST
from qflow.storage.log.timing import Timers
from qflow.storage.log.writer import BeingCopied, Writer

__all__ = ["MOST_STANDING", "Lane", "Party", "Put", "Request", "TransactionLog", "Unit"]
MOST_STANDING = 2048
"""Requests of 0.4 KB that stand before the writer at most while acks that nobody waits for go on."""
PASS_S = 0.00005
"""So long others are let pass: about what a thread takes to wake up."""


class TransactionLog:
    """The log of one spool. Thread-safe."""

    def __init__(
        self, env: Environment, clock: Callable[[], float] = time.time, confirming: Confirming | None = None
    ) -> None:
        """`confirming`: None commits each batch."""
        self._env = env
        self._reading = threading.Lock()  # held by readers, and to grow the map, which needs no reader
        self._closed = False
        with env.reading() as txn:
            shares, left = bodies.any_stored(txn), bodies.noted_ahead(txn)
        confirming = confirming or Confirming(env, None, None, NO_JOURNAL)
        self.timers: Timers = confirming.timers
        """How long commits and syncs took."""
        self._writer = Writer(env, confirming, clock, self._reading, shares, left)
        self._handing = self._writer.handing
        self.turn: Direct = self._handing.turn
        """What stands alone takes it in place of `requests`, under the lock of its queue, and is waited for then."""
        self.requests: Any = self._handing.requests
        """Where who may call nothing hands a request over: `check_usable` before, and it is `handed_over` after."""
        self._refuse: Callable[[], NoReturn] | None = None
        """In a forked child: raises ForkedProcess."""

    # Handing over ----------------------------------------------------------------------------------------------------

    def put(self, put: Put, soon: bool = True) -> Put:
        """Hand messages over; look at their `error` when they are done. Without `soon`, call `now` next."""
        self._handing.hand_over(put, soon)
        return put

    def join(self, unit: Unit, soon: bool = True, *, alone: bool = False) -> Unit:
        """Hand a unit over; look at its `error` when it is done. Without `soon`, call `now` next.

        `alone`: nothing strikes the calling thread here, which waits for it next: it may confirm it by itself.
        """
        if alone and self._handing.takes_turn(unit):
            self._writer.confirm(unit)
        else:
            self._handing.hand_over(unit, soon)
        return unit

    def settle(self, lane: Lane, ranges: list[Settled]) -> Request:
        """Have ranges settled."""
        return self._hand_over(Settling([(lane, ranges)]))

    def settle_all(self, parts: list[tuple[Lane, list[Settled]]]) -> Request:
        """Have ranges of several lanes settled, all in one commit."""
        return self._hand_over(Settling(parts))

    def collect(self, bring: Callable[[], Iterable[tuple[Lane, Settled]]]) -> Request:
        """Have ranges settled that the writer asks for when it makes a batch; it must wait for nobody there."""

        def add(batch: Any) -> None:
            for lane, part in bring():
                batch.settle(lane, [part])

        return self._order(add)

    def attempts(self, lane: Lane, ranges: list[tuple[int, int, int]]) -> Request:
        """Note how often messages were delivered before: (first, end, number), in place of what was known of them.

        What is settled by then is left out. It is a matter of the reserve, as settling is.
        """

        def add(batch: Any) -> None:
            batch.attempts.setdefault(lane, []).extend(ranges)

        order = Order(add)
        order.ranges = len(ranges)
        return self._hand_over(order)

    def purge(self, lanes: Iterable[Lane]) -> Request:
        """Settle everything of some lanes that is committed when this is."""
        wanted = set(lanes)
        return self._hand_over(Order(lambda batch: batch.purges.update(wanted), after=wanted))

    def write(self, write: Callable[[Any], Any], lanes: Iterable[Lane] = ()) -> Request:
        """Run a function inside a transaction; it may run twice, if the first one fails.

        The rows of `lanes` are written after it, as the function left them. It writes a few small records: for more,
        see `Unit.size`.
        """
        touched = list(lanes)

        def add(batch: Any) -> None:
            batch.writes.append(write)
            for lane in touched:
                batch.settled.setdefault(lane, [])

        return self._order(add)

    def quarantine(self, keys: list[bytes]) -> Request:
        """Keep damaged blocks apart, as they are."""
        return self._order(lambda batch: batch.damaged.extend(keys))

    def hollow(self, lane: Lane) -> Request:
        """Give back a bounded part of what is settled above a lane's floor, if the disk has room for that."""
        return self._order(lambda batch: batch.hollows.append(lane))

    def delete(self, *owners: int) -> Request:
        """Remove a bounded part of what deleted queues left, in this order; see `Batch.deleted`."""
        return self._hand_over(Order(lambda batch: batch.deletes.extend(owners), after=None))

    def forget(self, lanes: Iterable[Lane]) -> None:
        """Keep no room for settling what lanes hold that were deleted."""
        self._writer.forget(sum(lane.row.messages for lane in lanes))

    def _order(self, add: Callable[[Any], object]) -> Request:
        return self._hand_over(Order(add))

    def _hand_over(self, request: Request) -> Request:
        self._handing.hand_over(request)
        return request

    def handed_over(self, request: Request, *, urgent: bool | None = False) -> None:
        """Have what stands in `requests` written; at once, if it is urgent; if that is None, by a call of `now`.

        Raises:
            BrokerFailed, BrokerClosed: it came too late; it is not `joined` any more.
        """
        self._handing.handed_over(request, urgent=urgent)

    def look_after(self) -> None:
        """Have written what a caller handed over that was interrupted at just that. Now and then, by maintenance."""
        self._handing.look_after()

    def interrupted(self, request: Request) -> None:
        """Have a request written that may stand in `requests`, or have the `turn`: its thread was interrupted."""
        self.turn.leave(request)
        self._handing.rouse()

    def check_usable(self) -> None:
        """Refuse what could not be handed over. Raises BrokerFailed, BrokerClosed."""
        self._handing.check_usable()

    def check_there(self) -> None:
        """Check that what is written will be found again. Cost: 1 µs. Raises Removed: it will not."""
        check_there(self._env)

    # Facts -----------------------------------------------------------------------------------------------------------

    def keep_facts(self, room: str, values: Mapping[str, bytes | None]) -> None:
        """Keep records that are not the engine's own, each in the place of the one before; None forgets one.

        All in one commit, or none; returns when they are synced. Whoever is interrupted does not know which.

        Args:
            room: whose they are: a name of 1 to 64 bytes. Keys take 16 KiB at the most, values 1 MiB.

        Raises:
            InvalidArgument: one is too large.
            DiskFull: there is no room for them; to forget a few at a time needs none.
            BrokerClosed, BrokerFailed: nothing is written any more.
        Cost: one commit, shared with others; 3 µs for each record.
        """
        kept = Facts({room: dict(values)})
        if values:
            self.commit(self.join_facts(kept))

    def join_facts(self, kept: Facts, soon: bool = True) -> Unit:
        """Hand records over, all for one commit; `soon` as in `join`. Raises: as `keep_facts`, but `InvalidArgument`.

        Of records under one key, the one handed over last stays.
        """
        return self.join(Unit(writes=[kept.write], size=kept.size, values=kept.values), soon)

    def join_forgetting(self, room: str, values: Mapping[str, bytes], soon: bool = True) -> Unit:
        """Forget records, all in one commit, that still have these values then. Raises: as `join_facts`."""
        forget = partial(facts.forget_unchanged, room=room, facts=dict(values))
        return self.join(Unit(writes=[forget], values=len(values)), soon)

    def facts(self, room: str, report: Callable[[str], object] | None = None) -> dict[str, bytes]:
        """Return what `keep_facts` keeps in a room, by key.

        Args:
            report: told in words of each that is damaged; those are left out.

        Raises:
            CorruptionError: one is damaged, and there is no `report`.
        Cost: 3 µs for each record.
        """
        with self.read() as txn:
            return facts.read(txn, room, report)

    def fact(self, room: str, key: str) -> bytes | None:
        """Return what `keep_facts` keeps under a key of a room, or None. Raises CorruptionError. Cost: 8 µs."""
        with self.read() as txn:
            return facts.get(txn, room, key)

    def facts_page(
        self,
        room: str,
        prefix: str = "",
        position: bytes = b"",
        *,
        most: int = PAGE_FACTS,
        wanted: Callable[[str], bool | str] | None = None,
        report: Callable[[str], object] | None = None,
    ) -> Page:
        """Return some facts of a room, in the order of their keys; see `facts.page`."""
        with self.read() as txn:
            return facts.page(txn, room, prefix, position, most=most, wanted=wanted, report=report)

    # Waiting ---------------------------------------------------------------------------------------------------------

    def wait(self, request: Request) -> None:
        """Return when a request is done; its `error` says what became of it."""
        if request.done:
            return
        writer, turn = self._writer, self.turn
        try:
            self.check_can_wait()
            if turn.request is request:
                if not turn.abandoned:  # else the writer has been asked to
                    turn.confirm(request)
            elif turn.request is not None:
                turn.leave_mine()
            if not (request.done or request.rung):
                request.rung = True
                self._handing.now()
            while not request.done:
                gate = writer.gate  # first: if it has joined no batch after this, it is in this one, or in one before
                batch = request.batch
                gate = gate if batch is None else batch.gate
                if gate.taken:
                    gate.release()
                elif self._refuse is not None:
                    self._refuse()
        except BaseException:
            turn.leave(request)
            raise

    def commit(self, request: Request) -> None:
        """Wait for a request that is the caller's own work, and raise what became of it."""
        self.wait(request)
        if request.error is not None:
            raise request.error

    def now(self, _: object = None) -> None:
        """Have what was handed over written at once."""
        self._handing.now()

    def tell(self, request: Request, told: Callable[[], object]) -> None:
        """Have something called when a request is done, at once if it is: by the writer, perhaps twice.

        It must be quick, and is no callback of a user.
        """
        request.told = told
        if request.done:
            told()

    @property
    def crowded(self) -> bool:
        """Who hands over what nobody waits for is to wait, for the memory that all of that takes."""
        return len(self._writer.requests) > MOST_STANDING

    def drain(self) -> None:
        """Return when everything that was handed over so far is done, also what a thread has begun that is away."""
        request = self.turn.request
        if request is not None:
            self.turn.leave(request)
            request = None
        with suppress(BrokerFailed, BrokerClosed):  # nothing is on its way then
            request = self._hand_over(Order(lambda batch: None, after=None))
        if request is not None:
            self.wait(request)

    def alone(self, work: Work) -> None:
        """Do something between two batches, when all before are done; those after it wait.

        What is begun is done, even if its caller is interrupted.
        """
        while True:
            with self._writer.copying:
                pass  # commits must not wait for whoever copies
            request = self._hand_over(Order(lambda batch: None, work, after=None))
            self.wait(request)
            if request.error is None:
                return
            if not isinstance(request.error, BeingCopied):
                raise request.error

    def check_can_wait(self) -> None:
        """Refuse to wait where nobody would write meanwhile: in a finalizer, or at the end of the interpreter."""
        if sys.is_finalizing():
            raise BrokerClosed(f"the log {self._env.path} is closed: the interpreter is ending")
        if self._writer.is_me:
            raise Reentered(
                f"a finalizer, or a handler of logging, was run by the thread that writes {self._env.path}, and cannot "
                "wait for it: have it only note what is to be done, and do that in another thread"
            )

    # Reading -----------------------------------------------------------------------------------------------------

    @contextmanager
    def read(self, *, buffers: bool = False) -> Iterator[Any]:
        """A short read transaction; with `buffers`, its values are views of the map that end with it."""
        self._apply()
        with self._reading:
            if self._closed:
                raise BrokerClosed(f"the log {self._env.path} is closed: open the spool again")
            try:
                txn = self._env.begin(buffers=buffers)
                try:
                    yield txn
                finally:
                    txn.abort()
            except BROKEN as error:
                raise log_error(error, self._env.path, "read") from error

    def _apply(self) -> None:
        """Return when everything is in the log that was confirmed so far, or is visible, which comes before.

        Raises:
            BrokerFailed, BrokerClosed: it does not get there.
        """

        def add(batch: Any) -> None:
            batch.applies = True

        while self.turn.request is not None or self._writer.held_back:  # it is counted before it has left
            request = self._order(add)
            self.wait(request)
            if request.error is None:
                return  # else it may be that of another request in its batch

    @contextmanager
    def copying(self) -> Iterator[Environment]:
        """The environment, to copy it while commits and reads go on: all that joined a batch by now is committed.

        Where the disk is or was full, the map may end with the file. It ends later first: for that it must not be read.
        """
        with self._writer.still_map():
            self.alone(self._writer.make_map_long)
            self._apply()
            with self._writer.copying:
                self._handing.check_usable()
                yield self._env

    def forget_dead_readers(self) -> None:
        """Let go of what other processes were reading when they were killed; their pages could not be used again."""
        with self._reading:
            if not self._closed:
                self._env.forget_dead_readers()

    def problems(self) -> list[str]:
        """Return, in words, where shared bodies and the references to them differ, and which facts are damaged."""
        with self.read() as txn:
            counted, _ = removal.count_references(txn, b"", LAST)
            return [*bodies.problems(txn, counted), *facts.problems(txn)]

    # Ending ----------------------------------------------------------------------------------------------------------

    @property
    def commits(self) -> int:
        """Batches that were committed."""
        return self._writer.commits

    @property
    def held_back(self) -> int:
        """Batches that are confirmed and that a reader of the log would not see."""
        return self._writer.held_back

    @property
    def failed(self) -> bool:
        return self._handing.failure is not None

    @property
    def busy(self) -> bool:
        """Something was handed over and is not done."""
        return self._writer.busy

    def let_pass(self) -> None:
        """Let threads that are at the log have the interpreter, if there are any: for what computes long, in its steps.

        They need it again after each sync and each wait, and a thread that computes lets go of it after 5 ms.
        Cost: 0.3 µs where there are none, else 0.1 ms.
        """
        if self.busy:
            time.sleep(PASS_S)

    def disown(self, stub: Any) -> None:
        """In a forked child: a signal handler may have forked in the middle of a call, which goes on in both.

        What is read there would be read in the parent's place among the readers, which the parent loses by that.
        """
        refuse = self._refuse = stub.__enter__
        self._reading = stub
        self.turn.disown()
        self._handing.now = refuse  # type: ignore[method-assign]

    def close(self) -> None:
        """Write what was handed over, stop the writer and close the environment, also where that is interrupted."""
        try:
            self._writer.end()
        finally:
            self._closed = True
            with self._writer.copying, self._reading:
                self._env.close()
