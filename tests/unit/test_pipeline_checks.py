"""What a pipeline refuses before Spark is started, and what it makes of Spark's errors; without Spark."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from click.testing import CliRunner

import qflow
from qflow.cli import pipeline as commands
from qflow.cli.main import app
from qflow.spark.archive import CHECKPOINT, COUNTED, KEPT, Archive, Contents, check_place
from qflow.spark.words import plain
from qflow.spark.write_options import parse_for_writing


@pytest.fixture
def ready(spool: Path) -> Path:
    """A spool with a stream, which nobody owns."""
    with qflow.open(spool) as broker:
        broker.declare_stream("plants", topics=["plant/#"])
    return spool


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts it fails the test."""

    def started(master: str) -> Any:
        raise AssertionError("Spark was started")

    monkeypatch.setattr(commands, "_spark", started)


def run(*arguments: object) -> Any:
    """Run a command."""
    return CliRunner().invoke(app, ["pipeline", *map(str, arguments)])


def assert_says(said: str, sentence: str) -> None:
    """Look for a sentence, on however many lines."""
    assert re.search(sentence, " ".join(said.split())), said


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (["--to", "csv:x"], 2, "it is parquet:DIR, not 'csv:x'"),
        (["--to", "parquet:"], 2, "it is parquet:DIR"),
        (["--to", "parquet:s3a://bucket/x"], 2, "lies on a disk of this host, and s3a://bucket/x does not: give a dir"),
        (["--to", "parquet:file://{tmp}"], 2, "holds files that are none of an archive, such as 'file'"),
        (["--trigger", "soon"], 2, "seconds such as 10s, not 'soon'"),
        (["--trigger", "-1s"], 2, "not '-1s'"),
        (["--trigger", "nan"], 2, "not 'nan'"),
        (["--partition-by", "topic,colour"], 2, "cannot be split by 'colour': there are topic, date, hour, partition"),
        (["--partition-by", "topic,topic"], 2, "by each name once"),
        (["--filter", "a#"], 2, "topic filter 'a#' has a wildcard"),
        (["--to", "parquet:{spool}/x"], 2, "lies inside the spool"),
        (["--to", "parquet:{file}"], 4, "cannot write an archive in .*: File exists; give a directory that this user"),
        (["--to", "parquet:{tmp}"], 2, "holds files that are none of an archive, such as 'file'"),
        (["--most-per-batch", "0"], 2, "0 is not in the range"),
        (["--master", "spark://x:7077"], 2, "it is local.* for a spool is read on its own host, not 'spark://x:7077'"),
        (["--master", "local[x]"], 2, r"it is local\[\*\] or local\[N\], for .*, not 'local\[x\]'"),
        (["--master", "local[0]"], 2, "not 'local.0.'"),
    ],
)
def test_an_archive_that_cannot_be_is_refused_before_spark_starts(ready, no_spark, tmp_path, options, code, sentence):
    """With a sentence, and the exit code of other commands."""
    (tmp_path / "file").write_text("x")
    places = {"spool": ready, "file": tmp_path / "file", "tmp": tmp_path}
    done = run("run", ready, "plants", "--to", f"parquet:{tmp_path / 'out'}", *(o.format(**places) for o in options))
    assert done.exit_code == code, done.output
    assert_says(done.stderr, sentence)


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "{spool}", "nope", "--to", "parquet:{out}"],
        ["report", "{spool}", "--stream", "nope"],
        ["load", "{tmp}", "--into", "{spool}", "nope"],
    ],
)
def test_a_stream_that_is_not_there_is_named_beside_those_that_are(ready, no_spark, tmp_path, arguments):
    """At once, not after Spark's start."""
    places = {"spool": ready, "out": tmp_path / "out", "tmp": tmp_path}
    done = run(*(argument.format(**places) for argument in arguments))
    assert (done.exit_code, done.stderr) == (2, f"qflow: there is no stream 'nope' in {ready}; there are: 'plants'\n")


def test_a_spool_without_streams_has_an_empty_report(spool, no_spark):
    """And no Spark is needed for that."""
    qflow.open(spool).close()
    assert run("report", spool).stdout == "no messages\n"


def test_a_report_that_cannot_be_drawn_is_refused_before_spark_starts(ready, no_spark, tmp_path, monkeypatch):
    """Where it goes, and what draws it."""
    pytest.importorskip("matplotlib")
    done = run("report", ready, "--png", tmp_path / "none" / "x.png")
    assert done.exit_code == 2
    assert_says(done.stderr, "is no directory that can be written: give --png another")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run("report", ready, "--png", tmp_path / "x.png")
    assert done.exit_code == 2
    assert_says(done.stderr, r"drawing needs matplotlib .*pip install -U '\.\[spark\]' in a clone of qflow")


def test_without_pyspark_a_command_says_what_to_install(ready, tmp_path, monkeypatch):
    """The extra."""
    monkeypatch.setitem(sys.modules, "pyspark", None)
    done = run("run", ready, "plants", "--to", f"parquet:{tmp_path / 'out'}")
    assert done.exit_code == 2
    assert_says(done.stderr, r"PySpark is not installed .*pip install -U '\.\[spark\]' in a clone of qflow")


def test_an_archive_that_spark_has_not_begun_may_become_another_one(tmp_path):
    """There was no Java, for one."""
    spool, out = str(tmp_path / "spool"), str(tmp_path / "out")
    with pytest.raises(qflow.NotFound), Archive(spool, Contents("plants"), out):
        raise qflow.NotFound("there is no Java")
    with Archive(spool, Contents("others", "a"), out):
        pass


def test_without_a_java_a_command_says_so_at_once(ready, tmp_path, monkeypatch):
    """And not that Spark is starting."""
    pytest.importorskip("pyspark", reason="PySpark is not installed: pip install .[spark]")

    def find_java() -> str:
        raise qflow.NotFound("there is no Java")

    monkeypatch.setattr("qflow.spark.java.find_java", find_java)
    done = run("run", ready, "plants", "--to", f"parquet:{tmp_path / 'out'}")
    assert (done.exit_code, done.stderr) == (2, "qflow: there is no Java\n")


def test_a_server_of_spark_is_asked_without_a_java(ready, monkeypatch):
    """It has one of its own; what is wrong with it is a sentence."""
    pytest.importorskip("pyspark", reason="PySpark is not installed: pip install .[spark]")

    def find_java() -> str:
        raise AssertionError("a Java was looked for")

    def session(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no server is there")

    monkeypatch.setenv("SPARK_REMOTE", "sc://127.0.0.1:1")
    monkeypatch.setattr("qflow.spark.java.find_java", find_java)
    monkeypatch.setattr("qflow.spark.session", session)
    done = run("report", ready)
    assert (done.exit_code, done.stderr) == (
        2,
        "Spark is starting ...\nqflow: Spark failed: no server is there\n",
    )


def test_the_progress_of_a_server_counts_as_any_other(ready, tmp_path):
    """It has offsets as text, and its rows by source only."""
    pytest.importorskip("pyspark", reason="PySpark is not installed: pip install .[spark]")
    from pyspark.sql.streaming.listener import StreamingQueryProgress

    from qflow.spark import lag

    def at(offset: int) -> str:
        return json.dumps({"uuid": "0" * 32, "streams": {"plants": {"number": 1, "offsets": {"0": offset}}}})

    ours = {"description": "ours", "startOffset": None, "endOffset": at(60), "latestOffset": at(100)}
    other = {"description": "other", "startOffset": None, "endOffset": "7-a", "latestOffset": '"8"'}
    rates = {"numInputRows": 30, "inputRowsPerSecond": 0.0, "processedRowsPerSecond": 0.0}
    ids = dict.fromkeys(("id", "runId"), "20b09f69-87a7-4a6c-bbe8-ea5fcf908f15")
    found = StreamingQueryProgress.fromJson(
        {
            **ids,
            "name": None,
            "timestamp": "2026-11-29T02:31:14.654Z",
            "batchId": 0,
            "batchDuration": 2000,
            "durationMs": {"triggerExecution": 2000},
            "eventTime": {},
            "stateOperators": [],
            "sources": [ours | rates, other | rates],
            "sink": {"description": "sink", "numOutputRows": 60},
            "observedMetrics": {},
        }
    )
    assert lag(found) == 40
    spark = MagicMock()
    reader = spark.readStream.format().option().option().option().option()
    reader.options().load().selectExpr().writeStream.format().option().trigger().start.return_value = query = Mock()
    query.recentProgress, query.awaitTermination.return_value = [found], True
    told = []
    with Archive(str(ready), Contents("plants"), str(tmp_path / "out")) as archive:
        assert archive.run(spark, tell=told.append) == 60
    assert told == [(0, 60, 30.0, 2.0)]


class Started:
    """What stands for a Spark."""

    stopped = False

    def stop(self) -> None:
        self.stopped = True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("killed", [False, True])
def test_a_signal_while_spark_starts_waits_until_it_can_be_stopped(ready, monkeypatch, number, killed):
    """A Java that is left in the middle of its start would run on, and so would its files lie about; from a terminal
    that is closed the signal reaches Java, too."""
    pytest.importorskip("pyspark", reason='PySpark is not installed: pip install "qflow[spark]"')
    found = Started()

    def session(*_: Any, **__: Any) -> Started:
        signal.raise_signal(number)
        if killed:
            raise RuntimeError("Java is gone")
        return found

    def torn(*_: Any) -> None:
        raise AssertionError("the start was torn apart")

    monkeypatch.setattr("qflow.spark.java.find_java", lambda: "")
    monkeypatch.setattr("qflow.spark.session", session)
    former = signal.signal(number, torn)
    try:
        done = run("report", ready)
    finally:
        assert signal.signal(number, former) is torn
    assert (done.exit_code, done.stderr, found.stopped) == (128 + number, "Spark is starting ...\n", not killed)


def test_an_archive_that_was_moved_is_neither_loaded_nor_gone_on_with(ready, no_spark, tmp_path):
    """Spark knows its files by where they were; it would read those of the place before, or none."""
    archive = tmp_path / "an archive"
    (archive / COUNTED).mkdir(parents=True)
    (archive / COUNTED / ".0.crc").write_bytes(b"\xff")
    files = [{"path": f"file:{tmp_path}/an%20archive/topic=a/part-0.parquet", "size": 1}]
    (archive / COUNTED / "0").write_text("\n".join(["v1", *map(json.dumps, files)]))
    check_place(str(archive))
    moved = archive.rename(tmp_path / "moved")
    (moved / KEPT).write_text('{"stream": "plants", "filter": "#", "partition-by": ""}')
    for command in (["load", moved, "--into", ready, "plants"], ["run", ready, "plants", "--to", f"parquet:{moved}"]):
        done = run(*command)
        assert done.exit_code == 2
        assert_says(done.stderr, f"{moved} is an archive that was moved or copied from {archive}: .* use it there")


def test_a_directory_holds_one_archive_and_one_process_writes_it(tmp_path):
    """Who comes second is told; whoever comes later goes on with the same, or is told what is another."""
    spool, out = str(tmp_path / "spool"), str(tmp_path / "out")
    with (
        Archive(spool, Contents("plants"), out),
        pytest.raises(qflow.SpoolInUse, match="another process is writing the archive"),
    ):
        Archive(spool, Contents("plants"), out).__enter__()
    with Archive(spool, Contents("plants"), out):
        (tmp_path / "out" / CHECKPOINT).mkdir()  # Spark begins
    for stream, options, sentence in (
        ("others", {}, "with stream 'plants', and now it is 'others'"),
        ("plants", {"topic_filter": "plant/1"}, "with filter '#', and now it is 'plant/1'"),
        ("plants", {"partition_by": ("date", "topic")}, "with partition-by '', and now it is 'date,topic'"),
    ):
        with pytest.raises(qflow.InvalidArgument, match=sentence):
            Archive(spool, Contents(stream, **options), out).__enter__()
    for damaged in (b"x", b"\xff\xfe", b"", b"\0" * 51):
        (tmp_path / "out" / KEPT).write_bytes(damaged)
        with pytest.raises(qflow.InvalidArgument, match=f"{KEPT} is damaged, and says no more what this is"):
            Archive(spool, Contents("others", "a"), out).__enter__()
    (tmp_path / "out" / CHECKPOINT).rmdir()
    (tmp_path / "out" / KEPT).write_text("")  # a crash came before it was written
    (tmp_path / "out" / "part-0.parquet").touch()
    with pytest.raises(qflow.InvalidArgument, match=f"{KEPT} is damaged"):
        Archive(spool, Contents("plants"), out).__enter__()
    (tmp_path / "out" / "part-0.parquet").unlink()
    with Archive(spool, Contents("plants"), out):
        assert json.loads((tmp_path / "out" / KEPT).read_text())["stream"] == "plants"


@pytest.mark.parametrize(
    ("offsets", "commits", "counted", "sentence"),
    [
        ("0 1 .1.crc", "0 1", "0 1", None),
        ("9 10 11", "9 10", "9.compact 10 11", None),  # it was killed: batch 11 comes again, and is known
        ("9 10 11", "9 10", "9.compact 10 .11.x.tmp", None),
        ("0", "", None, None),  # it was killed in the first batch
        ("0", "0", "0 1", "batch 1 is among its files, and not in its checkpoint"),
        ("7 8", "7 8", "9.compact", "batch 9 is among its files"),
        (None, None, "0", "batch 0 is among its files"),
        (None, None, None, "it has files, and no checkpoint"),
        ("0 1", "0 1", "0", "batch 1 is done by its checkpoint, and not among its files"),
        ("0", "0", None, "batch 0 is done by its checkpoint"),
    ],
)
def test_an_archive_whose_checkpoint_is_of_another_time_is_refused(tmp_path, offsets, commits, counted, sentence):
    """Spark leaves out a batch whose number it knows among the files, whatever is in it: messages would be lost."""
    out = tmp_path / "out"
    with Archive(str(tmp_path / "spool"), Contents("plants"), str(out)):
        (out / CHECKPOINT).mkdir()  # Spark begins
    (out / "part-0.parquet").write_text("x")
    places = {f"{CHECKPOINT}/offsets": offsets, f"{CHECKPOINT}/commits": commits, COUNTED: counted}
    for place, names in places.items():
        if names is not None:
            (out / place).mkdir(parents=True)
            for name in names.split():
                (out / place / name).write_text("v1" if place == COUNTED else "v1\n{}")
    found = Archive(str(tmp_path / "spool"), Contents("plants"), str(out))
    if sentence is None:
        with found:
            return
    for _ in range(2):  # it is let go of, too
        with pytest.raises(qflow.InvalidArgument, match=f"cannot go on: {sentence}.*begin anew in another directory"):
            found.__enter__()


@pytest.mark.parametrize(
    ("path", "content", "sentence"),
    [
        (f"{COUNTED}/11", "", f"{COUNTED}/11 is empty or damaged"),
        (f"{COUNTED}/11", 'v1\n{{"path":"file:{out}/part-2.parquet","si', f"{COUNTED}/11 is empty or damaged"),
        (f"{COUNTED}/11", "v1\n{{}}", f"{COUNTED}/11 is empty or damaged"),
        (f"{COUNTED}/11", "\0" * 100, f"{COUNTED}/11 is empty or damaged"),
        (f"{COUNTED}/9.compact", "v1\n\xff", f"{COUNTED}/9.compact is empty or damaged"),
        (f"{COUNTED}/10", None, f"{COUNTED}/10 is missing"),
        (f"{COUNTED}/8", None, None),  # the compact one says what is in it
        ("part-0.parquet", "", "part-0.parquet has 0 bytes, and had 5"),
        ("part-2.parquet", None, "part-2.parquet is missing"),
        (f"{CHECKPOINT}/offsets/11", "", "offsets/11 is empty or damaged"),
        (f"{CHECKPOINT}/commits/11", "v1", "commits/11 is cut short"),
        (f"{CHECKPOINT}/commits/11", None, None),  # it was killed before that
    ],
)
def test_an_archive_that_cannot_be_read_any_more_is_not_gone_on_with(tmp_path, path, content, sentence):
    """Spark looks at the names of its lists when it starts, and at what is in them much later."""
    out = tmp_path / "out"
    found = Archive(str(tmp_path / "spool"), Contents("plants"), str(out))
    with found:
        for place in (COUNTED, f"{CHECKPOINT}/offsets", f"{CHECKPOINT}/commits"):
            (out / place).mkdir(parents=True)
            for number in range(8, 12):
                (out / place / str(number)).write_text("v1\n{}")
        for number, name in enumerate(("9.compact", "10", "11")):
            (out / f"part-{number}.parquet").write_text("12345")
            noted = json.dumps({"path": f"file:{out}/part-{number}.parquet", "size": 5})
            (out / COUNTED / name).write_text(f"v1\n{noted}")
    if content is None:
        (out / path).unlink()
    else:
        (out / path).write_text(content.format(out=out), "latin-1")
    if sentence is None:
        with found:
            return
    with pytest.raises(qflow.InvalidArgument, match=f"cannot go on: {out}/.*{sentence} .*begin anew in another dir"):
        found.__enter__()


@pytest.mark.parametrize(
    ("said", "kind", "sentence"),
    [
        ("x\nqflow.errors.NotFound: there is no stream 'a'\n  at y", qflow.NotFound, "there is no stream 'a'"),
        ("qflow.errors.StorageError: cannot read", qflow.StorageError, "cannot read"),
        ("qflow.errors.GapError: gone", qflow.StorageError, "gone"),
        (
            "An error occurred while calling o5.start.\n: java.io.IOException: mkdir of file:/x failed\n\tat y",
            qflow.StorageError,
            "Spark failed: mkdir of file:/x failed",
        ),
        ("Job aborted\nCaused by: java.io.IOException: No space left on device", qflow.DiskFull, "no space left"),
        ("[PATH_NOT_FOUND] Path does not exist: file:/x", qflow.InvalidArgument, "Path does not exist"),
        ("[BAD] x\n\tat org.apache.spark.SparkException: y", qflow.InvalidArgument, "Spark failed: [BAD] x"),
        ("", qflow.InvalidArgument, "RuntimeError"),
    ],
)
def test_an_error_of_sparks_is_a_sentence_of_the_kind_it_is_of(said, kind, sentence):
    """So a shell sees the exit code of that kind."""
    error = plain(RuntimeError(said))
    assert type(error) is kind
    assert sentence in str(error)


def test_an_application_names_a_data_frame_that_it_may_write_again():
    """By two options, both or neither, and not for what a checkpoint knows."""
    options = {"path": "/x", "txnAppId": "nightly", "txnVersion": "7"}
    assert parse_for_writing(options).batch == ("app-nightly", 7)
    for wrong, sentence in (
        ({"txnVersion": "x"}, "'txnVersion' is 'x': give a number from 0"),
        ({"txnVersion": "-1"}, "'txnVersion' is '-1'"),
        ({"txnVersion": str(2**63)}, "'txnVersion'"),
        ({"txnVersion": "9" * 5000}, "'txnVersion' is '9"),
        ({"txnAppId": "a/b"}, "'txnAppId' is 'a/b': give 1 to 96 letters"),
    ):
        with pytest.raises(qflow.InvalidArgument, match=sentence):
            parse_for_writing(options | wrong)
    with pytest.raises(qflow.InvalidArgument, match="go together"):
        parse_for_writing({"path": "/x", "txnAppId": "nightly"})
    with pytest.raises(qflow.InvalidArgument, match="are for df.write"):
        parse_for_writing(options, streaming=True)
