"""Spans of OpenTelemetry for what a program does with a broker; needs the extra `otel`.

import qflow.tracing

qflow.tracing.instrument(broker)
"""

from __future__ import annotations

from typing import TypeVar

from qflow.serving.extras import load

T = TypeVar("T")

__all__ = ["instrument"]


def instrument(broker: T) -> T:
    """Have spans made for what is done with a broker from now on, and return it: the same object.

    Puts and publishes carry their context in headers of the message (`traceparent`), gets link to it, and what is done
    in `with delivery` or by a consumer's callback is a span below it; acks and nacks are spans that link to it. Names
    and attributes are those of the semantic conventions for messaging.

    Queues, subscriptions and transactions trace that are got from the broker after this: its other users, and programs
    that do not call it, pay nothing.

    Args:
        broker: of threads or of tasks, opened or connected; twice is fine.

    Raises:
        NotFound: opentelemetry-api is not installed.
        InvalidArgument: it is no broker.
    Cost: that of the tracer: some 20 µs a span with the SDK.
    """
    instrumenting = load(
        "qflow.tracing.instrumenting", needs="opentelemetry", what="qflow.tracing", install="opentelemetry-api"
    )
    instrumenting.instrument(broker)
    return broker
