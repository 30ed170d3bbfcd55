"""How tasks wait without blocking their event loop: for a commit, a message, room, or the disk.

A call that may wait is made in *steps* (see `memory.line`). A step is tried in the loop; if it needs the disk, one of
two threads of the broker runs it; if it must wait, the queue calls a wake-up, from any thread. Wake-ups run in the loop
of the task: all that come before the loop runs them share one `call_soon_threadsafe`.

A cancelled task gives up what it waits for; a step that runs in a thread then undoes itself. A loop that is closed runs
its tasks no more, and does not cancel them: maintenance gives up what they had begun.
"""

from __future__ import annotations

import asyncio
import atexit
import math
import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet, finalize

from qflow.aio.home import Home, Log
from qflow.errors import BrokerClosed, ForkedProcess, InvalidArgument, QflowError
from qflow.memory.line import FOREVER, WORK, Wake
from qflow.memory.waiting import StraightLock, in_place
from qflow.named_tuples import NamedTuple
from qflow.starting import start
from qflow.takers import Noted, here, this_thread

THREADS = 2
"""Threads for the disk: one may wait for a commit or a large spill while the other restores messages for a get."""
T = TypeVar("T")


class Threads:
    """Up to `THREADS` of them, started when first needed.

    They work on while the main thread has returned and others have not, and the interpreter does not end before what
    was begun is done. (What the standard library has for that refuses jobs once the main thread has returned.)
    """

    def __init__(self) -> None:
        self.begun: set[Future[object]] = set()
        """Jobs that are not done."""
        self.jobs: SimpleQueue[tuple[Callable[[], object], Future[object]] | None] = SimpleQueue()
        self._count = 0
        self._free: list[None] = []
        """As many as wait for a job."""
        _all.add(self)

    def put(self, job: Callable[[], object]) -> None:
        """Have a job done; see `start` first."""
        begun: Future[object] = Future()
        self.jobs.put((job, begun))
        self.begun.add(begun)
        begun.add_done_callback(self.begun.discard)

    def start(self) -> None:
        """See that there is one for the next job, or are as many as may be.

        Raises:
            QflowError: there is none, and can be none. BrokerClosed: since the interpreter is ending.
        """
        if self._free:
            self._free.pop()
        elif self._count < THREADS:
            try:
                start(Thread(target=self._serve, name="qflow-aio", daemon=True))
            except QflowError:
                if not self._count:
                    raise
            else:
                self._count += 1

    def _serve(self) -> None:
        found = self.jobs.get()  # that it was started for, and which may not be there yet: it is not free
        while found is not None:
            job, begun = found
            try:
                begun.set_result(job())
            except BaseException as error:
                begun.set_exception(error)
            del found, job, begun
            try:
                found = self.jobs.get_nowait()
            except Empty:
                self._free.append(None)
                found = self.jobs.get()
        self.jobs.put(None)  # for the next one


_all: WeakSet[Threads] = WeakSet()


@atexit.register
def _finish() -> None:
    """Return when what was begun is done: after all threads but daemons have ended, and what was registered later."""
    for threads in list(_all):
        wait(list(threads.begun))


os.register_at_fork(after_in_child=_all.clear)


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of the running task. Raises InvalidArgument: none of asyncio runs in this thread."""
    loop = asyncio._get_running_loop()
    if loop is None:
        raise InvalidArgument(
            "no event loop of asyncio runs here, and `qflow.aio` is for its tasks: elsewhere, as under trio, call "
            "`qflow.open`, and what that returns, in threads (`trio.to_thread.run_sync`)"
        )
    return loop


class Step(Protocol):
    """Try once; return None when done, `WORK` if the disk is needed, else the most seconds to wait."""

    def __call__(self, wake: Wake | None, may_work: bool) -> float | None: ...


class Waiting(Protocol):
    """What a task waits for: an object, for thousands may wait, and a bound method of each would be one more."""

    @property
    def step(self) -> Step: ...
    @property
    def give_up(self) -> Callable[[], object]: ...


class Steps(NamedTuple):
    """`Waiting` for what has its steps elsewhere."""

    step: Step
    give_up: Callable[[], object]


class Homes:
    """The homes of a broker, by event loop. Made by `homes_of`."""

    def __init__(self, log: Log, jobs: list[tuple[str, Callable[[], bool]]]) -> None:
        """`jobs`: what maintenance does each second, under its name."""
        self._log = log
        self._jobs = jobs
        self._job = "loops that were closed, or struck", self._look_after
        self._homes: dict[asyncio.AbstractEventLoop, Home] = {}
        self._lock = StraightLock()
        self._latest: Home | None = None
        self.lines: dict[tuple[asyncio.AbstractEventLoop, object], Any] = {}
        """By loop and queue: what was submitted and waits for room; see `putting`."""

    def here(self) -> Home:
        """Return the home of the running loop; errors as `running_loop`. Cost: 0.1 µs while there is one loop."""
        loop = asyncio._get_running_loop() or running_loop()
        home = self._latest
        if home is None or home.loop is not loop:
            with self._lock:
                home = self._homes.get(loop)
                if home is None:
                    if not self._homes:
                        self._jobs.append(self._job)
                    home = self._homes[loop] = Home(loop, self._log)
                self._latest = home
        return home

    def _look_after(self) -> bool:
        """Give up what tasks of closed loops have begun, and forget those loops; have the others do what stands there.

        Returns False: there is no more to do at once.
        """
        with self._lock:
            homes = list(self._homes.values())
        with ExitStack() as each:  # whichever of them fails
            for home in homes:
                if home.loop.is_closed():
                    each.callback(self._forget, home)
                    each.callback(home.give_up)
                else:
                    each.callback(home.look_after)
        return False

    def _forget(self, home: Home) -> None:
        with self._lock:
            self._latest = None
            del self._homes[home.loop]
            for place in list(self.lines):  # other loops have theirs there meanwhile
                if place[0] is home.loop:
                    del self.lines[place]
            if not self._homes:
                self._jobs.remove(self._job)


class Tended(Protocol):
    """A broker of whose parts tasks need the log, and maintenance, which does `jobs` each second."""

    @property
    def log(self) -> Log: ...
    @property
    def upkeep(self) -> Any: ...


_homes: WeakKeyDictionary[Tended, Homes] = WeakKeyDictionary()


def homes_of(engine: Tended) -> Homes:
    """Return the homes of a broker: the same for all that go around it."""
    found = _homes.get(engine)
    if found is None:  # without a lock, which would stay taken in a child that is forked meanwhile
        found = _homes.setdefault(engine, Homes(engine.log, engine.upkeep.jobs))
    return found


class Waiter:
    """One await of a task, to be woken from anywhere."""

    __slots__ = ("_timer", "error", "future", "home")

    def __init__(self, home: Home) -> None:
        self.home = home
        self.future: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.error: BaseException | None = None

    def __call__(self) -> None:
        """Wake the task; from any thread, twice is fine."""
        self.home.call(self._resolve)

    def arm(self, seconds: float) -> None:
        """Wake the task after so many seconds. In the loop."""
        if seconds != FOREVER and (self.future is None or not self.future.done()):
            self._timer = self.home.loop.call_later(max(0.0, seconds), self._resolve)

    def _resolve(self) -> None:
        future = self.future
        if future is not None and not future.done():
            future.set_result(None)

    async def wait(self, seconds: float = FOREVER) -> None:
        """Return when woken, or after so long; raise `error` if it is set.

        Wake-ups count from when there is a `future`: made here, if nobody has before the loop could run one.
        """
        if self.future is None:
            self.future = self.home.loop.create_future()
        self.arm(seconds)
        try:
            await self.future
        finally:
            self.future = None
            if self._timer is not None:
                self._timer.cancel()
        if self.error is not None:
            raise self.error


class Worker:
    """Does the tasks' work on the disk, in threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process = os.getpid()
        self._threads = Threads()
        self._lock = StraightLock()
        self._ended = False
        finalize(self, self._threads.jobs.put, None).atexit = False
        self._spilling: set[Any] = set()

    def begin(self, job: Callable[[], object]) -> None:
        """Run a job in a thread. Raises BrokerClosed, also as the interpreter ends; ForkedProcess: it is a parent's."""
        if os.getpid() != self._process:
            raise ForkedProcess(
                f"the broker of {self._name} belongs to process {self._process}: use it from here with "
                "qflow.aio.connect, or open another spool"
            )
        with self._lock:
            if self._ended:
                raise BrokerClosed(f"the broker of {self._name} is closed: open the spool again")
            self._threads.start()
            self._threads.put(job)

    def begun(self) -> list[Future[object]]:
        """Return the jobs that are not done."""
        return list(self._threads.begun)

    async def run(self, home: Home, function: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Run a function that may wait for the disk or a commit in a thread; return its result.

        It runs to its end even if the task is cancelled; then `undo(result)` is called.
        """
        waiter = Waiter(home)
        outcome: list[T] = []
        given_up = False
        lock = StraightLock()

        def job() -> None:
            try:
                result = function()
            except BaseException as error:
                waiter.error = error
            else:
                with lock:
                    late = given_up or home.loop.is_closed()
                    if not late:
                        outcome.append(result)
                if late and undo is not None:
                    undo(result)
            waiter()

        def give_up() -> None:
            nonlocal given_up
            with lock:
                given_up = True
                finished = outcome.copy()
                outcome.clear()
            if finished and undo is not None:
                with suppress(BrokerClosed):  # nothing is left to undo; and a cancellation stays one
                    self.begin(partial(undo, finished[0]))

        self.begin(job)
        try:
            home.begin(give_up)
            await waiter.wait()
            return outcome[0]
        except BaseException:
            if not home.is_over:
                give_up()
            raise
        finally:
            home.unfinished.pop(give_up, None)

    def spill(self, queue: Any, asked_for: float = math.inf) -> None:
        """Have a queue spill what is above its bounds, without waiting for it; other jobs have their turn meanwhile."""

        def job() -> None:
            self._spilling.discard(queue)
            left = queue.spill_for_a_while(asked_for)
            if left is not None:
                self.spill(queue, left)

        if queue not in self._spilling:
            self._spilling.add(queue)
            with suppress(BrokerClosed):
                self.begin(job)

    def end(self) -> None:
        """Take no more jobs; those begun run to their end."""
        with self._lock:
            self._ended = True
            self._threads.jobs.put(None)


async def attend(home: Home, worker: Worker, waiting: Waiting) -> None:
    """Try a step until it is done; if an exception or a cancellation ends that earlier, give up.

    It is never tried by the loop while a thread tries it, whatever wakes the task meanwhile.
    """
    give_up = waiting.give_up
    try:
        home.begin(give_up)
        while True:
            waiter = Waiter(home)
            while (wait_s := in_place(partial(waiting.step, waiter, False))) != WORK:  # a keyword takes 0.1 µs more
                if wait_s is None:
                    home.unfinished.pop(give_up, None)  # in here: a handler that raises at that has it given up
                    return
                if wait_s == FOREVER:
                    waiter.future = home.loop.create_future()
                    await waiter.future  # as `wait` would, without a coroutine: thousands may be here
                    waiter.future = None
                else:
                    await waiter.wait(wait_s)
            waiter = Waiter(home)  # of its own: what woke the other one may come late
            waiter.future = home.loop.create_future()
            wait_s = await worker.run(home, partial(waiting.step, waiter, may_work=True))
            if wait_s is None:
                home.unfinished.pop(give_up, None)
                return
            await waiter.wait(wait_s)
    except BaseException:
        try:
            home.undo(give_up)
        finally:  # a handler that raises may have come before that began, or in its middle
            home.undo(give_up)
            home.unfinished.pop(give_up, None)
        raise


def task_name() -> Noted:
    """Return the name of the running task, of the thread where it is none. Cost: 0.1 µs."""
    try:
        # Where its loop is not given, CPython 3.11 asks the kernel for the process each time: a tenth of a get.
        task = asyncio.current_task(here.loop)
    except AttributeError:
        task = None
    if task is None:
        task = asyncio.current_task(running_loop())
        if task is None:
            return this_thread()
        here.loop = task.get_loop()
    return task.get_name()
