"""The rooms of facts of a log, read without owning the spool: for who keeps some there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TypeVar

from qflow.config import spool_path
from qflow.inspect.child import in_child
from qflow.inspect.logs import opened_log
from qflow.inspect.stream_facts import StreamFacts, find_stream, streams_of
from qflow.storage.environment import Environment
from qflow.storage.lock import owner_pid
from qflow.storage.log import facts
from qflow.storage.log.recovery import Recovery
from qflow.streams.counting import Waiting, count_waiting

Result = TypeVar("Result")


class Rooms:
    """A log that is open to read, in the child process of `inspect.read_rooms`."""

    def __init__(self, env: Environment, found: Recovery, is_owned: bool) -> None:
        self.streams: list[StreamFacts] = streams_of(found)
        self.is_owned = is_owned
        """A process has the spool open."""
        self.problems: list[str] = found.problems
        """Of the log, and of facts that were left out."""
        self._env = env
        self._found = found

    def count_waiting(self, stream: str, starts: list[tuple[str, int]], end: int, reads: int) -> Waiting:
        """Return how many messages of a stream with one partition any of some filters matches; see `count_waiting`."""
        record = find_stream(self._found, stream)
        if record is None:
            return Waiting(0, True)
        return count_waiting(self._env.reading, record.owner, starts, end, reads)

    def facts(self, room: str) -> Iterator[tuple[str, bytes]]:
        """Yield key and value of the facts of a room, in the order of the keys; those damaged are told in `problems`.

        Each thousand is of a moment of its own. Cost: 3 µs each.
        """
        position = b""
        while True:
            with self._env.reading() as txn:
                page = facts.page(txn, room, position=position, report=self.problems.append)
            yield from page.facts
            if not (position := page.position):
                return


def read_rooms(path: str | os.PathLike[str], work: Callable[[Rooms], Result]) -> Result:
    """Return what a function makes of the facts that a log keeps for others; it runs in a child process.

    Raises:
        NotFound: there is no spool. FormatTooNew, CorruptionError, StorageError: as `qflow.open`. What `work` raises.
    """
    spool = spool_path(path)

    def read() -> Result:
        with opened_log(spool) as (env, found):
            return work(Rooms(env, found, owner_pid(spool) is not None))

    return in_child(spool, read)
