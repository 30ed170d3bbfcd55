"""Queues, subscriptions and transactions that trace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from inspect import iscoroutinefunction
from time import time_ns
from typing import Any

from qflow.callbacks import check_callback, run
from qflow.errors import AlreadySettled
from qflow.tracing import deliveries, spans
from qflow.tracing.carriers import with_context
from qflow.tracing.classes import become, methods_of, outcome


def subscription(kind: Any) -> Mapping[str, Any]:
    """Return methods of a subscription; a queue has them, too."""

    async def get(self: Any, *arguments: Any, **options: Any) -> Any:
        began_ns = time_ns()
        found = deliveries.delivery(await outcome(kind.get(self, *arguments, **options)))
        spans.received("get", self, began_ns, [found])
        return found

    async def get_many(self: Any, *arguments: Any, **options: Any) -> Any:
        began_ns = time_ns()
        found = become(await outcome(kind.get_many(self, *arguments, **options)), deliveries.batch)
        spans.received("get_many", self, began_ns, list(found))
        return found

    return methods_of(kind, get, get_many)


def queue(kind: Any) -> Mapping[str, Any]:
    """Return methods of a queue."""

    async def put(self: Any, body: Any, *, headers: Any = None, **options: Any) -> Any:
        with spans.sending("put", self.name, message__body__size=spans.size_of(body)):
            return await outcome(kind.put(self, body, headers=with_context(headers), **options))

    async def put_many(self: Any, bodies: Any, *, headers: Any = None, **options: Any) -> Any:
        listed = spans.listed(bodies)
        with spans.sending("put", self.name, batch__message_count=spans.count_of(listed)):
            return await outcome(kind.put_many(self, listed, headers=with_context(headers), **options))

    def submit(self: Any, body: Any, *, headers: Any = None, **options: Any) -> Any:
        return spans.sending_later(
            "put", self.name, lambda: kind.submit(self, body, headers=with_context(headers), **options)
        )

    def consume(self: Any, callback: Callable[[Any], Any], **options: Any) -> Any:
        is_of_tasks = iscoroutinefunction(kind.put)
        check_callback(callback, awaited=is_of_tasks)  # what is given in its place is one in any case
        return kind.consume(self, (_by_task if is_of_tasks else _by_thread)(callback), **options)

    return {**methods_of(kind, put, put_many), "submit": submit, "consume": consume, **subscription(kind)}


def _by_thread(callback: Callable[[Any], object]) -> Callable[[Any], object]:
    @functools.wraps(callback)
    def traced(one: Any) -> object:
        with spans.processing(deliveries.delivery(one)):
            return callback(one)

    return traced


def _by_task(callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(callback)
    async def traced(one: Any) -> None:
        with spans.processing(deliveries.delivery(one)):
            await run(callback, one)
        with suppress(AlreadySettled):  # else whoever called this would ack it, and make no span
            await one.ack()

    return traced


def transaction(kind: Any) -> Mapping[str, Any]:
    """Return methods of a transaction, of threads or of tasks: its messages carry the context that is current."""

    def carrying(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any, headers: Any = None, **options: Any) -> Any:
            return method(self, *arguments, headers=with_context(headers), **options)

        return call

    return {name: carrying(getattr(kind, name)) for name in ("put", "put_many", "publish")}
