"""`qflow.connect` to a URL: the whole surface through one exchange."""

from __future__ import annotations

import os

import pyarrow as pa
import pyarrow.flight as pf

from qflow.config import parse_timeout
from qflow.durations import Duration
from qflow.errors import BrokerClosed, InvalidArgument
from qflow.flight.trust import Trust, check_url
from qflow.flight.tunnel import Outlet, check_usable
from qflow.handlers import is_of_handler
from qflow.memory.waiting import shelter_made
from qflow.remote.client import requests
from qflow.remote.client.broker import RemoteBroker, broker_of
from qflow.remote.client.connecting import silent
from qflow.remote.client.threads import Connection
from qflow.tokens import headers_of

File = str | os.PathLike[str] | None
NONE = (None, None, None)
"""Of the files of certificates: whom to trust, what to show, and its key."""


def connect(
    url: str, *, token: str | None = None, trust: tuple[File, File, File] = NONE, timeout_s: Duration = 10.0
) -> RemoteBroker:
    """Use a spool on another host; see `qflow.connect`.

    Raises:
        InvalidArgument: the URL makes no sense, or the token is wrong.
        StorageError: nobody answers there in time.
        NotFound: the owner of the spool lets nobody in, or ended meanwhile.
    """
    timeout = parse_timeout(timeout_s)
    tunnels: list[Outlet] = []

    def make() -> Connection:
        tunnels.append(outlet(url, token, trust))
        return Connection(tunnels[0].socket, url, tunnels[0].reason)

    connection = shelter_made(make)
    try:
        return broker_of(connection, connection.call(requests.hello(), timeout=timeout))
    except TimeoutError as error:
        connection.close()
        if is_of_handler(error):
            raise
        raise silent(url, timeout) from None
    except BaseException as error:
        connection.close()
        if isinstance(error, BrokerClosed):
            raise tunnels[0].explained() from error
        raise


def outlet(url: str, token: str | None, files: tuple[File, File, File] = NONE) -> Outlet:
    """Return the client's end of a new session with the owner behind a URL.

    Raises:
        InvalidArgument: the URL, or what goes with it, makes no sense.
        ForkedProcess: this is a child of a process that had a session open then.
    """
    check_usable(url)
    return Outlet(client_of(url, *files), pf.FlightCallOptions(headers=headers_of(token)), url, Trust.of(url, *files))


def client_of(url: str, ca: File = None, cert: File = None, key: File = None) -> pf.FlightClient:
    """Return a client of Arrow Flight; nothing is connected yet. Raises InvalidArgument."""
    place = check_url(url)
    certificates = Trust.of(url, ca, cert, key).options()
    try:
        return pf.connect(place, **certificates)
    except (pa.ArrowException, ValueError) as error:
        raise InvalidArgument(f"{url!r} is no URL of a door: {error}") from error
