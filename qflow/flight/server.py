"""The server: calls of Arrow Flight brought to who does them, errors brought back as sentences.

Calls run in threads of gRPC, one each while it is under way.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as pf

from qflow.broker import Broker
from qflow.errors import InvalidArgument
from qflow.flight import reading, writing
from qflow.flight.access import NAME, Access, Bearer, Bearers, read_tokens
from qflow.flight.actions import ACTIONS, House, act
from qflow.flight.leases import Leases
from qflow.flight.owner import Owner
from qflow.flight.tunnel import Tunnels
from qflow.flight.words import Command, as_json, plainly
from qflow.serving.addresses import Address, is_of_this_machine_alone, occupy
from qflow.serving.certificates import Certificates
from qflow.starting import start

SWEEP_S = 1.0
LAST_WORDS_S = 2.0
"""Calls under way have so long to end when the door is closed."""


class _Flights(pf.FlightServerBase):  # type: ignore[misc]
    """What gRPC calls."""

    def __init__(self, location: str, house: House, tunnels: Tunnels, access: Access, **options: Any) -> None:
        self._house = house
        self._owner = house.owner
        self._tunnels = tunnels
        super().__init__(location, middleware={NAME: Bearers(access)}, **options)

    def _check_of(self, context: pf.ServerCallContext) -> Callable[[], None]:
        """Return what raises, in the middle of a call, what ends it."""
        bearer: Bearer = context.get_middleware(NAME)

        def check() -> None:
            self._owner.check_staying()
            bearer.check()

        return check

    def _stay_of(self, context: pf.ServerCallContext) -> Callable[[], None]:
        """Return what does so, and raises also where the client has left."""
        check = self._check_of(context)

        def stay() -> None:
            check()
            if context.is_cancelled():
                raise pf.FlightCancelledError("the client has left")

        return stay

    def list_flights(self, context: pf.ServerCallContext, criteria: bytes) -> Iterator[pf.FlightInfo]:
        with plainly("ListFlights"):
            self._owner.check_open()
            yield from reading.list_infos(self._owner)

    def get_flight_info(self, context: pf.ServerCallContext, descriptor: pf.FlightDescriptor) -> pf.FlightInfo:
        with plainly("GetFlightInfo"):
            self._owner.check_open()
            return reading.info_of(self._owner, descriptor)

    def get_schema(self, context: pf.ServerCallContext, descriptor: pf.FlightDescriptor) -> pf.SchemaResult:
        with plainly("GetSchema"):
            self._owner.check_open()
            return pf.SchemaResult(reading.info_of(self._owner, descriptor).schema)

    def do_get(self, context: pf.ServerCallContext, ticket: pf.Ticket) -> pf.FlightDataStream:
        with plainly("DoGet"):
            self._owner.check_open()
            asked = Command.parse(ticket.ticket, "the ticket")
            return reading.data_of(self._owner, asked, self._stay_of(context), plainly)

    def do_put(
        self,
        context: pf.ServerCallContext,
        descriptor: pf.FlightDescriptor,
        reader: pf.MetadataRecordBatchReader,
        writer: pf.FlightMetadataWriter,
    ) -> None:
        with plainly("DoPut"):
            self._owner.check_open()
            if descriptor.command is None:
                raise InvalidArgument(f"a put has a command in JSON, with one of {', '.join(writing.KINDS)}")
            command = Command.parse(descriptor.command, "the command")
            stay = self._stay_of(context)
            with self._owner.room.share(stay) as share:
                batches = writing.Batches(reader.schema, _batches(reader, stay), share)
                writing.write(self._owner, command, batches, writing.answering(writer))

    def do_exchange(
        self,
        context: pf.ServerCallContext,
        descriptor: pf.FlightDescriptor,
        reader: pf.MetadataRecordBatchReader,
        writer: pf.MetadataRecordBatchWriter,
    ) -> None:
        with plainly("DoExchange"):
            self._owner.check_open()
            if Command.parse(descriptor.command or b"", "the command").number("session") != 1:
                raise InvalidArgument(
                    'an exchange has the command {"session": 1}: this owner speaks that version alone'
                )
            self._tunnels.carry(reader, writer, self._check_of(context))

    def list_actions(self, context: pf.ServerCallContext) -> list[pf.ActionType]:
        return [pf.ActionType(name, action.words) for name, action in ACTIONS.items()]

    def do_action(self, context: pf.ServerCallContext, action: pf.Action) -> list[pf.Result]:
        with plainly("DoAction"):
            self._owner.check_open()
            body = action.body.to_pybytes() if action.body is not None else b""
            answer = act(self._house, action.type, Command.parse(body, f"action {action.type!r:.100}"))
            return [pf.Result(as_json(answer))]


def _batches(reader: pf.MetadataRecordBatchReader, stay: Callable[[], None]) -> Iterator[pa.RecordBatch]:
    for chunk in reader:
        stay()
        if chunk.data is not None:
            yield chunk.data
        del chunk  # before the next one is read


def _keep(flights: pf.FlightServerBase) -> None:
    """Have a server never destroyed: that would wait for clients that do not read, without end."""
    for reference in weakref.getweakrefs(flights):
        if isinstance(reference.__callback__, weakref.finalize):
            reference.__callback__.detach()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(flights))


class Server:
    """A door that is open; `close`, or `with`, closes it. Thread-safe."""

    def __init__(
        self,
        broker: Broker,
        address: Address,
        *,
        access: Access,
        certificates: Certificates | None = None,
    ) -> None:
        """Listen; see `serve`."""
        self.access = access
        self._owner = Owner(broker)
        self._leases = Leases(broker.engine.spool.place, self._owner.uuid, wall=broker.engine.spool.clock)
        self._tunnels = Tunnels(self._owner)
        kind = "tcp" if certificates is None else "tls"
        options = {} if certificates is None else _tls(certificates)
        self._flights = _Flights(
            f"grpc+{kind}://{address}", House(self._owner, self._leases), self._tunnels, access, **options
        )
        self._host = address.host
        self._pid = os.getpid()
        self._ending: threading.Thread | None = None
        self._lock = threading.Lock()
        self._sweeper = threading.Thread(target=self._sweep, name="qflow-flight", daemon=True)
        start(self._sweeper)
        atexit.register(self.close)  # before that of pyarrow, which waits for all clients

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._flights.port)

    @property
    def address(self) -> Address:
        """Where it listens."""
        return Address(self._host, self.port)

    @property
    def ended(self) -> bool:
        """It listens no more, and no call is under way."""
        return self._ending is not None and not self._ending.is_alive()

    def begin_drain(self) -> None:
        """Begin nothing any more; who follows a stream is told."""
        self._owner.draining.set()
        with self._lock:
            if self._ending is None:
                ending = threading.Thread(target=self._flights.shutdown, name="qflow-flight-end", daemon=True)
                start(ending)
                self._ending = ending

    def begin_close(self) -> None:
        """End all reads and sessions, and listen no more."""
        self._owner.leaving.set()
        self.begin_drain()
        self._tunnels.close()

    def close(self, last_words_s: float = LAST_WORDS_S) -> None:
        """End all reads and sessions, answer the calls under way, and listen no more. Calling it again does nothing.

        A client that does not read what it has asked for is left behind after a moment. In a child that was forked,
        also at its end, it does nothing: what that has are copies, and the sessions are the parent's.
        """
        if os.getpid() != self._pid:
            _keep(self._flights)
            return
        self.begin_close()
        assert self._ending is not None
        self._ending.join(last_words_s)
        if self._ending.is_alive():
            _keep(self._flights)
        self._sweeper.join()
        self._leases.close()
        atexit.unregister(self.close)

    def _sweep(self) -> None:
        """Let go, now and then, of groups whose leases are over, and of sessions whose clients are gone."""
        while not self._owner.leaving.wait(SWEEP_S):
            self._leases.sweep()
            self._tunnels.sweep()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tls(certificates: Certificates) -> dict[str, Any]:
    """Return the certificates as gRPC takes them. Raises InvalidArgument: they are none."""
    certificates.context()  # says what is wrong with them
    pair = pf.CertKeyPair(certificates.cert.read_bytes(), certificates.key.read_bytes())
    if certificates.ca is None:
        return {"tls_certificates": [pair]}
    return {"tls_certificates": [pair], "verify_client": True, "root_certificates": certificates.ca.read_bytes()}


def serve(
    broker: Broker,
    *,
    host: str = "127.0.0.1",
    port: int = 7420,
    certificates: Certificates | None = None,
    token_file: Path | None = None,
) -> Server:
    """Open a door for Arrow Flight on a broker; it is open when this returns.

    Args:
        port: 0 = any that is free; see `Server.port`.
        certificates: of the server; None = without TLS.
        token_file: tokens of which a client must show one, a line each; None = everybody on this machine is let in.

    Raises:
        InvalidArgument: certificates or tokens are wrong, or missing where others than this machine can come in.
        OSError: it cannot be listened there.
    """
    address = Address(host, port)
    check_address(address, has_tls=certificates is not None, has_tokens=token_file is not None)
    access = Access(None if token_file is None else read_tokens(token_file))
    occupy(address).close()  # gRPC would not say why it cannot listen
    try:
        return Server(broker, address, access=access, certificates=certificates)
    except pa.ArrowException as error:
        raise InvalidArgument(f"Arrow Flight cannot listen on {address}: {error}") from error


def check_address(address: Address, *, has_tls: bool, has_tokens: bool) -> None:
    """Refuse an address that others than this machine can reach, without tokens and TLS.

    Raises:
        InvalidArgument: it is one, or it is no address of this machine.
    """
    if not (has_tls and has_tokens) and not is_of_this_machine_alone(address):
        raise InvalidArgument(
            f"{address} can be reached by others than this machine, so Arrow Flight needs --token-file, and --cert and "
            "--key for TLS, there"
        )
