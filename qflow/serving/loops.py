"""Event loops of processes that serve."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import Callable


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes a loop of uvloop, where that is installed."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return factory
