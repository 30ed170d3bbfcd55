"""What is given to streams: refused with what to do instead, or taken as it is meant."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import qflow

pytestmark = pytest.mark.two_drivers
Open = Callable[..., qflow.Broker]


@pytest.fixture
def broker(open_at: Open) -> qflow.Broker:
    broker = open_at()
    broker.declare_stream("s", topics=["a/#", "b"])
    return broker


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda broker: broker.subscribe("s", name="n", group="g"), "do not go together"),
        (lambda broker: broker.subscribe("s", "$share/g/a/#"), "group="),
        (lambda broker: broker.subscribe("s", name="n", session_expiry_s=0), "more than 0"),
        (lambda broker: broker.subscribe("s", follow="no"), "True or False"),
        (lambda broker: broker.delete_subscription("s", None), "must be str"),
        (lambda broker: broker.delete_subscription("s", []), "must be str"),
        (lambda broker: broker.declare_stream("t", topics=None), "list of topic filters"),
        (lambda broker: broker.declare_stream("t", topics=5), "list of topic filters"),
        (lambda broker: broker.declare_stream("t", topics=[[]]), "which are str"),
        (lambda broker: broker.declare_stream("t", topics=["t"], max_message_bytes=0), "more than 0"),
        (lambda broker: broker.alter_stream("s", name="q"), "no setting 'name'"),
        (lambda broker: broker.publish("a/1", b"", key="\ud800"), "cannot be encoded"),
        (lambda broker: broker.publish_many([("a/1", b"", "\ud800")]), "cannot be encoded"),
        (lambda broker: broker.publish("a/1", b"", key=bytearray()), "1 to 65,535"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_remedy(
    broker: qflow.Broker, call: Callable[[qflow.Broker], object], says: str
) -> None:
    """An error of this library, whatever was given; nothing was done."""
    with pytest.raises(qflow.InvalidArgument, match=says):
        call(broker)
    assert broker.streams() == ["s"]
    assert broker.stream("s").stats().messages == 0


def test_topics_are_a_set(broker: qflow.Broker) -> None:
    """Neither their order nor a repetition is another setting."""
    stream = broker.declare_stream("s", topics=["b", "a/#", "b"])
    assert stream.settings.topics == ("a/#", "b")
    assert broker.alter_stream("s", topics=["b", "b"]).settings.topics == ("b",)
    with pytest.raises(qflow.SettingsConflict):
        broker.declare_stream("s", topics=["b", "a/#"])


def test_a_stream_stands_for_its_name(broker: qflow.Broker) -> None:
    """Wherever a name is taken; after its deletion it says so."""
    stream = broker.stream("s")
    assert broker.stream(stream).name == "s"
    assert broker.alter_stream(stream, retention_messages=5).name == "s"
    broker.delete_stream(stream)
    calls = (broker.stream, broker.alter_stream, broker.delete_stream, broker.subscribe)
    for call in (*calls, lambda one: list(one.query()), lambda one: one.last()):
        with pytest.raises(qflow.StreamDeleted):
            call(stream)
    for call in calls:
        with pytest.raises(qflow.NotFound):
            call("s")


def test_a_key_may_be_any_bytes(broker: qflow.Broker) -> None:
    broker.publish_many([("b", b"", key) for key in (b"k", "k", bytearray(b"k"), memoryview(b"k"))])
    broker.publish("b", b"", key=memoryview(b"k"))
    assert [message.key for message in broker.stream("s").query()] == [b"k"] * 5


def test_what_nobody_wants_takes_no_number(broker: qflow.Broker) -> None:
    """Once somebody does, it is published under the same number."""
    for _ in range(2):
        assert not broker.publish("nobody", b"x", producer="p", number=1).duplicate
    assert not broker.publish_many([("nobody", b"x")] * 2, producer="p", number=1)[1].duplicate
    assert not broker.submit_publish("nobody", b"x", producer="p", number=1).result(60).duplicate
    broker.bind(broker.declare_queue("q"), "nobody")
    assert broker.publish("nobody", b"x", producer="p", number=1).sequences == {"q": 0}
    assert broker.publish("nobody", b"x", producer="p", number=1).duplicate


@pytest.mark.owner_only(reason="it looks into the owner")
def test_a_session_opened_again_expires_as_it_was_told_before(open_at: Open) -> None:
    """Unless it is told something else."""
    broker = open_at()
    broker.declare_stream("s", topics=["t"])
    broker.subscribe("s", name="n", session_expiry_s=7).close()
    broker.subscribe("s", name="n").close()
    broker.close()
    broker = open_at()
    (facts,) = broker.engine.streams._sessions._facts.values()
    assert facts.expiry_s == 7
    broker.subscribe("s", name="n", session_expiry_s=9).close()
    assert facts.expiry_s == 9


def test_a_result_shows_what_it_says(broker: qflow.Broker) -> None:
    """What is as usual is left out."""
    broker.declare_stream("p", topics=["p"], partitions=2)
    results = [broker.publish(topic, b"", producer="p", number=1 + (topic == "p")) for topic in ("b", "b", "p")]
    assert repr(results[0]) == "PublishResult(offsets={'s': 0}, sequences={})"
    assert repr(results[1]) == "PublishResult(offsets={}, sequences={}, duplicate=True)"
    partition = results[2].partitions["p"]
    assert repr(results[2]) == f"PublishResult(offsets={{'p': 0}}, sequences={{}}, partitions={{'p': {partition}}})"
