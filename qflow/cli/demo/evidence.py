"""What the consumer leaves behind: for each flight it was given, sequence and SHA-256, written before it acks.

The file outlives the kill of its writer, so what was delivered before it can be proved after it.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from qflow.cli.demo import flights
from qflow.deliveries import Deliveries

_RECORD = struct.Struct(">Q32s")
_READ_RECORDS = 10_000


def append(descriptor: int, batch: Deliveries) -> None:
    """Write down a batch; a kill may cut its last record."""
    records = b"".join(
        _RECORD.pack(sequence, hashlib.sha256(body).digest())
        for sequence, body in zip(batch.sequences, batch.bodies, strict=True)
    )
    while records:
        records = records[os.write(descriptor, records) :]


def cut_torn_record(path: Path) -> None:
    """Remove the end of a record that a kill cut; that flight was not acked and comes again."""
    size = path.stat().st_size
    os.truncate(path, size - size % _RECORD.size)


@attrs.frozen(kw_only=True)
class Verdict:
    """How what arrived compares with the source."""

    flights: int
    arrived: int
    out_of_order: int
    differing: int
    repeats: int
    first_repeat: int | None
    last_repeat: int | None
    source_sha256: str
    arrived_sha256: str

    @property
    def same(self) -> bool:
        """Every flight arrived, in order, byte for byte."""
        return (
            self.flights == self.arrived
            and not self.out_of_order
            and not self.differing
            and self.source_sha256 == self.arrived_sha256
        )


def verify(path: Path, base: int, count: int) -> Verdict:
    """Compare the evidence with the flights.

    First occurrences must count up by one; a sequence that came before is a repeat.

    Args:
        path: the evidence.
        base: sequence of the first flight.
        count: number of flights.
    """
    digests: list[bytes] = []
    out_of_order = differing = 0
    repeats: list[int] = []
    for sequence, digest in _records(path):
        position = sequence - base
        if position == len(digests):
            digests.append(digest)
        elif 0 <= position < len(digests):
            repeats.append(sequence)
            differing += digest != digests[position]
        else:
            out_of_order += 1
    source = [hashlib.sha256(body).digest() for body in flights.messages(0, count)]
    differing += sum(mine != theirs for mine, theirs in zip(source, digests, strict=False))
    return Verdict(
        flights=len(source),
        arrived=len(digests),
        out_of_order=out_of_order,
        differing=differing,
        repeats=len(repeats),
        first_repeat=min(repeats, default=None),
        last_repeat=max(repeats, default=None),
        source_sha256=_digest(source),
        arrived_sha256=_digest(digests),
    )


def _records(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        while data := file.read(_RECORD.size * _READ_RECORDS):
            yield from _RECORD.iter_unpack(data)


def _digest(digests: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for digest in digests:
        total.update(digest)
    return total.hexdigest()
