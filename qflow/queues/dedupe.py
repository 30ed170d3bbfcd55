"""Puts that bear a key: one of each key is stored within the window of its queue, however often it is put.

    key in the log            value
    room `dedupe`             owner:key -> sequence, until when it holds (ms)
    room `dedupe-until`       until:owner:key -> nothing; finds what has expired

A put takes a *claim* of its key. While that is open, others with the key wait for its outcome. Both records are written
in the transaction of the message, so a crash keeps all of them or none. Of the keys that hold, 10,000 of a broker are
in memory; a queue of which some were dropped there reads the log for a key that it does not find.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from qflow.config import parse_timeout
from qflow.durations import Duration
from qflow.errors import InvalidArgument, ProducerBusy
from qflow.memory.waiting import StraightLock, sheltered
from qflow.message import Record, kept_ms
from qflow.queues.assembly import Insert
from qflow.queues.puts import Puts
from qflow.queues.together import Together
from qflow.storage.log import facts
from qflow.storage.log.transaction_log import TransactionLog, Unit

ROOM, UNTIL = "dedupe", "dedupe-until"
MAX_KEY_BYTES = 255
KNOWN_AT_ONCE = 10_000
"""Keys kept in memory, of all queues: 3 MB."""
REMOVED_AT_ONCE = 500
NEVER_MS = 2**63
_HEX = 16
_NUMBER = 8
_RECORDS = 2

Answer = int | Future[int | None] | None
"""The sequence that the key has; what tells it, or None, once another put is done; or None: it is taken."""


class Claim:
    """One key of one queue, for one put: a party of the unit that it is committed with, as `Together` takes it."""

    depth = None
    writes = ()

    def __init__(self, keys: Keys, puts: Puts, key: str, until_ms: int) -> None:
        self.place = puts.owner, key
        self.until_ms = until_ms
        self.outcome: Future[int | None] = Future()
        """The sequence; None if nothing was stored."""
        self.outcome.set_running_or_notify_cancel()  # so that nobody who waits for it can cancel it
        self.ended = False
        self._keys = keys
        self._puts = puts
        self._unit: Any = None

    @property
    def queue(self) -> Claim:
        """Nobody else's, so that it takes nothing of the depth of one."""
        return self

    @property
    def unit(self) -> Any:
        return self._unit

    @unit.setter
    def unit(self, unit: Any) -> None:
        self._unit = unit
        unit.notes = [self.write]
        unit.size += 4 * len(self.place[1]) + 100
        unit.values += _RECORDS

    @property
    def sequence(self) -> int | None:
        """Where the message is; None where the queue turned it away."""
        return next((put.first for put in self._unit.puts if put.lane.publisher is self._puts), None)

    def write(self, txn: Any) -> None:
        """Note the key, in the transaction that stores the message. By the writer, again if that fails."""
        sequence = self.sequence
        if sequence is not None:
            name = _name(self.place)
            value = sequence.to_bytes(_NUMBER, "big") + self.until_ms.to_bytes(_NUMBER, "big")
            facts.write(txn, ROOM, {name: value})
            facts.write(txn, UNTIL, {f"{self.until_ms:0{_HEX}x}:{name}": b""})

    def committed(self, unit: Unit | None) -> None:
        """Called by the writer, once."""
        self._keys.end(self, self.sequence)

    def refused(self, unit: Unit | None) -> None:
        """Called by the writer, once."""
        self._keys.end(self, None)

    def give_up(self) -> None:
        """Let other puts have the key, unless the log has this one already; twice is fine."""
        if self._unit is None or not self._unit.joined:
            self._keys.end(self, None)

    def settles(self) -> list[Any]:
        """Nothing leaves a queue."""
        return []


class Keys:
    """What all queues of a broker know of keys. Thread-safe."""

    def __init__(
        self,
        log: TransactionLog,
        together: Together,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        known_at_once: int = KNOWN_AT_ONCE,
    ) -> None:
        self.together = together
        self.monotonic = monotonic
        self._log = log
        self._clock = clock
        self._known_at_once = known_at_once
        self._lock = StraightLock()  # never held while something is read
        self._reading = threading.Lock()
        self._open: dict[tuple[int, str], Claim] = {}
        self._known: OrderedDict[tuple[int, str], tuple[int, int]] = OrderedDict()
        self._whole: dict[int, bool] = {}
        """Queues whose keys were read, and whether all that hold are in memory."""
        self._due_ms = 0
        """When something in the log expires, at the earliest, as far as that is known."""

    # One put ---------------------------------------------------------------------------------------------------------

    def put(self, puts: Puts, key: object, number: int, record: Record, timeout_s: Duration | None) -> int | None:
        """Put a message unless its key is stored; return the sequence of the one that is. See `Queue.put`."""
        timeout = parse_timeout(timeout_s)
        ends = None if timeout is None else self.monotonic() + timeout
        claim = self.claim(puts, key, record)
        try:
            while (answer := self.ask(claim)) is not None:
                if isinstance(answer, int):
                    return answer
                try:
                    stored = answer.result(None if ends is None else max(0.0, ends - self.monotonic()))
                except TimeoutError:
                    raise self.busy(claim) from None
                if stored is not None:
                    return stored
            left = None if ends is None else max(0.0, ends - self.monotonic())
            receipts = self.together.commit([Insert(puts, number, [record])], [claim], timeout=left)  # type: ignore[list-item]
        except BaseException:
            claim.give_up()
            raise
        return receipts[0].first

    def claim(self, puts: Puts, key: object, record: Record) -> Claim:
        """Return a claim that has not taken its key yet.

        Raises:
            InvalidArgument: the key is not 1 to 255 bytes of UTF-8, or the queue has no window for it.
            BrokerClosed, QueueDeleted: its queue has ended.
        """
        puts.context.check_open()
        window_s, log = puts.settings.dedupe_window_s, puts.context.log
        if window_s is None or log is None:
            raise InvalidArgument(
                f"queue {puts.name!r} stores no keys: dedupe_key= needs a durable queue with dedupe_window_s, the time "
                "for which a key holds"
            )
        if getattr(record, "logged", True) is False:
            raise InvalidArgument("dedupe_key= and durable=False do not go together: a key is stored with its message")
        return Claim(self, puts, check_key(key), kept_ms(self._clock() + window_s))

    def is_quick(self, claim: Claim) -> bool:
        """Tell whether `ask` reads nothing."""
        return self._whole.get(claim.place[0]) is True

    def ask(self, claim: Claim) -> Answer:
        """Take the key, or tell who has it. Cost: 2 µs; a read of the log where not all keys are in memory."""
        owner = claim.place[0]
        if owner not in self._whole:
            self._learn(owner)
        answer = self._ask(claim)
        if answer is None and not self._whole.get(owner) and (found := self._read(claim)) is not None:
            self.end(claim, found)
            return found
        return answer

    @sheltered
    def _ask(self, claim: Claim) -> Answer:
        now_ms = self._clock() * 1000
        with self._lock:
            other = self._open.get(claim.place)
            if other is not None and other is not claim:
                return other.outcome
            known = self._known.get(claim.place)
            if known is not None and known[1] > now_ms:
                return known[0]
            if not claim.ended:
                self._open[claim.place] = claim
        return None

    @sheltered
    def _read(self, claim: Claim) -> int | None:
        """Return the sequence that the log has for a key."""
        value = self._log.fact(ROOM, _name(claim.place))
        if value is None:
            return None
        sequence, until_ms = _numbers(value)
        claim.until_ms = until_ms if until_ms > self._clock() * 1000 else claim.until_ms
        return sequence if claim.until_ms == until_ms else None

    def busy(self, claim: Claim) -> ProducerBusy:
        """Return the error for another put whose outcome did not come in time."""
        return ProducerBusy(
            f"another put with dedupe_key {claim.place[1]!r} is on its way, and what became of it was not known in "
            "time; put it again, or wait longer"
        )

    @sheltered
    def end(self, claim: Claim, sequence: int | None) -> None:
        """Note the outcome of a claim, and tell who waits for it; twice is fine."""
        with self._lock:
            claim.ended = True
            if self._open.get(claim.place) is claim:
                del self._open[claim.place]
                if sequence is not None:
                    self._note(claim.place, sequence, claim.until_ms)
            if not claim.outcome.done():
                claim.outcome.set_result(sequence)

    def _note(self, place: tuple[int, str], sequence: int, until_ms: int) -> None:
        """Keep a key in memory. Under the lock."""
        self._known.pop(place, None)
        self._known[place] = sequence, until_ms
        self._due_ms = min(self._due_ms, until_ms)
        now_ms = self._clock() * 1000
        while self._known:
            (owner, _), (_, oldest_ms) = oldest = next(iter(self._known.items()))
            if oldest_ms > now_ms:
                if len(self._known) <= self._known_at_once:
                    break
                if owner in self._whole:  # else it was deleted
                    self._whole[owner] = False
            del self._known[oldest[0]]

    # The log ---------------------------------------------------------------------------------------------------------

    @sheltered
    def _learn(self, owner: int) -> None:
        """Read the keys of a queue, as many as memory is to have."""
        with self._reading:
            if owner in self._whole:
                return
            prefix, found, position = f"{owner:x}:", list[tuple[str, bytes]](), b""
            while len(found) < self._known_at_once:
                page = self._log.facts_page(ROOM, prefix, position)
                found += page.facts
                position = page.position
                if not position:
                    break
            self._take_over(owner, prefix, found, whole=not position)

    @sheltered
    def _take_over(self, owner: int, prefix: str, found: list[tuple[str, bytes]], *, whole: bool) -> None:
        with self._lock:
            self._whole[owner] = whole
            for name, value in sorted(found, key=lambda one: one[1][_NUMBER:]):
                self._note((owner, name[len(prefix) :]), *_numbers(value))

    def forget(self, owner: int) -> None:
        """Have nothing of a queue in memory: it was deleted. What the log has of it goes when it expires."""
        with self._lock:
            if self._whole.pop(owner, None) is not None:
                for place in [place for place in self._known if place[0] == owner]:
                    del self._known[place]

    def forget_expired(self) -> bool:
        """Remove a bounded number of keys from the log that hold no more; return whether there may be others."""
        now_ms = int(self._clock() * 1000)
        if self._due_ms > now_ms or self._log.failed:
            return False
        next_ms, self._due_ms = self._due_ms, NEVER_MS  # before the look: what is stored meanwhile lowers it
        try:
            next_ms = self._remove_expired(now_ms)
        finally:
            with self._lock:
                self._due_ms = min(self._due_ms, next_ms)
        return next_ms <= now_ms

    def _remove_expired(self, now_ms: int) -> int:
        """Do that, in a commit if there is something; return when the next expires."""
        first = self._log.facts_page(UNTIL, most=1).facts
        nexts = [_until(first[0][0]) if first else NEVER_MS]
        if nexts[0] <= now_ms:
            self._log.commit(self._log.write(partial(_remove, now_ms, nexts)))
        return nexts[-1]


def _remove(now_ms: int, nexts: list[int], txn: Any) -> None:
    """Remove what has expired; the last of `nexts` is when the next does."""
    nexts.append(NEVER_MS)
    for name, _ in facts.page(txn, UNTIL, most=REMOVED_AT_ONCE).facts:
        until_ms, key = _until(name), name[_HEX + 1 :]
        nexts[-1] = until_ms
        if until_ms > now_ms:
            break
        value = facts.get(txn, ROOM, key)
        if value is not None and _numbers(value)[1] == until_ms:
            facts.write(txn, ROOM, {key: None})
        facts.write(txn, UNTIL, {name: None})


def check_key(key: object) -> str:
    """Return a valid key. Raises InvalidArgument: it is none."""
    try:
        if isinstance(key, str) and 0 < len(key.encode()) <= MAX_KEY_BYTES:
            return key
    except UnicodeEncodeError:
        pass
    raise InvalidArgument(f"dedupe_key must be a text of 1 to {MAX_KEY_BYTES} bytes of UTF-8, got {key!r:.80}")


def _name(place: tuple[int, str]) -> str:
    return f"{place[0]:x}:{place[1]}"


def _until(name: str) -> int:
    return int(name[:_HEX], 16)


def _numbers(value: bytes) -> tuple[int, int]:
    return int.from_bytes(value[:_NUMBER], "big"), int.from_bytes(value[_NUMBER:], "big")
