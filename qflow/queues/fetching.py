"""What is read of a run that comes back into memory: from the spill store, or from the log. Nothing needs a lock here.

What is damaged in the spill store is read from the log, if that has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise

from qflow.delivery import MAY_BE_REPEATED, ONE_ATTEMPT
from qflow.errors import CorruptionError, NotFound, PermissionDenied
from qflow.memory.run import Run
from qflow.message import OVERHEAD_BYTES, Record, charge, lane_of
from qflow.queues.context import Context
from qflow.storage.log import reading
from qflow.storage.log.marks import is_settled, read_attempts
from qflow.storage.log.rows import read_row
from qflow.storage.log.transaction_log import Lane
from qflow.storage.spill.store import Slots, SpillArea


class Moved:
    """What was read for a run's front, to be installed if the claim still stands."""

    __slots__ = (
        "damaged",
        "damaged_ranges",
        "lost",
        "more",
        "needs",
        "pieces",
        "position",
        "problems",
        "purged",
        "repaired",
    )

    def __init__(self, position: int) -> None:
        self.position = position
        """Everything below was looked at."""
        self.pieces: list[tuple[int, list[Record], int]] = []
        """(first, records, marks), in order."""
        self.lost: list[tuple[int, int]] = []
        """Ranges that hold no message any more, and must not hold the floor down."""
        self.problems: list[tuple[str, int]] = []
        """(what is wrong, blocks of the log it is wrong with)."""
        self.damaged: list[bytes] = []
        self.damaged_ranges: list[tuple[int, int]] = []
        """Those of `lost` where something was damaged, or has vanished."""
        self.more = False
        """The log is known to hold something of the run behind this."""
        self.repaired = 0
        self.needs = 0
        self.purged = False
        """A purge is committed, and about to drop the run."""

    def add(self, first: int, records: list[Record], marks: int) -> None:
        if self.pieces:
            before, known, known_marks = self.pieces[-1]
            if before + len(known) == first and known_marks == marks:
                known += records
                return
        self.pieces.append((first, records, marks))


def read_area(
    context: Context, area: SpillArea, first: int, sequence: int, slots: Slots, budget: int, largest: int
) -> tuple[list[Record | None], list[tuple[int, str]]]:
    """Read as `SpillArea.read`; a first message, of this sequence, whose file this process may not open comes as None.

    Raises:
        PermissionDenied: it is not in the log either, so it is there when the rights are.
    """
    try:
        return area.read(first, slots, budget, largest)
    except PermissionDenied as refused:
        if repair(context, sequence) is None:
            raise
        return [None], [(first, str(refused))]


def read_spilled(context: Context, area: SpillArea, run: Run, budget: int, alone: bool) -> Moved:
    first = run.first
    records, problems = read_area(context, area, first, first, run.slots, budget, run.largest)
    moved = Moved(first + len(records))
    if not alone and len(records) == 1 and records[0] is not None and charge([records[0]]) > budget:
        moved.position, moved.needs = first, len(records[0])  # does not fit; now it is known what does
        return moved
    if None not in records:
        moved.pieces.append((first, records, run.marks))  # type: ignore[arg-type]
        return moved
    outcomes: list[tuple[int, str]] = []
    for sequence, problem in problems:
        record = repair(context, sequence)
        outcome = "read from the log instead" if record is not None else "lost"
        outcomes.append((sequence, f"{problem}; {outcome}"))
        if record is None:
            moved.lost.append((sequence, sequence + 1))
            moved.damaged_ranges.append((sequence, sequence + 1))
        else:
            moved.repaired += 1
            records[sequence - first] = record
    moved.problems += [(text, 0) for text in _told_once(outcomes)]
    for sequence, found in enumerate(records, first):
        if found is not None:
            moved.add(sequence, [found], run.marks)
    return moved


def repair(context: Context, sequence: int) -> Record | None:
    """Read a message from the log whose spill file is damaged; None if the log does not have it."""
    if context.log is None:
        return None
    try:
        with context.log.read(buffers=True) as txn:
            return reading.find_message(txn, context.owner, lane_of(sequence), sequence)[0]
    except (NotFound, CorruptionError):
        return None  # reported as lost by the caller


def read_logged(context: Context, lane: Lane, run: Run, budget: int, alone: bool) -> Moved:
    assert context.log is not None
    first = run.first
    owner, number = lane.owner, lane.lane
    with context.log.read(buffers=True) as txn:
        row = read_row(txn, owner, number)._replace(doubtful=lane.row.doubtful)
        replayed = reading.read_unsettled(txn, owner, number, row, first, run.end, budget)
        attempts = read_attempts(txn, owner, number, first, replayed.position)
        tail_waits = not is_settled(txn, owner, number, row, row.tail)
    moved = Moved(replayed.position)
    moved.purged = run.count > 0 and row.floor >= run.end  # what was deleted at its front is settled, too
    if moved.purged:
        return moved
    size = 0
    following = first
    for start, records in replayed.pieces:
        room = len(records)
        if size + charge(records) > budget:
            room, total = 0, size
            for record in records:
                total += len(record) + OVERHEAD_BYTES
                if total > budget and not (alone and not moved.pieces and not room):
                    break
                room += 1
            moved.needs = len(records[room]) if room < len(records) and not (moved.pieces or room) else 0
        if start > following and (room or moved.pieces):
            moved.lost.append((following, start))
        for piece in _by_marks(start, records[:room], attempts, row.doubtful):
            moved.pieces.append(piece)
        size += charge(records[:room])
        following = start + room
        if room < len(records):
            moved.position = start + room if room or moved.pieces else first
            break
    else:
        if following < replayed.position:
            moved.lost.append((following, replayed.position))
    read = sum(len(records) for _, records, _ in moved.pieces)
    beyond = moved.position <= row.tail < run.end and tail_waits
    moved.more = beyond or read < sum(len(records) for _, records in replayed.pieces)
    seen = replayed._replace(problems=[one for one in replayed.problems if one[0] < moved.position])
    moved.problems += reading.in_words(seen)
    moved.damaged += [key for _, _, key in seen.problems if key]
    moved.damaged_ranges += filter(None, (_damaged_part(*lost, replayed.problems) for lost in moved.lost))
    return moved


def _damaged_part(first: int, end: int, problems: list[tuple[int, str, bytes]]) -> tuple[int, int] | None:
    """Return the part of [first, end), which holds no message, where some were lost; None if nothing is wrong there."""
    damaged = [place for place, _, key in problems if key and first <= place < end]
    if any(not key and first <= place <= end for place, _, key in problems):
        return first, end  # what has vanished is missed by what comes behind it
    return (min(damaged), end) if damaged else None


def _told_once(outcomes: list[tuple[int, str]]) -> Iterator[str]:
    """Yield a line for each stretch of spilled messages that had the same fate for the same reason."""
    for (text, _), group in groupby(enumerate(outcomes), key=lambda item: (item[1][1], item[1][0] - item[0])):
        sequences = [sequence for _, (sequence, _) in group]
        which = f"message {sequences[0]}" if len(sequences) == 1 else f"messages {sequences[0]} to {sequences[-1]}"
        yield f"spilled {which}: {text}"


def _by_marks(
    first: int, records: list[Record], attempts: list[tuple[int, int, int]], doubtful: int
) -> Iterator[tuple[int, list[Record], int]]:
    """Cut records where their earlier deliveries differ."""
    stop = first + len(records)
    cuts = {first, stop, *(edge for low, high, _ in attempts for edge in (low, high)), doubtful}
    edges = sorted(edge for edge in cuts if first <= edge <= stop)
    for low, high in pairwise(edges):
        number = max((count for start, end, count in attempts if start <= low < end), default=0)
        marks = ONE_ATTEMPT * number + (MAY_BE_REPEATED if low < doubtful else 0)
        yield low, records[low - first : high - first], marks
