"""A batch is looked at without the lock of its queue, while others settle messages of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
from qflow.aio.queue_work import QueueWork
from qflow.delivery import Segment
from qflow.held_batch import HeldBatch
from qflow.memory.waiting import in_place
from qflow.message import Record
from qflow.queues import getting, looking
from qflow.queues.queue import parts_of

BODIES = [b"%d" % number * 10 for number in range(10)]


class Passing(list[Record]):
    """Records of a segment: whoever goes through them for the first time lets something else be done meanwhile."""

    meanwhile: Callable[[], object] | None = None

    def __iter__(self) -> Iterator[Record]:
        yield from super().__iter__()
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            thread = threading.Thread(target=meanwhile)
            thread.start()
            thread.join()


@pytest.fixture
def broker(spool: Path) -> Iterator[qflow.Broker]:
    with qflow.open(spool) as broker:
        yield broker


def test_what_is_settled_while_somebody_counts_is_counted(broker: qflow.Broker) -> None:
    """Else the batch would never be over."""
    inside.still(broker)  # maintenance counts, too
    queue = broker.declare_queue("q", durable=False)
    queue.put_many(BODIES)
    batch = queue.get_many(10)
    held: HeldBatch = batch.held  # type: ignore[attr-defined]
    first, records, marks = held.segments[0]
    passing = Passing(records)
    held.segments[0] = Segment(first, passing, marks)

    def settle() -> None:
        batch[0].ack()
        batch[1].ack()

    passing.meanwhile = settle
    held._measured = (0, 0)
    queue.stats()
    assert passing.meanwhile is None
    assert held.left_size() == (8, sum(map(len, BODIES[2:])))
    assert broker.check() == []
    for delivery in batch[2:]:
        delivery.ack()
    assert (queue.stats().acquired_messages, queue.stats().holders) == (0, ())
    assert broker.check() == []


def test_what_is_settled_while_somebody_goes_through_is_passed_over(
    broker: qflow.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = broker.declare_queue("q", durable=False)
    queue.put_many(BODIES)
    batch = queue.get_many(10)
    is_settled = HeldBatch.is_settled

    def settle_then(held: HeldBatch, position: int) -> bool:
        found = is_settled(held, position)
        if position == 3 and not found:
            monkeypatch.setattr(HeldBatch, "is_settled", is_settled)
            batch[3].ack()
        return found

    monkeypatch.setattr(HeldBatch, "is_settled", settle_then)
    held: HeldBatch = batch.held  # type: ignore[attr-defined]
    assert [one.sequence for one in held] == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_a_batch_that_ends_before_a_caller_is_told_of_it_stops_no_later_ones(
    open_spool: Callable[..., qflow.Broker], spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the door: it was held for too long, say."""
    owner = open_spool()
    owner.declare_queue("q", durable=False).put_many(BODIES)
    collect = QueueWork.collect

    async def give_up(work: QueueWork, *arguments: Any) -> HeldBatch:
        monkeypatch.setattr(QueueWork, "collect", collect)
        batch = await collect(work, *arguments)
        in_place(lambda: work._claims.give_up(batch))
        return batch

    monkeypatch.setattr(QueueWork, "collect", give_up)
    with qflow.connect(spool) as remote:
        queue = remote.queue("q")
        with pytest.raises(qflow.AlreadySettled):
            queue.get_many(10)
        assert queue.get_many(10, 30).bodies == BODIES


def test_a_look_at_figures_while_a_batch_is_collected_leaves_its_size_as_it_is(
    broker: qflow.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maintenance looks each second, without the lock: what was settled then stayed charged for good."""
    queue = broker.declare_queue("q", durable=False)
    queue.put_many(BODIES)
    append = getting._append
    seen = []

    def look_then(segments: list[Segment], more: list[Segment]) -> None:
        monkeypatch.setattr(getting, "_append", append)
        looked = threading.Thread(target=lambda: seen.append(looking.present(parts_of(queue)).held_bytes()))
        looked.start()
        looked.join()
        append(segments, more)

    monkeypatch.setattr(getting, "_append", look_then)
    batch = queue.get_many(5)
    assert seen == [0]
    batch.ack()
    queue.get_many(10).ack()
    figures = queue.stats()
    assert (figures.messages, figures.bytes, figures.resident_bytes) == (0, 0, 0)
