"""What ends when a user has fewer rights than before: consumers of queues that may not be read any more."""

from __future__ import annotations

from qflow.amqp.errors import AmqpError
from qflow.amqp.server.channel import Channel
from qflow.amqp.server.consuming import Consumer


async def end_forbidden(channel: Channel) -> None:
    """End such consumers of a channel, and tell its client if it wants that; what it holds it can still settle."""
    for consumer in [consumer for consumer in channel.consumers.values() if not _may_go_on(channel, consumer)]:
        await consumer.stop()
        channel.consumer_gone(consumer)
        await channel.host.consumer_left(consumer)


def _may_go_on(channel: Channel, consumer: Consumer) -> bool:
    try:
        channel.client.may("read", consumer.hosted.name)
    except AmqpError:
        return False
    return True
