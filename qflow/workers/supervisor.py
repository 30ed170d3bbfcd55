"""Starts worker processes, watches them, and ends them. See `crew` for what it decides.

It owns the spool if nobody does when it begins, until its end. Where another process does, that one stays the owner: if
it dies, the workers wait until there is one again.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Unpack

from qflow.children import check_there
from qflow.config import check_name, is_url, parse_count, parse_span, spool_path
from qflow.descriptors import occupy_standard
from qflow.durations import Duration
from qflow.errors import InvalidArgument, SpoolInUse
from qflow.loggers import get_logger
from qflow.options import BrokerOptions, UrlOptions, WorkOptions
from qflow.serving.notify import READY, STOPPING, notify
from qflow.workers import targets
from qflow.workers.crew import Crew
from qflow.workers.desk import make_descriptor, slots_in
from qflow.workers.job import Job, Reach
from qflow.workers.process import MAIN, Process, bury_orphans

if TYPE_CHECKING:
    from qflow.broker import Broker

TICK_S = 0.1
"""How long a supervisor looks away at most."""
MOST = 10_000
"""Processes of one supervisor."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_logger = get_logger("qflow")


def run(
    spool: str | os.PathLike[str],
    queue: str,
    function: targets.Function | str,
    *,
    processes: int | None = None,
    lease_s: Duration | None = None,
    retry_delay_s: Duration = 1.0,
    stop: threading.Event | None = None,
    **options: Unpack[WorkOptions],
) -> int:
    """Call a function with each message of a queue, in processes of their own, until a signal.

    The function gets a delivery, which has what `qflow.Delivery` has; an async one is awaited, and gets what
    `qflow.aio.AsyncDelivery` has. When it returns, the message is acked; when it
    raises, the message comes back, and the exception's text is the reason of the dead letter it may become. What it
    settled itself is left alone. A process that dies is started again; its message goes to another.

    SIGINT, SIGTERM and SIGHUP, where this is called in the main thread, have each process finish the message at hand;
    the second of them kills those that still work, and their messages go back.

    Args:
        spool: one that exists. If no process owns it, this one does, with `options`; else those are not used. Or the
            URL of a broker on another host, `grpc+tls://HOST:PORT`, to which each process connects: see `connect`.
        function: one that stands in a module or program by itself, or its name: `"module:function"`,
            `"file.py:function"`. Each process imports it; a program needs `if __name__ == "__main__":`.
        processes: how many, 10,000 at most; None = one for each processor that this process may use.
        lease_s: a process that holds a message for longer is killed, unless the function calls `delivery.extend`.
            None = the queue's `ack_timeout_s`; if it has none, for ever.
        retry_delay_s: a message that failed waits so long for its next delivery, twice as long after the next, and so
            on up to an hour; always so long if that is more.
        stop: ends it as a signal does, once it is set.
        options: `token_file`, `ca`, `cert` and `key` for a URL; else what `qflow.open` takes.

    Returns:
        The number of the signal that ended it; 0 if `stop` did.

    Raises:
        InvalidArgument: the function cannot be imported or called, or another argument makes no sense; nothing was
            taken from the queue.
        NotFound: there is no such spool or queue, or qflow was imported from a zip file.
        StorageError, CorruptionError: as `qflow.open`, or `qflow.connect`.
    """
    if stop is not None and not callable(getattr(stop, "is_set", None)):
        raise InvalidArgument(f"stop must have is_set(), as threading.Event has, not {stop!r}")
    unknown = options.keys() - WorkOptions.__annotations__.keys()
    if unknown:
        known = sorted({*(run.__kwdefaults__ or ()), *WorkOptions.__annotations__})
        raise InvalidArgument(f"run has no argument {min(unknown)!r}; there are {', '.join(known)}")
    of_broker: Any = dict(options)
    files = {name: of_broker.pop(name) for name in UrlOptions.__annotations__ if name in of_broker}
    reach = Reach(**{name: _parse_file(file, name) for name, file in files.items() if file is not None})
    sys_path = [one for one in sys.path if isinstance(one, str)]  # an import passes over anything else, too
    job = make_job(spool, queue, function, processes, lease_s, retry_delay_s, reach=reach, sys_path=sys_path)
    return supervise(job, of_broker, tell=_logger.warning, ready=_logger.info, stop=stop)


def make_job(
    spool: str | os.PathLike[str],
    queue: str,
    function: targets.Function | str,
    processes: int | None,
    lease_s: Duration | None,
    retry_delay_s: Duration,
    *,
    reach: Reach,
    sys_path: Sequence[str],
) -> Job:
    """Return what arguments of `run` ask for. Raises InvalidArgument: they make no sense."""
    if not is_url(spool) and reach != Reach():
        raise InvalidArgument(f"a token and certificates are for the URL of a broker, and {os.fspath(spool)!r} is none")
    return Job(
        spool=str(spool) if is_url(spool) else spool_path(spool),
        reach=reach,
        queue=check_name(queue),
        target=targets.of(function),
        processes=len(os.sched_getaffinity(0)) if processes is None else parse_count(processes, "processes", most=MOST),
        lease_s=None if lease_s is None else _parse_lease(lease_s),
        retry_delay_s=parse_span(retry_delay_s, "retry_delay_s"),
        sys_path=tuple(sys_path),
    )


def _parse_file(value: object, what: str) -> str:
    if isinstance(value, str | os.PathLike) and isinstance(path := os.fspath(value), str):
        return os.path.abspath(path)
    raise InvalidArgument(f"{what} must be the path of a file, not {value!r:.80}")


def _parse_lease(value: object) -> float:
    lease_s = parse_span(value, "lease_s")
    if not lease_s:
        raise InvalidArgument("lease_s must be more than 0; None = as long as the queue's ack_timeout_s")
    return lease_s


def supervise(
    job: Job,
    options: BrokerOptions,
    *,
    tell: Callable[[str], None],
    ready: Callable[[str], None],
    stop: threading.Event | None = None,
    alone: bool = False,
) -> int:
    """Do what `run` does; `tell` prints what goes wrong, `ready` that all of them work.

    `alone`: nothing else in this process starts others, so as process 1 it buries orphans.
    """
    check_there(MAIN, "workers need")
    occupy_standard()
    with _Wishes(stop) as wishes, _broker(job, options) as broker:
        descriptor = make_descriptor(job.processes)
        try:
            _run_crew(job, descriptor, wishes, tell, ready, broker, buries=alone and os.getpid() == 1)
        finally:
            os.close(descriptor)
    return wishes.first


@contextmanager
def _broker(job: Job, options: BrokerOptions) -> Iterator[Broker | None]:
    """Own the spool; None if another process does, here or on another host."""
    import qflow

    if is_url(job.spool):
        with job.reach.connect(job.spool) as remote:
            remote.queue(job.queue)
        yield None
        return
    qflow.inspect.check_there(job.spool)
    try:
        broker = qflow.open(job.spool, **options)
    except SpoolInUse:
        yield None
        return
    with broker:
        broker.queue(job.queue)
        yield broker


class _Wishes:
    """Who asks for the end: `stop`, or a signal.

    In its context, in the main thread, SIGINT, SIGTERM and SIGHUP are counted; one that is ignored stays so.
    """

    def __init__(self, stop: threading.Event | None) -> None:
        self._stop = stop
        self.count = 0
        """Of signals."""
        self.first = 0
        """The number of the first; 0 = there was none."""
        self._former: list[tuple[signal.Signals, signal._HANDLER]] = []

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or number

    def __enter__(self) -> _Wishes:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                former = signal.getsignal(number)
                if former is not signal.SIG_IGN:
                    self._former.append((number, former))
                    signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._former:
            signal.signal(number, former)

    @property
    def end(self) -> bool:
        return self.count > 0 or (self._stop is not None and self._stop.is_set())


def _complete(job: Job, *, owned: bool) -> str:
    """Return what is said once all of them work."""
    many = "1 process works" if job.processes == 1 else f"{job.processes} processes work"
    other = f"the broker is {job.spool}" if is_url(job.spool) else "another process owns the spool"
    return f"{many} on queue {job.queue!r}; {'this process owns the spool' if owned else other}"


def _run_crew(
    job: Job,
    desk: int,
    wishes: _Wishes,
    tell: Callable[[str], None],
    ready: Callable[[str], None],
    broker: Broker | None,
    *,
    buries: bool,
) -> None:
    """Have processes work until they are to end, and have ended."""
    children: list[Process] = []
    is_complete = False

    def start(seat: int) -> Process:
        children.append(Process(job, seat, desk))
        return children[-1]

    crew = Crew(job.queue, slots_in(desk, job.processes), start=start, tell=tell, clock=time.monotonic)
    try:
        while not crew.ended:
            due = crew.step()
            if crew.complete and not is_complete:
                is_complete = True
                ready(_complete(job, owned=broker is not None))
                notify(READY)
            if wishes.end and not crew.draining:
                notify(STOPPING)
                crew.drain()
                more = "; another signal kills them" if wishes.count else ""
                tell(f"the workers finish what they have at hand, and end{more}")
            if wishes.count > 1:
                return
            if broker is not None:
                broker.engine.log.check_usable()
            alive = {seat.child for seat in crew.seats}
            for child in [child for child in children if child not in alive]:
                children.remove(child)
                child.close()
            if buries:
                bury_orphans([child.pid for child in children])
            _wait(children, min(max(due - time.monotonic(), 0.0), TICK_S))
    finally:
        crew.kill()
        for child in children:
            child.close()
    if crew.refusal is not None:
        raise InvalidArgument(crew.refusal)


def _wait(children: list[Process], seconds: float) -> None:
    """Return when one of them has reported something, or is dead, or after some time."""
    poll = select.poll()
    for child in children:
        poll.register(child, select.POLLIN)
    poll.poll(seconds * 1000)
