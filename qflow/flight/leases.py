"""The leases of groups of readers on other hosts: time-limited, renewed, each with a number above those before it.

The number is a *fencing token*: who comes with one below the last that was given is refused, however late, also after
the owner was killed. Who comes with the last one is not, also when its time is over, as long as nobody else has taken
the group.

To the files of the spool the owner holds the group, as a reader beside it would: see `storage.streams.groups`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import attrs

from qflow.errors import GroupInUse, StorageError
from qflow.named_tuples import NamedTuple
from qflow.storage.files import Files
from qflow.storage.lock import Place
from qflow.storage.streams.groups import Group, Offsets


class Given(NamedTuple):
    """A lease."""

    token: int
    offsets: Offsets
    """Where the group has come to."""


@attrs.define
class _Lease:
    group: Group
    token: int
    until_s: float


class Leases:
    """See the module. Thread-safe."""

    def __init__(
        self,
        spool: str | Place,
        uuid: str,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`wall`: what the groups go by, as retention does."""
        self._spool = Place.of(spool)
        self._uuid = uuid
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._held: dict[str, _Lease] = {}

    def take(self, name: str, token: int | None, seconds: float) -> Given:
        """Give a lease, or renew one.

        Args:
            token: of the lease to be renewed; None: a new one.

        Raises:
            GroupInUse: another reader has it, or has had it since. StorageError, CorruptionError.
        Cost: two syncs for a new one; once a minute two more, from the first commit of the group on.
        """
        with self._lock:
            self._sweep()
            lease = self._held.get(name)
            if lease is None:
                lease = self._opened(name, token)
            elif token is not None:
                _check(name, token, lease.token)
            else:
                raise GroupInUse(
                    f"group {name!r} is in use by another reader, whose lease ends in "
                    f"{lease.until_s - self._clock():.1f} s unless it is renewed: stop that one, or name another group"
                )
            lease.until_s = self._clock() + seconds
            with suppress(StorageError):  # the next renewal tries again, and the lock tells retention meanwhile
                lease.group.keep_seen()
            return Given(lease.token, lease.group.committed())

    def _opened(self, name: str, token: int | None) -> _Lease:
        self._spool.follow()
        group = Group(self._spool.path, name, self._uuid, Files(), clock=self._wall)
        try:
            last = group.token()
            if token is not None:
                _check(name, token, last)
            else:
                group.give_token(last + 1)
            lease = self._held[name] = _Lease(group, token or last + 1, 0.0)
            return lease
        except BaseException:
            group.close()
            raise

    def acknowledge(self, name: str, token: int, offsets: Offsets, seconds: float) -> None:
        """Keep that everything below these offsets is done, and renew the lease; see `Group.acknowledge`.

        Raises:
            GroupInUse: another reader has taken the group since. StorageError, CorruptionError.
        """
        with self._lock:
            lease = self._held.get(name) or self._opened(name, token)
            _check(name, token, lease.token)
            lease.group.acknowledge(offsets)
            lease.until_s = self._clock() + seconds

    def release(self, name: str, token: int) -> None:
        """End a lease: who comes with its token is refused from now on. One that has ended is left as it is."""
        with self._lock:
            lease = self._held.get(name)
            if lease is not None and lease.token == token:
                lease.group.give_token(token + 1)
                self._close(name)

    def _sweep(self) -> None:
        """Let go of the groups whose leases are over, for readers beside the owner."""
        now = self._clock()
        for name in [name for name, lease in self._held.items() if lease.until_s <= now]:
            self._close(name)

    def sweep(self) -> None:
        """Let go of the groups whose leases are over. Now and then."""
        with self._lock:
            self._sweep()

    def _close(self, name: str) -> None:
        self._held.pop(name).group.close()

    def close(self) -> None:
        """Let go of all groups."""
        with self._lock:
            for name in list(self._held):
                self._close(name)


def _check(name: str, token: int, last: int) -> None:
    if token != last:
        raise GroupInUse(
            f"the lease of group {name!r} with token {token} has ended, and another reader has taken the group since: "
            "take a new lease, and go on where the group is now"
        )
