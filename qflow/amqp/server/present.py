"""Who is connected, for those who show it."""

from __future__ import annotations

from qflow.amqp.server.session import Session
from qflow.serving.presence import Connected


def present(session: Session, now_s: float) -> Connected:
    """Return who it is that a connection is of."""
    consumers = sum(len(channel.consumers) for channel in session.channels.values())
    detail = f"{len(session.channels)} channels, {consumers} consumers"
    if session.is_open:
        detail = f"virtual host {session.host.name}, {detail}"
    told = (session.machine.client_properties or {}).get("connection_name")
    name = told if isinstance(told, str) else ""
    user = "" if session.user is None else session.user.name
    return Connected("amqp", name, user, session.peer, now_s - session.began_s, detail)
