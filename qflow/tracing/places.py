"""Queues, subscriptions and transactions that trace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import time_ns
from typing import Any

from qflow.callbacks import check_callback, run
from qflow.errors import AlreadySettled
from qflow.tracing import deliveries, spans
from qflow.tracing.carriers import with_context
from qflow.tracing.classes import become


def subscription_of_threads(kind: Any) -> Mapping[str, Any]:
    """Return methods of a subscription; a queue has them, too."""

    def get(self: Any, *arguments: Any, **options: Any) -> Any:
        began_ns = time_ns()
        found = deliveries.delivery(kind.get(self, *arguments, **options))
        try:
            spans.received("get", self, began_ns, [found])
        except BaseException:  # an interrupt where the span is exported: nobody else would give it back
            found.nack()
            raise
        return found

    def get_many(self: Any, *arguments: Any, **options: Any) -> Any:
        began_ns = time_ns()
        found = become(kind.get_many(self, *arguments, **options), deliveries.batch_of_threads)
        try:
            spans.received("get_many", self, began_ns, found)
        except BaseException:
            found.nack()
            raise
        return found

    return {"get": get, "get_many": get_many}


def subscription_of_tasks(kind: Any) -> Mapping[str, Any]:
    """Return methods of a subscription of tasks; a queue has them, too."""

    async def get(self: Any, *arguments: Any, **options: Any) -> Any:
        began_ns = time_ns()
        found = deliveries.delivery(await kind.get(self, *arguments, **options))
        try:
            spans.received("get", self, began_ns, [found])
        except BaseException:
            await found.nack()
            raise
        return found

    async def get_many(self: Any, *arguments: Any, **options: Any) -> Any:
        began_ns = time_ns()
        found = become(await kind.get_many(self, *arguments, **options), deliveries.batch_of_tasks)
        try:
            spans.received("get_many", self, began_ns, found)
        except BaseException:
            await found.nack()
            raise
        return found

    return {"get": get, "get_many": get_many}


def _submit(kind: Any) -> Callable[..., Any]:
    def submit(self: Any, body: Any, *, headers: Any = None, **options: Any) -> Any:
        return spans.sending_later(
            "put", self.name, lambda: kind.submit(self, body, headers=with_context(headers), **options)
        )

    return submit


def queue_of_threads(kind: Any) -> Mapping[str, Any]:
    """Return methods of a queue."""

    def put(self: Any, body: Any, *, headers: Any = None, **options: Any) -> Any:
        with spans.sending("put", self.name, message__body__size=spans.size_of(body)):
            return kind.put(self, body, headers=with_context(headers), **options)

    def put_many(self: Any, bodies: Any, *, headers: Any = None, **options: Any) -> Any:
        listed = spans.listed(bodies)
        with spans.sending("put", self.name, batch__message_count=spans.count_of(listed)):
            return kind.put_many(self, listed, headers=with_context(headers), **options)

    def consume(self: Any, callback: Callable[[Any], object], **options: Any) -> Any:
        check_callback(callback)  # what is given in its place is one in any case

        @functools.wraps(callback)
        def traced(one: Any) -> object:
            with spans.processing(deliveries.delivery(one)):
                return callback(one)

        return kind.consume(self, traced, **options)

    return {
        "put": put,
        "put_many": put_many,
        "submit": _submit(kind),
        "consume": consume,
        **subscription_of_threads(kind),
    }


def queue_of_tasks(kind: Any) -> Mapping[str, Any]:
    """Return methods of a queue of tasks."""

    async def put(self: Any, body: Any, *, headers: Any = None, **options: Any) -> Any:
        with spans.sending("put", self.name, message__body__size=spans.size_of(body)):
            return await kind.put(self, body, headers=with_context(headers), **options)

    async def put_many(self: Any, bodies: Any, *, headers: Any = None, **options: Any) -> Any:
        listed = spans.listed(bodies)
        with spans.sending("put", self.name, batch__message_count=spans.count_of(listed)):
            return await kind.put_many(self, listed, headers=with_context(headers), **options)

    def consume(self: Any, callback: Callable[[Any], Any], **options: Any) -> Any:
        check_callback(callback, awaited=True)

        @functools.wraps(callback)
        async def traced(one: Any) -> None:
            with spans.processing(deliveries.delivery(one)):
                await run(callback, one)
            with suppress(AlreadySettled):  # else whoever called this would ack it, and make no span
                await one.ack()

        return kind.consume(self, traced, **options)

    return {
        "put": put,
        "put_many": put_many,
        "submit": _submit(kind),
        "consume": consume,
        **subscription_of_tasks(kind),
    }


def transaction(kind: Any) -> Mapping[str, Any]:
    """Return methods of a transaction, of threads or of tasks: its messages carry the context that is current."""

    def carrying(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any, headers: Any = None, **options: Any) -> Any:
            return method(self, *arguments, headers=with_context(headers), **options)

        return call

    return {name: carrying(getattr(kind, name)) for name in ("put", "put_many", "publish")}
