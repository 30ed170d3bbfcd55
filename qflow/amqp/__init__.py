"""A broker for AMQP 0-9-1 clients on a spool; it needs the extra `amqp`.

async with qflow.aio.open("spool") as broker, await qflow.amqp.serve(broker) as server:
    ...                       # RabbitMQ's clients connect to 127.0.0.1:5672; the program uses the same queues
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from qflow.amqp.server.server import Server, serve

__all__ = ["Server", "serve"]


def __getattr__(name: str) -> object:
    """Import the server when it is asked for: the protocol alone needs neither asyncio nor the engine.

    Raises:
        NotFound: the package `pamqp` is not installed.
    """
    if name in __all__:
        from qflow.serving.extras import load

        return getattr(load("qflow.amqp.server.server", needs="pamqp", what="AMQP"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
