"""How much stays allocated of messages that are settled, and messages that are large enough to be seen there."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

MIB = 2**20
BATCHES, COUNT, SIZE = 16, 30, 40_000
LATE = 25
"""Where in a batch the delivery is that is held on."""


class Kept:
    """How much more is allocated at the end, in bytes."""

    bytes = 0


@contextmanager
def kept() -> Iterator[Kept]:
    found = Kept()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield found
        gc.collect()
        found.bytes = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def bodies() -> list[bytes]:
    return [b"%d" % number * (SIZE // 4) for number in range(1_000, 1_000 + COUNT)]
