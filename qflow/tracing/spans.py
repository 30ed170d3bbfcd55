"""Spans and their attributes, by OpenTelemetry's semantic conventions for messaging; and context in headers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import time_ns
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode

from qflow import __version__
from qflow.amqp import letters
from qflow.errors import AlreadySettled
from qflow.message import Headers
from qflow.mqtt.model.messages import USER_PROPERTIES, of_headers

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
    return len(body) if isinstance(body, bytes | bytearray | memoryview) else None


def with_context(headers: Headers | None) -> Headers | None:
    """Return headers with the context of the current span, unless they have one."""
    carried: dict[str, str] = {}
    propagate.inject(carried)
    if not carried:
        return headers
    return carried if headers is None else {**carried, **headers}


def context_of(headers: Mapping[str, Any]) -> Context:
    """Return the context that a message carries; empty if there is none."""
    return propagate.extract({name: value for name, value in _told(headers) if isinstance(value, str)}, Context())


def _told(headers: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Return the headers of a message; of one that came by AMQP or MQTT, those that its client gave."""
    if letters.PROPERTIES in headers and (message := letters.described(headers)) is not None:
        return message["properties"].get("headers", {}).items()  # type: ignore[no-any-return]
    if USER_PROPERTIES in headers:
        return of_headers("", b"", headers).properties.get("user_properties", ())
    return headers.items()


def links_to(deliveries: Iterable[Any]) -> list[Link]:
    """Return links to what put these messages, as far as they say so."""
    found = (trace.get_current_span(context_of(one.headers)).get_span_context() for one in deliveries)
    return [Link(context) for context in found if context.is_valid][:MOST_LINKS]


def fail(span: Span, error: BaseException) -> None:
    """Note why something failed."""
    kind = type(error)
    span.set_attribute("error.type", kind.__qualname__ if kind.__module__ == "builtins" else _name(kind))
    span.record_exception(error)
    span.set_status(Status(StatusCode.ERROR, str(error)))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@contextmanager
def _current(span: Span) -> Iterator[Span]:
    with trace.use_span(span, record_exception=False, set_status_on_exception=False):
        try:
            yield span
        except BaseException as error:
            fail(span, error)
            raise


def begin_sending(operation: str, destination: str, *, of_topic: bool, **more: int | None) -> Span:
    """Return a span for messages on their way in; topics are too many to be in its name."""
    name = operation if of_topic else f"{operation} {destination}"
    attributes = _attributes(operation, "send", destination, **more)
    return _tracer.start_span(name, kind=SpanKind.PRODUCER, attributes=attributes)


@contextmanager
def sending(operation: str, destination: str, *, of_topic: bool = False, **more: int | None) -> Iterator[Span]:
    """Make a span, which the messages carry."""
    span = begin_sending(operation, destination, of_topic=of_topic, **more)
    try:
        with _current(span):
            yield span
    finally:
        span.end()


def sending_later(operation: str, destination: str, submit: Callable[[], Any], *, of_topic: bool = False) -> Any:
    """Return the future that `submit` returns; the span ends when that is done."""
    span = begin_sending(operation, destination, of_topic=of_topic)
    try:
        with _current(span):
            future = submit()
    except BaseException:
        span.end()
        raise
    future.add_done_callback(lambda done: _end_with(span, done))
    return future


def _end_with(span: Span, done: Any) -> None:
    error = None if done.cancelled() else done.exception()
    if error is not None:
        fail(span, error)
    span.end()


def received(operation: str, source: Any, began_ns: int, deliveries: list[Any]) -> None:
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


def begin_processing(delivery: Any) -> tuple[Span, Context | None]:
    """Return a span below what put a message, and the context it came with; None if it came with none."""
    context = context_of(delivery.headers)
    parent = context if trace.get_current_span(context).get_span_context().is_valid else None
    attributes = _attributes(
        "process",
        "process",
        delivery.queue,
        message__id=str(delivery.sequence),
        message__body__size=len(delivery.body),
    )
    name = f"process {delivery.queue}"
    return _tracer.start_span(name, context=parent, kind=SpanKind.CONSUMER, attributes=attributes), parent


@contextmanager
def processing(delivery: Any) -> Iterator[Span]:
    """Make a span for what is done with a message."""
    span, _ = begin_processing(delivery)
    try:
        with _current(span):
            yield span
    finally:
        span.end()


def _settle_span(operation: str, began_ns: int, deliveries: list[Any]) -> Span:
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
def settling(operation: str, deliveries: list[Any]) -> Iterator[None]:
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
