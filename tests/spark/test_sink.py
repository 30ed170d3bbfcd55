"""Data frames published into a spool: each batch once, whoever owns the spool, whatever is killed meanwhile."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

import qflow
from qflow.inspect import check_spool, read_spool
from qflow.storage.files import Files
from qflow.storage.inbox import stages
from qflow.storage.inbox.stages import Batch
from spark.trees import copy_the_rest, in_flight, left_in_inbox, said, tell
from unit.clocks import until
from unit.handing import write_file

SEED = 20_251_122
ROUNDS = int(os.environ.get("QFLOW_ROUNDS", "2"))


@pytest.fixture
def copies(broker: qflow.Broker) -> Any:
    """A stream that takes what the tests write."""
    return broker.declare_stream("copies", topics=["copy/#"])


@pytest.fixture
def save(spool: Path) -> Callable[..., None]:
    """Write a data frame to the spool, by options."""

    def save_it(frame: Any, *, mode: str = "append", path: Any = spool, **options: Any) -> None:
        frame.write.format("qflow").mode(mode).options(**options).save(str(path))

    return save_it


def bodies(stream: Any) -> list[bytes]:
    """Return what a stream holds, sorted."""
    return sorted(message.body for message in stream.query())


def numbered(spark: Any, count: int, tasks: int = 2) -> Any:
    """Return rows with a number each."""
    return spark.range(0, count, 1, tasks).selectExpr("cast(id as string) as value", "concat('copy/', id % 7) as topic")


def test_rows_with_keys_and_headers_come_back_as_they_were(spark, broker, copies, save, read, spool):
    """Written and read again, they are the same, in one commit; columns that Kafka's sink leaves out are left out."""
    rows = [
        (b"k1", b"\x00\xff", "copy/a", [("unit", b"C"), ("none", None)]),
        (None, b"", "copy/b", None),
        (b"k1", b"x" * 100_000, "copy/c", None),
        (None, "ü".encode(), "copy/ü", [("h", "ä".encode())]),
        (b"k1", None, "copy/a", None),
        (None, None, "copy/b", [("unit", b"C")]),
    ]
    schema = "key binary, value binary, topic string, headers array<struct<key:string,value:binary>>"
    frame = spark.createDataFrame(rows, schema)
    before = broker.stats().commits_total
    save(frame.selectExpr("*", "1 as offset", "'extra' as extra").coalesce(1))
    found = read(subscribe="copies", includeHeaders="true").orderBy("offset").select(*frame.columns).collect()
    assert [tuple(row) for row in found] == rows
    *_, tombstone, _ = copies.query()
    assert (tombstone.body, tombstone.headers, tombstone.key) == (b"", {"qflow-null": True}, b"k1")
    assert left_in_inbox(spool) == []
    assert (broker.stats().commits_total, broker.stats().inbox.adopted_total) == (before + 1, 1)


def test_many_tasks_write_one_batch(spark, broker, copies, save, spool):
    """In the order of the partitions; and a frame without rows writes nothing."""
    save(numbered(spark, 0))
    assert not (spool / "inbox").exists()
    save(numbered(spark, 2_000, tasks=3))
    assert [int(message.body) for message in copies.query()] == list(range(2_000))
    assert broker.stats().inbox.adopted_total == 1


def test_a_spool_that_nobody_owns_is_owned_for_a_moment(spark, broker, copies, save, read, spool):
    """What nobody adopts the sink adopts, in a process that has read the same log before; then it is closed."""
    assert read(subscribe="copies").count() == 0
    broker.close()
    save(numbered(spark, 100))
    facts = read_spool(spool)
    assert facts.clean
    assert facts.owner_pid is None
    assert read(subscribe="copies").count() == 100
    assert left_in_inbox(spool) == []
    assert check_spool(spool) == []


def test_what_cannot_be_written_is_a_sentence_and_nothing_is_stored(spark, copies, save, spool):
    """Before any row, or when a task comes to the row. All that is refused is in the tests of the writers."""
    with pytest.raises(Exception, match="column 'value' is int, and must be binary or string"):
        save(numbered(spark, 3).selectExpr("1 as value", "topic"))
    with pytest.raises(Exception, match="appends to a spool, and replaces nothing there"):
        save(numbered(spark, 3), mode="overwrite")
    with pytest.raises(Exception, match="null in column 'topic'"):
        save(numbered(spark, 4, tasks=1).selectExpr("value", "nullif(topic, 'copy/2') as topic"))
    assert bodies(copies) == []
    assert left_in_inbox(spool) == []


def test_rows_go_to_bound_queues_too_and_one_that_is_full_has_the_frame_taken_back(spark, broker, copies, save, spool):
    """Whoever writes is told which queue it is; nothing of the frame is stored, now or later."""
    jobs = broker.declare_queue("jobs", limit_messages=3)
    broker.bind(jobs, "copy/#")
    save(numbered(spark, 2), topic="copy/x")
    assert (len(jobs), len(bodies(copies))) == (2, 2)

    def names_what_is_full() -> bool:  # from the owner's first try on, which may come later than in a second
        with pytest.raises(Exception, match="did not adopt it within 1 s.*It was taken back") as caught:
            save(numbered(spark, 2), topic="copy/x", commitTimeout=1)
        return re.search("within 1 s .*'jobs'", str(caught.value)) is not None

    until(names_what_is_full)
    jobs.get_many(2).ack(wait=True)
    save(numbered(spark, 3), topic="copy/x")
    assert (len(jobs), len(bodies(copies))) == (3, 5)


# Streaming -----------------------------------------------------------------------------------------------------------


class Texts:
    """Lines of files that a streaming query reads, a file a batch, and publishes."""

    def __init__(self, spark: Any, spool: Path, directory: Path) -> None:
        self._spark = spark
        self._spool = spool
        self.source = directory / "texts"
        self.source.mkdir()
        self.checkpoint = directory / "checkpoint"
        self._written = 0

    def write(self, *lines: str) -> None:
        """Add a file."""
        self._written += 1
        path = self.source / f"{self._written:04d}.txt"
        path.with_suffix(".part").write_text("".join(line + "\n" for line in lines))
        os.utime(path.with_suffix(".part"), (1_700_000_000 + self._written,) * 2)  # Spark reads them in this order
        path.with_suffix(".part").rename(path)

    def run(self, mode: str = "append", **options: Any) -> None:
        """Publish what is there."""
        frame = self._spark.readStream.option("maxFilesPerTrigger", 1).option("pathGlobFilter", "*.txt")
        query = (
            frame.text(str(self.source))
            .writeStream.format("qflow")
            .outputMode(mode)
            .option("checkpointLocation", str(self.checkpoint))
            .option("topic", "copy/text")
            .options(**options)
            .trigger(availableNow=True)
            .start(str(self._spool))
        )
        query.awaitTermination()

    def forget_last_commit(self) -> None:
        """Leave the checkpoint as a crash does that comes after the sink's commit and before Spark's own."""
        commits = self.checkpoint / "commits"
        last = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
        (commits / str(last)).unlink()
        (commits / f".{last}.crc").unlink(missing_ok=True)


@pytest.fixture
def texts(spark: Any, spool: Path, tmp_path: Path) -> Texts:
    """Nothing to publish yet."""
    return Texts(spark, spool, tmp_path)


def test_a_streaming_query_publishes_each_row_once(broker, copies, texts, read, spool):
    """Over several batches, a restart, and batches that Spark repeats: it died before it had noted their commit."""
    texts.write("a", "b")
    texts.write("c")
    texts.run()
    assert [message.body for message in copies.query()] == [b"a", b"b", b"c"]
    texts.forget_last_commit()
    texts.write("d")
    texts.run()
    assert [message.body for message in copies.query()] == [b"a", b"b", b"c", b"d"]
    assert broker.stats().inbox.adopted_total == 3
    assert left_in_inbox(spool) == []
    broker.close()
    texts.forget_last_commit()
    texts.write("e")
    texts.run()
    assert sorted(bytes(row.value) for row in read(subscribe="copies").collect()) == [b"a", b"b", b"c", b"d", b"e"]


def test_two_queries_at_once_and_an_owner_that_leaves_and_comes_meanwhile(spark, broker, copies, read, spool, tmp_path):
    """Each batch is adopted by whoever has the spool in that moment, a query or a program; each row is there once."""
    queries = []
    for name in ("one", "two"):
        frame = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 20).load()
        writer = frame.selectExpr(f"concat('{name}-', value) as value").writeStream.format("qflow")
        writer = writer.option("topic", f"copy/{name}").option("checkpointLocation", str(tmp_path / name))
        queries.append(writer.start(str(spool)))

    def batches() -> int:
        for query in queries:
            if query.exception() is not None:
                raise query.exception()
        return min(-1 if query.lastProgress is None else query.lastProgress["batchId"] for query in queries)

    try:
        for owned in (True, False, True):
            seen = batches()
            until(lambda seen=seen: batches() > seen + 1)
            if owned:
                broker.close()
            else:
                broker = open_when_free(spool)
    finally:
        for query in queries:
            query.stop()
        broker.close()
    with open_when_free(spool) as last:
        last.engine.adoption.run()
    found = [bytes(row.value).decode() for row in read(subscribe="copies").collect()]
    assert len(found) == len(set(found))
    for name in ("one", "two"):
        numbers = sorted(int(text.partition("-")[2]) for text in found if text.startswith(name))
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= 60
    assert not [path for path in left_in_inbox(spool) if stages.STAGING not in path]  # of a batch that was stopped


def open_when_free(spool: Path) -> qflow.Broker:
    """Open a spool that a sink owns for moments."""
    found: list[qflow.Broker] = []

    def opened() -> bool:
        try:
            found.append(qflow.open(spool))
        except qflow.SpoolInUse:
            return False
        return True

    until(opened)
    return found[0]


def test_a_batch_that_waits_and_then_cannot_be_stored_fails_the_query_with_the_reason(spark, broker, texts, spool):
    """It waits for a queue, and the stream is deleted that was there when the rows were written. It comes again."""
    stream = broker.declare_stream("copies", topics=["copy/#"])
    jobs = broker.declare_queue("jobs", limit_messages=2)
    jobs.put(b"in the way")
    broker.bind(jobs, "copy/#")
    texts.write("a", "b")

    def waits_for_jobs() -> bool:  # from the owner's first try on, which may come later than in a second
        with pytest.raises(Exception, match="did not adopt it within 1 s.*may be started again") as caught:
            texts.run(commitTimeout="1s")
        return re.search("within 1 s .*'jobs'", str(caught.value)) is not None

    until(waits_for_jobs)
    assert bodies(stream) == []
    until(lambda: left_in_inbox(spool))
    broker.delete_stream("copies")
    broker.delete_queue("jobs")
    until(lambda: broker.stats().inbox.refused_total == 1)
    ((aside,),) = [stages.list_refused(Files(), str(spool))]
    assert "no stream takes topic 'copy/text'" in str(stages.why_refused(Files(), str(spool), aside))
    with pytest.raises(Exception, match="takes topic 'copy/text'"):
        texts.run()
    stream = broker.declare_stream("copies", topics=["copy/#"])
    texts.run()
    assert bodies(stream) == [b"a", b"b"]
    assert left_in_inbox(spool) == []


def test_a_batch_that_writes_two_streams_under_one_version_stores_both_once(spark, broker, spool, tmp_path):
    """By `foreachBatch`, whose batch is repeated after a crash."""
    streams = [broker.declare_stream(name, topics=[f"{name}/#"]) for name in ("one", "two")]
    source = Texts(spark, spool, tmp_path)
    source.write("a", "b")

    def write_both(frame: Any, batch: int) -> None:
        for stream in streams:
            rows = frame.selectExpr("value", f"'{stream.name}/text' as topic")
            rows.write.format("qflow").mode("append").options(txnAppId="both", txnVersion=batch).save(str(spool))

    for _ in range(2):
        writer = spark.readStream.text(str(source.source)).writeStream.foreachBatch(write_both)
        writer.option("checkpointLocation", str(source.checkpoint)).trigger(
            availableNow=True
        ).start().awaitTermination()
        source.forget_last_commit()
    assert [bodies(stream) for stream in streams] == [[b"a", b"b"]] * 2


def test_what_a_failed_attempt_has_staged_is_removed_by_the_next_one(broker, texts, spool):
    """Also where it fails, too: a task that ends after its query has failed tells nobody what it wrote."""
    broker.declare_stream("small", topics=["small/#"], max_message_bytes=10)
    texts.write("x" * 11)
    with pytest.raises(Exception, match="max_message_bytes=10 of who takes it"):
        texts.run(topic="small/x")
    query = json.loads((texts.checkpoint / "metadata").read_text())["id"]
    write_file(spool, Batch(query, 0), stages.new_token(), "000001-late", [("small/x", b"y")])
    with pytest.raises(Exception, match="max_message_bytes=10 of who takes it"):
        texts.run(topic="small/x")
    assert left_in_inbox(spool) == []


def test_complete_mode_publishes_all_of_the_result_with_each_batch(spark, copies, spool, tmp_path):
    """As Kafka's sink does: a stream grows at its end, and nothing in it is replaced."""
    source = Texts(spark, spool, tmp_path)
    for lines in (["a", "b"], ["b"]):
        source.write(*lines)
        counts = spark.readStream.text(str(source.source)).groupBy("value").count()
        rows = counts.selectExpr("concat(value, count) as value", "'copy/x' as topic")
        writer = rows.writeStream.format("qflow").outputMode("complete").trigger(availableNow=True)
        writer.option("checkpointLocation", str(source.checkpoint)).start(str(spool)).awaitTermination()
    assert bodies(copies) == [b"a1", b"a1", b"b1", b"b2"]


def test_kill_9_of_the_whole_tree_publishes_nothing_twice_and_loses_nothing(
    spark, open_spool, read, spool, tmp_path, trees
):
    """Source to sink, with a batch in flight, while messages come and go; with an owner in another process, and without."""
    draw = Random(SEED)
    print("seed", SEED)
    with qflow.open(spool) as first:
        first.declare_stream("plants", topics=["plant/#"])
        first.declare_stream("copies", topics=["copy/#"])
    published = 0

    def start_worker() -> subprocess.Popen[str]:
        return trees.start("sink_worker.py", spool, tmp_path / "checkpoint")

    def publish(broker: qflow.Broker, count: int) -> None:
        nonlocal published
        broker.publish_many([(f"plant/{n % 5}", b"%d" % n) for n in range(published, published + count)])
        published += count

    following = start_worker()
    for number in range(ROUNDS):
        broker = qflow.open(spool)
        if number:  # there is a group by now, which has it keep what was not read
            broker.alter_stream("plants", retention_messages=100)
        publish(broker, 4000)
        if number % 2:
            broker.close()
        process = following
        if number + 1 < ROUNDS:
            following = start_worker()  # its Java starts meanwhile
        tell(process, "run")
        assert said(process) == "running\n"
        for _ in range(draw.randrange(1, 4)):
            moment = draw.randrange(2)
            until(lambda moment=moment: in_flight(spool, moment))
            if not broker.closed:
                publish(broker, 300)
        trees.kill(process)
        broker.close()
    owner = open_spool()
    copy_the_rest(spark, spool, spool, tmp_path / "checkpoint")
    found = sorted(int(row.value) for row in read(subscribe="copies").select("value").collect())
    assert found == list(range(published))
    assert left_in_inbox(spool) == []
    assert owner.check() == []
