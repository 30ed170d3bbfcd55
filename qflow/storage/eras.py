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
from typing import Any
from uuid import uuid4

from qflow.errors import CorruptionError
from qflow.storage.block_log import ERAS, key_of, seal, unseal

FORGOTTEN_AT_ONCE = 64
"""Records that `note` removes, at most: it is called once for each opening."""
_ERA_BYTES = 8
_PLACE_BYTES = 6
"""Of a key: table, owner and lane."""


def new_era() -> int:
    """Return a number that no other opening has."""
    return uuid4().int >> 64


def note(txn: Any, owner: int, lane: int, sequence: int, era: int, floor: int) -> None:
    """Write that messages from `sequence` on are of an era; forget those that ended below `floor`. Cost: 10 µs."""
    txn.put(key_of(ERAS, owner, lane, sequence), seal(era.to_bytes(_ERA_BYTES, "little")))
    place = key_of(ERAS, owner, lane, 0)[:_PLACE_BYTES]
    kept = key_of(ERAS, owner, lane, floor)
    with txn.cursor() as cursor:
        found = cursor.set_range(place)
        for _ in range(FORGOTTEN_AT_ONCE):
            following = cursor.key() if found and cursor.next() else b""
            if not following.startswith(place) or following >= kept:  # whoever has read all below it asks for that era
                return
            found = cursor.prev() and cursor.delete()


def era_of(txn: Any, owner: int, lane: int, sequence: int) -> int | None:
    """Return the era a message was written in; None: before there were any. Cost: 5 µs.

    Raises:
        CorruptionError: its record is damaged.
    """
    key = key_of(ERAS, owner, lane, sequence)
    with txn.cursor() as cursor:
        found = cursor.set_range(key)
        if not (found and bytes(cursor.key()) == key):
            found = cursor.prev() if found else cursor.last()
        if not (found and bytes(cursor.key()).startswith(key[:_PLACE_BYTES])):
            return None
        return _decode(bytes(cursor.key()), cursor.value())


def problems(txn: Any) -> Iterator[str]:
    """Yield, in words, which records are damaged. Cost: 2 µs each."""
    with txn.cursor() as cursor:
        found = cursor.set_range(bytes((ERAS,)))
        while found and cursor.key()[0] == ERAS:
            try:
                _decode(cursor.key(), cursor.value())
            except CorruptionError as error:
                yield str(error)
            found = cursor.next()


def _decode(key: bytes, value: bytes) -> int:
    owner, lane, sequence = int.from_bytes(key[1:5], "big"), key[5], int.from_bytes(key[6:], "big")
    where = f"the era of message {sequence} of stream {owner}, lane {lane}"
    return int.from_bytes(unseal(bytes(value), where), "little")
