"""Time spans as users write them: seconds, texts such as "1h30m", and timedelta."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import pytest

import qflow
import qflow.aio
from qflow.cli.options import Seconds
from qflow.config import parse_span, parse_timeout
from qflow.durations import seconds_of
from qflow.mqtt.server.connecting import Terms

BAD = ["", " ", "h", "7 days", "30m1h", "1h30", "1h1h", "-1s", "1,5s", "1e3", "nan", "1H", "٣s", "1s\n2s", "9" * 400]


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (90, 90),
        (0.25, 0.25),
        ("0", 0),
        ("90", 90),
        (" 1.5 ", 1.5),
        ("250ms", 0.25),
        ("1h30m", 5400),
        ("1h 30 m", 5400),
        ("7d", 604_800),
        ("1w2d3h4m5s6ms", 788_645.006),
        ("0.1s", 0.1),
        (timedelta(minutes=5), 300),
    ],
)
def test_a_duration_is_so_many_seconds(given: Any, seconds: float) -> None:
    """Numbers, texts and timedelta say the same."""
    assert seconds_of(given) == parse_span(given, "ttl_s") == parse_timeout(given) == seconds


@pytest.mark.parametrize("given", [*BAD, True, b"1s", None, [1], timedelta(seconds=-1), -1, float("nan")])
def test_what_is_no_duration_is_refused_with_a_sentence(given: Any) -> None:
    """It names the argument, what was given, and what can be."""
    with pytest.raises(qflow.InvalidArgument, match=r'(?s)ttl_s must be from 0 to .* "1h30m" .* got '):
        parse_span(given, "ttl_s")
    if given is not None:
        with pytest.raises(qflow.InvalidArgument, match=r'(?s)timeout_s must be None, or at least 0.* "1h30m" .* got '):
            parse_timeout(given)


def test_a_time_out_longer_than_a_century_is_none() -> None:
    """As it is with a number."""
    assert parse_timeout("99999w") is None
    with pytest.raises(qflow.InvalidArgument):
        parse_span("99999w", "ttl_s")


@pytest.mark.two_drivers
def test_queues_and_streams_take_texts(open_spool: Callable[..., Any]) -> None:
    """Settings, options of a put, time-outs, leases, returns and subscriptions."""
    broker = open_spool()
    jobs = broker.declare_queue("jobs", ttl_s="7d", ack_timeout_s=timedelta(minutes=1))
    assert (jobs.settings.ttl_s, jobs.settings.ack_timeout_s) == (604_800, 60)
    assert broker.alter_queue("jobs", ttl_s="1h").settings.ttl_s == 3600
    jobs.put(b"1", ttl_s="1h30m", timeout_s="5s")
    jobs.put_many([b"2"], delay_s="1d", ttl_s=timedelta(hours=1))
    delivery = jobs.get("10s")
    delivery.extend("5m")
    delivery.nack(delay_s="1w")
    assert not jobs.get_many(1, "0ms")
    jobs.on_slow_consumer("1h")
    jobs.consume(print).close("10m")
    with pytest.raises(qflow.InvalidArgument, match="delay_s must be from 0 to"):
        jobs.put(b"3", delay_s="soon")
    with pytest.raises(qflow.InvalidArgument, match="ttl_s must be from 0 to"):
        broker.declare_queue("other", ttl_s="7 days")
    stream = broker.declare_stream("plant", topics=["#"], retention_s="30d")
    assert stream.settings.retention_s == 2_592_000
    with broker.subscribe("plant", name="me", session_expiry_s="7d", ack_timeout_s="1m", start="earliest") as mine:
        broker.publish("a", b"x", timeout_s="1m")
        assert mine.get("1m").body == b"x"
    with broker.transaction("1m") as tx:
        tx.put("jobs", b"4", delay_s="5m", ttl_s="5m")
    assert len(jobs) == 3


def test_tasks_take_texts(spool: Path) -> None:
    """Beside the broker, and through its door."""

    async def use(broker: Any) -> None:
        jobs = await broker.declare_queue("jobs", ttl_s="7d", ack_timeout_s="1m")
        await jobs.put(b"1", ttl_s="1h30m", timeout_s="5s")
        delivery = await jobs.get("10s")
        await delivery.extend("5m")
        await delivery.nack(delay_s=timedelta(days=1))
        assert not await jobs.get_many(1, "0ms")
        async with broker.transaction("1m") as tx:
            await tx.put(jobs, b"4", delay_s="5m")
        await jobs.purge()

    async def main() -> None:
        async with qflow.aio.open(spool) as broker:
            await use(broker)
            async with qflow.aio.connect(spool, timeout_s="10s") as remote:
                await use(remote)

    asyncio.run(main())


def test_options_of_the_command_line_take_texts() -> None:
    """Within their bounds."""
    kind = Seconds(min=0, max=86_400)
    assert [kind.convert(text, None, None) for text in ("90", "1e3", "1h30m", "250ms")] == [90, 1000, 5400, 0.25]
    for text in ("2d", "-1", "nan", "soon", "1h30"):
        with pytest.raises(click.BadParameter):
            kind.convert(text, None, None)


def test_times_of_mqtt_are_whole_seconds() -> None:
    """A text that is no whole number is refused."""
    assert Terms(max_session_expiry_s="7d", max_keep_alive_s=60).max_session_expiry_s == 604_800
    with pytest.raises(qflow.InvalidArgument, match="max_keep_alive_s is a number of seconds"):
        Terms(max_keep_alive_s="250ms")
