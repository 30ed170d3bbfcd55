"""Operations on the sessions of MQTT."""

from __future__ import annotations

from typing import Any

from qflow.remote.server import arguments
from qflow.remote.server.arguments import Columns
from qflow.remote.server.session import Session, by_name


async def delete_session(session: Session, head: dict[str, Any], columns: Columns) -> None:
    """The door of an owner without MQTT imports it only then."""
    from qflow.mqtt.server.forgetting import forget_session

    await forget_session(session.broker, arguments.text(head, "client"))


OPERATIONS = by_name(delete_session)
