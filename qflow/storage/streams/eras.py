"""By which opening of the log the messages of a stream were written: so that two copies which went on apart are told
apart, although their sequences are the same.

    key                              value
    ERAS  owner  lane  sequence      the era of this message, and of those behind it up to the next record

An *era* is a number by chance that each opening of the log for writing has. The first messages that it writes into a
partition come with a record; most openings write none. A message is known by its era and its sequence: where those
agree in two logs, so does everything below. (Raft compares term and index of an entry in this way, and Kafka the epochs
of leaders.) A copy of a log has the records of the log up to then; a compaction changes none. What was written before
there were eras has none.

Every function works inside a transaction it is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from qflow.storage.log import table
from qflow.storage.log.keys import ERAS, key_of, parts_of
from qflow.storage.log.sealing import seal, unseal

FORGOTTEN_AT_ONCE = 64
"""Records that `note` removes, at most: it is called once for each opening."""
_ERA_BYTES = 8


def note(txn: Any, owner: int, lane: int, sequence: int, era: int, floor: int) -> None:
    """Write that messages from `sequence` on are of an era; forget those that ended below `floor`. Cost: 10 µs."""
    txn.put(key_of(ERAS, owner, lane, sequence), seal(era.to_bytes(_ERA_BYTES, "little")))
    below = table.keys(txn, key_of(ERAS, owner, lane, 0), key_of(ERAS, owner, lane, floor))
    gone = list(islice(below, FORGOTTEN_AT_ONCE + 1))
    for key in gone[:-1]:  # whoever has read all below the floor asks for the last
        txn.delete(key)


def era_of(txn: Any, owner: int, lane: int, sequence: int) -> int | None:
    """Return the era a message was written in; None: before there were any. Cost: 5 µs. Raises CorruptionError."""
    with txn.cursor() as cursor:
        if table.at_or_before(cursor, key_of(ERAS, owner, lane, sequence)):
            return _decode(bytes(cursor.key()), cursor.value())
    return None


def problems(txn: Any) -> Iterator[str]:
    """Yield, in words, which records are damaged. Cost: 2 µs each."""
    yield from table.damaged(txn, bytes((ERAS,)), _decode)


def _decode(key: bytes, value: bytes) -> int:
    _, owner, lane, sequence = parts_of(key)
    where = f"the era of message {sequence} of stream {owner}, lane {lane}"
    return int.from_bytes(unseal(value, where), "little")
