"""Whether messages are admitted: limits, the line at a limit, what is on its way in. And who is woken by what leaves.

Room and depth are reserved before a put joins the log's open batch, and count from then on, so a limit is never passed,
by however many producers. Putters that have to wait at a limit do so in line, first come first served.

All of it under the queue's lock.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from qflow.config import Overflow
from qflow.errors import DiskFull, QueueFull
from qflow.events import EventKind
from qflow.memory.gate import LINE
from qflow.memory.line import Wake
from qflow.queues.lanes import Lanes
from qflow.queues.overflow import Decision, Depth, decide, may_resume

RETRY_S = 0.5
"""A spill that failed is tried again after so long, while somebody waits for it."""


class Putter(Protocol):
    """A put that may have to wait."""

    waits: bool
    """It is in line."""
    passed: bool
    """It was admitted and needs memory only: the mark below the limit does not hold it back any more."""
    wake: Wake | None


class Admission:
    """See the module."""

    def __init__(self, lanes: Lanes) -> None:
        self._context = lanes.context
        self._gate = lanes.gate
        self._lanes = lanes
        self.pending = 0
        """Puts that are on their way through the log."""
        self.pending_messages = self.pending_bytes = 0
        """Their depth."""
        self.line: deque[Putter] = deque()
        """Putters that wait at a limit."""

    def count_in(self, puts: int, messages: int, size: int, charged: int) -> None:
        """Count puts as on their way in; what they are charged is charged."""
        self.pending += puts
        self.pending_messages += messages
        self.pending_bytes += size
        self._gate.incoming += charged

    # Limits ----------------------------------------------------------------------------------------------------------

    def depth(self) -> Depth:
        """Return how deep the queue is, what is on its way included."""
        lanes = self._lanes
        return Depth(lanes.messages() + self.pending_messages, lanes.message_bytes + self.pending_bytes)

    def decide(self, arriving: Depth) -> Decision:
        """Decide about messages that arrive now."""
        if not self._context.has_limit:
            return Decision.ADMIT
        return decide(self._context.settings, self.depth(), arriving)

    def admits(self, arriving: Depth) -> bool:
        """Tell whether messages pass without waiting for anybody."""
        return not self.line and self.decide(arriving) is Decision.ADMIT

    def note_limit(self, *, reached: bool) -> None:
        """Remember that the queue is at its limit, or has come down to the mark, and tell."""
        if reached is not self._gate.at_limit:
            self._gate.at_limit = reached
            self._lanes.refresh()
            self._context.tell(EventKind.LIMIT_REACHED if reached else EventKind.LIMIT_LEFT)

    def look_at_mark(self) -> None:
        """Tell if the depth is down at the mark. (Of a ring, once a second: it is so at each put.)"""
        if self._gate.at_limit and may_resume(self._context.settings, self.depth()):
            self.note_limit(reached=False)

    def is_held_back(self) -> bool:
        """Tell whether blocked puts wait for the mark below the limit."""
        if not self._gate.at_limit or self._context.settings.on_overflow is not Overflow.BLOCK:
            return False
        self.look_at_mark()
        return self._gate.at_limit

    def join_line(self, putter: Putter) -> None:
        """Wait at a limit."""
        if not putter.waits:
            putter.waits = True
            self.line.append(putter)
            self._gate.bar(LINE, True)

    def leave_line(self, putter: Putter) -> None:
        """Wait at a limit no more, and let the next one look."""
        if putter.waits:
            putter.waits = False
            self.line.remove(putter)
            self._gate.bar(LINE, bool(self.line))
            if self.line:
                wake = self.line[0].wake
                if wake is not None:
                    wake()

    # Time ------------------------------------------------------------------------------------------------------------

    def full(self) -> QueueFull:
        """Return what a put is told that found no room below a limit in time."""
        settings = self._context.settings
        return QueueFull(
            f"queue {self._context.name!r} is at its limit (limit_messages={settings.limit_messages}, "
            f"limit_bytes={settings.limit_bytes}): settle messages, or wait longer with timeout_s"
        )

    def patience_s(self, deadline: float | None, disk: Exception | None = None) -> float:
        """Return how long a put waits until it is time to look again, at most.

        Raises:
            QueueFull, DiskFull: the deadline has passed.
        """
        context = self._context
        wait = RETRY_S if deadline is None else min(RETRY_S, deadline - context.monotonic())
        if wait > 0 and (disk is None or context.settings.on_overflow is not Overflow.REJECT):
            return wait
        if disk is not None:
            raise DiskFull(f"queue {context.name!r} is out of memory and could not spill: {disk}") from disk
        if context.has_limit:
            raise self.full()
        raise QueueFull(f"queue {context.name!r} found no memory in time: others wait with what they reserved")

    # Room ------------------------------------------------------------------------------------------------------------

    def cover(self) -> int:
        """Borrow for what is charged above the bounds; return how much still is."""
        gate = self._gate
        excess = gate.over
        if excess > 0:
            gate.ledger.borrow_most(gate.account, excess)
        elif not gate.slack:
            return 0
        return self._trim()

    def _trim(self) -> int:
        """Give up slack that is not needed any more, wake putters; return what is above the bounds."""
        gate = self._gate
        held_back = self.is_held_back()
        over = gate.trim()
        if gate.putters:
            line = self.line
            for_nothing = held_back and gate.putters == len(line) and not (line and line[0].passed)
            if not for_nothing and (not gate.put_slack or self._context.has_limit):
                gate.room.notify_all()
        self._lanes.refresh()
        return over

    def rebalance(self, discharged: int = 0) -> None:
        """After something was settled or spilled: return slack, lend less, wake waiters."""
        gate = self._gate
        gate.used -= discharged
        gate.give_back_spare()
        self._trim()
        if gate.starved:
            gate.arrived.notify_all()
