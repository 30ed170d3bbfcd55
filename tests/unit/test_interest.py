"""A filter at work on a stream finds what it matches, wherever a reader begins and however much it takes at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

import inside
import qflow
from qflow.storage.blocks import read_names
from qflow.storage.log.keys import scan
from qflow.storage.topics.selection import Candidates, Selection
from qflow.streams import topic_filter
from qflow.streams.history import History
from qflow.streams.interest import Interest

MESSAGES = 3000
BODY_BYTES = 2000
FILTERS = ["t/1", "t/+", "+/2", "u/#", "#", "+/+/x", "t/1/+", "nobody/+"]
TOPICS = [f"{first}/{second}{third}" for first in "tuv" for second in range(5) for third in ("", "/x", "/y")]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[qflow.Broker]:
    with qflow.open(tmp_path / "spool") as broker:
        yield broker


@pytest.fixture
def published(broker: qflow.Broker) -> list[str]:
    """The topics of a stream of some 100 blocks, by offset; three quarters of it are indexed."""
    draw = Random(1)
    stream = broker.declare_stream("s", topics=["#"])
    topics: list[str] = []
    for number in range(40):
        few = draw.sample(TOPICS, 3)
        batch = [draw.choice(few) for _ in range(MESSAGES // 40)]
        broker.publish_many([(topic, bytes(BODY_BYTES)) for topic in batch])
        topics += batch
        if number == 30:
            with inside.paused(broker):
                while stream.index(1):
                    pass
    return topics


def replayed(broker: qflow.Broker, wanted: str, start: int, most: int) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    with closing(broker.subscribe("s", wanted, start=start, follow=False)) as subscription:
        while batch := subscription.get_many(most):
            found += zip(batch.offsets, batch.topics, strict=True)
    return found


def blocks_with(wanted: str, broker: qflow.Broker) -> int:
    """Return how many blocks hold a topic that a filter matches."""
    with broker.engine.log.read() as txn:
        values = [value for _, value in scan(txn, broker.stream("s").owner, 0, 0, MESSAGES)]
    return sum(any(topic_filter.matches(wanted, name) for name in read_names(value, where="")) for value in values)


@pytest.mark.parametrize("wanted", FILTERS)
def test_a_replay_is_what_the_filter_matches(broker: qflow.Broker, published: list[str], wanted: str) -> None:
    """From the beginning, from the middle of a block, in large batches and in small ones."""
    all_of_it = [(offset, topic) for offset, topic in enumerate(published) if topic_filter.matches(wanted, topic)]
    for start, most in ((0, 1000), (0, 7), (1, 100), (777, 33), (2000, 1), (MESSAGES - 1, 1), (MESSAGES, 1)):
        assert replayed(broker, wanted, start, most) == [one for one in all_of_it if one[0] >= start]


def test_a_seek_back_finds_what_was_passed(broker: qflow.Broker, published: list[str]) -> None:
    """What is known of the blocks ahead is not taken for what lies behind."""
    expected = [offset for offset, topic in enumerate(published) if topic_filter.matches("t/+", topic)]
    with closing(broker.subscribe("s", "t/+", start=MESSAGES // 2, follow=False)) as subscription:
        assert subscription.get_many(10).offsets == [one for one in expected if one >= MESSAGES // 2][:10]
        for start in (expected[3], 0, expected[-1]):
            subscription.seek(start)
            assert subscription.get_many(5).offsets == [one for one in expected if one >= start][:5]


def test_the_index_is_asked_once_for_the_blocks_ahead(
    broker: qflow.Broker, published: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for each batch; and a block that was passed is not read again."""
    asked: list[Candidates] = []
    ask = Selection.blocks

    def noted(self: Selection, *arguments: object) -> Candidates:
        asked.append(ask(self, *arguments))  # type: ignore[arg-type]
        return asked[-1]

    monkeypatch.setattr(Selection, "blocks", noted)
    decoded: list[int] = []
    read = History.read

    def counted(self: History, *arguments: object) -> object:
        found = read(self, *arguments)  # type: ignore[arg-type]
        decoded.append(found.decoded)
        return found

    monkeypatch.setattr(History, "read", counted)
    replayed(broker, "t/+", 0, 10)
    assert len(asked[0].blocks) > 10
    assert len(decoded) > 10
    assert [one.blocks for one in asked[1:] if one.blocks] == []
    assert sum(decoded) == blocks_with("t/+", broker)


@pytest.mark.parametrize("wanted", FILTERS)
def test_topics_are_chosen_together_as_one_by_one(wanted: str) -> None:
    """Few and many, topics of all kinds among them."""
    interest = Interest(wanted, 1, print)
    topics = [*TOPICS, "$sys/1", "/", "t/", "t//x", "é/2", "t/1\n", "a" * 1000]
    draw = Random(2)
    for count in (0, 1, 3, 4, 10, len(topics)):
        names = draw.sample(topics, count)
        expected = [topic_filter.matches(wanted, name) for name in names]
        assert interest.choose(names) == (None if all(expected) else expected)
