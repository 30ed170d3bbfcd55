"""`df.write.format("qflow")` and `df.writeStream.format("qflow")`: rows published into a spool, each batch once.

    write    each task checks its rows and writes them to a file of its own, in a stage of the batch, synced; what an
             earlier attempt of a streaming query left of the batch is removed
    commit   the files of successful tasks are handed in together; it returns once they are in the log
    abort    the stage is removed

A batch is identified by the id of its query, which is in the checkpoint, and its number. The owner of the spool, or
without one this sink itself, puts it into the log in one transaction with a record of it; see `qflow.adoption`. A batch
that is repeated after a crash is found by that record, and is not stored again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import attrs
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from qflow.arrow.takers import Taker, Takers
from qflow.errors import InvalidArgument, QflowError, StorageError
from qflow.loggers import get_logger
from qflow.named_tuples import NamedTuple
from qflow.spark.places.parse import check_hosts, local_path
from qflow.spark.places.place import Place, Stage, Staging, Written
from qflow.spark.ranges import look_at
from qflow.spark.spools import other_log
from qflow.spark.words import plainly
from qflow.spark.write_options import WriteOptions, stage_of, target_of
from qflow.storage.files import Files, read_whole, storage_error
from qflow.storage.inbox.batches import Target
from qflow.storage.inbox.stages import Batch, Manifest, check_batch, new_token

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

_logger = get_logger("qflow.spark")
_QUERY, _BATCH = "sql.streaming.queryId", "streaming.sql.batchId"
"""Properties that Spark sets for tasks of a streaming query."""


class Part(NamedTuple):
    """What one task has written for one of the places."""

    uuid: str
    written: Written


@attrs.frozen
class Staged(WriterCommitMessage):
    """What one task has written; sent to the writer that commits."""

    batch: Batch
    token: str
    parts: tuple[Part, ...]
    """By place, in the order of the uuids."""


class _Writer:
    """The part that both writers share; pickled from the driver to the tasks."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        """Check that rows of this schema can be written with these options."""
        self._options = options
        self._columns = check_columns(schema, options.topic)
        check_hosts(options.places, same=options.same_on_every_host)
        self._places: dict[str, Place] = {}
        """By the uuid of the log, in the order of those."""
        for seen in sorted(look_at(options.places), key=lambda seen: seen.uuid):
            takers = Takers(seen.state.found, seen.place.where, options.stream)
            if options.topic is not None:
                takers.room(options.topic)
            self._places[seen.uuid] = seen.place
        self._token = new_token()

    def _stage(self, iterator: Iterator[pa.RecordBatch], batch: Batch, *, replaces: bool = False) -> Staged:
        """Write the rows of one task to a file at each place that gets some. One sync each."""
        name, options = _file_name(), self._options
        opened: list[Stage] = []
        try:
            for uuid, place in self._places.items():
                asked = Staging(uuid, batch, self._token, name, options.topic, options.stream, replaces)
                opened.append(place.stage(asked))
            for rows in iterator:
                if rows.num_rows:
                    for stage, share in zip(opened, shares_of(rows, self._columns, len(opened)), strict=True):
                        if share.num_rows:
                            stage.add(share)
            parts = [Part(uuid, stage.finish()) for uuid, stage in zip(self._places, opened, strict=True)]
        except BaseException:
            for stage in opened:
                stage.discard()
            raise
        return Staged(batch, self._token, tuple(parts))

    def _hand_over(
        self, messages: list[WriterCommitMessage | None], *, once: bool = False, every: bool = False, plan: str = ""
    ) -> None:
        """Return when a batch is in each log; with `every`, also one without rows; see `Manifest`."""
        found = [message for message in messages if isinstance(message, Staged)]
        if len(self._options.places) > 1 and found:
            plan = xxh3_64_hexdigest(" ".join([plan, *(part.uuid for part in found[0].parts)]).encode())
        manifests = []
        for uuid, place in self._places_of(found).items():
            parts = [part.written for message in found for part in message.parts if part.uuid == uuid]
            files = tuple(part.file for part in parts if part.file is not None)
            if files or every:
                targets = self._targets(parts)
                batch = stage_of(found[0].batch, targets) if targets else found[0].batch
                token = found[0].token
                manifest = Manifest(
                    batch=batch, token=token, uuid=uuid, once=once, every=every, plan=plan, files=files, targets=targets
                )
                manifests.append((place, manifest))
        if len(manifests) > 1:
            for place, manifest in manifests:  # one that would refuse it does so before another has taken it
                place.check_hand_over(manifest)
        stored: list[str] = []
        for place, manifest in manifests:
            try:
                place.hand_over(manifest, found[0].batch, self._options.commit_timeout_s)
            except QflowError as error:
                if not stored or not once:
                    raise
                text = f"{error}. What goes to {', '.join(stored)} of this data frame is stored"
                raise type(error)(text) from error
            stored.append(place.where)

    def _places_of(self, found: list[Staged]) -> dict[str, Place]:
        """Return the places that tasks have written to; the object that commits may be another than the one that
        planned."""
        wanted = {part.uuid for message in found for part in message.parts}
        if wanted <= self._places.keys():
            return {uuid: place for uuid, place in self._places.items() if uuid in wanted}
        raise other_log(self._options.path, min(wanted - self._places.keys()), ", ".join(self._places))

    def _targets(self, parts: list[Written]) -> tuple[Target, ...]:
        """Return the targets of a batch of an application; none for any other batch."""
        app = self._options.batch
        if app is None:
            return ()
        takers = frozenset[Taker]().union(*(part.takers for part in parts))
        return tuple(sorted(target_of(app, *taker[:3], self._options.topic) for taker in takers))

    def _discard(self, *tokens: str) -> None:
        """Remove the stages of these tokens that are not handed in, as far as that can be done.

        Spark would show an error of it in place of the one for which it is done. What stays, its owner removes a day
        later.
        """
        for place in self._places.values():
            try:
                place.discard(tokens)
            except (QflowError, OSError) as error:
                _logger.warning("what a batch that failed has staged stays for now: %s", error)


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
            return self._stage(iterator, _batch_of_task(), replaces=True)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Return when the batch is in the log, and its plan in the checkpoint is synced."""
        with plainly():
            checkpoint = self._options.checkpoint
            plan = "" if checkpoint is None else make_durable(checkpoint, batchId, Files())
            self._hand_over(messages, every=True, plan=plan)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Remove what tasks have staged, as far as they said so: the next attempt removes the rest."""
        with plainly():
            self._discard(*{message.token for message in messages if isinstance(message, Staged)})


def refuse_overwrite(overwrite: bool) -> None:
    """Refuse mode overwrite: a spool keeps what it holds. Raises InvalidArgument: `overwrite` is set."""
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


def make_durable(location: str, batch: int, files: Files) -> str:
    """Sync the query's id and the plan of a batch in a checkpoint; return a digest of the plan.

    Spark writes its checkpoint without a sync. If a power cut lost batch N there and not in the log, Spark would plan
    another batch N with more messages, and the log would take it for a repetition and store none of them.

    Args:
        location: of the checkpoint, as Spark was given it. One that is not on a disk of this host is left alone.

    Raises:
        StorageError: the sync failed, or the batch is not in the checkpoint.
    Cost: six syncs of small files; those synced before cost nothing.
    """
    path = local_path(location)
    if path is None:
        return ""
    offsets = os.path.join(path, "offsets")
    try:
        for directory, name in ((path, "metadata"), (offsets, str(batch))):
            files.sync_file(os.path.join(directory, name))
            with suppress(FileNotFoundError):  # Hadoop's checksum, if it writes one
                files.sync_file(os.path.join(directory, f".{name}.crc"))
        for directory in (offsets, path, os.path.dirname(path)):
            files.sync_directory(directory)
        return xxh3_64_hexdigest(read_whole(files, os.path.join(offsets, str(batch))))
    except FileNotFoundError as error:
        raise StorageError(
            f"batch {batch} is not in the checkpoint at {path} ({error.filename} is missing), and is not stored for "
            "good before it is: let nobody remove a checkpoint that is in use"
        ) from error
    except OSError as error:
        raise storage_error(error, "sync the checkpoint", path) from error


_TEXT = ("binary", "string")
_HEADERS = "array<struct<key:string,value:binary>>"


def check_columns(schema: StructType, topic: str | None) -> dict[str, int]:
    """Return the indexes of the columns to write, by name, after checking their types; other columns are left out.

    Raises:
        InvalidArgument: one is missing, or has another type.
    """
    wanted = {"key": _TEXT, "value": _TEXT, "topic": ("string",), "headers": (_HEADERS,)}
    found: dict[str, int] = {}
    for number, field in enumerate(schema.fields):
        name = field.name.lower()
        if name not in wanted or (name == "topic" and topic is not None):
            continue
        if name in found:
            raise InvalidArgument(f"the data frame has two columns {name!r}: rename or drop one of them")
        type_ = field.dataType.simpleString()
        if type_ not in wanted[name]:
            raise InvalidArgument(
                f"column {field.name!r} is {type_}, and must be {' or '.join(wanted[name])} to be written: cast it"
            )
        found[name] = number
    if "value" not in found:
        raise InvalidArgument(
            f"there is no column 'value' (there are: {', '.join(schema.fieldNames()) or 'none'}), and it is what "
            "becomes the body of a message: make one, for example with to_json(struct('*')).alias('value')"
        )
    if "topic" not in found and topic is None:
        raise InvalidArgument(
            "say where the rows are published: with a column 'topic', or .option('topic', 'plant/1/heat') for all"
        )
    return found


def shares_of(rows: pa.RecordBatch, columns: dict[str, int], count: int) -> list[pa.RecordBatch]:
    """Return the rows that each of `count` places gets, with the columns to write under their names, in order.

    Those of one key go to one place; those without a key, by their topic; those without either, to the first, which
    refuses them. Cost: 1 µs a key or topic where there are several places, else nothing.
    """
    import pyarrow as pa

    chosen = pa.RecordBatch.from_arrays([rows.column(number) for number in columns.values()], names=list(columns))
    if count == 1:
        return [chosen]
    places = _places_of(chosen, "topic", count)
    if "key" in columns:
        keyed = _places_of(chosen, "key", count)
        places = [by_topic if by_key is None else by_key for by_key, by_topic in zip(keyed, places, strict=True)]
    found = [place or 0 for place in places]
    return [chosen.filter(pa.array([place == number for place in found], pa.bool_())) for number in range(count)]


def _places_of(rows: pa.RecordBatch, name: str, count: int) -> list[Any]:
    """Return the place of each row by a column; None where that is null, place 0 where there is no such column."""
    if name not in rows.schema.names:
        return [0] * rows.num_rows
    encoded = rows.column(rows.schema.names.index(name)).cast("binary").dictionary_encode()
    places = [xxh3_64_intdigest(one) % count for one in encoded.dictionary.to_pylist()]
    return [None if number is None else places[number] for number in encoded.indices.to_pylist()]
