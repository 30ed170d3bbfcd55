"""Errors of a broker that traces: those of one that does not, in class and words, whatever it is given."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

import qflow
import qflow.aio
import qflow.tracing

Call = Callable[[Any, Any], Any]


def failing() -> Iterator[bytes]:
    """Yield nothing, and fail."""
    yield from ()
    raise LookupError("no more")


async def awaited(_: object) -> None: ...


def generator(_: object) -> Iterator[None]:
    yield


def calls(name: str, call: Callable[[Any, Any, Any], Any], *values: Any) -> dict[str, Call]:
    """Return calls with each of some values."""
    return {
        f"{name} {value!r}": partial(lambda broker, queue, value: call(broker, queue, value), value=value)
        for value in values
    }


HEADERS = ([("a", "b")], "ab", 7, {"a": object()}, {7: "a"}, {"traceparent": object()})
BODIES = (None, "text", 7, [b"x"], memoryview(b"xxxx").cast("B", (2, 2)), memoryview(b"x").cast("B", ()))
MANY = (None, 7, b"abc", "abc", {"a": 1}, [None], [b"x", "y"], bytearray(b"a"), memoryview(b"a"), failing)
MESSAGES = (None, 7, b"ab", "ab", [7], [("a",)], [([], b"x")], [("a", None)], {"a": b"x"}, [("#", b"x")], failing)
TOPICS = (None, 7, "", "a/#", ["a"])


def now(value: Any) -> Any:
    """Return what is to be iterated over, anew each time."""
    return value() if value is failing else value


CALLS: dict[str, Call] = {
    **calls("put headers", lambda broker, queue, value: queue.put(b"x", headers=value), *HEADERS),
    **calls("put_many headers", lambda broker, queue, value: queue.put_many([b"x"], headers=value), *HEADERS),
    **calls("submit headers", lambda broker, queue, value: queue.submit(b"x", headers=value), *HEADERS),
    **calls("publish headers", lambda broker, queue, value: broker.publish("a", b"x", headers=value), *HEADERS),
    **calls("many headers", lambda broker, queue, value: broker.publish_many([("a", b"x")], headers=value), *HEADERS),
    **calls("later headers", lambda broker, queue, value: broker.submit_publish("a", b"x", headers=value), *HEADERS),
    **calls("put", lambda broker, queue, value: queue.put(value), *BODIES),
    **calls("submit", lambda broker, queue, value: queue.submit(value), *BODIES),
    **calls("publish body", lambda broker, queue, value: broker.publish("a", value), *BODIES),
    **calls("put_many", lambda broker, queue, value: queue.put_many(now(value)), *MANY),
    **calls("publish_many", lambda broker, queue, value: broker.publish_many(now(value)), *MESSAGES),
    **calls("publish", lambda broker, queue, value: broker.publish(value, b"x"), *TOPICS),
    **calls("submit_publish", lambda broker, queue, value: broker.submit_publish(value, b"x"), *TOPICS),
    **calls("put ttl", lambda broker, queue, value: queue.put(b"x", ttl_s=value), -1, "soon"),
    **calls("put_many priority", lambda broker, queue, value: queue.put_many([b"x"], priority=value), 99, "high"),
    **calls("get", lambda broker, queue, value: queue.get(timeout_s=value), "soon", -1),
    **calls("get_many", lambda broker, queue, value: queue.get_many(value, timeout_s=0), 0, "all"),
    **calls("consume", lambda broker, queue, value: queue.consume(value), None, 7, generator),
    **calls("consume prefetch", lambda broker, queue, value: queue.consume(print, prefetch=value), 0, "many"),
    **calls("declare_queue", lambda broker, queue, value: broker.declare_queue(value), "", None),
    **calls("declare_queues", lambda broker, queue, value: broker.declare_queues(value), None, 7),
    **calls("alter_queue", lambda broker, queue, value: broker.alter_queue(value, limit_messages=1), "none", None),
    **calls("queue", lambda broker, queue, value: broker.queue(value), "none", None),
    **calls("subscribe", lambda broker, queue, value: broker.subscribe(value), "none", None),
    **calls("transaction", lambda broker, queue, value: broker.transaction(value), "long"),
}
OF_THREADS: dict[str, Call] = {
    **CALLS,
    **calls("consume", lambda broker, queue, value: queue.consume(value), awaited),
    **calls("tx put", lambda broker, queue, value: broker.transaction().put(queue, b"x", headers=value), *HEADERS),
    **calls("tx put_many", lambda broker, queue, value: broker.transaction().put_many(queue, now(value)), *MANY),
    **calls(
        "tx publish", lambda broker, queue, value: broker.transaction().publish("a", b"x", headers=value), *HEADERS
    ),
}


@pytest.fixture(autouse=True)
def provider() -> Iterator[None]:
    """One for the process; there is a span to be carried."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(TracerProvider())
    with trace.get_tracer("test").start_as_current_span("here"):
        yield


def told(error: Exception) -> tuple[type, str]:
    """Return what is to be the same."""
    return type(error), re.sub(r" at 0x[0-9a-f]+", "", str(error))


def of_threads(broker: Any, queue: Any) -> dict[str, Any]:
    """Return what each call raises."""
    found: dict[str, Any] = {}
    for name, call in OF_THREADS.items():
        try:
            given = call(broker, queue)
            found[name] = None
            if isinstance(given, Future):
                given.result(60)
        except Exception as error:
            found[name] = told(error)
    return found


async def of_tasks(broker: Any, queue: Any) -> dict[str, Any]:
    """Return what each call raises."""
    found: dict[str, Any] = {}
    for name, call in CALLS.items():
        try:
            given = call(broker, queue)
            found[name] = None
            if inspect.isawaitable(given):
                await given
        except Exception as error:
            found[name] = told(error)
    return found


def check(found: list[dict[str, Any]]) -> None:
    """See that tracing makes no difference."""
    assert {name: one for name, one in found[1].items() if one != found[0][name]} == {}
    assert sum(one is not None for one in found[0].values()) > 70


@pytest.mark.parametrize("connected", [False, True])
def test_of_threads(tmp_path: Path, connected: bool) -> None:
    """In the owner and through the door."""
    found = []
    with qflow.open(tmp_path / "spool") as owner:
        for is_traced in (False, True):
            with qflow.connect(tmp_path / "spool") if connected else nullcontext(owner) as broker:
                if is_traced:
                    qflow.tracing.instrument(broker)
                found.append(of_threads(broker, broker.declare_queue("jobs")))
    check(found)


@pytest.mark.parametrize("connected", [False, True])
def test_of_tasks(tmp_path: Path, connected: bool) -> None:
    """In the owner and through the door."""

    async def main() -> None:
        found = []
        async with qflow.aio.open(tmp_path / "spool") as owner:
            for is_traced in (False, True):
                async with qflow.aio.connect(tmp_path / "spool") if connected else nullcontext(owner) as broker:
                    if is_traced:
                        qflow.tracing.instrument(broker)
                    found.append(await of_tasks(broker, await broker.declare_queue("jobs")))
        check(found)

    asyncio.run(main())
