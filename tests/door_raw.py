"""A client of a door by hand: frames of its own making, and what comes back; and how tests wait for the owner."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from qflow.remote.wire.frames import PREAMBLE_BYTES, Frame, FrameReader, encode_frame, preamble

MOST_BYTES = 2**31
PATIENCE_S = 60


def until(condition: Callable[[], object], where: object = "") -> None:
    """Return when the owner has come to where a test wants it; an error says where that was."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"it never came to that {where}"
        threading.Event().wait(0.001)


class RawDoor:
    """A connection; `hello` and the preamble are the caller's business, but for `greeted`."""

    def __init__(self, spool: Path, *, timeout_s: float = PATIENCE_S) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(timeout_s)
        self.socket.connect(os.path.join(spool, "door"))
        self._reader = FrameReader(MOST_BYTES)
        self._frames: list[Frame] = []
        self._number = 0

    def greeted(self, version: int = 1) -> RawDoor:
        """Exchange preambles, and say hello."""
        self.send(preamble(version))
        assert len(self.read(PREAMBLE_BYTES)) == PREAMBLE_BYTES
        assert "result" in self.ask({"op": "hello", "product": "raw"}).head
        return self

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self, count: int) -> bytes:
        """Return so many bytes, less at the end."""
        data = b""
        while len(data) < count and (some := self.socket.recv(count - len(data))):
            data += some
        return data

    def request(self, head: dict[str, Any], *columns: list[Any], number: int | None = None) -> int:
        """Send a request; return its number."""
        self._number += 1
        number = self._number if number is None else number
        self.send(b"".join(encode_frame(number, head, columns)))
        return number

    def frame(self) -> Frame | None:
        """Return the next frame; None at the end."""
        while not self._frames:
            data = self.socket.recv(2**16)
            if not data:
                return None
            self._frames += self._reader.feed(data)
        return self._frames.pop(0)

    def ask(self, head: dict[str, Any], *columns: list[Any]) -> Frame:
        """Return the answer to a request."""
        number = self.request(head, *columns)
        frame = self.frame()
        assert frame is not None
        assert frame.number == number, frame
        return frame

    def __enter__(self) -> RawDoor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()
