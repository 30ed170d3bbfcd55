"""Spans and their attributes, by OpenTelemetry's semantic conventions for messaging."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import time_ns
from typing import Any

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode

from qflow import __version__
from qflow.errors import AlreadySettled
from qflow.tracing.carriers import add_baggage, context_of, context_with_baggage

MOST_LINKS = 128
"""As many messages of a batch are linked to: what the SDK keeps by default."""
_tracer = trace.get_tracer("qflow", __version__)


def _attributes(operation: str, kind: str, destination: str, **more: str | int | None) -> dict[str, str | int]:
    told = {"messaging." + name.replace("__", "."): value for name, value in more.items() if value is not None}
    return {
        "messaging.system": "qflow",
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
        "messaging.destination.name": destination,
        **told,
    }


def size_of(body: Any) -> int | None:
    """Return the length of a body; None for what is none, which the call refuses."""
    return memoryview(body).nbytes if isinstance(body, bytes | bytearray | memoryview) else None


def listed(found: Any) -> Any:
    """Return messages as a list; what is none of them, or is one alone, as it is: the call refuses it."""
    alone: tuple[type, ...] = (bytes, bytearray, memoryview, str, dict)
    return list(found) if isinstance(found, Iterable) and not isinstance(found, alone) else found


def count_of(found: Any) -> int | None:
    """Return how many messages there are; None for what is no list of them."""
    return len(found) if isinstance(found, list) else None


def links_to(deliveries: Iterable[Any]) -> list[Link]:
    """Return links to what put these messages, as far as they say so."""
    found = (trace.get_current_span(context_of(one.headers)).get_span_context() for one in deliveries)
    return [Link(context) for context in found if context.is_valid][:MOST_LINKS]


def fail(span: Span, error: BaseException) -> None:
    """Note why something failed."""
    kind = type(error)
    where = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    span.set_attribute("error.type", f"{where}{kind.__qualname__}")
    with suppress(Exception):  # of one whose text cannot be had, that is all
        span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR, str(error)))


@contextmanager
def _current(span: Span) -> Iterator[Span]:
    with trace.use_span(span, record_exception=False, set_status_on_exception=False):
        try:
            yield span
        except BaseException as error:
            fail(span, error)
            raise


def _begin_sending(operation: str, destination: str, *, of_topic: bool, **more: int | None) -> Span:
    name = operation if of_topic else f"{operation} {destination}"  # topics are too many to be in it
    attributes = _attributes(operation, "send", destination, **more)
    return _tracer.start_span(name, kind=SpanKind.PRODUCER, attributes=attributes)


@contextmanager
def sending(operation: str, destination: str, *, of_topic: bool = False, **more: int | None) -> Iterator[Span]:
    """Make a span, which the messages carry."""
    span = _begin_sending(operation, destination, of_topic=of_topic, **more)
    try:
        with _current(span):
            yield span
    finally:
        span.end()


def sending_later(operation: str, destination: str, submit: Callable[[], Any], *, of_topic: bool = False) -> Any:
    """Return the future that `submit` returns; the span ends when that is done."""
    span = _begin_sending(operation, destination, of_topic=of_topic)

    def end(done: Any) -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            fail(span, error)
        span.end()

    try:
        with _current(span):
            future = submit()
    except BaseException:
        span.end()
        raise
    future.add_done_callback(end)
    return future


def received(operation: str, source: Any, began_ns: int, deliveries: Sequence[Any]) -> None:
    """Make the span of a call that has brought messages of a queue or a subscription, which it links to; or none."""
    if not deliveries:
        return
    destination, count = deliveries[0].queue, len(deliveries)
    attributes = _attributes(
        operation,
        "receive",
        destination,
        batch__message_count=count if operation == "get_many" else None,
        message__id=str(deliveries[0].sequence) if operation == "get" else None,
        destination__subscription__name=source.name if hasattr(source, "stream") else None,
    )
    _tracer.start_span(
        f"{operation} {destination}",
        kind=SpanKind.CLIENT,
        attributes=attributes,
        links=links_to(deliveries[:MOST_LINKS]),
        start_time=began_ns,
    ).end()


def _begin_processing(delivery: Any, came_with: Context) -> Span:
    """Return a span below what put a message, if that says so."""
    parent = came_with if trace.get_current_span(came_with).get_span_context().is_valid else None
    attributes = _attributes(
        "process",
        "process",
        delivery.queue,
        message__id=str(delivery.sequence),
        message__body__size=len(delivery.body),
    )
    return _tracer.start_span(
        f"process {delivery.queue}", context=parent, kind=SpanKind.CONSUMER, attributes=attributes
    )


@contextmanager
def processing(delivery: Any) -> Iterator[Span]:
    """Make a span for what is done with a message, and have its baggage in the context."""
    came_with = context_with_baggage(delivery.headers)
    span = _begin_processing(delivery, came_with)
    token = contexts.attach(add_baggage(came_with, contexts.get_current()))
    try:
        with _current(span):
            yield span
    finally:
        contexts.detach(token)
        span.end()


def _settle_span(operation: str, began_ns: int, deliveries: Sequence[Any]) -> Span:
    """Return a span below what is current, else below what put the message; it links to that."""
    destination, parent = deliveries[0].queue, None
    if not trace.get_current_span().get_span_context().is_valid and len(deliveries) == 1:
        parent = context_of(deliveries[0].headers)
    attributes = _attributes(
        operation,
        "settle",
        destination,
        batch__message_count=len(deliveries) if len(deliveries) != 1 else None,
        message__id=str(deliveries[0].sequence) if len(deliveries) == 1 else None,
    )
    return _tracer.start_span(
        f"{operation} {destination}",
        context=parent,
        kind=SpanKind.CLIENT,
        attributes=attributes,
        links=links_to(deliveries[:MOST_LINKS]),
        start_time=began_ns,
    )


@contextmanager
def settling(operation: str, deliveries: Sequence[Any]) -> Iterator[None]:
    """Make a span of an ack or a nack; none of one that came too late, as at the end of a block that did it itself.

    Nor of an empty batch.
    """
    if not deliveries:
        yield
        return
    began_ns = time_ns()
    try:
        yield
    except AlreadySettled:
        raise
    except BaseException as error:
        span = _settle_span(operation, began_ns, deliveries)
        fail(span, error)
        span.end()
        raise
    _settle_span(operation, began_ns, deliveries).end()
