"""A broker for AMQP 0-9-1 clients on a spool; it needs the extra `amqp`.

async with qflow.aio.open("spool") as broker, await qflow.amqp.serve(broker) as server:
    ...                       # RabbitMQ's clients connect to 127.0.0.1:5672; the program uses the same queues
"""

from __future__ import annotations

from qflow.serving.extras import named_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from qflow.amqp.server.server import Server, serve

__all__ = ["Server", "serve"]
# The server is imported when it is asked for: the protocol alone needs neither asyncio nor the engine.
__getattr__ = named_in(__name__, "qflow.amqp.server.server", __all__, needs="pamqp", what="AMQP")
