"""`qflow` whose door for AMQP is a fake: `python fake_serve.py serve SPOOL --amqp 127.0.0.1:0`.

A client sends a line `USER PASSWORD` and is answered with the name it has, or `no`. What the door is told, it prints.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import os
import ssl
import sys
import types
from collections.abc import Sequence
from typing import Any

from qflow.aio import AsyncBroker
from qflow.cli.main import main
from qflow.errors import BrokerFailed
from qflow.serving.certificates import Renewable
from qflow.serving.logins import Logins
from qflow.serving.users import Users
from qflow.storage.log.handing import Handing


def say(text: str) -> None:
    """Write a line in one: another thread writes where the doors listen."""
    os.write(sys.stdout.fileno(), f"{text}\n".encode())


class FakeDoor:
    """A door that is as fast as can be, or with FAKE_DRAIN=endless one that is never drained.

    With FAKE_LOG=fails the broker has failed when the doors listen. With FAKE_HOLDS=NUMBER it holds so many objects
    by then.
    """

    def __init__(self, users: Users | None) -> None:
        self.logins = Logins(users)
        self.server: asyncio.Server
        self.tls: Renewable | None = None

    @property
    def sockets(self) -> Sequence[Any]:
        return self.server.sockets

    async def drain(self, grace_s: float) -> None:
        say(f"drain {grace_s:g}")
        if os.environ.get("FAKE_DRAIN") == "endless":
            await asyncio.Event().wait()

    async def close(self) -> None:
        self.server.close()
        self.logins.close()
        say("closed")

    def reload(self, *, users: Users | None, ssl: ssl.SSLContext | None) -> None:
        self.logins.users = users
        if self.tls is not None and ssl is not None:
            self.tls.renew(ssl)
        names = " ".join(users.accounts) if users else "guest"
        say(f"reloaded {names}{' with certificates' if ssl else ''}")

    async def serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            if line := await reader.readline():
                name, _, password = line.decode().strip().partition(" ")
                user = await self.logins.check(name, password, writer.get_extra_info("peername")[0])
                writer.write(f"{user.name if user else 'no'}\n".encode())
                await writer.drain()
        writer.close()


def fail(_: Handing) -> None:
    raise BrokerFailed("a commit failed")


def hold(count: int) -> None:
    """Hold so many objects, and tell how often the garbage collector looks at all of them, now and in the end."""
    looks: list[int] = []
    gc.callbacks.append(lambda phase, info: looks.append(info["generation"]) if phase == "start" else None)
    held.extend([] for _ in range(count))
    say(f"looked at all {looks.count(2)} times")
    atexit.register(lambda: say(f"{len(gc.get_objects()) // count} of all to look at"))


held: list[list[Any]] = []


async def serve(
    broker: AsyncBroker, *, host: str, port: int, ssl: ssl.SSLContext | None, users: Users | None
) -> FakeDoor:
    await broker.declare_queue("served")
    if os.environ.get("FAKE_LOG") == "fails":
        Handing.check_usable = fail  # type: ignore[method-assign]
    if "FAKE_HOLDS" in os.environ:
        hold(int(os.environ["FAKE_HOLDS"]))
    door = FakeDoor(users)
    door.tls = None if ssl is None else Renewable(ssl)
    door.server = await asyncio.start_server(door.serve_client, host, port, ssl=door.tls and door.tls.listening)
    return door


if __name__ == "__main__":
    module: Any = types.ModuleType("qflow.amqp.server.server")
    module.serve = serve
    sys.modules["qflow.amqp.server.server"] = module
    main()
