"""What is known of a spool: rates, their history, rows in order."""

from __future__ import annotations

from typing import Any

import pytest

import top_seen
from qflow.top.look import KEPT, ORDERS, Board, Key, Look, Mode, Order

JOBS = Key("queue", "jobs")


def look(time_s: float, put: int, *, acked: int = 0, mode: Mode = Mode.LIVE, pid: int = 1, **more: Any) -> Look:
    jobs = top_seen.queue("jobs", put_total=put, acked_total=acked)
    return Look(mode=mode, pid=pid, time_s=time_s, queues={"jobs": jobs}, **more)


def test_rates_are_by_the_time_between_looks() -> None:
    """However long that was."""
    board = Board()
    board.take(look(0.0, 100))
    assert board.rows[JOBS].rates == {"in": None, "out": None, "acked": None}
    board.take(look(2.0, 120, acked=10))
    assert board.rows[JOBS].rates == {"in": 10.0, "out": 0.0, "acked": 5.0}
    board.take(look(2.5, 121, acked=10))
    assert board.series(JOBS, "in", 9) == [10.0, 2.0]
    assert board.series(None, "acked", 9) == [5.0, 0.0]
    assert board.series(JOBS, "in", 1) == [2.0]


def test_what_stands_still_has_a_rate_of_zero() -> None:
    """Also where its figures are the same object as before."""
    board, still = Board(), top_seen.queue("still", put_total=7)
    for second in range(3):
        board.take(Look(mode=Mode.LIVE, time_s=second, queues={"still": still}))
    assert board.rows[Key("queue", "still")].rates["in"] == 0.0
    moving = look(3.0, 5)
    board.take(moving)
    board.take(look(4.0, 9))
    last = board.look.queues["jobs"]
    board.take(Look(mode=Mode.LIVE, pid=1, time_s=5.0, queues={"jobs": last}))
    assert board.rows[JOBS].rates["in"] == 0.0


def test_history_is_bounded() -> None:
    """A queue that moves for days keeps as many rates as any other."""
    board = Board()
    for second in range(3 * KEPT):
        board.take(look(second, second * second))
    series = board.series(JOBS, "in", 10 * KEPT)
    assert len(series) == KEPT
    assert series[-1] == (3 * KEPT - 1) ** 2 - (3 * KEPT - 2) ** 2


def test_figures_that_are_read_again_are_no_look_of_their_own() -> None:
    """A file that was not written since says nothing about rates; its age does count."""
    board = Board()
    board.take(look(0.0, 0, mode=Mode.TOLD))
    board.take(look(10.0, 50, mode=Mode.TOLD))
    board.take(look(10.0, 50, mode=Mode.TOLD, age_s=3.0))
    assert board.rows[JOBS].rates["in"] == 5.0
    assert board.look.age_s == 3.0


def test_a_clock_that_was_set_back_begins_anew() -> None:
    """The figures of an owner that lets nobody in have the time of its clock: they are shown all the same."""
    board = Board()
    board.take(look(5000.0, 0, mode=Mode.TOLD))
    board.take(look(5010.0, 50, mode=Mode.TOLD))
    others = {"others": top_seen.queue("others", put_total=7)}
    board.take(Look(mode=Mode.TOLD, pid=1, time_s=1410.0, queues=others))
    assert [key.name for key in board.rows] == ["others"]
    assert board.rows[Key("queue", "others")].rates["in"] is None


@pytest.mark.parametrize("change", [{"pid": 2}, {"mode": Mode.TOLD}])
def test_another_owner_counts_anew(change: dict[str, Any]) -> None:
    """What the last one counted is no rate of the new one."""
    board = Board()
    board.take(look(0.0, 100))
    board.take(look(1.0, 200))
    board.take(look(2.0, 5, **change))
    assert board.rows[JOBS].rates["in"] is None
    assert board.series(JOBS, "in", 9) == []


def test_totals_that_begin_anew_are_no_negative_rate() -> None:
    """A queue that was deleted and declared between two looks."""
    board = Board()
    board.take(look(0.0, 100))
    board.take(look(1.0, 5))
    assert board.rows[JOBS].rates["in"] == 0.0


def test_what_is_deleted_is_shown_no_more() -> None:
    """And a new one of that name has no history."""
    board = Board()
    board.take(look(0.0, 100))
    board.take(Look(mode=Mode.LIVE, pid=1, time_s=1.0))
    assert board.rows == {}
    board.take(look(2.0, 900))
    assert board.rows[JOBS].rates["in"] is None


def test_a_queue_on_disk_has_no_rates() -> None:
    """Nobody moves anything there."""
    board = Board()
    for second in range(2):
        facts = {"name": "jobs", "messages": 7, "bytes": 70}
        board.take(Look(mode=Mode.DEAD, time_s=second, queues={"jobs": facts}))
    row = board.rows[JOBS]
    assert (row.lag, row.oldest_s, row.resident_bytes, row.consumers) == (7, None, None, None)
    assert set(row.rates.values()) == {None}


@pytest.mark.parametrize("by", ORDERS)
def test_rows_are_in_order_and_the_other_way_round(by: str) -> None:
    """Every column sorts, with figures that are not known as the smallest."""
    board = top_seen.board()
    names = [row.key.name for row in board.shown(Order(by))]
    assert sorted(names) == sorted(row.name for row in board.rows)
    first = {"name": "flights", "memory": "payments", "acked/s": "flights", "consumers": "jobs", "blocked": "payments"}
    assert names[0] == first.get(by, names[0])
    assert board.shown(Order(by).turned())[0].key.name != names[0]


def test_orders_go_round() -> None:
    """To the right and to the left."""
    assert Order("name").moved(1) == Order("lag")
    assert Order("name").moved(-1) == Order(ORDERS[-1])
    assert Order("lag", True).moved(1) == Order("unacked")


def test_rows_are_chosen_by_a_part_of_their_name_and_by_kind() -> None:
    """In small or capital letters."""
    board = top_seen.board()
    assert [row.key.name for row in board.shown(Order(), "PAY")] == ["payments"]
    assert [row.key.name for row in board.shown(Order(), kinds=["stream"])] == ["flights"]
    assert board.shown(Order(), "no such") == []
