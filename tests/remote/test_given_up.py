"""What becomes of calls that are kept back, or given up."""

from __future__ import annotations

from typing import Any

import pytest

import qflow
from door_raw import until
from qflow.remote.client import link as client
from qflow.remote.client.link import Link, Request
from qflow.remote.wire.frames import Frame, FrameReader, encode_frame, preamble


class Waiting:
    """Waits for nothing."""

    def answered(self, outcome: object) -> None:
        """Forget it."""


def sent(link: Link) -> list[Frame]:
    """Return the frames that are to be sent."""
    return list(FrameReader(2**20).feed(b"".join(link.take())))


@pytest.fixture
def link() -> Link:
    """To an owner that takes one request with columns at a time."""
    made = Link("spool")
    made.take()
    made.feed(preamble())
    made.welcomed({"requests": 1, "bytes": 2**20, "frame_bytes": 2**20})
    return made


def put(**options: Any) -> Request:
    """Return a put of a message with options."""
    return Request({"op": "put", "queue": "jobs", **options}, [[b"x"]])


@pytest.mark.parametrize(("passed_s", "left_s"), [(3.0, 2.0), (9.0, 0.0)])
def test_a_timeout_begins_with_the_call(
    link: Link, monkeypatch: pytest.MonkeyPatch, passed_s: float, left_s: float
) -> None:
    """Also where the put was kept back until others were answered."""
    now = [100.0]
    monkeypatch.setattr(client, "monotonic", lambda: now[0])
    link.begin(put(timeout_s=5.0), Waiting())
    link.begin(put(timeout_s=5.0, priority=1), Waiting())
    link.begin(put(headers={"a": '"timeout_s"'}), Waiting())
    assert [frame.head["timeout_s"] for frame in sent(link)] == [5.0]
    now[0] += passed_s
    link.feed(b"".join(encode_frame(1, {"result": None})))
    (frame,) = sent(link)
    assert (frame.head["timeout_s"], frame.head["priority"], frame.columns) == (left_s, 1, [[b"x"]])
    link.feed(b"".join(encode_frame(2, {"result": None})))
    assert sent(link)[0].head == {"op": "put", "queue": "jobs", "headers": {"a": '"timeout_s"'}}


def test_a_subscription_that_nobody_was_handed_is_closed(link: Link) -> None:
    """Its answer came after the call was given up."""
    number = link.begin(Request({"op": "subscribe", "stream": "s", "filter": "#"}), Waiting())
    link.give_up(number)
    assert [frame.head["op"] for frame in sent(link)] == ["subscribe", "cancel"]
    link.feed(b"".join(encode_frame(number, {"result": {"subscription": 3, "settings": {}}})))
    assert [frame.head for frame in sent(link)] == [{"op": "subscription_close", "subscription": 3}]


def test_an_interrupted_subscribe_leaves_no_subscription(
    owner: qflow.Broker, remote: qflow.RemoteBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted when the answer is there already."""
    stream = owner.declare_stream("s", topics=["s/#"])

    def strike(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("qflow.remote.client.broker.subscription_of", strike)
        with pytest.raises(KeyboardInterrupt):
            remote.subscribe("s")
    until(lambda: not stream.stats().subscriptions)
    with remote.subscribe("s"):
        assert len(stream.stats().subscriptions) == 1
