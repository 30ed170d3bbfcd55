"""Idempotent producers: a message that bears a producer's name and a number is stored once, however often it is sent.

A publish takes a *claim* of the number first. The answer depends on the state of the number:

    number                                answer
    taken by another claim                pending: its outcome decides. Committed: duplicate. Refused: taken again
    stored                                duplicate: acknowledged and counted, nothing is stored
    more than 1,024 below the highest     InvalidArgument: it is not known any more whether it is stored
    any other, in whichever order         new: the claim has it, and is committed with the message

This window moves with a commit, not with a claim. A producer that publishes without waiting should have at most 1,024
messages outstanding: else a number that was refused may lie below the window before it is sent again.

The claim's `write` runs in the transaction of the message, so a crash keeps both or none. It adds the number to the
record which that transaction reads: numbers committed, and those added by the same batch before, but none that was
refused. After the commit the writer updates the windows in memory to the same. Windows of 10,000 producers are kept in
memory, 5.5 MB; others are read again.

A claim that is never ended would hold its number for good. So it is made first and taken then, where an `except` that
gives it up is in force already:

    claim = producers.claim("sensor-7", 41)
    try:
        if not claim.take(timeout_s):
            return                       # a duplicate
        unit = claim.unit = Unit(…)      # with the claim as a party, and its `write`
        log.join(unit)
    except BaseException:
        claim.give_up()
        raise

Take it before anything else that other calls may wait for, such as room in a queue.
"""

from __future__ import annotations

import reprlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from enum import Enum
from typing import Any

from qflow.errors import CorruptionError, InvalidArgument, ProducerBusy
from qflow.memory.line import FOREVER
from qflow.memory.waiting import StraightLock, attend, sheltered
from qflow.message import kept_ms
from qflow.storage.log.transaction_log import Unit
from qflow.storage.streams import producers as table
from qflow.storage.streams.producers import WINDOW, Window, with_number

MAX_NAME_BYTES = 255
MAX_NUMBER = 2**63 - 1
KNOWN_AT_ONCE = 10_000
"""Producers without open claims whose windows are kept in memory."""

_quote = reprlib.Repr()
_quote.maxstring = 120


class Answer(Enum):
    """The result of taking a claim; see the module."""

    NEW = "new"
    DUPLICATE = "duplicate"
    PENDING = "pending"


class _State(Enum):
    OPEN = "open"
    COMMITTED = "committed"
    REFUSED = "refused"


class _Known:
    """One producer in memory."""

    __slots__ = ("claims", "name", "window")

    def __init__(self, name: str, window: Window | None) -> None:
        self.name = name
        self.window = window
        """The numbers that are committed; None if there are none."""
        self.claims: dict[int, Claim] = {}
        """Open claims, by number."""


class Claim:
    """One number of one producer, for one attempt to publish it. A party of the unit it is committed with."""

    __slots__ = ("_blocker", "_known", "_producers", "_state", "_waiting", "_wake", "number", "producer", "unit")

    def __init__(self, producers: Producers, producer: str, number: int) -> None:
        """Made by `Producers.claim`."""
        self.producer = producer
        self.number = number
        self.unit: Unit | None = None
        """The unit it is committed with; set before that joins a batch."""
        self._producers = producers
        self._state = _State.OPEN
        self._known: _Known | None = None
        """Its producer's entry; set when it takes the number, and kept."""
        self._blocker: Claim | None = None
        """The claim whose outcome it waits for."""
        self._wake: Callable[[], object] | None = None
        self._waiting: list[Callable[[], object]] = []

    def busy(self, timeout_s: float | None) -> ProducerBusy:
        """Return the error for another claim whose outcome did not come in time."""
        return ProducerBusy(
            f"number {self.number} of producer {_quote.repr(self.producer)} is on its way already, and what "
            f"became of it was not known within {timeout_s} s; publish it again, or wait longer"
        )

    def take(self, timeout_s: float | None = None) -> bool:
        """Take the number and return True; False if it is stored. Waits while another claim has it.

        Args:
            timeout_s: seconds to wait; None = without end.

        Raises:
            InvalidArgument: it is below the window.
            ProducerBusy: the outcome of the other claim did not come in time.
            CorruptionError: the producer's record is damaged.
            StorageError: it could not be read.
        Cost: 2 µs; 10 µs and a page from the disk, where the producer is not in memory.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        answers: list[Answer] = []

        def step(wake: Callable[[], object]) -> float | None:
            self._producers.leave(self)
            answer = self.try_take(wake)
            if answer is not Answer.PENDING:
                answers.append(answer)
                return None
            left = FOREVER if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise self.busy(timeout_s)
            return left

        attend(step, self._stop)
        return answers[0] is Answer.NEW

    def _stop(self) -> None:
        """End an attempt to take the number; if it was taken, give it up."""
        self._producers.leave(self)
        if self._known is not None:
            self._producers.end(self, _State.REFUSED)

    def try_take(self, wake: Callable[[], object] | None = None) -> Answer:
        """Take the number if that can be done at once.

        Args:
            wake: called after PENDING, as soon as there may be another answer: ask again then. Called by the writer of
                the log, or by a thread that gives up, perhaps twice: it must be quick and must not raise.

        Raises:
            As `take`, without ProducerBusy.
        """
        return self._producers.answer(self, wake)

    @property
    def is_known(self) -> bool:
        """Its producer is in memory, so that `take` reads nothing."""
        return self._producers.knows(self.producer)

    def learn(self) -> None:
        """Read its producer into memory, so that `take` need not."""
        self._producers.learn(self.producer)

    def write(self, txn: Any) -> None:
        """Note the number as stored, in the transaction that stores the message. By the writer, again if that fails.

        Cost: 4 µs, and one page of the log.
        """
        assert self._known is not None, "only who has taken a number may write it"
        self._producers.write(txn, self._known, self.number)

    def committed(self, unit: Unit | None) -> None:
        """Called by the writer, once."""
        self._producers.end(self, _State.COMMITTED)

    def refused(self, unit: Unit | None) -> None:
        """Called by the writer, once."""
        self._producers.end(self, _State.REFUSED)

    @sheltered
    def give_up(self) -> None:
        """Let other claims have the number, unless the log has this one already.

        Twice is fine, and so is giving up what was never taken.
        """
        self._producers.leave(self)
        if self.unit is None or not self.unit.joined:
            self._producers.end(self, _State.REFUSED)


class Producers:
    """What all producers of a broker have published. Thread-safe.

    An entry with claims is busy; others are idle, and may be dropped. Entries are added under `_reading`, so none is
    made from a record that was read before a claim of its producer was committed.
    """

    def __init__(
        self,
        read: Callable[[], AbstractContextManager[Any]],
        clock: Callable[[], float] = time.time,
        known_at_once: int = KNOWN_AT_ONCE,
    ) -> None:
        """`read`: as `TransactionLog.read`; `clock`: a wall clock."""
        self._read = read
        self._clock = clock
        self._known_at_once = known_at_once
        self._lock = StraightLock()  # never held while something is read
        self._reading = threading.Lock()
        self._busy: dict[str, _Known] = {}
        self._idle: OrderedDict[str, _Known] = OrderedDict()
        self.duplicates_total = 0
        """Publishes that were acknowledged and not stored again."""

    @sheltered
    def __len__(self) -> int:
        """Return how many producers are in memory."""
        with self._lock:
            return len(self._busy.keys() | self._idle.keys())

    def claim(self, producer: object, number: object) -> Claim:
        """Return a claim that has not taken its number yet.

        Raises:
            InvalidArgument: the name is not 1 to 255 bytes of UTF-8 without NUL, or the number not 0 to 2**63 - 1.
        Cost: 1 µs.
        """
        return Claim(self, check_producer(producer), check_number(number))

    @sheltered
    def answer(self, claim: Claim, wake: Callable[[], object] | None) -> Answer:
        """See `Claim.try_take`."""
        name = claim.producer
        with self._lock:
            known = self._find(name)
            if known is not None:
                return self._answer(known, claim, wake)
        with self._reading:
            with self._lock:
                known = self._find(name)
                if known is not None:  # another thread was here first
                    return self._answer(known, claim, wake)
            with self._read() as txn:
                window = table.read(txn, name)
            with self._lock:
                known = self._idle[name] = _Known(name, window)
                try:
                    return self._answer(known, claim, wake)
                finally:
                    self._evict()

    @sheltered
    def knows(self, name: str) -> bool:
        """Return whether a producer is in memory."""
        with self._lock:
            return self._find(name) is not None

    @sheltered
    def learn(self, name: str) -> None:
        """Read the record of a producer, unless it is in memory."""
        with self._reading:
            if self.knows(name):
                return  # another thread was here first
            with self._read() as txn:
                window = table.read(txn, name)
            with self._lock:
                self._evict()
                self._idle[name] = _Known(name, window)  # perhaps one more than `known_at_once`, until a claim is taken

    def _find(self, name: str) -> _Known | None:
        """Return a producer's entry, and note that it was used. Under the lock."""
        known = self._busy.get(name)
        if known is None:
            known = self._idle.get(name)
            if known is not None:
                self._idle.move_to_end(name)
        return known

    def _answer(self, known: _Known, claim: Claim, wake: Callable[[], object] | None) -> Answer:
        """See `Claim.try_take`. Under the lock. Interrupted, it leaves nothing, or a claim that `end` removes."""
        assert claim._state is _State.OPEN, "a claim that has ended is of no use: make a new one"
        assert claim._known is None, "it has taken its number already"
        number, window = claim.number, known.window
        was, claim._blocker = claim._blocker, None
        if was is not None and was._state is _State.COMMITTED:  # also if it is below the window meanwhile
            self.duplicates_total += 1
            return Answer.DUPLICATE
        blocker = known.claims.get(number)
        if blocker is not None:
            claim._blocker, claim._wake = blocker, wake
            if wake is not None:
                blocker._waiting.append(wake)
            return Answer.PENDING
        if window is not None and window.has(number):
            self.duplicates_total += 1
            return Answer.DUPLICATE
        if window is not None and window.is_below(number):
            raise InvalidArgument(
                f"number {number} of producer {_quote.repr(claim.producer)} is more than {WINDOW:,} below its highest, "
                f"{window.highest}: nobody knows any more whether it is stored, and it was not stored now. Look whether"
                f" it arrived; if it did not, publish it under a number above {window.highest}"
            )
        claim._known = known
        known.claims[number] = claim
        self._busy[known.name] = known
        self._idle.pop(known.name, None)
        return Answer.NEW

    def _evict(self) -> None:
        """Drop the idle producers that were not used for the longest. Under the lock."""
        while self._idle and len(self._idle) + len(self._busy) > self._known_at_once:
            self._idle.popitem(last=False)

    def leave(self, claim: Claim) -> None:
        """End the wait of a claim; it may still ask for the outcome of the one it waited for."""
        with self._lock:
            if claim._blocker is not None and claim._wake is not None:
                with suppress(ValueError):  # it was woken
                    claim._blocker._waiting.remove(claim._wake)
            claim._wake = None

    def write(self, txn: Any, known: _Known, number: int) -> None:
        """See `Claim.write`."""
        try:
            window = table.read(txn, known.name)
        except CorruptionError:
            window = None
        # Where the producer was removed from the table, or its record is damaged since, memory has the same window: all
        # batches before this one are done, so it has all that is committed.
        table.write(txn, known.name, with_number(window or known.window, number, kept_ms(self._clock())))

    def die(self, lock: Any) -> None:
        """In a forked child: refuse everything."""
        self._lock = self._reading = lock

    def end(self, claim: Claim, state: _State) -> None:
        """Note the outcome of a claim, and wake the claims that wait for it. Interrupted, it may be called again."""
        with self._lock:
            known = claim._known
            if known is not None:
                if state is _State.COMMITTED:
                    known.window = with_number(known.window, claim.number, kept_ms(self._clock()))
                if known.claims.get(claim.number) is claim:
                    del known.claims[claim.number]
                # Called again, there may be a new entry of the producer, whose window this claim must not move.
                if not known.claims and self._busy.get(known.name) is known:
                    self._idle[known.name] = known
                    self._busy.pop(known.name, None)
                    self._evict()
            if claim._state is _State.OPEN:
                claim._state = state
            waiting = tuple(claim._waiting)  # no claim is added any more: the number is free or stored
        for wake in waiting:
            wake()
        claim._waiting.clear()


def check_producer(producer: object) -> str:
    """Return a valid name of a producer: 1 to 255 bytes of UTF-8 without NUL. Raises InvalidArgument: it is none."""
    if not isinstance(producer, str):
        raise InvalidArgument(f"a producer's name must be str, not {type(producer).__name__}")
    try:
        size = len(producer.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"producer name {_quote.repr(producer)} cannot be encoded as UTF-8: {error.reason}"
        ) from error
    if not 0 < size <= MAX_NAME_BYTES:
        raise InvalidArgument(
            f"a producer's name takes 1 to {MAX_NAME_BYTES} bytes of UTF-8; {_quote.repr(producer)} takes {size:,}"
        )
    if "\0" in producer:
        raise InvalidArgument(f"producer name {_quote.repr(producer)} contains NUL: leave it out")
    return producer


def check_number(number: object) -> int:
    """Return a valid number of a message: an int from 0 to 2**63 - 1. Raises InvalidArgument: it is none."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise InvalidArgument(f"a producer's number must be int, not {type(number).__name__}")
    if not 0 <= number <= MAX_NUMBER:
        shown = number if number.bit_length() <= 128 else "a far longer one"  # Python may refuse to print it
        raise InvalidArgument(f"a producer's number is 0 to 2**63 - 1, not {shown}")
    return int(number)
