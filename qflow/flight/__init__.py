"""A door for other hosts: Arrow Flight (gRPC, TLS, tokens) on a spool; it needs the extra `net`.

with qflow.open("spool") as broker, qflow.flight.serve(broker, port=7420) as server:
    ...                       # Arrow clients of any language connect to grpc://127.0.0.1:7420
"""

from __future__ import annotations

import os

from qflow.serving.extras import named_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from qflow.flight.server import Server, serve

__all__ = ["Server", "serve"]

# Else gRPC writes lines of its own to stderr, as for a failed handshake. It reads this at its first call.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
__getattr__ = named_in(__name__, "qflow.flight.server", __all__, needs="pyarrow numpy", what="Arrow Flight")
