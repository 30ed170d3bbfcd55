"""The arguments of `queue.declare`: read, checked as RabbitMQ does, and said in settings of a queue or stream of qflow.

RabbitMQ ignores arguments that it does not know, and so does this. Those it knows are refused with 406 where they have
a wrong type or value, or where queues of the type have no use for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import attrs

from qflow.amqp.errors import AmqpError
from qflow.amqp.model.tables import Table, type_name
from qflow.config import LONGEST_S, MAX_PRIORITIES, Overflow
from qflow.options import QueueOptions, Retention

CLASSIC, QUORUM, STREAM = "classic", "quorum", "stream"
QUEUE_TYPES = (CLASSIC, QUORUM, STREAM)
DROP_HEAD, REJECT, REJECT_DLX = "drop-head", "reject-publish", "reject-publish-dlx"
QUORUM_DELIVERY_LIMIT = 20
"""What a quorum queue has that is declared without `x-delivery-limit`, as in RabbitMQ 4."""
MOST_PRIORITY = 255
LONGEST_MS = 10 * 365 * 86_400 * 1000
"""Ten years, as in RabbitMQ."""
_AGE = re.compile(r"(\d{1,100})([YMDhms])")
_AGE_S = {"Y": 365 * 86_400, "M": 30 * 86_400, "D": 86_400, "h": 3600, "m": 60, "s": 1}


class _Wrong(Exception):
    """A value is refused; its text says why, as RabbitMQ does."""


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Wrong(f"{{unacceptable_type,{type_name(value)}}}")
    return value


def _count(value: Any) -> int:
    if _integer(value) < 0:
        raise _Wrong(f"{{value_negative,{value}}}")
    return int(value)


def _positive(value: Any) -> int:
    if _count(value) == 0:
        raise _Wrong(f"{{value_zero,{value}}}")
    return int(value)


def _span(value: Any) -> int:
    if _count(value) > LONGEST_MS:
        raise _Wrong(f"{{value_too_big,{value}}}")
    return int(value)


def _positive_span(value: Any) -> int:
    return _span(_positive(value))


def _priority(value: Any) -> int:
    if _count(value) > MOST_PRIORITY:
        raise _Wrong(f"{{max_value_exceeded,{value}}}")
    return int(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Wrong(f"{{unacceptable_type,{type_name(value)}}}")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Wrong(f"{{unacceptable_type,{type_name(value)}}}")
    return value


def _one_of(choices: tuple[str, ...], otherwise: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if _text(value) not in choices:
            raise _Wrong(otherwise)
        return str(value)

    return check


def _queue_type(value: Any) -> str:
    if _text(value) not in QUEUE_TYPES:
        raise _Wrong(f"unsupported queue type '{value}'")
    return str(value)


def seconds_of(age: str) -> int | None:
    """Return the seconds of a text such as "7D"; None if it is none."""
    found = _AGE.fullmatch(age)
    return None if found is None else int(found[1]) * _AGE_S[found[2]]


def _age(value: Any) -> int:
    seconds = seconds_of(_text(value))
    if seconds is None:
        raise _Wrong("invalid_max_age")
    return seconds


def _filter_size(value: Any) -> int:
    if not 16 <= _integer(value) <= 255:
        raise _Wrong("{value_out_of_range,16,255}")
    return int(value)


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "x-queue-type": _queue_type,
    "x-expires": _positive_span,
    "x-message-ttl": _span,
    "x-dead-letter-exchange": _text,
    "x-dead-letter-routing-key": _text,
    "x-dead-letter-strategy": _one_of(("at-most-once", "at-least-once"), "invalid_dlx_strategy"),
    "x-max-length": _count,
    "x-max-length-bytes": _count,
    "x-max-in-memory-length": _count,
    "x-max-in-memory-bytes": _count,
    "x-max-priority": _priority,
    "x-overflow": _one_of((DROP_HEAD, REJECT, REJECT_DLX), "invalid_overflow"),
    "x-delivery-limit": _integer,
    "x-single-active-consumer": _flag,
    "x-consumer-timeout": _positive_span,
    "x-queue-mode": _one_of(("default", "lazy"), "invalid_queue_mode"),
    "x-queue-version": _integer,
    "x-queue-master-locator": _text,
    "x-queue-leader-locator": _one_of(
        ("client-local", "balanced", "random", "least-leaders"), "invalid_queue_locator_arg"
    ),
    "x-quorum-initial-group-size": _positive,
    "x-initial-cluster-size": _positive,
    "x-max-age": _age,
    "x-stream-max-segment-size-bytes": _count,
    "x-stream-filter-size-bytes": _filter_size,
}
KNOWN = tuple(_CHECKS)
"""Names of all arguments that mean something: a queue is declared again with the same values of them, or refused."""

_OF_STREAMS = frozenset({"x-max-age", "x-stream-max-segment-size-bytes", "x-stream-filter-size-bytes"})
_OF_ALL = frozenset({"x-queue-type", "x-max-length-bytes", "x-queue-leader-locator", "x-initial-cluster-size"})
_REFUSED = {
    CLASSIC: _OF_STREAMS,
    QUORUM: _OF_STREAMS | {"x-max-priority"},
    STREAM: frozenset(_CHECKS) - _OF_STREAMS - _OF_ALL,
}
"""By type of queue, what its queues have no use for."""


@attrs.frozen(kw_only=True)
class QueueArguments:
    """What the arguments of a queue say; None: nothing.

    Messages go to the dead-letter exchange when they expire, are refused or come back too often, with their own routing
    key if `dead_letter_routing_key` is None. `expires_ms` is how long an unused queue stays.
    """

    queue_type: str = CLASSIC
    message_ttl_ms: int | None = None
    expires_ms: int | None = None
    max_length: int | None = None
    max_length_bytes: int | None = None
    overflow: str = DROP_HEAD
    dead_letter_exchange: str | None = None
    dead_letter_routing_key: str | None = None
    max_priority: int | None = None
    delivery_limit: int | None = None
    """Redeliveries that a message may have."""
    single_active_consumer: bool = False
    consumer_timeout_ms: int | None = None
    max_age_s: int | None = None

    @property
    def is_stream(self) -> bool:
        return self.queue_type == STREAM

    @property
    def priorities(self) -> int:
        """How many priorities the queue of qflow has, 1 to 10."""
        return min((self.max_priority or 0) + 1, MAX_PRIORITIES)

    def settings(self, *, dead_letter: str | None = None) -> QueueOptions[Overflow]:
        """Return the keyword arguments of `Broker.declare_queue`, but `durable`.

        A limit of 0 messages is one of 1: a queue of qflow has room for one at least.

        Args:
            dead_letter: the queue of qflow that gets what is to go to the dead-letter exchange; not used without one.
        """
        target = dead_letter if self.dead_letter_exchange is not None else None
        options: QueueOptions[Overflow] = {"on_overflow": self._on_overflow(target), "priorities": self.priorities}
        if self.max_length is not None:
            options["limit_messages"] = max(self.max_length, 1)
        if self.max_length_bytes is not None:
            options["limit_bytes"] = self.max_length_bytes
        if self.message_ttl_ms is not None:
            options["ttl_s"] = self.message_ttl_ms / 1000
        if self.delivery_limit is not None:
            options["max_deliveries"] = self.delivery_limit + 1
        if self.consumer_timeout_ms is not None:
            options["ack_timeout_s"] = self.consumer_timeout_ms / 1000
        if target is not None:
            options["dead_letter"] = target
        return options

    def _on_overflow(self, dead_letter: str | None) -> Overflow:
        if self.overflow == DROP_HEAD:
            return Overflow.DROP_OLDEST
        if self.overflow == REJECT_DLX and dead_letter is not None:
            return Overflow.DEAD_LETTER
        return Overflow.REJECT

    def retention(self) -> Retention:
        """Return what `Broker.declare_stream` is told of how much a stream keeps."""
        kept: Retention = {}
        if self.max_length_bytes:
            kept["retention_bytes"] = self.max_length_bytes
        if self.max_age_s:
            kept["retention_s"] = min(self.max_age_s, LONGEST_S)
        return kept


def parse(arguments: Table, where: str) -> QueueArguments:
    """Return what the arguments of a queue say.

    Args:
        where: the queue as texts name it: "queue 'q' in vhost '/'".

    Raises:
        AmqpError: 406; one of them has a wrong type or value, or is none of this type of queue.
    """
    found: dict[str, Any] = {}
    for name, check in _CHECKS.items():
        if name in arguments:
            try:
                found[name] = check(arguments[name])
            except _Wrong as error:
                raise AmqpError(406, f"invalid arg '{name}' for {where}: {error}") from None
    queue_type = found.get("x-queue-type", CLASSIC)
    for name in found:
        if name in _REFUSED[queue_type]:
            raise AmqpError(406, f"invalid arg '{name}' for {where} of queue type {queue_type}")
    if "x-dead-letter-routing-key" in found and "x-dead-letter-exchange" not in found:
        text = "routing_key_but_no_dlx_defined"
        raise AmqpError(406, f"invalid arg 'x-dead-letter-routing-key' for {where}: {text}")
    limit = found.get("x-delivery-limit", QUORUM_DELIVERY_LIMIT if queue_type == QUORUM else -1)
    return QueueArguments(
        queue_type=queue_type,
        message_ttl_ms=found.get("x-message-ttl"),
        expires_ms=found.get("x-expires"),
        max_length=found.get("x-max-length"),
        max_length_bytes=found.get("x-max-length-bytes"),
        overflow=found.get("x-overflow", DROP_HEAD),
        dead_letter_exchange=found.get("x-dead-letter-exchange"),
        dead_letter_routing_key=found.get("x-dead-letter-routing-key"),
        max_priority=found.get("x-max-priority"),
        delivery_limit=None if limit < 0 else limit,
        single_active_consumer=found.get("x-single-active-consumer", False),
        consumer_timeout_ms=found.get("x-consumer-timeout"),
        max_age_s=found.get("x-max-age"),
    )
