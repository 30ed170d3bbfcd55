"""What a clean end leaves in the log, written in one commit, or in parts where the disk is full.

Rows as they are, counts of deliveries, when subscriptions were last open; and last of all the mark that the end was
clean. Each piece can be written twice. Where there is no room for all of it the mark is not written: nothing is lost,
and the next owner opens the spool as after a crash, where every message may have been delivered before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from qflow.errors import DiskFull, again
from qflow.loggers import get_logger
from qflow.named_tuples import NamedTuple
from qflow.storage.log import recovery
from qflow.storage.log.lane import Lane
from qflow.storage.log.rows import renew_row
from qflow.storage.log.transaction_log import TransactionLog, Unit

_logger = get_logger("qflow")

AT_ONCE = 4096
"""Records written in one commit."""
FEW_AT_ONCE = 8
"""And where the disk is full."""


class Piece(NamedTuple):
    """Some records that are written together."""

    records: int
    """At most."""
    size: int
    """How many bytes more than before that may take; 0 = it writes over what is there, and may use the reserve."""
    write: Callable[[Any], None]


def of_row(lane: Lane, shown: int = 0) -> Piece:
    """Return the piece that has a lane's row written as it is by then; most of the time it is written already.

    The same transaction may take over what the journal holds first, and that moves the row's tail.

    Args:
        shown: sequences below it were given out, and are not to be again.
    """
    return Piece(1, 0, partial(_renew, lane=lane, shown=shown))


def _renew(txn: Any, *, lane: Lane, shown: int) -> None:
    row = lane.row
    renew_row(txn, lane.owner, lane.lane, row._replace(next=max(row.next, shown)))


def write_ending(log: TransactionLog, pieces: Callable[[], Iterable[Piece]]) -> None:
    """Write all pieces, and then the mark."""
    clean = Piece(1, 0, lambda txn: recovery.set_state(txn, recovery.CLEAN))
    for most in (AT_ONCE, FEW_AT_ONCE):
        try:
            for group in _grouped([*pieces(), clean], most):
                size = sum(piece.size for piece in group)
                unit = Unit(
                    writes=[piece.write for piece in group], size=size, values=sum(one.records for one in group)
                )
                log.wait(log.join(unit))
                if unit.error is not None:
                    raise again(unit.error)
        except DiskFull as error:
            refused = error
        else:
            return
    _logger.warning("counts of deliveries were not written, so the spool opens as after a crash: %s", refused)


def _grouped(pieces: Iterable[Piece], most: int) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    records = 0
    for piece in pieces:
        if group and records + piece.records > most:
            yield group
            group, records = [], 0
        group.append(piece)
        records += piece.records
    yield group
