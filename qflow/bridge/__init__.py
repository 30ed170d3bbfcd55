"""What is published by MQTT for clients of AMQP, and the other way round; it needs the extra `amqp`.

async with qflow.aio.open("spool") as broker:
    async with await qflow.amqp.serve(broker), await qflow.mqtt.serve(broker), await qflow.bridge.join(broker):
        ...               # MQTT's `plant/1/heat` is `plant.1.heat` at the exchange `amq.topic`
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from qflow.bridge.bridge import Bridge, join

__all__ = ["Bridge", "join"]


def __getattr__(name: str) -> object:
    """Import the bridge when it is asked for: it needs both servers.

    Raises:
        NotFound: the package `pamqp` is not installed.
    """
    if name in __all__:
        from qflow.serving.extras import load

        return getattr(load("qflow.bridge.bridge", needs="pamqp", what="AMQP"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
