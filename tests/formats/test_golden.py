"""A spool of each format that this version reads, kept as it was when its owner was killed, is opened."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

import qflow
from formats import golden_spools as golden
from qflow.inspect import check_spool, read_spool
from qflow.storage.log.keys import FORMAT, OLDEST_FORMAT

KEPT = Path(__file__).parent / "golden"


@pytest.fixture(params=range(OLDEST_FORMAT, FORMAT + 1))
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of one: a format without a spool here fails."""
    with tarfile.open(KEPT / f"format-{request.param}.tar.xz") as tar:
        tar.extractall(tmp_path / "spool", filter="data")
    return tmp_path / "spool"


def published(broker: qflow.Broker) -> list[tuple[str, bytes]]:
    """All that its stream holds."""
    with broker.subscribe("plant", start="earliest", follow=False) as reader:
        return [(message.topic, message.body) for message in reader]


def test_a_spool_of_each_format_holds_what_was_confirmed(kept: Path) -> None:
    """Bodies, order, headers, priorities, delays, what was acked out of order, and where a subscription was."""
    assert check_spool(kept) == []
    with qflow.open(kept) as broker:
        assert not broker.recovery.clean
        assert broker.recovery.problems == ()
        for name, bodies in golden.FOUND.items():
            assert [broker.queue(name).get(timeout_s=60).body for _ in bodies] == bodies
            assert broker.queue(name).stats().lag_messages == 0
        assert broker.queue("big").get_nowait().body == golden.BIG
        if "large" in broker.queues():
            assert broker.queue("large").get_nowait().body == golden.LARGE
        assert "transient" not in broker.queues()
        assert broker.queue("plain").settings.limit_messages == 100
        assert (broker.queue("lanes").settings.priorities, broker.queue("lanes").settings.dead_letter) == (3, "letters")
        assert published(broker) == golden.PUBLISHED
        with broker.subscribe("plant", name="panel") as panel:
            assert [panel.get(timeout_s=60).body for _ in golden.PUBLISHED[golden.SETTLED :]] == [
                body for _, body in golden.PUBLISHED[golden.SETTLED :]
            ]


def test_headers_of_each_format_are_told(kept: Path) -> None:
    """With their types."""
    with qflow.open(kept) as broker, broker.queue("lanes").get() as urgent:
        assert urgent.headers == {"name": "Ä", "ratio": 0.5, "sure": True, "none": None}


def test_a_spool_of_each_format_goes_on(kept: Path) -> None:
    """It takes messages, and what is acked is gone when it is opened again, in the format of today."""
    with qflow.open(kept) as broker:
        broker.queue("plain").get_many(100).ack(wait=True)
        after = broker.queue("plain").put(b"after")
        broker.publish("plant/9", b"after")
    with qflow.open(kept) as broker:
        assert [entry.sequence for entry in broker.queue("plain").browse()] == [after]
        assert published(broker) == [*golden.PUBLISHED, ("plant/9", b"after")]
    assert {queue.name: queue.messages for queue in read_spool(kept).queues}["plain"] == 1
    assert check_spool(kept) == []
