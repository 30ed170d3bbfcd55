"""`spark.read.format("qflow")`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest

import qflow
from unit.clocks import Clock

Read = Callable[..., Any]


def publish(broker: qflow.Broker, count: int, start: int = 0, topic: str = "plant/{}/heat") -> None:
    """Publish numbered messages over ten topics."""
    numbers = range(start, start + count)
    broker.publish_many([(topic.format(number % 10), b"%d" % number) for number in numbers])


def values(frame: Any) -> list[int]:
    """Return the numbers of `publish`, in the order in which they are read."""
    return [int(row.value) for row in frame.select("value").collect()]


def message_of(caught: pytest.ExceptionInfo[Exception]) -> str:
    return str(caught.value)


def test_the_columns_are_those_of_kafka(broker: qflow.Broker, plants: Any, read: Read) -> None:
    """A job for Kafka finds every column under the name and type it knows."""
    publish(broker, 3)
    frame = read(subscribe="plants")
    assert [(field.name, field.dataType.simpleString()) for field in frame.schema] == [
        ("key", "binary"),
        ("value", "binary"),
        ("topic", "string"),
        ("partition", "int"),
        ("offset", "bigint"),
        ("timestamp", "timestamp"),
        ("timestampType", "int"),
    ]
    rows = frame.collect()
    assert [(row.key, bytes(row.value), row.topic, row.partition, row.offset, row.timestampType) for row in rows] == [
        (None, b"%d" % number, f"plant/{number}/heat", 0, number, 1) for number in range(3)
    ]
    expected = [message.time_ms for message in plants.query()]
    assert [
        round(row.timestamp.replace(tzinfo=UTC).timestamp() * 1000)
        for row in frame.selectExpr("to_utc_timestamp(timestamp, current_timezone()) as timestamp").collect()
    ] == expected


def test_everything_is_read_across_blocks_and_batches(broker: qflow.Broker, plants: Any, read: Read) -> None:
    """Blocks of all sizes, many of them, in order."""
    for start in range(0, 50_000, 1000):
        publish(broker, 1000, start)
    for start in range(50_000, 50_050):
        publish(broker, 1, start)
    assert values(read(subscribe="plants")) == list(range(50_050))


def test_keys_and_headers_are_beside_the_body(broker: qflow.Broker, plants: Any, read: Read) -> None:
    """Also in a block with messages that have none, and where a body is stored elsewhere for several takers."""
    other = broker.declare_stream("others", topics=["plant/#"])
    large = bytes(range(256)) * 32
    broker.publish("plant/1", b"bare")
    broker.publish("plant/1", b"", key=b"k", headers={"a": "ä", "n": 1.5, "no": None, "yes": True})
    broker.publish("plant/1", b"keyed", key=b"k2")
    broker.publish("plant/1", large, headers={"large": "1"})
    broker.publish("plant/1", large)
    del other
    rows = read(subscribe="plants", includeHeaders="true").collect()
    assert [None if row.key is None else bytes(row.key) for row in rows] == [None, b"k", b"k2", None, None]
    assert [bytes(row.value) for row in rows] == [b"bare", b"", b"keyed", large, large]
    headers = [row.headers and [(one.key, one.value and bytes(one.value)) for one in row.headers] for row in rows]
    assert headers == [
        None,
        [("a", "ä".encode()), ("n", b"1.5"), ("no", None), ("yes", b"true")],
        None,
        [("large", b"1")],
        None,
    ]


def test_a_narrower_schema_reads_those_columns_only(broker: qflow.Broker, plants: Any, read: Read) -> None:
    """In the order that is asked for."""
    publish(broker, 3)
    frame = read(subscribe="plants", schema="offset long, topic string")
    assert [tuple(row) for row in frame.collect()] == [(n, f"plant/{n}/heat") for n in range(3)]


def test_a_column_that_is_not_null_has_no_nulls(broker: qflow.Broker, plants: Any, read: Read) -> None:
    """That is the reader's word: a message without one is a sentence, and not what Spark makes of it."""
    publish(broker, 3)
    frame = read(subscribe="plants", schema="offset long not null, value binary not null")
    assert [(row.offset, bytes(row.value)) for row in frame.collect()] == [(n, b"%d" % n) for n in range(3)]
    with pytest.raises(
        Exception, match="column 'key' is 'not null' in the schema that was given, and a message has none"
    ):
        read(subscribe="plants", schema="key binary not null").collect()


def test_a_session_whose_timestamps_have_no_zone_reads_those_that_have(
    spark: Any, broker: qflow.Broker, plants: Any, spool: Path, read: Read, tmp_path: Path
) -> None:
    """The word `timestamp` in a schema means another type there: the one that is meant has a name of its own."""
    publish(broker, 3)
    there = read(subscribe="plants").schema
    spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    try:
        assert read(subscribe="plants").schema == there
        assert read(subscribe="plants").count() == 3
        assert read(subscribe="plants", schema="timestamp timestamp_ltz").count() == 3
        with pytest.raises(Exception, match="'timestamp' of format qflow is timestamp_ltz, .* says timestamp_ntz"):
            read(subscribe="plants", schema="timestamp timestamp").collect()
        frame = spark.readStream.format("qflow").options(subscribe="plants", startingOffsets="earliest")
        writer = frame.load(str(spool)).writeStream.format("noop").trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        query.awaitTermination()
        assert query.lastProgress["numInputRows"] == 3
    finally:
        spark.conf.unset("spark.sql.timestampType")


def test_a_view_is_made_of_a_spool_and_a_table_is_not(
    spark: Any, broker: qflow.Broker, plants: Any, spool: Path
) -> None:
    """Spark gives the options of a view to the source, and of a table none where it is read."""
    publish(broker, 3)
    using = f"USING qflow OPTIONS (path '{spool}', subscribe 'plants')"
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW there {using}")
    assert spark.sql("SELECT * FROM there").count() == 3
    instead = "a table cannot be made of a spool, .*: use CREATE TEMPORARY VIEW"
    with pytest.raises(Exception, match=instead):
        spark.sql(f"CREATE TABLE refused {using}")
    spark.sql(f"CREATE TABLE unasked (value binary) {using}")  # the source hears nothing of it
    with pytest.raises(Exception, match=f"no option is given, not even 'path'; .* {instead}"):
        spark.sql("SELECT * FROM unasked").collect()
    spark.sql("DROP TABLE unasked")
    with pytest.raises(Exception, match=instead):
        spark.sql(f"CREATE TABLE refused {using} AS SELECT 'plant/1' AS topic, 'a' AS value")


@pytest.mark.parametrize(
    ("schema", "expected"),
    [("offset int", "is bigint, the schema says int"), ("body binary", "there is no column 'body'")],
)
def test_a_schema_that_does_not_fit_is_told_so(
    broker: qflow.Broker, plants: Any, read: Read, schema: str, expected: str
) -> None:
    """In a sentence, without a stack of Spark's worker."""
    with pytest.raises(Exception, match=expected) as caught:
        read(subscribe="plants", schema=schema).collect()
    assert "Traceback" not in message_of(caught)


def test_several_streams_are_read_by_name_and_by_pattern(broker: qflow.Broker, plants: Any, read: Read) -> None:
    """And those that are not meant are left out."""
    broker.declare_stream("animals", topics=["animal/#"], partitions=3)
    broker.declare_stream("plants-of-before", topics=["before/#"])
    publish(broker, 5)
    publish(broker, 20, topic="animal/{}")
    publish(broker, 7, topic="before/{}")
    assert read(subscribe="plants, animals").count() == 25
    assert read(subscribePattern="plants.*").count() == 12
    assert read(subscribePattern="nothing").count() == 0
    animals = read(subscribe="animals").collect()
    assert sorted(int(row.value) for row in animals) == list(range(20))
    assert {(row.partition, row.offset) for row in animals} == {
        (message.partition, message.offset) for message in broker.stream("animals").query()
    }


def test_a_filter_chooses_topics(broker: qflow.Broker, plants: Any, read: Read) -> None:
    """As a subscription does."""
    for start in range(0, 5000, 1000):
        publish(broker, 1000, start)
    frame = read(subscribe="plants", filter="plant/3/+")
    assert values(frame) == list(range(3, 5000, 10))
    assert {row.topic for row in frame.collect()} == {"plant/3/heat"}
    assert read(subscribe="plants", filter="plant/+").count() == 0


def test_offsets_bound_what_is_read(broker: qflow.Broker, plants: Any, read: Read) -> None:
    """Numbers, and Kafka's -2 and -1 for the ends."""
    publish(broker, 100)
    assert values(read(subscribe="plants", startingOffsets='{"plants":{"0":90}}')) == list(range(90, 100))
    assert values(read(subscribe="plants", endingOffsets='{"plants":{"0":5}}')) == list(range(5))
    both = {"startingOffsets": '{"plants":{"0":-2}}', "endingOffsets": '{"plants":{"0":-1}}'}
    assert values(read(subscribe="plants", **both)) == list(range(100))
    assert read(subscribe="plants", startingOffsets="latest").count() == 0


def test_moments_bound_what_is_read(still: qflow.Broker, clock: Clock, read: Read) -> None:
    """From a moment on, and up to one that is not included."""
    still.declare_stream("plants", topics=["plant/#"])
    publish(still, 10)
    clock.advance(60)
    publish(still, 10, 10)
    moment = str(int(clock.wall() * 1000))
    assert values(read(subscribe="plants", startingTimestamp=moment)) == list(range(10, 20))
    assert values(read(subscribe="plants", endingTimestamp=moment)) == list(range(10))
    by_partition = f'{{"plants":{{"0":{moment}}}}}'
    assert values(read(subscribe="plants", startingOffsetsByTimestamp=by_partition)) == list(range(10, 20))


def test_tasks_are_as_many_and_as_long_as_asked_for(broker: qflow.Broker, plants: Any, read: Read) -> None:
    """And together they read each message once."""
    for start in range(0, 10_000, 1000):
        publish(broker, 1000, start)
    many = read(subscribe="plants", minPartitions=7)
    assert many.rdd.getNumPartitions() == 7
    assert values(many) == list(range(10_000))
    short = read(subscribe="plants", maxRecordsPerPartition=3000)
    assert short.rdd.glom().map(len).collect() == [3000, 3000, 3000, 1000]


def test_what_retention_took_is_an_error_or_left_out(still: qflow.Broker, read: Read) -> None:
    """By `failOnDataLoss`."""
    stream = still.declare_stream("plants", topics=["plant/#"], retention_messages=100)
    for start in range(0, 3000, 1000):
        publish(still, 1000, start)
    while stream.retain():
        pass
    options = {"subscribe": "plants", "startingOffsets": '{"plants":{"0":0}}'}
    with pytest.raises(Exception, match="offsets 0 to 2899 are gone, retention took them") as caught:
        read(**options).collect()
    assert "Traceback" not in message_of(caught)
    assert values(read(**options, failOnDataLoss="false")) == list(range(2900, 3000))
    assert values(read(subscribe="plants")) == list(range(2900, 3000))


def test_a_compacted_log_is_read_on(broker: qflow.Broker, plants: Any, read: Read) -> None:
    """Workers that have the one before open see that it was replaced."""
    publish(broker, 1000)
    frame = read(subscribe="plants")
    assert frame.count() == 1000
    broker.compact()
    publish(broker, 10, 1000)
    assert read(subscribe="plants").count() == 1010


def test_what_a_job_for_kafka_has_set_does_no_harm(broker: qflow.Broker, plants: Any, read: Read) -> None:
    """Servers, security and the like are passed over."""
    publish(broker, 2)
    assert read(subscribe="plants", **{"kafka.bootstrap.servers": "a:9092", "kafka.group.id": "x"}).count() == 2


def test_no_spool_is_a_sentence(spark: Any, tmp_path: Path) -> None:
    """A path that is not there, a directory without a log, and a disk of another kind."""
    reader = spark.read.format("qflow").option("subscribe", "plants")
    for path, expected in (
        (str(tmp_path / "no"), "there is no spool at"),
        (str(tmp_path), "is not a spool: it holds no log"),
        ("hdfs://host/spool", "a spool lies on a local disk"),
    ):
        with pytest.raises(Exception, match=expected) as caught:
            reader.load(path).collect()
        assert "Traceback" not in message_of(caught)


def test_what_waits_in_a_queue_can_be_looked_at(broker: qflow.Broker, read: Read) -> None:
    """All lanes of it, without what is settled; nothing is taken."""
    jobs = broker.declare_queue("jobs", priorities=2)
    for number in range(10):
        jobs.put(b"%d" % number, headers={"n": number} if number == 7 else None)
    urgent = jobs.put(b"urgent", priority=1)
    taken = [jobs.get() for _ in range(4)]  # the urgent one first
    for delivery in (taken[0], taken[1], taken[3]):
        delivery.ack(wait=True)
    rows = read(queue="jobs", includeHeaders="true").collect()
    assert [bytes(row.value) for row in rows] == [b"1", *(b"%d" % number for number in range(3, 10))]
    assert [row.headers for row in rows if row.headers] == [[("n", bytearray(b"7"))]]
    assert urgent not in {row.offset for row in rows}
    assert len(jobs) + jobs.stats().acquired_messages >= 8
    with pytest.raises(Exception, match="there is no durable queue 'job' in .*; did you mean 'jobs'"):
        read(queue="job").collect()


def test_a_streaming_query_that_is_refused_says_why(
    spark: Any, broker: qflow.Broker, plants: Any, spool: Path, tmp_path: Path
) -> None:
    """Also where what is wrong is known before the query has begun."""
    frame = spark.readStream.format("qflow").options(subscribe="plants", endingOffsets="latest").load(str(spool))
    query = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    with pytest.raises(
        Exception, match=r"InvalidArgument: option 'endingOffsets' is for spark.read only: leave it out"
    ):
        query.awaitTermination()
