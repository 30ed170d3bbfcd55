"""How threads wait, and where the main thread works: out of reach of signal handlers.

Python runs signal handlers in the main thread, between any two steps of whatever that does; a handler may raise there,
or call the broker. So the main thread never holds a lock of the broker where a handler can strike: under a lock it
takes straight lines only, in which nothing is called and nothing is allocated, and it has another thread do the rest
(`sheltered`). It waits with nothing held (`attend`). What a handler interrupts is finished by that thread; a wait that
is interrupted is given up, with what was done for it meanwhile.

A finalizer runs in any thread, also in the middle of a call of this broker. There it is refused (`Reentered`): what it
asks for might need the lock that the call beneath it holds, or change what that call goes through. The collector tells
when it is at work (`collecting`); straight lines look whether it is, and leave the answer to the long way.
So is a signal handler refused in the middle of a step that an event loop takes (`in_place`), for a loop must not wait
for another thread.

CPython, up to 3.15, looks for signals where a function begins or a generator goes on, when a C function that was called
has returned, and at backward jumps. From 3.12 on it collects garbage there, too, and nowhere else; 3.11 does that where
it allocates a container. Up to 3.13 a `with` takes its lock and begins its block in one instruction, which does
neither. Since 3.14 it calls what takes the lock: see `StraightLock`.
`tests/faults/test_straight_lines.py` compares what each marked `with` is compiled to.
"""

from __future__ import annotations

import _thread
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial, wraps
from opcode import opmap
from operator import methodcaller
from queue import SimpleQueue
from threading import Lock, get_ident
from types import CodeType, FrameType
from typing import Any, ParamSpec, Protocol, TypeVar

from qflow.errors import BrokerClosed, ForkedProcess, QflowError, Reentered
from qflow.memory.line import Alarm, Wake

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound="_Closed")
F = TypeVar("F", bound=Callable[..., Any])
_OURS = sys.stdlib_module_names | {"attr", "lmdb", "qflow", "sortedcontainers"}
"""Code that a call of a broker runs, at the top level."""
_REENTERED = (
    "this thread is in a call of a broker, which a finalizer or a signal handler has interrupted: have another thread "
    "do what that asks for; in an event loop, use `loop.add_signal_handler`"
)
_PATCHED_LATE = (
    "threads became greenlets after qflow had begun to work: a call of the main thread would wait for good. Call "
    "`monkey.patch_all()` of gevent before anything else is imported. Gunicorn's workers call it after the fork: under "
    "those, have a process of its own own the spool, not the master"
)
_WRITER = "qflow.storage.log.writer"
"""What its thread runs waits for nobody, and calls nothing of a user's."""
_GUARDS = {"call", "in_place", "serve"}
"""Functions of this module that begin such a call, or go on with it in another thread."""
Step = Callable[[Wake], float | None]
"""Try; return None when done, else how long to wait at most for the wake-up."""


LOOK_S = 1.0
"""The main thread tries again so often: one of its handlers may have forked, and nobody wakes it in the child."""


class _Closed(Protocol):
    def close(self) -> object: ...


class _Job:
    """A call that another thread makes for the main thread."""

    __slots__ = ("beneath", "done", "error", "gate", "result", "sent", "work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.beneath: _Job | None = None
        """What the main thread waited for when a handler asked for this."""
        self.gate = Lock()
        self.gate.acquire()
        self.sent = False
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:
            self.error = error
        self.done = True

    def outlast(self) -> None:
        """Return when it is done, whatever strikes meanwhile; raise that then."""
        try:
            while not self.done:
                self.gate.acquire()
        except BaseException:
            self.outlast()
            raise


class _Shelter:
    """Threads that work for the main thread: as many as its handlers interrupt each other, so mostly one."""

    def __init__(self) -> None:
        self.main = threading.main_thread().ident
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._idle: list[None] = []
        """As many as there are threads that wait for a job, and jobs that are on their way to one less."""
        self.inside: dict[int, bool] = {}
        """Other threads that are in a call."""
        self._waited_for: _Job | None = None

    def forked(self) -> None:
        """In a forked child: what others did for the main thread is not done here, and it waits for none of that."""
        job = self._waited_for
        self.__init__()  # type: ignore[misc]
        while job is not None:
            if not job.done:
                job.error = ForkedProcess("this process was forked from another one in the middle of this call")
                job.done = True
            with suppress(RuntimeError):  # it was about to go on
                job.gate.release()
            job = job.beneath

    def call(self, work: Callable[[], T]) -> T:
        """Have a thread do some work for the main thread; an interrupt is raised when it is done."""
        if threading.get_ident is not get_ident:
            raise QflowError(_PATCHED_LATE)
        if sys.is_finalizing():
            raise BrokerClosed("the interpreter is ending: close a broker before that, in the program or by `atexit`")
        job = _Job(work)
        job.beneath, self._waited_for = self._waited_for, job
        try:
            try:
                del self._idle[-1]  # no call, so that an interrupt finds the job with a thread, or none taken
            except IndexError:
                try:
                    threading.Thread(target=self.serve, name="qflow-sheltered", daemon=True).start()
                except RuntimeError:  # there are as many as there may be, or the interpreter is about to end
                    return in_place(work)
            job.sent = True
            self._jobs.put(job)
            job.gate.acquire()
        except BaseException:
            if job.sent:
                job.outlast()
            raise
        finally:
            self._waited_for = job.beneath
        error, job.error = job.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # whose traceback leads here
        result: T = job.result
        return result

    def serve(self) -> None:
        """Make calls, for good. In a thread of its own."""
        self.inside[get_ident()] = True  # whatever calls a broker here and is none of its parts is a finalizer
        while True:
            job = self._jobs.get()
            job.run()
            self._idle.append(None)  # before the next job can come
            job.gate.release()
            del job


_shelter = _Shelter()
os.register_at_fork(after_in_child=_shelter.forked)


class _Collecting(set[str]):
    """Not empty while garbage is collected, by what the collector tells as attributes, `start` and then `stop`.

    All of it is done in C, where no signal handler strikes.
    """

    start = property(None, set.update)
    stop = property(None, set.difference_update)


collecting = _Collecting()
"""Not empty while garbage is collected; see `refuse_finalizer`."""
gc.callbacks.append(partial(setattr, collecting))
os.register_at_fork(after_in_child=collecting.clear)


if sys.version_info >= (3, 14):

    class StraightLock(_thread.RLock):
        """A lock that the main thread takes: no signal handler can raise when it is taken and the block not begun.

        Nothing looks for signals when a function of Python returns, and this one takes the lock without a call.
        """

        __slots__ = ()
        _taken = property(methodcaller("acquire"))

        def __enter__(self) -> bool:
            return self._taken

else:
    StraightLock = threading.RLock

_straight: dict[CodeType, frozenset[int] | None] = {}
"""Functions with straight lines, and at which of their instructions a lock is held, once somebody has asked."""


def straight(function: F) -> F:
    """Mark a function that has a straight line under a lock, and calls nothing of a user's."""
    _straight[function.__code__] = None
    return function


def shelter(work: Callable[[], T]) -> T:
    """Do some work where no signal handler can strike it. Cost: 0.2 µs; for the main thread 15 µs.

    Raises:
        Reentered: this thread is in such a call already: a finalizer asks.
    """
    here = _shelter
    me = get_ident()
    if me == here.main and me not in here.inside:
        if collecting:
            refuse_finalizer()
        return here.call(work)
    return in_place(work)


def shelter_made(make: Callable[[], C]) -> C:
    """`shelter` for what is to be closed: if the caller is interrupted it is closed, for nobody else will do that."""
    made: list[C] = []
    try:
        shelter(lambda: made.append(make()))
        return made[0]
    except BaseException:
        for one in made:
            one.close()
        raise


def in_place(work: Callable[[], T]) -> T:
    """Do some work where it stands: that of an event loop, which must not wait for another thread.

    Raises:
        Reentered: as `shelter`; in the main thread a handler asks, too.
    """
    here = _shelter
    me = get_ident()
    if me in here.inside:
        _check_caller()
        return work()
    if collecting:
        refuse_finalizer()
    here.inside[me] = True
    try:
        return work()
    finally:
        del here.inside[me]


def sheltered(method: Callable[P, T]) -> Callable[P, T]:
    """Have calls of a method made where no signal handler can strike them; see `shelter`."""

    @wraps(method)
    def call(*arguments: P.args, **named: P.kwargs) -> T:
        here = _shelter
        me = get_ident()
        if me in here.inside:
            _check_caller()
            return method(*arguments, **named)
        if collecting:
            refuse_finalizer()
        if me == here.main:
            return here.call(lambda: method(*arguments, **named))
        here.inside[me] = True
        try:
            return method(*arguments, **named)
        finally:
            del here.inside[me]

    return call


def attend(step: Step, give_up: Callable[[], object]) -> None:
    """Return when a step is done, after as many tries as it takes; whatever ends that earlier, `give_up` is called.

    A step is given a wake-up that any thread may call, under locks, and more than once.
    """
    over = False

    def attempt(wake: Wake) -> float | None:
        nonlocal over
        try:
            return step(wake)
        except BaseException:
            give_up()  # here, where nothing can strike on the way to it
            over = True
            raise

    try:
        while True:
            alarm = Alarm()  # one each round: what rang in the last one is over
            wait_s = shelter(partial(attempt, alarm))
            if wait_s is None:
                return
            alarm.wait(min(wait_s, LOOK_S) if is_main() else wait_s)
    except BaseException:
        if not over:
            try:
                shelter(give_up)
            finally:  # another interrupt may have come before that began
                shelter(give_up)
        raise


def is_inside() -> bool:
    """The calling thread is in the middle of a call that others may wait for: it must not wait itself."""
    return get_ident() in _shelter.inside


def is_main() -> bool:
    """The calling thread is the one that runs signal handlers."""
    return get_ident() == _shelter.main


def refuse_finalizer() -> None:
    """Refuse what a finalizer asks for that was run in the middle of a call of this thread. Cost: 0.1 µs a frame.

    For callers who saw that garbage is collected; straight lines that see it leave the answer to the long way.

    Raises:
        Reentered: a call of ours lies beneath code of somebody else that it would not call.
    """
    foreign = False
    inside = is_inside()  # else a call that begins, or waits, with nothing held
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not foreign:
            foreign = _is_foreign(frame)
        elif _holds(frame) or (inside and _guards(frame)) or _writes(frame):
            raise Reentered(_REENTERED)
        frame = frame.f_back


def _holds(frame: FrameType) -> bool:
    """Tell whether a straight line of a frame holds its lock: not where a signal handler can have struck it."""
    code = frame.f_code
    if code not in _straight:
        return False
    held = _straight[code]
    if held is None:
        held = _straight[code] = _held_at(code)
    return frame.f_lasti in held


def _held_at(code: CodeType) -> frozenset[int]:
    """Return the offsets of the instructions in each `with`, and of those that leave it, up to the call that does.

    `dis` is not asked: an import here might wait for one of another thread, which waits for the lock that is held.
    """
    operations = code.co_code[::2]
    found: set[int] = set()
    numbers = _numbers(code.co_exceptiontable)
    for start, length, target, _ in zip(numbers, numbers, numbers, numbers, strict=True):  # the last: of the stack
        if opmap["WITH_EXCEPT_START"] in operations[target : target + 2]:
            leaves = operations.find(opmap["CALL"], start + length)
            found.update(range(start, len(operations) if leaves < 0 else leaves + 1))
    return frozenset(2 * one for one in found)


def _numbers(table: bytes) -> Iterator[int]:
    """Yield the numbers in an exception table: six bits in each byte, the first ones first, and whether more follow."""
    number = 0
    for byte in table:
        number = number << 6 | byte & 63
        if not byte & 64:
            yield number
            number = 0


def _check_caller() -> None:
    """Refuse a call in the middle of another one of the same thread, unless it is a part of that.

    Raises:
        Reentered: it comes from elsewhere: a finalizer, or in an event loop a signal handler.
    """
    everywhere = get_ident() == _shelter.main or collecting
    frame: FrameType | None = sys._getframe(2)  # whoever calls `in_place`, or what is `sheltered`
    while frame is not None and not _guards(frame):  # everything between that call and this one is its own code
        if _is_foreign(frame) and (everywhere or _finalizes(frame)):
            raise Reentered(_REENTERED)
        frame = frame.f_back


def _guards(frame: FrameType) -> bool:
    return frame.f_code.co_name in _GUARDS and frame.f_globals.get("__name__") == __name__


def _writes(frame: FrameType) -> bool:
    """Tell whether a frame is the lowest of a thread that writes."""
    return frame.f_code.co_name == "_run" and frame.f_globals.get("__name__") == _WRITER


def _is_foreign(frame: FrameType) -> bool:
    """Tell whether a frame runs what is no part of a call of a broker."""
    name: str = frame.f_globals.get("__name__", "")
    is_ours = name.partition(".")[0] in _OURS or name.startswith("namedtuple_")
    return not is_ours or _finalizes(frame)


def _finalizes(frame: FrameType) -> bool:
    return frame.f_code.co_name == "__del__" or frame.f_globals.get("__name__") == "weakref"
