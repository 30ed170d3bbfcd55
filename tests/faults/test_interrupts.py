"""Ctrl-C, MemoryError and SystemExit at each place where one can strike, and real signals at random moments.

An interrupt strikes where the interpreter looks for signals: when a function of ours is entered, and after a call of a
built-in function returned. A profile hook raises there, at the n-th such place of an operation, for every n. Afterwards
nothing confirmed is lost, the broker's own check finds nothing, and other threads go on.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import qflow
from qflow.broker import Broker
from qflow.storage import environment

SEED = int(os.environ.get("QFLOW_SEED", "0")) or random.SystemRandom().randrange(10**6)
PATIENCE_S = 2
ENGINE = os.path.dirname(qflow.__file__)


@pytest.fixture(autouse=True)
def small_map(monkeypatch):
    """A log that hangs stays mapped, so it must not take much of the address space."""
    monkeypatch.setattr(environment, "MAP_BYTES", 2**28)


class Strike:
    """Raises an exception at the n-th place of the current thread's work in the engine, once."""

    def __init__(self, number: int, error: type[BaseException]) -> None:
        self.left = number
        self.error = error
        self.place: str | None = None

    def __enter__(self) -> Strike:
        sys.setprofile(self._look)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        sys.setprofile(None)
        return kind is self.error

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(ENGINE):
            return
        if self.place is None and self.left == 0:
            name = os.path.relpath(frame.f_code.co_filename, ENGINE)
            what = f" after {argument.__name__}" if event == "c_return" else ", entering"
            self.place = f"{name}:{frame.f_lineno} {frame.f_code.co_name}{what}"
            raise self.error
        self.left -= 1


class Bench:
    """A queue that was prepared, the operation that is struck, and what must, may and must not come afterwards."""

    def __init__(self, broker: Broker, name: str, *, durable: bool = True, fill: int = 0, hold: int = 0) -> None:
        self.broker = broker
        self.queue = broker.declare_queue(name, durable=durable, capacity_bytes=2_000)
        bodies = [b"%03d" % index * 30 for index in range(fill)]
        if bodies:
            self.queue.put_many(bodies)
        self.held = [self.queue.get(0) for _ in range(hold)]
        self.must = set(bodies)
        self.may: set[bytes] = set()
        self.futures: list[Any] = []

    def puts(self, *bodies: bytes) -> None:
        self.may |= set(bodies)

    def confirm(self, *bodies: bytes) -> None:
        self.must |= set(bodies)
        self.may -= set(bodies)

    def acks(self, *bodies: bytes) -> None:
        self.must -= set(bodies)
        self.may |= set(bodies)

    def acked(self, *bodies: bytes) -> None:
        self.may -= set(bodies)

    def problem(self) -> str | None:
        """Go on with the queue in another thread, as the next caller would; say what went wrong."""
        found: list[str] = []
        worker = threading.Thread(target=self._go_on, args=(found,), daemon=True)
        worker.start()
        worker.join(PATIENCE_S)
        return "the next caller hangs" if worker.is_alive() else "; ".join(found) or None

    def _go_on(self, found: list[str]) -> None:
        try:
            for future in self.futures:
                future.result(timeout=PATIENCE_S)
            self.confirm(b"next")
            self.queue.put(b"next")
            for delivery in self.held:
                with suppress(qflow.AlreadySettled):
                    delivery.nack()
            while batch := self.queue.get_many(3, timeout_s=0):
                for body in batch.bodies:
                    if body not in self.must | self.may:
                        found.append(f"{body!r} came and must not")
                    self.acks(body)
                    self.acked(body)
                batch.ack(wait=True)
            # A file made at the very moment of the strike may stay until the next open: it costs disk, and nothing else.
            found += [problem for problem in self.queue.problems() if "belong to no message" not in problem]
            missing = len(self.must) - self.queue.stats().acquired_messages
            if missing > 0:
                found.append(f"{missing} of {sorted(self.must)} did not come")
        except BaseException as error:
            found.append(f"the next caller got {error!r}")


def do_put(bench: Bench) -> None:
    bench.puts(b"new")
    bench.queue.put(b"new")
    bench.confirm(b"new")


def do_put_headers_with_a_rider(bench: Bench) -> None:
    bench.puts(b"new")
    bench.queue.put(b"new", headers={"a": 1})
    bench.confirm(b"new")


def do_put_many(bench: Bench) -> None:
    bodies = [b"new%d" % index * 30 for index in range(5)]
    bench.puts(*bodies)
    bench.queue.put_many(bodies)
    bench.confirm(*bodies)


def do_submit(bench: Bench) -> None:
    bench.puts(b"new")
    bench.queue.submit(b"new").result()
    bench.confirm(b"new")


def do_put_unlogged(bench: Bench) -> None:
    bench.puts(b"new")
    bench.queue.put(b"new", durable=False)


def do_get(bench: Bench) -> None:
    bench.held.append(bench.queue.get(0))


def do_get_many(bench: Bench) -> None:
    bench.held += bench.queue.get_many(5, timeout_s=0)


def do_ack(bench: Bench) -> None:
    body = bench.held[0].body
    bench.acks(body)
    bench.held[0].ack()


def do_ack_wait(bench: Bench) -> None:
    body = bench.held[0].body
    bench.acks(body)
    bench.held[0].ack(wait=True)
    bench.acked(body)


def do_ack_many(bench: Bench) -> None:
    bodies = [delivery.body for delivery in bench.held]
    bench.acks(*bodies)
    bench.queue.ack_many(bench.held, wait=True)
    bench.acked(*bodies)


def do_nack(bench: Bench) -> None:
    bench.held[0].nack()


def do_purge(bench: Bench) -> None:
    bodies = tuple(bench.must)
    bench.acks(*bodies)
    bench.queue.purge()
    bench.acked(*bodies)


OPERATIONS: dict[str, tuple[Callable[[Bench], None], dict[str, Any]]] = {
    "put": (do_put, {}),
    "put that spills": (do_put, {"fill": 30}),
    "put with headers, of one who leads a submit of another": (do_put_headers_with_a_rider, {"rider": True}),
    "put_many that spills": (do_put_many, {"fill": 30}),
    "submit": (do_submit, {}),
    "put that is not logged": (do_put_unlogged, {"fill": 1}),
    "get": (do_get, {"fill": 3}),
    "get of what was spilled": (do_get, {"fill": 40, "skip": 12}),
    "get_many of what was spilled": (do_get_many, {"fill": 40, "skip": 12}),
    "ack": (do_ack, {"fill": 3, "hold": 2}),
    "ack and wait": (do_ack_wait, {"fill": 3, "hold": 2}),
    "ack many and wait": (do_ack_many, {"fill": 5, "hold": 4}),
    "nack": (do_nack, {"fill": 30, "hold": 3}),
    "purge": (do_purge, {"fill": 40, "hold": 2}),
}
TRANSIENT = ["put", "put that spills", "put_many that spills", "get", "get of what was spilled", "ack", "nack", "purge"]


def strike_everywhere(spool: Path, operation: str, error: type[BaseException], durable: bool) -> None:
    """Strike an operation at each of its places, one trial each; fail with all places that did harm."""
    act, how = OPERATIONS[operation]
    harm: list[str] = []
    benches: list[Bench] = []
    struck = 0
    broker = qflow.open(spool)
    for number in count():
        setting = {name: value for name, value in how.items() if name in ("fill", "hold")}
        bench = Bench(broker, f"q{number}", durable=durable, **setting)
        for _ in range(how.get("skip", 0)):
            with bench.queue.get(0) as delivery:
                bench.acks(delivery.body)
                bench.acked(delivery.body)
        if how.get("rider"):
            bench.confirm(b"rider")
            bench.futures.append(bench.queue.submit(b"rider"))
        strike, problem = Strike(number, error), None
        try:
            with strike:
                act(bench)
        except Exception as other:
            problem = f"it raised {other!r} instead"
        problem = bench.problem() or problem
        if problem is not None:
            harm.append(f"{strike.place}: {problem}")
            broker = qflow.open(spool.with_name(f"spool{number}"))  # the one before may be of no use
        benches.append(bench)
        if strike.place is None:
            break
        struck += 1
    assert not harm, "\n".join(harm)
    assert struck > 0
    broker.close()
    if not durable:
        return
    with qflow.open(spool) as broker:
        for bench in benches:
            queue = broker.queue(bench.queue.name)
            while len(queue):
                with queue.get(0) as delivery:
                    assert delivery.body in bench.must | bench.may
                    bench.must.discard(delivery.body)
            assert not bench.must
        assert broker.check() == []


@pytest.mark.parametrize("operation", OPERATIONS)
def test_ctrl_c_at_any_place_of_a_durable_operation_does_no_harm(operation, spool):
    """Edge 26: wherever KeyboardInterrupt strikes, the next caller goes on and nothing confirmed is lost."""
    strike_everywhere(spool, operation, KeyboardInterrupt, durable=True)


@pytest.mark.parametrize("operation", TRANSIENT)
def test_ctrl_c_at_any_place_of_a_transient_operation_does_no_harm(operation, spool):
    """Edge 26: the same for a queue that is not durable."""
    strike_everywhere(spool, operation, KeyboardInterrupt, durable=False)


@pytest.mark.parametrize("error", [MemoryError, SystemExit])
def test_other_exceptions_at_any_place_of_a_put_do_no_harm(error, spool):
    """Edge 26: MemoryError and SystemExit in the leader are survived like Ctrl-C, and reach the caller."""
    strike_everywhere(spool, "put that spills", error, durable=True)
