"""Who may log in, and which topics they may publish to and subscribe to.

Without users, whoever comes from this machine may do everything, whatever name they give. With users a client shows a
password, or a certificate that TLS has checked, whose common name is that of a user. What the user may do is said by
filters, see `qflow.serving.users`: a topic may be published to if a filter matches it; a filter may be subscribed to if
one filter matches all that it does, so that what is delivered need not be looked at again.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

from qflow.mqtt.errors import MqttError, ReasonCode
from qflow.mqtt.model.messages import is_reserved
from qflow.mqtt.wire.packets import Connect
from qflow.serving.addresses import is_loopback
from qflow.serving.certificates import common_name
from qflow.serving.logins import Logins
from qflow.serving.users import Topics, User, Users
from qflow.streams.topic_filter import covers


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


REMEMBERED = 128
REMEMBERED_CHARACTERS = 256
"""Answers about longer topics are not remembered: together they bound what a client makes this side keep."""
_VARIABLE = re.compile("%[cu]")


class Gate:
    """Decides about logins of one event loop."""

    def __init__(self, users: Users | None) -> None:
        self._logins = Logins(users)

    @property
    def is_open(self) -> bool:
        """Nobody has to log in, on this machine."""
        return self._logins.users is None

    async def login(self, connect: Connect, address: str, certificate: Mapping[str, Any] | None) -> Access | None:
        """Return what a client may do; None if it may not come in.

        Args:
            connect: with the client id that the session will have.
            address: the IP address of the client, without a port.
            certificate: that of the client, as `SSLSocket.getpeercert` returns it; None or empty = none.

        Raises:
            MqttError: the client id cannot stand in a filter of the user's, which has it as `%c`; or the name, `%u`.
        Cost: of a password that was not seen lately, 50 ms in a thread.
        """
        users = self._logins.users
        if users is None:
            return ANYTHING if is_loopback(address) else None
        user = await self._user(users, connect, address, certificate)
        return None if user is None else Permitted(user, connect.client_id)

    def renew(self, users: Users | None) -> None:
        """Use these users for the logins to come."""
        self._logins.users = users

    def close(self) -> None:
        """Decide about nobody any more."""
        self._logins.close()

    async def _user(
        self, users: Users, connect: Connect, address: str, certificate: Mapping[str, Any] | None
    ) -> User | None:
        name, password = connect.username, connect.password
        if password is not None and name is not None:
            return await self._logins.check(name, password.decode(errors="surrogateescape"), address)
        shown = common_name(certificate) if password is None else None
        user = users.get(shown) if shown is not None and name in (None, shown) else None
        if user is None:
            self._logins.tell_refused(shown or name or "", address)
        return user


class Permitted:
    """What a user of a users file may do with a client id. Cost of a question: 0.05 µs for a topic seen lately.

    Raises:
        MqttError: see `Gate.login`.
    """

    __slots__ = ("_client_id", "_may", "_publish", "_subscribe", "user_name")

    def __init__(self, user: User, client_id: str) -> None:
        self._client_id = client_id
        self.user_name = user.name
        self._take(user.topics)

    def _take(self, topics: Topics) -> None:
        publish, subscribe = (
            _filled(filters, self._client_id, self.user_name) for filters in (topics.publish, topics.subscribe)
        )
        self._may: dict[str, bool] = {}
        self._publish, self._subscribe = publish, subscribe

    def renew(self, users: Users | None) -> bool:
        """Be what users say now; False: there is no such user, or its filters have no place for the client id.

        A password that has changed since is not asked for. Who may not stay may do nothing any more.
        """
        user = None if users is None else users.get(self.user_name)
        self._take(Topics())
        if user is None:
            return False
        try:
            self._take(user.topics)
        except MqttError:
            return False
        return True

    def may_publish(self, topic: str) -> bool:
        may = self._may.get(topic)
        if may is None:
            may = any(covers(granted, topic) for granted in self._publish)
            if len(topic) <= REMEMBERED_CHARACTERS:
                if len(self._may) >= REMEMBERED:
                    self._may.clear()
                self._may[topic] = may
        return may

    def may_subscribe(self, topic_filter: str) -> bool:
        return any(covers(granted, topic_filter) for granted in self._subscribe)


class _Anything:
    """What may be done where nobody has to say who they are."""

    user_name = ""

    def renew(self, users: Users | None) -> bool:
        return users is None

    def may_publish(self, topic: str) -> bool:
        return True

    def may_subscribe(self, topic_filter: str) -> bool:
        return True


ANYTHING: Access = _Anything()


def _filled(filters: Iterable[str], client_id: str, user_name: str) -> tuple[str, ...]:
    """Return filters with the values of their variables."""

    def value(variable: re.Match[str]) -> str:
        if variable[0] == "%c":
            return _level(client_id, "client id", ReasonCode.CLIENT_ID_NOT_VALID)
        return _level(user_name, "user name", ReasonCode.NOT_AUTHORIZED)

    return tuple(_VARIABLE.sub(value, each) for each in filters)


def _level(text: str, what: str, code: ReasonCode) -> str:
    """Return a text that makes a filter no wider than whoever wrote it meant."""
    if not text or text.startswith("$") or not set("+#/").isdisjoint(text):
        raise MqttError(
            code,
            f"topics are permitted by the {what}, so it must not be empty, begin with '$' or have one of '+', '#', '/' "
            f"in it, as {text[:80]!r}",
        )
    return text
