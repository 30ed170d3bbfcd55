"""What `$SYS/broker/...` tells, and to whom."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from doors.event_loop import run, until
from mqtt_loop import PUBACK, PUBLISH, PUBREC, client, serving
from qflow import CorruptionError, __version__
from qflow.mqtt.model.messages import Message
from qflow.mqtt.server import sys_topics
from qflow.mqtt.server.outbound import Counts
from qflow.mqtt.server.sys_topics import RETAINED_COUNT, ROOT, SysTopics
from qflow.streams.topic_filter import matches


class Told:
    """A hub with one subscription."""

    def __init__(self, topic_filter: str) -> None:
        tally = SimpleNamespace(bytes_received=100, bytes_sent=200, packets_received=40, other_packets_sent=30)
        self.counts = SimpleNamespace(
            sent=3, received=4, dropped=5, lost=6, sent_bytes=13, received_bytes=14, tally=tally
        )
        self.connected = 1
        self.subscriptions = 2
        self.now_s = 100.0
        self.counted = 0
        self.heard: dict[str, str] = {}
        self._filter = topic_filter

    def monotonic(self) -> float:
        return self.now_s

    def has_subscribers(self, topic: str) -> bool:
        return matches(self._filter, topic)

    def fan_out(self, message: Message) -> None:
        assert self.has_subscribers(message.topic)
        assert (message.qos, message.retain) == (0, False)
        self.heard[message.topic.removeprefix(ROOT)] = message.payload.decode()

    async def count_retained(self) -> int:
        self.counted += 1
        self.now_s += 0.5
        return 7


def test_who_subscribes_is_told_all_figures() -> None:
    """As text."""
    told = Told("$SYS/#")
    topics = SysTopics(told)
    told.now_s = 3700.2
    run(topics.tell())
    assert told.heard == {
        "version": f"qflow {__version__}",
        "uptime": "3600 seconds",
        "clients/connected": "1",
        "subscriptions/count": "2",
        "bytes/received": "100",
        "bytes/sent": "200",
        "messages/received": "40",
        "messages/sent": "33",
        "publish/bytes/received": "14",
        "publish/bytes/sent": "13",
        "publish/messages/received": "4",
        "publish/messages/sent": "3",
        "publish/messages/dropped": "5",
        "publish/messages/lost": "6",
        "retained messages/count": "7",
    }


def test_what_nobody_asks_for_is_not_told_nor_counted() -> None:
    """A filter without `$SYS` asks for none of it."""
    told = Told("#")
    run(SysTopics(told).tell())
    assert told.heard == {}
    told = Told("$SYS/broker/clients/+")
    run(SysTopics(told).tell())
    assert list(told.heard) == ["clients/connected"]
    assert told.counted == 0


def test_retained_messages_are_not_counted_all_the_time() -> None:
    """What it took last says when the next time is."""
    told = Told(f"{ROOT}{RETAINED_COUNT}")
    topics = SysTopics(told)
    for pause_s, counted in ((0.0, 1), (49.0, 1), (2.0, 2)):
        told.now_s += pause_s
        run(topics.tell())
        assert told.counted == counted
        assert told.heard == {RETAINED_COUNT: "7"}


def test_it_goes_on_until_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ten seconds, which are none here."""
    monkeypatch.setattr(sys_topics, "INTERVAL_S", 0)

    async def scenario() -> None:
        told = Told("$SYS/#")
        running = asyncio.create_task(SysTopics(told).run())
        await until(lambda: "uptime" in told.heard)
        told.heard.clear()
        await until(lambda: "uptime" in told.heard)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run(scenario())


def test_an_error_of_the_log_is_told_and_the_next_round_comes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys_topics, "INTERVAL_S", 0)
    told = Told("#")
    failing = [CorruptionError("the log is damaged")]

    async def count() -> int:
        if failing:
            raise failing.pop()
        return 7

    told.count_retained = count  # type: ignore[method-assign]
    monkeypatch.setattr(told, "has_subscribers", lambda topic: True)

    async def scenario() -> None:
        running = asyncio.create_task(SysTopics(told).run())
        await until(lambda: told.heard.get(RETAINED_COUNT) == "7" or running.done())
        assert not running.done()
        running.cancel()

    run(scenario())
    assert "the log is damaged" in caplog.text


@pytest.mark.parametrize("version", [4, 5])
def test_what_clients_send_and_get_is_counted(version: int, spool: Path) -> None:
    """To the byte, and each packet once, of whatever kind."""

    async def scenario() -> None:
        async with serving(spool) as server:
            raw = await client(server, "c", version=version)
            received, sent = CountedReader(raw.reader), CountedWriter(raw.writer)
            raw.reader, raw.writer = received, sent  # type: ignore[assignment]
            counts = server.house.hub.counts
            before = figures(counts)
            await raw.subscribe("t", qos=2)
            for qos in (0, 1, 2):
                raw.publish("t", b"12345", qos=qos, packet_id=7)
                raw.publish("nobody", b"", qos=0)
            answers = [await raw.take() for _ in range(5)]  # PUBACK and PUBREC; what was published, once each
            assert sorted(one.kind for one in answers) == [PUBLISH, PUBLISH, PUBLISH, PUBACK, PUBREC]
            await raw.nothing()
            gone = [after - now for after, now in zip(figures(counts), before, strict=True)]
            assert gone == [sent.size, received.size, 8, 7, 6, 3, 15, 15]

    run(scenario())


def figures(counts: Counts) -> list[int]:
    tally = counts.tally
    return [
        tally.bytes_received,
        tally.bytes_sent,
        tally.packets_received,
        counts.sent + tally.other_packets_sent,
        counts.received,
        counts.sent,
        counts.received_bytes,
        counts.sent_bytes,
    ]


class CountedReader:
    """A stream that knows what was read."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.size = 0
        self._reader = reader

    async def readexactly(self, size: int) -> bytes:
        self.size += size
        return await self._reader.readexactly(size)


class CountedWriter:
    """A stream that knows what was written."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.size = 0
        self.transport = writer.transport
        self._writer = writer

    def write(self, data: bytes) -> None:
        self.size += len(data)
        self._writer.write(data)

    async def wait_closed(self) -> None:
        await self._writer.wait_closed()
