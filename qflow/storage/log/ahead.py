"""What of one large request is stored ahead of its commit: so that no transaction holds all of it.

LMDB keeps what a transaction writes in memory until the commit, and nobody else commits meanwhile. So the large bodies
of a large request are stored as `bodies`, in parts, each a commit, between which those of others come; a body that is
larger than a part, in pieces. The last commit, the one that makes its messages exist, holds references to them.

    state       what the writer does                                  what a crash leaves
    idle        what is handed over                                   nothing
    storing     a part, a batch of others, a part, …                  bodies that a note names: removed at opening
    stored      commits the request, without the note                 the same, or all of it
    removing    removes what was stored for one that was refused      the same, or nothing

What must not pass a request that is being stored waits behind it: what puts into the same lanes, what asks for all that
was handed over before, and what is large itself. All else goes by. Of the writer alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import islice
from typing import Any

from qflow.message import Record, is_logged, kept_ms
from qflow.named_tuples import NamedTuple
from qflow.storage import encoding
from qflow.storage.blocks import Reference
from qflow.storage.joining import Join
from qflow.storage.log import bodies
from qflow.storage.log.batch import Batch, Order, Put, Request, Unit
from qflow.storage.log.keys import LAST_LANE

LARGE_BYTES = 8 * 2**20
"""A request with more of large bodies is stored ahead."""
BODY_BYTES = encoding.MAX_BYTES
"""From this size on a body is large: it takes a block of its own wherever it lies."""
PART_BYTES = 2**20
"""Stored in one commit. Pieces of a body are as large, or larger if they would be too many."""
REMOVED_AT_ONCE = 256
"""Records removed in one commit."""
FEW_AT_ONCE = 8
"""And where the disk is full."""
_REFERENCE_BYTES = 64
"""Room for a reference in its block."""
_WRITES = object()
"""A place in which what units write besides messages keeps its order."""


class _Body(NamedTuple):
    record: Record
    size: int
    uses: int
    """How many messages are this one record."""


class _Piece(NamedTuple):
    """Bytes of a body, or all of it as piece 0."""

    body: int
    """The place of that among the others."""
    number: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Ahead:
    """See the module. One a log."""

    def __init__(self, join: Join, clock: Callable[[], float], left: range) -> None:
        """`left`: the numbers of what was stored ahead when the log was closed, or its owner killed."""
        self._join = join
        self._clock = clock
        self.request: Request | None = None
        """What is being stored, or is."""
        self.behind: deque[Request] = deque()
        """What waits for that."""
        self.stuck = False
        """There was no room to remove what is stored for nobody."""
        self._places: set[Hashable] = set()
        """Where nothing may pass."""
        self._error: BaseException | None = None
        """Why a part was not stored."""
        self._bodies: list[_Body] = []
        self._pieces: list[_Piece] = []
        """Of all of them, in order."""
        self._stored = 0
        """How many of those are."""
        self._part: list[_Piece] = []
        """Those that the part holds which is being written."""
        self._references: dict[int, Reference] = {}
        """To those that are stored, by identity of the record."""
        self._numbers = left
        """Of all of them; empty if there is no note."""
        self._more = False
        """Not all was removed."""
        self.is_active = bool(left)
        """It is not idle, or something waits behind."""

    # States ----------------------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """The next step is to be taken."""
        return self.request is not None or (bool(self._numbers) and not self.stuck)

    @property
    def is_over(self) -> bool:
        """The request can be committed, or is to be refused."""
        return self.request is not None and (len(self._references) == len(self._bodies) or self._error is not None)

    def begin(self, request: Request) -> bool:
        """Take a request that is large, if storing it ahead makes its transaction smaller; return whether."""
        if self.request is not None or self._numbers:
            return False
        found = _large_bodies(request)
        if sum(body.size for body in found) <= LARGE_BYTES:
            return False
        self._bodies, self._stored = found, 0
        self._pieces = [piece for place, body in enumerate(found) for piece in _pieces_of(place, body.size)]
        self._places = set(_places_of(request))
        self.request = request
        self.is_active = True
        return True

    def holds_back(self, request: Request) -> bool:
        """Keep a request that must not pass; return whether."""
        places = None if isinstance(request, Order) and request.after is None else _places_of(request)
        is_large = request.is_logging and request.weight() > LARGE_BYTES
        if places is not None and not is_large and self._places.isdisjoint(places):
            return False
        self._places.update(_places_of(request))
        self.behind.append(request)  # last: where memory runs out before, the request is not kept, and is refused
        return True

    def let_go(self) -> Iterable[Request]:
        """Return what was behind, the last one first."""
        behind, self.behind = self.behind, deque()
        self._places.clear()
        self.is_active = bool(self._numbers)
        return reversed(behind)

    # Parts -----------------------------------------------------------------------------------------------------------

    def next_part(self) -> Unit | None:
        """Return what is to be committed next, alone; None if that is the request, or nothing."""
        if self.request is None:
            return self._removal() if self._numbers else None
        if self.is_over:
            return None
        self._part, size = [], 0
        for piece in islice(self._pieces, self._stored, None):
            if size and size + piece.size > PART_BYTES:
                break
            size += piece.size
            self._part.append(piece)
        return Unit(writes=[self._store], parties=[self], size=size, values=2 * len(self._part) + 1)

    def _removal(self) -> Unit:
        limit = FEW_AT_ONCE if self.stuck else REMOVED_AT_ONCE

        def remove(txn: Any) -> None:
            self._more = bodies.remove_ahead(txn, self._numbers, limit)

        return Unit(writes=[remove], parties=[self], values=limit)

    def _store(self, txn: Any) -> None:
        """Write a part; perhaps twice, if the first transaction fails."""
        if not self._stored:
            self._numbers = bodies.new_numbers(txn, len(self._bodies))
            bodies.note_ahead(txn, self._numbers)
        now_ms = kept_ms(self._clock())
        for place, piece, start, stop in self._part:
            (record, size, uses), number = self._bodies[place], self._numbers[place]
            if piece:
                bodies.store_piece(txn, number, piece, memoryview(record)[start:stop], now_ms, self._join)
            if stop == size:
                bodies.store(txn, number, record, now_ms, self._join, pieces=piece)
                bodies.write_count(txn, number, uses)

    def committed(self, unit: Unit) -> None:
        """A part is stored, or removed. Called by the writer."""
        self.stuck = False
        if self.request is not None:
            self._stored += len(self._part)
            for place, _, _, stop in self._part:
                record, size, _ = self._bodies[place]
                if stop == size:
                    self._references[id(record)] = Reference(self._numbers[place], size)
        elif not self._more:
            self._numbers = range(0)

    def refused(self, unit: Unit) -> None:
        """A part was not stored, or not removed. Called by the writer."""
        if self.request is None:
            self.stuck = True
            return
        self._error = unit.error
        if not self._stored:
            self._numbers = range(0)  # not even the note is there

    # The request -----------------------------------------------------------------------------------------------------

    def join(self, batch: Batch) -> None:
        """Have the request in a batch, which holds nothing else; raises why a part was not stored."""
        request, references = self.request, self._references
        assert request is not None
        if self._error is not None:
            batch.requests.append(request)
            request.batch = batch
            raise self._error
        batch.add(request)
        batch.part()
        batch.references = references
        batch.writes.append(self._forget_note)
        for body in self._bodies:
            repeated = batch.shared.pop(id(body.record), None) is not None
            batch.saved += (body.size if repeated else body.size * body.uses) - _REFERENCE_BYTES * body.uses

    def _forget_note(self, txn: Any) -> None:
        if self.request is not None and self.request.error is None:  # it may be refused, and the batch go on
            bodies.forget_ahead(txn)

    def end(self) -> None:
        """The request is done: what was stored for one that was refused is to be removed."""
        assert self.request is not None
        if self.request.error is None:
            self._numbers = range(0)
        self.request = self._error = None
        self._bodies, self._pieces, self._part, self._references = [], [], [], {}
        if not self.behind:
            self._places.clear()

    def give_up(self) -> Iterator[Request]:
        """Yield all that is not done: the log takes nothing any more."""
        if self.request is not None:
            yield self.request
            self.request = None
        yield from self.behind
        self.behind.clear()


def _pieces_of(place: int, size: int) -> list[_Piece]:
    """Return what a body is stored in: itself, or pieces."""
    if size <= PART_BYTES:
        return [_Piece(place, 0, 0, size)]
    each = max(PART_BYTES, -(-size // LAST_LANE))
    starts = range(0, size, each)
    return [_Piece(place, number, start, min(size, start + each)) for number, start in enumerate(starts, 1)]


def _puts_of(request: Request) -> Iterable[Put]:
    if isinstance(request, Put):
        return (request,)
    return request.puts if isinstance(request, Unit) else ()


def _places_of(request: Request) -> Iterator[Hashable]:
    """Yield where a request keeps its order with others."""
    for put in _puts_of(request):
        yield from put.lanes
    if isinstance(request, Unit) and request.puts and (request.writes or request.notes):
        yield _WRITES
    elif isinstance(request, Order):
        yield from request.after or ()


def _large_bodies(request: Request) -> list[_Body]:
    """Return the large bodies that a request has logged, each once. Cost: 0.1 µs a message."""
    found: dict[int, _Body] = {}
    for put in _puts_of(request):
        if put.is_logged and put.size >= BODY_BYTES:
            lanes = len(put.lanes)
            for record, size in zip(put.records, put.sizes, strict=True):
                if size >= BODY_BYTES and is_logged(record):
                    before = found.get(id(record))
                    found[id(record)] = _Body(record, size, lanes if before is None else before.uses + lanes)
    return list(found.values())
