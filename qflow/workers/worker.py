"""What a worker process does: get a message, call the function, settle the message.

One message at a time: one that waited in a process behind another would be counted as delivered when that other kills
the process. The main thread works, and looks between two messages whether stdin has ended.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from qflow import inspect
from qflow.callbacks import check_ran, is_async
from qflow.config import is_url, parse_span
from qflow.deliveries import Deliveries
from qflow.delivery import Delivery, Settler, reason_of
from qflow.descriptors import occupy_standard
from qflow.durations import Duration
from qflow.errors import (
    AlreadySettled,
    BrokerClosed,
    FormatTooNew,
    NotFound,
    PermissionDenied,
    QflowError,
    StorageError,
)
from qflow.takers import cut_name
from qflow.workers import ending
from qflow.workers.coming import coming_by
from qflow.workers.desk import Slot, slots_in
from qflow.workers.job import AWAY, FAILED, READY, REFUSED, Job, Order, report
from qflow.workers.targets import Function, load

if TYPE_CHECKING:
    import asyncio

PATIENCE_S = 0.5
"""How long a worker waits for a message before it looks whether it is to end."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
"""Between two looks for an owner of the spool."""
OPENING_S = 60.0
"""An owner has a door within that, or lets nobody in."""
LONGEST_DELAY_S = 3600.0
"""A message that fails waits no longer for its next try, unless it is to wait longer for the first."""
FRESH_S = 0.05
"""Settings of the queue that were read so shortly before a message is begun are not read again for it."""
REFUSED_CODE = 2
_LOOK_S = 0.1

Report = Callable[[str, str], None]


class Held(Delivery):
    """The message at hand."""

    __slots__ = ("_slot",)

    def __init__(self, batch: Deliveries, slot: Slot) -> None:
        """Of a batch of one."""
        one = batch[0]
        self.settler: Settler = one.settler
        self.sequence, self.record, self.marks = one.sequence, one.record, one.marks
        self._slot = slot

    def extend(self, seconds: Duration) -> None:
        """Hold the message for so many seconds from now, if its lease would end earlier: no process is killed before.

        Raises:
            AlreadySettled: it was settled, or went back, before.
        """
        span = parse_span(seconds, "seconds")
        super().extend(span)
        self._slot.extend(time.monotonic() + span)


class Lease:
    """How long a message may be held, as the settings of its queue say when it is begun.

    Args:
        asked_s: what is asked for beside them; None = what they say.
    """

    def __init__(self, queue: Any, asked_s: float | None) -> None:
        self._queue = queue
        self._asked_s = asked_s
        self._read_at = -math.inf
        self.seconds = math.inf
        self._is_longer = False
        """Than the queue says."""

    def look(self) -> None:
        """Read the settings, unless that was just now. Cost: a round trip."""
        if time.monotonic() - self._read_at < FRESH_S:
            return
        self._read_at = time.monotonic()
        ack_timeout_s: float | None = self._queue.settings.ack_timeout_s
        ends_s = math.inf if ack_timeout_s is None else ack_timeout_s
        self.seconds = self._asked_s or ends_s
        self._is_longer = self.seconds > ends_s

    def covers(self, delivery: Held) -> bool:
        """Have the owner hold a message for so long, if it would not; False: it went back meanwhile."""
        try:
            if self._is_longer:
                delivery.extend(self.seconds)
        except AlreadySettled:
            return False
        return True


class Worker:
    """See the module.

    Args:
        connect: returns the broker of a spool.
        report: tells the supervisor something; a kind and a text.
        slot: where it shows what it has at hand.
        is_told: tells whether the supervisor wants it to end.
    """

    def __init__(
        self, job: Job, *, connect: Callable[[str], Any], report: Report, slot: Slot, is_told: Callable[[], bool]
    ) -> None:
        self._job = job
        self._connect = connect
        self._report = report
        self._slot = slot
        self._is_told = is_told
        self._function: Function | None = None
        self._wait: Callable[[Callable[[], Any]], Any] = lambda work: work()
        """Returns what a function returns that waits for a message."""
        self._runner: asyncio.Runner | None = None
        self._has_worked = False
        self._shut_since = math.inf
        """When it was first seen that there is an owner without a door, on the monotonic clock."""
        self.stop = False
        """It finishes what is at hand, and ends. Set by signals."""

    @property
    def _stops(self) -> bool:
        return self.stop or self._is_told()

    def run(self) -> int:
        """Work until it is told to stop; return the exit code."""
        try:
            function = ending.in_one_process(load)(self._job.target)
        except QflowError as error:
            return self._refuse(error)
        self._function = ending.in_one_process(self._awaited(function) if is_async(function) else function)
        return self._serve()

    def _awaited(self, function: Function) -> Function:
        """Begin the event loop of an async function; return a function that calls it there."""
        import asyncio
        from concurrent.futures import ThreadPoolExecutor

        from qflow.workers.tasks import awaited, beside

        self._runner = asyncio.Runner()
        os.register_at_fork(after_in_child=self._runner.get_loop().stop)
        self._wait = ending.in_one_process(partial(beside, runner=self._runner, thread=ThreadPoolExecutor(1)))
        return awaited(function, self._runner)

    def close(self) -> None:
        """Cancel tasks that an async function has left, and wait for its threads."""
        if self._runner is not None:
            self._runner.close()

    def _serve(self) -> int:
        pause_s = FIRST_PAUSE_S
        while not self._stops:
            broker: Any = None
            try:
                with self._connect(self._job.spool) as broker:
                    queue = broker.queue(self._job.queue)
                    self._report(READY, "")
                    self._has_worked, pause_s = True, FIRST_PAUSE_S
                    with coming_by(broker):
                        self._work(queue)
            except QflowError as error:
                if not (self._has_worked or self._is_away(error, broker is None)):
                    return self._refuse(error)
                if not self._stops:
                    self._report(AWAY, str(error))
                self._rest(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return 0

    def _is_away(self, error: QflowError, has_no_door: bool) -> bool:
        """Tell whether the owner, whom the supervisor has seen, is perhaps being started again."""
        if isinstance(error, BrokerClosed):
            return True
        if not has_no_door or isinstance(error, PermissionDenied | FormatTooNew):
            return False
        if not isinstance(error, NotFound | StorageError):
            return False
        if is_url(self._job.spool) or inspect.owner_of(self._job.spool) is None:
            self._shut_since = math.inf
            return True
        now = time.monotonic()
        self._shut_since = min(self._shut_since, now)  # it is opening the spool; or it lets nobody in, for good
        return now - self._shut_since < OPENING_S

    def _refuse(self, error: QflowError) -> int:
        self._report(REFUSED, str(error))
        return REFUSED_CODE

    def _rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stops and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_S))

    def _work(self, queue: Any) -> None:
        """Work until it is told to stop, or the queue's broker is gone."""
        lease = Lease(queue, self._job.lease_s)
        get = partial(queue.get_many, 1, PATIENCE_S, consumer=cut_name(f"worker {self._job.target}"))

        def take() -> Deliveries:
            batch: Deliveries = get()
            if batch:
                lease.look()
            return batch

        while not self._stops:
            batch = self._wait(take)
            if batch:
                delivery = Held(batch, self._slot)
                with self._at_hand(delivery, time.monotonic() + lease.seconds):
                    leaves = self._handle(delivery) if lease.covers(delivery) else None
                if leaves is not None:
                    raise leaves
        len(queue)  # what was sent before has arrived when this is answered

    @contextmanager
    def _at_hand(self, delivery: Held, deadline: float) -> Iterator[None]:
        failed = True
        self._slot.begin(delivery.sequence, deadline)
        try:
            yield
            failed = False
        finally:
            self._slot.end(failed=failed)

    def _handle(self, delivery: Held) -> BaseException | None:
        """Call the function, and settle the message; return by what the function ends the process after it did so."""
        assert self._function is not None
        try:
            check_ran(self._function(delivery))
        except BaseException as error:
            is_settled = self._failed(delivery, error)
            if isinstance(error, Exception):
                return None
            if is_settled:
                return error
            raise
        with suppress(AlreadySettled):  # by the function, or its lease has ended
            delivery.ack()
        return None

    def _failed(self, delivery: Held, error: BaseException) -> bool:
        """Give the message back, to come later each time, and say what went wrong; tell whether it was settled."""
        count, reason = delivery.delivery_count, reason_of(error)
        what = f"message {delivery.sequence} of queue {self._job.queue!r} failed at delivery {count}"
        trace = "".join(traceback.format_exception(error))
        first_s = self._job.retry_delay_s
        delay_s = min(first_s * 2.0 ** min(count - 1, 60), max(first_s, LONGEST_DELAY_S))
        is_settled = False
        try:
            delivery.nack(delay_s=delay_s, reason=reason)
        except AlreadySettled:
            is_settled = True
        finally:
            if not (is_settled and isinstance(error, SystemExit)):
                self._tell(what, trace, reason)
        return is_settled

    def _tell(self, what: str, trace: str, reason: str) -> None:
        try:
            sys.stderr.write(f"qflow: {what}:\n{trace}")
            sys.stderr.flush()
        except Exception:  # the function has closed it, or who reads it is gone
            with suppress(OSError):
                self._report(FAILED, f"{what}: {reason}")


def main() -> NoReturn:
    """Work as the line on stdin says, and end."""
    occupy_standard()
    control = _take_stdin()
    order = Order.decode(_read_line(control))
    os.set_inheritable(order.report, False)
    os.set_inheritable(order.desk, False)
    sys.path[:] = order.job.sys_path
    slot = slots_in(order.desk, order.job.processes)[order.seat]
    worker = Worker(
        order.job,
        connect=order.job.reach.connect,
        report=lambda kind, text: report(order.report, kind, text),
        slot=slot,
        is_told=lambda: has_ended(control),
    )
    me = os.getpid()

    def stop(number: int, _: object) -> None:
        if os.getpid() == me:
            worker.stop = True
        else:  # the function has forked, and ends what it has: `Process.terminate`, the end of a pool
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        signal.signal(number, stop)
    threading.Thread(target=_attend, args=(control, slot), name="qflow-worker-control", daemon=True).start()
    with closing(worker), ending.bounded():
        sys.exit(worker.run())


def _take_stdin() -> int:
    """Return a descriptor of what was stdin; whoever reads stdin from now on reads nothing."""
    control = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return control


def _read_line(descriptor: int) -> bytes:
    """Return what comes first, to the end of its line; the writer writes nothing behind that."""
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(descriptor, 65_536)
        if not more:
            raise SystemExit(REFUSED_CODE)  # the supervisor is dead
        line += more
    return line


def has_ended(control: int) -> bool:
    """Tell whether the supervisor has closed its end, or is dead; it writes nothing behind the order."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    return bool(poll.poll(0))


def _attend(control: int, slot: Slot) -> None:
    """Watch what is at hand once stdin has ended: if the supervisor is dead, nobody else does."""
    while os.read(control, 1):
        pass
    idle_since = time.monotonic()
    while True:
        time.sleep(_LOOK_S)
        deadline, now = slot.read().deadline, time.monotonic()
        if deadline:
            idle_since = now
        if 0 < deadline < now - 1 or now - idle_since > ending.LONGEST_END_S + 1:
            os._exit(1)
