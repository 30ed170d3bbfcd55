"""Straight lines under a lock, as this CPython compiles them: no handler runs there, and no garbage is collected.

A `with` whose line says "straight line; see `waiting`" holds a lock that the main thread takes. What it compiles to is
compared with the instructions that neither look for signals nor allocate a container, in CPython 3.11 to 3.15.
One that is not among them may be as harmless: look it up before it is added.
"""

from __future__ import annotations

import dis
import gc
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import qflow
from faults.strikes import ROOT, Strike
from qflow.memory.waiting import StraightLock, _held_at, _Shelter, in_place
from qflow.storage.log.direct import Direct
from qflow.storage.log.handing import Handing
from qflow.streams.room import Room

PACKAGE = Path(qflow.__file__).parent
MARK = re.compile(r"with .*:  # (a straight line|straight lines); see `waiting`$")
MARKED = {
    path: lines
    for path in sorted(PACKAGE.rglob("*.py"))
    if (lines := [number for number, line in enumerate(path.read_text().splitlines(), 1) if MARK.search(line)])
}
QUIET = re.compile(
    r"(LOAD|STORE|DELETE)_(FAST|CONST|ATTR|GLOBAL|DEREF|SUBSCR|SMALL_INT|COMMON_CONSTANT)\w*|BINARY_(OP|SUBSCR|SLICE)"
    r"|(COMPARE|CONTAINS|IS)_OP|UNARY_NOT|TO_BOOL|COPY|SWAP|POP_TOP|NOP|NOT_TAKEN"
    r"|JUMP_FORWARD|POP_JUMP_(FORWARD_)?IF_\w+|JUMP_IF_\w+_OR_POP"
)
TAKES_LOCK = "BEFORE_WITH" if sys.version_info < (3, 14) else "CALL"
"""Calls `__enter__`, and looks for nothing before the block of the `with` has begun; since 3.14 see `StraightLock`."""


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and all in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def blocks(path: Path) -> Iterator[tuple[int, list[dis.Instruction]]]:
    """Yield the line and the instructions of every marked `with`, without those that end it."""
    for code in codes(compile(path.read_text(), path, "exec")):
        bytecode = dis.Bytecode(code)
        found = list(bytecode)
        for before, first in pairwise(found):
            line = before.positions.lineno if before.positions else None
            if before.opname == TAKES_LOCK and line in MARKED[path] and begins(bytecode, before, first):
                parts = [part for part in bytecode.exception_entries if part.target == handler_of(bytecode, first)]
                yield line, [one for one in found if any(part.start <= one.offset < part.end for part in parts)]


def begins(bytecode: Any, before: dis.Instruction, first: dis.Instruction) -> bool:
    """Tell whether the block of a `with` begins between two instructions."""
    return any(part.start == first.offset and before.offset < part.start for part in bytecode.exception_entries)


def handler_of(bytecode: Any, first: dis.Instruction) -> int:
    """Return where an interrupt of an instruction goes on."""
    return next(part.target for part in bytecode.exception_entries if part.start <= first.offset < part.end)


def loud(found: list[dis.Instruction]) -> list[str]:
    """Return the instructions where something might strike."""
    return [f"{one.offset} {one.opname} {one.argval!r}" for one in found if not QUIET.fullmatch(one.opname)]


@pytest.mark.parametrize("path", MARKED, ids=lambda path: path.stem)
def test_nothing_can_strike_where_the_main_thread_holds_a_lock(path: Path) -> None:
    """From the instruction that takes the lock to the one that gives it back."""
    seen = dict(blocks(path))
    assert sorted(seen) == MARKED[path], "this CPython compiles `with` otherwise: a handler may run with the lock held"
    assert all(seen.values())
    assert {f"{path.name}:{line}": loud(found) for line, found in seen.items() if loud(found)} == {}


def held_at(code: CodeType) -> set[int]:
    """Return the instructions of each `with`, as `dis` tells them, and those after it, up to the call that leaves it."""
    bytecode: Any = dis.Bytecode(code)
    operations = {one.offset: one.opname for one in bytecode}
    found = set()
    for part in bytecode.exception_entries:
        if "WITH_EXCEPT_START" in (operations[part.target], operations.get(part.target + 2)):
            after = [offset for offset in operations if offset >= part.end]
            calls = [offset for offset in after if operations[offset] == "CALL"]
            found |= {offset for offset in operations if part.start <= offset < part.end}
            found |= {offset for offset in after if offset <= min(calls, default=offset)}
    return found


def test_where_a_lock_is_held_is_read_as_dis_reads_it() -> None:
    seen = 0
    for path in PACKAGE.rglob("*.py"):
        for code in codes(compile(path.read_text(), path, "exec")):
            if code.co_exceptiontable:
                held = held_at(code)
                assert _held_at(code) & {one.offset for one in dis.get_instructions(code)} == held, code
                seen += bool(held)
    assert seen > 300


@pytest.mark.skipif(sys.version_info < (3, 14), reason="`with` takes a lock in one instruction")
def test_a_lock_is_taken_without_a_call() -> None:
    """Handlers run when the function begins, and not when it returns."""
    begins, *found, returns = dis.get_instructions(StraightLock.__enter__)
    assert (begins.opname, returns.opname) == ("RESUME", "RETURN_VALUE")
    assert loud(found) == []
    lock = StraightLock()
    with lock:
        assert lock.locked()
    assert not lock.locked()


Change = tuple[str, str | None]


def between(function: Callable[..., object], first: Change, last: Change) -> list[dis.Instruction]:
    """Return the instructions from one change to another, where no condition sends the thread elsewhere."""
    found = list(dis.get_instructions(getattr(function, "__wrapped__", function)))
    places = {one.offset: index for index, one in enumerate(found)}
    changes: list[Change] = [(one.opname, one.argval) for one in found]
    at, path = changes.index(first), []
    while changes[at] != last:
        path.append(found[at])
        at = places[found[at].argval] if found[at].opname == "JUMP_FORWARD" else at + 1
    return path


@pytest.mark.parametrize(
    ("function", "first", "last"),
    [
        (Handing.hand_over, ("STORE_ATTR", "joined"), ("STORE_ATTR", "told")),
        (Direct.count, ("STORE_ATTR", "row"), ("STORE_ATTR", "done")),
        (Room.refused, ("STORE_ATTR", "refused"), ("STORE_ATTR", "_incoming")),
        (_Shelter.call, ("DELETE_SUBSCR", None), ("STORE_ATTR", "sent")),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_an_interrupt_finds_both_done_or_nothing(function: Callable[..., object], first: Change, last: Change) -> None:
    """Two changes without a lock that belong together."""
    assert loud(between(function, first, last)) == []


def test_a_strike_finds_every_place_of_code_that_has_not_run_before() -> None:
    """Five jumps backwards, and the beginning of the function: what `strikes` counts, it can strike."""
    made: dict[str, Callable[[], None]] = {}
    exec(compile("def loop():\n    for _ in range(5):\n        pass\n", f"{ROOT}loop.py", "exec"), made)
    strike = Strike(at=100)
    assert not strike.run(made["loop"])
    assert strike.seen == 6


def test_no_strike_is_in_a_finalizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it raises there is printed, and fails whichever test it comes in."""
    printed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)

    class Cycle:
        def __init__(self) -> None:
            self.itself = self
            weakref.finalize(self, list)

    def work() -> None:
        Cycle()
        in_place(gc.collect)

    seen = Strike(2**60)
    seen.run(work)
    assert seen.seen
    for at in range(seen.seen):
        Strike(at).run(work)
    assert not printed
