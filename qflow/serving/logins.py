"""Logins: who may come in by which password, at a bounded cost, whoever tries and how often.

A check of a password takes 50 ms of a processor and 16 MiB, so:

- two checks run at once, in threads of their own; the event loop never does one;
- a password that was right, or wrong, a short time ago is not checked again: its keyed digest is known; several that
  come with the same one share a check;
- tries come in *lines*, by the address of the client and a share of the user names; a line is served one by one, is
  slower after each wrong password in a row, up to 4 s, and what does not fit in it is refused unchecked;
- a *crowd*, tries of other names than those that wait, fits in until some passwords in a row were wrong: the devices
  behind one gateway come all at once when a server has started again;
- users that do not exist cost what others do, so that nobody can tell them apart;
- the log has one line in 10 s at most.

So a flood of wrong passwords slows who comes from the same address with a password not seen lately, and nobody else.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import attrs

from qflow.loggers import get_logger
from qflow.serving.addresses import ip_address, is_loopback
from qflow.serving.passwords import COST, PasswordHash
from qflow.serving.telling import Telling
from qflow.serving.users import ACTIONS, ADMINISTRATOR, DEFAULT_VIRTUAL_HOST, Account, Permission, User, Users

_logger = get_logger("qflow")

CHECKS_AT_ONCE = 2
MOST_WAITING = 8
"""Different passwords that wait in a line; more are refused, but for those of a crowd."""
_MOST_CHECKS = 20_000
"""Checks that wait at once, in all lines, for a crowd to have more than that: as many as there are connections."""
_SHORT = 512
"""Characters of a name and a password of a crowd, which are kept while they wait."""
_IN_A_ROW = 4
"""Wrong passwords after which no crowd waits in a line."""
_MOST_LINES = 4096
_LINES_OF_AN_ADDRESS = 16
_MOST_KNOWN = 4096
_RIGHT_S = 300.0
_WRONG_S = 60.0
_FORGOTTEN_S = 60.0
"""Seconds after its last wrong password in which a line forgets them."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 4.0

GUEST = User("guest", frozenset({ADMINISTRATOR}), {DEFAULT_VIRTUAL_HOST: Permission(**dict.fromkeys(ACTIONS, ".*"))})
"""Who comes from this machine with the password `guest`, where there is no users file."""
_NOBODY = PasswordHash(COST, 8, 1, bytes(16), bytes(32))
"""Checked for a user that does not exist."""


class Logins:
    """Checks logins of one event loop.

    Args:
        users: who may log in; None = `guest` with the password `guest`, from a loopback address, and nobody else.
        clock: seconds, monotonic.
        sleep: waits so many seconds.
    """

    def __init__(
        self,
        users: Users | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.users = users
        """May be replaced at any time: a login that is on its way may still be checked against the users before."""
        self._clock = clock
        self._sleep = sleep
        self._key = os.urandom(32)
        self._right = _Recent(_RIGHT_S, clock)
        self._wrong = _Recent(_WRONG_S, clock)
        self._lines: dict[tuple[str, int], _Line] = {}
        self._checks: dict[bytes, asyncio.Task[bool]] = {}
        self._refusals = Telling(_logger, others=", and {:,} more since the last line", clock=clock)
        self._threads = ThreadPoolExecutor(CHECKS_AT_ONCE, thread_name_prefix="qflow-logins")

    async def check(self, name: str, password: str, peer: str) -> User | None:
        """Return the user, if the password is right; None if not, after a pause that grows with each in a row.

        Where others have replaced the users meanwhile, it is the user as these have it; None if they have no such.

        Cancelled, a check that has begun is finished all the same, and known.

        Args:
            name: of the user.
            password: as text; bytes that are no UTF-8 may be decoded by `surrogateescape`.
            peer: the IP address of the client, such as `10.0.0.7` or `::1`, without a port.

        Cost: 50 ms in a thread, for one that was not seen in the last five minutes; else 10 µs.
        """
        users = self.users
        if users is None:
            if _is_guest(name, password, peer):
                return GUEST
            return await self._refuse(name, peer, self._line(name, peer).failed(self._clock()))
        account = users.accounts.get(name)
        # Another one when the file has another hash for the user.
        digest = self._hash(name, password, "" if account is None else str(account.password))
        if digest in self._right and account is not None:
            return account.user
        line = self._line(name, peer)
        check = self._checks.get(digest)
        fits = not line.is_full
        if digest in self._wrong or (check is None and not fits and not self._may_crowd(line, name, password)):
            return await self._refuse(name, peer, line.failed(self._clock()))
        if check is None:
            line.waiting.append(name)
            check = self._checks[digest] = asyncio.create_task(self._check(line, fits, name, account, password, digest))
            check.add_done_callback(lambda _: self._checks.pop(digest))
        if await asyncio.shield(check) and account is not None:
            current = account.user if self.users is None else self.users.get(name)
            if current is not None:
                return current
        return await self._refuse(name, peer, line.pause_s())

    def close(self) -> None:
        """Check no more passwords; a check that has begun goes on in its thread."""
        for check in self._checks.values():
            check.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._refusals.end()

    def _may_crowd(self, line: _Line, name: str, password: str) -> bool:
        """Tell whether a try may wait in a line that is full; a user has one password, so that two are no crowd."""
        is_short = len(name) + len(password) <= _SHORT
        return is_short and not line.is_guessed and name not in line.waiting and len(self._checks) < _MOST_CHECKS

    async def _check(
        self, line: _Line, fits: bool, name: str, account: Account | None, password: str, digest: bytes
    ) -> bool:
        """Check a password when it is its turn in the line; `fits`: it is none of a crowd."""
        try:
            async with line.turn:
                if not fits and line.is_guessed:
                    return False  # unchecked
                pause_s = line.next_at - self._clock()
                if pause_s > 0:
                    await self._sleep(pause_s)
                stored = _NOBODY if account is None else account.password
                loop = asyncio.get_running_loop()
                matches = await loop.run_in_executor(self._threads, stored.matches, password)
                right = matches and account is not None
                (self._right if right else self._wrong).add(digest)
                if right:
                    line.failures = 0
                else:
                    line.failed(self._clock())  # before the next one of the line has its turn
                return right
        finally:
            line.waiting.remove(name)

    def tell_refused(self, name: str, peer: str) -> None:
        """Have the log tell of a login that was refused: here, or by who saw that there is nothing to check."""
        self._refusals.tell("a login as %r from %s was refused", name[:64], peer)

    async def _refuse(self, name: str, peer: str, pause_s: float) -> User | None:
        """Note a wrong password in the log, and have the client wait for the answer: None."""
        self.tell_refused(name, peer)
        await self._sleep(pause_s)
        return None

    def _line(self, name: str, peer: str) -> _Line:
        """Return the line of a client, which is new if the last wrong password in it was long ago."""
        place = (_network(peer), self._hash(name)[0] % _LINES_OF_AN_ADDRESS)
        now = self._clock()
        line = self._lines.get(place)
        if line is None or line.is_over(now):
            if len(self._lines) >= _MOST_LINES:
                self._lines = {place: line for place, line in self._lines.items() if not line.is_over(now)}
            while len(self._lines) >= _MOST_LINES:
                del self._lines[next(iter(self._lines))]
            line = self._lines[place] = _Line()
        return line

    def _hash(self, *texts: str) -> bytes:
        hashed = hashlib.blake2b(key=self._key, digest_size=32)
        for text in texts:
            part = text.encode(errors="surrogatepass")
            hashed.update(len(part).to_bytes(8, "big") + part)
        return hashed.digest()


@attrs.define(eq=False)
class _Line:
    """Tries of one address and a share of the names, one after the other."""

    turn: asyncio.Lock = attrs.field(factory=asyncio.Lock)
    waiting: list[str] = attrs.field(factory=list)
    """The names of those that wait, or are checked."""
    failures: int = 0
    """Wrong passwords in a row."""
    next_at: float = 0.0
    """When the next check may begin."""

    @property
    def is_full(self) -> bool:
        return len(self.waiting) >= MOST_WAITING

    @property
    def is_guessed(self) -> bool:
        """So many were wrong in a row that somebody tries passwords."""
        return self.failures >= _IN_A_ROW

    def failed(self, now: float) -> float:
        """Note a wrong password; return the seconds until the next check."""
        self.failures += 1
        self.next_at = now + self.pause_s()
        return self.pause_s()

    def pause_s(self) -> float:
        """Return how long the answer to the last wrong password takes, and how much later the next check begins."""
        return min(_FIRST_PAUSE_S * 2.0 ** min(max(self.failures - 1, 0), 30), _LONGEST_PAUSE_S)

    def is_over(self, now: float) -> bool:
        return not self.waiting and now - self.next_at > _FORGOTTEN_S


class _Recent:
    """Digests that were added in the last seconds, at most so many."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, digest: bytes) -> None:
        self._until[digest] = self._clock() + self._seconds
        self._until.move_to_end(digest)
        if len(self._until) > _MOST_KNOWN:
            self._until.popitem(last=False)

    def __contains__(self, digest: bytes) -> bool:
        return self._until.get(digest, 0.0) > self._clock()


def _is_guest(name: str, password: str, peer: str) -> bool:
    given = f"{name}\0{password}".encode(errors="surrogatepass")
    return is_loopback(peer) and hmac.compare_digest(given, b"guest\0guest")


def _network(peer: str) -> str:
    """Return whom to count an address to: one who has an IPv6 address has 2**64 of them."""
    found = ip_address(peer)
    if isinstance(found, ipaddress.IPv6Address):
        return found.packed[:8].hex()
    return peer if found is None else str(found)
