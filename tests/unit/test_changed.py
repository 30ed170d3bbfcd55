"""What has changed: whoever changes a queue tells that, so that nobody looks at those that rest."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
from qflow.memory.changed import Changed
from qflow.queues.fan_out import Fanned

PACKAGE = Path(qflow.__file__).parent
TELLING = {"count_in", "cover", "forget_places", "note_change", "rebalance", "refresh", "_finish", "_trim"}
"""Methods that tell that a queue has changed, or end in one that does."""


def test_what_has_changed_is_taken_once() -> None:
    changed: Changed[str] = Changed()
    places = [changed.enter() for _ in range(4)]
    assert changed.take() == []
    for place, thing in zip(places, "abcd", strict=True):
        changed.know(place, thing)
    assert changed.take() == ["a", "b", "c", "d"]
    assert changed.take() == []
    changed.flags[places[2]] = changed.flags[places[1]] = True
    assert changed.take() == ["b", "c"]
    assert changed.take() == []


def test_the_place_of_what_has_left_is_given_to_another() -> None:
    """A change of the one before is no thing of before; what has changed and left is not taken."""
    changed: Changed[str] = Changed()
    first, second = changed.enter(), changed.enter()
    changed.know(first, "a")
    changed.know(second, "b")
    changed.leave(first)
    assert changed.take() == ["b"]
    changed.flags[first] = True
    assert changed.take() == []
    assert changed.enter() == first
    changed.know(first, "c")
    assert changed.take() == ["c"]


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


def _is_flags(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "changed"


def tells(function: ast.FunctionDef) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TELLING:
            return True
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and _is_flags(node.value):
            return True
    return False


def test_whoever_changes_what_is_used_tells() -> None:
    paths = [*(PACKAGE / "queues").glob("*.py"), PACKAGE / "memory" / "gate.py"]
    found = [one for path in paths for one in functions(path) if one.name != "__init__" and changes(one)]
    assert len(found) > 20
    assert [one.name for one in found if not tells(one)] == []


def test_what_fans_out_tells_of_each_queue_as_it_is_shown(
    open_spool: Callable[..., qflow.Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though somebody has looked since room was reserved: a sync may take that long."""
    broker = open_spool()
    queues = broker.declare_queues([f"q{number}" for number in range(3)])
    for queue in queues:
        broker.bind(queue, "t")
    changed, publish_all = broker.engine.queues.changed, Fanned.publish_all

    def after_a_look(*arguments: Any) -> None:
        changed.take()
        publish_all(*arguments)

    monkeypatch.setattr(Fanned, "publish_all", after_a_look)
    with inside.paused(broker):
        broker.publish("t", b"")
        assert {queue.name for queue in changed.take()} == {"q0", "q1", "q2"}
