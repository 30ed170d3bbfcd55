"""What a socket tells of its other side."""

from __future__ import annotations

import select
import socket


def has_hung_up(client: socket.socket) -> bool:
    """Tell whether the other side has closed, or died, also where there is something to read before its end."""
    if client.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(client.fileno(), getattr(select, "POLLRDHUP", 0))
    return bool(poll.poll(0))
