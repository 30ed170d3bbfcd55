"""What one transaction of the log will hold: requests of callers, gathered into a batch by the writer.

A *request* is what one caller hands over by value: puts, settled ranges, counts of deliveries, purges, records. A
*unit* is a request whose parts are committed together or not at all. A full disk refuses puts, and units with puts.

    state of a request     who has it
    made                   its caller
    handed over            the writer's queue: it will be done, or told why not, whatever becomes of its caller
    joined                 a batch
    done                   its caller again: `error` says what became of it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Protocol

from qflow.errors import StorageError
from qflow.message import Record
from qflow.storage.blocks import Reference
from qflow.storage.environment import Environment
from qflow.storage.log import removal
from qflow.storage.log.bodies import SHARED_BYTES, shared_among
from qflow.storage.log.calls import Calls
from qflow.storage.log.gates import Gate
from qflow.storage.log.hollowing import Hollowed
from qflow.storage.log.lane import Lane, Step, Turn
from qflow.storage.log.notes import MOST_BYTES, NOTED_LANES, Noting, joint_note, put_note, settle_note
from qflow.storage.log.parts import extend
from qflow.storage.log.rows import Settled

RANGE_WEIGHT = 4096
"""A settled range weighs as much as so many bytes of messages: a batch of either takes about as long."""
Work = Callable[[Environment, AbstractContextManager[object]], None]
"""What is done in place of a batch, given a context in which nobody reads."""


class Party(Protocol):
    """What is told of a unit's end, once, beside its caller: by the writer, in the order of the commits."""

    def committed(self, unit: Unit) -> None:
        """All of the unit is committed, and its puts are visible."""

    def refused(self, unit: Unit) -> None:
        """Nothing of it was confirmed, `unit.error` says why."""


class Request:
    """What one caller has handed over."""

    __slots__ = ("batch", "done", "error", "future", "joined", "rung", "stood", "told")

    def __init__(self) -> None:
        self.batch: Batch | None = None
        """What it has joined."""
        self.joined = False
        """It was handed over: who has reserved room for it need not give that back."""
        self.rung = False
        """Its caller, a thread, waits until it is done, and has told the writer."""
        self.stood = False
        """It was the first that waits to join one when somebody looked after it."""
        self.done = False
        self.error: BaseException | None = None
        self.told: Callable[[], object] | None = None
        """Called by the writer when it is done, perhaps twice; must be quick, and must not raise."""
        self.future: Future[Any] | None = None
        """Resolved when it is done, by a thread in which callbacks of users may run."""

    def weight(self) -> int:
        """Return about how many bytes of messages it holds."""
        return 0

    def join(self, batch: Batch) -> None:
        """Become a part of a batch. By the writer."""

    @property
    def is_logging(self) -> bool:
        """It writes messages, and so is refused where the disk has no room for any."""
        return False

    def note(self, now_ms: int) -> Noting | None:
        """Return what it does as notes; None if that is not as simple. See `direct`."""
        return None

    def starts(self, lane: Lane, first: int) -> None:
        """Note where what it puts begins in a lane."""

    def show(self, turn: Turn, first: int) -> bool:
        """Make visible what was confirmed, while it has the turn; return whether that was done. By its thread."""
        return True

    def refuse(self, error: BaseException, call: Calls) -> None:
        """Note that nothing of it was done, and tell who is concerned beside its caller. By the writer, once."""
        self.error = error

    def outcome(self) -> Any:
        """Return what its future gives, when it is done and there was no error."""
        return None

    @property
    def hollowed(self) -> bool:
        """There was room to give back what is settled."""
        return self.batch is not None and bool(self.batch.hollowed)

    @property
    def short(self) -> bool:
        """There was no room to count references to shared bodies down: blocks that hold some were not removed."""
        return self.batch is not None and self.batch.short


class Put(Request):
    """Messages of one caller for one lane. `first`: their sequences, once confirmed; `expires_ms`: when all expire."""

    __slots__ = (
        "charged", "expires_ms", "first", "lane", "plain", "records", "refused", "size", "sizes", "topics", "visible",
    )  # fmt: skip

    def __init__(
        self,
        lane: Lane,
        records: list[Record],
        sizes: list[int],
        plain: bool,
        size: int,
        charged: int,
        topics: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.lane = lane
        self.records = records
        self.sizes = sizes
        """`len` of each record; with `plain`, that all are bytes, found once: asking again costs 0.01 µs a message."""
        self.plain = plain
        self.size = size
        self.charged = charged
        self.topics = topics
        """Of each record, where the lane is a stream's."""
        self.first, self.expires_ms = -1, 0
        self.refused = False
        """Its room was given back. By its publisher: callers who are interrupted at that do it again."""
        self.visible = False
        """It was shown by its own thread, see `direct`, or is not logged and was published: its room stays taken."""

    @property
    def lanes(self) -> Sequence[Lane]:
        """Those that have its messages."""
        return (self.lane,)

    @property
    def is_logged(self) -> bool:
        return self.lane.is_logged

    def weight(self) -> int:
        return self.charged

    def starts(self, lane: Lane, first: int) -> None:
        self.first = first

    def note(self, now_ms: int) -> Noting | None:
        return self.note_of(self.lane, now_ms)

    def note_of(self, lane: Lane, now_ms: int) -> Noting | None:
        """`note` of what it does to one lane."""
        return put_note(lane, self.records, self.plain, self.size, now_ms) if self.topics is None else None

    def show(self, turn: Turn, first: int) -> bool:
        return self.lane.publisher.show(self, turn, first)

    def give_back(self) -> None:
        """Give back its room, for it was not confirmed; twice is fine."""
        self.lane.publisher.refused(self)

    def join(self, batch: Batch) -> None:
        if self.lane in batch.spread_over:
            batch.part()
        batch.puts.setdefault(self.lane, []).append(self)
        batch.size += self.charged

    @property
    def is_logging(self) -> bool:
        return True

    def refuse(self, error: BaseException, call: Calls) -> None:
        self.error = error
        call(self.give_back)

    def outcome(self) -> Any:
        return self.first


class Unit(Request):
    """Puts and settles of one caller that are committed together or not at all.

    A put whose lane is not logged is published with the rest, after the commit. A record of 4 KiB or more that several
    puts hold, the same object, is stored once.
    """

    __slots__ = ("notes", "parties", "puts", "result", "settles", "size", "values", "writes")

    def __init__(
        self,
        puts: Iterable[Put] = (),
        settles: Iterable[tuple[Lane, list[Settled]]] = (),
        parties: Iterable[Party] = (),
        writes: Iterable[Callable[[Any], Any]] = (),
        size: int = 0,
        values: int = 0,
    ) -> None:
        super().__init__()
        self.size = size
        """About how many bytes `writes` write, if that is much: they are refused where the disk has no room for it."""
        self.values = values
        """About how many records those are, if that is more than a few: each may take a page of its own."""
        self.writes = list(writes)
        """Functions that are run inside its transaction, perhaps twice; see `TransactionLog.write`."""
        self.notes: list[Callable[[Any], Any]] = []
        """As `writes`, but run when its puts have their sequences."""
        self.puts, self.settles, self.parties = list(puts), list(settles), list(parties)
        self.result: Any = None
        """What the future gives; for a party to set."""

    @property
    def is_logging(self) -> bool:
        return self.size > 0 or any(put.is_logged for put in self.puts)

    def weight(self) -> int:
        return self.size + sum(put.weight() for put in self.puts)

    def join(self, batch: Batch) -> None:
        batch.size += self.size
        for put in self.puts:
            if put.is_logged:
                put.join(batch)
        large = (put for put in self.puts if put.is_logged and put.size >= SHARED_BYTES)
        holders = [(put.records, put.sizes) for put in large for _ in put.lanes]
        if len(holders) > 1:
            shared, saved = shared_among(holders)
            batch.shared |= shared
            batch.saved += saved
            if shared:
                batch.part()
        batch.units.append(self)

    def note(self, now_ms: int) -> Noting | None:
        puts = [(put, lane) for put in self.puts if put.is_logged for lane in put.lanes[: NOTED_LANES + 1]]
        sizes = [put.size for put, _ in puts]
        is_shared = sum([size >= SHARED_BYTES for size in sizes]) > 1  # what several hold is stored once
        if is_shared or len(puts) > NOTED_LANES or sum(sizes) > MOST_BYTES or self.writes or self.notes or self.size:
            return None
        settles = [settle_note(lane, ranges) for lane, ranges in self.settles]
        return joint_note([*settles, *[put.note_of(lane, now_ms) for put, lane in puts]])

    def starts(self, lane: Lane, first: int) -> None:
        for put in self.puts:
            if lane in put.lanes:
                put.starts(lane, first)

    def outcome(self) -> Any:
        return self.result

    def publish(self, call: Calls) -> None:
        """Make the puts visible that are not logged, and tell the parties. By the writer, after the commit."""
        for put in [put for put in self.puts if not put.is_logged]:
            call(put.lane.publisher.publish_transient, put)
        for party in self.parties:
            call(party.committed, self)
        del self.parties[:], self.writes[:], self.notes[:]  # their `unit` is this one

    def refuse(self, error: BaseException, call: Calls) -> None:
        self.error = error
        for put in self.puts:
            put.refuse(error, call)
        for party in self.parties:
            call(party.refused, self)
        del self.parties[:], self.writes[:], self.notes[:]


class Order(Request):
    """Anything else: a function that adds it to a batch."""

    __slots__ = ("_add", "after", "alone", "ranges")

    def __init__(
        self, add: Callable[[Batch], object], alone: Work | None = None, after: Iterable[Lane] | None = ()
    ) -> None:
        super().__init__()
        self._add = add
        self.ranges = 0  # so many that it writes, it weighs
        self.after = after
        """Puts into these lanes that were handed over before come before it, however long; None: all that was."""
        self.alone = alone
        """What is done instead of a transaction; such a request has a batch of its own."""

    def weight(self) -> int:
        return RANGE_WEIGHT * self.ranges

    def join(self, batch: Batch) -> None:
        self._add(batch)


class Batch:
    """What one transaction will hold; see the module. Of the writer alone."""

    gate: Gate
    """Held until it is done, if it holds requests. A thread that waits for it opens it for the next when it passes."""
    saved = 0
    """How many bytes less it is that records are stored once, or ahead."""
    references: Mapping[int, Reference] = MappingProxyType({})
    """To records that are stored already, by the identity of those: see `ahead`."""
    hollowed: Mapping[Lane, Hollowed] = MappingProxyType({})
    """How far `hollows` came; empty if there was no room for that."""
    deleted: tuple[int, ...] = ()
    """Deleted queues of which nothing is left."""
    short = False
    """See `Request.short`."""
    damage: tuple[int, BaseException] | None = None  # at this deleted owner, so that nothing of any was removed
    is_part = turned = False
    applies = False  # it is to be in the log itself, with all before it
    free = 0
    """Pages that were free in the file, if the disk was full."""
    size = 0
    committing = committed = False
    error: BaseException | None = None
    """Why nothing of it was written, if so."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.puts: dict[Lane, list[Put]] = {}
        self.spreads: list[Any] = []
        """Puts of several lanes, the same of all of them, where nobody else puts anything; see `Spread`."""
        self.spread_over: set[Lane] = set()
        """Those lanes."""
        self.units: list[Unit] = []
        self.shared: dict[int, Record] = {}
        """Records that are stored once for several puts, by identity."""
        self.settled: dict[Lane, list[list[int]]] = {}
        """[first, end, messages, bytes] of each settled range."""
        self.attempts: dict[Lane, list[tuple[int, int, int]]] = {}
        """(first, end, number of earlier deliveries), later ones over earlier ones."""
        self.purges: set[Lane] = set()
        self.damaged: list[bytes] = []
        self.hollows: list[Lane] = []
        self.deletes: list[int] = []
        """Deleted queues, by number, a part of which is to be removed."""
        self.writes: list[Callable[[Any], None]] = []
        self.plan: list[Step] = []
        self.spread_out: Any = None
        """How its spreads leave the lanes that were written together; see `SpreadOut`."""
        self.removes = removal.REMOVED_AT_ONCE
        """Settled blocks of a lane that are removed, at most; less where it is a part of a batch, on a full disk."""

    def add(self, request: Request) -> None:
        """Have a request in it."""
        self.requests.append(request)
        request.batch = self
        request.join(self)

    def part(self) -> None:
        """Have each lane of its spreads put by itself: they meet others, or what is stored once."""
        spreads, self.spreads, self.spread_over = self.spreads, [], set()
        for spread in spreads:
            for lane in spread.lanes:
                self.puts.setdefault(lane, []).append(spread)

    def settle(self, lane: Lane, ranges: Iterable[Settled]) -> None:
        """Add settled ranges, joined with those before where they touch."""
        extend(self.settled.setdefault(lane, []), ranges, lane.border)

    @property
    def is_empty(self) -> bool:
        """Nothing is to be written, and no unit to be published."""
        others = self.puts, self.units, self.writes, self.purges, self.deletes, self.hollows, self.damaged
        return not (self.is_settling or any(others))

    @property
    def is_settling(self) -> bool:
        """It holds what is tried again where it failed."""
        return bool(self.settled or self.attempts)

    @property
    def is_writing(self) -> bool:
        """It holds what may be refused for lack of room on the disk."""
        return bool(self.puts or self.spreads) or any(unit.size for unit in self.units)

    @property
    def lanes(self) -> int:
        """How many lanes it puts messages into."""
        return len(self.puts) + len(self.spread_over)

    def all_settled(self) -> dict[Lane, list[list[int]]]:
        """Return what the batch settles, units included. A copy: what others settled outlives a unit's refusal."""
        if not self.units:
            return self.settled
        settled = {lane: list(parts) for lane, parts in self.settled.items()}
        for unit in self.units:
            for lane, ranges in unit.settles:
                settled.setdefault(lane, []).extend(map(list, ranges))
        return settled

    def refuse_messages(self, error: StorageError, call: Calls) -> None:
        """Refuse its messages, and the units that hold some, whole."""
        for request in self.requests:
            if request.is_logging and request.error is None:
                request.refuse(error, call)
        self.puts, self.spreads, self.spread_over, self.shared = {}, [], set(), {}
        self.size = self.saved = 0
        self.units = [unit for unit in self.units if unit.error is None]

    def let_go(self) -> None:
        """Let go of what it held: whoever keeps a request keeps no bodies."""
        self.requests, self.plan, self.puts, self.units, self.shared = [], [], {}, [], {}
        self.spreads, self.spread_out = [], None

    def rest(self) -> Batch | None:
        """Return a batch of what is to be tried again where this one failed: who did not wait must not lose it."""
        again = Batch()
        again.try_again(self)
        return again if again.is_settling else None

    def try_again(self, failed: Batch) -> None:
        """Have in it what nobody waits for of one that failed."""
        self.settled = {lane: parts for lane, parts in failed.settled.items() if parts}
        self.attempts = failed.attempts
