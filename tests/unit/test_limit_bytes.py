"""`limit_bytes`: what is counted for it, whatever is known of the bytes of spilled messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import qflow
from qflow.message import OVERHEAD_BYTES
from qflow.queues.queue import parts_of

Open = Callable[..., qflow.Broker]


def spilled(broker: qflow.Broker) -> qflow.Queue:
    """Return a queue at its limit, with small and large messages in turns, of which all but the first are spilled."""
    queue = broker.declare_queue(
        "q", durable=False, capacity_bytes=1000 + OVERHEAD_BYTES, limit_bytes=5_050, on_overflow=qflow.Overflow.REJECT
    )
    queue.put_many([b"0" * 10, b"1" * 1000] * 5)
    parts_of(queue).spiller.spill_excess()
    for entry in queue.browse():
        entry.spill()
    return queue


def is_empty(queue: qflow.Queue) -> bool:
    """Take what is left; tell whether as many bytes as the limit admits find room, and no more."""
    while batch := queue.get_many(100, timeout_s=0):
        batch.ack()
    queue.put(bytes(queue.settings.limit_bytes))
    try:
        queue.put_nowait(b"1")
    except qflow.QueueFull:
        return True
    return False


def test_a_spilled_run_that_is_cut_counts_what_it_holds(open_spool: Open) -> None:
    """A small one of it comes back by hand; then another limit has all bytes counted anew."""
    broker = open_spool()
    queue = spilled(broker)
    entries = list(queue.browse())
    assert {entry.state for entry in entries} == {"spilled"}
    entries[4].restore()
    assert broker.check() == []
    broker.alter_queue("q", limit_bytes=6_000)
    assert queue.stats().bytes == 5_050
    assert broker.check() == []
    entries[4].spill()
    entries[7].restore()
    entries[0].restore()
    broker.alter_queue("q", limit_bytes=5_500)
    assert queue.stats().bytes == 5_050
    assert broker.check() == []
    assert is_empty(queue)


def test_what_is_lost_of_a_cut_run_counts_no_more_once_the_run_is_gone(open_spool: Open, spool: Path) -> None:
    """Two of its messages are damaged on disk: with the last of its parts their bytes go, too."""
    broker = open_spool(spill="files")
    queue = spilled(broker)
    for path in sorted((spool / "spill").rglob("*"), key=lambda path: path.name):
        if path.is_file() and path.stat().st_size > 1_000:
            path.write_bytes(b"damaged")
    list(queue.browse())[4].restore()
    assert broker.check() == []
    while batch := queue.get_many(1, timeout_s=0):
        batch.ack()
        assert broker.check() == []
    assert queue.stats().lost_total > 0
    assert is_empty(queue)
