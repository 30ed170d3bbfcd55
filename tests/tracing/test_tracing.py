"""Spans of OpenTelemetry: what is put, got, processed and settled is one trace, across threads, tasks and processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

import qflow
import qflow.aio
import qflow.tracing
from qflow.errors import InvalidArgument, NotFound

EXPORTER = InMemorySpanExporter()


@pytest.fixture(scope="module", autouse=True)
def provider() -> None:
    """One for the process: a second one is not taken."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(TracerProvider())
    trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(EXPORTER))


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """Those of one test."""
    EXPORTER.clear()
    yield EXPORTER
    EXPORTER.clear()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[qflow.Broker]:
    """One that traces."""
    with qflow.open(tmp_path / "spool") as opened:
        yield qflow.tracing.instrument(opened)


def by_name(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """Return the spans, of which no two have the same name."""
    found = {span.name: span for span in spans.get_finished_spans()}
    assert len(found) == len(spans.get_finished_spans()), [span.name for span in spans.get_finished_spans()]
    return found


def attributes(span: ReadableSpan) -> dict[str, Any]:
    """Return what a span says of messages."""
    return {name.removeprefix("messaging."): value for name, value in (span.attributes or {}).items()}


def linked(span: ReadableSpan) -> list[int]:
    """Return the spans that one links to."""
    return [link.context.span_id for link in span.links]


def check_a_message(found: dict[str, ReadableSpan]) -> None:
    """The spans of one message that was put, got, processed and acked are one trace."""
    put, get, process, ack = (found[f"{name} jobs"] for name in ("put", "get", "process", "ack"))
    assert (put.kind, get.kind) == (SpanKind.PRODUCER, SpanKind.CLIENT)
    assert (process.kind, ack.kind) == (SpanKind.CONSUMER, SpanKind.CLIENT)
    assert process.parent is not None
    assert process.parent.span_id == put.context.span_id
    assert ack.parent is not None
    assert ack.context.trace_id == process.context.trace_id == put.context.trace_id
    assert linked(get) == linked(ack) == [put.context.span_id]
    assert attributes(put) == {
        "system": "qflow",
        "operation.name": "put",
        "operation.type": "send",
        "destination.name": "jobs",
        "message.body.size": 5,
    }
    types = {name: attributes(found[f"{name} jobs"])["operation.type"] for name in ("get", "process", "ack")}
    assert types == {"get": "receive", "process": "process", "ack": "settle"}
    assert attributes(process)["message.id"] == attributes(ack)["message.id"] == attributes(get)["message.id"]


def test_a_message_is_one_trace(broker: qflow.Broker, spans: InMemorySpanExporter) -> None:
    """From the put to the ack; what is done in the block is below the span of processing."""
    jobs = broker.declare_queue("jobs")
    jobs.put(b"hello", headers={"tenant": "a"})
    with jobs.get() as delivery:
        assert delivery.headers["tenant"] == "a"
        assert str(delivery.headers["traceparent"]).startswith("00-")
        with trace.get_tracer("test").start_as_current_span("inside"):
            pass
    found = by_name(spans)
    check_a_message(found)
    inside = found["inside"]
    assert inside.parent is not None
    assert inside.parent.span_id == found["process jobs"].context.span_id
    assert not trace.get_current_span().get_span_context().is_valid, "nothing stays current"


def test_what_a_block_raises_is_an_error_of_processing(broker: qflow.Broker, spans: InMemorySpanExporter) -> None:
    """And the message goes back, by a nack."""
    jobs = broker.declare_queue("jobs")
    jobs.put(b"hello")
    with pytest.raises(LookupError), jobs.get():
        raise LookupError("no such customer")
    found = by_name(spans)
    process = found["process jobs"]
    assert not process.status.is_ok
    assert (process.attributes or {})["error.type"] == "LookupError"
    assert [event.name for event in process.events] == ["exception"]
    assert found["nack jobs"].status.is_unset
    assert jobs.get(timeout_s=0).redelivered


def test_what_a_block_settles_itself_is_settled_once(broker: qflow.Broker, spans: InMemorySpanExporter) -> None:
    """By an ack, by a nack and then an exception, or in a transaction: leaving the block settles nothing, and nothing failed."""
    jobs = broker.declare_queue("jobs")
    jobs.put_many([b"1", b"2", b"3"])
    with jobs.get() as delivery:
        delivery.ack()
    with pytest.raises(LookupError), jobs.get() as delivery:
        delivery.nack(delay_s=60)
        raise LookupError("no such customer")
    with jobs.get() as delivery, broker.transaction() as transaction:
        transaction.ack(delivery)
    settles = [span for span in spans.get_finished_spans() if attributes(span)["operation.type"] == "settle"]
    assert [span.name for span in settles] == ["ack jobs", "nack jobs"]
    assert all(span.status.is_unset for span in settles)


def test_tasks_settle_once_what_a_block_settles_itself(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    """As threads do."""

    async def main() -> None:
        async with qflow.aio.open(tmp_path / "spool") as broker:
            qflow.tracing.instrument(broker)
            jobs = await broker.declare_queue("jobs")
            await jobs.put_many([b"1", b"2"])
            async with await jobs.get() as delivery:
                await delivery.ack()
            with pytest.raises(LookupError):
                async with await jobs.get() as delivery:
                    await delivery.nack()
                    raise LookupError("no such customer")

    asyncio.run(main())
    settles = [span for span in spans.get_finished_spans() if attributes(span)["operation.type"] == "settle"]
    assert [span.name for span in settles] == ["ack jobs", "nack jobs"]
    assert all(span.status.is_unset for span in settles)


def test_a_put_that_is_refused_is_an_error(broker: qflow.Broker, spans: InMemorySpanExporter) -> None:
    """By the class of what was raised."""
    jobs = broker.declare_queue("jobs", limit_messages=1, on_overflow="reject")
    jobs.put(b"hello")
    spans.clear()
    with pytest.raises(qflow.QueueFull):
        jobs.put(b"world")
    assert (by_name(spans)["put jobs"].attributes or {})["error.type"] == "qflow.errors.QueueFull"


def test_gets_that_find_nothing_make_no_spans(broker: qflow.Broker, spans: InMemorySpanExporter) -> None:
    """Who polls would make nothing else."""
    jobs = broker.declare_queue("jobs")
    with pytest.raises(qflow.QueueEmpty):
        jobs.get_nowait()
    batch = jobs.get_many(10, timeout_s=0)
    batch.ack()
    batch.nack()
    assert spans.get_finished_spans() == ()


def test_a_callback_is_processing(broker: qflow.Broker, spans: InMemorySpanExporter) -> None:
    """A consumer's thread continues the trace of each message; the ack that follows is in it, too."""
    jobs = broker.declare_queue("jobs")
    jobs.put(b"hello")
    done = threading.Event()
    with jobs.consume(lambda delivery: done.set()):
        assert done.wait(60)
    found = by_name(spans)
    put, process, ack = (found[f"{name} jobs"] for name in ("put", "process", "ack"))
    assert process.parent is not None
    assert process.parent.span_id == put.context.span_id
    assert ack.context.trace_id == put.context.trace_id


def test_batches_link_to_each_message(broker: qflow.Broker, spans: InMemorySpanExporter) -> None:
    """One span for a call; what puts them in one call has one span, too."""
    jobs = broker.declare_queue("jobs")
    jobs.put(b"1")
    jobs.put_many([b"2", b"3"])
    first, second = (span.context.span_id for span in spans.get_finished_spans())
    batch = jobs.get_many(10)
    batch.ack()
    found = {span.name: span for span in spans.get_finished_spans()}
    get = found["get_many jobs"]
    assert linked(get) == linked(found["ack jobs"]) == [first, second, second]
    assert attributes(get)["batch.message_count"] == 3 == attributes(found["ack jobs"])["batch.message_count"]
    jobs.put(b"4")
    (one,) = jobs.get_many(1)
    spans.clear()
    with one:
        pass
    assert by_name(spans).keys() == {"process jobs", "ack jobs"}


def test_published_messages_carry_the_context_into_queues_and_streams(
    broker: qflow.Broker, spans: InMemorySpanExporter
) -> None:
    """The topic is an attribute, and not in the name."""
    jobs = broker.declare_queue("jobs")
    broker.bind(jobs, "flights/#")
    stream = broker.declare_stream("flights", topics=["flights/#"])
    with broker.subscribe(stream, name="board") as board:
        broker.publish("flights/UA/1", b"hello")
        broker.submit_publish("flights/UA/1", b"again").result()
        published = [span for span in spans.get_finished_spans() if span.name == "publish"]
        assert [attributes(span)["destination.name"] for span in published] == ["flights/UA/1"] * 2
        spans.clear()
        with board.get() as delivery:
            assert delivery.body == b"hello"
        jobs.get().ack()
    found = by_name(spans)
    process = next(span for name, span in found.items() if name.startswith("process"))
    assert process.parent is not None
    assert process.parent.span_id == published[0].context.span_id
    assert linked(found["ack jobs"]) == [published[0].context.span_id]


def test_a_transaction_passes_the_context_on(broker: qflow.Broker, spans: InMemorySpanExporter) -> None:
    """What is put while a message is processed belongs to its trace."""
    jobs, done = broker.declare_queues(["jobs", "done"])
    jobs.put(b"hello")
    delivery = jobs.get()
    with trace.get_tracer("test").start_as_current_span("outer") as outer, broker.transaction() as transaction:
        transaction.put(done, b"result")
        transaction.ack(delivery)
    assert format(outer.get_span_context().span_id, "016x") in str(done.get().headers["traceparent"])


def test_a_future_ends_its_span(broker: qflow.Broker, spans: InMemorySpanExporter) -> None:
    """Once it is confirmed."""
    broker.declare_queue("jobs").submit(b"hello").result()
    broker.close()  # whatever the future calls has run
    assert by_name(spans).keys() == {"put jobs"}


def test_a_queue_that_is_not_durable_traces_after_its_first_use(
    broker: qflow.Broker, spans: InMemorySpanExporter
) -> None:
    """Which gives it its parts, and a class."""
    queue = broker.declare_queue("jobs", durable=False)
    for _ in range(2):
        queue.put(b"x")
    assert [span.name for span in spans.get_finished_spans()] == ["put jobs"] * 2


def test_the_context_that_a_caller_gives_stays(broker: qflow.Broker, spans: InMemorySpanExporter) -> None:
    """As where a message is passed on with its headers."""
    given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    jobs = broker.declare_queue("jobs")
    jobs.put(b"hello", headers={"traceparent": given})
    with jobs.get() as delivery:
        assert delivery.headers["traceparent"] == given
    assert by_name(spans)["process jobs"].context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C


def test_through_the_door_it_is_the_same(broker: qflow.Broker, spans: InMemorySpanExporter) -> None:
    """Only who asks for it traces: the owner, who traces too, makes no spans of what others do."""
    with qflow.connect(broker.path) as remote:
        qflow.tracing.instrument(remote)
        jobs = remote.declare_queue("jobs")
        jobs.put(b"hello")
        with jobs.get():
            pass
    check_a_message(by_name(spans))


@pytest.mark.parametrize("connected", [False, True])
def test_tasks_trace_as_threads_do(tmp_path: Path, spans: InMemorySpanExporter, connected: bool) -> None:
    """With `async with`, and by a consumer, whose ack is in the trace, too."""

    async def work(broker: Any) -> None:
        assert qflow.tracing.instrument(broker) is broker
        jobs = await broker.declare_queue("jobs")
        await jobs.put(b"hello")
        async with await jobs.get():
            pass
        check_a_message(by_name(spans))
        spans.clear()
        await jobs.put(b"hello")
        done = asyncio.Event()

        async def callback(delivery: qflow.aio.AsyncDelivery) -> None:
            done.set()

        async with jobs.consume(callback):
            await done.wait()
        found = by_name(spans)
        assert found.keys() == {"put jobs", "process jobs", "ack jobs"}
        assert len({span.context.trace_id for span in found.values()}) == 1
        spans.clear()
        await jobs.put(b"hello")
        done.clear()
        async with jobs.consume(lambda delivery: done.set()):  # a plain function, which has run
            await done.wait()
        assert by_name(spans).keys() == {"put jobs", "process jobs", "ack jobs"}
        assert (await jobs.stats()).messages == 0

    async def main() -> None:
        async with qflow.aio.open(tmp_path / "spool") as owner:
            if connected:
                async with qflow.aio.connect(tmp_path / "spool") as remote:
                    await work(remote)
            else:
                await work(owner)

    asyncio.run(main())


def check_a_subscription(found: dict[str, ReadableSpan], name: str | None) -> None:
    """One call is one span, named by the stream, whatever brings it."""
    assert found.keys() == {"publish", "get flights", "ack flights"}
    assert attributes(found["get flights"]).get("destination.subscription.name") == name
    assert attributes(found["get flights"])["destination.name"] == "flights"
    assert linked(found["get flights"]) == linked(found["ack flights"]) == [found["publish"].context.span_id]


@pytest.mark.parametrize("name", ["board", None])
@pytest.mark.parametrize("connected", [False, True])
def test_subscriptions_trace(
    broker: qflow.Broker, spans: InMemorySpanExporter, connected: bool, name: str | None
) -> None:
    """Through the door, too; what brings nothing makes no span."""
    broker.declare_stream("flights", topics=["#"])
    with qflow.connect(broker.path) as remote:
        used = qflow.tracing.instrument(remote) if connected else broker
        with used.subscribe("flights", name=name) as board:
            used.publish("flights/UA", b"x")
            board.get().ack()
            check_a_subscription(by_name(spans), name)
            spans.clear()
            used.publish("flights/UA", b"x")
            assert len(board.get_many(10)) == 1
            board.get_many(10, timeout_s=0).ack()
    assert [span.name for span in spans.get_finished_spans()] == ["publish", "get_many flights"]


@pytest.mark.parametrize("name", ["board", None])
@pytest.mark.parametrize("connected", [False, True])
def test_subscriptions_of_tasks_trace(
    tmp_path: Path, spans: InMemorySpanExporter, connected: bool, name: str | None
) -> None:
    """Opened by `async with`."""

    async def work(broker: Any) -> None:
        qflow.tracing.instrument(broker)
        async with broker.subscribe("flights", name=name) as board:
            await broker.publish("flights/UA", b"x")
            await (await board.get()).ack()
            check_a_subscription(by_name(spans), name)
            spans.clear()
            await broker.publish("flights/UA", b"x")
            assert len(await board.get_many(10)) == 1
            await (await board.get_many(10, timeout_s=0)).ack()

    async def main() -> None:
        async with qflow.aio.open(tmp_path / "spool") as owner:
            await owner.declare_stream("flights", topics=["#"])
            if not connected:
                await work(owner)
                return
            async with qflow.aio.connect(tmp_path / "spool") as remote:
                await work(remote)

    asyncio.run(main())
    assert [span.name for span in spans.get_finished_spans()] == ["publish", "get_many flights"]


def test_nobody_else_pays(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    """Another broker of the process is of the class it was of, and so are its queues and deliveries."""
    with qflow.open(tmp_path / "traced") as traced, qflow.open(tmp_path / "plain") as plain:
        qflow.tracing.instrument(qflow.tracing.instrument(traced))
        assert isinstance(traced, qflow.Broker)
        assert type(plain) is qflow.Broker
        jobs = plain.declare_queue("jobs")
        assert type(jobs) is qflow.Queue
        jobs.put(b"x")
        assert type(jobs.get()) is qflow.Delivery
        assert repr(traced.declare_queue("jobs")) == repr(jobs)
    assert spans.get_finished_spans() == ()


def test_what_is_no_broker_is_refused() -> None:
    """With a sentence."""
    with pytest.raises(InvalidArgument, match="what traces is a broker, not 'spool'"):
        qflow.tracing.instrument("spool")


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, broker: qflow.Broker) -> None:
    """That is the API; there is no package of the name that is imported."""
    monkeypatch.setattr(
        "importlib.import_module",
        lambda name: (_ for _ in ()).throw(ModuleNotFoundError("no", name="opentelemetry.trace")),
    )
    with pytest.raises(NotFound, match=r"pip install opentelemetry-api$"):
        qflow.tracing.instrument(broker)
