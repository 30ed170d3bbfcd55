"""The questions a server asks before it lets a client in, and before a client publishes or subscribes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from qflow.mqtt.errors import MqttError, ReasonCode
from qflow.mqtt.model.messages import is_reserved
from qflow.mqtt.wire.packets import Connect
from qflow.serving.users import Users


class Access(Protocol):
    """What a client that is logged in may do."""

    user_name: str
    """Empty where nobody has to log in."""

    def may_publish(self, topic: str) -> bool:
        """Tell whether it may publish to a topic."""

    def may_subscribe(self, topic_filter: str) -> bool:
        """Tell whether it may have all that a filter matches; the filter is without `$share/...`."""

    def renew(self, users: Users | None) -> bool:
        """Be what users say now; False: the client may not stay."""


Login = Callable[[Connect, str, Mapping[str, Any] | None], Awaitable[Access | None]]
"""Takes CONNECT, the client's address and its certificate; gives what it may do, or None if it may not come in."""


def refusal(topic: str, access: Access) -> MqttError | None:
    """Return why a client may not publish to a topic; None: it may."""
    if is_reserved(topic):
        text = f"topics that begin with $ or amqp-stream/ are the server's: {topic[:200]!r}"
        return MqttError(ReasonCode.TOPIC_NAME_INVALID, text)
    if not access.may_publish(topic):
        return MqttError(ReasonCode.NOT_AUTHORIZED, f"not allowed to publish to {topic[:200]!r}")
    return None
