"""The protocol of the local door, carried by an exchange: bytes of its frames as metadata, in pieces of any length.

A piece begins with a byte: 0 = bytes follow; 1 = the sender ends the session, and the other side is to do the same
(gRPC has a server wait until its client has); 2 = nothing, sent where there is nothing else to be sent. Who hears
nothing for long takes the other side for gone: a host that has lost its power says nothing of that.

On the side of the owner they go to the socket in the spool, on that of the client to one of a pair of sockets; so the
local door and its clients, for threads and for tasks, serve other hosts as they are.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakSet

import pyarrow as pa
import pyarrow.flight as pf

from qflow.errors import BrokerClosed, ForkedProcess, InvalidArgument, NotFound, QflowError, StorageError
from qflow.flight.owner import Owner
from qflow.flight.trust import Trust, what_is_wrong
from qflow.remote.client.connecting import gone, open_socket, when_let_in
from qflow.remote.client.sockets import failed
from qflow.starting import start

PIECE_BYTES = 2**16
"""At most: a piece is heard of when all of it has come, within `SILENT_S`, also on a slow network."""
_BYTES, _END, _NOTHING = b"\0", b"\1", b"\2"
PING_S, SILENT_S = 10.0, 45.0
"""After so long without anything else, `nothing` is sent; after so long without a piece, the other side is gone."""
_LOOK_S = 1.0
"""As often a client asks whether it is: threads that are within gRPC cannot, for it holds back what is not taken."""
COMMAND = b'{"session": 1}'
_CONNECT_S = 10.0
_EXIT_S = 1.0
"""As long the end of a process waits for sessions to end."""


class Tunnels:
    """The exchanges of a server. Thread-safe."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.clock = time.monotonic
        self._lock = threading.Lock()
        self._exchanges: dict[socket.socket, _Heard] = {}
        """What has been heard of the client behind each socket."""
        self._is_closed = False

    def carry(self, reader: Any, writer: Any, check: Callable[[], None]) -> None:
        """Carry one exchange to the socket of the spool and back, until either ends it.

        Raises:
            NotFound: the spool has no door. BrokerClosed: `close` has ended it. QflowError: there can be no more
                threads. What `check` raises, which is called before each piece.
        """
        path = self._owner.path
        try:
            inner = when_let_in(partial(open_socket, path), path, _CONNECT_S)
        except QflowError as error:
            raise NotFound(
                f"sessions go through the door of the spool, which its owner has not opened: {error}"
            ) from error
        with inner:
            inner.settimeout(None)
            wrong: list[Exception] = []
            heard = _Heard(self.clock)
            self._add(inner, heard)
            down = threading.Thread(target=_bring, args=(inner, writer, check, wrong), daemon=True)
            try:
                start(down)
                _take(reader, inner, heard, check, wrong)
            finally:
                _end(inner)
                if down.ident is not None:  # it was started
                    down.join()  # before gRPC forgets what it writes to
                with self._lock:
                    self._exchanges.pop(inner, None)
        if wrong:
            raise wrong[0]
        if self._is_closed:
            raise BrokerClosed("the server has ended: connect again when it is back")

    def _add(self, inner: socket.socket, heard: _Heard) -> None:
        with self._lock:
            self._owner.check_open()
            self._exchanges[inner] = heard

    def sweep(self) -> None:
        """Let go of what clients hold that are gone: gRPC may never tell, nor return from what it sends to them."""
        with self._lock:
            for inner, heard in self._exchanges.items():
                if heard.is_gone():
                    _end(inner)

    def close(self) -> None:
        """End all exchanges; their clients are told why."""
        self._is_closed = True
        with self._lock:
            for inner in self._exchanges:
                _end(inner)


class _Heard:
    """Since when one thread waits for a piece, which another one looks at."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: float | None = None

    def piece(self, reader: Any) -> Any:
        """Return the next piece. Raises as `read_chunk`."""
        self._since = self._clock()
        try:
            return reader.read_chunk().app_metadata
        finally:
            self._since = None

    def is_gone(self) -> bool:
        """Nothing has come for long."""
        since = self._since
        return since is not None and self._clock() - since > SILENT_S


def _pieces(one: socket.socket) -> Iterator[bytes]:
    """Yield what is to be sent of a socket, until that ends."""
    poll = select.poll()
    poll.register(one, select.POLLIN)
    while True:
        if not poll.poll(PING_S * 1000):
            yield _NOTHING
        elif data := _received(one):
            yield _BYTES + data
        else:
            return


def _take(reader: Any, inner: socket.socket, heard: _Heard, check: Callable[[], None], wrong: list[Exception]) -> None:
    """Bring what the client sends to the socket; it has sent all when this returns, or has left."""
    try:
        while True:
            piece = heard.piece(reader)
            if piece is None:
                continue
            data = memoryview(piece)
            if data[:1] == _END:
                return
            if wrong:
                continue
            check()
            if data[:1] == _BYTES:
                inner.sendall(data[1:])
    except (StopIteration, BrokenPipeError, ConnectionError):
        pass
    except (pf.FlightUnauthenticatedError, QflowError) as error:
        wrong.append(error)
    except pa.ArrowException:
        pass  # the client has left


def _bring(inner: socket.socket, writer: Any, check: Callable[[], None], wrong: list[Exception]) -> None:
    """Bring what comes from the socket to the client, and at last that it is the end."""
    try:
        for piece in _pieces(inner):
            check()
            writer.write_metadata(piece)
        _end(inner)
    except (pf.FlightUnauthenticatedError, QflowError) as error:
        wrong.append(error)
        _end(inner)
    except pa.ArrowException:
        _end(inner)  # the client has left
    with suppress(pa.ArrowException):
        writer.write_metadata(_END)


def _received(one: socket.socket) -> bytes:
    try:
        return one.recv(PIECE_BYTES)
    except OSError:
        return b""


def _end(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


class Outlet:
    """The client's end: a socket that is as good as one that is connected to the owner.

    Two threads carry what goes through it, until either side has ended; a third one looks whether the owner is there.
    """

    def __init__(
        self, client: pf.FlightClient, options: pf.FlightCallOptions, target: str, trust: Trust | None = None
    ) -> None:
        self._client = client
        self._options = options
        self.target = target
        self._trust = trust or Trust()
        try:
            ends = socket.socketpair()
        except OSError as error:
            raise failed(error, target) from error
        self.socket, self._inner = ends
        """For a connection, which closes it."""
        self._heard = _Heard(time.monotonic)
        self.error: pa.ArrowException | None = None
        """Why it has ended, if it was not the client that ended it."""
        self._thread = threading.Thread(target=self._carry, name="qflow-flight", daemon=True)
        start(self._thread)
        _outlets.add(self)

    @property
    def is_open(self) -> bool:
        """The session has not ended, and gRPC carries it."""
        return self._inner.fileno() >= 0

    def end(self) -> threading.Thread:
        """End the session, as a client does; return the thread that ends when it has."""
        _end(self._inner)
        return self._thread

    def reason(self) -> QflowError | None:
        """Return why a session has ended that had begun; None where it ended by itself."""
        return None if self.error is None else explained(self.error, self.target)

    def explained(self) -> QflowError:
        """Return the error for a client whose session could not begin."""
        if self.error is None:  # the owner ended it
            return gone(self.target)
        if isinstance(self.error, pf.FlightUnavailableError):
            wrong = what_is_wrong(self.target, self._trust, may_guess=True)
            if wrong is not None:
                return InvalidArgument(wrong)
        return explained(self.error, self.target)

    def _carry(self) -> None:
        with self._inner:
            try:
                writer, reader = self._client.do_exchange(pf.FlightDescriptor.for_command(COMMAND), self._options)
            except pa.ArrowException as error:
                self.error = error
                _end(self._inner)
                return
            receiving = threading.Thread(target=self._receive, args=(reader,), name="qflow-flight", daemon=True)
            sending = threading.Thread(target=self._send, args=(writer,), name="qflow-flight", daemon=True)
            receiving.start()
            sending.start()
            while receiving.is_alive():
                if self._heard.is_gone():
                    self.error = pf.FlightUnavailableError(f"nothing has come for {SILENT_S:g} s")
                    reader.cancel()
                receiving.join(_LOOK_S)
            _end(self._inner)
            sending.join()
            with suppress(pa.ArrowException):  # why it has ended is known
                writer.close()
            self._client.close()

    def _receive(self, reader: Any) -> None:
        """Bring what the owner sends to the socket, until one of both sides has left."""
        try:
            while True:
                piece = self._heard.piece(reader)
                if piece is None:
                    continue
                data = memoryview(piece)
                if data[:1] == _END:
                    with suppress(OSError):
                        self._inner.shutdown(socket.SHUT_RD)  # has what is sent end, too; the reason comes behind
                elif data[:1] == _BYTES:
                    self._inner.sendall(data[1:])
        except (StopIteration, OSError):
            pass
        except pf.FlightCancelledError as error:
            self.error = self.error or error  # why it was cancelled
        except pa.ArrowException as error:
            self.error = error

    def _send(self, writer: Any) -> None:
        try:
            for piece in _pieces(self._inner):
                writer.write_metadata(piece)
            writer.write_metadata(_END)  # not `done_writing`: gRPC aborts the process if the read ends meanwhile
        except pa.ArrowException as error:
            self.error = self.error or error
            _end(self._inner)


_outlets: WeakSet[Outlet] = WeakSet()
_left_open: list[str] = []
"""Where sessions led that were open when this process was forked."""


def _after_fork() -> None:
    """The sessions are the parent's, and go on; gRPC without its threads does not."""
    _left_open.extend(outlet.target for outlet in _outlets if outlet.is_open)
    _outlets.clear()


os.register_at_fork(after_in_child=_after_fork)


def check_usable(target: str) -> None:
    """Refuse what would abort the process, or wait in vain. Raises ForkedProcess."""
    if _left_open:
        raise ForkedProcess(
            f"cannot connect to {target}: this process was forked while a connection to {_left_open[0]} was open, and "
            "gRPC works in no such child: start it by spawn or forkserver, or connect in the children alone"
        )


def end_sessions() -> None:
    """End all before Python ends their threads: within gRPC that aborts the process, sometimes."""
    deadline = time.monotonic() + _EXIT_S
    for thread in [outlet.end() for outlet in list(_outlets)]:
        thread.join(max(0.0, deadline - time.monotonic()))


def explained(error: pa.ArrowException, target: str) -> QflowError:
    """Return the error for a client whose session could not begin."""
    from qflow.flight.words import error_of

    found = error_of(error)
    text = str(error).partition(". Detail: ")[0].partition(" gRPC client debug context")[0]
    text = text.rpartition(", with message: ")[2].rstrip(" .")
    if found is not None:
        return found
    if isinstance(error, pf.FlightUnauthenticatedError):
        return InvalidArgument(f"{target} lets nobody in without its token: {text}")
    if isinstance(error, pf.FlightUnavailableError):
        return StorageError(f"nobody answers at {target}: {text}; look whether `qflow serve --flight` runs there")
    if isinstance(error, pa.ArrowNotImplementedError):
        return StorageError(
            f"at {target} there is no door of qflow: {text}; look whether `qflow serve --flight` runs there, and "
            "whether a proxy answers for it"
        )
    return StorageError(f"the door at {target} failed: {text}")
