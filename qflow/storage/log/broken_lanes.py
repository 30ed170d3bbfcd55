"""Damaged pages of one lane that a commit comes by: what is of that lane is refused, all else is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from qflow.errors import again
from qflow.storage.environment import DAMAGE, log_error
from qflow.storage.log.batch import Batch, Request, Unit
from qflow.storage.log.calls import Calls
from qflow.storage.log.lane import Lane


class LaneBroken(Exception):
    """A transaction came by damaged pages of a lane, or, without one, of a deleted owner."""

    def __init__(self, lane: Lane | None, error: BaseException, path: str, owner: int = 0) -> None:
        super().__init__(lane, error)
        self.lane = lane
        self.owner = owner
        self.error = log_error(error, path, "written")


@contextmanager
def lane_errors(lane: Lane, path: str) -> Iterator[None]:
    """Say of damage which lane it is of."""
    try:
        yield
    except DAMAGE as error:
        raise LaneBroken(lane, error, path) from error


def refuse_lane(batch: Batch, broken: LaneBroken, call: Calls) -> None:
    """Take what is of a damaged lane out of a batch, with the units that need it; all else can be committed."""
    lane, error = broken.lane, broken.error
    batch.hollowed = {}
    if lane is None:
        batch.deletes, batch.damage = [], (broken.owner, error)
        return
    lane.broken = error
    batch.part()
    units = [unit for unit in batch.units if lane in _lanes_of(unit)]
    theirs = {id(put) for unit in units for put in unit.puts}
    for put in batch.puts.pop(lane, []):
        if id(put) not in theirs:
            put.refuse(error, call)
    for other, puts in list(batch.puts.items()):
        left = [put for put in puts if id(put) not in theirs]
        batch.puts[other] = left
        if not left:
            del batch.puts[other]
    for unit in units:
        unit.refuse(error, call)
    batch.units = [unit for unit in batch.units if unit not in units]
    held = {id(record) for puts in batch.puts.values() for put in puts for record in put.records}
    batch.shared = {identity: record for identity, record in batch.shared.items() if identity in held}
    batch.settled.pop(lane, None)
    batch.purges.discard(lane)
    batch.hollows = [one for one in batch.hollows if one is not lane]
    batch.attempts.pop(lane, None)


def check_written(request: Request, lanes: Iterable[Lane]) -> None:
    """Raise why a request that is done was not written, or what was settled before it in lanes that are broken."""
    errors = [request.error, *[lane.broken for lane in lanes]]
    if (error := next(filter(None, errors), None)) is not None:
        raise again(error)


def _lanes_of(unit: Unit) -> set[Lane]:
    return {lane for put in unit.puts for lane in put.lanes} | {lane for lane, _ in unit.settles}
