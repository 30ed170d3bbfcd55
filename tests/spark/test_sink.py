"""Data frames published into a spool: each batch once, whoever owns the spool, whatever is killed meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

import qflow
from qflow.inspect import check_spool, read_spool
from qflow.storage import stages
from qflow.storage.files import Files
from unit.clocks import until

SEED = 20_251_122
ROUNDS = 5


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


def left_in_inbox(spool: Path) -> list[str]:
    """Return the files that lie in the inbox."""
    return [str(path) for path in (spool / "inbox").rglob("*") if path.is_file()]


def numbered(spark: Any, count: int, tasks: int = 2) -> Any:
    """Return rows with a number each."""
    return spark.range(0, count, 1, tasks).selectExpr("cast(id as string) as value", "concat('copy/', id % 7) as topic")


def test_rows_with_keys_and_headers_come_back_as_they_were(spark, copies, save, read, spool):
    """Written and read again, they are the same; columns that Kafka's sink leaves out are left out."""
    rows = [
        (b"k1", b"\x00\xff", "copy/a", [("unit", b"C"), ("none", None)]),
        (None, b"", "copy/b", None),
        (b"k1", b"x" * 100_000, "copy/c", None),
        (None, "ü".encode(), "copy/ü", [("h", "ä".encode())]),
    ]
    schema = "key binary, value binary, topic string, headers array<struct<key:string,value:binary>>"
    frame = spark.createDataFrame(rows, schema)
    save(frame.selectExpr("*", "1 as offset", "'extra' as extra").coalesce(1))
    found = read(subscribe="copies", includeHeaders="true").orderBy("offset").select(*frame.columns).collect()
    assert [tuple(row) for row in found] == [tuple(row) for row in frame.collect()]
    assert left_in_inbox(spool) == []


def test_text_columns_and_one_topic_for_all(spark, copies, save):
    """`value` and `key` may be text; the option stands above the column, as Kafka's does."""
    frame = spark.createDataFrame([("k", "v", "elsewhere")], "key string, value string, topic string")
    save(frame, topic="copy/one")
    (message,) = copies.query()
    assert (message.topic, message.key, message.body) == ("copy/one", b"k", b"v")


def test_many_tasks_write_one_batch(spark, broker, copies, save):
    """In the order of the partitions, in one commit of the log for all."""
    before = broker.stats().commits_total
    save(numbered(spark, 20_000, tasks=4))
    assert [int(message.body) for message in copies.query()] == list(range(20_000))
    assert broker.stats().inbox.adopted_total == 1
    assert broker.stats().commits_total == before + 1


def test_a_frame_without_rows_writes_nothing(spark, broker, copies, save, spool):
    """No stage, no commit."""
    save(numbered(spark, 0))
    assert bodies(copies) == []
    assert not (spool / "inbox").exists()


def test_a_spool_that_nobody_owns_is_owned_for_a_moment(spark, broker, copies, save, read, spool):
    """What nobody adopts the sink adopts, in a process that has read the same log before; then it is closed."""
    assert read(subscribe="copies").count() == 0
    broker.close()
    for _ in range(2):
        save(numbered(spark, 100))
    facts = read_spool(spool)
    assert facts.clean
    assert facts.owner_pid is None
    assert read(subscribe="copies").count() == 200
    assert left_in_inbox(spool) == []
    assert check_spool(spool) == []


@pytest.mark.parametrize(
    ("columns", "options", "sentence"),
    [
        (["value"], {}, "say where the rows are published: with a column 'topic'"),
        (["topic"], {}, "there is no column 'value' .there are: topic."),
        (["1 as value", "topic"], {}, "column 'value' is int, and must be binary or string"),
        (["value", "1 as topic"], {}, "column 'topic' is int, and must be string"),
        (["value", "topic", "1.0 as key"], {}, "column 'key' is decimal"),
        (
            ["value", "topic", "map('a', 'b') as headers"],
            {},
            "column 'headers' is map<string,string>, and must be array",
        ),
        (["value", "topic", "topic as TOPIC"], {}, "two columns 'topic'"),
        (["value"], {"topic": "copy/+"}, "option 'topic': topic 'copy/.' contains"),
        (["value"], {"topic": "other"}, "no stream of .* takes topic 'other'.*there are the streams 'copies'"),
        (["value", "topic"], {"stream": "nope"}, "there is no stream 'nope' in .*; there are: 'copies'"),
        (
            ["value", "topic"],
            {"comitTimeout": "1"},
            "no option 'comittimeout' for writing; did you mean 'commitTimeout'",
        ),
        (["value", "topic"], {"commitTimeout": "soon"}, "option 'commitTimeout' is 'soon': give seconds"),
        (["value", "topic"], {"mode": "overwrite"}, "appends to a spool, and replaces nothing there"),
        (["value", "topic"], {"path": "/nowhere"}, "there is no spool at /nowhere"),
    ],
)
def test_what_cannot_be_written_is_refused_before_any_row_is(spark, copies, save, columns, options, sentence):
    """With a sentence that says what to do."""
    with pytest.raises(Exception, match=sentence):
        save(numbered(spark, 3).selectExpr(*columns), **options)
    assert bodies(copies) == []


@pytest.mark.parametrize(
    ("columns", "options", "sentence"),
    [
        (["nullif(value, '2') as value", "topic"], {}, "null in column 'value'"),
        (["value", "nullif(topic, 'copy/2') as topic"], {}, "null in column 'topic'"),
        (["value", "replace(topic, '2', '#') as topic"], {}, "topic 'copy/#' contains '#'"),
        (["value", "replace(topic, 'copy/2', 'no') as topic"], {}, "no stream of .* takes topic 'no'"),
        (["value", "replace(topic, 'copy/2', 'also') as topic"], {"stream": "copies"}, "does not take topic 'also'"),
        (["if(value = '2', repeat('x', 2000), value) as value", "topic"], {}, "2,000 bytes, more than the max_message"),
        (["value", "topic", "if(value = '2', '', 'k') as key"], {}, "a key must be 1 to 65,535 bytes"),
        (
            ["value", "topic", "array(named_struct('key', 'h', 'value', X'ff')) as headers"],
            {},
            "header 'h' of a row is not UTF-8",
        ),
        (
            ["value", "topic", "array_repeat(named_struct('key', 'h', 'value', X'41'), 2) as headers"],
            {},
            "two headers 'h'",
        ),
    ],
)
def test_a_row_that_cannot_be_written_has_the_whole_frame_refused(
    spark, broker, save, spool, columns, options, sentence
):
    """Nothing of the others is stored, and no stage is left."""
    stream = broker.declare_stream("copies", topics=["copy/#"], max_message_bytes=1000)
    broker.declare_stream("others", topics=["also"])
    with pytest.raises(Exception, match=sentence):
        save(numbered(spark, 4).selectExpr(*columns), **options)
    assert bodies(stream) == []
    assert left_in_inbox(spool) == []


def test_rows_go_to_bound_queues_too_and_one_that_is_full_has_the_frame_taken_back(spark, broker, copies, save, spool):
    """Whoever writes is told which queue it is; nothing of the frame is stored, now or later."""
    jobs = broker.declare_queue("jobs", limit_messages=3)
    broker.bind(jobs, "copy/#")
    save(numbered(spark, 2), topic="copy/x")
    assert (len(jobs), len(bodies(copies))) == (2, 2)
    with pytest.raises(Exception, match="did not adopt it within 2 s .*'jobs'.*It was taken back"):
        save(numbered(spark, 2), topic="copy/x", commitTimeout=2)
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


def test_a_streaming_query_publishes_each_row_once(broker, copies, texts, spool):
    """Over several batches, and over a restart."""
    texts.write("a", "b")
    texts.write("c")
    texts.run()
    assert [message.body for message in copies.query()] == [b"a", b"b", b"c"]
    texts.write("d")
    texts.run()
    assert [message.body for message in copies.query()] == [b"a", b"b", b"c", b"d"]
    assert broker.stats().inbox.adopted_total == 3
    assert left_in_inbox(spool) == []


@pytest.mark.parametrize("owned", [True, False])
def test_a_batch_that_spark_repeats_is_not_stored_again(broker, copies, texts, read, owned):
    """It was committed here, and Spark died before it had noted that."""
    texts.write("a", "b")
    texts.run()
    if not owned:
        broker.close()
    texts.forget_last_commit()
    texts.write("c")
    texts.run()
    assert sorted(bytes(row.value) for row in read(subscribe="copies").collect()) == [b"a", b"b", b"c"]


def test_a_batch_that_waits_is_adopted_later_and_once(broker, copies, texts, spool):
    """The query fails when its time is up; started again, it finds its batch in the inbox, or in the log."""
    jobs = broker.declare_queue("jobs", limit_messages=2)
    jobs.put(b"in the way")
    broker.bind(jobs, "copy/#")
    texts.write("a", "b")
    with pytest.raises(Exception, match="did not adopt it within 1 s .*'jobs'.*may be started again"):
        texts.run(commitTimeout="1s")
    assert bodies(copies) == []
    assert left_in_inbox(spool) != []
    with pytest.raises(Exception, match="'jobs'"):
        texts.run(commitTimeout="1s")
    broker.unbind(jobs, "copy/#")
    texts.run()
    assert bodies(copies) == [b"a", b"b"]
    assert left_in_inbox(spool) == []


def test_a_batch_that_was_set_aside_fails_the_query_with_the_reason(spark, broker, texts, spool):
    """A stream that was there when the rows were written is deleted before they are adopted."""
    stream = broker.declare_stream("copies", topics=["copy/#"])
    jobs = broker.declare_queue("jobs", limit_messages=2)
    jobs.put(b"in the way")
    broker.bind(jobs, "copy/#")
    texts.write("a", "b")
    with pytest.raises(Exception, match="'jobs'"):
        texts.run(commitTimeout="1s")
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


def test_complete_mode_is_refused(spark, copies, spool, tmp_path):
    """A stream grows at its end; nothing in it is replaced."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("a\n")
    counts = spark.readStream.text(str(tmp_path / "in")).groupBy("value").count()
    writer = counts.selectExpr("value").writeStream.format("qflow").outputMode("complete").option("topic", "copy/x")
    with pytest.raises(Exception, match="appends to a spool, and replaces nothing there"):
        writer.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start(
            str(spool)
        ).awaitTermination()


def in_flight(spool: Path, moment: int) -> bool:
    """Tell whether a batch is at some moment of its way: being written, handed in, or gone on since."""
    inbox = spool / "inbox"
    names = set(os.listdir(inbox)) if inbox.exists() else set()
    staged = inbox / stages.STAGING
    if moment == 0:
        return any(any(path.iterdir()) for path in staged.iterdir() if path.exists()) if staged.exists() else False
    return bool(names - {stages.STAGING, stages.REFUSED})


def test_kill_9_of_the_whole_tree_publishes_nothing_twice_and_loses_nothing(spark, open_spool, read, spool, tmp_path):
    """Source to sink, with a batch in flight, while messages come in; with an owner in another process, and without."""
    draw = Random(SEED)
    print("seed", SEED)
    worker = Path(__file__).parent / "sink_worker.py"
    with qflow.open(spool) as first:
        first.declare_stream("plants", topics=["plant/#"])
        first.declare_stream("copies", topics=["copy/#"])
    published = 0

    def publish(broker: qflow.Broker, count: int) -> None:
        nonlocal published
        broker.publish_many([(f"plant/{n % 5}", b"%d" % n) for n in range(published, published + count)])
        published += count

    for number in range(ROUNDS):
        broker = qflow.open(spool)
        publish(broker, 4000)
        if number % 2:
            broker.close()
        process = subprocess.Popen(
            [sys.executable, str(worker), str(spool), str(tmp_path / "checkpoint")],
            start_new_session=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        for _ in range(draw.randrange(1, 4)):
            moment = draw.randrange(2)
            until(lambda moment=moment: in_flight(spool, moment))
            if not broker.closed:
                publish(broker, 300)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        broker.close()
    owner = open_spool()
    frame = (
        spark.readStream.format("qflow")
        .option("subscribe", "plants")
        .option("startingOffsets", "earliest")
        .load(str(spool))
        .selectExpr("key", "value", "concat('copy/', topic) as topic")
    )
    checkpoint = str(tmp_path / "checkpoint")
    query = frame.writeStream.format("qflow").option("checkpointLocation", checkpoint).trigger(availableNow=True)
    query.start(str(spool)).awaitTermination()
    found = sorted(int(row.value) for row in read(subscribe="copies").select("value").collect())
    assert found == list(range(published))
    assert left_in_inbox(spool) == []
    assert owner.check() == []
