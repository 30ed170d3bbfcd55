"""A log alone, with stand-ins for queues: what a batch writes, publishes and refuses, seen without a broker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from faults.seams import Faults, FaultyEnvironment
from qflow.identity import new_uuid
from qflow.message import OVERHEAD_BYTES, Record, is_plain, lane_of
from qflow.storage.environment import Environment
from qflow.storage.files import Files
from qflow.storage.log import recovery
from qflow.storage.log.reading import read_unsettled
from qflow.storage.log.rows import Row, Settled, read_row, write_row
from qflow.storage.log.transaction_log import Lane, Put, TransactionLog, Unit

ALL = 2**62


class Line:
    """A queue of one lane that notes what it is told, as a queue would; it is told of everything once."""

    def __init__(self, owner: int, row: Row | None, lane: int = 0) -> None:
        self.lane = Lane(owner, lane, row, self)
        self.next = row.next if row is not None else 0
        self.visible: dict[int, Record] = {}
        self.refusals: list[Put] = []
        self.purged_to: int | None = None

    def publish(self, first: int, records: list[Record], size: int, puts: int) -> None:
        assert first >= self.next
        assert size == sum(map(len, records))
        self.visible.update(enumerate(records, first))
        self.next = first + len(records)

    def publish_transient(self, put: Put) -> None:
        assert put.first < 0
        self.visible.update(enumerate(put.records, self.next))
        put.first, self.next = self.next, self.next + len(put.records)

    def purged(self, ends: dict[int, int]) -> None:
        self.purged_to = ends[self.lane.lane]
        self.visible = {
            sequence: record for sequence, record in self.visible.items() if sequence >= ends.get(lane_of(sequence), 0)
        }

    def refused(self, put: Put) -> None:
        assert not put.refused
        put.refused = True
        self.refusals.append(put)

    def note_left(self) -> None:
        """Nobody has maintenance done."""

    def put(self, *records: Record) -> Put:
        """Return a put of some records that has not joined a batch."""
        sizes = list(map(len, records))
        size = sum(sizes)
        return Put(self.lane, list(records), sizes, is_plain(records), size, size + OVERHEAD_BYTES * len(records))

    def settled(self, *sequences: int) -> tuple[Lane, list[Settled]]:
        """Return the settling of some visible messages, one by one."""
        return self.lane, [Settled(at, at + 1, 1, len(self.visible[at])) for at in sequences]


class Told:
    """A party that notes what it is told, and in which state the unit was then."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.firsts: list[int] = []

    def committed(self, unit: Unit) -> None:
        self.firsts = [put.first for put in unit.puts]
        assert all(first >= 0 for first in self.firsts)
        self._note("committed")

    def refused(self, unit: Unit) -> None:
        assert unit.error is not None
        self._note("refused")

    def _note(self, outcome: str) -> None:
        self.outcomes.append(outcome)


def create_log(spool: Path) -> Path:
    """Make an empty log in a new spool directory."""
    os.makedirs(spool, exist_ok=True)
    Environment.create(str(spool), Files(), recovery.first_records(new_uuid()))
    return spool / "log"


@contextmanager
def bare_log(spool: Path, faults: Faults) -> Iterator[TransactionLog]:
    """Open the log of a spool, creating it if there is none; it is drained before it is closed."""
    path = spool / "log"
    if not path.exists():
        create_log(spool)
    log = TransactionLog(FaultyEnvironment(str(path), Files(), faults))
    yield log
    faults.heal()
    if not log.failed:
        log.drain()
    log.close()


def declared(log: TransactionLog, owner: int, lane: int = 0) -> Line:
    """Return a line with a lane that has a row."""
    batch = log.write(lambda txn: write_row(txn, owner, lane, Row()))
    log.wait(batch)
    return Line(owner, Row(), lane)


def in_log(log: TransactionLog, line: Line) -> dict[int, Record]:
    """Return what the log holds of a line and nobody settled; nothing may be wrong with it."""
    with log.read() as txn:
        return held(txn, line.lane.owner, line.lane.lane)


def held(txn: Any, owner: int, lane: int) -> dict[int, Record]:
    """Return the messages of a lane that are not settled; they must agree with its row."""
    row = read_row(txn, owner, lane)
    replayed = read_unsettled(txn, owner, lane, row, row.floor, row.next, ALL)
    assert replayed.problems == []
    found = {at: record for first, records in replayed.pieces for at, record in enumerate(records, first)}
    assert (len(found), sum(map(len, found.values()))) == (row.messages, row.bytes)
    return found
