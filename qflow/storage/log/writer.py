"""The writer: one thread that writes, commits and publishes what callers hand over. Group commit.

Callers put requests into a queue and wait at a gate, one for each batch. The writer gathers requests into a batch,
assigns sequences, writes one transaction, syncs once, publishes to the queues in that order, and opens the gate. Who
passes it opens it for the next: were all woken together, they would wait once more, for the interpreter. No other
thread begins a transaction that writes, and what is committed is changed by the writer alone.

Python runs signal handlers in the main thread, and this is another one: no handler can strike a commit, and one that
uses the broker hands over like anybody else. Callbacks of users never run here: see `futures`.

    what is raised               becomes
    before the commit            an error of the batch: its callers are told, nothing of it was done, the next one works
    in the commit                `InDoubt`: it may be on the disk; the log takes nothing more until it is opened again
    by a queue or a party        as in the commit, if there was one; everybody else is told as if it had not been

Requests that nobody waits for ride along with the next that somebody does, or are written when they are `FLUSH_S` old.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress

from qflow.errors import InDoubt, StorageError, said_by
from qflow.loggers import get_logger
from qflow.starting import start
from qflow.storage.environment import BROKEN, Environment, log_error
from qflow.storage.log.ahead import Ahead
from qflow.storage.log.batch import Batch, Order, Request, Unit, Work
from qflow.storage.log.batch_writing import BatchWriting
from qflow.storage.log.committing import Committing, conclude
from qflow.storage.log.confirming import SOON_S, Confirming
from qflow.storage.log.futures import Teller, mark_done
from qflow.storage.log.gates import Gate
from qflow.storage.log.handing import Handing
from qflow.storage.log.placing import is_in_place

_logger = get_logger("qflow")

Clock = Callable[[], float]
BATCH_BYTES = 8 * 2**20
"""A batch admits no more from different callers."""
FLUSH_S = 0.003
"""How long requests that nobody waits for wait for others to share their commit."""
GATHER_S = 0.0005
"""Whoever a batch let go of mostly comes again at once: so long the next one waits for all of them, or they would take
turns, in twice as many commits. About as long as a commit takes."""
GATHER_EACH_S = 0.00003
"""Or so long for each of them, where that is longer: they come out one after the other."""
IMPATIENT_BATCHES = 16
"""So many batches wait for nobody after one has waited in vain."""
SHORT_S = 0.05
"""Where there is no memory for a batch, it is tried again after so long."""
RETRY_S = 0.5
"""What a full disk refused, and nobody waits for, is tried again after so long, or with the next batch."""


class BeingCopied(StorageError):
    """A snapshot is being made: what needs the log for itself is tried again after it."""


class Writer:
    """See the module. One a log."""

    def __init__(
        self, env: Environment, confirming: Confirming, clock: Clock, reading: threading.Lock, shares: bool, left: range
    ) -> None:
        """`reading`: held by readers, and to grow the map, which needs none; `shares`, `left`: see those who get it."""
        self._env, self._confirming = env, confirming
        self._reading = reading
        self.copying = threading.Lock()
        """Held while the environment is copied, replaced or closed."""
        self._writing = BatchWriting(env, confirming, clock, self.copying, reading, shares)
        self._committing = Committing(env, confirming, self._writing, self._note_failure)
        self._ahead = Ahead(env.join, clock, left)
        self.handing = Handing(env.path, confirming, clock)
        self.requests = self.handing.requests
        self._impatient = 0
        """Batches to come that wait for nobody."""
        self._working = False
        """Requests were taken that are not done."""
        self.gate = Gate()
        """Of the batch that is gathered next."""
        self._done: list[Gate] = []
        """Gates of batches that are done: opened as the last thing before this thread waits itself."""
        self._waiting = 0
        """Threads that wait at those."""
        self._again: Batch | None = None
        """What is to be tried again of a batch that failed."""
        self._teller = Teller(env.path)
        self._ending = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="qflow-writer", daemon=True)
        start(self._thread)

    # Called by any thread -------------------------------------------------------------------------------------------

    def forget(self, messages: int) -> None:
        """Keep no room for settling so many messages: they were deleted."""
        self._writing.gone.append(messages)

    @property
    def commits(self) -> int:
        """Batches that were committed, and parts of some; requests that stood alone."""
        return self._committing.commits + self.handing.turn.confirmed

    @property
    def held_back(self) -> int:
        """Batches that are confirmed and that a reader of the log would not see."""
        return self._confirming.pending

    @property
    def busy(self) -> bool:
        """Something was handed over and is not done."""
        return self._has_more or self._working or self._again is not None or self.handing.turn.request is not None

    def confirm(self, unit: Unit) -> None:
        """Have the calling thread, which nothing strikes, confirm a unit that has the turn; else the writer does."""

        def conclude(batch: Batch) -> None:
            self._conclude(batch)
            mark_done(batch)

        self.handing.turn.confirm_whole(unit, conclude)

    @property
    def is_me(self) -> bool:
        """The calling thread writes, or publishes what it has written: it cannot wait for itself."""
        return threading.get_ident() in (self._thread.ident, self.handing.turn.concludes)

    def end(self) -> None:
        """Write what was handed over, and stop; what comes later is refused. The thread has ended, whatever is raised.

        A user's callback of a future may call this; all others have run when it returns.
        """
        self._ending = True
        self.handing.goal = 0  # after that, so that the writer sees one of both before it waits
        self.handing.now()
        interrupt: BaseException | None = None
        while not self._over.is_set():  # a `join` that is interrupted takes the thread for ended (Python 3.11)
            try:
                self._over.wait()
            except BaseException as error:  # whoever closes lets go of the spool next: nobody may be writing then
                interrupt = error
        if interrupt is not None:
            raise interrupt
        self._teller.end()

    @contextmanager
    def still_map(self) -> Iterator[None]:
        """Have the map end no earlier than it did when this began, until the context ends: see `confine`."""
        mine = object()
        try:
            self._writing.copies.add(mine)
            yield
        finally:
            self._writing.copies.discard(mine)

    # The thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        ahead = self._ahead
        try:
            while not self._ending or self._has_more:
                self._wait_for_work()
                part = ahead.next_part() if ahead.is_active else None
                if part is not None:
                    self._work(part)
                if part is None or self.requests or not ahead.is_busy:
                    self._work()
            self._apply()
        except BaseException as error:  # a fault of ours: nobody may wait for ever, and nothing may be promised
            _logger.exception("the writer of %s ended", self._env.path)
            self.handing.failure = self.handing.failure or error
        finally:
            self.handing.ended = True
            try:
                self._confirming.close(failed=self.handing.failure is not None)
                self._refuse_rest()
            finally:
                try:
                    self._open_gates()
                finally:
                    self._over.set()

    @property
    def _has_more(self) -> bool:
        """Something is to be written that need not be waited for."""
        ahead = self._ahead
        return bool(self.requests) or (ahead.is_active and (ahead.is_busy or bool(ahead.behind)))

    def _wait_for_work(self) -> None:
        """Return when a batch is to be written."""
        handing = self.handing
        wait = handing.asleep.acquire
        if self._done:
            self._let_go()
        follows = self._has_more or self._ending  # more than a batch holds, or what came meanwhile: at once
        self._keep_last()
        if not follows and self._is_woken() and not (handing.urgent or self._ending):
            wait(timeout=FLUSH_S)
        self._take_turn()
        wait(blocking=False)
        handing.told = handing.urgent = False  # who hands over from here on wakes it again

    def _is_woken(self) -> bool:
        """Wait until somebody asks for a batch: True; or until something is due that is to be tried again."""
        handing = self.handing
        wait = handing.asleep.acquire
        if self._again is not None or (self._ahead.stuck and self.handing.failure is None):
            return wait(timeout=RETRY_S)
        self._give_turn()
        while not (handing.told or handing.urgent or self._ending or handing.turn.abandoned):
            held_back = self.held_back
            if not held_back:
                wait()
            elif not wait(timeout=SOON_S) and self._confirming.is_due(held_back):
                self._take_turn()
                self._apply()
                self._give_turn()
        wait(blocking=False)
        return True

    def _give_turn(self) -> None:
        """Let threads confirm by themselves what stands alone, from here on."""
        if self.handing.failure is None and not self._ahead.is_active:
            self.handing.turn.give()

    def _take_turn(self) -> None:
        """Have the turn, and go on with what a thread has left that had it."""
        turn = self.handing.turn
        request = turn.take(self.handing.asleep.acquire)
        if request is None:
            return
        batch, gate = _made()
        batch.gate = gate
        self._working = True
        try:
            if not turn.go_on(batch, request):
                self.requests.appendleft(request)
                self.handing.told = True  # nobody else may: its thread may be away for good
                return
        except BaseException as error:
            self._fail(batch, error)
        batch.requests.append(request)
        request.batch = batch
        self._finish(batch)

    def _apply(self) -> None:
        """Have in the log what the journal holds for it; if that fails, nothing more is promised."""
        if self.handing.failure is None:
            with suppress(Exception):  # it was told
                self._committing.apply()
                self._confirming.note_last()

    def _keep_last(self) -> None:
        """Have a copy of the last commit beside the log, unless nobody knows which that is."""
        if self.handing.failure is None:
            self._confirming.note_last()

    def _let_go(self) -> None:
        """Open the gate of the last batch; wait a little for those who come out, if there are others to share with."""
        handing = self.handing
        goal = self._waiting + len(self.requests)
        gathers = self._waiting and goal > 1 and not self._impatient
        if gathers:
            handing.asleep.acquire(blocking=False)
            handing.goal = goal
            handing.told, handing.urgent = True, False  # from here on nobody wakes this thread but who completes them
        self._open_gates()  # whoever wakes up needs the interpreter, which this thread holds until it waits
        if gathers:
            if not self._ending and not handing.asleep.acquire(timeout=max(GATHER_S, goal * GATHER_EACH_S)):
                self._impatient = IMPATIENT_BATCHES
            handing.goal = 0
            handing.told = handing.urgent = False  # before it is looked whether there are any
        elif self._impatient:
            self._impatient -= 1

    def _open_gates(self) -> None:
        done, self._done, self._waiting = self._done, [], 0
        for gate in done:
            gate.release()

    def _work(self, part: Request | None = None) -> None:
        """Write one batch: of what was handed over, or of a part of what is stored ahead."""
        ahead = self._ahead
        is_over = ahead.is_active and part is None and ahead.is_over
        batch, after = _made()
        batch.gate = self.gate if part is None else after
        self._working = True
        try:
            if part is not None:
                batch.add(part)
            else:
                try:
                    ahead.join(batch) if is_over else self._gather(batch)
                except BaseException:
                    if not batch.requests and self.requests:
                        batch.requests.append(self.requests.popleft())  # else it would be the first again
                    raise
                finally:
                    self.gate = after  # after they joined; see `TransactionLog.wait`
            if self.handing.failure is not None:
                batch.error = self.handing.refusal()
            elif (work := _alone(batch.requests)) is not None:
                self._work_alone(batch, work)
            elif batch.is_empty:
                if batch.applies:
                    self._committing.apply()
                batch.committed = True
            elif ahead.is_active or not self.handing.turn.confirm_alone(batch):
                self._committing.commit(batch)
        except BaseException as error:
            self._fail(batch, error)
        finally:
            self._finish(batch)
            if is_over:
                ahead.end()

    def _gather(self, batch: Batch) -> None:
        """Fill a batch with what was handed over: `BATCH_BYTES` at most, or one larger request, or what works alone."""
        requests, ahead = self.requests, self._ahead
        if (is_busy := ahead.is_active and ahead.is_busy) != ahead.is_active:
            requests.extendleft(ahead.let_go())
        if _alone(requests) is not None and not is_busy:
            batch.add(requests.popleft())
            return
        if self._again is not None:
            batch.try_again(self._again)
            self._again = None
        weight = 0
        for _ in range(len(requests)):  # no more than were there: it would go on while others are as quick
            first = requests[0]
            more = first.weight()
            if ahead.holds_back(first) if is_busy else (more > BATCH_BYTES and not weight and ahead.begin(first)):
                requests.popleft()
                is_busy = True
                continue
            if (weight and weight + more > BATCH_BYTES) or _alone(requests) is not None:
                break
            weight += more
            batch.add(requests.popleft())

    def _note_failure(self, error: BaseException) -> None:
        """Take nothing more: also nothing that was about to take the turn."""
        self.handing.failure = self.handing.failure or error
        self.handing.turn.open = False

    def _fail(self, batch: Batch, error: BaseException) -> None:
        """Note why a batch was not written, or may not have been; what nobody waits for is tried again."""
        batch.error = error
        if batch.committing:
            self.handing.failure = error
            batch.error = InDoubt(
                f"a commit failed ({said_by(error)}): whether it holds is known when {self._env.path} is opened again"
            )
        elif isinstance(error, BROKEN):
            batch.error = log_error(error, self._env.path, "written")
        if self.handing.failure is None and batch.is_settling:
            self._again = batch.rest()
        if batch.applies:
            self._apply()  # who reads waits for that alone, and asks again as long as something is held back

    def make_map_long(self, env: Environment, still: AbstractContextManager[object]) -> None:
        """Have the map end as late as it may. By this thread, alone; waits for readers only if it is to."""
        if not env.ends_early:
            return
        try:
            with still:
                env.grow_map()
        except BaseException as error:  # it may not be mapped at all any more
            self._note_failure(error)
            raise

    def _work_alone(self, batch: Batch, work: Work) -> None:
        self._committing.apply()
        if not self.copying.acquire(blocking=False):
            batch.error = BeingCopied(f"the log {self._env.path} is being copied: try again after that")
            return
        was_in_place = is_in_place(self._env)
        try:
            work(self._env, self._reading)
            self._confirming.is_noted = False
            batch.committed = True
        except BaseException as error:
            self._env.place.follow()
            if was_in_place and not is_in_place(self._env):
                self.handing.failure = error
            raise
        finally:
            self.copying.release()

    # After the commit ------------------------------------------------------------------------------------------------

    def _finish(self, batch: Batch) -> None:
        """Publish what was committed, refuse what was not, and tell everybody whose request it held."""
        try:
            self._conclude(batch)
        finally:
            self._waiting += mark_done(batch)
            self._done.append(batch.gate)
            self._working = False
            self._teller.tell(batch)
            batch.let_go()

    def _conclude(self, batch: Batch) -> None:
        """Publish what was committed, refuse what was not; what is wrong then is noted."""
        try:
            conclude(batch, self._env)
        except BaseException as error:  # a fault of ours: what is in memory is not what is in the log
            _logger.exception("%s: what became of a batch could not be told", self._env.path)
            self._note_failure(error)
            if batch.committed:
                batch.error = InDoubt(
                    f"a commit could not be published ({said_by(error)}): what it holds is there when {self._env.path} "
                    "is opened again"
                )

    def _refuse_rest(self) -> None:
        """Refuse what was handed over too late."""
        batch = Batch()
        batch.gate = self.gate
        batch.error = self.handing.refusal()
        batch.requests.extend(self._ahead.give_up())
        with suppress(IndexError):  # its caller has taken it back
            while self.requests:
                batch.requests.append(self.requests.popleft())
        self._finish(batch)


def _made() -> tuple[Batch, Gate]:
    """Return a batch, and the gate of the one after it, when there is memory for them: nothing has joined it yet."""
    while True:
        try:
            return Batch(), Gate()
        except MemoryError:
            time.sleep(SHORT_S)


def _alone(requests: Sequence[Request]) -> Work | None:
    """Return what is done in place of a batch, if that is what the first of these asks for."""
    first = requests[0] if requests else None
    return first.alone if isinstance(first, Order) else None
