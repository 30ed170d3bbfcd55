"""A stream archived as Parquet files, each message once: what `qflow pipeline run` does.

A directory holds one archive, with a record of its contents: a stream, a filter, and how the files are split. Its
position is in Spark's checkpoint there, so a next run goes on. One process at a time writes to it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

from qflow.errors import InvalidArgument, SpoolInUse, StorageError
from qflow.named_tuples import NamedTuple
from qflow.spark.options import naming
from qflow.spark.places.local import LocalPlace
from qflow.spark.places.parse import parse_places
from qflow.spark.words import spark_errors
from qflow.storage.files import FILE_MODE, Files, storage_error
from qflow.streams.topic_filter import check_filter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

AVAILABLE_NOW = "available-now"
PARTITIONS = ("topic", "date", "hour", "partition")
"""Columns by which an archive may be split into directories."""
CHECKPOINT, KEPT = "_qflow_checkpoint", "_qflow_archive"
"""Names that readers of Parquet skip: Spark's checkpoint, and the record of the archive's contents."""
COUNTED = "_spark_metadata"
"""Where Spark lists the files that count, one list for each batch; it skips a batch that has one already."""
_BATCH = re.compile(r"(\d{1,19})(\.compact)?")
LOOK_S = 0.2
_OF_NONE = "__HIVE_DEFAULT_PARTITION__"
"""Spark's name for the directory of rows without a topic."""
_DIRECTORY_OF_TOPIC = f"""if(topic = '{_OF_NONE}', raise_error(
    'qflow.errors.InvalidArgument: topic "{_OF_NONE}" cannot be a directory, for Spark would read it as no topic: '
    || 'leave it out with a filter, or archive without splitting by topic'), topic)"""


class Progress(NamedTuple):
    """One batch of an archive."""

    batch: int
    rows: int
    rows_per_s: float
    seconds: float


class Contents(NamedTuple):
    """The contents of an archive, which every run must repeat."""

    stream: str
    topic_filter: str = "#"
    partition_by: tuple[str, ...] = ()
    """Some of `PARTITIONS`."""


class Archive:
    """See the module. A context manager: this process may write to it inside of the context."""

    def __init__(
        self,
        spool: str,
        contents: Contents,
        directory: str,
        *,
        trigger: str = AVAILABLE_NOW,
        most_per_batch: int | None = None,
        group: str | None = None,
        reach: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Check the arguments; nothing is written, and Spark is not needed.

        Args:
            spool: its path, or the URL of its broker; or several, with commas between, as in option `path`.
            reach: options that say how to reach brokers, such as `tokenFile`.
            directory: of the files and the checkpoint.
            trigger: `available-now` ends with the messages there are; `10s` looks for new ones every ten seconds.
            most_per_batch: the most messages of a batch.
            group: name of the group it reads as, for which retention keeps what is not written yet.

        Raises:
            InvalidArgument: one of them makes no sense.
        """
        partition_by = contents.partition_by
        wrong = [name for name in partition_by if name not in PARTITIONS]
        if wrong:
            raise InvalidArgument(f"an archive cannot be split by {wrong[0]!r}: there are {', '.join(PARTITIONS)}")
        if len(set(partition_by)) < len(partition_by):
            raise InvalidArgument(f"an archive is split by each name once, not by {', '.join(partition_by)}")
        for place in parse_places({**reach, "path": spool}):
            inside = Path(directory).resolve().is_relative_to(Path(place.where).resolve())
            if isinstance(place, LocalPlace) and inside:
                raise InvalidArgument(f"{directory} lies inside the spool: give a directory outside of {place.where}")
        self._spool = spool
        self._reach = reach
        self._contents = contents
        self._directory = Path(directory)
        check_filter(contents.topic_filter)
        self._interval_ms = _interval_ms(trigger)
        self._most_per_batch = most_per_batch
        self._group = group
        self._fd = -1

    def __enter__(self) -> Archive:
        """Make the directory if it is missing, and claim it.

        Raises:
            InvalidArgument: it holds another archive, or other files; it was moved; or its checkpoint
                is lost.
            SpoolInUse: another process writes to it. StorageError: it cannot be written.
        """
        kept = self._directory / KEPT
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            others = [name for name in os.listdir(self._directory) if not name.startswith((".", "_"))]
            if others and not kept.exists():
                raise InvalidArgument(
                    f"{self._directory} holds files that are none of an archive, such as {min(others)!r}: give a new "
                    "or an empty directory"
                )
            self._fd = os.open(kept, os.O_RDWR | os.O_CREAT, FILE_MODE)
            try:
                self._claim(kept, bool(others))
                check_place(str(self._directory))
                self._check_whole(bool(others))
            except BaseException:
                self._release()
                raise
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise storage_error(error, "write an archive", self._directory) from error
            raise StorageError(
                f"cannot write an archive in {self._directory}: {error.strerror or error}; give a directory that this "
                "user can make, and write to"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0 and not (self._directory / CHECKPOINT).exists():
            os.ftruncate(self._fd, 0)  # nothing was written, so it may become another archive
        self._release()

    def _release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _claim(self, kept: Path, has_files: bool) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SpoolInUse(
                f"another process is writing the archive in {self._directory}: wait until it has ended, or give "
                "another directory"
            ) from error
        stream, topic_filter, partition_by = self._contents
        asked = {"stream": stream, "filter": topic_filter, "partition-by": ",".join(partition_by)}
        said = kept.read_bytes()
        if not said and not has_files and not (self._directory / CHECKPOINT).exists():
            os.pwrite(self._fd, json.dumps(asked).encode(), 0)
            os.fsync(self._fd)
            Files().sync_directory(str(self._directory))
            return
        try:
            found = dict(json.loads(said))
        except (ValueError, TypeError) as error:
            raise InvalidArgument(f"{kept} is damaged, and says no more what this is an archive of: {error}") from error
        for name, value in asked.items():
            if found.get(name) != value:
                raise InvalidArgument(
                    f"{self._directory} holds an archive with {name} {found.get(name)!r}, and now it is {value!r}: go "
                    "on as it was begun, or give another directory"
                )

    def _check_whole(self, has_files: bool) -> None:
        """Check that the checkpoint and the files agree: otherwise Spark would silently leave out messages."""
        offsets = _batches(self._directory / CHECKPOINT / "offsets")
        done = _batches(self._directory / CHECKPOINT / "commits")
        counted = _batches(self._directory / COUNTED)
        if counted and max(counted) not in offsets:
            what = f"batch {max(counted)} is among its files, and not in its checkpoint"
        elif done and max(done) > max(counted, default=-1):
            what = f"batch {max(done)} is done by its checkpoint, and not among its files"
        elif has_files and not offsets:
            what = "it has files, and no checkpoint"
        elif not (what := _damage(self._directory)):
            return
        raise InvalidArgument(
            f"the archive in {self._directory} cannot go on: {what} (see {CHECKPOINT} and {COUNTED} there), as after a "
            "power cut or a copy in parts, and messages would be left out. Bring both back as they were at one time, "
            "or begin anew in another directory"
        )

    def run(
        self,
        spark: SparkSession,
        *,
        tell: Callable[[Progress], object] = lambda progress: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> int:
        """Append the messages there are, and with a trigger of some seconds those to come, until `stopped`.

        Args:
            tell: called after each batch.
            stopped: called five times a second; True ends the run. A batch that is not done then does not count, and
                is written again by the next run.

        Returns:
            How many messages were written.

        Raises:
            QflowError: as reading the stream; StorageError: Spark could not write.
        """
        assert self._fd >= 0, "an archive is written within its `with`"
        with spark_errors():
            query = self._start(spark)
            seen = -1
            total = 0

            def count() -> None:
                nonlocal seen, total
                for found in query.recentProgress:
                    if found.batchId > seen and found.numInputRows:
                        seen = found.batchId
                        total += found.numInputRows
                        tell(_progress(found))

            try:
                while not (query.awaitTermination(LOOK_S) or stopped()):
                    count()
                    self._check_there()
            finally:
                query.stop()
            count()
            return total

    def _check_there(self) -> None:
        """Check that the directory is still there: otherwise Spark would make another one, and go on in it."""
        try:
            if os.path.samestat(os.fstat(self._fd), os.stat(self._directory / KEPT)):
                return
        except FileNotFoundError:
            pass
        raise StorageError(
            f"{self._directory} was moved or removed while the archive in it was written: remove what has been made in "
            "its place since, bring it back, and go on there; or begin anew in another directory"
        )

    def _start(self, spark: SparkSession) -> StreamingQuery:
        from pyspark.sql.functions import expr

        stream, topic_filter, partition_by = self._contents
        reader = spark.readStream.format("qflow").option(*naming(stream)).option("includeHeaders", True)
        reader = reader.option("startingOffsets", "earliest").option("filter", topic_filter)
        if self._most_per_batch is not None:
            reader = reader.option("maxOffsetsPerTrigger", self._most_per_batch)
        if self._group is not None:
            reader = reader.option("group", self._group)
        columns = ["*"]
        if "date" in partition_by:
            columns.append("to_date(timestamp) as date")
        if "hour" in partition_by:
            columns.append("hour(timestamp) as hour")
        frame = reader.options(**self._reach).load(self._spool).selectExpr(*columns)
        if "topic" in partition_by:
            frame = frame.withColumn("topic", expr(_DIRECTORY_OF_TOPIC))
        writer = frame.writeStream.format("parquet").option("checkpointLocation", str(self._directory / CHECKPOINT))
        if partition_by:
            writer = writer.partitionBy(*partition_by)
        if self._interval_ms is None:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=f"{self._interval_ms} milliseconds")
        return writer.start(str(self._directory))


def check_place(directory: str) -> None:
    """Check that an archive was not moved, nor copied: Spark lists its files by whole paths. Raises InvalidArgument."""
    root = Path(directory).resolve()
    for kept in _lists(Path(directory, COUNTED)):
        try:
            files = _noted(kept)
        except (OSError, ValueError):  # Spark will report what is wrong
            break
        for place in {path.parent for path, _ in files}:
            if not place.resolve().is_relative_to(root):
                top = place
                while top.name.startswith(tuple(f"{name}=" for name in PARTITIONS)):
                    top = top.parent
                raise InvalidArgument(
                    f"{directory} is an archive that was moved or copied from {top}: Spark looks for its files "
                    "there. Bring it back and use it there, or archive the stream anew, into another directory"
                )


def _damage(directory: Path) -> str:
    """Return which file Spark would miss later on, and go on without now; empty: there is none.

    Cost: 30 µs for each file of the archive.
    """
    looked_at = directory
    try:
        for place in (directory / CHECKPOINT / "offsets", directory / CHECKPOINT / "commits"):
            for batch in sorted(_batches(place))[-1:]:
                looked_at = place / str(batch)
                if not _recorded(looked_at):
                    return f"{looked_at} is cut short"
        for kept in _lists(directory / COUNTED):
            looked_at = kept
            for path, size_bytes in _noted(kept):
                looked_at = path
                if (found_bytes := path.stat().st_size) != size_bytes:
                    return f"{path} has {found_bytes:,} bytes, and had {size_bytes:,}"
    except FileNotFoundError:
        return f"{looked_at} is missing"
    except ValueError:
        return f"{looked_at} is empty or damaged"
    return ""


def _lists(counted: Path) -> Iterator[Path]:
    """Yield the lists that name the files that count: the newest one of all before it, and each one since."""
    batches = _batches(counted)
    whole = max((batch for batch in batches if (counted / f"{batch}.compact").exists()), default=-1)
    if whole >= 0:
        yield counted / f"{whole}.compact"
    yield from (counted / str(batch) for batch in range(whole + 1, max(batches, default=-1) + 1))


def _noted(kept: Path) -> list[tuple[Path, int]]:
    """Return the files that one of Spark's lists names, with their sizes. Raises ValueError: it is damaged."""
    try:
        return [(path_of(one["path"]), int(one["size"])) for one in _recorded(kept)]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError from error


def _recorded(kept: Path) -> list[Any]:
    """Return what Spark has recorded in a file: a version, then lines of JSON. Raises ValueError: it is damaged."""
    version, *lines = kept.read_bytes().splitlines() or [b""]
    if not version.startswith(b"v"):
        raise ValueError
    return [json.loads(line) for line in lines]


def path_of(uri: str) -> Path:
    """Return the path of a URI that Spark has written."""
    return Path(unquote(urlparse(uri).path))


def _batches(directory: Path) -> set[int]:
    """Return the numbers of the batches that Spark has recorded in a directory."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return set()
    return {int(found[1]) for found in map(_BATCH.fullmatch, names) if found is not None}


def _interval_ms(trigger: str) -> int | None:
    if trigger == AVAILABLE_NOW:
        return None
    try:
        seconds = float(trigger.strip().removesuffix("s"))
        if 0 <= seconds < 10**6:
            return round(seconds * 1000)
    except ValueError:
        pass
    raise InvalidArgument(f"a trigger is {AVAILABLE_NOW}, or seconds such as 10s, not {trigger!r}")


def _progress(found: Any) -> Progress:
    seconds = found.durationMs.get("triggerExecution", 0) / 1000
    rows = found.numInputRows  # as a key it is None by Spark Connect
    return Progress(found.batchId, rows, rows / seconds if seconds else 0.0, seconds)
