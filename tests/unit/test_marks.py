"""Marks: whoever changes a queue marks that, so that nobody looks at those that rest."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import qflow
from qflow.memory.marks import Marks

PACKAGE = Path(qflow.__file__).parent
TELLING = {"count_in", "cover", "forget_places", "note_change", "rebalance", "refresh", "_finish", "_trim"}
"""Methods that mark a queue, or end in one that does."""


def test_what_was_marked_is_taken_once() -> None:
    marks: Marks[str] = Marks()
    places = [marks.enter() for _ in range(4)]
    assert marks.take() == []
    for place, thing in zip(places, "abcd", strict=True):
        marks.know(place, thing)
    assert marks.take() == ["a", "b", "c", "d"]
    assert marks.take() == []
    marks.marks[places[2]] = marks.marks[places[1]] = True
    assert marks.take() == ["b", "c"]
    assert marks.take() == []


def test_the_place_of_what_has_left_is_given_to_another() -> None:
    """A mark of the one before is no thing of before; what was marked and has left is not taken."""
    marks: Marks[str] = Marks()
    first, second = marks.enter(), marks.enter()
    marks.know(first, "a")
    marks.know(second, "b")
    marks.leave(first)
    assert marks.take() == ["b"]
    marks.marks[first] = True
    assert marks.take() == []
    assert marks.enter() == first
    marks.know(first, "c")
    assert marks.take() == ["c"]


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            yield node


def changes(function: ast.FunctionDef) -> bool:
    """Tell whether it changes what is charged of a queue, or how many were acked."""
    targets: list[Any] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AugAssign):
            targets.append(node.target)
    return any(isinstance(target, ast.Attribute) and target.attr in ("used", "acked") for target in targets)


def _is_marks(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "marks"


def tells(function: ast.FunctionDef) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TELLING:
            return True
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and _is_marks(node.value):
            return True
    return False


def test_whoever_changes_what_is_used_tells() -> None:
    paths = [*(PACKAGE / "queues").glob("*.py"), PACKAGE / "memory" / "gate.py"]
    found = [one for path in paths for one in functions(path) if one.name != "__init__" and changes(one)]
    assert len(found) > 20
    assert [one.name for one in found if not tells(one)] == []
