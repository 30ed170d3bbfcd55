"""Publishes Parquet files into a stream, once for the same files: what `qflow pipeline load` does.

A load is identified by the names and bytes of its files, so one that was interrupted can be repeated safely.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from qflow.arrow.takers import Takers
from qflow.errors import NotFound
from qflow.named_tuples import NamedTuple
from qflow.spark import spools
from qflow.spark.archive import check_place, path_of
from qflow.spark.words import spark_errors
from qflow.spark.write_options import batch_of, target_of
from qflow.storage.inbox import batches as sink_batches
from qflow.storage.inbox.stages import Batch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql import Column, DataFrame, SparkSession

READ_BYTES = 2**20
_INFERENCE = "spark.sql.sources.partitionColumnTypeInference.enabled"


class Loaded(NamedTuple):
    """The result of a load."""

    messages: int
    """Messages in the files."""
    before: bool
    """An earlier load had published them, and nothing was done."""


def load(spark: SparkSession, directory: str, spool: str, stream: str, *, name: str = "") -> Loaded:
    """Publish the rows of Parquet files into a stream, all or none; a repeated call publishes nothing.

    Rows of an archive keep their order by partition and offset.

    Args:
        name: of the load; under another name the same files are published again.

    Raises:
        NotFound: there is no such directory, or no stream takes a topic.
        InvalidArgument: columns are missing; or an archive was moved.
    Cost: the files are read twice, by this process and by Spark. This process must not own the spool.
    """
    if not Path(directory).is_dir():
        raise NotFound(f"there is no directory {directory}: give the one of the Parquet files")
    check_place(directory)
    with spark_errors():
        frame = _parquet(spark, directory)
        app = f"load-{_identity(directory, _files(frame), stream, name)}"
        messages = frame.count()  # of the files listed above; reads only their footers
        before = _is_there(spool, batch_of(app, "0"), stream)
        if not before:
            order = [key for name in ("partition", "offset") if name in frame.columns for key in _order(frame, name)]
            if order:
                frame = frame.orderBy(*order)
            writer = frame.write.format("qflow").mode("append").option("stream", stream)
            writer.option("txnAppId", app).option("txnVersion", 0).save(spool)
        return Loaded(messages, before)


def _is_there(spool: str, batch: Batch, stream: str) -> bool:
    """Return whether a stream has a batch of an application."""
    try:
        found = spools.look(spool)
        Takers(found.found, spool, stream)  # raises if there is no such stream
        target = target_of(batch, "stream", stream, found.streams[stream].owner, None)
        with spools.reading(spool, found.uuid) as txn:
            return sink_batches.adopted(txn, *batch, [target]).batch >= batch.batch
    finally:
        spools.let_go(spool)


def _parquet(spark: SparkSession, directory: str) -> DataFrame:
    """Return the rows of files, with columns of directory names as text: a topic may look like a number."""
    before = spark.conf.get(_INFERENCE)
    spark.conf.set(_INFERENCE, "false")
    try:
        return spark.read.parquet(directory)
    finally:
        spark.conf.set(_INFERENCE, str(before))


def _order(frame: DataFrame, name: str) -> list[str | Column]:
    """Return sort keys for a column, which may hold numbers as text."""
    if frame.schema[name].dataType.typeName() != "string":
        return [name]
    return [frame[name].try_cast("bigint"), name]


def _files(frame: DataFrame) -> list[Path]:
    """Return the files that Spark reads; of an archive, those that count."""
    return sorted(map(path_of, frame.inputFiles()))


def _identity(directory: str, files: Iterable[Path], stream: str, name: str) -> str:
    """Return a load's identity: a digest of the names and bytes of its files, its stream, and its name."""
    found = xxhash.xxh3_128(repr((stream, name)).encode())
    root = Path(directory).absolute()
    for path in files:
        named = path if path.is_relative_to(root) else root / path.resolve().relative_to(root.resolve())
        found.update(repr((str(named.relative_to(root)), path.stat().st_size)).encode())
        with path.open("rb") as file:
            while data := file.read(READ_BYTES):
                found.update(data)
    return found.hexdigest()
