"""Batches that were handed in from outside, put into the log by the owner of the spool: each once, for good.

What becomes of a stage (see `storage.inbox.stages`), step by step; a crash between any two of them changes nothing:

    1  the log is asked: a batch that is in it is a *replay*, and only removed
    2  the stage is taken, by a rename; from here on it cannot be withdrawn, unless nothing of it can be stored yet
    3  its messages are routed as `publish` routes them, and committed with the record of the batch: one transaction
    4  the stage is removed

A stage larger than `max_transaction_bytes`, or than the part of the memory that one batch may take, takes several
transactions. All of it is checked before the first, and each writes how far the batch is, so that whoever goes on after
a crash goes on there.

What cannot be adopted now, for lack of room or memory, waits and is tried again. What never can be, because it is
damaged, or goes nowhere, is set aside as a whole, and whoever handed it in is told.

The steps are taken by the maintenance thread, which waits for nobody: neither for room in a queue nor for memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial as with_arguments
from typing import TYPE_CHECKING, Any

from qflow.adoption.load import Load, loads
from qflow.errors import (
    CorruptionError,
    InvalidArgument,
    MessageTooLarge,
    NotFound,
    QflowError,
    QueueFull,
    TransactionTooLarge,
)
from qflow.queues.together import Rider, Together
from qflow.routing import Routing
from qflow.spool import Spool
from qflow.storage.inbox import batches as sink_batches
from qflow.storage.inbox.batches import Adopted, Partial
from qflow.storage.inbox.inbox import Inbox, Waiting
from qflow.storage.inbox.stages import Batch, Manifest
from qflow.streams.partition import put_charge
from qflow.streams.room import Asking, Room

if TYPE_CHECKING:
    from qflow.stats import InboxStats

LOOK_S = 0.01
"""How often the inbox is looked into while batches come;"""
LIVELY_S = 20.0
"""later on more seldom, by a twentieth of the time that nothing came, and after so long each second."""
SWEEP_S = 3600.0
MEMORY_SHARE = 4
"""What one transaction brings in takes at most this part of the broker's capacity."""
REST, LONGEST_REST_S = 20, 5.0
"""What was tried in vain is left alone for so many times as long as the attempt took; and at most."""

_NEVER = (CorruptionError, InvalidArgument, MessageTooLarge, NotFound, TransactionTooLarge)
"""Errors that trying again does not mend."""


class _Later(QflowError):
    """There is no room for it at the moment."""


class Adoption:
    """See the module. Thread-safe: one step at a time."""

    def __init__(
        self, spool: Spool, routing: Routing, together: Together, room: Room, wake: Callable[[], None]
    ) -> None:
        """`wake` is called when there is memory again: call `run` then."""
        self._inbox = Inbox(spool.files, spool.place)
        self._log = spool.log
        self._routing = routing
        self._together = together
        self._room = room
        self._uuid = spool.uuid
        self._most = (spool.settings.max_transaction_bytes, room.ledger.capacity // MEMORY_SHARE)
        self._report = spool.report
        self._wake = wake
        self._clock = spool.clock
        self._running = threading.Lock()
        self._asking: Asking | None = None
        self._asker: Batch | None = None
        """For whom; the others wait for it."""
        self._in_vain: dict[Batch, tuple[float, str]] = {}
        """When to try again what was tried in vain, and why it was."""
        self._checked: str | None = None
        """The token of a stage that was checked whole."""
        self._present: frozenset[str] = frozenset()
        """Queries of which there is something in the inbox."""
        self._sweep_at = time.monotonic()
        self._moved_at = self._sweep_at - LIVELY_S
        self._forgotten_to = b""
        self._waiting = 0
        self._problem: str | None = None
        self._adopted = self._messages = self._replayed = self._refused = 0

    @property
    def rest_s(self) -> float | None:
        """How long until the inbox should be looked into again; None: no sooner than anything else is."""
        since = time.monotonic() - self._moved_at
        return max(LOOK_S, since / LIVELY_S) if since < LIVELY_S else None

    def stats(self) -> InboxStats:
        """Return what became of batches since the spool was opened."""
        from qflow.stats import InboxStats

        return InboxStats(**self.figures())

    def figures(self) -> dict[str, Any]:
        """Return the fields of `stats`."""
        return {
            "waiting": self._waiting,
            "problem": self._problem,
            "adopted_total": self._adopted,
            "messages_total": self._messages,
            "replayed_total": self._replayed,
            "refused_total": self._refused,
        }

    def run(self) -> None:
        """Adopt what waits. Cost: the listing of a directory, where nothing does.

        What fails is told by `stats`, and tried again by the next call.
        """
        self._in_vain = {}
        self._look()

    def look(self) -> None:
        """`run`, but leave alone for a while what was tried in vain: a small part of the time goes into that."""
        self._look()

    def _look(self) -> None:
        with self._running:
            try:
                stages = self._inbox.waiting()
            except QflowError as error:
                self._problem = str(error)
                return
            now = time.monotonic()
            if stages or self._inbox.lively:
                self._moved_at = now
            present = {waiting.batch for waiting in stages}
            self._present = frozenset(batch.query for batch in present)
            self._in_vain = {batch: why for batch, why in self._in_vain.items() if batch in present}
            if self._asker not in present:
                self._give_up()  # it was withdrawn
            self._adopt_all(sorted(stages, key=lambda waiting: waiting.batch != self._asker))
            if now >= self._sweep_at:
                self._sweep_at = now + SWEEP_S
                self._inbox.sweep(time.time())

    def _adopt_all(self, stages: list[Waiting]) -> None:
        problem = None
        left = len(stages)
        failed: set[str] = set()
        for waiting in stages:
            if waiting.batch.query not in failed:
                problem_of_one = self._try(waiting)
                if problem_of_one is None:
                    left -= 1
                else:
                    problem = problem_of_one
                    failed.add(waiting.batch.query)  # those behind it wait for it
                    if waiting.batch == self._asker:
                        break  # others would take its place in the line
        self._waiting, self._problem = left, problem

    def _try(self, waiting: Waiting) -> str | None:
        """`_adopt`, unless that was tried in vain a moment ago."""
        again_at, why = self._in_vain.get(waiting.batch, (0.0, ""))
        started = time.monotonic()
        if started < again_at:
            return why
        problem = self._adopt(waiting)
        if self._asking is not None and self._asker == waiting.batch and (problem is None or self._asking.granted):
            self._give_up()  # it has its room, and failed for another reason
        if problem is not None and waiting.batch != self._asker:
            now = time.monotonic()
            self._in_vain[waiting.batch] = now + min(REST * (now - started), LONGEST_REST_S), problem
        return problem

    def close(self) -> None:
        """Reserve nothing any more."""
        with self._running:
            self._give_up()

    def _give_up(self) -> None:
        asking, self._asking, self._asker = self._asking, None, None
        if asking is not None:
            self._room.give_up(asking)

    def _adopt(self, waiting: Waiting) -> str | None:
        """Adopt a stage, or set it aside; return why it waits, if it does."""
        batch = waiting.batch
        try:
            with self._log.read() as txn:
                known = sink_batches.read(txn, batch.query)
            if batch.batch <= known.batch:
                self._inbox.remove(waiting)
                self._replayed += not waiting.taken  # else a crash came between the commit and the removal
                return None
        except CorruptionError as error:
            return self._refuse(waiting, error)
        except QflowError as error:
            return str(error)
        try:
            self._ask_again(batch)  # before it is taken, and read
            manifest = self._inbox.take(waiting)
            stored = manifest is not None and self._commit_all(manifest, known)
        except _NEVER as error:
            return str(error) if self._inbox.has_moved() else self._refuse(waiting, error)
        except QflowError as error:
            if not self._is_begun(waiting):
                self._inbox.put_back(batch)  # who handed it in may take it back
            return f"batch {batch.batch} of query {batch.query}: {error}"
        if manifest is not None:
            self._adopted += stored
            self._replayed += not stored
            try:
                self._inbox.remove(waiting._replace(taken=True))
            except QflowError as error:
                return str(error)
        return None

    def _is_begun(self, waiting: Waiting) -> bool:
        """Tell whether a part of a batch is in the log, or may be."""
        try:
            with self._log.read() as txn:
                partial = sink_batches.read(txn, waiting.batch.query).partial
        except QflowError:
            return True
        return partial is not None and partial.batch == waiting.batch.batch

    def _refuse(self, waiting: Waiting, error: QflowError) -> str | None:
        batch = waiting.batch
        try:
            aside = self._inbox.refuse(waiting, str(error))
        except QflowError as failed:
            return str(failed)
        self._refused += 1
        self._report(f"batch {batch.batch} of query {batch.query} was set aside in {aside}: {error}", 0)
        return None

    # Committing ------------------------------------------------------------------------------------------------------

    def _commit_all(self, manifest: Manifest, known: Adopted) -> bool:
        """Commit what of a stage is not in the log yet; return whether there was anything.

        Raises:
            One of `_NEVER`: nothing more of it can be. QflowError: it may be tried again.
        """
        if manifest.uuid != self._uuid:
            raise InvalidArgument(
                f"it was made for the log {manifest.uuid}, and this one is {self._uuid}: the spool was made anew "
                "since. Start the query anew"
            )
        begun = known.partial if known.partial is not None and known.partial.batch == manifest.batch.batch else None
        done = 0 if begun is None else begun.messages
        if begun is not None and begun.stage != manifest.token:
            raise InvalidArgument(
                f"the first {done:,} messages of this batch are in the log already, from another attempt at it that "
                "was not finished, and nobody knows which of these they are. Start the query anew, from behind it"
            )
        with self._log.read() as txn:
            known = sink_batches.adopted(txn, *manifest.batch, manifest.targets)
        if known.batch >= manifest.batch.batch:
            return False
        for load in self._loads(manifest, done):
            if done + load.messages < manifest.messages and self._checked != manifest.token:
                for later in self._loads(manifest, done + load.messages):  # none is begun that a later one fails
                    later.check()
                    del later  # before the next one is read
                self._checked = manifest.token
            done = self._commit(load, manifest, known, done)
            del load
        return True

    def _loads(self, manifest: Manifest, done: int) -> Iterator[Load]:
        return loads(self._inbox.pieces(manifest), done, self._routing, *self._most)

    def _commit(self, load: Load, manifest: Manifest, known: Adopted, done: int) -> int:
        """Commit messages, and return the record of how far their batch is then. Raises _Later: there is no room."""
        batch = manifest.batch
        done += load.messages
        partial = None if done == manifest.messages else Partial(batch.batch, manifest.token, done)
        adopted = (
            Adopted(batch.batch, None, manifest.once, every=manifest.every, plan=manifest.plan)
            if partial is None
            else known._replace(partial=partial, once=manifest.once)
        )
        puts = load.puts()
        self._reserve(batch, sum(map(put_charge, puts)))
        records = [batch.query, *(target.record for target in manifest.targets if partial is None)]
        rider: Any = Rider()
        rider.writes = [with_arguments(self._write, record, adopted) for record in records]
        try:
            self._together.commit(load.inserts, [rider], puts=puts, timeout=0)
        except QueueFull as error:
            raise _Later(f"{error}") from error
        self._messages += load.messages
        return done

    def _write(self, query: str, adopted: Adopted, txn: Any) -> None:
        """Write a record of a batch, in the transaction of its messages."""
        now_ms = int(self._clock() * 1000)
        sink_batches.write(txn, query, adopted._replace(at_ms=now_ms))
        if adopted.once:  # who adds one that goes by itself has some old ones go
            found = sink_batches.forget(txn, now_ms, self._forgotten_to, keep=self._present)
            self._forgotten_to = found.position

    def _reserve(self, batch: Batch, amount: int) -> None:
        """Reserve memory for messages on their way into streams, or stay in line for it.

        Raises:
            _Later: there is none yet; `wake` is called when there is.
        """
        if self._asking is not None and (self._asker != batch or self._asking.amount != amount):
            self._give_up()
        if amount:
            self._asker, self._asking = batch, self._asking or Asking(amount)
            self._ask_again(batch)
            self._asker = self._asking = None

    def _ask_again(self, batch: Batch) -> None:
        """See whether it is the turn of a batch that is in line. Raises as `_reserve`."""
        if self._asking is None or self._asker != batch:
            return
        if self._room.try_reserve(self._asking, self._wake, may_work=True) is not None:
            raise _Later("it waits for memory, which others have now")
