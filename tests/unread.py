"""Pipes that nobody reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def full_pipe() -> Iterator[tuple[int, int]]:
    """Give the two ends of a pipe that takes no byte more."""
    reading, writing = os.pipe()
    try:
        os.set_blocking(writing, False)
        for size in (os.fpathconf(writing, "PC_PIPE_BUF"), 1):
            with suppress(BlockingIOError):
                while True:
                    os.write(writing, b"x" * size)
        os.set_blocking(writing, True)
        yield reading, writing
    finally:
        os.close(reading)
        os.close(writing)
