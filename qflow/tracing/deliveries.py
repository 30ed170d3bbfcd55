"""Deliveries that trace: what is done with them in `with`, acks and nacks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from qflow.aio import AsyncDelivery
from qflow.errors import AlreadySettled
from qflow.tracing import spans
from qflow.tracing.classes import become

_blocks: dict[int, tuple[Any, Any]] = {}
"""The spans of `with delivery` that are open, by the id of the delivery: the last one, and those around it.

Not by context: a framework that runs the ends of a generator in threads ends in one what it began in another.
"""


def _enter(delivery: Any) -> None:
    block: AbstractContextManager[Any] = spans.processing(delivery)
    block.__enter__()
    _blocks[id(delivery)] = block, _blocks.get(id(delivery))


def _leave(delivery: Any, kind: Any, error: Any, trace: Any) -> None:
    block, around = _blocks.pop(id(delivery))
    if around is not None:
        _blocks[id(delivery)] = around
    if error is None:
        block.__exit__(None, None, None)
        return
    try:
        block.__exit__(kind, error, trace)
    except BaseException as raised:
        if raised is not error:
            raise


def _settling_by_threads(kind: Any, deliveries_of: Callable[[Any], Sequence[Any]]) -> Mapping[str, Any]:
    def ack(self: Any, wait: bool = False) -> None:
        with spans.settling("ack", deliveries_of(self)):
            kind.ack(self, wait)

    def nack(self: Any, *arguments: Any, **options: Any) -> None:
        with spans.settling("nack", deliveries_of(self)):
            kind.nack(self, *arguments, **options)

    return {"ack": ack, "nack": nack}


def _settling_by_tasks(kind: Any, deliveries_of: Callable[[Any], Sequence[Any]]) -> Mapping[str, Any]:
    async def ack(self: Any, wait: bool = False) -> None:
        with spans.settling("ack", deliveries_of(self)):
            await kind.ack(self, wait)

    async def nack(self: Any, *arguments: Any, **options: Any) -> None:
        with spans.settling("nack", deliveries_of(self)):
            await kind.nack(self, *arguments, **options)

    return {"ack": ack, "nack": nack}


def one_of_threads(kind: Any) -> Mapping[str, Any]:
    """Return methods of a delivery."""

    def enter(self: Any) -> Any:
        kind.__enter__(self)
        try:
            _enter(self)
        except BaseException:
            kind.__exit__(self, *sys.exc_info())  # nobody else will
            raise
        return self

    def leave(self: Any, of: Any, error: Any, trace: Any) -> Any:
        try:
            _leave(self, of, error, trace)
        finally:  # an interrupt may strike where a span is exported, or what exports it may fail
            found = kind.__exit__(self, of, error, trace)
        return found

    return {**_settling_by_threads(kind, lambda one: [one]), "__enter__": enter, "__exit__": leave}


def one_of_tasks(kind: Any) -> Mapping[str, Any]:
    """Return methods of a delivery to a task."""

    async def enter(self: Any) -> Any:
        await kind.__aenter__(self)
        try:
            _enter(self)
        except BaseException:
            await kind.__aexit__(self, *sys.exc_info())
            raise
        return self

    async def leave(self: Any, of: Any, error: Any, trace: Any) -> Any:
        found = None
        try:
            _leave(self, of, error, trace)
        finally:
            if error is not None:
                found = await kind.__aexit__(self, of, error, trace)
            else:
                with suppress(AlreadySettled):  # the block settled it itself; the class would ack it, and make no span
                    await self.ack()
        return found

    return {**_settling_by_tasks(kind, lambda one: [one]), "__aenter__": enter, "__aexit__": leave}


def delivery(one: Any) -> Any:
    """Have a delivery trace; return it."""
    return become(one, one_of_tasks if isinstance(one, AsyncDelivery) else one_of_threads)


def _items(kind: Any) -> Mapping[str, Any]:
    def item(self: Any, index: Any) -> Any:
        found = kind.__getitem__(self, index)
        return [delivery(one) for one in found] if isinstance(index, slice) else delivery(found)

    def iterate(self: Any) -> Iterator[Any]:
        return map(delivery, kind.__iter__(self))

    return {"__getitem__": item, "__iter__": iterate}


def _itself(batch: Any) -> Any:
    return batch


def batch_of_threads(kind: Any) -> Mapping[str, Any]:
    """Return methods of a batch."""
    return {**_settling_by_threads(kind, _itself), **_items(kind)}


def batch_of_tasks(kind: Any) -> Mapping[str, Any]:
    """Return methods of a batch for a task."""
    return {**_settling_by_tasks(kind, _itself), **_items(kind)}
