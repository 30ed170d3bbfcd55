"""The processes that work: which are to be started, started again after a pause, told to end, or killed.

    state       event                                    next
    -           started                                  STARTING    it imports the function and finds the owner
    STARTING    it says that it works                    WORKING
    WORKING     the owner, or the queue, is gone         AWAY        until it says that it works again
    any         it holds a message past its lease        KILLED      at its end started again at once
    any         drain, nothing at hand, does not end     KILLED      it hangs in an import, or is stopped
    any         it is dead                               RESTING     for 0.1 s, then twice as long, up to 30 s
    RESTING     its pause is over                        STARTING
    any         drain, and it is dead                    ENDED

A worker that cannot work before any other did ends the crew: its function or its queue is not there.

Pure but for the children that are handed in; one thread.
"""

from __future__ import annotations

import enum
import math
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from qflow.workers.desk import Slot
from qflow.workers.ending import LONGEST_END_S
from qflow.workers.job import AWAY, FAILED, READY, REFUSED

if TYPE_CHECKING:
    from qflow.workers.process import Process

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0
DEADLY = 10
"""A message that has ended so many workers in a row is told of: its queue may set nothing aside."""


class State(enum.Enum):
    """See the module."""

    STARTING = "starting"
    WORKING = "working"
    AWAY = "away"
    KILLED = "killed"
    RESTING = "resting"
    ENDED = "ended"


class Seat:
    """The place of one worker, whichever process has it."""

    def __init__(self, number: int, slot: Slot) -> None:
        self.number = number
        self.slot = slot
        self.state = State.RESTING
        self.child: Process | None = None
        self.due = 0.0
        """When it is started next, while it rests."""
        self.failures = 0
        """How many in a row have died without having done a message."""
        self.done_before = 0
        self.idle_since = 0.0
        """When it had something at hand, or began to be drained, whichever is later."""
        self.has_worked = False

    def __str__(self) -> str:
        process = "" if self.child is None else f" (process {self.child.pid})"
        return f"worker {self.number + 1}{process}"


class Crew:
    """See the module.

    Args:
        queue: the name of the queue they work on.
        slots: what each has at hand.
        start: starts a process for a seat, by its number.
        tell: prints a sentence.
        clock: the monotonic clock.
    """

    def __init__(
        self,
        queue: str,
        slots: Sequence[Slot],
        *,
        start: Callable[[int], Process],
        tell: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._queue = queue
        self._start = start
        self._tell = tell
        self._clock = clock
        self.seats = [Seat(number, slot) for number, slot in enumerate(slots)]
        self._last_death = (-1, 0)
        """Which message was at hand, and how often in a row."""
        self.refusal: str | None = None
        """Why they cannot work."""
        self.draining = False

    @property
    def ended(self) -> bool:
        """Nobody works any more, and nobody is to."""
        return self.draining and all(seat.state is State.ENDED for seat in self.seats)

    @property
    def complete(self) -> bool:
        """Each of them has worked."""
        return all(seat.has_worked for seat in self.seats)

    def drain(self) -> None:
        """Have all of them finish what is at hand, and end."""
        if self.draining:
            return
        self.draining = True
        for seat in self.seats:
            if seat.child is not None:
                seat.idle_since = self._clock()
                seat.child.drain()
            else:
                seat.state = State.ENDED

    def kill(self) -> None:
        """Kill all of them; their messages go back."""
        for seat in self.seats:
            if seat.child is not None:
                seat.child.kill()

    def step(self) -> float:
        """Do what is due; return when to be called again at the latest, on the clock."""
        for seat in self.seats:
            if seat.child is not None:
                self._look(seat, seat.child)
            if seat.state is State.RESTING and not self.draining and seat.due <= self._clock():
                self._begin(seat)
        if self.refusal is not None and not self.draining:
            self.drain()
        return min((self._next_moment(seat) for seat in self.seats), default=math.inf)

    def _look(self, seat: Seat, child: Process) -> None:
        """See to a process that lived when it was last looked at."""
        exit_code = child.exit_code()  # before its reports: nothing comes after that
        for kind, text in child.reports():
            self._hear(seat, kind, text)
        hand = seat.slot.read()
        if exit_code is not None:
            self._bury(seat, exit_code)
        elif seat.state is State.KILLED:
            return
        elif hand.deadline and hand.deadline <= self._clock():
            self._kill(
                seat,
                child,
                f"has held message {hand.sequence} of queue {self._queue!r} for longer than its lease: "
                "it is killed, and the message goes back",
            )
        elif hand.deadline:
            seat.idle_since = self._clock()
        elif self.draining and self._clock() - seat.idle_since >= LONGEST_END_S:
            self._kill(seat, child, "has nothing at hand and does not end: it is killed")

    def _kill(self, seat: Seat, child: Process, why: str) -> None:
        self._tell(f"{seat} {why}")
        seat.state = State.KILLED
        child.kill()

    def _hear(self, seat: Seat, kind: str, text: str) -> None:
        if seat.state is State.KILLED:
            return
        if kind == READY:
            was_away = seat.state is State.AWAY
            seat.state, seat.has_worked = State.WORKING, True
            if was_away and not self._is_any_away():
                self._tell("the workers go on")
        elif kind == AWAY:
            if not self._is_any_away():
                self._tell(f"{text}: the workers wait")
            seat.state = State.AWAY
        elif kind == REFUSED and not any(one.has_worked for one in self.seats):
            self.refusal = self.refusal or text
        elif kind == REFUSED:
            self._tell(f"{seat} cannot work: {text}")
        elif kind == FAILED:
            self._tell(f"{seat}: {text}")

    def _is_any_away(self) -> bool:
        return any(seat.state is State.AWAY for seat in self.seats)

    def _begin(self, seat: Seat) -> None:
        seat.slot.clear()
        seat.done_before = seat.slot.read().done
        try:
            seat.child = self._start(seat.number)
        except OSError as error:
            self._rest(seat, f"{seat} cannot be started: {error.strerror}")
        else:
            seat.state = State.STARTING

    def _bury(self, seat: Seat, exit_code: int) -> None:
        """A process is dead: what it held goes back by itself, for its connection has ended."""
        hand, how = seat.slot.read(), f"{seat} {_how_it_ended(exit_code)}"
        if hand.deadline:
            how += f" at message {hand.sequence} of queue {self._queue!r}, which goes back"
            self._count_death(hand.sequence)
        was_killed, seat.child = seat.state is State.KILLED, None
        if hand.done > seat.done_before:
            seat.failures = 0
        seat.slot.clear()
        if self.draining:
            seat.state = State.ENDED
            if exit_code and not was_killed and self.refusal is None:
                self._tell(how)
        elif was_killed:
            seat.state, seat.due = State.RESTING, self._clock()
        elif self.refusal is None:
            self._rest(seat, how)

    def _count_death(self, sequence: int) -> None:
        """Say what to do about a message that ends whoever takes it."""
        last, times = self._last_death
        self._last_death = (sequence, times + 1 if sequence == last else 1)
        if self._last_death[1] == DEADLY:
            self._tell(
                f"message {sequence} of queue {self._queue!r} has ended {DEADLY} workers in a row, and those behind it "
                "wait: qflow alter has max_deliveries and dead_letter, by which a queue sets such a message aside"
            )

    def _rest(self, seat: Seat, how: str) -> None:
        pause_s = min(FIRST_PAUSE_S * 2 ** min(seat.failures, 30), LONGEST_PAUSE_S)
        seat.failures += 1
        seat.state, seat.due = State.RESTING, self._clock() + pause_s
        self._tell(f"{how}; it is started again after {pause_s:g} s")

    def _next_moment(self, seat: Seat) -> float:
        if seat.state is State.RESTING:
            return seat.due
        if seat.state is State.KILLED:
            return math.inf
        idle_until = seat.idle_since + LONGEST_END_S if self.draining and seat.state is not State.ENDED else math.inf
        return seat.slot.read().deadline or idle_until


def _how_it_ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exited with {exit_code}"
    try:
        return f"was ended by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was ended by signal {-exit_code}"
