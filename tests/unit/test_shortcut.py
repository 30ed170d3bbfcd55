"""Many topics at once lead where each of them leads alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

import qflow
from qflow.errors import InvalidArgument
from qflow.streams import shortcut

LEVELS = ["a", "b", "", "$x", "é", "amqp-stream"]
WILDCARDS = ["+", "#", "a", "b", "$x", "é", "amqp-stream"]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[qflow.Broker]:
    with qflow.open(tmp_path / "spool") as broker:
        yield broker


def some_topic(draw: Random) -> str:
    return "/".join(draw.choices(LEVELS, k=draw.randint(1, 3))) or "a"


def some_filter(draw: Random) -> str:
    levels = draw.choices(WILDCARDS, k=draw.randint(1, 3))
    if "#" in levels:
        levels = levels[: levels.index("#") + 1]
    return "/".join(levels)


def place_by_each(broker: qflow.Broker, topics: list[str]) -> object:
    """Ask for one topic after the other."""
    places = set()
    for topic in topics:
        route = broker.engine.routing.route(topic)
        alone = not route.queues and len(route.streams) == 1 and len(route.streams[0].partitions) == 1
        places.add(route.streams[0].partitions[0] if alone else None)
    return places.pop() if len(places) == 1 else None


@pytest.mark.parametrize("seed", range(5))
def test_a_shortcut_leads_where_each_topic_does(broker: qflow.Broker, seed: int) -> None:
    """Whatever filters there are, and however they change; a shortcut may not know, but is never wrong."""
    draw = Random(seed)
    streams = [broker.declare_stream(f"s{number}", topics=["never"], partitions=1 + number // 2) for number in range(3)]
    queue = broker.declare_queue("q", durable=False)
    told = 0
    for _ in range(150):
        change = draw.randrange(4)
        if change == 0:
            broker.bind(queue, some_filter(draw))
        elif change == 1 and (bound := broker.engine.routing.filters_of(queue)):
            broker.unbind(queue, draw.choice(bound))
        else:
            filters = {some_filter(draw) for _ in range(draw.randint(1, 2))}
            broker.alter_stream(draw.choice(streams).name, topics=sorted(filters))
        for _ in range(10):
            topics = [some_topic(draw) for _ in range(draw.randint(1, 5))]
            expected = place_by_each(broker, topics)
            found = broker.engine.routing.shortcut.partition_for(topics)
            assert found is expected or found is None
            told += found is not None
            if len(broker.engine.routing._trie) + len(broker.engine.routing.streams) <= shortcut.MOST_FILTERS:
                assert found is expected
    assert told > 20


@pytest.mark.parametrize("wrong", ["", "a/+", "#", "a\0b", "\ud800", 5, None, b"a", [], "a" * 65_536])
def test_one_wrong_topic_is_told_and_nothing_is_stored(broker: qflow.Broker, wrong: object) -> None:
    """Among topics seen before, and among new ones."""
    stream = broker.declare_stream("s", topics=["#"])
    broker.publish_many([("a", b"1"), ("b", b"2")])
    for others in (["a", "b"], ["c", "d"]):
        with pytest.raises(InvalidArgument):
            broker.publish_many([(topic, b"") for topic in [*others, wrong]])
    assert stream.stats().messages == 2


def test_more_topics_than_are_kept_are_forgotten(broker: qflow.Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded, and a batch that is larger is asked for each time."""
    monkeypatch.setattr(shortcut, "KEPT", 10)
    stream = broker.declare_stream("s", topics=["#"])
    for first in range(0, 40, 4):
        assert len(broker.publish_many([(f"t/{first + number}", b"") for number in range(4)])) == 4
        assert len(broker.engine.routing.shortcut._known) <= 10
    broker.publish_many([(f"t/{number}", b"") for number in range(20)])
    assert len(broker.engine.routing.shortcut._known) <= 10
    assert [message.topic for message in stream.query()][-20:] == [f"t/{number}" for number in range(20)]


def test_a_topic_that_is_very_long_is_not_kept(broker: qflow.Broker) -> None:
    """But it goes where it belongs."""
    stream = broker.declare_stream("s", topics=["#"])
    broker.publish_many([("a" * 30_000, b""), ("b", b"")])
    assert broker.engine.routing.shortcut._known == {}
    assert stream.stats().messages == 2


def test_with_many_filters_each_topic_takes_its_own_way(broker: qflow.Broker) -> None:
    """What came of it is remembered all the same."""
    stream = broker.declare_stream("s", topics=["a/#"])
    queue = broker.declare_queue("q", durable=False)
    for number in range(shortcut.MOST_FILTERS):
        broker.bind(queue, f"b/{number}")
    assert broker.engine.routing.shortcut.partition_for(["a/1", "a/2"]) is None
    broker.publish_many([("a/1", b""), ("a/2", b"")])
    assert broker.engine.routing.shortcut.partition_for(["a/1", "a/2"]) is stream.partitions[0]
    assert broker.engine.routing.shortcut.partition_for(["a/1", "b/1"]) is None
