"""The questions a server asks before it lets a client in, and before a client publishes or subscribes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

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
