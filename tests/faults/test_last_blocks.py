"""A row that names an earlier block than the last one of its lane, as some that earlier versions have closed do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
from faults.test_lanes import edit
from qflow.errors import CorruptionError
from qflow.inspect import check_spool, repair_spool
from qflow.message import LANE_SHIFT
from qflow.storage.blocks import NO_PREVIOUS
from qflow.storage.log import confirming, direct, reading, writer
from qflow.storage.log.rows import read_rows, with_last_block, write_row
from unit.clocks import until

QUEUES = 3
LARGE = bytes(20_000)
HELD = [b"a", b"b", LARGE]
"""In two blocks, of which the first would grow."""
OWNERS = range(1, 10)
"""More than any spool here has."""


def set_back(spool: Path, tail: int) -> int:
    """Have all rows that name the second block name another one, or none; return how many those were."""
    changed = 0

    def change(txn: Any) -> None:
        nonlocal changed
        for owner in OWNERS:
            with suppress(CorruptionError):  # there is no such queue
                for lane, row in read_rows(txn, owner).items():
                    start = lane << LANE_SHIFT
                    if row.tail == start + 2:
                        assert with_last_block(txn, owner, lane, row) == row
                        write_row(txn, owner, lane, row._replace(tail=tail if tail == NO_PREVIOUS else start + tail))
                        changed += 1

    edit(spool, change)
    return changed


def problems_of(spool: Path, tail: int) -> list[str]:
    """Return what a check says, without what it says of rows that were set back."""
    named = "no block" if tail == NO_PREVIOUS else f"block {tail}"
    text = f"the row of lane 0 names {named} as the last one, and block 2 is behind it"
    return [problem for problem in check_spool(spool) if text not in problem]


@pytest.fixture(params=[0, NO_PREVIOUS])
def tail(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture
def closed(spool: Path, tail: int) -> Path:
    """A spool that was closed, with bound queues whose rows are so."""
    with qflow.open(spool) as broker:
        for number in range(QUEUES):
            queue = broker.declare_queue(f"q{number}")
            broker.bind(queue, "t")
            queue.put_many(HELD[:2])
            queue.put(LARGE)
    assert set_back(spool, tail) == QUEUES
    return spool


def unit(broker: qflow.Broker, queue: qflow.Queue) -> None:
    with broker.transaction() as tx:
        tx.put(queue, b"c")
        tx.put_many(queue, [b"d", LARGE])


def settle(broker: qflow.Broker, queue: qflow.Queue) -> None:
    """Have the first batch put nothing; what comes then stands alone."""
    queue.get().ack(wait=True)
    queue.put(b"c")
    queue.put(b"d")


WAYS: dict[str, Callable[[qflow.Broker, qflow.Queue], object]] = {
    "put": lambda broker, queue: queue.put(b"c"),
    "put_many": lambda broker, queue: queue.put_many([b"c", b"d"]),
    "large": lambda broker, queue: queue.put(LARGE),
    "published": lambda broker, queue: broker.publish("t", b"c"),
    "unit": unit,
    "settled": settle,
}
PUT = {
    "put": [b"c"],
    "put_many": [b"c", b"d"],
    "large": [LARGE],
    "published": [b"c"] * QUEUES,
    "unit": [b"c", b"d", LARGE],
    "settled": [b"c", b"d"],
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_put_behind_such_a_row_hides_nothing(closed: Path, way: str) -> None:
    """However it is put; and from then on the row is right."""
    with qflow.open(closed) as broker:
        for number in range(QUEUES):
            WAYS[way](broker, broker.queue(f"q{number}"))
    assert check_spool(closed) == []
    with qflow.open(closed) as broker:
        assert broker.recovery.problems == ()
        for number in range(QUEUES):
            held = HELD[1:] if way == "settled" else HELD
            assert broker.queue(f"q{number}").get_many(100, timeout_s=0).bodies == [*held, *PUT[way]]


def test_a_check_names_such_rows_and_a_repair_puts_them_right(closed: Path, tail: int, tmp_path: Path) -> None:
    problems = check_spool(closed)
    assert len(problems) == QUEUES
    assert problems_of(closed, tail) == []
    repair_spool(closed, tmp_path / "new")
    assert check_spool(tmp_path / "new") == []
    with qflow.open(tmp_path / "new") as broker:
        assert broker.queue("q0").get_many(100, timeout_s=0).bodies == HELD


def test_what_is_settled_behind_such_a_row_is_no_problem(closed: Path) -> None:
    """Blocks below the floor may be left, and a repair leaves a row that names none then."""
    told: list[str | None] = []

    def change(txn: Any) -> None:
        row = read_rows(txn, 1)[0]
        told.append(reading.behind_tail(txn, 1, 0, row))
        told.append(reading.behind_tail(txn, 1, 0, row._replace(floor=row.next)))

    edit(closed, change)
    assert [text is None for text in told] == [False, True]


def test_a_stream_with_such_rows_is_named_and_goes_on(spool: Path, tail: int) -> None:
    with qflow.open(spool) as broker:
        broker.declare_stream("s", topics=["#"])
        broker.publish_many([("t", b"a"), ("t", b"b")])
        broker.publish("t", LARGE)
    assert set_back(spool, tail) == 1
    assert len(check_spool(spool)) == 1
    assert problems_of(spool, tail) == []
    with qflow.open(spool) as broker:
        broker.publish("t", b"c")
    assert check_spool(spool) == []
    with qflow.open(spool) as broker, broker.subscribe("s", start="earliest", follow=False) as subscription:
        assert [delivery.body for delivery in subscription] == [*HELD, b"c"]


def test_what_the_journal_holds_for_such_a_row_hides_nothing(
    spool: Path, tail: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner was killed with messages that stood alone: they are written as the spool is opened."""
    monkeypatch.setattr(confirming, "FIRST_BATCHES", 0)
    for module, name in ((writer, "SOON_S"), (confirming, "LATE_S"), (direct, "PATIENCE_S")):
        monkeypatch.setattr(module, name, 1000)
    with qflow.open(spool) as broker:
        inside.still(broker)
        queue = broker.declare_queue("q")
        queue.put_many(HELD[:2])
        queue.put(LARGE)
        broker.engine.log._apply()
        until(lambda: broker.engine.log.turn.open)
        before = broker.engine.log.turn.confirmed
        queue.put(b"c")
        assert broker.engine.log.turn.confirmed == before + 1
        killed = inside.copy_as_killed(broker, tmp_path / "killed")
    assert set_back(killed, tail) == 1
    assert check_spool(killed) == []  # read with what the journal holds
    with qflow.open(killed) as broker:
        assert broker.recovery.problems == ()
        broker.queue("q").put(b"d")
    assert check_spool(killed) == []
    with qflow.open(killed) as broker:
        assert broker.queue("q").get_many(100, timeout_s=0).bodies == [*HELD, b"c", b"d"]
