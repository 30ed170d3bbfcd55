"""A stream to Parquet and back, and what its topics look like: the functions, and the commands as their users have them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import qflow
from qflow.cli import pipeline as commands
from qflow.cli.main import app
from qflow.spark.archive import Archive, Contents
from qflow.spark.loading import load
from qflow.spark.report import draw, report
from qflow.storage.streams import groups


def publish(broker: qflow.Broker, first: int, count: int) -> None:
    """Publish numbers."""
    broker.publish_many([(f"plant/{n % 3}", b"%d" % n, b"k%d" % (n % 2)) for n in range(first, first + count)])


@pytest.fixture
def archive(spark: Any, spool: Path, tmp_path: Path) -> Callable[..., int]:
    """Archive the stream, by options."""

    def archive_it(
        *,
        topic_filter: str = "#",
        partition_by: tuple[str, ...] = (),
        tell: Any = lambda progress: None,
        stopped: Any = lambda: False,
        **options: Any,
    ) -> int:
        contents = Contents("plants", topic_filter, partition_by)
        with Archive(str(spool), contents, str(tmp_path / "out"), **options) as found:
            return found.run(spark, tell=tell, stopped=stopped)

    return archive_it


def archived(spark: Any, directory: Path) -> list[int]:
    """Return the numbers in an archive."""
    return [int(row.value) for row in spark.read.parquet(str(directory)).orderBy("offset").collect()]


def test_an_archive_goes_on_where_the_last_one_stopped_and_is_loaded_once(
    spark, broker, plants, spool, tmp_path, archive
):
    """Each message once, split as it was asked for; loaded, topics, keys, headers and order are as they were."""
    publish(broker, 0, 30)
    told: list[Any] = []
    assert archive(partition_by=("topic", "date"), most_per_batch=20, group="archive", tell=told.append) == 30
    assert groups.committed_of(str(spool), "archive", str(broker.uuid)) == {plants.owner: {0: 30}}
    assert [progress.rows for progress in told] == [20, 10]
    broker.publish("plant/9", b"30", headers={"unit": "C"})
    assert archive(partition_by=("topic", "date")) == 1
    assert archived(spark, tmp_path / "out") == list(range(31))
    assert {path.name for path in (tmp_path / "out").glob("topic=*")} == {f"topic=plant%2F{n}" for n in (0, 1, 2, 9)}

    other, out = str(tmp_path / "other"), str(tmp_path / "out")
    with qflow.open(other) as owner:
        owner.declare_stream("again", topics=["plant/#"])
        owner.declare_stream("wrong", topics=["other/#"])
    assert load(spark, out, other, "again") == (31, False)
    assert load(spark, out, other, "again") == (31, True)
    assert load(spark, out, other, "again", name="another") == (31, False)
    with pytest.raises(qflow.NotFound, match="stream 'wrong' of .* does not take topic"):
        load(spark, out, other, "wrong")
    with qflow.open(other) as owner:
        as_it_was = [(m.topic, m.key, m.body, m.headers) for m in plants.query()]
        assert [(m.topic, m.key, m.body, m.headers) for m in owner.stream("again").query()] == as_it_was * 2


def test_a_stream_and_its_topics_are_called_as_anybody_likes(spark, broker, spool, tmp_path):
    """A comma in a stream's name does not part it, and a topic that looks like a number is loaded as what it is."""
    for name, topics in (("a", ["a"]), ("a,b", ["+"]), (" c.", ["c/c"])):
        broker.declare_stream(name, topics=topics, partitions=11)
    topics = ["7", "007", "1.50"]
    broker.publish_many([(topic, b"%d" % n, b"k%d" % n) for n in range(12) for topic in topics])
    out = str(tmp_path / "out")
    with Archive(str(spool), Contents("a,b", partition_by=("topic", "partition")), out) as found:
        assert found.run(spark) == 36
    assert {one.topic for one in report(spark, str(spool), ["a,b", " c."])} == set(topics)

    other = str(tmp_path / "other")
    with qflow.open(other) as owner:
        owner.declare_stream("again", topics=["+"])
    before = spark.conf.get("spark.sql.sources.partitionColumnTypeInference.enabled")
    assert load(spark, out, other, "again") == (36, False)
    assert spark.conf.get("spark.sql.sources.partitionColumnTypeInference.enabled") == before
    by_partition = sorted(broker.stream("a,b").query(), key=lambda message: (message.partition, message.offset))
    assert {2, 10} < {message.partition for message in by_partition}  # which text has in another order
    with qflow.open(other) as owner:
        loaded = [(message.topic, message.body) for message in owner.stream("again").query()]
    assert loaded == [(message.topic, message.body) for message in by_partition]


def test_a_topic_that_a_directory_cannot_be_called_is_refused(spark, broker, spool, tmp_path):
    """It would be there without its topic: Spark calls the directory of none so."""
    broker.declare_stream("all", topics=["#"])
    broker.publish("__HIVE_DEFAULT_PARTITION__", b"x")
    with (
        Archive(str(spool), Contents("all", partition_by=("topic",)), str(tmp_path / "out")) as found,
        pytest.raises(qflow.InvalidArgument, match="^topic .__HIVE_DEFAULT_PARTITION__. cannot be .* archive without"),
    ):
        found.run(spark)


def test_an_archive_with_a_trigger_runs_until_it_is_stopped(spark, broker, plants, tmp_path, archive):
    """What comes meanwhile is written, too, if the filter takes it."""
    publish(broker, 0, 6)
    told: list[Any] = []

    def tell(progress: Any) -> None:
        told.append(progress)
        if len(told) == 1:
            publish(broker, 6, 6)

    rows = lambda: sum(progress.rows for progress in told)  # noqa: E731
    assert archive(trigger="0.1s", topic_filter="plant/1", tell=tell, stopped=lambda: rows() == 4) == 4
    assert archived(spark, tmp_path / "out") == [1, 4, 7, 10]
    broker.publish("plant/0", b"12")
    for _ in range(2):  # a batch of nothing is one that counts
        assert archive(topic_filter="plant/1") == 0


def test_a_report_counts_what_each_topic_holds(spark, still, clock, spool, tmp_path):
    """Rates, times from a message to the next, and from when it was sent, over what is retained."""
    still.declare_stream("plants", topics=["plant/#"])
    for number in range(11):
        still.publish("plant/steady", b"x" * number, headers={"sent": f"{clock.wall() - 0.25:.3f}"})
        if number in (0, 10):
            still.publish("plant/rare", b"y", headers={"sent": "yesterday"} if number else None)
        clock.advance(2)
    still.publish("plant/gone", b"", headers={"qflow-null": True})
    steady, rare, gone = report(spark, str(spool), ["plants"], sent_header="sent")
    assert steady[:6] == ("plants", "plant/steady", 11, 55, 10, 20)
    assert steady.rate_per_s == pytest.approx(0.5)
    assert steady[7:11] == pytest.approx((2000,) * 4)
    assert steady[11:] == pytest.approx((250,) * 4, abs=2)
    assert (rare.messages, rare.gap_longest_ms, rare.latency_p50_ms) == (2, pytest.approx(20_000), None)
    assert gone[:5] == ("plants", "plant/gone", 1, 0, 0)
    pytest.importorskip("matplotlib")
    draw([steady, rare, gone], str(tmp_path / "report.png"))
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"


@pytest.fixture
def run(spark: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a command, with the Spark that is there."""

    @contextmanager
    def lasting(master: str) -> Iterator[Any]:
        yield spark

    monkeypatch.setattr(commands, "_spark", lasting)
    return lambda *arguments: CliRunner().invoke(app, ["pipeline", *map(str, arguments)])


def test_the_commands_say_what_they_did(run, broker, plants, spool, tmp_path):
    """A line for people, JSON for programs; what is wrong is a sentence on stderr and an exit code."""
    publish(broker, 0, 10)
    broker.close()

    out = tmp_path / "out"
    done = run("run", spool, "plants", "--to", f"parquet:{out}", "--partition-by", "topic, date")
    assert done.stdout == f"10 messages of stream plants were written to {out}\n"
    assert "batch 0: 10 messages in" in done.stderr
    done = run("load", out, "--into", spool, "plants")
    assert done.stdout == f"10 messages were published into stream plants of {spool}\n"
    done = run("load", out, "--into", spool, "plants")
    assert done.stdout.startswith("nothing was done: the 10 messages of these files were published into stream plants")
    assert json.loads(run("load", out, "--into", spool, "plants", "--json").stdout)["messages"] == 0
    (topic, *others) = json.loads(run("report", spool, "--json").stdout)["topics"]
    assert (topic["stream"], topic["topic"], topic["messages"], len(others)) == ("plants", "plant/0", 8, 2)
    assert run("report", spool).stdout.splitlines()[1].split()[:3] == ["plants", "plant/0", "8"]


def test_a_spool_may_move_between_runs_and_an_archive_may_not(spark, run, broker, plants, spool, tmp_path):
    """Spark knows the files of an archive by where they were: one with files of two places could be read at neither."""
    publish(broker, 0, 10)
    broker.close()
    out, moved = tmp_path / "out", tmp_path / "moved"
    assert run("run", spool, "plants", "--to", f"parquet:{out}").exit_code == 0

    elsewhere = spool.rename(tmp_path / "elsewhere")
    with qflow.open(elsewhere) as owner:
        publish(owner, 10, 5)
    out.rename(moved)
    held = {path: path.stat().st_mtime_ns for path in moved.rglob("*")}
    done = run("run", elsewhere, "plants", "--to", f"parquet:{moved}")
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{moved} is an archive that was moved or copied from {out}: Spark looks for its files there" in done.stderr
    assert {path: path.stat().st_mtime_ns for path in moved.rglob("*")} == held

    moved.rename(out)
    done = run("run", elsewhere, "plants", "--to", f"parquet:{out}")
    assert (done.exit_code, done.stdout) == (0, f"5 messages of stream plants were written to {out}\n")
    assert archived(spark, out) == list(range(15))


def test_an_archive_that_is_moved_while_it_is_written_is_not_begun_again_in_its_place(
    broker, plants, tmp_path, archive
):
    """Spark would make the directory anew, and the archive would be in two places."""
    publish(broker, 0, 3)
    out, moved = tmp_path / "out", tmp_path / "moved"

    def tell(progress: Any) -> None:
        out.rename(moved)

    with pytest.raises(qflow.StorageError, match=f"{out} was moved or removed while the archive in it was written"):
        archive(trigger="3600s", tell=tell)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_group_ends_an_archive_in_good_order(spark, broker, plants, spool, tmp_path, number):
    """With a Spark of its own, beside the owner; a second one is refused, and the next one goes on."""
    publish(broker, 0, 10)
    out = tmp_path / "out"
    command = ["pipeline", "run", str(spool), "plants", "--to", f"parquet:{out}", "--master", "local[1]"]
    process = subprocess.Popen(
        [sys.executable, "-m", "qflow", *command, "--trigger", "0.5s"],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stderr.readline() == "Spark is starting ...\n"
    assert "batch 0: 10 messages" in process.stderr.readline()
    second = subprocess.run([sys.executable, "-m", "qflow", *command], capture_output=True, text=True, timeout=60)
    assert (second.returncode, "another process is writing the archive in" in second.stderr) == (3, True)
    os.killpg(process.pid, number)  # as a terminal does, or `timeout`
    said, complained = process.communicate(timeout=60)
    written = f"10 messages of stream plants were written to {out}\n"
    assert (process.returncode, said, complained) == (128 + number, written, "")
    publish(broker, 10, 5)
    with Archive(str(spool), Contents("plants"), str(out)) as found:
        assert found.run(spark) == 5
    assert archived(spark, out) == list(range(15))


def test_an_archive_whose_spark_has_had_the_signal_ends_in_good_order(spool, tmp_path, monkeypatch):
    """A service manager sends it to all processes of a service: what of Spark is gone by then is no error."""
    with qflow.open(spool) as broker:
        broker.declare_stream("plants", topics=["plant/#"])

    def struck(*_: object, **__: object) -> int:
        signal.raise_signal(signal.SIGTERM)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(commands, "_spark", nullcontext)
    monkeypatch.setattr(Archive, "run", struck)
    done = CliRunner().invoke(app, ["pipeline", "run", str(spool), "plants", "--to", f"parquet:{tmp_path / 'out'}"])
    assert (done.exit_code, done.output) == (128 + signal.SIGTERM, "")
