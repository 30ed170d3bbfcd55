"""Messages that came by AMQP, for who needs no server; what reads them is a package that may not be installed."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from qflow.errors import NotFound
from qflow.importing import importing

if TYPE_CHECKING:
    from qflow.message import HeaderValue, Record
    from qflow.queues.redrive import Revive

PROPERTIES = "amqp.properties"
DESCRIBED = frozenset(["amqp.exchange", "amqp.routing_key", PROPERTIES])
"""Headers of which `described` has what is in them."""


def described(headers: Mapping[str, HeaderValue]) -> dict[str, Any] | None:
    """Return exchange, routing key and properties of a message; None if it is none of AMQP, or nothing reads those."""
    reading = _reading()
    return None if isinstance(reading, ImportError) else reading.described(headers)


def headers_of(headers: Mapping[str, HeaderValue]) -> Mapping[str, Any]:
    """Return the headers of a message, and those that its client gave it by AMQP, which lie in its properties."""
    by_amqp = described(headers) if PROPERTIES in headers else None
    return headers if by_amqp is None else {**by_amqp["properties"].get("headers", {}), **headers}


def legible(headers: Mapping[str, HeaderValue]) -> Mapping[str, Any]:
    """Return the headers of a message for who reads them: those of AMQP in place of the properties they lie in."""
    there = headers_of(headers)
    return there if there is headers else {name: there[name] for name in there if name != PROPERTIES}


def reviving(queue_name: str, to: str | None) -> Revive:
    """Return what tells where a dead letter of a queue came from, also one of AMQP; see `Redrive`.

    Where nothing reads those, it raises `NotFound` for one, unless all go `to` a queue.
    """
    from qflow.queues.dead_letters import headers_of, revived

    reading = _reading()
    if isinstance(reading, ModuleType):
        return reading.reviving(queue_name)  # type: ignore[no-any-return]

    def revive(record: Record) -> tuple[str | None, Record]:
        name, alive = revived(record)
        if name is None and to is None and PROPERTIES in headers_of(record):
            raise NotFound(
                f"queue {queue_name!r} has dead letters of AMQP; where they came from is read by the package pamqp, "
                "which is not installed: pip install pamqp, or name a queue by --to"
            ) from reading
        return name, alive

    return revive


def _reading() -> Any:
    """Return `qflow.amqp.reading`, or why it cannot be imported."""
    try:
        with importing:
            from qflow.amqp import reading
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "pamqp":
            raise
        return error
    return reading
