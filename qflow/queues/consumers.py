"""The consumers of a queue: who takes from it and calls back. What they call is named as in `consumer.Consumed`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from qflow.events import EventKind
from qflow.memory.waiting import sheltered
from qflow.queues.claims import Claims
from qflow.queues.consumer import Consumer, Listed
from qflow.queues.gets import Gets

_logger = logging.getLogger("qflow")


class Consumers:
    """See the module."""

    def __init__(self, gets: Gets, claims: Claims) -> None:
        self._context = gets.context
        self._gets = gets
        self.name = claims.name
        self.collect = gets.collect
        self.leave_batch = claims.leave_batch
        self.give_up_batch = claims.give_up
        self.listed: dict[Listed, None] = {}

    @sheltered
    def list_consumer(self, consumer: Listed) -> None:
        """A consumer begins."""
        with self._context.lock:
            self._context.check_open()
            self.listed[consumer] = None

    def start(self, consumer: Consumer) -> None:
        """Have a consumer of this queue begin."""
        self.list_consumer(consumer)
        consumer.start()

    @sheltered
    def forget_consumer(self, consumer: Listed) -> None:
        """A consumer has ended."""
        with self._context.lock:
            self.listed.pop(consumer, None)

    @sheltered
    def wake(self) -> None:
        """Let every waiting getter look whether it is to stop."""
        with self._context.lock:
            self._gets.wake_all()

    def tell_failure(self, sequence: int | None, error: BaseException) -> None:
        """A consumer's callback has raised; or, without a sequence, the consumer could not get a message."""
        what = "to get a message, and tries again" if sequence is None else f"with message {sequence}"
        _logger.error("the consumer of queue %r failed %s", self.name, what, exc_info=error)
        self._context.tell(EventKind.CONSUMER_FAILED, f"{what}: {error!r}")

    def end_all(self) -> None:
        """Have all of them end. Under the lock."""
        for consumer in self.listed:
            consumer.end()

    def holding(self, held: Iterable[Any]) -> list[Listed]:
        """Return those that work on some of this."""
        return [consumer for consumer in self.listed if consumer.holds(held)] if held else []
