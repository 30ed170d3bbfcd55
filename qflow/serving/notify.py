"""Tells the service manager how a service is: sd_notify(3), without a library.

The manager names a socket of datagrams in `NOTIFY_SOCKET`, by a path or, with `@` before it, in the abstract name space
of Linux. Without it nothing is told.
"""

from __future__ import annotations

import os
import socket
import time

from qflow.loggers import get_logger

_logger = get_logger("qflow")

READY = "READY=1"
STOPPING = "STOPPING=1"
PATIENCE_S = 5.0
"""How long a manager that has much to read is waited for."""


def reloading() -> str:
    """Return what is told at the beginning of a reload; `READY` is told at its end."""
    return f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}"


def notify(state: str) -> None:
    """Tell the service manager, if there is one; not in the thread of an event loop.

    A socket that takes nothing costs some seconds, and a line in the log.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as told:
            told.settimeout(PATIENCE_S)
            told.connect("\0" + address[1:] if address.startswith("@") else address)
            told.sendall(state.encode())
    except (OSError, ValueError) as error:
        _logger.warning("the service manager at NOTIFY_SOCKET=%s was not told %r: %s", address, state, error)
