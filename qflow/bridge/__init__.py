"""What is published by MQTT for clients of AMQP, and the other way round; it needs the extra `amqp`.

async with qflow.aio.open("spool") as broker:
    async with await qflow.amqp.serve(broker), await qflow.mqtt.serve(broker), await qflow.bridge.join(broker):
        ...               # MQTT's `plant/1/heat` is `plant.1.heat` at the exchange `amq.topic`
"""

from __future__ import annotations

from qflow.serving.extras import named_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from qflow.bridge.bridge import Bridge, join

__all__ = ["Bridge", "join"]
# Imported when it is asked for: it needs both servers.
__getattr__ = named_in(__name__, "qflow.bridge.bridge", __all__, needs="pamqp", what="AMQP")
