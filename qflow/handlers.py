"""Signal handlers of the program, which raise in the middle of anything: what looks like an error may be theirs."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any


def is_of_handler(error: BaseException) -> bool:
    """Tell whether a signal handler has raised it, and not a call of the system: a time-out is an `OSError`, too."""
    signal: Any = sys.modules.get("signal")  # which whoever has a handler has imported
    codes = set()
    for number in getattr(signal, "valid_signals", tuple)():
        handler: Any = signal.getsignal(number)
        if callable(handler):
            handler = handler.func if isinstance(handler, partial) else handler
            code = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
            codes.add(code)
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code in codes:
            return True
        traceback = traceback.tb_next
    return False
