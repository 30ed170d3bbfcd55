"""`Broker.redrive`: dead letters go back, from Python."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import qflow

pytestmark = pytest.mark.two_drivers

Open = Callable[..., qflow.Broker]


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
