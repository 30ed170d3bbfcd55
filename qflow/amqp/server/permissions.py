"""What a user may do in a virtual host, remembered by name: an expression is looked at once for each."""

from __future__ import annotations

from functools import lru_cache

from qflow.amqp.errors import AmqpError, ReplyCode
from qflow.serving.users import Action, User

REMEMBERED = 1024
DEFAULT_EXCHANGE = "amq.default"
"""The name of the default exchange, in permissions."""


class Permissions:
    """See the module."""

    def __init__(self, user: User, host_name: str) -> None:
        self._where = f"in vhost '{host_name}' refused for user '{user.name}'"
        self._may = lru_cache(REMEMBERED)(lambda what, name: user.may(what, host_name, name))

    def check(self, what: Action, name: str) -> None:
        """Refuse what the user may not do: "configure", "write" or "read". Raises AmqpError: ACCESS_REFUSED."""
        name = name or DEFAULT_EXCHANGE
        if not self._may(what, name):
            raise AmqpError(ReplyCode.ACCESS_REFUSED, f"{what} access to '{name}' {self._where}")
