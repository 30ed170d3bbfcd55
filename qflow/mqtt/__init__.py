"""A broker for MQTT 3.1.1 and 5 clients on a spool.

async with qflow.aio.open("spool") as broker, await qflow.mqtt.serve(broker) as server:
    ...                       # MQTT clients connect to 127.0.0.1:1883; the program reads and writes the same stream
"""

from __future__ import annotations

from qflow.serving.extras import named_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from qflow.mqtt.server.server import Server, serve

__all__ = ["Server", "serve"]
# The server is imported when it is asked for: the protocol alone needs neither asyncio nor the engine.
__getattr__ = named_in(__name__, "qflow.mqtt.server.server", __all__)
