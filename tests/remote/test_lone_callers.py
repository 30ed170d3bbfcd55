"""Connections for lone puts, whose callers keep to it or not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import qflow
from door_raw import RawDoor
from qflow.remote.server import lone as serving
from qflow.remote.wire.frames import Frame, FrameReader, encode_frame

PUT = {"op": "put", "queue": "jobs", "single": True}


@pytest.fixture
def raw(owner: qflow.Broker, spool: Path) -> Iterator[RawDoor]:
    """A connection that is served by the thread."""
    owner.declare_queue("jobs").put(b"0")
    with RawDoor(spool, timeout_s=60).greeted() as door:
        door.request({"op": "lone"}, number=7)
        frame = door.frame()
        assert frame is not None
        assert frame.head == {"result": serving.MOST_TOGETHER}
        yield door


def test_whoever_does_not_keep_to_it_is_ended_and_what_was_put_is_put(raw: RawDoor, owner: qflow.Broker) -> None:
    """The owner goes on, and closes."""
    raw.send(b"".join(b"".join(encode_frame(number, PUT, [[b"x"]])) for number in range(1, 9)))
    with suppress(ConnectionError):
        for _ in range(8):
            if raw.frame() is None:
                break
    assert 2 <= len(owner.queue("jobs")) <= 9
    with qflow.connect(owner.path) as remote:
        assert remote.queues() == ["jobs"]
    owner.close()


def test_whoever_does_not_wait_for_the_answer_takes_no_place_for_good(
    raw: RawDoor, owner: qflow.Broker, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread, which has other things to do meanwhile, ends such a connection."""
    may_go_on, feed = threading.Event(), FrameReader.feed

    def held(reader: FrameReader, read: memoryview) -> Iterator[Frame]:
        if threading.current_thread().name == "qflow-door-puts":
            assert may_go_on.wait(60)
        return feed(reader, read)

    monkeypatch.setattr(FrameReader, "feed", held)
    monkeypatch.setattr("qflow.remote.server.connection.MOST_LONE", 2)
    put = b"".join(encode_frame(1, PUT, [[b"x"]]))
    raw.send(put)
    with RawDoor(spool, timeout_s=60).greeted() as hasty, RawDoor(spool, timeout_s=60).greeted() as other:
        hasty.send(b"".join(encode_frame(1, {"op": "lone"})) + put)
        assert hasty.frame() is not None
        assert other.ask({"op": "queues"}).head == {"result": ["jobs"]}
        may_go_on.set()
        with suppress(ConnectionError):
            assert hasty.frame() is None
        assert other.ask({"op": "lone"}).head == {"result": serving.MOST_TOGETHER}
    assert raw.frame() is not None
    assert len(owner.queue("jobs")) == 2


@pytest.mark.parametrize("sent", [b"\0" * 20, b"\xff" * 100, b"".join(encode_frame(1, PUT, [[bytes(2**20)]]))])
def test_no_frame_and_too_large_ones_end_the_connection(raw: RawDoor, owner: qflow.Broker, sent: bytes) -> None:
    """Of those that are none, and of those that are larger than such a connection takes."""
    with suppress(ConnectionError):
        raw.send(sent)
    with suppress(ConnectionError):
        assert raw.frame() is None
    assert len(owner.queue("jobs")) == 1


@pytest.mark.parametrize(
    ("head", "columns"),
    [
        ({**PUT, "headers": {"a": 1}}, [[b"x"]]),
        ({**PUT, "queue": 7}, [[b"x"]]),
        ({**PUT, "queue": "none"}, [[b"x"]]),
        (PUT, [[None]]),
        (PUT, []),
        ({"op": "purge", "queue": "jobs"}, []),
    ],
)
def test_what_is_no_plain_put_is_not_done(
    raw: RawDoor, owner: qflow.Broker, head: dict[str, object], columns: list[list[bytes | None]]
) -> None:
    """And answered with null: the connection goes on."""
    raw.send(b"".join(encode_frame(3, head, columns)))
    frame = raw.frame()
    assert frame is not None
    assert (frame.number, frame.head) == (3, {"result": None})
    raw.send(b"".join(encode_frame(4, PUT, [[b"x"]])))
    frame = raw.frame()
    assert frame is not None
    assert frame.head["result"]["count"] == 1
    assert len(owner.queue("jobs")) == 2
