"""What messages carry besides their place in a trace, and what whoever publishes may put there."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import baggage, context, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

import qflow
import qflow.aio
import qflow.tracing
from qflow.tracing.carriers import context_of, context_with_baggage

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def provider() -> None:
    """One for the process: a second one is not taken."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(TracerProvider())


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[qflow.Broker]:
    """One that traces."""
    with qflow.open(tmp_path / "spool") as opened:
        yield qflow.tracing.instrument(opened)


@pytest.fixture
def tenant() -> Iterator[None]:
    """What is put in here says of which tenant it is."""
    token = context.attach(baggage.set_baggage("tenant", "acme"))
    yield
    context.detach(token)


def elsewhere() -> Any:
    """Return a context without baggage, as a consumer has it."""
    return context.attach(context.Context())


@pytest.mark.parametrize("connected", [False, True])
def test_baggage_is_there_where_a_message_is_processed(broker: qflow.Broker, tenant: None, connected: bool) -> None:
    """In a block and in a callback of threads; what is put there carries it on; afterwards it is gone."""
    with qflow.connect(broker.path) as remote:
        place = qflow.tracing.instrument(remote) if connected else broker
        jobs, done = place.declare_queue("jobs"), place.declare_queue("done")
        jobs.put(b"a")
        jobs.put(b"b")
        outside = elsewhere()
        with jobs.get() as delivery:
            assert baggage.get_all() == {"tenant": "acme"}
            done.put(b"a")
        assert baggage.get_all() == {}
        assert delivery.headers["baggage"] == "tenant=acme"
        assert done.get().headers["baggage"] == "tenant=acme"
        seen, called = [], threading.Event()

        def callback(one: qflow.Delivery) -> None:
            seen.append(dict(baggage.get_all()))
            called.set()

        with jobs.consume(callback):
            assert called.wait(60)
        assert seen == [{"tenant": "acme"}]
        context.detach(outside)


def test_baggage_is_there_where_a_task_processes_a_message(tmp_path: Path, tenant: None) -> None:
    """In a block, in a callback that is awaited and in a plain one; beside what was there."""

    async def main() -> None:
        async with qflow.aio.open(tmp_path / "spool") as broker:
            jobs = await qflow.tracing.instrument(broker).declare_queue("jobs")
            await jobs.put(b"a")
            context.attach(baggage.set_baggage("mine", "1", context.Context()))
            async with await jobs.get():
                assert baggage.get_all() == {"tenant": "acme", "mine": "1"}
            assert baggage.get_all() == {"mine": "1"}
            seen: asyncio.Queue[object] = asyncio.Queue()

            async def callback(_: qflow.aio.AsyncDelivery) -> None:
                await seen.put(baggage.get_baggage("tenant"))

            for each in (callback, lambda _: seen.put_nowait(baggage.get_baggage("tenant"))):
                await jobs.put(b"a", headers={"baggage": "tenant=acme"})
                async with jobs.consume(each):
                    assert await seen.get() == "acme"

    asyncio.run(main())


def test_baggage_is_read_once_a_delivery_and_only_where_it_is_wanted(broker: qflow.Broker, tenant: None) -> None:
    """Links and acks want the place in the trace, and nothing else."""
    jobs = broker.declare_queue("jobs")
    jobs.put_many([b"x"] * 10)
    read: list[object] = []
    extract = W3CBaggagePropagator.extract

    def counted(self: Any, carrier: Any, *arguments: Any, **options: Any) -> Any:
        read.extend(carrier.get("baggage", "").split())
        return extract(self, carrier, *arguments, **options)

    with patch.object(W3CBaggagePropagator, "extract", counted):
        jobs.get_many(9).ack()
        assert read == []
        with jobs.get():
            pass
        assert read == ["tenant=acme"]


BAD = {
    "large": {"baggage": "k=" + "v" * 10_000},
    "large entry": {"baggage": "k=" + "v" * 5_000},
    "many": {"baggage": ",".join(f"k{number}=v" for number in range(181))},
    "no pairs": {"baggage": "a,b,c"},
    "no text": {"baggage": "\x00\x01;;==%%"},
    "no ASCII": {"baggage": "k=ä"},
    "spaces": {"baggage": "k=" + " " * 4_000 + "\x01"},
    "blanks alone": {"baggage": " \t"},
    "blanks within": {"baggage": "k=v" + " " * 64 + ",a=b"},
    "large when it goes on": {"baggage": ",".join(f"k{number}=" + "/" * 60 for number in range(120))},
    "large entry when it goes on": {"baggage": "k=" + "/" * 2_000},
    "bad property": {"baggage": "k=v;=;"},
    "long parent": {"traceparent": PARENT + "-" + "x" * 500},
    "no states": {"traceparent": PARENT, "tracestate": "=,=,"},
    "many states": {"traceparent": PARENT, "tracestate": ",".join(f"k{number}=v" for number in range(33))},
    "long states": {"traceparent": PARENT, "tracestate": "k=" + "v" * 10_000},
}


@pytest.mark.parametrize("headers", BAD.values(), ids=BAD)
def test_headers_that_cannot_be_read_fill_no_log(
    broker: qflow.Broker, caplog: pytest.LogCaptureFixture, headers: dict[str, Any]
) -> None:
    """Whoever publishes may put anything there; what can be read counts."""
    jobs = broker.declare_queue("jobs")
    with caplog.at_level(logging.DEBUG, "opentelemetry"):
        jobs.put_many([b"x"] * 3, headers={"traceparent": PARENT} | headers)
        with jobs.get():
            assert baggage.get_all() == {}
            jobs.put(b"x")
        jobs.get_many(2).ack()
    assert [record.getMessage() for record in caplog.records if record.name.startswith("opentelemetry")] == []
    found = trace.get_current_span(context_of({"traceparent": PARENT} | headers)).get_span_context()
    assert found.is_valid is (headers.get("traceparent", PARENT) == PARENT)


@pytest.mark.parametrize(
    "text", ["a=b", "a=b,c=d", "a = b ; p , ,c=d;p=1;q", "a=", "user=%C3%A4", "a=" + "v" * 4_000, "a=x=y"]
)
def test_baggage_that_can_be_read_is_read(text: str) -> None:
    """As the propagator reads it."""
    found = context_with_baggage({"baggage": text})
    assert baggage.get_all(found) == baggage.get_all(
        W3CBaggagePropagator().extract({"baggage": text}, context.Context())
    )
    assert baggage.get_all(found)


def test_a_place_in_a_trace_is_given_whole_or_not_at_all(broker: qflow.Broker, tenant: None) -> None:
    """A caller's own has no state of the current one, nor its baggage; baggage of one's own goes with it."""
    state = TraceState([("vendor", "of this request")])
    here = SpanContext(1, 2, is_remote=True, trace_flags=TraceFlags(1), trace_state=state)
    jobs = broker.declare_queue("jobs")
    with trace.use_span(NonRecordingSpan(here)):
        jobs.put(b"x")
        jobs.put(b"x", headers={"traceparent": PARENT})
        jobs.put(b"x", headers={"tracestate": "a=b"})
        jobs.put(b"x", headers={"baggage": "a=b", "n": 1})
    found = [dict(one.headers) for one in jobs.get_many(4)]
    assert found[0].keys() == {"traceparent", "tracestate", "baggage"}
    assert found[1:3] == [{"traceparent": PARENT}, {"tracestate": "a=b"}]
    assert found[3].keys() == {"traceparent", "tracestate", "baggage", "n"}
    assert found[3]["baggage"] == "a=b"
