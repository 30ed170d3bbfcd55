"""`Broker.redrive`: dead letters go back, from Python."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import qflow
from unit.clocks import LONG_S, until

pytestmark = pytest.mark.two_drivers

Open = Callable[..., qflow.Broker]


def test_what_there_is_no_room_to_look_at_is_told(open_spool: Open) -> None:
    """Those that stay are held meanwhile; what is behind them can go elsewhere, with them."""
    broker = open_spool(capacity_bytes=200_000)
    gone, here = (broker.declare_queue(name, dead_letter="dead") for name in ("gone", "here"))
    for queue, count in ((gone, 40), (here, 5)):
        for _ in range(count):
            queue.put(b"x" * 10_000)
            queue.get(LONG_S).nack(requeue=False)
    dead = broker.queue("dead")
    until(lambda: len(dead) == 45)
    broker.delete_queue("gone")
    for _ in range(2):
        report = broker.redrive("dead")
        assert (report.moved, sum(report.kept.values()), len(dead)) == ({}, 45, 45)
        assert sorted(reason.partition(":")[0] for reason in report.kept) == [
            "not looked at",
            "queue 'gone', where it came from, is gone",
        ]
    assert broker.redrive("dead", to="here") == qflow.RedriveReport(moved={"here": 45}, kept={})


def test_of_a_paused_queue_nothing_is_looked_at_which_is_told(open_spool: Open) -> None:
    broker = open_spool()
    dead = broker.declare_queue("dead")
    dead.put(b"1")
    dead.pause()
    assert broker.redrive("dead").kept == {"not looked at: the queue is paused": 1}
    dead.resume()


def test_dead_letters_go_back_and_the_rest_is_told(open_spool: Open) -> None:
    """How many went where, and why others stay."""
    broker = open_spool()
    queue = broker.declare_queue("q", dead_letter="dead")
    queue.put_many([b"1", b"2", b"3"])
    queue.get_many(3).nack(requeue=False)
    broker.queue("dead").put(b"none")
    assert broker.redrive("dead", limit=1) == qflow.RedriveReport(moved={"q": 1}, kept={})
    assert broker.redrive("dead") == qflow.RedriveReport(
        moved={"q": 2}, kept={"no dead letter: nothing says where it came from": 1}
    )
    assert queue.get_many(5, timeout_s=0).bodies == [b"1", b"2", b"3"]
    assert broker.redrive("dead", to="q").moved == {"q": 1}
    with pytest.raises(qflow.InvalidArgument, match="itself"):
        broker.redrive("dead", to="dead")
    with pytest.raises(qflow.NotFound, match="gone"):
        broker.redrive("gone")
    with pytest.raises(qflow.InvalidArgument, match="limit"):
        broker.redrive("dead", limit=0)
