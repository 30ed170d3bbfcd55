"""For suites that know one broker only: connections of their processes to port 5672 here go elsewhere.

A directory on PYTHONPATH with the `sitecustomize.py` below has it done in each Python that starts, also in those that
the suite starts itself. The environment variable QFLOW_AMQP_TARGET has the host and port to connect to instead.
"""

from __future__ import annotations

import os
import socket
from typing import Any

TARGET = "QFLOW_AMQP_TARGET"
HOSTS = ("127.0.0.1", "localhost")
PORT = 5672
SITECUSTOMIZE = "import amqp_redirect\n\namqp_redirect.redirect()\n"


def redirect() -> None:
    """Redirect all sockets of this process."""
    host, _, port = os.environ[TARGET].rpartition(":")
    target = host, int(port)
    connect, connect_ex = socket.socket.connect, socket.socket.connect_ex

    def to(address: Any) -> Any:
        is_expected = isinstance(address, tuple) and address[0] in HOSTS and address[1] == PORT
        return target if is_expected else address

    socket.socket.connect = lambda self, address: connect(self, to(address))  # type: ignore[method-assign]
    socket.socket.connect_ex = lambda self, address: connect_ex(self, to(address))  # type: ignore[method-assign]
