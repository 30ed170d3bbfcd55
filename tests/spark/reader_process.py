"""Readers as Spark's workers run them, in a process of their own and without a Spark around: milliseconds each.

What is raised here may not come through a pickle; it is told as its name and its sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import wraps
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import qflow

EARLIEST = {"startingOffsets": "earliest"}

_streaming: list[Any] = []


def publish(broker: qflow.Broker, count: int, start: int = 0, topic: str = "plant/{}/heat") -> None:
    """Publish numbered messages over ten topics."""
    broker.publish_many([(topic.format(n % 10), b"%d" % n) for n in range(start, start + count)])


class Told(Exception):
    """An error of the other process: `GapError: stream ...`."""


class ReaderProcess:
    """A process that reads, beside the owner of the spool."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))

    def __call__(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what one of the functions below returns there."""
        return self._pool.submit(work, *args, **kwargs).result(timeout=60)

    def close(self) -> None:
        self._pool.shutdown()


def told(work: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(work)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        from qflow.errors import QflowError

        try:
            return work(*args, **kwargs)
        except QflowError as error:
            raise Told(f"{type(error).__name__}: {error}") from None

    return wrapped


def _source(spool: str, options: dict[str, str]) -> tuple[Any, Any]:
    """Return the source, and a schema for it; an option that is empty is none."""
    from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType

    from qflow.spark.source import QflowDataSource

    types = {
        "key": BinaryType(),
        "value": BinaryType(),
        "topic": StringType(),
        "partition": IntegerType(),
        "offset": LongType(),
    }
    schema = StructType([StructField(name, type_) for name, type_ in types.items()])
    given = {"subscribe": "plants", "path": spool} | options
    return QflowDataSource({name: value for name, value in given.items() if value}), schema


def _numbers(batches: Iterator[Any]) -> list[int]:
    return [int(value) for batch in batches for value in batch.column("value").to_pylist()]


@told
def batch(spool: str, **options: str) -> list[int]:
    """Return the numbers a batch query reads."""
    source, schema = _source(spool, options)
    reader = source.reader(schema)
    return [number for part in reader.partitions() for number in _numbers(reader.read(part))]


@told
def batches(spool: str, **options: str) -> list[tuple[list[int], int]]:
    """Return the offsets and the size of each record batch a batch query reads."""
    source, schema = _source(spool, options)
    reader = source.reader(schema)
    return [
        (rows.column("offset").to_pylist(), rows.nbytes) for part in reader.partitions() for rows in reader.read(part)
    ]


@told
def plan(spool: str, **options: str) -> tuple[Any, list[Any]]:
    """Return a batch reader and what its tasks are to read."""
    source, schema = _source(spool, options)
    reader = source.reader(schema)
    return reader, list(reader.partitions())


@told
def run(reader: Any, parts: list[Any]) -> list[int]:
    """Return what tasks read that were planned before."""
    return [number for part in parts for number in _numbers(reader.read(part))]


@told
def run_at(spool: str, part: Any) -> list[int]:
    """Return what a task reads on a host where another spool is at that path."""
    from qflow.arrow.schema import Column
    from qflow.spark.places.local import LocalPlace
    from qflow.spark.places.place import Reading

    asked = Reading(part.uuid, part.span, "#", (Column("value"),), fail_on_data_loss=True)
    return _numbers(LocalPlace(spool).read(asked))


@told
def begin(spool: str, **options: str) -> dict[str, Any]:
    """Begin a streaming query, and return where it begins by itself."""
    source, schema = _source(spool, options)
    reader = source.streamReader(schema)
    _streaming[:] = [reader]
    offset: dict[str, Any] = reader.initialOffset()
    return offset


def end() -> None:
    """End the query, and its lease with it."""
    while _streaming:
        reader = _streaming.pop()
        if hasattr(reader, "close"):  # one that was refused has no lease
            reader.close()


@told
def go_on(spool: str, **options: str) -> None:
    """Begin a streaming query that has a checkpoint; the one before is over, and its lease with it."""
    end()
    source, schema = _source(spool, options)
    _streaming[:] = [source.streamReader(schema)]


@told
def until_now() -> None:
    """Go no further than what is there."""
    _streaming[0].prepareForTriggerAvailableNow()


@told
def latest(start: dict[str, Any]) -> dict[str, Any]:
    """Return where the next batch of the query ends."""
    reader = _streaming[0]
    end: dict[str, Any] = reader.latestOffset(start, reader.getDefaultReadLimit())
    return end


def report() -> dict[str, Any] | None:
    """Return what the query has Spark show."""
    shown: dict[str, Any] | None = _streaming[0].reportLatestOffset()
    return shown


def go_away_once(url: str, action: str, passed: int = 0) -> None:
    """Have the broker there answer so many actions of this name, be away for the next one, and answer again then."""
    from qflow.spark.places.calls import Door
    from qflow.spark.words import Away

    asked = Door.action
    left = iter(range(passed))

    def answer(door: Any, name: str, body: Any, **more: Any) -> Any:
        if (door.url, name) == (url, action) and next(left, None) is None:
            Door.action = asked  # type: ignore[method-assign]
            raise Away(f"the broker at {url} is away")
        return asked(door, name, body, **more)

    Door.action = answer  # type: ignore[method-assign]


def look_now(spool: str) -> None:
    """Have the next look of the query find what is there now."""
    from qflow.spark.places import local

    look, seen = local.look, local.look(spool)

    def look_back(*_: Any) -> Any:
        local.look = look
        return seen

    local.look = look_back


@told
def micro_batch(start: dict[str, Any], end: dict[str, Any]) -> list[int]:
    """Return what a batch of the query reads."""
    import pickle

    reader = _streaming[0]
    copy = pickle.loads(pickle.dumps(reader))
    return [number for part in reader.partitions(start, end) for number in _numbers(copy.read(part))]


def map_no_more_than(size: int) -> None:
    """Have logs mapped with so many bytes from here on."""
    from qflow.storage import environment

    environment.MAP_BYTES = size


def mapped(spool: str) -> int:
    """Return how many bytes of a log are mapped."""
    from qflow.spark import spools

    (opened,) = [one for one in spools._open.values() if one.spool == spool]
    size: int = opened.env._env.info()["map_size"]
    return size


def let_go(spool: str) -> None:
    """Close what is open of a spool."""
    from qflow.spark import spools

    spools.let_go(spool)


@told
def blocks_read(spool: str, topic_filter: str) -> tuple[int, int, int]:
    """Return how many blocks of the first stream a filter has decoded, hold a match, and are there."""
    from qflow.spark import spools
    from qflow.storage import blocks
    from qflow.storage.log.keys import scan
    from qflow.storage.streams import columns as column_pieces
    from qflow.storage.streams import partitions
    from qflow.streams.interest import Interest
    from qflow.streams.topic_filter import compile_filter

    (stream,) = spools.look(spool).streams.values()
    interest = Interest(topic_filter, stream.owner, print)
    matches = compile_filter(topic_filter)
    decoded = matching = there = position = 0
    with spools.reading(spool, buffers=False) as txn:
        end = stream.rows[0].next
        for _, value in scan(txn, stream.owner, 0, 0, end):
            there += 1
            matching += any(map(matches, blocks.read_names(value, where="a block")))
        while position < end:
            found = column_pieces.read(txn, partitions.Query(stream.owner, 0, position, end, 2**20, interest))
            decoded += found.decoded
            position = found.position
    return decoded, matching, there
