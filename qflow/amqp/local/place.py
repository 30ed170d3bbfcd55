"""The directory `amqp/` of a spool, where a local server and its clients find each other.

    starting   locked by the client that starts a server, until that listens or has failed
    serving    locked by a server from before it opens the spool until its process has ended. It holds where the server
               listens, and its secret; nothing while it does not listen yet, or takes no more clients
    log        what the server warns of

The locks are those of flock(2): they end with the process that holds them, however it ends. All is for one user alone:
mode 0700, files 0600.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from qflow.errors import InvalidArgument
from qflow.named_tuples import NamedTuple

DIRECTORY, STARTING, SERVING, LOG = "amqp", "starting", "serving", "log"
USER = "qflow"
"""The one user of a local server; the password is its secret."""
_OWN_MODE, _FILE_MODE = 0o700, 0o600
_MOST_BYTES = 4096
_BEGUN = frozenset({DIRECTORY, "lock", "log"})
"""One of them is in every spool, also in one that is being made."""


class Where(NamedTuple):
    """A server that listens, on 127.0.0.1."""

    port: int
    secret: str


class Look(NamedTuple):
    """What there is at a moment."""

    is_served: bool
    """A server lives: it may begin or end."""
    where: Where | None
    """Where it takes clients."""


class Place:
    """See the module.

    Args:
        spool: the absolute path of a spool.
    """

    def __init__(self, spool: str) -> None:
        self.spool = spool
        self.directory = os.path.join(spool, DIRECTORY)

    def path(self, name: str) -> str:
        """Return the path of a file in the directory."""
        return os.path.join(self.directory, name)

    def make(self) -> None:
        """Make what is missing of the spool's directory, and the one in it.

        Raises:
            InvalidArgument: something lies there that is no spool; nothing was made. OSError: it cannot be made.
        """
        if os.path.isdir(self.directory):
            return
        try:
            names = [name for name in os.listdir(self.spool) if name != "lost+found"]
        except FileNotFoundError:
            os.makedirs(os.path.dirname(self.spool), exist_ok=True)
            names = []
        except NotADirectoryError as error:
            raise InvalidArgument(f"{self.spool} is not a directory: move it away, or name another path") from error
        if names and _BEGUN.isdisjoint(names):
            raise InvalidArgument(
                f"{self.spool} is not a spool and not empty (it holds {min(names)!r}): name an empty or a new directory"
            )
        for path in (self.spool, self.directory):
            if not os.path.isdir(path):
                _make_directory(path)

    # Clients -----------------------------------------------------------------------------------------------------

    def look(self) -> Look:
        """Return what there is now. Cost: four system calls."""
        with self._opened(SERVING) as file:
            if _locks(file, fcntl.LOCK_SH):
                fcntl.flock(file, fcntl.LOCK_UN)  # a child that is forked meanwhile must not keep it
                return Look(False, None)
            return Look(True, _parse(os.pread(file, _MOST_BYTES, 0)))

    @contextmanager
    def starting(self) -> Iterator[bool]:
        """Be the one that starts a server, if nobody else is, until the block ends; gives whether that is so."""
        with self._opened(STARTING) as file:
            is_first = _locks(file, fcntl.LOCK_EX)
            try:
                yield is_first
            finally:
                if is_first:
                    fcntl.flock(file, fcntl.LOCK_UN)  # likewise

    # The server --------------------------------------------------------------------------------------------------

    def serve(self) -> Serving | None:
        """Be the server until the process ends; None if another one is, or a client looks at this moment."""
        file = self._open(SERVING)
        if not _locks(file, fcntl.LOCK_EX):
            os.close(file)
            return None
        serving = Serving(file)
        serving.withdraw()
        return serving

    def _open(self, name: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(self.path(name), flags, _FILE_MODE)

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        file = self._open(name)
        try:
            yield file
        finally:
            os.close(file)


class Serving:
    """That this process is the server: it holds the lock until it ends."""

    def __init__(self, file: int) -> None:
        self._file = file

    def publish(self, where: Where) -> None:
        """Have clients come."""
        self.withdraw()
        os.pwrite(self._file, json.dumps(where._asdict()).encode(), 0)

    def withdraw(self) -> None:
        """Have clients wait: for this server to listen, or for the next one."""
        os.ftruncate(self._file, 0)


def _make_directory(path: str) -> None:
    try:
        os.mkdir(path, _OWN_MODE)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def _locks(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _parse(text: bytes) -> Where | None:
    """Return what a server has written; None if it has not, or is about to."""
    try:
        return Where(**json.loads(text))
    except (ValueError, TypeError):
        return None
