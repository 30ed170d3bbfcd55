"""Brokers that trace: what they give traces, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from qflow.aio import AsyncBroker
from qflow.aio.opening import Opening
from qflow.broker import Broker
from qflow.errors import InvalidArgument
from qflow.queues.making import give_parts
from qflow.queues.queue import Queue
from qflow.remote.client.broker import RemoteBroker
from qflow.remote.client.task_broker import AsyncRemoteBroker
from qflow.tracing import places, spans
from qflow.tracing.carriers import with_context
from qflow.tracing.classes import become


def instrument(broker: Any) -> None:
    """Have a broker trace. Raises `InvalidArgument` if it is none."""
    match broker:
        case Broker() | RemoteBroker():
            become(broker, _of_threads)
        case AsyncBroker() | AsyncRemoteBroker():
            become(broker, _of_tasks)
        case _:
            raise InvalidArgument(f"what traces is a broker, not {broker!r}")


def _queue(one: Any) -> Any:
    if isinstance(one, Queue):
        give_parts(one)  # which gives it the class that it has from then on
    return become(one, places.queue_of_threads)


def _task_queue(one: Any) -> Any:
    return become(one, places.queue_of_tasks)


def _both(kind: Any, queue: Callable[[Any], Any]) -> Mapping[str, Any]:
    """Return methods that are the same for threads and tasks."""

    def existing(self: Any, name: str) -> Any:
        return queue(kind.queue(self, name))

    def submit_publish(self: Any, topic: str, body: Any, *, headers: Any = None, **options: Any) -> Any:
        def submit() -> Any:
            return kind.submit_publish(self, topic, body, headers=with_context(headers), **options)

        return spans.sending_later("publish", topic, submit, of_topic=True)

    def transaction(self: Any, *arguments: Any, **options: Any) -> Any:
        return become(kind.transaction(self, *arguments, **options), places.transaction)

    return {"queue": existing, "submit_publish": submit_publish, "transaction": transaction}


def _of_threads(kind: Any) -> Mapping[str, Any]:
    def declare_queue(self: Any, name: str, **settings: Any) -> Any:
        return _queue(kind.declare_queue(self, name, **settings))

    def declare_queues(self: Any, names: Iterable[str], **settings: Any) -> Any:
        return [_queue(one) for one in kind.declare_queues(self, names, **settings)]

    def alter_queue(self: Any, name: Any, **changes: Any) -> Any:
        return _queue(kind.alter_queue(self, name, **changes))

    def publish(self: Any, topic: str, body: Any, *, headers: Any = None, **options: Any) -> Any:
        with spans.sending("publish", topic, of_topic=True, message__body__size=spans.size_of(body)):
            return kind.publish(self, topic, body, headers=with_context(headers), **options)

    def publish_many(self: Any, messages: Any, *, headers: Any = None, **options: Any) -> Any:
        listed = spans.listed(messages)
        with spans.sending("publish", _topic(listed), of_topic=True, batch__message_count=spans.count_of(listed)):
            return kind.publish_many(self, listed, headers=with_context(headers), **options)

    def subscribe(self: Any, *arguments: Any, **options: Any) -> Any:
        return become(kind.subscribe(self, *arguments, **options), places.subscription_of_threads)

    own = (declare_queue, declare_queues, alter_queue, publish, publish_many, subscribe)
    return {**_both(kind, _queue), **{one.__name__: one for one in own}}


def _of_tasks(kind: Any) -> Mapping[str, Any]:
    async def declare_queue(self: Any, name: str, **settings: Any) -> Any:
        return _task_queue(await kind.declare_queue(self, name, **settings))

    async def declare_queues(self: Any, names: Iterable[str], **settings: Any) -> Any:
        return [_task_queue(one) for one in await kind.declare_queues(self, names, **settings)]

    async def alter_queue(self: Any, name: Any, **changes: Any) -> Any:
        return _task_queue(await kind.alter_queue(self, name, **changes))

    async def publish(self: Any, topic: str, body: Any, *, headers: Any = None, **options: Any) -> Any:
        with spans.sending("publish", topic, of_topic=True, message__body__size=spans.size_of(body)):
            return await kind.publish(self, topic, body, headers=with_context(headers), **options)

    async def publish_many(self: Any, messages: Any, *, headers: Any = None, **options: Any) -> Any:
        listed = spans.listed(messages)
        with spans.sending("publish", _topic(listed), of_topic=True, batch__message_count=spans.count_of(listed)):
            return await kind.publish_many(self, listed, headers=with_context(headers), **options)

    def subscribe(self: Any, *arguments: Any, **options: Any) -> Any:
        opening = kind.subscribe(self, *arguments, **options)

        async def opened() -> Any:
            return become(await opening, places.subscription_of_tasks)

        return Opening(opened)

    own = (declare_queue, declare_queues, alter_queue, publish, publish_many, subscribe)
    return {**_both(kind, _task_queue), **{one.__name__: one for one in own}}


def _topic(messages: Any) -> str:
    """Return the topic of all messages; nothing if there are several, or they are of a wrong shape."""
    try:
        topics = {message[0] for message in messages}
    except (TypeError, LookupError):
        return ""
    return str(topics.pop()) if len(topics) == 1 else ""
