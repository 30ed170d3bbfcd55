"""Settles: acks that nobody waits for, and returns of what may be gone with its queue."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from qflow.aio.delivery import AsyncDelivery
from qflow.errors import AlreadySettled, BrokerClosed, QueueDeleted, StreamDeleted
from qflow.memory.waiting import in_place


async def give_back(delivery: AsyncDelivery) -> None:
    """Have a message go back to its queue."""
    with suppress(AlreadySettled, QueueDeleted, StreamDeleted, BrokerClosed):  # it is there, or has nowhere to go
        await delivery.nack()


def settle(delivery: AsyncDelivery) -> None:
    """Settle a message; one that is gone, with its queue, needs it no more."""
    in_place(partial(_ack, delivery))


def _ack(delivery: AsyncDelivery) -> None:
    with suppress(AlreadySettled, QueueDeleted, StreamDeleted):
        delivery.delivery.ack()
