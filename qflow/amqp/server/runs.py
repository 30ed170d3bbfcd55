"""Publishes that follow each other into one queue, of which only the bodies differ: one put for all of them."""

from __future__ import annotations

from qflow.amqp.server.confirms import Unconfirmed
from qflow.amqp.server.hosted import HostedQueue
from qflow.amqp.server.parcels import Parcel
from qflow.amqp.server.stores import QueueStore
from qflow.amqp.wire.events import Published

LARGEST_BYTES = 16 * 1024
"""A larger body is put on its own: there is nothing to gain."""
RUN_BYTES = 256 * 1024
"""A run ends with this. They are put together or not at all, so a queue has to have room for so much."""


class Run:
    """See the module. It ends before its connection does anything else, so nothing changes what its first one found."""

    __slots__ = ("bodies", "hosted", "left_bytes", "parcel", "publish", "said", "store")

    def __init__(
        self,
        said: tuple[str, str, bytes],
        hosted: HostedQueue,
        store: QueueStore,
        parcel: Parcel,
        publish: Unconfirmed | None,
    ) -> None:
        self.said = said
        """Exchange, routing key and properties, as the client sent them."""
        self.hosted = hosted
        self.store = store
        self.parcel = parcel
        """The first one."""
        self.publish = publish
        """Its confirm; None if there are none."""
        self.bodies = [parcel.body]
        self.left_bytes = RUN_BYTES - len(parcel.body)

    def add(self, event: Published) -> bool:
        """Take one more message; False if it does not belong to the run."""
        _, exchange, routing_key, _, immediate, properties, body = event
        size = len(body)
        if size > LARGEST_BYTES or size > self.left_bytes or immediate:
            return False
        if (exchange, routing_key, properties) != self.said:
            return False
        self.bodies.append(body)
        self.left_bytes -= size
        return True
