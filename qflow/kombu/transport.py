"""The transport `qflow`: that of AMQP, to a server which the first client of a spool starts."""

from __future__ import annotations

from functools import partial
from typing import Any
from urllib.parse import quote

from kombu.transport import pyamqp

from qflow.amqp.local.joining import join
from qflow.amqp.local.place import USER, Where
from qflow.amqp.local.settings import SCHEME, LocalSettings
from qflow.errors import SpoolInUse, StorageError


class Transport(pyamqp.Transport):
    """Made by kombu. Publishes are confirmed, unless `transport_options` have `confirm_publish=False`: one that has
    returned is synced.

    That another process owns the spool, or the disk is full, is an error of the connection: a worker tries again, and
    says why. A wrong URL or a damaged spool is an error at once.
    """

    can_parse_url = True
    connection_errors = (*pyamqp.Transport.connection_errors, SpoolInUse, StorageError)
    recoverable_connection_errors = (*pyamqp.Transport.recoverable_connection_errors, SpoolInUse, StorageError)

    @property
    def default_connection_params(self) -> dict[str, Any]:
        return {}

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        """Return the URL as it was given: there is no password in it."""
        return uri

    def qos_semantics_matches_spec(self, connection: Any) -> bool:
        """Return False: a limit of a channel takes `global`, and Celery means one of all queues of a worker."""
        return False

    def establish_connection(self) -> Any:
        """Return a connection to the server of the spool, which is started if there is none."""
        settings = LocalSettings.parse(_url(self.client))
        return join(settings, partial(self._connected, self.client), self.connection_errors + self.channel_errors)

    def _connected(self, client: Any, where: Where) -> Any:
        options = {
            "host": f"127.0.0.1:{where.port}",
            "userid": USER,
            "password": where.secret,
            "login_method": "PLAIN",
            "virtual_host": "/",
            "connect_timeout": client.connect_timeout,
            "heartbeat": client.heartbeat,
            "confirm_publish": True,
        }
        connection = self.Connection(**options | (client.transport_options or {}))
        connection.client = client
        connection.connect()
        return connection


def _url(client: Any) -> str:
    """Return the URL of a connection; kombu takes those apart that it switches to when another one fails."""
    if client.hostname and "://" in client.hostname:
        return str(client.hostname)
    return f"{SCHEME}://{client.hostname or ''}/{quote(client.virtual_host)}"
