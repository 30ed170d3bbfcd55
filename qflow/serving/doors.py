"""Doors to the network, in one process: opened, told of new users and certificates, drained on a signal, closed.

A door is a server of one protocol at one address. What the signals do:

    SIGTERM, SIGINT    the first drains all doors, the second ends that at once, others do nothing
    SIGHUP             users and certificates are read again; if something is wrong with them, the old ones stay
"""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from typing import Any, Protocol

import attrs

from qflow.errors import InvalidArgument, QflowError
from qflow.named_tuples import NamedTuple
from qflow.serving import notify as manager
from qflow.serving.addresses import Address, occupy
from qflow.serving.certificates import Validity
from qflow.serving.users import Users

LOOK_S = 1.0
"""Between looks whether the service can go on."""
STOPS = (signal.SIGINT, signal.SIGTERM)


class Door(Protocol):
    """A server that listens."""

    @property
    def sockets(self) -> Sequence[Any]:
        """Where it listens; each has `getsockname()`."""

    async def drain(self, grace_s: float) -> None:
        """Take no more clients, tell those there are, and return when all have gone, or after so many seconds."""

    async def close(self) -> None:
        """Close all connections at once; nothing that was confirmed is lost. Calling it again does nothing."""

    def reload(self, *, users: Users | None, ssl: ssl.SSLContext | None) -> None:
        """Use these for the logins and connections to come; the context may be the same, with other certificates."""


class Secrets(NamedTuple):
    """What is read at the start, and again on SIGHUP."""

    users: Users | None
    ssl: ssl.SSLContext | None
    """None where no door has TLS."""
    validity: Validity | None = None
    """Of the certificate of the doors with TLS; None: there are none, or it is not known."""


@attrs.frozen
class Opening:
    """A door that is to be opened.

    Args:
        name: what it is called in the line that says where it listens.
        address: where it is to be.
        open: returns it when it listens; raises `OSError` if it cannot listen there.
        has_tls: it is opened with certificates.
    """

    name: str
    address: Address
    open: Callable[[Address, Users | None, ssl.SSLContext | None], Awaitable[Door]]
    has_tls: bool = False


@attrs.define(eq=False, slots=False)
class Service:
    """Doors in one process, from the first that is opened to the signal that ends them all.

    Args:
        openings: the doors.
        read: reads users and certificates; called in a thread. Raises `QflowError` or `OSError` if they are wrong.
        grace_s: seconds that clients have to finish, once a signal came.
        tell: takes a line for each address that is listened at.
        warn: takes a sentence for people.
        notify: tells the service manager; called in a thread.
        check: raises what ends the service when it cannot go on; called once a second, in the event loop's thread.
    """

    _openings: Sequence[Opening]
    _read: Callable[[], Secrets]
    _grace_s: float = attrs.field(kw_only=True)
    _tell: Callable[[str], object] = attrs.field(kw_only=True)
    _warn: Callable[[str], object] = attrs.field(kw_only=True)
    _notify: Callable[[str], None] = attrs.field(default=manager.notify, kw_only=True)
    _check: Callable[[], object] = attrs.field(default=lambda: None, kw_only=True)
    _doors: list[tuple[Opening, Door]] = attrs.field(factory=list, init=False)
    _stops: asyncio.Queue[signal.Signals] = attrs.field(factory=asyncio.Queue, init=False)
    _is_to_reload: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)
    _validity: Validity | None = attrs.field(default=None, init=False)
    _is_read: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)  # there is another validity

    def receive(self, number: signal.Signals) -> None:
        """Do what a signal asks for; in the thread of the event loop."""
        if number in STOPS:
            self._stops.put_nowait(number)
        else:
            self._is_to_reload.set()

    async def run(self) -> signal.Signals:
        """Open all doors, and return when they are closed: the signal that ended them.

        SIGINT, SIGTERM and SIGHUP are the event loop's until that is closed: no signal cuts off what closes the spool
        after the doors.

        Raises:
            InvalidArgument: it cannot be listened at an address, or users or certificates are wrong.
            QflowError: what `check` raises; the doors are closed without a drain.
        """
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            for number in (*STOPS, signal.SIGHUP):
                loop.add_signal_handler(number, self.receive, number)
            secrets = await asyncio.to_thread(self._read)
            self._validity = secrets.validity
            for opening in self._openings:
                door = await self._opened(opening, secrets)
                stack.push_async_callback(door.close)
                self._doors.append((opening, door))
            for opening, door in self._doors:
                for listening in door.sockets:
                    self._tell(f"{opening.name} on {Address(*listening.getsockname()[:2])}")
            await asyncio.to_thread(self._notify, manager.READY)
            number = await self._until_stopped()
            await asyncio.to_thread(self._notify, manager.STOPPING)
            return await self._drained(number)

    async def _opened(self, opening: Opening, secrets: Secrets) -> Door:
        try:
            return await opening.open(opening.address, secrets.users, secrets.ssl if opening.has_tls else None)
        except OSError as error:
            raise _cannot_listen(opening.name, opening.address, error) from error

    async def _until_stopped(self) -> signal.Signals:
        """Return the first signal that asks to stop; reload at the others meanwhile, and look whether it can go on."""
        works = (self._reload_when_asked, self._until_failed, self._tell_of_certificate)
        beside = [asyncio.create_task(work()) for work in works]
        stopping = asyncio.create_task(self._stops.get())
        try:
            await asyncio.wait({*beside, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in beside:
                if task.done():
                    task.result()  # raises: it does not return
            return stopping.result()
        finally:
            await _cancelled([*beside, stopping])

    async def _until_failed(self) -> None:
        while True:
            self._check()
            await asyncio.sleep(LOOK_S)

    async def _reload_when_asked(self) -> None:
        while True:
            await self._is_to_reload.wait()
            self._is_to_reload.clear()
            await asyncio.to_thread(self._notify, manager.reloading())
            try:
                secrets = await asyncio.to_thread(self._read)
            except (QflowError, OSError) as error:
                self._warn(f"nothing is reloaded, what was loaded before stays: {' '.join(str(error).split())}")
            else:
                for opening, door in self._doors:
                    door.reload(users=secrets.users, ssl=secrets.ssl if opening.has_tls else None)
                self._warn("users, tokens and certificates are read anew")
                self._validity = secrets.validity
                self._is_read.set()
            await asyncio.to_thread(self._notify, manager.READY)

    async def _tell_of_certificate(self) -> None:
        """Warn of a certificate that is not valid, or soon will be no more: when it is read, and once a day."""
        while True:
            self._is_read.clear()
            rest_s = None
            if self._validity is not None:
                warning, rest_s = self._validity.warning(time.time()), self._validity.rest_s(time.time())
                if warning is not None:
                    self._warn(warning)
            with suppress(TimeoutError):
                async with asyncio.timeout(rest_s):
                    await self._is_read.wait()

    async def _drained(self, number: signal.Signals) -> signal.Signals:
        """Drain all doors; return the signal that was the last."""
        self._warn(f"{number.name}: clients have {self._grace_s:g} s to finish; a second signal ends at once")
        drains = [asyncio.create_task(door.drain(self._grace_s)) for _, door in self._doors]
        draining = asyncio.create_task(_all_of(drains))
        stopping = asyncio.create_task(self._stops.get())
        try:
            await asyncio.wait({draining, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                return stopping.result()
            draining.result()
            return number
        finally:
            await _cancelled([draining, stopping, *drains])


def check_free(places: Iterable[tuple[str, Address]]) -> None:
    """Check that doors can listen at these addresses beside each other. Raises InvalidArgument: one cannot."""
    with ExitStack() as stack:
        for name, address in places:
            try:
                stack.enter_context(occupy(address))
            except OSError as error:
                raise _cannot_listen(name, address, error) from error


def _cannot_listen(name: str, address: Address, error: OSError) -> InvalidArgument:
    # The loop of asyncio puts the address into the text a second time.
    number = error.errno or 0
    what = os.strerror(number) if number > 0 else error.strerror or str(error)
    return InvalidArgument(f"{name} cannot listen on {address}: {what.lower()}")


async def _all_of(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for all tasks; then raise the first error there was."""
    await asyncio.wait(tasks)
    for task in tasks:
        task.result()


async def _cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and return when they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
