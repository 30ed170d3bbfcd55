"""Whether messages are admitted: limits, the line at a limit, what is on its way in. And who is woken by what leaves.

Room and depth are reserved before a put joins the log's open batch, and count from then on, so a limit is never passed,
by however many producers. Putters that have to wait at a limit do so in line, first come first served. What leaves the
queue admits as many of them as there is room for: each has its place when it is woken, and nobody else is woken. If it
leaves then, whatever made it, that place admits the next one. Threads are woken one after another, and each puts on for
a turn at most: then it waits behind those that are still to be woken.

All of it under the queue's lock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Protocol

from qflow.errors import DiskFull, QueueFull
from qflow.events import EventKind
from qflow.memory.gate import ALWAYS, LINE
from qflow.memory.line import Wake
from qflow.queues.lanes import Lanes
from qflow.queues.overflow import Decision, Depth, decide, may_resume, room, when_full
from qflow.storage.log.transaction_log import Put

RETRY_S = 0.5
"""A spill that failed is tried again after so long, while somebody waits for it."""
TURN = 16
"""Messages that a thread puts in a row while others wait for their turn, though they have their places."""
_NOBODY: OrderedDict[Putter, None] = OrderedDict()  # where nobody has waited at a limit so far; never changed


class Putter(Protocol):
    """A put that may have to wait."""

    count: int
    """How many puts it is, in one lane each."""
    size: Depth
    """Their messages."""
    charged: int
    """Their memory."""
    depth: Depth
    """By how much it makes the queue deeper, when what leaves in the same commit has left."""
    alone: bool
    """It is published by itself, by any thread that sees it admitted; else its own thread or task goes on with it."""
    in_turn: bool
    """Its thread is woken after those that were admitted before it. Not the main one: where a signal handler holds that
    up, those behind it would wait for it, and the handler itself, if it puts."""
    passed: bool
    """It was admitted and needs memory only: the mark below the limit does not hold it back any more."""
    wake: Wake | None
    """None while it does not wait: it looks itself."""
    done: bool
    """Memory and depth are reserved for it."""

    def stop_watching(self) -> None:
        """Wait for memory no more; twice is fine."""

    def publish(self) -> None:
        """Make messages visible that have their place."""


class Admission:
    """See the module."""

    __slots__ = (
        "_coming_in", "_context", "_gate", "_lanes", "_left", "_waker", "_woken_next", "admitted", "blocked", "line",
        "pending", "pending_bytes", "pending_messages", "ready",
    )  # fmt: skip

    def __init__(self, lanes: Lanes) -> None:
        self._context = lanes.context
        self._gate = lanes.gate
        self._lanes = lanes
        self.pending = 0
        """Puts that are on their way through the log."""
        self.pending_messages = self.pending_bytes = 0
        """Their depth."""
        self.line = _NOBODY
        """Putters that wait at a limit."""
        self.blocked: dict[Putter, float] = {}
        """Putters that wait for room, at a limit or for memory, in the order they came, and since when (monotonic)."""
        self.admitted = _NOBODY
        """Putters that were in line, and have their place by now: nobody passes them before they have gone on."""
        self.ready = _NOBODY
        """Of them, those to be published by whoever comes first."""
        self._woken_next = _NOBODY  # threads that have their place, or are published
        self._coming_in: deque[Putter] | None = None  # admitted, and to be woken now; an empty one takes 0.7 KiB
        self._waker: Putter | None = None  # the one that was woken last; it wakes the next
        self._left = 0  # what may be put in this turn beside the places

    def reserve(self, puts: int, messages: int, size: int, charged: int, put: Put | None = None) -> bool:
        """Charge puts and count them as on their way in, `put` too, if nothing is in their way; else do nothing."""
        gate, context = self._gate, self._context
        used = gate.used + charged
        if used <= gate.passing:
            gate.used = used
        elif (
            context.ended is not None
            or gate.room.watching
            or not self.admits(Depth(messages, size))
            or not gate.charge(charged)
        ):
            return False
        # No call since it was charged, so that an interrupt finds all of it done or nothing.
        self.pending += puts
        self.pending_messages += messages
        self.pending_bytes += size
        gate.incoming += charged
        if put is not None:
            put.refused = False
        gate.forget_places()
        if context.has_limit:
            self.count_places()
        return True

    def take_back(self, put: Put) -> None:
        """Give back the room of a put that is on its way in; twice is fine."""
        gate, messages, charged = self._gate, len(put.records), put.charged
        if not (put.refused or put.visible):
            put.refused = True  # no calls from here on: a handler that raises finds all of it done, or none
            self.pending -= 1
            self.pending_messages -= messages
            self.pending_bytes -= put.size
            gate.incoming -= charged
            gate.used -= charged
        self.rebalance()

    # Limits ----------------------------------------------------------------------------------------------------------

    def depth(self) -> Depth:
        """Return how deep the queue is, what is on its way included."""
        lanes = self._lanes
        return Depth(lanes.messages() + self.pending_messages, lanes.message_bytes + self.pending_bytes)

    def decide(self, arriving: Depth) -> Decision:
        """Decide about messages that arrive now."""
        settings = self._context.settings
        if settings.limit_messages is settings.limit_bytes is None:
            return Decision.ADMIT
        return decide(settings, self.depth(), arriving)

    def admits(self, arriving: Depth) -> bool:
        """Tell whether messages pass without waiting for anybody."""
        return not self._is_line and self.decide(arriving) is Decision.ADMIT

    def count_places(self) -> None:
        """Count how many messages may be put before somebody has to look at the limit again."""
        settings = self._context.settings
        if settings.limit_messages is not None and settings.limit_bytes is None:
            places = max(0, settings.limit_messages - self.depth().messages)
            if self._woken_next:
                places = min(places, self._left)
                self._left -= places
            self._gate.places = places

    def note_limit(self, *, reached: bool) -> None:
        """Remember that the queue is at its limit, or has come down to the mark, and tell."""
        if reached is not self._gate.at_limit:
            self._gate.at_limit = reached
            self._note_mark()
            self._lanes.refresh()
            self._context.tell(EventKind.LIMIT_REACHED if reached else EventKind.LIMIT_LEFT)

    def look_at_mark(self) -> None:
        """Tell if the depth is down at the mark. (Of a ring, once a second: it is so at each put.)"""
        if self._gate.at_limit and may_resume(self._context.settings, self.depth()):
            self.note_limit(reached=False)

    def is_held_back(self) -> bool:
        """Tell whether blocked puts wait for the mark below the limit."""
        if not self._gate.at_limit or when_full(self._context.settings) is not Decision.WAIT:
            return False
        self.look_at_mark()
        return self._gate.at_limit

    def _note_mark(self) -> None:
        """Remember what must be settled before the depth can be down at the mark."""
        gate, settings = self._gate, self._context.settings
        gate.mark_acked, gate.mark_bytes = 0, ALWAYS
        if gate.at_limit and (not self.line or when_full(settings) is Decision.WAIT):
            if settings.limit_messages is not None:
                above = self.depth().messages - int(settings.limit_messages * settings.resume_ratio)
                gate.mark_acked = self._lanes.acked + above
            if settings.limit_bytes is not None:
                gate.mark_bytes = int(settings.limit_bytes * settings.resume_ratio)

    # The line --------------------------------------------------------------------------------------------------------

    def is_next(self, putter: Putter) -> bool:
        """Tell whether nobody else is to be admitted before."""
        if self.admitted or self.ready:
            return False
        return not self.line or next(iter(self.line)) is putter

    @property
    def _is_line(self) -> bool:
        return bool(self.line or self.admitted or self.ready)

    def join_line(self, putter: Putter) -> None:
        """Wait at a limit."""
        if self.line is _NOBODY:
            self.admitted, self.ready, self._woken_next, self.line = [OrderedDict() for _ in range(4)]
        if putter not in self.line:
            self.line[putter] = None
            if len(self.line) == 1:
                self._gate.bar(LINE, True)
                self._lanes.refresh()

    def leave_line(self, putter: Putter) -> None:
        """Wait at a limit no more, and let others look who may be admitted now."""
        if putter.in_turn:
            self._woken_next.pop(putter, None)
            if self._waker is putter:
                self._wake_next()
        if putter in self.admitted or putter in self.ready:
            self.admitted.pop(putter, None)
            self.ready.pop(putter, None)
            was_next = not (self.admitted or self.ready)
        elif putter in self.line:
            was_next = next(iter(self.line)) is putter
            del self.line[putter]
        else:
            return
        if was_next:
            self._shorten_line()

    def went_on(self) -> None:
        """After one that was admitted has gone on: the last of them has others admitted."""
        if self._coming_in or not (self.admitted or self.ready):
            self._shorten_line()

    def _shorten_line(self) -> None:
        """After somebody left the line."""
        if self._coming_in:
            self._call_in()
        self.admit_line()
        self._gate.bar(LINE, self._is_line)
        self._lanes.refresh()

    def admit_line(self) -> None:
        """Give as many who wait in line their place as there is room for, and wake them.

        The first is woken without a place where that takes more: memory must be freed for it, or messages dropped. The
        next one is looked at when it leaves the line.
        """
        gate, blocks = self._gate, when_full(self._context.settings) is Decision.WAIT
        while self.line:
            first = self._admit_together() if blocks else next(iter(self.line))
            if first is None:
                return
            if not blocks or not gate.borrow(gate.over + first.charged):
                wake_putter(first)
                return

    def _admit_together(self) -> Putter | None:
        """Admit those at the head of the line that there is room for; return the first if it is in need of memory."""
        gate, line = self._gate, self.line
        messages_left, bytes_left = room(self._context.settings, self.depth())
        memory_left = -gate.over
        short: Putter | None = None
        is_full = False
        gate.places = 0
        coming_in = self._coming_in = self._coming_in or deque()
        while line:
            putter = next(iter(line))
            if putter.wake is None or (gate.at_limit and not putter.passed and self.is_held_back()):
                break
            if is_full := putter.depth.messages > messages_left or putter.depth.bytes > bytes_left:
                break
            if putter.charged > memory_left:
                short = putter
                break
            coming_in.append(putter)
            (self.ready if putter.alone else self.admitted)[putter] = None
            del line[putter]  # no calls: a handler that raises finds it admitted and counted, or in line
            putter.done = True
            messages, size = putter.size
            messages_left -= messages
            bytes_left -= size
            memory_left -= putter.charged
            gate.used += putter.charged
            gate.incoming += putter.charged
            self.pending += putter.count
            self.pending_messages += messages
            self.pending_bytes += size
        self._call_in()
        gate.forget_places()  # who was woken counts them anew
        if is_full:
            self.note_limit(reached=True)
        return short

    def _call_in(self) -> None:
        """Wake those that were admitted, in their order; called again where a handler that raises ended it."""
        coming_in = self._coming_in
        while coming_in:
            putter = coming_in[0]
            if putter in self.admitted or putter in self.ready:
                putter.stop_watching()
                if putter.in_turn:
                    self._woken_next[putter] = None
                else:
                    wake_putter(putter)
            coming_in.popleft()
        if self._woken_next and self._waker is None:
            self._wake_next()

    def publish_ready(self) -> bool:
        """Make visible what has its place and waits for its thread only, in order; return whether there was any."""
        if not self.ready:
            return False
        while self.ready:
            self.ready.popitem(last=False)[0].publish()
        if not self._is_line:
            self._gate.bar(LINE, False)
            self._lanes.refresh()
        return True

    def _wake_next(self) -> None:
        """Wake one of the threads that have what they waited for: they do not compete, and each puts on for a while.

        (64 threads, CPython 3.11: a switch of threads for 16 messages; for each message if all are woken at once.)
        """
        self._waker = None
        if self._woken_next:
            self._waker, _ = self._woken_next.popitem(last=False)
            self._left = TURN
            self.count_places()
            wake_putter(self._waker)

    def give_way(self, putter: Putter, wake: Wake) -> bool:
        """Have a thread that found room wait behind those that are to be woken, if there are some and its turn is over.

        Its message does not: it is visible at once. (256 threads at a limit of 100: without this they have as many
        turns each, but of 1 to 100 messages, and after a hundred turns one has put five times what another has.)
        """
        if not self._woken_next:
            return False
        if self._left > 0:
            self._left -= 1
            return False
        self.publish_ready()
        putter.publish()
        putter.wake = wake
        self._woken_next[putter] = None
        return True

    def note_blocked(self, putter: Putter) -> None:
        """It waits, for all the room it has asked for so far."""
        if putter not in self.blocked:
            self.blocked[putter] = self._context.monotonic()
            self._gate.note_change()

    def forget_blocked(self, putter: Putter) -> None:
        """It waits no more; twice is fine."""
        if self.blocked and self.blocked.pop(putter, None) is not None:
            self._gate.note_change()

    def told_blocked(self) -> tuple[int, float, str]:
        """Return how many putters wait, for how long the first has, and for what."""
        first = next(iter(self.blocked), None)
        if first is None:
            return 0, 0.0, ""
        return len(self.blocked), max(0.0, self._context.monotonic() - self.blocked[first]), self._blocks(first)

    def _blocks(self, putter: Putter) -> str:
        """Return what a putter waits for."""
        settings, depth = self._context.settings, self.depth()
        if putter.passed or not self._context.has_limit or not (putter in self.line or self._gate.at_limit):
            return "capacity"
        messages = depth.messages + putter.depth.messages
        if settings.limit_messages is not None and (settings.limit_bytes is None or messages > settings.limit_messages):
            return "limit_messages"
        return "limit_bytes"

    def wake_putters(self) -> None:
        """Have all who wait look why they do."""
        for putter in self.line:
            wake_putter(putter)
        self._gate.room.notify_all()

    # Time ------------------------------------------------------------------------------------------------------------

    def full(self) -> QueueFull:
        """Return what a put is told that found no room below a limit in time."""
        settings = self._context.settings
        refuses = when_full(settings) is Decision.REFUSE
        remedy = "raise the limit with alter_queue" if refuses else "wait longer with timeout_s"
        return QueueFull(
            f"queue {self._context.name!r} is at its limit (limit_messages={settings.limit_messages}, "
            f"limit_bytes={settings.limit_bytes}): settle messages, or {remedy}"
        )

    def patience_s(self, deadline: float | None, disk: Exception | None = None) -> float:
        """Return how long a put that waits for memory does so until it is time to look again, at most.

        Raises:
            QueueFull, DiskFull: the deadline has passed.
        """
        context = self._context
        wait = RETRY_S if deadline is None else min(RETRY_S, deadline - context.monotonic())
        if wait > 0 and (disk is None or when_full(context.settings) is not Decision.REFUSE):
            return wait
        if disk is not None:
            raise DiskFull(f"queue {context.name!r} is out of memory and could not spill: {disk}") from disk
        why = "it is held, reserved, or being spilled: settle what is held, or raise `capacity_bytes`"
        raise QueueFull(f"queue {context.name!r} found no memory in time: {why}")

    # Room ------------------------------------------------------------------------------------------------------------

    def cover(self) -> int:
        """Borrow for what is charged above the bounds; return how much still is."""
        gate = self._gate
        excess = gate.over
        if excess > 0:
            gate.ledger.borrow_most(gate.account, excess, alone=gate.put_slack > 0)
        elif not gate.slack:
            return 0
        return self._trim()

    def _trim(self) -> int:
        """Give up slack that is not needed any more, wake putters; return what is above the bounds."""
        gate = self._gate
        self.is_held_back()
        over = gate.trim()
        if self.line:
            self.admit_line()
        if gate.room.watching and (not gate.put_slack or self._context.has_limit):
            gate.room.notify()
        self._note_mark()
        self._lanes.refresh()
        return over

    def rebalance(self, discharged: int = 0, *, gained: bool = True) -> None:
        """After something was settled or spilled: return slack, lend less, wake waiters.

        Getters only where there is something `gained`: who finds no room, and wakes the next for that, never ends.
        """
        gate = self._gate
        gate.used -= discharged
        gate.give_back_spare()
        self._trim()
        if gate.starved and gained:
            gate.arrived.notify()  # if it leaves some room, it wakes the next


def wake_putter(putter: Putter) -> None:
    """Have it look again, once: it says anew what wakes it."""
    if putter.wake is not None:
        putter.wake()
        putter.wake = None
