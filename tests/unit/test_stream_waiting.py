"""How many messages wait for a reader of several filters, counted by the index of topics and by the blocks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import qflow
from qflow.storage.log.transaction_log import TransactionLog
from qflow.streams.counting import FEW_FILTERS, count_waiting
from qflow.streams.stream_log import StreamLog
from qflow.streams.topic_filter import compile_filter

TOPICS = [f"{first}/{second}" for first in ("a", "b", "$c") for second in range(8)]
FILTERS = ["#", "a/#", "+/3", "b/7", "b/+", "a/1", "none", "$c/#", "+/+", "$c/2", "a/+", "b/0"]


def published(broker: qflow.Broker, dice: random.Random, commits: int) -> tuple[StreamLog, list[str]]:
    """Publish random topics, some in each commit; return the stream and the topics by offset."""
    stream = broker.declare_stream("s", topics=["#", "$c/#"])
    assert isinstance(stream, StreamLog)
    topics: list[str] = []
    for _ in range(commits):
        some = dice.choices(TOPICS, k=dice.randint(1, 40))
        broker.publish_many([(topic, bytes(2_000)) for topic in some])
        topics += some
    return stream, topics


@pytest.mark.parametrize("indexed", [True, False])
def test_messages_that_any_filter_matches_are_counted_once(spool: Path, indexed: bool) -> None:
    """Each filter from its own offset on; few filters by the index and many by the blocks, compared with a list."""
    dice = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    with qflow.open(spool) as broker:
        log = broker.engine.log
        stream, topics = published(broker, dice, 25)
        if indexed:
            while stream.index(1):
                pass
        for _ in range(40):
            wanted = dice.choices(FILTERS, k=dice.choice([0, 1, 2, 3, FEW_FILTERS + 1]))
            starts = [(one, dice.choice([0, dice.randint(0, len(topics)), len(topics)])) for one in wanted]
            matching = [(compile_filter(one), start) for one, start in starts]
            expected = sum(
                any(offset >= start and matches(topic) for matches, start in matching)
                for offset, topic in enumerate(topics)
            )
            assert count_waiting(log.read, stream.owner, starts, len(topics), 1_000) == (expected, True), starts


def test_what_is_not_looked_at_is_counted_as_a_bound(spool: Path) -> None:
    """With too few reads the answer is never less than there are, and says that it is a bound."""
    dice = random.Random(5)
    with qflow.open(spool) as broker:
        log: TransactionLog = broker.engine.log
        stream, topics = published(broker, dice, 5)
        end = len(topics)
        starts = [("a/1", 0), ("b/+", end // 2)]
        assert count_waiting(log.read, stream.owner, starts, end, 0) == (end, False)
        bound, is_exact = count_waiting(log.read, stream.owner, starts, end, 1)
        assert not is_exact
        assert bound == topics[: end // 2].count("a/1") + end - end // 2
