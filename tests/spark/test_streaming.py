"""`spark.readStream.format("qflow")`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import pytest

import qflow
from qflow.spark import lag
from qflow.storage.files import Files
from qflow.storage.streams import groups
from spark.trees import Trees, said, tell
from unit.clocks import until

SEED = int(os.environ.get("QFLOW_SEED", "1"))
ROUNDS = int(os.environ.get("QFLOW_ROUNDS", "2"))


class Pipe:
    """A query from a stream into Parquet, and what it has written."""

    def __init__(self, spark: Any, spool: Path, tmp_path: Path) -> None:
        self._spark = spark
        self._spool = spool
        self.out, self.checkpoint = tmp_path / "out", tmp_path / "checkpoint"

    def start(self, *, once: bool = True, **options: Any) -> Any:
        """Start it: until it has read what is there, or on and on."""
        options = (
            {"startingOffsets": "earliest"}
            | ({} if "subscribePattern" in options else {"subscribe": "plants"})
            | options
        )
        frame = self._spark.readStream.format("qflow").options(**options).load(str(self._spool))
        writer = frame.writeStream.format("parquet").option("checkpointLocation", str(self.checkpoint))
        writer = writer.trigger(availableNow=True) if once else writer.trigger(processingTime="0 seconds")
        return writer.start(str(self.out))

    def run(self, **options: Any) -> Any:
        """Run it to the end of what is there."""
        query = self.start(**options)
        query.awaitTermination()
        return query

    def numbers(self) -> list[int]:
        """Return the numbers of the messages it has written, sorted."""
        return sorted(int(row.value) for row in self._spark.read.parquet(str(self.out)).collect())


@pytest.fixture
def pipe(spark: Any, spool: Path, tmp_path: Path) -> Pipe:
    return Pipe(spark, spool, tmp_path)


def publish(broker: qflow.Broker, count: int, start: int = 0, topic: str = "plant/{}/heat") -> None:
    broker.publish_many([(topic.format(n % 10), b"%d" % n) for n in range(start, start + count)])


def sizes(query: Any) -> list[int]:
    """Return how many messages each batch had."""
    return [one["numInputRows"] for one in query.recentProgress if one["numInputRows"]]


def test_a_query_goes_on_where_it_was(broker: qflow.Broker, plants: Any, pipe: Pipe) -> None:
    """From its checkpoint, each message once: also where its last batch was not finished."""
    publish(broker, 1000)
    pipe.run()
    assert pipe.numbers() == list(range(1000))
    pipe.run()
    publish(broker, 500, 1000)
    pipe.run()
    assert pipe.numbers() == list(range(1500))
    publish(broker, 70, 1500)
    for log in (pipe.checkpoint / "commits", pipe.out / "_spark_metadata"):  # as after a crash with a batch in flight
        (log / "1").unlink()
        (log / ".1.crc").unlink()
    assert sizes(pipe.run()) == [500, 70]
    assert pipe.numbers() == list(range(1570))


def test_batches_are_no_larger_than_asked_for(broker: qflow.Broker, plants: Any, pipe: Pipe) -> None:
    """In messages or in bytes, also where all that is there is to be read; how far behind it is shows its progress."""
    publish(broker, 1000)
    query = pipe.run(maxOffsetsPerTrigger=300)
    assert sizes(query) == [300, 300, 300, 100]
    assert [lag(one) for one in query.recentProgress if one["numInputRows"]] == [700, 400, 100, 0]
    assert pipe.numbers() == list(range(1000))
    for start in range(1000, 3000, 500):
        broker.publish_many([("plant/1", b"%0100d" % n) for n in range(start, start + 500)])
    by_bytes = sizes(pipe.run(maxBytesPerTrigger="1KiB"))
    assert len(by_bytes) > 1
    assert sum(by_bytes) == 2000
    assert pipe.numbers() == list(range(3000))


def test_latest_is_where_a_query_begins_by_itself(broker: qflow.Broker, plants: Any, pipe: Pipe) -> None:
    """As with Kafka: what was there before is not read. What comes is, and a compaction between two batches is no end."""
    publish(broker, 10)
    query = pipe.start(once=False, startingOffsets="latest")
    query.processAllAvailable()
    publish(broker, 10, 10)
    query.processAllAvailable()
    broker.compact()  # another file from here on, also for what the workers have open
    publish(broker, 10, 20)
    query.processAllAvailable()
    query.stop()
    assert pipe.numbers() == list(range(10, 30))


def test_streams_that_match_a_pattern_appear_while_it_runs(broker: qflow.Broker, plants: Any, pipe: Pipe) -> None:
    """And are read from their beginning, with all their partitions."""
    publish(broker, 10)
    query = pipe.start(once=False, subscribePattern="p.*")
    query.processAllAvailable()
    broker.declare_stream("pears", topics=["pear/#"], partitions=3)
    publish(broker, 20, 10, topic="pear/{}")
    broker.declare_stream("apples", topics=["apple/#"])
    publish(broker, 20, 100, topic="apple/{}")
    query.processAllAvailable()
    publish(broker, 5, 30)
    query.processAllAvailable()
    query.stop()
    assert pipe.numbers() == list(range(35))


def test_a_group_has_one_query(
    spark: Any, broker: qflow.Broker, plants: Any, pipe: Pipe, spool: Path, tmp_path: Path
) -> None:
    """A second one is told who has it, and may have it as soon as the first one has stopped."""
    publish(broker, 10)
    other = Pipe(spark, spool, tmp_path / "other")
    query = pipe.start(once=False, group="archive")
    query.processAllAvailable()
    with pytest.raises(
        Exception, match=r"group 'archive' of the spool .* is in use by process \d+: stop the query"
    ) as caught:
        other.run(group="archive")
    assert "Traceback" not in str(caught.value)
    query.stop()
    other.run(group="archive")
    assert pipe.numbers() == other.numbers() == list(range(10))


def test_kill_9_of_the_whole_tree_loses_and_doubles_nothing(
    spark: Any, broker: qflow.Broker, pipe: Pipe, spool: Path, trees: Trees
) -> None:
    """Source to Parquet, while messages come in and retention runs; Parquet of a killed stream is read with Spark."""
    draw = Random(SEED)
    print("seed", SEED)
    broker.declare_stream("plants", topics=["plant/#"], retention_messages=100)
    group = groups.Group(str(spool), "archive", str(broker.uuid), Files())
    group.acknowledge({broker.stream("plants").owner: {0: 0}})  # from here on, retention waits for it
    group.close()
    publish(broker, 500)
    published = 500
    offsets = pipe.checkpoint / "offsets"

    def planned() -> int:
        """Return how many batches were begun; the last of them is in flight."""
        return len([one for one in offsets.glob("[0-9]*") if one.name.isdecimal()]) if offsets.is_dir() else 0

    def start() -> subprocess.Popen[str]:
        return trees.start("stream_worker.py", spool, pipe.out, pipe.checkpoint)

    following = start()
    for number in range(ROUNDS):
        process = following
        assert said(process) == "ready\n"
        tell(process, "begin")
        if number + 1 < ROUNDS:
            following = start()  # Spark takes longest to start: the next one does so beside this one
        batch = planned()
        for _ in range(draw.randrange(1, 5)):
            publish(broker, 200, published)
            published += 200
        until(lambda: planned() > batch)  # noqa: B023 - it is called here only
        for _ in range(draw.randrange(200)):
            publish(broker, 1, published)  # some moment later, by commits and not by the clock
            published += 1
        trees.kill(process)
    pipe.run(group="archive")
    assert pipe.numbers() == list(range(published))
