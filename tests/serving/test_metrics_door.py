"""`qflow serve --metrics`: what a server counts, for Prometheus."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

import mqtt_served
import qflow
import qflow.aio
from qflow.metrics import door


def test_a_server_answers_prometheus(tmp_path: Path) -> None:
    """In OpenMetrics where that is asked for, of the queues it has now, and of the process."""
    with mqtt_served.serving(tmp_path, "--metrics", "127.0.0.1:0") as (_, ports):
        with qflow.connect(tmp_path / "spool") as broker:
            broker.declare_queue("jobs").put(b"x")
        asked = urllib.request.Request(
            f"http://127.0.0.1:{ports['metrics'][0]}/metrics",
            headers={"Accept": "application/openmetrics-text;version=1.0.0"},
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            text, kind = answer.read().decode(), answer.headers["Content-Type"]
    assert kind.startswith("application/openmetrics-text")
    assert 'qflow_queue_messages{queue="jobs"} 1.0' in text
    assert "process_resident_memory_bytes" in text


@asynccontextmanager
async def opened(spool: Path) -> AsyncIterator[door.MetricsDoor]:
    """The door of a broker in this process."""
    async with qflow.aio.open(spool) as broker:
        found = await door.open_door(broker, host="127.0.0.1", port=0, ssl=None, users=None)
        try:
            yield found
        finally:
            await found.close()


def half_asked(at: door.MetricsDoor) -> socket.socket:
    """Return a connection whose request does not come to its end."""
    connection = socket.create_connection(at.sockets[0].getsockname(), timeout=60)
    connection.sendall(b"GET /metrics HTTP/1.1\r\nX")
    return connection


def answered(at: door.MetricsDoor) -> bytes:
    """Ask until there is an answer."""
    while True:
        with half_asked(at) as connection:
            try:
                connection.sendall(b": y\r\n\r\n")
                if line := connection.recv(12):
                    return line
            except ConnectionError:
                continue


def test_connections_are_bounded_and_one_more_is_closed(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a thread in the process that owns the spool; a place that is free again is given."""
    monkeypatch.setattr(door, "MOST_CONNECTIONS", 3)

    async def test() -> None:
        async with opened(spool) as at:
            held = [half_asked(at) for _ in range(3)]
            for _ in range(5):
                with half_asked(at) as more:
                    assert await asyncio.to_thread(ended, more)
            held.pop().close()
            assert await asyncio.to_thread(answered, at) == b"HTTP/1.0 200"
            for one in held:
                one.close()

    asyncio.run(test())


def test_a_connection_that_takes_too_long_is_closed(
    spool: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whether it asks slowly or does not read the answer, and nothing is written of it; so are all at the end."""
    monkeypatch.setattr(door, "LONGEST_S", 0.0)

    async def test() -> None:
        async with opened(spool) as at:
            with half_asked(at) as slow:
                assert await asyncio.to_thread(ended, slow)
            monkeypatch.setattr(door, "LONGEST_S", 1e9)
            assert await asyncio.to_thread(answered, at) == b"HTTP/1.0 200"
            last = half_asked(at)
            assert await asyncio.to_thread(answered, at) == b"HTTP/1.0 200"  # so the last one was accepted
        assert ended(last)
        last.close()

    asyncio.run(test())
    assert capfd.readouterr().err == ""


def ended(connection: socket.socket) -> bool:
    """Wait until a connection was closed from there."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True
