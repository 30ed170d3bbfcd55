"""`qflow.connect`."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

from qflow.config import is_url, parse_timeout, spool_path
from qflow.descriptors import occupy_standard
from qflow.door import NAME, NO_POLL, address
from qflow.durations import Duration
from qflow.errors import BrokerClosed, InvalidArgument, NotFound, PermissionDenied, QflowError, StorageError
from qflow.handlers import is_of_handler
from qflow.memory.waiting import shelter_made
from qflow.remote.client import requests
from qflow.remote.client.broker import RemoteBroker, broker_of
from qflow.remote.client.lone import make_line
from qflow.remote.client.sockets import failed
from qflow.remote.client.threads import Connection
from qflow.serving.extras import load
from qflow.tokens import token_of

T = TypeVar("T")
AGAIN_S = 0.01
"""Where too many others are about to be let in."""


def connect(
    target: str | os.PathLike[str],
    *,
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    ca: str | os.PathLike[str] | None = None,
    cert: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
    timeout_s: Duration = 10.0,
) -> RemoteBroker:
    """Use a spool that another process owns: through the socket in its directory, or on another host, by a URL.

    Close it, or use it in a `with` block. It ends as if it was closed when nothing refers any more to the broker, or to
    what came of it: queues, deliveries, subscriptions, consumers that run, futures, callbacks of events.

    Args:
        target: the directory of the spool, whose owner has it open with `door=True`, which is the default; or
            `grpc+tls://HOST:PORT`, where `qflow serve --flight` runs. That needs the extra `net`.
        token: for a URL: the access token.
        token_file: for a URL: a file with the access token, its first word, in place of `token`.
        ca: for a URL: the file of certificates (PEM) to trust in place of the system's.
        cert, key: for a broker that asks for a certificate: files of the one to show, and of its private key (PEM).
        timeout_s: how long to wait for the owner's first answer.

    Raises:
        NotFound: there is no spool, or nobody owns it now, or its owner lets nobody in, or ended meanwhile; or no token
            in the file.
        StorageError: the socket cannot be used, or the owner does not answer in time.
        InvalidArgument: the target is no path, or this process is of another user than the owner's.
    """
    occupy_standard()
    if is_url(target):
        module = load("qflow.flight.client", needs="pyarrow", what="a URL")
        shown = token_of(token, token_file)
        remote: RemoteBroker = module.connect(target, token=shown, trust=(ca, cert, key), timeout_s=timeout_s)
        return remote
    path, timeout = path_of(target, token, token_file, ca, cert, key), parse_timeout(timeout_s)
    if not hasattr(select, "poll"):
        raise StorageError(f"{path}: {NO_POLL}")
    ends = None if timeout is None else time.monotonic() + timeout
    connection = when_let_in(lambda: shelter_made(lambda: Connection(open_socket(path), path)), path, timeout)
    try:
        left = None if ends is None else max(0.0, ends - time.monotonic())
        welcome: dict[str, Any] = connection.call(requests.hello(os.getpid()), timeout=left)
        connection.open_lone(lambda: make_line(open_socket(path), path, welcome["uuid"]))
        return broker_of(connection, welcome)
    except TimeoutError as error:
        connection.close()
        if is_of_handler(error):
            raise
        raise silent(path, timeout) from None
    except BaseException as error:
        connection.close()
        if isinstance(error, BrokerClosed):
            raise gone(path) from error
        raise


def when_let_in(make: Callable[[], T], path: str, timeout: float | None) -> T:
    """Return what is made with `open_socket`; try again while too many others are about to be let in.

    An interrupt ends the waiting.
    """
    ends = None if timeout is None else time.monotonic() + timeout
    while True:
        try:
            return make()
        except BlockingIOError as error:
            if ends is not None and time.monotonic() >= ends:
                raise silent(path, timeout) from error
        time.sleep(AGAIN_S)


def path_of(target: str | os.PathLike[str], *of_urls: object) -> str:
    """Return the path of a spool to connect to. Raises InvalidArgument: it is none, or there is what URLs have."""
    path = spool_path(target)
    if any(one is not None for one in of_urls):
        raise InvalidArgument(
            "a token is for a URL, and so is a certificate: the owner of a spool looks at the user of a process"
        )
    return path


def open_socket(path: str) -> socket.socket:
    """Return a socket that is connected to the owner of a spool; it does not block.

    Raises:
        BlockingIOError: too many others are about to be let in. What `connect` raises.
    """
    if not os.path.isdir(path):
        raise NotFound(f"there is no spool at {path}: name the directory of one that is open")
    try:
        one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise failed(error, path) from error
    try:
        one.setblocking(False)
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            one.connect(address(path, directory))
        finally:
            os.close(directory)
    except BaseException as error:
        one.close()
        if isinstance(error, OSError) and not isinstance(error, BlockingIOError):
            raise explain(error, path) from error
        raise
    return one


def explain(error: OSError, path: str) -> QflowError:
    """Return the error for a socket that could not be connected."""
    if error.errno in (errno.ENOENT, errno.ECONNREFUSED):
        return NotFound(f"nobody owns the spool {path} now, or its owner lets nobody in: open it, with door=True")
    if error.errno in (errno.EACCES, errno.EPERM):
        return PermissionDenied(
            f"this user may not use {os.path.join(path, NAME)}: only the user of the owner is let in, and needs read "
            "and write access to the spool; give it back if it was taken"
        )
    return failed(error, path)


def silent(path: str, timeout: float | None) -> StorageError:
    """Return the error for an owner that does not answer."""
    return StorageError(
        f"the owner of {path} has not answered within {timeout} s: look whether it hangs, or is stopped"
    )


def gone(target: str) -> NotFound:
    """Return the error for an owner that ended before it had answered."""
    return NotFound(f"nobody owns {target} now: its owner ended as it was connected to; connect when it is open again")
