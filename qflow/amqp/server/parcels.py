"""Messages on their way into queues."""

from __future__ import annotations

from collections.abc import Mapping

from qflow.config import QueueSettings
from qflow.message import HeaderValue
from qflow.named_tuples import NamedTuple
from qflow.options import PutOptions

HANDED_OVER_S = 1.0
"""A message that lives no time is in its consumer's hands within this."""


class Parcel(NamedTuple):
    """A message as its queues take it."""

    body: bytes
    headers: Mapping[str, HeaderValue]
    durable: bool
    priority: int
    ttl_s: float | None
    delay_s: float | None
    filter_value: str | None = None
    """What consumers of a stream can filter by."""

    def at_once(self, somebody_waits: bool) -> Parcel:
        """Return the same for a queue whose messages live no time: a consumer that waits has it, or nobody.

        Who waits when a delay is over is not known yet.
        """
        return self._replace(ttl_s=HANDED_OVER_S if somebody_waits or self.delay_s else 0.0)

    def options(self, settings: QueueSettings) -> PutOptions:
        """Return how it is put into a queue with these settings."""
        options: PutOptions = {"headers": self.headers}
        if not self.durable and settings.durable:
            options["durable"] = False
        if self.priority and settings.priorities > 1:
            options["priority"] = min(self.priority, settings.priorities - 1)
        if self.ttl_s is not None:
            options["ttl_s"] = self.ttl_s
        if self.delay_s:
            options["delay_s"] = self.delay_s
        return options
