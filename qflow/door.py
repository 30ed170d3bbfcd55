"""The socket in a spool, through which other processes come, and the thread that waits for the first of them.

A Unix stream socket named `door` in the spool, for its owner alone. One left by a dead owner is removed: whoever makes
this one owns the spool. Until the first caller comes the thread `qflow-door` waits in `poll`, and nothing else is
started or imported; then it serves, in an event loop of its own.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import threading
from collections.abc import Callable

from qflow.descriptors import EXHAUSTED
from qflow.errors import QflowError
from qflow.loggers import get_logger
from qflow.starting import start

NAME = "door"
MODE = 0o600
MOST_PATH_BYTES = 107
"""Of the address of a Unix socket."""
WAITING = 128
"""Callers that wait to be let in."""
NO_POLL = "`select.poll` was taken away, as eventlet does: only gevent's `patch_all` goes with a door"
"""Of both of its sides."""
PAUSE_S = 1.0
"""Until callers are let in again, where the system has been short of something."""

_logger = get_logger("qflow")


class Door:
    """See the module. `shut` ends the coming, `end` what came; `leave` is for a forked child."""

    def __init__(self, path: str, serve: Callable[[Door], object]) -> None:
        """Make the socket and start the thread.

        Args:
            serve: called in the thread when the first caller comes; returns when it is told to end.

        Raises:
            OSError, QflowError: there can be no socket, or no thread.
        """
        if not hasattr(select, "poll"):
            raise OSError(NO_POLL)
        self.path = path
        self._serve = serve
        self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.told, self._tell, self._inode = -1, -1, -1
        self.is_shut = False
        """Nobody is let in any more."""
        self._ends_itself = False
        self._has_warned = False
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sockets: set[socket.socket] = set()
        """Of callers that are connected: a forked child closes its copies."""
        self.is_draining = False
        self.begin_drain: Callable[[], object] = lambda: None
        """From any thread; before the first caller is served there is nobody."""
        try:
            self.told, self._tell = os.pipe()
            self._bind()
            self._thread = threading.Thread(target=self._run, name="qflow-door", daemon=True)
            start(self._thread)
        except BaseException:
            self.shut()
            self._close_all()
            raise

    def _bind(self) -> None:
        remove_stale(self._directory)
        with contextlib.suppress(OSError):  # not everywhere; the directory is its owner's alone, too
            os.fchmod(self.listening.fileno(), MODE)
        self.listening.bind(address(self.path, self._directory))
        self._inode = os.stat(NAME, dir_fd=self._directory, follow_symlinks=False).st_ino
        os.chmod(NAME, MODE, dir_fd=self._directory)
        self.listening.setblocking(False)
        self.listening.listen(WAITING)

    def _run(self) -> None:
        try:
            while self._has_caller():
                try:
                    self._serve(self)
                    return
                except OSError as error:
                    if error.errno not in EXHAUSTED:
                        raise
                    self._pause(error)
        except Exception:
            failed = "%s: the door failed; nobody else is let in"
            _logger.exception(failed, self.path, spool=self.path, event="door_failed")
            self.shut()
            self.listening.close()  # and who waits to be let in is told
        finally:
            if self._ends_itself:
                self._close_all()

    def _has_caller(self) -> bool:
        """Wait for a caller; False: the door is to end, or is shut."""
        poll = select.poll()
        poll.register(self.listening.fileno(), select.POLLIN)
        poll.register(self.told, select.POLLIN)
        return self.told not in dict(poll.poll()) and not self.is_shut

    def _pause(self, error: OSError) -> None:
        """Leave callers waiting for a while, as an event loop takes some descriptors; until the door is to end."""
        if not self._has_warned:
            self._has_warned = True
            _logger.warning("%s: nobody is let in for now: %s", self.path, error)
        poll = select.poll()
        poll.register(self.told, select.POLLIN)
        poll.poll(PAUSE_S * 1000)

    def drain(self) -> None:
        """Give callers no more messages, and end each connection once it holds none and its calls are answered.

        From any thread; returns at once. So it is for those who come later. Twice is fine.
        """
        self.is_draining = True
        self.begin_drain()

    def shut(self) -> None:
        """Let nobody in any more, and remove the socket, while the spool is still owned. Twice is fine."""
        if self.is_shut or self.listening.fileno() < 0:
            return
        self.is_shut = True
        with contextlib.suppress(OSError):
            if os.stat(NAME, dir_fd=self._directory, follow_symlinks=False).st_ino == self._inode:
                os.unlink(NAME, dir_fd=self._directory)
        with contextlib.suppress(OSError):  # closed meanwhile, by the thread that failed
            self.listening.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Have those who are connected told what became of their calls, and their connections ended."""
        if self._tell < 0:
            return
        os.write(self._tell, b"e")
        if threading.current_thread() is self._thread:
            self._ends_itself = True
        else:
            self._thread.join()
            self._close_all()

    def leave(self) -> None:
        """In a forked child: close the copies of everything."""
        for one in self.sockets:
            one.close()
        self._close_all()

    def _close_all(self) -> None:
        self.listening.close()
        for fd in (self.told, self._tell, self._directory):
            if fd >= 0:
                os.close(fd)
        self.told = self._tell = self._directory = -1


def address(path: str, directory: int) -> str:
    """Return the address of the socket in a spool, also where its path is too long for one."""
    whole = os.path.join(path, NAME)
    return whole if len(os.fsencode(whole)) <= MOST_PATH_BYTES else f"/proc/self/fd/{directory}/{NAME}"


def is_there(path: str | os.PathLike[str]) -> bool:
    """Tell whether a spool has a socket; a dead owner may have left it."""
    try:
        return stat.S_ISSOCK(os.stat(os.path.join(path, NAME), follow_symlinks=False).st_mode)
    except OSError:
        return False


def is_blocked(path: str) -> bool:
    """Tell whether something else stands where the socket of a spool is to be."""
    return os.path.lexists(os.path.join(path, NAME)) and not is_there(path)


def remove_stale(directory: int) -> None:
    """Remove the socket that a dead owner has left. Raises OSError: something else stands there."""
    try:
        mode = os.stat(NAME, dir_fd=directory, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(f"something else stands where the socket {NAME!r} is to be: move it away")
    os.unlink(NAME, dir_fd=directory)


def open_door(path: str, serve: Callable[[Door], object]) -> Door | None:
    """Return the door of a spool; None, with a warning, where there can be none."""
    try:
        return Door(path, serve)
    except (OSError, QflowError) as error:
        _logger.warning("%s: there is no door for other processes: %s", path, error, spool=path, event="no_door")
        return None
