"""Publishing, and transactions, which are sent whole when they commit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice
from typing import Any

from qflow.aio.transaction import AsyncTransaction
from qflow.config import parse_timeout
from qflow.errors import InvalidArgument, NotFound
from qflow.remote.server import arguments
from qflow.remote.server.arguments import Columns
from qflow.remote.server.session import Session, by_name
from qflow.remote.wire.results import encode_results
from qflow.routing.results import PublishResult

STEPS_AT_ONCE = 100
"""Of a transaction, before others have their turn: 10 to 50 µs each."""


async def publish(session: Session, head: dict[str, Any], columns: Columns) -> Any:
    bodies = arguments.column(head, columns, 0)
    keys = columns[1] if len(columns) > 1 and columns[1] else [None] * len(bodies)
    named = _topics(head, columns, len(bodies))
    if not len(bodies) == len(keys) == len(named):
        raise InvalidArgument(f"{len(named)} topics and {len(keys)} keys came with {len(bodies)} bodies")
    headers = arguments.mapping(head, "headers") or None
    producer = None if head.get("producer") is None else arguments.text(head, "producer")
    messages = list(zip(named, bodies, keys, strict=True))
    results = await session.broker.publish_many(
        messages, headers=headers, producer=producer, number=head.get("number"), timeout_s=head.get("timeout_s")
    )
    return encode_results(results)


def _topics(head: dict[str, Any], columns: Columns, count: int) -> list[str]:
    """Return the topic of each message: one for all of them, or a list; in the head, or in a column."""
    if len(columns) > 2:
        try:
            return [topic.decode() for topic in arguments.column(head, columns, 2)]
        except UnicodeDecodeError as error:
            raise InvalidArgument(f"topics of operation 'publish' must be UTF-8: {error}") from error
    topics = head.get("topics")
    return [topics] * count if isinstance(topics, str) else arguments.texts(head, "topics")


async def transaction(session: Session, head: dict[str, Any], columns: Columns) -> Any:
    steps = head.get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise InvalidArgument(f"steps of a transaction must be a list of objects, got {steps!r:.100}")
    bodies = iter(arguments.column(head, columns, 0) if columns else [])
    keys = iter(arguments.column(head, columns, 1) if len(columns) > 1 else [])
    settled: list[int] = []
    async with session.broker.transaction(parse_timeout(head.get("timeout_s"))) as tx:
        for count, step in enumerate(steps):
            if count and count % STEPS_AT_ONCE == 0:
                await asyncio.sleep(0)
            named = {**step, "op": "transaction"}
            match step.get("do"):
                case "put":
                    try:
                        await _put(tx, named, bodies)
                    except NotFound as error:
                        raise session.deleted(step, error) from error
                case "publish":
                    await _publish(tx, named, bodies, keys)
                case "ack":
                    settled.append(await _ack(session, tx, named))
                case other:
                    raise InvalidArgument(f"a step of a transaction is put, publish or ack, not {other!r:.100}")
        result = await tx.commit()
    for number in settled:
        session.grants.drop(number)
    return [_told(one) for one in result]


def _taken(step: dict[str, Any], items: Iterator[bytes], count: int) -> list[bytes]:
    taken = list(islice(items, count))
    if len(taken) < count:
        raise InvalidArgument(f"a step of a transaction, {step.get('do')!r}, has less in its column than it says")
    return taken


async def _put(tx: AsyncTransaction, step: dict[str, Any], bodies: Iterator[bytes]) -> None:
    name = arguments.text(step, "queue")
    taken = _taken(step, bodies, arguments.number(step, "bodies", 1))
    options = arguments.put_options(step)
    if arguments.flag(step, "single"):
        await tx.put(name, taken[0], **options)
    else:
        await tx.put_many(name, taken, **options)


async def _publish(tx: AsyncTransaction, step: dict[str, Any], bodies: Iterator[bytes], keys: Iterator[bytes]) -> None:
    body = _taken(step, bodies, 1)[0]
    key = _taken(step, keys, 1)[0] if arguments.flag(step, "key") else None
    await tx.publish(arguments.text(step, "topic"), body, key=key, headers=arguments.mapping(step, "headers") or None)


async def _ack(session: Session, tx: AsyncTransaction, step: dict[str, Any]) -> int:
    number = arguments.number(step, "grant", 1)
    batch = session.grants.get(number).batch
    places = arguments.places(step, len(batch))
    await tx.ack_many(batch if places is None else [batch[place] for place in places])
    return number


def _told(result: Any) -> Any:
    """Return what a put, a put_many or a publish returned, as JSON has it."""
    if isinstance(result, PublishResult):
        return {"published": encode_results([result])}
    if isinstance(result, range):
        return {"range": [result.start, result.stop]}
    return {"sequence": result}


OPERATIONS = by_name(publish, transaction)
