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

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from qflow.errors import BrokerClosed, BrokerFailed, InDoubt, QflowError, StorageError
from qflow.storage.environment import BROKEN, Environment, log_error
from qflow.storage.log.ahead import Ahead
from qflow.storage.log.batch import Batch, Order, Request, Work
from qflow.storage.log.batch_writing import BatchWriting
from qflow.storage.log.committing import Committing, conclude
from qflow.storage.log.confirming import SOON_S, Confirming
from qflow.storage.log.futures import Teller, mark_done

_logger = logging.getLogger("qflow")

Clock = Callable[[], float]
BATCH_BYTES = 8 * 2**20
"""A batch admits no more from different callers."""
FLUSH_S = 0.003
"""How long requests that nobody waits for wait for others to share their commit."""
GATHER_S = 0.0005
"""Whoever a batch let go of mostly comes again at once: so long the next one waits for all of them, or they would take
turns, in twice as many commits. About as long as a commit takes."""
IMPATIENT_BATCHES = 16
"""So many batches wait for nobody after one has waited in vain."""
IDLE_S = 1.0
"""After so long with nothing to write, what is done when there is time."""
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
        self.requests: deque[Request] = deque()
        self._asleep = _closed()
        """Held while nobody asked for a batch; not a queue, see `Alarm`."""
        self._told = self._urgent = False
        """Somebody asks for a batch, or has; and for one at once."""
        self._goal = 0
        """A batch is asked for at once by who makes that many requests of those that stand before the writer."""
        self._impatient = 0
        """Batches to come that wait for nobody."""
        self._working = False
        """Requests were taken that are not done."""
        self.gate = _closed()
        """Of the batch that is gathered next."""
        self._done: list[threading.Lock] = []
        """Gates of batches that are done: opened as the last thing before this thread waits itself."""
        self._waiting = 0
        """Threads that wait at those."""
        self._again: Batch | None = None
        """What is to be tried again of a batch that failed."""
        self._teller = Teller(env.path)
        self._ending = self._ended = False
        self._over = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="qflow-writer", daemon=True)
        self._thread.start()

    # Called by any thread -------------------------------------------------------------------------------------------

    def hand_over(self, request: Request, soon: bool = True) -> None:
        """Take a request: it will be done within milliseconds, or told why not, whatever becomes of its caller.

        Args:
            soon: False for a caller who calls `now` when others had their turn to hand over, too.

        Raises:
            BrokerFailed, BrokerClosed: the log takes nothing any more; it was not handed over.
        """
        self.check_usable()
        one, wake = (request,), self._asleep.release
        # From here until it is woken no call returns and nothing jumps back: an interrupt comes before that or after.
        request.joined = True
        self.requests += one
        if soon and not self._told:
            self._told = True
            try:  # noqa: SIM105  that would be a call
                wake()
            except RuntimeError:  # it is awake
                pass
        self._check_ended(request)

    def handed_over(self, request: Request, *, urgent: bool | None) -> None:
        """After a caller has appended a request by itself, under a lock: have it written. Raises as `hand_over`.

        Args:
            urgent: None for a caller who calls `now` when others had their turn to hand over, too.
        """
        if urgent:
            request.rung = True
            self.now()
        elif urgent is not None:
            self.rouse()
        self._check_ended(request)

    def rouse(self) -> None:
        """Have what was handed over written within milliseconds. Cost: nothing if the writer knows."""
        if not self._told:
            self._told = True
            try:  # noqa: SIM105  that would be a call
                self._asleep.release()
            except RuntimeError:  # it is awake
                pass

    def look_after(self) -> None:
        """Have written what has stood there since the last call: its caller was interrupted, and told nobody."""
        try:
            first = self.requests[0]
        except IndexError:
            return
        if first.stood:
            self.rouse()
        first.stood = True

    def _check_ended(self, request: Request) -> None:
        """Take a request back that came too late."""
        if self._ended:
            with suppress(ValueError):  # the writer has it, and refuses it
                self.requests.remove(request)
                request.joined = False
                raise self._refusal()

    def forget(self, messages: int) -> None:
        """Keep no room for settling so many messages: they were deleted."""
        self._writing.gone.append(messages)

    def now(self) -> None:
        """Have what was handed over written at once. An interrupt comes before it or after."""
        if not self._urgent and len(self.requests) >= self._goal:
            self._urgent = True
            try:  # noqa: SIM105  that would be a call
                self._asleep.release()
            except RuntimeError:  # it is awake
                pass

    @property
    def commits(self) -> int:
        """Batches that were committed, and parts of some."""
        return self._committing.commits

    @property
    def held_back(self) -> int:
        """Batches that are confirmed and that a reader of the log would not see."""
        return self._confirming.pending

    @property
    def busy(self) -> bool:
        """Something was handed over and is not done."""
        return self._has_more or self._working or self._again is not None

    @property
    def is_me(self) -> bool:
        """The calling thread is the writer: it cannot wait for itself."""
        return threading.get_ident() == self._thread.ident

    def check_usable(self) -> None:
        """Refuse what could not be written any more."""
        if self.failure is not None or self._ended:
            raise self._refusal()

    def _refusal(self) -> QflowError:
        if self.failure is not None:
            return BrokerFailed(f"the log failed earlier ({self.failure}); close the broker and open the spool again")
        return BrokerClosed(f"the log {self._env.path} is closed: open the spool again")

    def end(self) -> None:
        """Write what was handed over, and stop; what comes later is refused. The thread has ended, whatever is raised.

        A user's callback of a future may call this; all others have run when it returns.
        """
        self._ending = True
        self._goal = 0  # after that, so that the writer sees one of both before it waits
        self.now()
        interrupt: BaseException | None = None
        while not self._over.is_set():  # a `join` that is interrupted takes the thread for ended (Python 3.11)
            try:
                self._over.wait()
            except BaseException as error:  # whoever closes lets go of the spool next: nobody may be writing then
                interrupt = error
        if interrupt is not None:
            raise interrupt
        self._teller.end()

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
            self._keep_last()
        except BaseException as error:  # a fault of ours: nobody may wait for ever, and nothing may be promised
            _logger.exception("the writer of %s ended", self._env.path)
            self.failure = self.failure or error
        finally:
            self._ended = True  # who hands over after this takes it back
            try:
                self._confirming.close(failed=self.failure is not None)
                self._refuse_rest()
            finally:
                self._open_gates()
                self._over.set()

    @property
    def _has_more(self) -> bool:
        """Something is to be written that need not be waited for."""
        ahead = self._ahead
        return bool(self.requests) or (ahead.is_active and (ahead.is_busy or bool(ahead.behind)))

    def _wait_for_work(self) -> None:
        """Return when a batch is to be written."""
        wait = self._asleep.acquire
        if self._done:
            self._let_go()
        # More than a batch holds, or what came meanwhile, follows at once.
        if not (self._has_more or self._ending) and self._is_woken() and not (self._urgent or self._ending):
            wait(timeout=FLUSH_S)
        wait(blocking=False)
        self._told = self._urgent = False  # who hands over from here on wakes it again

    def _is_woken(self) -> bool:
        """Wait until somebody wakes this thread: True; or until something is due that is to be tried again."""
        wait = self._asleep.acquire
        if self._again is not None or (self._ahead.stuck and self.failure is None):
            return wait(timeout=RETRY_S)
        if self.held_back and wait(timeout=SOON_S):
            return True
        self._apply()
        if not wait(timeout=IDLE_S):
            self._keep_last()
            wait()
        return True

    def _apply(self) -> None:
        """Have in the log what the journal holds for it; if that fails, nothing more is promised."""
        if self.failure is None:
            with suppress(Exception):  # it was told
                self._committing.apply()

    def _keep_last(self) -> None:
        """Have a copy of the last commit beside the log, unless nobody knows which that is."""
        if self.failure is None:
            self._env.keep_last()

    def _let_go(self) -> None:
        """Open the gate of the last batch; wait a little for those who come out, if there are others to share with."""
        goal = self._waiting + len(self.requests)
        gathers = self._waiting and goal > 1 and not self._impatient
        if gathers:
            self._asleep.acquire(blocking=False)
            self._goal = goal
            self._told, self._urgent = True, False  # from here on nobody wakes this thread but who completes them
        self._open_gates()  # whoever wakes up needs the interpreter, which this thread holds until it waits
        if gathers:
            if not self._ending and not self._asleep.acquire(timeout=GATHER_S):
                self._impatient = IMPATIENT_BATCHES
            self._goal = 0
            self._told = self._urgent = False  # before it is looked whether there are any
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
        batch = Batch()
        batch.gate = self.gate if part is None else _closed()
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
                    self.gate = _closed()  # after they joined; see `TransactionLog.wait`
            if self.failure is not None:
                batch.error = self._refusal()
            elif (work := _alone(batch.requests)) is not None:
                self._work_alone(batch, work)
            elif batch.is_empty:
                if batch.applies:
                    self._committing.apply()
                batch.committed = True
            else:
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
        self.failure = error

    def _fail(self, batch: Batch, error: BaseException) -> None:
        """Note why a batch was not written, or may not have been; what nobody waits for is tried again."""
        batch.error = error
        if batch.committing:
            self.failure = error
            batch.error = InDoubt(
                f"a commit failed ({error}): whether it holds is known when {self._env.path} is opened again"
            )
        elif isinstance(error, BROKEN):
            batch.error = log_error(error, self._env.path, "written")
        if self.failure is None and batch.is_settling:
            self._again = batch.rest()

    def _work_alone(self, batch: Batch, work: Work) -> None:
        self._committing.apply()
        if not self.copying.acquire(blocking=False):
            batch.error = BeingCopied(f"the log {self._env.path} is being copied: try again after that")
            return
        try:
            work(self._env, self._reading)
            batch.committed = True
        except BaseException as error:
            if not self._env.in_place:
                self.failure = error
            raise
        finally:
            self.copying.release()

    # After the commit ------------------------------------------------------------------------------------------------

    def _finish(self, batch: Batch) -> None:
        """Publish what was committed, refuse what was not, and tell everybody whose request it held."""
        try:
            conclude(batch, self._env)
        except BaseException as error:  # a fault of ours: what is in memory is not what is in the log
            _logger.exception("%s: what became of a batch could not be told", self._env.path)
            self.failure = self.failure or error
            if batch.committed:
                batch.error = InDoubt(
                    f"a commit could not be published ({error}): what it holds is there when {self._env.path} is "
                    "opened again"
                )
        finally:
            self._waiting += mark_done(batch)
            self._done.append(batch.gate)
            self._working = False
            self._teller.tell(batch)
            batch.let_go()

    def _refuse_rest(self) -> None:
        """Refuse what was handed over too late."""
        batch = Batch()
        batch.gate = self.gate
        batch.error = self._refusal()
        batch.requests.extend(self._ahead.give_up())
        with suppress(IndexError):  # its caller has taken it back
            while self.requests:
                batch.requests.append(self.requests.popleft())
        self._finish(batch)


def _closed() -> threading.Lock:
    gate = threading.Lock()
    gate.acquire()
    return gate


def _alone(requests: Sequence[Request]) -> Work | None:
    """Return what is done in place of a batch, if that is what the first of these asks for."""
    first = requests[0] if requests else None
    return first.alone if isinstance(first, Order) else None
