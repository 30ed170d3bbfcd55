"""Python's garbage collector stands still while queues are made, and is afterwards as it was before."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import qflow
from qflow import collector
from qflow.collector import without_collections
from qflow.engine import Engine
from qflow.queues.registry import Queues


@pytest.fixture(params=[True, False], ids=["on", "off"])
def is_on(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the program has it on."""
    (gc.enable if request.param else gc.disable)()
    yield request.param
    gc.enable()


def told(monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> list[bool]:
    """Return whether it is on whenever a method is called."""
    seen: list[bool] = []
    real: Callable[..., Any] = getattr(kind, name)

    def tell(*arguments: Any) -> Any:
        seen.append(gc.isenabled())
        return real(*arguments)

    monkeypatch.setattr(kind, name, tell)
    return seen


def test_it_stands_still_while_a_spool_is_opened(spool: Path, monkeypatch: pytest.MonkeyPatch, is_on: bool) -> None:
    """Also where that fails; whoever has switched it off finds it off."""
    seen = told(monkeypatch, Engine, "_recover")
    with qflow.open(spool):
        assert gc.isenabled() is is_on
        with pytest.raises(qflow.SpoolInUse):
            qflow.open(spool)
    assert (seen, gc.isenabled()) == ([False], is_on)


def test_it_stands_still_while_many_queues_are_declared(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for a few."""
    monkeypatch.setattr(collector, "MANY", 5)
    with qflow.open(spool) as broker:
        seen = told(monkeypatch, Queues, "_add")
        broker.declare_queues(["a", "b", "c", "d"])
        broker.declare_queues(list("abcdefghi"))
    assert (seen, gc.isenabled()) == ([True, False], True)


def test_it_goes_on_with_the_last_who_had_it_stand_still(is_on: bool) -> None:
    """Threads open spools beside each other."""
    inside, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with without_collections():
            inside.set()
            may_end.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(60)
    with without_collections():
        assert not gc.isenabled()
    assert not gc.isenabled()
    may_end.set()
    thread.join()
    assert gc.isenabled() is is_on


@pytest.mark.parametrize("name", ["disable", "enable"])
def test_it_goes_on_in_a_child_that_is_forked_as_it_is_stopped_or_goes_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread, in the midst of that."""
    real, children, here = getattr(gc, name), [], os.getpid()

    def fork() -> None:
        if name == "disable" or os.getpid() != here:
            real()
        if os.getpid() != here:
            return
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
        children.append(os.waitpid(child, 0)[1])
        real()

    with monkeypatch.context() as patch:
        patch.setattr(collector, "gc", SimpleNamespace(**{**vars(gc), name: fork}))
        with without_collections():
            pass
    assert (children, gc.isenabled()) == ([0], True)


def test_it_goes_on_in_a_child_that_is_forked_meanwhile() -> None:
    """Whoever had it stand still is not there."""
    with without_collections():
        child = os.fork()
        if not child:
            with without_collections():
                pass
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert gc.isenabled()
    assert collector._stops._count == 0
