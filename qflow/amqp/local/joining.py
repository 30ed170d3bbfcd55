"""Clients: finding the local server of a spool, and starting it where there is none."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

import attrs

import qflow.errors
from qflow import children
from qflow.amqp.local.place import LOG, Place, Where
from qflow.amqp.local.settings import LocalSettings
from qflow.errors import QflowError, StorageError

START_S = 30.0
"""A server takes clients after so many seconds at most, another one's end included."""
PAUSE_S = 0.02
RETRY_S = 1.0
"""A server that has published where it listens, and refuses, is tried for so long: it may have been killed just now."""
BUSY = "busy"
"""The kind of failure that another server was there first."""

T = TypeVar("T")


def join(settings: LocalSettings, connect: Callable[[Where], T], errors: tuple[type[Exception], ...]) -> T:
    """Return what `connect` makes of the server of a spool, which is started if there is none.

    Any number of processes and threads may do so at once: one of them starts it, the others wait. A server that ends,
    or is killed, before the client is connected is followed by another one.

    Args:
        settings: the spool, and how a server that is started here serves it.
        connect: connects to a server. It is called again where it raises one of `errors` and the server has gone.

    Raises:
        SpoolInUse: another process owns the spool. Other `QflowError`s: the server cannot open it, as `qflow.open`.
        TimeoutError: no server was there in 30 s. ConnectionError: one was killed before it listened. Other `OSError`s:
            the spool's directory cannot be used.
        What `connect` raises, where the server stays.
    Cost: a few system calls beside `connect`; where a server is started, a start of Python and what `qflow.open` costs.
    """
    place = Place(settings.spool)
    place.make()
    end = time.monotonic() + START_S
    tries = _Tries()
    while True:
        seen = place.look()
        if seen.where is not None:
            try:
                return connect(seen.where)
            except errors:
                if not tries.again(seen.where):
                    raise
        elif not seen.is_served:
            with place.starting() as is_first:
                if is_first and not place.look().is_served:
                    _start(settings, place, end)
                    continue
        if time.monotonic() > end:
            raise _too_late(place)
        time.sleep(PAUSE_S)


def _too_late(place: Place) -> TimeoutError:
    return TimeoutError(f"no server of {place.spool} took clients within {START_S:g} s; see {place.path(LOG)}")


@attrs.define
class _Tries:
    """How long a server has refused a client."""

    where: Where | None = None
    since_s: float = 0.0

    def again(self, where: Where) -> bool:
        """Note that a server has refused; tell whether to try once more."""
        now = time.monotonic()
        if where != self.where:
            self.where, self.since_s = where, now
        return now - self.since_s < RETRY_S


def _start(settings: LocalSettings, place: Place, end_s: float) -> None:
    """Start a server, and wait until it listens, or has failed. Raises as `join`.

    It is a process of its own: it has no terminal, and what it keeps open of this one is the pipe that it says one line
    to, and closes.
    """
    options = attrs.asdict(settings).items()
    given = json.dumps({name: value for name, value in options if name != "spool" and value is not None})
    command = children.command("qflow.amqp.local", settings.spool, given)
    log = os.open(place.path(LOG), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=_environment(),
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            said = _line(process.stdout.fileno(), end_s)
            if said is None:
                process.kill()  # what has not begun to be a server: one that has is a child of it
                raise _too_late(place)
    finally:
        os.close(log)
    if not said:
        raise ConnectionError(f"the server of {settings.spool} ended before it listened; {place.path(LOG)} may say why")
    failure = json.loads(said)
    if failure and failure["kind"] != BUSY:
        raise error_of(**failure)


def _line(pipe: int, end_s: float) -> bytes | None:
    """Read what a process says until it closes its end; None if it takes too long."""
    said = b""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while True:
        if not poll.poll(1000 * max(0.0, end_s - time.monotonic())):
            return None
        more = os.read(pipe, 65536)
        if not more:
            return said
        said += more


def _environment() -> dict[str, str]:
    """Return the environment of the server: it has to find this package as this process did."""
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (children.PACKAGE, known)))}


def error_of(kind: str, text: str) -> QflowError:
    """Return the error that a server has failed with; what is none of this package is of the system."""
    error: QflowError = getattr(qflow.errors, kind, StorageError)(text)
    return error
