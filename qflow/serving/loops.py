"""Event loops of processes that serve."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable

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
    SSLProtocol.max_size = TLS_BUFFER_BYTES
