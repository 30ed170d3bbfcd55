"""What a great many messages, or pieces, is left of a batch is settled, or goes back, a portion at a time.

Between two portions the lock goes to who waits for it: how long a put, or a get of somebody else, waits does not depend
on how much that is. What is left is held meanwhile, by nobody: a purge takes it away, and a close leaves it unsettled.
"""

from __future__ import annotations

from qflow.held_batch import HeldBatch
from qflow.queues.held import Held

MESSAGES = 10_000
"""In a portion: 0.05 to 0.3 µs each."""
DEAD_LETTERS = 2_000
"""And where they may become dead letters: 10 µs each, in a commit."""
PIECES = 500
"""And pieces of consecutive ones: 2 to 20 µs each."""


def is_long(batch: HeldBatch) -> bool:
    """Tell whether what is left of a batch may be more than a portion."""
    return batch.is_long(MESSAGES, PIECES)


def has_many_pieces(batch: HeldBatch) -> bool:
    """Tell whether what is left of a batch may be more pieces than a portion has: then an ack of it is in portions."""
    return batch.is_long(batch.total, PIECES)


def hand_over(held: Held, batch: HeldBatch, *, was_seen: bool = True) -> HeldBatch:
    """Have what is left of a batch held by another one, which only the caller knows. Under the lock.

    Args:
        was_seen: somebody has had it: else it is not counted as delivered.
    """
    held.drop([batch], ends=False)
    rest = batch.hand_over()
    rest.was_seen = was_seen
    held.batches[rest] = None
    return rest


def take_some(held: Held, rest: HeldBatch, most: int | None = None) -> HeldBatch | None:
    """Take a portion of what `hand_over` has returned, which is held no more then; None if there is none. Under the
    lock.
    """
    if rest not in held.batches:  # it was purged, or the broker is closed
        return None
    some = rest.take_some(MESSAGES if most is None else most, PIECES)
    if rest.is_over:
        del held.batches[rest]
    return some
