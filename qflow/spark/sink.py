"""`df.write.format("qflow")` and `df.writeStream.format("qflow")`: rows published into a spool, each batch once.

    write    each task checks its rows and writes them to a file of its own, in a stage of the batch, synced
    commit   the files of successful tasks are handed in together; it returns once they are in the log
    abort    the stage is removed

A batch is identified by the id of its query, which is in the checkpoint, and its number. The owner of the spool, or
without one this sink itself, puts it into the log in one transaction with a record of it; see `qflow.adoption`. A batch
that is repeated after a crash is found by that record, and is not stored again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from uuid import uuid4

import attrs
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from qflow.errors import InvalidArgument
from qflow.spark import spools
from qflow.spark.checkpoints import make_durable
from qflow.spark.outgoing import Outgoing, check_columns
from qflow.spark.takers import Taker, Takers
from qflow.spark.words import plainly
from qflow.spark.write_options import WriteOptions, stage_of, target_of
from qflow.storage.files import Files, storage_error
from qflow.storage.inbox import stages
from qflow.storage.inbox.batches import Target
from qflow.storage.inbox.stage_files import StageFile, StageWriter
from qflow.storage.inbox.stages import Batch, Manifest, check_batch
from qflow.storage.log import recovery

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

_QUERY, _BATCH = "sql.streaming.queryId", "streaming.sql.batchId"
"""Properties that Spark sets for tasks of a streaming query."""


@attrs.frozen
class Staged(WriterCommitMessage):
    """What one task has written; sent to the writer that commits."""

    batch: Batch
    token: str
    uuid: str
    file: StageFile | None
    """None = it had no rows."""
    takers: frozenset[Taker]
    """Streams and queues that take its rows."""


class _Writer:
    """The part that both writers share; pickled from the driver to the tasks."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        """Check that rows of this schema can be written with these options."""
        self._options = options
        self._columns = check_columns(schema, options.topic)
        found = spools.look(options.path)
        takers = Takers(found.found, options.path, options.stream)
        if options.topic is not None:
            takers.room(options.topic)
        self._uuid = found.uuid
        self._token = uuid4().hex

    def _stage(self, iterator: Iterator[pa.RecordBatch], batch: Batch) -> Staged:
        """Write the rows of one task to a file. One sync."""
        path = self._options.path
        with spools.reading(path, self._uuid) as txn:
            found = recovery.read(txn, path)
        takers = Takers(found, path, self._options.stream)
        outgoing = Outgoing(self._columns, self._options.topic, takers)
        directory = stages.staged(path, batch, self._token)
        writer: StageWriter | None = None
        with _as_sentences(directory):
            try:
                for rows in iterator:
                    if rows.num_rows:
                        if writer is None:
                            writer = StageWriter(Files(), directory, _file_name())
                        outgoing.add(rows, writer)
                file = None if writer is None else writer.finish()
            except BaseException:
                if writer is not None:
                    writer.discard()
                raise
        return Staged(batch, self._token, self._uuid, file, frozenset(takers.found))

    def _hand_over(
        self, messages: list[WriterCommitMessage | None], *, once: bool = False, every: bool = False, plan: str = ""
    ) -> None:
        """Return when a batch is in the log; with `every`, also one without rows; see `Manifest`."""
        found = [message for message in messages if isinstance(message, Staged)]
        files = tuple(message.file for message in found if message.file is not None)
        if files or (every and found):
            from qflow.spark.handover import Handover  # imports the engine, which tasks do not need

            batch, token, path = found[0].batch, found[0].token, self._options.path
            targets = self._targets(found)
            if targets:
                renamed = stage_of(batch, targets)
                with _as_sentences(stages.staged(path, batch, token)):
                    stages.rename_staged(Files(), path, batch, token, renamed)
                batch = renamed
            manifest = Manifest(
                batch=batch,
                token=token,
                uuid=found[0].uuid,
                once=once,
                every=every,
                plan=plan,
                files=files,
                targets=targets,
            )
            Handover(path, manifest, self._options.commit_timeout_s).run()

    def _targets(self, found: list[Staged]) -> tuple[Target, ...]:
        """Return the targets of a batch of an application; none for any other batch."""
        app = self._options.batch
        if app is None:
            return ()
        takers = frozenset[Taker]().union(*(message.takers for message in found))
        return tuple(sorted(target_of(app, *taker[:3], self._options.topic) for taker in takers))

    def _discard(self, *tokens: str) -> None:
        """Remove the stages of these tokens that are not handed in.

        Raises:
            StorageError: one could not be removed.
        """
        for directory, _ in stages.list_staged(Files(), self._options.path):
            if directory.endswith(tokens):
                try:
                    stages.remove_tree(Files(), directory)
                except OSError as error:
                    raise storage_error(error, "remove what was written of a batch", directory) from error


class BatchWriter(_Writer, DataSourceArrowWriter):
    """Writes one data frame, all or nothing; with options `txnAppId` and `txnVersion`, each version once."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._batch = options.batch or check_batch(f"batch-{uuid4().hex}", 0)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of one task."""
        with plainly():
            return self._stage(iterator, self._batch)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Return when all rows are in the log."""
        with plainly():
            self._hand_over(messages, once=self._options.batch is None)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Remove what tasks have staged."""
        with plainly():
            self._discard(self._token)


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Writes the batches of a streaming query. The object that commits is not the one that wrote: see `Staged`."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of one task of a batch."""
        with plainly():
            return self._stage(iterator, _batch_of_task())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Return when the batch is in the log, and its plan in the checkpoint is synced."""
        with plainly():
            checkpoint = self._options.checkpoint
            plan = "" if checkpoint is None else make_durable(checkpoint, batchId, Files())
            self._hand_over(messages, every=True, plan=plan)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Remove what tasks have staged."""
        with plainly():
            self._discard(*{message.token for message in messages if isinstance(message, Staged)})


def refuse_overwrite(overwrite: bool) -> None:
    """Refuse mode overwrite: a spool keeps what it holds.

    Raises:
        InvalidArgument: `overwrite` is set.
    """
    if overwrite:
        raise InvalidArgument("format qflow appends to a spool, and replaces nothing there: write with .mode('append')")


def _batch_of_task() -> Batch:
    context = TaskContext.get()
    query = None if context is None else context.getLocalProperty(_QUERY)
    number = None if context is None else context.getLocalProperty(_BATCH)
    if query is None or number is None:
        raise InvalidArgument(
            "Spark did not tell this task which batch of which query it belongs to, and without that it cannot be "
            "written once: use PySpark 4.2 or newer, and no other than a micro-batch trigger"
        )
    return check_batch(query, int(number))


def _file_name() -> str:
    """Return a file name that sorts by partition, and differs for each attempt at one."""
    context = TaskContext.get()
    partition = 0 if context is None else context.partitionId()
    return f"{partition:06d}-{uuid4().hex}"


@contextmanager
def _as_sentences(directory: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(error, "write a batch", directory) from error
