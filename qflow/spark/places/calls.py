"""Calls of a broker by Arrow Flight: they wait for one that is away, for a while, and errors come as it raised them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from qflow.errors import InvalidArgument, NotFound, StorageError
from qflow.loggers import get_logger
from qflow.spark.words import Away, Ended
from qflow.tokens import headers_of, token_in

if TYPE_CHECKING:
    import pyarrow.flight as pf

T = TypeVar("T")
CALL_S, _LEAST_S = 30.0, 10.0
"""What a call takes at most that waits for nothing; and what it may with any patience, for a broker may be busy."""
_PAUSE_S, _LONGEST_PAUSE_S, _SAY_EVERY_S = 0.05, 1.0, 10.0
_CONNECT_S, _CONNECT_AGAIN_S = 5.0, 2.0
"""What connecting takes at most, which no work of the broker holds up; and at a door that has been waited for."""
_PING_EVERY_S, _PING_S = 30.0, 10.0
"""When a connection on which nothing comes is asked for a sign of life, and how long that is waited for.

A server that has nothing to send ends connections that ask more often.
"""
_LONG_S, _PEACE_S = 0.5, 10.0
"""How long a door that has been waited for is left in peace after a try that took long."""
_logger = get_logger("qflow.spark")

_clients: dict[tuple[int, Door], Any] = {}
"""By process and door: Spark's workers live on from task to task."""
_away: dict[str, float] = {}
"""Doors at which nobody answered, which are waited for once; until when each is left in peace."""
_met: set[Door] = set()
"""Doors that have answered: what was given for them is right."""


@attrs.frozen
class Door:
    """Where a broker is, and what it asks for. Hashable; pickled to the tasks."""

    url: str
    token: str | None = attrs.field(default=None, repr=False, eq=False)
    token_file: str | None = None
    """Read anew for each call, where it is there."""
    ca: bytes | None = attrs.field(default=None, repr=False)
    patience_s: float = 60.0

    def action(self, name: str, body: Mapping[str, Any], *, within_s: float | None = None) -> Any:
        """Return the answer to an action, which may be repeated: it is, where the broker is away.

        Args:
            within_s: how long one is waited for that takes its time; None = it does not.
        """
        import pyarrow.flight as pf

        within_s = min(CALL_S, max(_LEAST_S, self.patience_s)) if within_s is None else within_s

        def call(client: pf.FlightClient) -> Any:
            asked = pf.Action(name, json.dumps(body).encode())
            answers = list(client.do_action(asked, self.options(within_s)))
            return json.loads(answers[0].body.to_pybytes()) if answers else {}

        return self.wait_for(call)

    def options(self, within_s: float | None = None) -> pf.FlightCallOptions:
        """Return the options of a call. Raises InvalidArgument: the token in the file is none."""
        import pyarrow.flight as pf

        return pf.FlightCallOptions(timeout=within_s, headers=headers_of(self.token_now()))

    def token_now(self) -> str | None:
        """Return the token of the file as it is now; where there is none, that which was given."""
        if self.token_file is not None:
            with suppress(OSError), open(self.token_file, encoding="utf-8", errors="replace") as file:
                return token_in(file.read()) or self.token
        return self.token

    def __reduce__(self) -> tuple[type[Door], tuple[Any, ...]]:
        """A task may be on a host without the file: it has the token of when it was sent there."""
        return Door, (self.url, self.token_now(), self.token_file, self.ca, self.patience_s)

    def wait_for(self, call: Callable[[Any], T]) -> T:
        """Return what a call returns, once somebody answers it; it may be repeated.

        Raises:
            Away: nobody answered in time. InvalidArgument: nobody will, by what was given of TLS. QflowError: what the
            broker raised.
        """
        waiting = self.waiting()
        while True:
            try:
                with self.errors():
                    found = call(self.client())
            except Away as error:
                waiting.go_on(error)
                continue
            waiting.answered()
            return found

    def waiting(self) -> Waiting:
        """Return how long it has been waited for, for something that is begun again until it is done."""
        return Waiting(self)

    @property
    def rests(self) -> bool:
        """See `Place`."""
        return time.monotonic() < _away.get(self.url, 0.0)

    def answered(self) -> None:
        """It is there, and what was given for it is right."""
        _away.pop(self.url, None)
        _met.add(self)

    def what_is_wrong(self, before: str | None) -> str | None:
        """Return what keeps TLS with this door from beginning; None where it is something else.

        Raises:
            InvalidArgument: it is what it was before. (What a door says once may come of its being closed.)
        """
        from qflow.flight import trust

        found = trust.what_is_wrong(self.url, trust.Trust(given_ca=self.ca))
        if found is not None and found == before:
            raise InvalidArgument(found)
        return found

    def client(self) -> pf.FlightClient:
        """Return the connection of this process."""
        import pyarrow.flight as pf

        key = os.getpid(), self
        if key not in _clients:
            tls = {} if self.ca is None else {"tls_root_certs": self.ca}
            _clients[key] = pf.FlightClient(self.url, generic_options=self._limits(), **tls)
        return _clients[key]

    def _limits(self) -> list[tuple[str, int]]:
        """Return the options of gRPC by which a broker is noticed that says nothing any more."""
        connect_s = min(_CONNECT_AGAIN_S if self.url in _away else _CONNECT_S, max(_LONG_S, self.patience_s / 4))
        seconds = {
            "grpc.min_reconnect_backoff_ms": connect_s,  # which is how long a connection may take
            "grpc.keepalive_time_ms": _PING_EVERY_S,
            "grpc.keepalive_timeout_ms": _PING_S,
            "grpc.http2.ping_timeout_ms": _PING_S,  # of all pings: one that is on its way keeps others back
        }
        alone = ("grpc.use_local_subchannel_pool", 1)  # else it may be the connection that was let go
        return [alone, *((name, int(1000 * value)) for name, value in seconds.items())]

    def errors(self) -> Errors:
        """Return a context that raises errors of Flight as those of the broker, for calls that begin from now on."""
        return Errors(self)

    def let_go(self) -> None:
        """Forget the connection: the next call makes another one, at once."""
        _clients.pop((os.getpid(), self), None)  # another thread may be using it: it is closed when nobody has it


class Waiting:
    """How long a door has been waited for, from the first failure since something came of what is done there."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._tried = time.monotonic()
        """When it was tried last, or answered."""
        self._begun: float | None = None
        self._said: float | None = None
        self._pause_s = _PAUSE_S
        self._wrong: str | None = None

    def answered(self) -> None:
        """Something came: whoever goes away from now on is waited for anew."""
        self._door.answered()
        self._tried, self._begun = time.monotonic(), None
        self._pause_s = _PAUSE_S

    def go_on(self, error: Away) -> None:
        """Pause, before it is tried again; longer each time. Not where another token is to be shown.

        Raises:
            Away: there is no more patience. InvalidArgument: nobody will answer, by what was given of TLS.
        """
        if isinstance(error, Ended):
            return
        door, now = self._door, time.monotonic()
        if self._begun is None:
            self._begun = self._tried if error.is_silent else now
        waited_s, known = now - self._begun, _away.get(door.url)
        if waited_s >= door.patience_s or known is not None:
            how = f"was waited for {waited_s:.0f} s" if known is None else "has been waited for before"
            is_long = known is not None and now - self._tried >= _LONG_S
            _away[door.url] = now + _PEACE_S if is_long else known or 0.0
            raise Away(f"{error}; it {how} (see option brokerTimeout)") from error
        is_due = self._said is None or now - self._said > _SAY_EVERY_S
        if door not in _met and (self._wrong is not None or is_due):
            self._wrong = door.what_is_wrong(self._wrong)
        if is_due and self._wrong is None:  # else it is looked at once more, and then raised
            self._said = now
            _logger.warning("%s: it is waited for", error)
        time.sleep(self._pause_s)
        self._tried = time.monotonic()
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


class Errors:
    """See `Door.errors`."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._token = door.token_now()

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        import pyarrow as pa
        import pyarrow.flight as pf

        from qflow.flight.words import error_of

        url = self._door.url
        if not isinstance(error, pa.ArrowException | OSError):
            return
        away = pf.FlightUnavailableError | pf.FlightTimedOutError | pf.FlightCancelledError
        if isinstance(error, away):  # a server that ends cancels its calls; nobody here does
            self._door.let_go()
            is_silent = isinstance(error, pf.FlightTimedOutError)
            raise Away(f"the broker at {url} is away ({_short(error)})", is_silent=is_silent) from error
        known = error_of(error)
        if known is not None:
            raise known from error
        if isinstance(error, pf.FlightUnauthenticatedError | pf.FlightUnauthorizedError):
            text = f"the broker at {url} refuses this token ({_short(error)})"
            if self._door.token_now() != self._token:
                raise Ended(f"{text}, and option tokenFile has another one by now") from error
            raise InvalidArgument(f"{text}: give the right one with option token or tokenFile") from error
        raise StorageError(f"the broker at {url} could not do this ({_short(error)})") from error


def _short(error: BaseException) -> str:
    """Return the first words of an error of gRPC, without its context for debugging."""
    text = str(error).split("gRPC client debug context")[0].split(". Detail:")[0].rpartition(", with message: ")[2]
    return " ".join(text.split())[:300].rstrip(" .")


def read_file(option: str, path: str) -> bytes:
    """Return what is in a file that an option names. Raises NotFound: it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise NotFound(f"option {option!r} is {path!r}, which cannot be read ({error.strerror or error})") from error
