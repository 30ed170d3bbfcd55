"""What a publish does for subscriptions: once for each filter that matches, and a wake-up for those that wait."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

import inside
import qflow
from calls import count
from qflow.streams import part as part_module
from qflow.streams.cursor import Cursor
from qflow.streams.part import Hints
from unit.clocks import LONG_S, until

Open = Callable[..., qflow.Broker]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a commit was noted for a filter, and a cursor was woken."""
    counts: Counter[str] = Counter()
    count(monkeypatch, counts, Hints, "add", "noted")
    count(monkeypatch, counts, Cursor, "wake", "woken")
    return counts


@pytest.fixture
def broker(open_at: Open) -> Iterator[qflow.Broker]:
    broker = open_at()
    broker.declare_stream("s", topics=["#"], partitions=1)
    yield broker
    assert broker.check() == []


def live(broker: qflow.Broker, topic_filter: str) -> qflow.Subscription:
    """Return a subscription that has read everything there is."""
    subscription = broker.subscribe("s", topic_filter)
    with suppress(qflow.QueueEmpty):
        subscription.get_nowait()
    return subscription


def test_a_commit_is_noted_once_for_each_filter_that_matches(broker: qflow.Broker, counted: Counter[str]) -> None:
    """However many subscriptions have it, and whether or not they are behind; nobody is woken who does not wait."""
    same = [live(broker, "a/#") for _ in range(100)]
    others = [live(broker, f"b/{number}") for number in range(100)]
    counted.clear()
    broker.publish("a/1", b"x")
    assert counted == {"noted": 1}
    broker.publish_many([("a/1", b"y"), ("a/2", b"z"), ("b/7", b"w"), ("c", b"v")])
    assert counted == {"noted": 3}
    assert [[one.body for one in each.get_many(9, 0)] for each in same] == [[b"x", b"y", b"z"]] * 100
    assert [len(each.get_many(9, 0)) for each in others] == [int(number == 7) for number in range(100)]


def test_a_commit_wakes_who_waits_for_it_and_nobody_else(broker: qflow.Broker, counted: Counter[str]) -> None:
    """Of those with the same filter, and of those with others; who has gone is not woken any more."""
    idle = [live(broker, "a/#") for _ in range(20)]
    waiting, other = live(broker, "a/#"), live(broker, "b")
    got: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: got.append(waiting.get(LONG_S).body)),
        threading.Thread(target=lambda: got.append(other.get(LONG_S).body)),
    ]
    for thread in threads:
        thread.start()
    until(lambda: all(inside.cursor(one)._line.watching for one in (waiting, other)))
    counted.clear()
    broker.publish("a/1", b"x")
    threads[0].join(LONG_S)
    assert got == [b"x"]
    assert counted["woken"] == 1
    broker.publish("a/1", b"y")
    assert counted["woken"] == 1
    broker.publish("b", b"z")
    threads[1].join(LONG_S)
    assert got == [b"x", b"z"]
    for each in (*idle, waiting, other):
        each.close()
    assert len(broker.stream("s").readers) == 0  # type: ignore[attr-defined]
    counted.clear()
    broker.publish("a/1", b"nobody")
    assert not counted


@pytest.mark.parametrize("behind", [1, 3, 4, 5, 9, 50])
def test_who_is_far_behind_gets_everything_and_is_told_of_no_gap_there_is_not(
    broker: qflow.Broker, behind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention takes what it does not want, before and between: the first commit it wants is known all the same."""
    monkeypatch.setattr(part_module, "HINTS", 2)
    broker.alter_stream("s", retention_messages=1 + 2 * behind)
    late, prompt = live(broker, "a"), live(broker, "a")
    for _ in range(2):
        broker.publish("a", b"before")
        assert late.get_nowait().body == prompt.get_nowait().body == b"before"
    for number in range(2 * behind + 30):
        broker.publish("b", b"%d" % number)
    broker.publish("a", b"first")
    assert prompt.get_nowait().body == b"first"
    for number in range(behind):
        broker.publish_many([("b", b"no"), ("a", b"%d" % number)])
        assert prompt.get_nowait().body == b"%d" % number
    inside.is_due(broker)
    inside.upkeep(broker).tick()
    stream = broker.stream("s")
    until(lambda: stream.stats().first_offsets[0] > 0)
    expected = [b"first", *(b"%d" % number for number in range(behind))]
    assert [one.body for one in late.get_many(1_000, 0)] == expected
    broker.publish("a", b"last")
    assert late.get_nowait().body == prompt.get_nowait().body == b"last"
