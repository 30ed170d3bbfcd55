"""A spool on this host, which is read directly, beside its owner."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from qflow.arrow.bounds import Bound, Offsets, resolve
from qflow.arrow.eras import eras_of, is_other, other_era
from qflow.arrow.handover import Handing, discard_staged
from qflow.arrow.losses import ByOption
from qflow.arrow.ranges import Cutting, Span, cut, offset_after
from qflow.arrow.states import SpoolState, StreamState
from qflow.arrow.takers import Takers
from qflow.errors import QflowError, SpoolInUse, StorageError
from qflow.message import LANE_SHIFT
from qflow.opening import open as open_broker
from qflow.spark import spools
from qflow.spark.offsets import LogPosition, Progress
from qflow.spark.places.place import OfOwners, Reading, Staging, Written
from qflow.spark.spools import look, reading
from qflow.storage.files import Files, storage_error
from qflow.storage.inbox import stages
from qflow.storage.inbox.stage_files import StageWriter
from qflow.storage.inbox.stages import Batch, Manifest
from qflow.storage.lock import owner_pid
from qflow.storage.log import recovery
from qflow.storage.log.rows import read_row
from qflow.storage.streams.groups import Group, committed_of

if TYPE_CHECKING:
    import pyarrow as pa

    from qflow.arrow.outgoing import Outgoing


class Handover(Handing):
    """Hands it to the spool's owner, or adopts it here if there is none."""

    def _reading(self) -> AbstractContextManager[Any]:
        return spools.reading(self._spool, self._manifest.uuid)

    def _adopt_here(self) -> bool:
        """Own the spool for a moment, and adopt what waits; False if another process owns it, or it failed."""
        if owner_pid(self._spool) is not None:
            return False
        self._problem = None
        spools.let_go(self._spool)  # LMDB opens a file once in a process
        try:
            with open_broker(self._spool, door=False) as broker:  # nobody is to be cut off in a moment
                broker.engine.adoption.run()
                found = broker.engine.adoption.stats()
        except SpoolInUse:
            return False
        except QflowError as error:
            self._problem = str(error)
            return False
        self._problem = found.problem
        return found.problem is None and not found.waiting

    def _in_vain(self) -> str:
        pid = owner_pid(self._spool)
        who = "nobody could" if pid is None else f"its owner, process {pid or 'unknown'}, did not"
        why = self._problem if pid is None else self._problem_of_owner()
        return (
            f"batch {self._batch.batch} of query {self._batch.query} was handed in to the spool at {self._spool}, and "
            f"{who} adopt it within {self._timeout_s:g} s{f' ({why})' if why else ''}"
        )

    def _problem_of_owner(self) -> str | None:
        """Return the reason the owner gives for a batch that waits."""
        try:
            with open(os.path.join(self._spool, "stats.json"), "rb") as file:
                problem = json.load(file)["inbox"]["problem"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return None if problem is None else str(problem)


@attrs.frozen
class LocalPlace:
    """The spool at a path; see `Place`."""

    where: str

    @property
    def rests(self) -> bool:
        """Never."""
        return False

    def look(self, uuid: str | None = None) -> SpoolState:
        """Return the streams and queues there are."""
        return look(self.where, uuid)

    def resolve(
        self, uuid: str, bound: Bound, which: str, streams: list[StreamState], committed: Mapping[str, dict[int, int]]
    ) -> Offsets:
        """Return the offsets that a bound stands for."""
        with reading(self.where, uuid) as txn:
            return resolve(txn, bound, which, streams, committed)

    def cut(self, uuid: str, ranges: Sequence[tuple[StreamState, int, int, int]], cutting: Cutting) -> list[Span]:
        """Cut ranges into spans for tasks."""
        return cut(partial(reading, self.where, uuid), ranges, cutting)

    def with_eras(self, uuid: str, streams: Mapping[str, Progress]) -> LogPosition:
        """Return a position with eras."""
        with reading(self.where, uuid) as txn:
            return LogPosition(
                uuid, {name: one._replace(eras=eras_of(txn, one.number, one.offsets)) for name, one in streams.items()}
            )

    def other_era(self, known: Progress) -> int | None:
        """Return a partition whose last message that was read has another era now."""
        with reading(self.where) as txn:
            return other_era(txn, known.number, known.offsets, known.eras)

    def offsets_after(self, uuid: str, asked: Collection[tuple[Span, int]]) -> list[int]:
        """Return, for each (span, bytes), the offset at the end of the block that reaches so many bytes."""
        with reading(self.where, uuid) as txn:
            return [offset_after(txn, *span[1:], most_bytes) for span, most_bytes in asked]

    def committed(self, uuid: str, group: str) -> OfOwners:
        """Return where a group has come to."""
        return committed_of(self.where, group, uuid)

    def lease(self, uuid: str, group: str) -> Group:
        """Take a group's lease, by the lock of a file."""
        look(self.where, uuid)  # raises for another log: its group's offsets must not be replaced
        return Group(self.where, group, uuid, Files())

    def read(self, asked: Reading) -> Iterator[pa.RecordBatch]:
        """Yield the matching messages of a span, in order."""
        from qflow.arrow.reading import Request, read_span

        self._check_not_older(asked)
        transaction = partial(reading, self.where, asked.uuid, buffers=True)
        losses = ByOption(asked.fail_on_data_loss, f"`qflow check {self.where}`")
        return read_span(transaction, Request(asked.span, asked.filter, asked.columns), losses)

    def _check_not_older(self, asked: Reading) -> None:
        span = asked.span
        with reading(self.where, asked.uuid) as txn:
            if not recovery.is_there(txn, span.owner):
                return
            end = read_row(txn, span.owner, span.partition).next - (span.partition << LANE_SHIFT)
            planned = span.end if asked.known is None else asked.known.offset
            if end >= planned and (asked.known is None or not is_other(txn, span.owner, span.partition, asked.known)):
                return
            what = f"ends at offset {end}" if end < planned else "holds other messages in place"
            raise StorageError(
                f"the spool at {self.where} on host {socket.gethostname()!r} {what} of stream {span.stream!r}, "
                f"partition {span.partition}, and what was planned ends at {planned}: it is an older copy. Serve the "
                f"one that is written to with `qflow serve {self.where} --flight HOST:PORT`, and give "
                "grpc+tls://HOST:PORT as the path"
            )

    def stage(self, asked: Staging) -> LocalStage:
        """Begin a file of a batch."""
        return LocalStage(self.where, asked)

    def check_hand_over(self, manifest: Manifest) -> None:
        """See that a batch would not be refused for its number or its plan."""
        from qflow.spark.places.local import Handover

        Handover(self.where, manifest, 0.0).check()

    def hand_over(self, manifest: Manifest, staged: Batch, timeout_s: float) -> None:
        """Return when a batch is in the log."""
        from qflow.spark.places.local import Handover  # imports the engine, which tasks do not need

        Handover(self.where, manifest, timeout_s, staged).run()

    def discard(self, tokens: Collection[str]) -> None:
        """Remove the stages of these tokens that are not handed in."""
        discard_staged(self.where, tokens)


class LocalStage:
    """One file that a task writes; see `Stage`. The file is made with the first rows."""

    def __init__(self, spool: str, asked: Staging) -> None:
        with reading(spool, asked.uuid) as txn:
            found = recovery.read(txn, spool)
        self._takers = Takers(found, spool, asked.stream)
        self._asked = asked
        self._spool = spool
        self._directory = stages.staged(spool, asked.batch, asked.token)
        self._outgoing: Outgoing | None = None
        self._writer: StageWriter | None = None

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows."""
        with _as_sentences(self._directory):
            if self._outgoing is None or self._writer is None:
                from qflow.arrow.outgoing import Outgoing

                columns = {name: number for number, name in enumerate(rows.schema.names)}
                self._outgoing = Outgoing(columns, self._asked.topic, self._takers)
                if self._asked.replaces:
                    stages.remove_earlier(Files(), self._spool, self._asked.batch, self._asked.token)
                self._writer = StageWriter(Files(), self._directory, self._asked.name)
            self._outgoing.add(rows, self._writer)

    def finish(self) -> Written:
        """Have them on the disk. One sync."""
        with _as_sentences(self._directory):
            file = None if self._writer is None else self._writer.finish()
        return Written(file, frozenset(self._takers.found))

    def discard(self) -> None:
        """Remove what was written, as far as that can be done."""
        if self._writer is not None:
            self._writer.discard()


@contextmanager
def _as_sentences(directory: str) -> Iterator[None]:
    """Raise StorageError in place of OSError."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, "write a batch", directory) from error
