"""What clients of AMQP and MQTT give of a trace goes on in a program that takes their messages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from pamqp import body, header
from pamqp.commands import Basic, Confirm

import amqp_loop
import mqtt_loop
import qflow.aio
from qflow.tracing.carriers import context_of
from qflow.tracing.spans import links_to

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SPAN = 0xB7AD6B7169203331


def linked(delivery: qflow.aio.AsyncDelivery) -> list[int]:
    """Return the spans that one of a message links to."""
    return [link.context.span_id for link in links_to([delivery])]


def test_of_amqp(spool: Path) -> None:
    """It is in the table `headers` of the properties."""

    async def main() -> None:
        async with amqp_loop.serving(spool) as server:
            jobs = await server.broker.declare_queue("jobs")
            client = await amqp_loop.connected(server)
            await client.ask(Confirm.Select(), Confirm.SelectOk)
            for table in ({"traceparent": GIVEN, "n": 1}, {"traceparent": 7}, None):
                properties = header.ContentHeader(0, 1, Basic.Properties(headers=table))
                client.send(Basic.Publish(0, "", "jobs"), properties, body.ContentBody(b"x"))
                await client.expect(Basic.Ack)
            assert [linked(one) for one in await jobs.get_many(3)] == [[SPAN], [], []]

    asyncio.run(main())


def test_of_mqtt(spool: Path) -> None:
    """It is a user property."""

    async def main() -> None:
        async with mqtt_loop.serving(spool) as server:
            jobs = await server.broker.declare_queue("jobs")
            await server.broker.bind(jobs, "plant/#")
            client = await mqtt_loop.client(server)
            for properties in ({"UserProperty": [("traceparent", GIVEN)]}, {}):
                await client.published("plant/1", **properties)
            assert [linked(one) for one in await jobs.get_many(2)] == [[SPAN], []]

    asyncio.run(main())


@pytest.mark.parametrize(
    "headers",
    [
        {"amqp.properties": "*", "amqp.exchange": "", "amqp.routing_key": ""},
        {"amqp.properties": 7},
        {"mqtt.user_properties": "[" * 100_000},
        {"mqtt.user_properties": '[["traceparent",{}]]'},
        {"mqtt.user_properties": None},
    ],
)
def test_headers_that_look_like_theirs_are_no_context(headers: dict[str, Any]) -> None:
    """Whatever a program has put there."""
    assert context_of(headers) == {}


FRESH = "00-11111111111111111111111111111111-2222222222222222-01"


@pytest.mark.parametrize("kind", ["amqp", "mqtt"])
def test_a_message_that_is_passed_on_with_its_headers_goes_on_from_where_it_was(spool: Path, kind: str) -> None:
    """Not from where its client put it: the headers of the client, which it keeps, have the trace of before."""

    async def main() -> None:
        async with (amqp_loop if kind == "amqp" else mqtt_loop).serving(spool) as server:
            jobs = await server.broker.declare_queue("jobs")
            await server.broker.bind(jobs, "plant/#")
            if kind == "amqp":
                client = await amqp_loop.connected(server)
                await client.ask(Confirm.Select(), Confirm.SelectOk)
                properties = header.ContentHeader(0, 1, Basic.Properties(headers={"traceparent": GIVEN}))
                client.send(Basic.Publish(0, "", "jobs"), properties, body.ContentBody(b"x"))
                await client.expect(Basic.Ack)
            else:
                await (await mqtt_loop.client(server)).published("plant/1", UserProperty=[("traceparent", GIVEN)])
            first = await jobs.get()
            assert linked(first) == [SPAN]
            await jobs.put(b"x", headers={**first.headers, "traceparent": FRESH})
            assert linked(await jobs.get()) == [0x2222222222222222]
            await jobs.put(b"x", headers={**first.headers, "baggage": "tenant=a"})
            assert linked(await jobs.get()) == [SPAN]

    asyncio.run(main())
