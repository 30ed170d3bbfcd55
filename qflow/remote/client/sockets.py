"""What a connection for threads does with its files: it sends, it is woken, and it sends the rest at its end."""

from __future__ import annotations

import os
import select
import socket
import weakref
from collections import deque
from contextlib import suppress
from itertools import islice
from time import monotonic

from qflow.descriptors import REMEDIES
from qflow.errors import StorageError

MOST_PARTS = 100
"""Of what is sent at once: a system takes so many buffers, or more."""
READ_BYTES = 2**16


def failed(error: OSError, target: str) -> StorageError:
    """Return the error for a connection whose descriptors the system does not give."""
    remedy = REMEDIES.get(error.errno or 0)
    why = error.strerror or error
    return StorageError(f"cannot connect to the owner of {target}: {why}{f'; {remedy}' if remedy else ''}")


class WakePipe:
    """A pipe by which any thread has the reader look.

    It is closed when nobody refers to it any more, and not before: the main thread may be about to write to it, without
    a lock, and the number would be another file's.
    """

    def __init__(self) -> None:
        self.told, self._tell = os.pipe()
        os.set_blocking(self._tell, False)
        self._close = weakref.finalize(self, _close, self.told, self._tell)
        self._close.atexit = False  # the reader still runs

    def ring(self) -> None:
        """Have the reader look."""
        with suppress(OSError):  # it was told before, or this is a forked process
            os.write(self._tell, b"o")

    def close(self) -> None:
        """Close it, in a forked child."""
        self._close()
        self._tell = -1


def wake_pipe(one: socket.socket, target: str) -> WakePipe:
    """Return the pipe of a connection; where the system gives none, close the socket. Raises StorageError."""
    try:
        return WakePipe()
    except OSError as error:
        one.close()
        raise failed(error, target) from error


def _close(told: int, tell: int) -> None:
    os.close(told)
    os.close(tell)


def send_some(one: socket.socket, out: deque[memoryview]) -> int:
    """Send what a socket takes now; return how many bytes. Raises OSError: it takes nothing any more."""
    total = 0
    try:
        while out:
            sent = one.sendmsg(islice(out, MOST_PARTS), (), socket.MSG_DONTWAIT)
            total += sent
            while out and sent >= len(out[0]):
                sent -= len(out.popleft())
            if sent:
                out[0] = out[0][sent:]
    except BlockingIOError:
        pass
    return total


def hand_in(one: socket.socket, out: deque[memoryview], within_s: float) -> None:
    """Send the rest, and return when the other side has read all of it and ended, or did not in time.

    What it answers is of no matter; yet it may read no more before that is taken.
    """
    ends, buffer, is_over = monotonic() + within_s, bytearray(READ_BYTES), False
    poll = select.poll()
    with suppress(OSError):  # it has ended
        while (left_s := ends - monotonic()) > 0:
            if not out and not is_over:
                one.shutdown(socket.SHUT_WR)
                is_over = True
            poll.register(one, select.POLLIN | select.POLLOUT if out else select.POLLIN)
            for _, events in poll.poll(left_s * 1000):
                if events & select.POLLOUT:
                    send_some(one, out)
                if events & ~select.POLLOUT and not one.recv_into(buffer):
                    return
