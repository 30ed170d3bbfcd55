"""A lane as the log knows it, the queue behind it, and what a batch does to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from qflow.message import LANE_SHIFT, Record
from qflow.named_tuples import NamedTuple
from qflow.storage.log.hollowing import NOWHERE, Passes
from qflow.storage.log.rows import Row, with_last_block


class Turn(Protocol):
    """Who may write the log: see `direct`."""

    request: Any


class Publisher(Protocol):
    """The queue behind a lane."""

    def publish(self, first: int, records: list[Record], size: int, puts: int) -> None:
        """Make confirmed messages of `size` bytes together visible."""

    def show(self, put: Any, turn: Turn, first: int) -> bool:
        """Make messages visible that the thread of their put has confirmed, while it has the turn; see `direct`."""

    def publish_transient(self, put: Any) -> None:
        """Assign sequences to a unit's put that is not logged (`put.first`), make it visible."""

    def purged(self, ends: dict[int, int]) -> None:
        """Drop everything below these ends, by the number of the lane."""

    def refused(self, put: Any) -> None:
        """Give back the room of a put that was not confirmed."""

    def note_left(self) -> None:
        """Note that maintenance is to look: settled blocks of the lane are left, or its row is of interest."""


class TopicPublisher(Publisher, Protocol):
    """The partition of a stream behind a lane."""

    def publish_topics(self, first: int, records: list[Record], topics: Sequence[str], size: int, time_ms: int) -> None:
        """`publish` of a stream's messages, with their topics and the time they have in the log."""


class Lane:
    """A queue's lane as the log knows it. Changed by the writer only, except `next`; see `Puts` for who else.

    One without a row belongs to a queue that is not logged: it is there for the puts of units.
    """

    __slots__ = (
        "begins", "border", "broken", "full_tail", "is_logged", "lane", "leaves_gaps", "next", "owner", "passes",
        "publisher", "remove_at", "removing", "row", "tail", "tail_is_last", "time_ms", "written",
    )  # fmt: skip

    def __init__(self, owner: int, lane: int, row: Row | None, publisher: Publisher) -> None:
        self.is_logged = row is not None
        row = row or Row()
        self.owner = owner
        self.lane = lane
        self.row = row
        self.next = row.next
        """The next sequence to be assigned."""
        self.begins = row.next
        """The first sequence that this opening of the log assigns: see `eras`."""
        self.publisher = publisher
        self.leaves_gaps = False
        """Messages that are not logged pass through it, so `row.next` must run ahead."""
        self.time_ms = 0
        """Of a stream's last message: the time of the next is not earlier, whatever the clock says."""
        self.border = -1
        """Where the last purge ended: settled ranges on its two sides are counted apart."""
        self.full_tail = -1
        """Where a tail block begins that was written last and is too large to grow: a look at it would copy it."""
        self.tail: Any = None
        """What a spread wrote into its tail block; not of one that has grown since. See `Tail`."""
        self.tail_is_last = row.next == lane << LANE_SHIFT
        """No block is behind the one that the row names: nothing was ever put, or somebody has looked."""
        self.remove_at = 0
        """The floor at which settled blocks can be removed."""
        self.removing = row.floor > lane << LANE_SHIFT  # a crash may have left some
        """More settled blocks wait to be removed than one commit may."""
        self.broken: BaseException | None = None
        """Pages of its that a commit came by are damaged: nothing more can be written to it."""
        self.written = False
        """A batch has written to it since the log was opened: its pages were sound then."""
        self.passes = Passes(row.floor if row.marks else NOWHERE)  # at open nobody knows what was left

    def find_tail(self, txn: Any) -> None:
        """Have the row name the last block, before anything is put behind that: once an opening, by the writer."""
        self.row = with_last_block(txn, self.owner, self.lane, self.row)
        self.tail_is_last = True

    @property
    def takes_notes(self) -> bool:
        """What comes for it may be noted in the journal, and written into the log later."""
        return self.written and self.broken is None

    @property
    def hollow_due(self) -> bool:
        """Blocks above the floor should be looked at."""
        return self.broken is None and self.passes.due


class Step(NamedTuple):
    """What a committed batch means for one lane."""

    lane: Lane
    row: Row
    next: int
    first: int
    records: list[Record]
    size: int
    puts: int
    purged_to: int | None
    remove_at: int
    removing: bool
    topics: Sequence[str] | None
    time_ms: int
