"""What a user may do in a virtual host, remembered by name: an expression is looked at once for each."""

from __future__ import annotations

from qflow.amqp.errors import AmqpError, ReplyCode
from qflow.serving.users import Action, User

REMEMBERED = 1024
DEFAULT_EXCHANGE = "amq.default"
"""The name of the default exchange, in permissions."""


class Permissions:
    """See the module."""

    def __init__(self, user: User, host_name: str) -> None:
        self._user = user
        self._host_name = host_name
        self._may: dict[tuple[Action, str], bool] = {}

    def check(self, what: Action, name: str) -> None:
        """Refuse what the user may not do; `what` is "configure", "write" or "read".

        Raises:
            AmqpError: ACCESS_REFUSED.
        """
        key = what, name
        may = self._may.get(key)
        if may is None:
            if len(self._may) >= REMEMBERED:
                self._may.clear()
            may = self._may[key] = self._user.may(what, self._host_name, name or DEFAULT_EXCHANGE)
        if not may:
            raise AmqpError(
                ReplyCode.ACCESS_REFUSED,
                f"{what} access to '{name or DEFAULT_EXCHANGE}' in vhost '{self._host_name}' refused for user "
                f"'{self._user.name}'",
            )
