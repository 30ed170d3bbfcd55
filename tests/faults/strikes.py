"""Signal handlers at every place where CPython runs them: at the n-th one in the broker's code, something happens.

Handlers run in the main thread: where a function begins or a generator goes on after a `yield`, when a C function has
returned, and at a jump backwards; in CPython 3.11 to 3.15. A *place* is such a moment in a function of qflow, or in one
that qflow calls, of the calling thread.
"""

from __future__ import annotations

import dis
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import qflow
from thorough import TORTURE

ROOT = str(Path(qflow.__file__).parent) + os.sep
RESUME = dis.opmap["RESUME"]
BACK = {code for name, code in dis.opmap.items() if name == "JUMP_BACKWARD" or name.startswith("POP_JUMP_BACKWARD")}


@cache
def _jumps(code: CodeType) -> set[int]:
    """Return where a function jumps backwards, but for jumps that CPython 3.12 to 3.14 compile wrong.

    Those are at the end of an `if` in a loop in a `with`, or in a `try`, and an exception there does not leave that.
    """
    bytecode: Any = dis.Bytecode(code)
    entries = [(one.start, one.end) for one in bytecode.exception_entries]
    first, last = min(entries, default=(0, 0))[0], max((end for _, end in entries), default=0)
    jumps = {at.offset for at in bytecode if at.opcode in BACK}
    return {at for at in jumps if not first <= at < last or any(start <= at < end for start, end in entries)}


def _begins(frame: FrameType) -> bool:
    """A function begins, or a generator goes on after a `yield`: not after an `await`, or where an exception comes in."""
    code, at = frame.f_code.co_code, frame.f_lasti
    return code[at] == RESUME and code[at + 1] & 3 < 2


UNHEARD = ("__del__", "gc_callback", "_remove")
"""Functions that let nothing out."""
_FINALIZES = (
    weakref.finalize.__call__.__code__,
    weakref.WeakKeyDictionary[object, object]()._remove.__code__,  # type: ignore[attr-defined]
    weakref.WeakValueDictionary[object, object]()._remove.__code__,  # type: ignore[attr-defined]
)
"""Likewise."""


class Struck(BaseException):
    """What a handler raises."""


class Strike:
    """Has a handler run at one place of some work: it raises, or calls something and returns."""

    def __init__(self, at: int, handler: Callable[[], object] | None = None) -> None:
        self._at = at
        self._handler = handler
        self.seen = 0
        """Places that were passed."""
        self.where: str | None = None
        """The place, once it was reached."""

    def run(self, work: Callable[[], object]) -> bool:
        """Do some work; return whether it ended by the strike."""
        self._top = sys._getframe()
        self._top.f_trace_opcodes = True  # CPython 3.12 looks here, once, whether anybody wants opcodes
        sys.settrace(self._trace)
        sys.setprofile(self._profile)
        try:
            work()
        except Struck:
            return True
        finally:
            sys.setprofile(None)
            sys.settrace(None)
        return False

    def _is_inside(self, frame: FrameType | None) -> bool:
        """A frame is one of qflow, or of what that calls.

        In a finalizer, the callback of a weak reference, or what Hypothesis has called when the collector runs, it is
        not: what that raises is printed.
        """
        while frame is not None and frame is not self._top and frame.f_code.co_name not in UNHEARD:
            if frame.f_code in _FINALIZES:
                return False
            if frame.f_code.co_filename.startswith(ROOT):
                return True
            frame = frame.f_back
        return False

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if (event == "c_return" or (event == "call" and _begins(frame))) and self._is_inside(frame):
            self._pass(frame)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        """Look at each opcode of a function that jumps backwards, and of no other: a look costs ten times the opcode."""
        jumps = _jumps(frame.f_code) if event == "call" and self._is_inside(frame) else None
        if not jumps:
            return None

        def look(frame: FrameType, event: str, _: object) -> Any:
            if event == "opcode" and frame.f_lasti in jumps:
                self._pass(frame)
            return look

        frame.f_trace = look  # CPython 3.13 tells opcodes of a frame that is traced by then
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return look

    def _pass(self, frame: FrameType) -> None:
        self.seen += 1
        if self.seen <= self._at or self.where is not None:
            return
        self.where = f"{frame.f_code.co_filename.removeprefix(ROOT)}:{frame.f_lineno} {frame.f_code.co_name}"
        sys.setprofile(None)
        sys.settrace(None)
        above: FrameType | None = frame
        while above is not None:
            above.f_trace = None
            above = above.f_back
        if self._handler is None:
            raise Struck
        self._handler()


def reach(at: int, strike_at: Callable[[int], tuple[Strike, bool]]) -> tuple[Strike, bool]:
    """Strike a call at a place, or earlier where it did not come so far: some wait, for longer or shorter."""
    strike, ended = strike_at(at)
    while strike.where is None and strike.seen:
        strike, ended = strike_at(at % strike.seen)
    return strike, ended


def places(count: int, most: int, seed: int) -> Iterable[int]:
    """Return which of so many places to strike: all of them, or a sample of `most`."""
    if TORTURE or count <= most:
        return range(count)
    return sorted(random.Random(seed).sample(range(count), most))
