"""What somebody who looks at the page may see and do, as the users file says it.

| to | what is needed |
|---|---|
| see sums over all queues and streams, memory, disk, path and process of the spool | to have logged in |
| see a queue, a stream, its figures | any permission for its name |
| see its messages | `read` |
| put a message | `write`; to publish, a topic of `topics.publish`, none of AMQP, or to be an administrator |
| purge | `read`, as RabbitMQ has it |
| move to another queue | `read` here and `write` there |
| redrive to where they came from, which the letters say | to be an administrator |
| pause, alter, delete | `configure` |
| name a dead-letter queue, as alter does | `configure` and `read` here, `write` there |
| see connections of others | to be an administrator, or to have the tag `monitoring` |
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote

from qflow.aio.broker import AsyncBroker
from qflow.aio.queue import AsyncQueue
from qflow.aio.stream import AsyncStream
from qflow.config import AMQP_STREAMS
from qflow.errors import NotFound, QflowError
from qflow.names import choices
from qflow.serving.users import ACTIONS, DEFAULT_VIRTUAL_HOST, Action, Permission, User
from qflow.streams.topic_filter import covers

READER = User("", frozenset({"monitoring"}), {DEFAULT_VIRTUAL_HOST: Permission(configure="", write="", read=".*")})
"""Whoever comes from this machine, where there is no users file: looks, and does nothing."""
MOST_COMPARED = 500
"""Names, in the event loop."""
_OF_VIRTUAL_HOST = "amqp:"
_WILD = set("+#/")


class Forbidden(QflowError):
    """The user may not do that."""


class Rights:
    """See the module."""

    def __init__(self, user: User) -> None:
        self.user = user

    @property
    def is_read_only(self) -> bool:
        """Nobody has logged in."""
        return self.user is READER

    @property
    def is_administrator(self) -> bool:
        """May do what no permission names."""
        return self.user.is_administrator

    @property
    def sees_everybody(self) -> bool:
        """May see the connections of others."""
        return self.user.is_administrator or "monitoring" in self.user.tags

    def may(self, action: Action, name: str) -> bool:
        """Tell whether the user may do that with a queue or a stream."""
        host, inside = _place(name)
        if self.is_read_only:
            return action == "read"
        return self.user.may(action, host, inside)

    def sees(self, name: str) -> bool:
        """Tell whether the user may know that there is one of this name."""
        return any(self.may(action, name) for action in ACTIONS)

    def may_publish(self, topic: str) -> bool:
        """Tell whether the user may publish to a topic."""
        if self.is_administrator:
            return True
        if topic.startswith(AMQP_STREAMS):  # what is written there, permissions of AMQP say
            return False
        name = self.user.name
        usable = (
            one for one in self.user.topics.publish if "%c" not in one and ("%u" not in one or not _WILD & set(name))
        )
        filters = (one.replace("%u", name) for one in usable)
        return any(covers(one, topic) for one in filters)

    def check(self, action: Action, name: str) -> None:
        """Raises Forbidden: the user may not do that."""
        if not self.may(action, name):
            raise Forbidden(f"{self._who} may not {action} {name!r}{self._remedy}")

    def check_administrator(self, what: str) -> None:
        """Raises Forbidden: the user is no administrator."""
        if not self.is_administrator:
            raise Forbidden(f"{self._who} may not {what}: that is for administrators{self._remedy}")

    def check_publish(self, topic: str) -> None:
        """Raises Forbidden: the user may not publish to this topic."""
        if not self.may_publish(topic):
            raise Forbidden(f"{self._who} may not publish to {topic!r}{self._remedy}")

    @property
    def _who(self) -> str:
        return "whoever has not logged in" if self.is_read_only else f"user {self.user.name!r}"

    @property
    def _remedy(self) -> str:
        return ": start the server with --users FILE to change anything" if self.is_read_only else ""


def _place(name: str) -> tuple[str, str]:
    """Return the virtual host of a queue of AMQP, and its name there; see `qflow.amqp.model.queues.engine_name`."""
    if not name.startswith(_OF_VIRTUAL_HOST):
        return DEFAULT_VIRTUAL_HOST, name
    quoted, _, rest = name.removeprefix(_OF_VIRTUAL_HOST).partition(":")
    return unquote(quoted), rest


def queue_of(broker: AsyncBroker, rights: Rights, name: str) -> AsyncQueue:
    """Return a queue. Raises NotFound: there is none; the text names those that the user may know of."""
    try:
        return broker.queue(name)
    except NotFound as error:
        raise NotFound(f"there is no queue {name!r}; {_instead(name, rights, broker.queues())}") from error


def stream_of(broker: AsyncBroker, rights: Rights, name: str) -> AsyncStream:
    """Return a stream; as `queue_of`."""
    try:
        return broker.stream(name)
    except NotFound as error:
        raise NotFound(f"there is no stream {name!r}; {_instead(name, rights, broker.streams())}") from error


def _instead(name: str, rights: Rights, names: Sequence[str]) -> str:
    """Return what there is instead of a name. Cost: 40 µs for each that is compared with it."""
    if len(names) > MOST_COMPARED:
        return f"there are {len(names):,}: `qflow ls` lists them"
    return choices(name, filter(rights.sees, names))


def visible(rights: Rights, name: str) -> str:
    """Return a name that the user may know of. Raises Forbidden."""
    if not rights.sees(name):
        rights.check("read", name)
    return name
