"""`qflow.aio.connect`."""

from __future__ import annotations

import asyncio
import os
import socket
from functools import partial
from typing import Any

from qflow.aio.loops import running_loop
from qflow.aio.opening import Opening
from qflow.config import is_url, parse_timeout
from qflow.descriptors import occupy_standard
from qflow.durations import Duration
from qflow.errors import BrokerClosed
from qflow.remote.client import requests
from qflow.remote.client.connecting import AGAIN_S, gone, open_socket, path_of, silent
from qflow.remote.client.task_broker import AsyncRemoteBroker, broker_of
from qflow.remote.client.tasks import TaskConnection
from qflow.serving.extras import load
from qflow.tokens import token_of


def connect(
    target: str | os.PathLike[str],
    *,
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    ca: str | os.PathLike[str] | None = None,
    cert: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
    timeout_s: Duration = 10.0,
) -> Opening[AsyncRemoteBroker]:
    """Use a spool that another process owns, from tasks of the running loop; arguments and errors as `qflow.connect`.

    `broker = await qflow.aio.connect(path)`, or `async with qflow.aio.connect(path) as broker`.
    """
    return Opening(partial(_connect, target, (token, token_file), (ca, cert, key), timeout_s))


async def _connect(
    target: str | os.PathLike[str],
    token: tuple[str | None, str | os.PathLike[str] | None],
    files: tuple[str | os.PathLike[str] | None, ...],
    timeout_s: Duration,
) -> AsyncRemoteBroker:
    running_loop()  # first: without one, nothing is opened
    occupy_standard()
    timeout = parse_timeout(timeout_s)
    tunnel: Any = None
    if is_url(target):
        module = load("qflow.flight.client", needs="pyarrow", what="a URL")
        path = os.fspath(target)
        tunnel = module.outlet(path, token_of(*token), files)
    else:
        path = path_of(target, *token, *files)
    connection = TaskConnection(path, None if tunnel is None else tunnel.reason)
    try:
        async with asyncio.timeout(timeout):
            connection.socket = one = await _socket(path) if tunnel is None else tunnel.socket
            try:
                await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=one)
            except BaseException:
                one.close()
                raise
            welcome: dict[str, Any] = await connection.call(requests.hello(os.getpid()))
        return broker_of(connection, welcome)
    except BaseException as error:
        await connection.close()
        if isinstance(error, TimeoutError):
            raise silent(path, timeout) from None
        if isinstance(error, BrokerClosed):
            raise gone(path) if tunnel is None else tunnel.explained() from error
        raise


async def _socket(path: str) -> socket.socket:
    """Return a connected socket; while too many others are about to be let in, try again."""
    while True:
        try:
            return open_socket(path)
        except BlockingIOError:
            await asyncio.sleep(AGAIN_S)
