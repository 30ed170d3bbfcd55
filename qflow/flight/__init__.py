"""A door for other hosts: Arrow Flight (gRPC, TLS, tokens) on a spool; it needs the extra `net`.

with qflow.open("spool") as broker, qflow.flight.serve(broker, port=7420) as server:
    ...                       # Arrow clients of any language connect to grpc://127.0.0.1:7420
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from qflow.flight.server import Server, serve

__all__ = ["Server", "serve"]

# Else gRPC writes lines of its own to stderr, as for a failed handshake. It reads this at its first call.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def __getattr__(name: str) -> object:
    """Import the server when it is asked for.

    Raises:
        NotFound: the package `pyarrow` is not installed.
    """
    if name in __all__:
        from qflow.serving.extras import load

        return getattr(load("qflow.flight.server", needs="pyarrow", what="Arrow Flight"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
