"""Event loops of processes that serve."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
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
