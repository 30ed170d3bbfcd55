"""A job that was written for Kafka, with the format and the address changed: every option of Spark's Kafka integration
guide is taken, and stands in the reference with what it does here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import qflow
from pages import ROOT

pytest.importorskip("pyspark", reason="PySpark is not installed: pip install .[spark]")

from pyspark.sql.types import StructType

from qflow.spark import spools
from qflow.spark.source import QflowDataSource

SOURCE = {"assign": '{"plants":[0]}', "subscribe": "plants", "subscribePattern": "pl.*"}
BOTH = {
    "kafka.bootstrap.servers": "host1:9092,host2:9092",
    "startingTimestamp": "1000",
    "startingOffsetsByTimestamp": '{"plants":{"0":1000}}',
    "startingOffsets": '{"plants":{"0":-2}}',
    "failOnDataLoss": "false",
    "kafkaConsumer.pollTimeoutMs": "120000",
    "fetchOffset.numRetries": "3",
    "fetchOffset.retryIntervalMs": "10",
    "minPartitions": "2",
    "maxRecordsPerPartition": "5",
    "groupIdPrefix": "spark-kafka-source",
    "kafka.group.id": "mine",
    "includeHeaders": "true",
    "startingOffsetsByTimestampStrategy": "latest",
}
BATCH = {
    "endingTimestamp": "4000000000000",
    "endingOffsetsByTimestamp": '{"plants":{"0":4000000000000}}',
    "endingOffsets": '{"plants":{"0":-1}}',
}
STREAMING = {"maxOffsetsPerTrigger": "100", "minOffsetsPerTrigger": "5", "maxTriggerDelay": "15m"}
SINK = {"kafka.bootstrap.servers": "host1:9092", "topic": "plant/1", "includeHeaders": "true"}
REFERENCE = (ROOT / "docs" / "reference" / "spark.md").read_text()


@pytest.fixture(scope="module")
def spool(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """With ten messages."""
    path = tmp_path_factory.mktemp("kafka") / "spool"
    with qflow.open(path) as broker:
        broker.declare_stream("plants", topics=["plant/#"])
        broker.publish_many([("plant/1", b"%d" % number) for number in range(10)])
    yield path
    spools.let_go(str(path))


def numbers(reader: Any, parts: Any) -> list[int]:
    return [int(body) for part in parts for rows in reader.read(part) for body in rows.column("value").to_pylist()]


@pytest.mark.parametrize("name", [*SOURCE, *BOTH, *BATCH])
def test_a_batch_of_a_job_for_kafka_reads_the_same(spool: Path, name: str) -> None:
    """What is passed over harms nothing."""
    options = {"subscribe": "plants"} if name not in SOURCE else {}
    source = QflowDataSource({"path": str(spool), **options, name: (SOURCE | BOTH | BATCH)[name]})
    reader = source.reader(StructType().add("value", "binary"))
    assert sorted(numbers(reader, reader.partitions())) == list(range(10))
    assert f"`{name}`" in REFERENCE


@pytest.mark.parametrize("name", [*SOURCE, *BOTH, *STREAMING])
def test_a_query_of_a_job_for_kafka_reads_the_same(spool: Path, name: str) -> None:
    """From the beginning, where it says so."""
    options = {} if name in SOURCE else {"subscribe": "plants"}
    if not name.startswith(("startingOffsets", "startingTimestamp")) or name.endswith("Strategy"):
        options["startingOffsets"] = "earliest"
    source = QflowDataSource({"path": str(spool), **options, name: (SOURCE | BOTH | STREAMING)[name]})
    reader = source.streamReader(StructType().add("value", "binary"))
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert sorted(numbers(reader, reader.partitions(start, end))) == list(range(10))
    assert f"`{name}`" in REFERENCE


@pytest.mark.parametrize("name", SINK)
def test_a_sink_of_a_job_for_kafka_is_taken(spool: Path, name: str) -> None:
    """For both kinds of writing."""
    options = {"path": str(spool), "topic": "plant/1", name: SINK[name]}
    schema = StructType().add("value", "binary")
    QflowDataSource(options).writer(schema, False)
    QflowDataSource(options).streamWriter(schema, False)
    assert f"`{name}`" in REFERENCE


def test_a_time_to_which_nothing_came_is_an_error_where_that_is_asked_for(spool: Path) -> None:
    """As Kafka has it by default."""
    options = {"path": str(spool), "subscribe": "plants", "startingTimestamp": "4000000000000"}
    reader = QflowDataSource(options).reader(StructType().add("value", "binary"))
    assert numbers(reader, reader.partitions()) == []
    strict = {**options, "startingOffsetsByTimestampStrategy": "error"}
    reader = QflowDataSource(strict).reader(StructType().add("value", "binary"))
    with pytest.raises(
        qflow.InvalidArgument, match="partition 0, has no message of 4000000000000 ms since 1970 or later"
    ):
        reader.partitions()
    with pytest.raises(qflow.InvalidArgument, match="Strategy' is 'newest': give error or latest"):
        QflowDataSource({**options, "startingOffsetsByTimestampStrategy": "newest"}).schema()
