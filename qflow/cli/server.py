"""What `qflow serve` runs: a spool, the doors to it, an event loop, and the log on stderr."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import ssl
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import qflow.aio
import qflow.amqp
import qflow.bridge
import qflow.mqtt
import qflow.web
from qflow.allocator import share_heap
from qflow.cli.output import Output, missing, output
from qflow.collector import collecting_rarely, keep_to_the_end
from qflow.errors import InvalidArgument
from qflow.loggers import get_logger
from qflow.named_tuples import NamedTuple
from qflow.options import BrokerOptions
from qflow.remote.server.serving import opening_in_spool
from qflow.serving.addresses import Address, is_of_this_machine_alone
from qflow.serving.certificates import Certificates
from qflow.serving.doors import Door, Opening, Secrets, Service, check_free
from qflow.serving.extras import load
from qflow.serving.loops import looking_after_handshakes, loop_factory, take_small_buffers, telling_of_few_files
from qflow.serving.users import Users

_logger = get_logger("qflow")
_LOGGERS = (_logger.logger, logging.getLogger("asyncio"))

Serve = Callable[..., Awaitable[Door]]
"""Opens a door: `serve(broker, host=, port=, ssl=, users=)` returns it when it listens."""


class Kind(NamedTuple):
    """A kind of door."""

    load: Callable[[], Serve]
    """Imports what opens it; raises `NotFound` if a package is missing."""
    has_tls: bool = False
    protocol: str = "mqtt"


def _websockets() -> Serve:
    from qflow.mqtt.server.server import load_websockets

    load_websockets()
    return partial(qflow.mqtt.serve, websockets=True)


def _flight() -> Serve:
    door: Serve = load("qflow.flight.doors", needs="pyarrow numpy", what="Arrow Flight").open_door
    return door


def _metrics() -> Serve:
    door: Serve = load("qflow.metrics.door", needs="prometheus_client", what="--metrics").open_door
    return door


def _web() -> Serve:
    return qflow.web.serve


FLIGHT, FLIGHT_TLS = "flight", "flight+tls"
WITHOUT_USERS = {"flight", "metrics"}
"""Protocols that have another way to say who may come, or let everybody in."""
KINDS = {
    "amqp": Kind(lambda: qflow.amqp.serve, protocol="amqp"),
    "amqps": Kind(lambda: qflow.amqp.serve, has_tls=True, protocol="amqp"),
    "mqtt": Kind(lambda: qflow.mqtt.serve),
    "mqtts": Kind(lambda: qflow.mqtt.serve, has_tls=True),
    "ws": Kind(_websockets),
    "wss": Kind(_websockets, has_tls=True),
    "metrics": Kind(_metrics, protocol="metrics"),
    "http": Kind(_web, protocol="http"),
    "https": Kind(_web, has_tls=True, protocol="http"),
    FLIGHT: Kind(_flight, protocol="flight"),
    FLIGHT_TLS: Kind(_flight, has_tls=True, protocol="flight"),
}


class Wanted(NamedTuple):
    """A door that options ask for."""

    name: str
    address: Address
    terms: Mapping[str, object] = {}
    """More arguments of what opens it."""

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]


def run(
    spool: Path,
    wanted: Sequence[Wanted],
    users_file: Path | None,
    certificates: Certificates | None,
    grace_s: float,
    log_format: str = "text",
    **settings: Unpack[BrokerOptions],
) -> int:
    """Serve a spool until a signal; return the exit code, 128 and the number of the signal.

    What is wrong with users, certificates or addresses is said before a spool is made, or written to.
    """
    if users_file is None:
        _check_loopback([one.address for one in wanted if one.kind.protocol not in WITHOUT_USERS])
    read = partial(_read, users_file, certificates, [one for one in wanted if one.kind.protocol == "flight"])
    read()
    serves = [partial(one.kind.load(), **one.terms) for one in wanted]
    take_small_buffers()
    share_heap()  # before the first thread
    with (
        collecting_rarely(),
        output(sys.stdout) as told,
        _log_on_stderr(log_format),
        asyncio.Runner(loop_factory=loop_factory()) as runner,
    ):
        return runner.run(_serve(spool, list(zip(wanted, serves, strict=True)), read, grace_s, told, **settings))


async def _serve(
    spool: Path,
    wanted: Sequence[tuple[Wanted, Serve]],
    read: Callable[[], Secrets],
    grace_s: float,
    told: Output,
    **settings: Unpack[BrokerOptions],
) -> int:
    """Serve a spool until a signal; return the exit code."""

    def check() -> None:
        broker.broker.engine.log.check_usable()
        told.check()

    places = [(one.name, one.address) for one, _ in wanted]
    if _is_new(spool):  # else an owner that is there is told of first
        check_free(places)
    async with qflow.aio.open(spool, **settings) as broker, AsyncExitStack() as stack:
        check_free(places)
        stack.callback(keep_to_the_end)  # when the doors are closed, and the broker is not
        stack.enter_context(telling_of_few_files())
        stack.enter_context(looking_after_handshakes())
        if {one.kind.protocol for one, _ in wanted} >= {"amqp", "mqtt"}:
            await stack.enter_async_context(await qflow.bridge.join(broker))
        openings = [
            Opening(one.name, one.address, partial(_open, serve, broker), one.kind.has_tls) for one, serve in wanted
        ]
        service = Service(
            [*openings, opening_in_spool(broker)],
            read,
            grace_s=grace_s,
            tell=told.put,
            warn=_warn,
            check=check,
        )
        return 128 + await service.run()


def _is_new(spool: Path) -> bool:
    """Tell whether nothing lies there."""
    try:
        return not os.listdir(spool)
    except OSError:
        return not os.path.exists(spool)


async def _open(
    serve: Serve,
    broker: qflow.aio.AsyncBroker,
    address: Address,
    users: Users | None,
    context: ssl.SSLContext | None,
) -> Door:
    return await serve(broker, host=address.host, port=address.port, ssl=context, users=users)


def _read(users_file: Path | None, certificates: Certificates | None, flights: Sequence[Wanted] = ()) -> Secrets:
    of_certificates = () if certificates is None else (certificates.cert, certificates.key, certificates.ca)
    for file in (users_file, *of_certificates, *(one.terms.get("token_file") for one in flights)):
        if isinstance(file, Path):
            _check_regular(file)
    for one in flights:
        _check_flight(one)
    users = None if users_file is None else Users.load(users_file)
    if certificates is None:
        return Secrets(users, None)
    return Secrets(users, certificates.context(), certificates.validity())


def _check_regular(file: Path) -> None:
    """Refuse what can be read once, and may have whoever reads it wait; what is not there is told by its reader.

    Raises:
        InvalidArgument: it is a pipe, or a device.
    """
    if os.path.exists(file) and not os.path.isfile(file) and not os.path.isdir(file):
        raise InvalidArgument(
            f"{str(file)!r} is no regular file: it is read more than once, and again on SIGHUP, so it cannot be a pipe"
        )


def _check_flight(wanted: Wanted) -> None:
    """Raises InvalidArgument: its tokens are wrong, or it needs some."""
    server = load("qflow.flight.server", needs="pyarrow numpy", what="Arrow Flight")
    file = wanted.terms.get("token_file")
    server.check_address(wanted.address, has_tls=wanted.kind.has_tls, has_tokens=file is not None)
    if file is not None:
        load("qflow.flight.access", needs="pyarrow numpy", what="Arrow Flight").read_tokens(file)


def _check_loopback(addresses: Sequence[Address]) -> None:
    """Refuse addresses that others can reach. Raises InvalidArgument: one of them is, or is none."""
    for address in addresses:
        if not is_of_this_machine_alone(address):
            raise InvalidArgument(
                f"{address} can be reached by others than this machine, so it needs --users FILE; "
                "`qflow users add FILE NAME` makes one"
            )


class _Lines(logging.Handler):
    """Puts a line for each record into an output, so that no thread that logs waits for who reads the log."""

    def __init__(self, lines: Output, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
        else:
            self._lines.put(line)


@contextmanager
def _log_on_stderr(log_format: str) -> Iterator[None]:
    """Have the log on stderr, one line for each record; what asyncio says of faults is part of it."""
    formatter = FORMATTERS[log_format]()
    with output(sys.stderr, partial(_missing, formatter)) as lines:
        handler = _Lines(lines, formatter)
        for logger in _LOGGERS:
            logger.addHandler(handler)
        try:
            yield
        finally:
            for logger in _LOGGERS:
                logger.removeHandler(handler)


def _missing(formatter: logging.Formatter, count: int) -> str:
    """Return the line of the log that stands where lines are missing."""
    said = {"name": _logger.name, "levelname": "WARNING", "msg": missing(count), "event": "lines_missing"}
    return formatter.format(logging.makeLogRecord(said))


def _warn(sentence: str) -> None:
    """Say in the log what happens to the service."""
    _logger.warning("%s", sentence, extra={"event": "service"})


_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


class OneLine(logging.Formatter):
    """Puts a record on one line, unless it has a traceback: what comes from a client may have line ends."""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(super().format(record).split()) if record.exc_info is None else super().format(record)


class JsonLines(logging.Formatter):
    """Makes a JSON object of a record, on one line.

    It has `time` (UTC), `level`, `logger`, `message`, the fields of the record's `extra`, such as `spool`, `queue` and
    `event`, and `exception`, the traceback, if there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        told |= {name: value for name, value in vars(record).items() if name not in _STANDARD and name not in told}
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


FORMATTERS: dict[str, Callable[[], logging.Formatter]] = {
    "text": lambda: OneLine("qflow: %(message)s"),
    "json": JsonLines,
}
"""By the names that `--log-format` takes."""
