"""The newest messages of the stream, as those get them who come back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtt_loop import client, serving, slept
from qflow.mqtt.model.messages import Message, of_headers
from qflow.mqtt.model.sessions import Subscribed
from qflow.mqtt.server import recent as recent_module
from qflow.mqtt.server.recent import Recent

OTHERS = 200
levels = st.lists(st.sampled_from(["a", "b", "", "$s", "aa"]), min_size=1, max_size=3)
topics = levels.map("/".join).filter(bool)
wild = st.lists(st.sampled_from(["a", "b", "", "+", "aa"]), max_size=2)
filters = st.one_of(topics, wild.map(lambda some: "/".join([*some, "#"])), wild.map("/".join).filter(bool))


def of_topics(names: list[str], first: int = 0) -> list[Message]:
    messages = [of_headers(name, b"", {}) for name in names]
    for offset, message in enumerate(messages, first):
        message.offset = offset
    return messages


@given(
    names=st.lists(topics, min_size=1, max_size=30),
    hole=st.integers(0, 30),
    some=st.lists(filters, max_size=3),
    behind=st.integers(0, 30),
    most=st.sampled_from([1, 4, 4096]),
    merged=st.sampled_from([0, 2, 256]),
)
def test_nothing_that_is_wanted_is_left_out(
    names: list[str], hole: int, some: list[str], behind: int, most: int, merged: int
) -> None:
    """In order, and each once, whatever was dropped before."""
    wanted = [Subscribed(one, one) for one in some]
    messages = of_topics(names[:hole]) + of_topics(names[hole:], hole + (hole > 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recent_module, "MOST_RECENT", most)
        patch.setattr(recent_module, "MOST_TOPICS", merged)
        recent = Recent()
        for message in messages:
            recent.add(message)
        there = [message for message in messages if recent.has(message.offset)]
        offset = there[min(behind, len(there) - 1)].offset
        expected = [message for message in there if message.offset >= offset]
        assert list(recent.since(offset)) == expected
        found = list(recent.since(offset, wanted))
    assert [message.offset for message in found] == sorted({message.offset for message in found})
    assert [one for one in found if any(each.matches(one.topic) for each in wanted)] == [
        one for one in expected if any(each.matches(one.topic) for each in wanted)
    ]


@pytest.mark.parametrize("topic_filter", ["mine/1", "mine/#", "mine/+"])
def test_a_session_that_comes_back_looks_at_what_it_gets(
    spool: Path, monkeypatch: pytest.MonkeyPatch, topic_filter: str
) -> None:
    """Each looked at the 4,096 newest messages: thousands that came back at once held up everybody for seconds."""
    looked = 0
    matches = Subscribed.matches

    def counted(one: Subscribed, topic: str) -> object:
        nonlocal looked
        looked += 1
        return matches(one, topic)

    async def scenario() -> None:
        nonlocal looked
        async with serving(spool) as server:
            mine = await client(server, "mine", SessionExpiryInterval=1000)
            await mine.subscribe(topic_filter, qos=1)
            await mine.cut()
            await slept(server, 1)
            sender = await client(server)
            for number in range(OTHERS):
                await sender.published(f"other/{number}")
            await sender.published("mine/1")
            monkeypatch.setattr(Subscribed, "matches", counted)
            mine = await client(server, "mine", clean=False, SessionExpiryInterval=1000)
            assert await mine.messages(1) == [b"x"]
        assert 0 < looked < OTHERS / 4

    asyncio.run(scenario())


def test_filters_without_end_that_match_nothing_are_not_compared_with_all_topics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A session may have 5,000, beside 4,096 topics: one that came back held up all clients for eighteen seconds."""
    looked = 0

    def counted(one: Subscribed, topic: str) -> object:
        nonlocal looked
        looked += 1
        return False

    recent, messages = Recent(), of_topics([f"{number}/a" for number in range(OTHERS)])
    for message in messages:
        recent.add(message)
    monkeypatch.setattr(Subscribed, "matches", counted)
    wanted = [Subscribed(f"+/{number}", f"+/{number}") for number in range(OTHERS)]
    assert list(recent.since(0, wanted)) == messages
    assert looked <= recent_module.MOST_TOPICS
