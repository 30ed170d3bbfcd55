"""Finalizers that use a broker in the middle of a call of the same thread: refused, or done; nothing hangs, or is hurt.

Garbage is collected where a container is allocated (CPython 3.11), or soon after (3.12 on). So a threshold of n for the
collector has a finalizer run at about the n-th allocation of a call.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import qflow
from faults.seams import in_thread
from faults.strikes import Strike
from qflow import compat
from qflow.memory import waiting
from qflow.queues.queue import parts_of
from unit.clocks import until

Open = Callable[..., qflow.Broker]
MOST = 60
"""Allocations of a call, at about: a finalizer runs at each."""
PATIENCE_S = 60.0
PACKAGE = Path(qflow.__file__).parent


@pytest.fixture(autouse=True)
def small_heap() -> None:
    """What is there before is no garbage, and is not looked at again and again."""
    gc.collect()
    gc.freeze()  # and is so to the end: all else that is frozen would come back with it


def test_it_is_known_when_garbage_is_collected() -> None:
    """And when it is no more: what is always refused is slow."""
    seen: list[tuple[str, bool]] = []

    def look(phase: str, _: object) -> None:
        seen.append((phase, bool(waiting.collecting)))

    gc.callbacks.append(look)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(look)
    assert seen == [("start", True), ("stop", False)]


class Finalizers:
    """Garbage that puts when it is collected, and what came of it."""

    def __init__(self, use: Callable[[], object]) -> None:
        self._use = use
        self.done = 0
        self.refused = 0
        self.errors: list[BaseException] = []

    def finalize(self) -> None:
        try:
            self._use()
            self.done += 1
        except qflow.Reentered:
            self.refused += 1
        except BaseException as error:
            self.errors.append(error)

    def wait_for(self, number: int) -> None:
        """Let another thread end its collection, during which this one's does nothing."""
        deadline = time.monotonic() + PATIENCE_S
        while self.refused + self.done + len(self.errors) < number and time.monotonic() < deadline:
            gc.collect()
            threading.Event().wait(0.001)

    def litter(self, kind: str) -> None:
        """Make garbage that only a collection finds."""
        if kind == "__del__":
            Litter(self)
        else:
            cycle: list[Any] = [suspended(self)]
            cycle.append(cycle)
            next(cycle[0])

    @contextmanager
    def collected_after(self, allocations: int, kind: str) -> Iterator[None]:
        before = gc.get_threshold()
        gc.collect()
        gc.disable()
        self.litter(kind)
        gc.set_threshold(allocations)
        gc.enable()
        try:
            yield
        finally:
            gc.set_threshold(*before)
            gc.collect()


class Litter:
    def __init__(self, finalizers: Finalizers) -> None:
        self.me = self
        self.finalizers = finalizers

    def __del__(self) -> None:
        self.finalizers.finalize()


def suspended(finalizers: Finalizers) -> Generator[None, None, None]:
    try:
        yield
    finally:
        finalizers.finalize()


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("kind", ["__del__", "generator"])
@pytest.mark.parametrize("in_main", [True, False], ids=["main", "thread"])
def test_a_finalizer_that_puts_in_the_middle_of_a_call_is_done_or_refused(
    open_spool: Open, durable: bool, kind: str, in_main: bool
) -> None:
    """Wherever it comes: the call goes on, no sequence is given twice, and nobody waits for itself."""
    broker = open_spool(capacity_bytes="1MiB")
    queue = broker.declare_queue("q", durable=durable)
    finalizers = Finalizers(lambda: queue.put(b"of a finalizer"))

    def calls() -> None:
        for allocations in range(1, MOST):
            with finalizers.collected_after(allocations, kind):
                queue.put_many([b"1", b"2"])
                queue.put(b"3", headers={"a": 1})
                queue.get_many(2, 0).nack()
                queue.get(0).ack()
                queue.stats()

    if in_main:
        calls()
    else:
        in_thread(calls)
    finalizers.wait_for(MOST - 1)
    assert finalizers.errors == []
    assert finalizers.refused > 0
    assert finalizers.refused + finalizers.done == MOST - 1
    left = 2 * (MOST - 1) + finalizers.done
    assert queue.stats().messages == left
    batch = queue.get_many(10_000, 0)
    assert len(set(batch.sequences)) == left
    batch.ack()


def test_a_handler_may_use_a_broker_whose_caller_looks_for_finalizers(open_spool: Open) -> None:
    """Another thread collects garbage as the call begins; that looks through its callers, and a handler strikes there.

    What the handler asks for is in the middle of no call.
    """
    queue = open_spool().declare_queue("q", durable=False)
    queue.stats()
    found = []
    for at in range(20):
        strike = Strike(at, lambda: queue.put(b"x"))
        waiting.collecting.add("a")
        try:
            strike.run(queue.stats)
        finally:
            waiting.collecting.clear()
        found.append(strike.where)
    assert any("refuse_finalizer" in where for where in found if where)
    assert queue.stats().messages == len([where for where in found if where]) > 10  # some calls end before their place


def test_an_ack_of_a_task_leaves_its_straight_line_while_garbage_is_collected(open_spool: Open) -> None:
    """It may be a finalizer's, in the middle of another call."""
    queue = open_spool().declare_queue("q", durable=False)
    queue.put(b"x")
    delivery, claims = queue.get(), parts_of(queue).claims
    waiting.collecting.add("a")
    try:
        assert not claims.settle_at_once(delivery)
    finally:
        waiting.collecting.clear()
    assert queue.stats().acquired_messages == 1
    assert claims.settle_at_once(delivery)
    assert queue.stats().acquired_messages == 0


@pytest.mark.parametrize("durable", [True, False])
def test_a_handler_may_use_a_broker_while_another_thread_collects(open_spool: Open, durable: bool) -> None:
    """At each place of a put: what it asks for is refused only where it cannot be told whether a lock is held."""
    queue = open_spool().declare_queue("q", durable=durable)
    queue.put_many([b"x"] * 2)  # what a first one does besides
    struck, put, refused = 0, 2, []

    def handle() -> None:
        nonlocal put
        try:
            queue.put(b"x")
            put += 1
        except qflow.Reentered:
            refused.append(strike.where)

    for at in range(200):
        strike = Strike(at, handle)
        waiting.collecting.add("a")
        try:
            strike.run(lambda: queue.put_many([b"x"] * 3))
        finally:
            waiting.collecting.clear()
        put += 3
        struck += strike.where is not None
        if strike.where is None:
            break
    assert struck > 20
    for place in refused:
        path, line = place.split()[0].split(":")
        assert (PACKAGE / path).read_text().splitlines()[int(line) - 1].lstrip().startswith("with "), place
    assert queue.stats().messages == put


def test_a_handler_may_use_a_broker_where_the_main_thread_asks_who_writes(open_spool: Open) -> None:
    """What the writer runs is no sign of the writer: others look into it, too."""
    broker = open_spool()
    queue = broker.declare_queue("q")
    found: list[str] = []
    for at in range(20):
        strike = Strike(at, lambda: queue.put(b"x"))
        waiting.collecting.add("a")
        try:
            strike.run(broker.engine.log.check_can_wait)
        finally:
            waiting.collecting.clear()
        found += [strike.where] if strike.where else []
    assert any("writer.py" in where for where in found)
    assert len(queue) == len(found)


@pytest.mark.parametrize("durable", [True, False])
def test_a_finalizer_that_acks_in_the_middle_of_a_call_hurts_nothing(open_spool: Open, durable: bool) -> None:
    """What the call goes through does not change under it."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable)
    queue.put_many([b"x"] * MOST)
    held = [queue.get(0) for _ in range(MOST)]
    finalizers = Finalizers(lambda: held.pop().ack())

    def calls() -> None:
        for allocations in range(1, MOST):
            with finalizers.collected_after(allocations, "__del__"):
                queue.stats()
                broker.check()

    in_thread(calls)
    assert finalizers.errors == []
    assert finalizers.refused > 0
    assert queue.stats().messages == MOST - finalizers.done


def test_a_drop_in_that_is_collected_in_the_middle_of_a_call_goes_with_its_directory(open_spool: Open) -> None:
    """By a thread that need not wait for that call: this one may be any, of that queue's own broker, too."""
    queue = open_spool(capacity_bytes="1MiB").declare_queue("q")
    directories = []
    before = gc.get_threshold()
    for allocations in range(1, MOST, 4):
        items: Any = compat.Queue()
        directories.append(Path(items._items.queue._parts.context.shared.keys._log._env.path).parent)
        gc.collect()
        gc.disable()
        cycle = [items]
        cycle.append(cycle)
        del items, cycle
        gc.set_threshold(allocations)
        gc.enable()
        try:
            queue.put_many([b"1", b"2"])
            queue.get_many(2, 0).ack()
        finally:
            gc.set_threshold(*before)
    gc.collect()
    until(lambda: not any(directory.exists() for directory in directories))
