"""What tasks wait with: one wake-up for all of a batch, a watcher in a queue's line, a thread for the disk.

A task never blocks its loop. What would wait goes by *steps* (see `memory.line`): a step is tried in the loop; if it
takes the disk, one of two threads of the broker does it; if it must wait, the queue calls back, in whatever thread.
Such calls end in the loop of the task: all that come before the loop gets to them share one wake-up.

A task that is cancelled gives up what it waits for; a step that runs in a thread then undoes itself.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from qflow.errors import BrokerClosed, ForkedProcess, again
from qflow.memory.line import FOREVER, WORK, Wake
from qflow.memory.waiting import in_place

THREADS = 2
"""For the disk: one may wait for a commit, or move much, while the other brings what a get waits for."""

T = TypeVar("T")


class Step(Protocol):
    """Try; return None when done, `WORK` if only the disk helps, else how long to wait at most."""

    def __call__(self, wake: Wake | None, *, may_work: bool) -> float | None: ...


class Request(Protocol):
    """What was handed over to the log."""

    @property
    def error(self) -> BaseException | None: ...
    def outcome(self) -> Any: ...


Crowd = list[tuple["asyncio.Future[Any]", Request, Callable[[], Any]]]
"""Tasks that have handed something over in one turn of their loop."""


class Log(Protocol):
    """The transaction log, as far as tasks need it."""

    def put(self, put: Any, soon: bool = True) -> Any: ...
    def tell(self, request: Any, told: Callable[[], object]) -> None: ...
    def now(self) -> None: ...


class Home:
    """What the tasks of one event loop share in one broker."""

    def __init__(self, loop: asyncio.AbstractEventLoop, log: Log | None) -> None:
        self.loop = loop
        self._log = log
        self._calls: deque[Callable[[], object]] = deque()
        self._called = False
        self._crowd: Crowd | None = None

    def call(self, function: Callable[[], object]) -> None:
        """Have the loop call something; from any thread, also under locks. Cost: 0.2 µs, 10 µs if the loop sleeps."""
        self._calls.append(function)
        if not self._called:
            self._called = True
            if asyncio._get_running_loop() is self.loop:
                self.loop.call_soon(self._run)
                return
            with suppress(RuntimeError):  # the loop is closed: its tasks are gone
                self.loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._called = False
        calls = self._calls
        while calls:
            calls.popleft()()

    def confirmed(self, request: Request, outcome: Callable[[], Any] | None = None) -> asyncio.Future[Any]:
        """Return a future of what was just handed over: resolved when it is done, with its outcome or another one.

        The first has it written as soon as the tasks that are ready now had their turn to hand over, too. All of them
        are told together, when the last one is done: the log does them in their order.
        """
        if self._crowd is None:
            self._crowd = []
            self.loop.call_soon(self._ring)
        future: asyncio.Future[Any] = self.loop.create_future()
        self._crowd.append((future, request, outcome or request.outcome))
        return future

    def _ring(self) -> None:
        crowd, self._crowd = self._crowd, None
        assert self._log is not None
        assert crowd is not None
        _, last, _ = crowd[-1]
        self._log.tell(last, partial(self.call, partial(_resolve, crowd)))
        self._log.now()


def _resolve(crowd: Crowd) -> None:
    """Tell tasks what became of what they handed over; twice is fine. In their loop."""
    for future, request, outcome in crowd:
        if future.done():
            continue  # it was told, or cancelled
        if request.error is not None:
            future.set_exception(again(request.error))
        else:
            future.set_result(outcome())


class Homes:
    """The homes of a broker, by event loop."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._homes: dict[asyncio.AbstractEventLoop, Home] = {}
        self._lock = threading.Lock()
        self._latest: Home | None = None

    def here(self) -> Home:
        """Return the home of the running loop. Cost: 0.1 µs while there is one loop."""
        loop = asyncio.get_running_loop()
        home = self._latest
        if home is None or home.loop is not loop:
            with self._lock:
                home = self._homes.get(loop)
                if home is None:
                    self._homes = {one: its for one, its in self._homes.items() if not one.is_closed()}
                    home = self._homes[loop] = Home(loop, self._log)
                self._latest = home
        return home


class Waiter:
    """One await of a task, to be woken from anywhere."""

    __slots__ = ("_home", "_timer", "error", "future")

    def __init__(self, home: Home) -> None:
        self._home = home
        self.future: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.error: BaseException | None = None

    def wake(self) -> None:
        """Wake the task; from any thread, twice is fine."""
        self._home.call(self._resolve)

    def arm(self, seconds: float) -> None:
        """Wake the task after so many seconds. In the loop."""
        if seconds != FOREVER and (self.future is None or not self.future.done()):
            self._timer = self._home.loop.call_later(max(0.0, seconds), self._resolve)

    def _resolve(self) -> None:
        if self.future is not None and not self.future.done():
            self.future.set_result(None)

    async def wait(self) -> None:
        """Return when woken; raise what was thrown meanwhile. In the turn of the loop in which what wakes it began."""
        self.future = self._home.loop.create_future()
        try:
            await self.future
        finally:
            if self._timer is not None:
                self._timer.cancel()
        if self.error is not None:
            raise self.error


class Worker:
    """The threads of a broker's tasks: for the disk, begun when first needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process = os.getpid()
        self._executor: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._ended = False
        self._begun: set[Future[object]] = set()
        self._spilling: set[Any] = set()

    def begin(self, job: Callable[[], object]) -> None:
        """Have a job done soon.

        Raises:
            BrokerClosed: the broker was closed. ForkedProcess: it is that of a parent process.
        """
        if os.getpid() != self._process:
            raise ForkedProcess(
                f"the broker of {self._name} belongs to process {self._process}: open a spool of your own instead"
            )
        with self._lock:
            if self._ended:
                raise BrokerClosed(f"the broker of {self._name} is closed: open the spool again")
            if self._executor is None:
                self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="qflow-aio")
            begun = self._executor.submit(job)
            self._begun.add(begun)
        begun.add_done_callback(self._begun.discard)

    def begun(self) -> list[Future[object]]:
        """Return the jobs that are not done."""
        return list(self._begun)

    async def run(self, home: Home, function: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Return what a function returns that may wait for the disk or a commit.

        Once begun it is done, also when the task is cancelled; `undo(result)` takes it back then.
        """
        waiter = Waiter(home)
        outcome: list[T] = []
        given_up = False
        lock = threading.Lock()

        def job() -> None:
            try:
                result = function()
            except BaseException as error:
                waiter.error = error
            else:
                with lock:
                    outcome.append(result)
                    late = given_up
                if late and undo is not None:
                    undo(result)
            waiter.wake()

        self.begin(job)
        try:
            await waiter.wait()
        except asyncio.CancelledError:
            with lock:
                given_up = True
                finished = bool(outcome)
            if finished and undo is not None:
                self.begin(partial(undo, outcome[0]))
            raise
        return outcome[0]

    def spill(self, queue: Any) -> None:
        """Have a queue spill what is above its bounds; nobody waits for that."""

        def job() -> None:
            self._spilling.discard(queue)
            queue.spill_excess()

        if queue not in self._spilling:
            self._spilling.add(queue)
            with suppress(BrokerClosed):
                self.begin(job)

    def end(self) -> None:
        """Take no more jobs; those begun are done."""
        with self._lock:
            self._ended = True
            if self._executor is not None:
                self._executor.shutdown(wait=False)


async def attend(home: Home, worker: Worker, step: Step, give_up: Callable[[], object]) -> None:
    """Return when a step is done, after as many tries as it takes; whatever ends that earlier, `give_up` is called."""
    try:
        while True:
            waiter = Waiter(home)
            wait_s = in_place(partial(step, waiter.wake, may_work=False))
            if wait_s is None:
                return
            if wait_s == WORK:
                worker.begin(partial(_work, home, step, waiter))
            else:
                waiter.arm(wait_s)
            await waiter.wait()
    except BaseException:
        in_place(give_up)
        raise


def _work(home: Home, step: Step, waiter: Waiter) -> None:
    """Take a step in a thread that may work on the disk; then the task looks, or waits on."""
    try:
        wait_s = step(waiter.wake, may_work=True)
    except BaseException as error:
        waiter.error = error
        wait_s = None
    if wait_s is None:
        waiter.wake()
    else:
        home.call(partial(waiter.arm, wait_s))
