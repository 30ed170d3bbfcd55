"""What comes over a network: whole sessions, torn anywhere, and damaged ones."""

from __future__ import annotations

import random
from collections.abc import Sequence


def torn(data: bytes, randomness: random.Random, largest: Sequence[int], singly: int = 0) -> list[bytes]:
    """The bytes in pieces, up to one of these sizes; the first `singly` bytes each alone."""
    pieces, at = [], 0
    most = randomness.choice(largest)
    while at < len(data):
        size = randomness.randint(1, most) if at >= singly else 1
        pieces.append(data[at : at + size])
        at += size
    return pieces


def damaged(session: bytes, start: int, randomness: random.Random, early: float) -> bytes:
    """A session with one to four damages; each begins before `start` with the chance `early`, or less."""
    data = bytearray(session)
    for _ in range(randomness.randint(1, 4)):
        at = randomness.randrange(0 if randomness.random() < early else start, len(data))
        size = randomness.choice((1, 1, 1, 2, 7, 40))
        kind = randomness.randrange(5)
        if kind == 0:
            data[at : at + size] = randomness.randbytes(len(data[at : at + size]))
        elif kind == 1:
            del data[at : at + size]
        elif kind == 2:
            data[at:at] = data[at : at + size]
        elif kind == 3:
            data[at] ^= 1 << randomness.randrange(8)
        else:
            data[at:at] = randomness.randbytes(size)
        if len(data) <= start:
            break
    return bytes(data)
