"""The door as `qflow serve` runs it, among others in an event loop."""

from __future__ import annotations

import asyncio
import ssl as tls
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import attrs

from qflow.aio.broker import AsyncBroker
from qflow.errors import QflowError
from qflow.flight.access import read_tokens
from qflow.flight.server import LAST_WORDS_S, Server, serve
from qflow.loggers import get_logger
from qflow.serving.addresses import Address
from qflow.serving.certificates import Certificates
from qflow.serving.users import Users

_LOOK_S = 0.02
_logger = get_logger("qflow")


@attrs.frozen
class _Listening:
    address: Address

    def getsockname(self) -> tuple[str, int]:
        return self.address.host, self.address.port


class FlightDoor:
    """A `serving.doors.Door`. Its calls run in threads of gRPC."""

    def __init__(self, server: Server, token_file: Path | None, certificates: Certificates | None) -> None:
        self.server = server
        self._token_file = token_file
        self._certificates = certificates
        self._opened_with = None if certificates is None else certificates.contents()

    @property
    def sockets(self) -> Sequence[_Listening]:
        """Where it listens."""
        return [_Listening(self.server.address)]

    async def drain(self, grace_s: float) -> None:
        """Begin nothing any more, and return when what has begun is done, or after so many seconds.

        Sessions end as callers of the door in the spool do, which they go through, when that is drained.
        """
        self.server.begin_drain()
        await self._until_ended(grace_s)

    async def close(self) -> None:
        """End everything at once; nothing that was answered is lost. Twice is fine."""
        self.server.begin_close()
        await self._until_ended(LAST_WORDS_S)
        self.server.close(0.0)

    async def _until_ended(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.server.ended and time.monotonic() < end:
            await asyncio.sleep(_LOOK_S)

    def reload(self, *, users: Users | None, ssl: tls.SSLContext | None) -> None:
        """Read the tokens again; calls under way whose token is not among them end. Certificates stay: gRPC takes no
        others while it listens, which is told where they are others."""
        if self._token_file is not None:
            try:
                self.server.access.tokens = read_tokens(self._token_file)
            except QflowError as error:
                _logger.warning("the tokens stay as they were: %s", error)
        with suppress(OSError):  # they have been read for other doors just now
            if self._certificates is not None and self._certificates.contents() != self._opened_with:
                _logger.warning("Arrow Flight keeps the certificates of its start: restart the server for the new ones")


async def open_door(
    broker: AsyncBroker,
    *,
    host: str,
    port: int,
    ssl: tls.SSLContext | None,
    users: Users | None,
    certificates: Certificates | None = None,
    token_file: Path | None = None,
) -> FlightDoor:
    """Open it; see `server.serve`. Users do not matter: who has a token may do everything."""
    server = serve(broker.broker, host=host, port=port, certificates=certificates, token_file=token_file)
    return FlightDoor(server, token_file, certificates)
