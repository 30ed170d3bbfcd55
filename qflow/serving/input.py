"""The bytes that came and are not decoded yet."""

from __future__ import annotations


class Input:
    """A buffer that is read at `at`, and the start of a frame that is not whole.

    A start is collected until the frame is there, so that one that drips in is not copied with each drop. Memory:
    what was taken and not read yet, then less than one frame.
    """

    __slots__ = ("_missing_bytes", "_start", "at", "buffer")

    def __init__(self) -> None:
        self.buffer = b""
        self.at = 0
        self._start = bytearray()
        self._missing_bytes = 0

    @property
    def kept(self) -> int:
        """How many bytes there are of a frame that is not whole."""
        return len(self._start)

    def take(self, data: bytes) -> None:
        """Add what came."""
        if self._start:
            self._start += data
            self._missing_bytes -= len(data)
            if self._missing_bytes <= 0:
                self.buffer, self.at = bytes(self._start), 0
                self._start = bytearray()
        elif self.at < len(self.buffer):
            self.buffer, self.at = self.buffer[self.at :] + data, 0
        else:
            self.buffer, self.at = data, 0

    def keep(self, needed: int) -> None:
        """Read nothing until `needed` bytes are there, from `at` on."""
        if self.at < len(self.buffer):
            self._start = bytearray(memoryview(self.buffer)[self.at :])
            self._missing_bytes = needed - len(self._start)
        self.buffer, self.at = b"", 0

    def clear(self) -> None:
        """Forget all of it."""
        self.buffer, self.at = b"", 0
        self._start = bytearray()
