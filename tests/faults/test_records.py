"""Queues and streams are declared, altered and deleted whole, wherever the thread that does it is interrupted."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import qflow
from faults.seams import Faults, drained, faulty_broker
from faults.test_full_disk import disk_of, filled
from qflow import broker as broker_module
from qflow.memory import waiting
from qflow.queues import registry as queues_module
from qflow.queues.queue import parts_of
from qflow.storage.log import records
from qflow.streams import registry

WHERE = {module.__file__ for module in (broker_module, queues_module, records, registry, waiting)}
OF_WHAT_IS_GONE = {kind.__init__.__code__.co_filename for kind in (weakref.WeakSet, weakref.WeakKeyDictionary)}
"""What is called there for an object that is gone is called at any place, and what is raised goes nowhere."""

PLACES = 70
"""More than there are calls and returns on the way to a commit and back."""


def interrupted_at(place: int, work: Callable[[], object]) -> None:
    """Run something with a KeyboardInterrupt at the n-th call, or return from one, in or from the modules above."""
    left = place

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        caller = frame.f_back
        if frame.f_code.co_filename in OF_WHAT_IS_GONE:
            return None
        if frame.f_code.co_filename in WHERE or (caller is not None and caller.f_code.co_filename in WHERE):
            if event in ("call", "return"):
                left -= 1
                if left == -1:
                    raise KeyboardInterrupt
            return trace
        return None

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        sys.settrace(None)
    finally:
        sys.settrace(None)


def everywhere(work: Callable[[str], object]) -> Iterator[str]:
    """Interrupt work on a name at each place, each time with another name; yield the names."""
    for place in range(PLACES):
        interrupted_at(place, lambda: work(f"n{place}"))  # noqa: B023
        yield f"n{place}"


def test_a_queue_whose_declaring_was_interrupted_is_there_once_or_not_at_all(spool):
    """I17, I1: declared again it is the same queue, confirms puts that the next open finds, and has no twin."""
    names = []
    with qflow.open(spool) as broker:
        for name in everywhere(broker.declare_queue):
            queue = broker.declare_queue(name)
            assert broker.declare_queue(name) is queue
            queue.put(name.encode())
            names.append(name)
        assert broker.check() == []
    with qflow.open(spool) as broker:
        assert broker.recovery.problems == ()
        assert broker.recovery.queues == len(names)
        for name in names:
            assert drained(broker.queue(name)) == [name.encode()]


@pytest.mark.parametrize("durable", [True, False])
def test_a_queue_whose_deleting_was_interrupted_takes_nothing_that_is_lost(durable, spool):
    """I17, I1: what a put confirms afterwards is there when the spool is opened again, or it says that it is deleted."""
    kept = []
    with qflow.open(spool) as broker:
        for place in range(PLACES):
            name = f"n{place}"
            queue = broker.declare_queue(name, durable=durable)
            broker.bind(name, f"t/{name}")
            interrupted_at(place, lambda: broker.delete_queue(name))  # noqa: B023
            try:
                queue.put(b"late")
            except qflow.QueueDeleted:
                assert broker.publish(f"t/{name}", b"x").sequences == {}
                again = broker.declare_queue(name, durable=durable)
                assert again is not queue
                again.put(b"new")
                kept.append((name, b"new"))
            else:
                kept.append((name, b"late"))
        assert {body for _, body in kept} == {b"late", b"new"}
        assert broker.check() == []
    with qflow.open(spool) as broker:
        assert broker.recovery.problems == ()
        assert {name: drained(broker.queue(name)) for name in broker.queues()} == {
            name: [body] for name, body in kept if durable
        }


def test_a_binding_that_was_interrupted_holds_in_memory_and_in_the_log_or_in_neither(spool):
    """I17: what a queue is bound to is the same after the next open."""
    found = {}
    with qflow.open(spool) as broker:
        for name in everywhere(lambda name: (broker.declare_queue("all"), broker.bind("all", f"t/{name}"))):
            broker.declare_queue("all")  # whoever comes next makes sure
            found[name] = broker.publish(f"t/{name}", b"x").sequences != {}
        assert set(found.values()) == {True, False}
    with qflow.open(spool) as broker:
        assert {name: broker.publish(f"t/{name}", b"x").sequences != {} for name in found} == found


def test_a_queue_that_was_altered_with_an_interrupt_has_the_settings_of_the_log(spool):
    """I17: a setting holds in memory and in the log, or in neither."""
    found = {}
    with qflow.open(spool) as broker:
        limits = iter(range(1, 10_000))
        queue = broker.declare_queue("q")
        for name in everywhere(lambda name: broker.alter_queue("q", limit_messages=next(limits))):
            broker.declare_queue("q2")
            found[name] = queue.settings.limit_messages
            with broker.engine.log.read() as txn:
                record = txn.get(qflow.storage.log.keys.queue_key(parts_of(queue).context.owner))
            assert f'"limit_messages": {found[name]}'.replace("None", "null").encode() in record
        assert len(set(found.values())) > 3


def test_a_full_disk_refuses_new_names_and_lets_everything_else_go_on(tmp_path: Path):
    """I12, edge 37: declare, alter and bind leave the acks' reserve alone; acks, delete, close and reopen go on."""
    with disk_of("4m", tmp_path / "disk") as disk:
        with qflow.open(disk / "spool") as broker:
            queue = broker.declare_queue("q")
            count = filled(queue, 1_000)
            refused = dict.fromkeys(("declare", "alter", "bind", "stream"), 0)
            for number in range(200):
                for what, work in {
                    "declare": lambda number=number: broker.declare_queue(f"q{number}"),
                    "alter": lambda number=number: broker.alter_queue("q", limit_messages=10_000 + number),
                    "bind": lambda number=number: broker.bind("q", "t" * 1_000 + f"/{number}"),
                    "stream": lambda number=number: broker.declare_stream(f"s{number}", topics=["s"]),
                }.items():
                    try:
                        work()
                    except qflow.DiskFull:
                        refused[what] += 1
            assert min(refused.values()) > 150, refused
            names = broker.queues()
            for _ in range(count // 2):
                queue.get(0).ack(wait=True)
            assert broker.check() == []
        with qflow.open(disk / "spool") as broker:
            assert broker.recovery.problems == ()
            assert broker.queues() == names
            assert len(broker.queue("q")) == count - count // 2
            broker.delete_queue("q")
            broker.declare_queue("new").put(b"x")


def test_what_is_refused_for_lack_of_room_leaves_no_trace(spool):
    """I12: a queue that was not declared, and a binding that was not written, are not there."""
    faults = Faults()
    with faulty_broker(spool, faults) as broker:
        queue = broker.declare_queue("q", limit_messages=5)
        faults.fail("make_room", qflow.DiskFull("no room"))
        for work in (
            lambda: broker.declare_queue("new"),
            lambda: broker.bind("q", "t"),
            lambda: broker.alter_queue("q", limit_messages=6),
        ):
            with pytest.raises(qflow.DiskFull, match="no room"):
                work()
        assert broker.queues() == ["q"]
        assert queue.settings.limit_messages == 5
        assert broker.publish("t", b"x").sequences == {}
        faults.heal()
        broker.declare_queue("new").put(b"x")
        assert broker.check() == []
