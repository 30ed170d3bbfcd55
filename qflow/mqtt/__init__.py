"""A broker for MQTT 3.1.1 and 5 clients on a spool.

async with qflow.aio.open("spool") as broker, await qflow.mqtt.serve(broker) as server:
    ...                       # MQTT clients connect to 127.0.0.1:1883; the program reads and writes the same stream
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from qflow.mqtt.server.server import Server, serve

__all__ = ["Server", "serve"]


def __getattr__(name: str) -> object:
    """Import the server when it is asked for: the protocol alone needs neither asyncio nor the engine."""
    if name in __all__:
        from qflow.mqtt.server import server

        return getattr(server, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
