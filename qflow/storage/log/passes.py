"""When a lane's blocks above the floor are looked at, to give back what is settled there; see `hollowing`."""

from __future__ import annotations

from collections.abc import Iterable

from qflow.storage.log.hollowing import Hollowed

HOLLOW_BYTES = 256 * 1024
"""So much is settled above the floor before blocks are looked at to give it back; a message counts 16 bytes more."""
NOWHERE = 2**64


class Passes:
    """The passes over the blocks of one lane: a step of one in a commit. By the writer alone."""

    __slots__ = ("at", "lowest", "settled_bytes", "settled_messages", "steps")

    def __init__(self, at: int) -> None:
        self.at = at
        """How far the pass that is on its way has come; NOWHERE if there is none."""
        self.settled_messages = self.settled_bytes = 0
        """What was settled above the floor since that one, or the last one, began."""
        self.lowest = NOWHERE
        """The lowest of those sequences: the next pass begins there."""
        self.steps = 0
        """What that one has cost; the next begins when that is spread over what was settled."""

    @property
    def due(self) -> bool:
        """Blocks should be looked at. Passes cost a step, 1.5 µs, for each message or 4 KiB settled."""
        messages, size = self.settled_messages, self.settled_bytes
        enough = size + 16 * messages >= HOLLOW_BYTES and messages + size // 4096 >= self.steps
        return enough or self.at != NOWHERE

    def count(self, ranges: Iterable[list[int]], floor: int) -> None:
        """Count what was settled above the floor. What is tried again counts twice."""
        for first, end, messages, size in ranges:
            if end > floor:
                self.settled_messages += messages
                self.settled_bytes += size
                if first < self.lowest:
                    self.lowest = first

    def begin(self) -> int:
        """Begin a pass, or go on with the one that is on its way; return where."""
        if self.at == NOWHERE:
            self.at, self.lowest = self.lowest, NOWHERE
            self.settled_messages = self.settled_bytes = self.steps = 0
        return self.at

    def note(self, hollowed: Hollowed, tail: int) -> None:
        """Remember how far a pass came, after the commit."""
        self.steps += hollowed.steps
        if hollowed.more:
            self.at = hollowed.position
        else:
            self.at = NOWHERE
            self.lowest = min(self.lowest, tail)  # the tail block was not looked at
