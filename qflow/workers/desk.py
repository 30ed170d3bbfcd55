"""What worker processes show their supervisor: what each has at hand, in memory that all of them map.

A cell is 8 bytes, written by one process and read by another; a word of it is never half of two writes.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile

from qflow.named_tuples import NamedTuple

_DEADLINE, _SEQUENCE, _DONE, _FAILED, _CELLS = range(5)
_CELL_BYTES = 8


class Hand(NamedTuple):
    """What a worker has at hand, and what it has done."""

    deadline: float
    """When its lease ends, on the monotonic clock, which processes of a machine share; 0 = it has nothing at hand."""
    sequence: int
    """Of the message at hand, or of the last one."""
    done: int
    failed: int


class Slot:
    """One worker's part of the memory. One process writes it, any may read."""

    def __init__(self, memory: mmap.mmap, number: int) -> None:
        place = slice(number * _CELLS * _CELL_BYTES, (number + 1) * _CELLS * _CELL_BYTES)
        self._times = memoryview(memory)[place].cast("d")
        self._counts = memoryview(memory)[place].cast("q")

    def begin(self, sequence: int, deadline: float = math.inf) -> None:
        """A message is at hand."""
        self._counts[_SEQUENCE] = sequence
        self._times[_DEADLINE] = deadline

    def extend(self, deadline: float) -> None:
        """What is at hand may be held until then, if its lease ends earlier."""
        self._times[_DEADLINE] = max(self._times[_DEADLINE], deadline)

    def end(self, *, failed: bool) -> None:
        """The message at hand is settled."""
        self._times[_DEADLINE] = 0.0
        self._counts[_FAILED if failed else _DONE] += 1

    def clear(self) -> None:
        """Nothing is at hand: who had it is dead."""
        self._times[_DEADLINE] = 0.0

    def read(self) -> Hand:
        """Return what there is; deadline and sequence are of one message."""
        while True:
            deadline = self._times[_DEADLINE]
            hand = Hand(deadline, *self._counts[_SEQUENCE:_CELLS].tolist())
            if self._times[_DEADLINE] == deadline:
                return hand


def slots_in(descriptor: int, workers: int) -> list[Slot]:
    """Return the slots of some workers, in a file without a name, whose descriptor they are given."""
    memory = mmap.mmap(descriptor, workers * _CELLS * _CELL_BYTES)
    return [Slot(memory, number) for number in range(workers)]


def make_descriptor(workers: int) -> int:
    """Return the descriptor of a new file for so many, on no disk: a full one would end who writes there, by SIGBUS."""
    size = workers * _CELLS * _CELL_BYTES
    try:
        descriptor = os.memfd_create("qflow-workers")
    except (AttributeError, OSError):  # a Python that was built for an old libc; a system that lets nobody have one
        with tempfile.TemporaryFile(buffering=0) as file:
            file.write(bytes(size))  # which takes the room, or raises
            return os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor
