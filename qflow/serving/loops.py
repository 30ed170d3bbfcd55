"""Event loops of processes that serve."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
from asyncio import sslproto
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from qflow.descriptors import REMEDIES
from qflow.loggers import get_logger
from qflow.serving.addresses import Address
from qflow.serving.telling import Telling

_logger = get_logger("qflow")

TLS_BUFFER_BYTES = 2**16


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes a loop of uvloop, where that is installed."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return factory


def take_small_buffers() -> None:
    """Have connections with TLS read into 64 KiB in loops of asyncio, in this process, where it has 256 KiB for each.

    They have them from their first byte until they end, whatever they say.
    """
    sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES


def let_go_of_failed_handshakes() -> None:
    """Have a connection whose handshake fails go at once, with its buffers, in loops of asyncio in this process.

    Before 3.12.3, the error that ends a handshake holds the frames that it was raised in, and those hold the error and
    the connection: 100 KiB for each who only looks whether the port is open, until the garbage collector has been
    through all that there is (https://github.com/python/cpython/issues/109534).
    """
    if sys.version_info < (3, 12, 3):
        sslproto.SSLProtocol = _LettingGo  # type: ignore[misc]


@contextmanager
def telling_of_few_files() -> Iterator[None]:
    """Have the loop that runs say in one line, and again after some seconds, that it lacks what a connection takes.

    Left to itself it logs each try with where it failed: a thousand a second for each socket it listens at.
    """
    telling = Telling(_logger, others="")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error, listening = context.get("exception"), context.get("socket")
        if listening is None or not isinstance(error, OSError) or error.errno not in REMEDIES:
            return loop.default_exception_handler(context)
        address = Address(*listening.getsockname()[:2])
        return telling.tell("%s: nobody else is let in for now: %s", address, REMEDIES[error.errno])

    asyncio.get_running_loop().set_exception_handler(handle)
    try:
        yield
    finally:
        telling.end()


class _LettingGo(sslproto.SSLProtocol):
    """A connection with TLS, of which the error of a handshake that failed holds nothing."""

    _server_side: bool
    _waiter: Any

    def _on_handshake_complete(self, handshake_exc: Any) -> None:
        """End a handshake, with an error, or the class of one, if it failed."""
        waiter = None
        if handshake_exc is not None and self._server_side:
            waiter, self._waiter = self._waiter, None
        super()._on_handshake_complete(handshake_exc)
        if waiter is not None:
            waiter.cancel()  # nobody asks the server why
            if isinstance(handshake_exc, BaseException):
                handshake_exc.__traceback__ = None
