"""A stream to Parquet and back, and what its topics look like: the functions, and the commands as their users have them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import qflow
from qflow.cli import pipeline as commands
from qflow.cli.main import app
from qflow.spark.pipeline import archive, draw, load, report

HEADERS = {"unit": "C"}


def publish(broker: qflow.Broker, first: int, count: int) -> None:
    """Publish numbers."""
    broker.publish_many([(f"plant/{n % 3}", b"%d" % n, b"k%d" % (n % 2)) for n in range(first, first + count)])


@pytest.fixture
def parquet(spark: Any, tmp_path: Path) -> Callable[[], list[int]]:
    """Return the numbers in an archive."""
    return lambda: [int(row.value) for row in spark.read.parquet(str(tmp_path / "out")).orderBy("offset").collect()]


def test_an_archive_goes_on_where_the_last_one_stopped(spark, broker, plants, spool, tmp_path, parquet):
    """Each message once, in directories as it was asked for, and what was done is told."""
    publish(broker, 0, 50)
    told: list[Any] = []
    out = str(tmp_path / "out")
    assert (
        archive(spark, str(spool), "plants", out, partition_by=("topic", "date"), most_per_batch=20, tell=told.append)
        == 50
    )
    assert [progress.rows for progress in told] == [20, 20, 10]
    assert archive(spark, str(spool), "plants", out, partition_by=("topic", "date")) == 0
    publish(broker, 50, 5)
    assert archive(spark, str(spool), "plants", out, partition_by=("topic", "date")) == 5
    assert parquet() == list(range(55))
    assert {path.name for path in (tmp_path / "out").glob("topic=*")} == {f"topic=plant%2F{n}" for n in range(3)}


def test_a_filter_chooses_what_is_archived(spark, broker, plants, spool, tmp_path, parquet):
    """As in MQTT."""
    publish(broker, 0, 9)
    assert archive(spark, str(spool), "plants", str(tmp_path / "out"), topic_filter="plant/1") == 3
    assert parquet() == [1, 4, 7]


def test_an_archive_with_a_trigger_runs_until_it_is_stopped(spark, broker, plants, spool, tmp_path, parquet):
    """What comes meanwhile is written, too."""
    publish(broker, 0, 5)
    told: list[Any] = []

    def tell(progress: Any) -> None:
        told.append(progress)
        if len(told) == 1:
            publish(broker, 5, 5)

    rows = lambda: sum(progress.rows for progress in told)  # noqa: E731
    archive(spark, str(spool), "plants", str(tmp_path / "out"), trigger="0.1s", tell=tell, stopped=lambda: rows() == 10)
    assert parquet() == list(range(10))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"partition_by": ("colour",)}, "cannot be split by 'colour'"), ({"trigger": "soon"}, "such as 10s, not 'soon'")],
)
def test_what_cannot_be_archived_is_refused(spark, broker, plants, spool, tmp_path, options, sentence):
    """With a sentence."""
    with pytest.raises(qflow.InvalidArgument, match=sentence):
        archive(spark, str(spool), "plants", str(tmp_path / "out"), **options)


def test_an_archive_is_loaded_into_a_stream_as_it_was(spark, broker, plants, spool, tmp_path):
    """Topics, keys, headers and order; and a stream that does not take them is refused."""
    publish(broker, 0, 30)
    broker.publish("plant/9", b"30", headers=HEADERS)
    archive(spark, str(spool), "plants", str(tmp_path / "out"), partition_by=("topic",))
    with qflow.open(tmp_path / "other") as other:
        other.declare_stream("again", topics=["plant/#"])
        other.declare_stream("wrong", topics=["other/#"])
        assert load(spark, str(tmp_path / "out"), str(tmp_path / "other"), "again") == 31
        with pytest.raises(Exception, match="stream 'wrong' of .* does not take topic"):
            load(spark, str(tmp_path / "out"), str(tmp_path / "other"), "wrong")
        as_it_was = [(m.topic, m.key, m.body, m.headers) for m in plants.query()]
        assert [(m.topic, m.key, m.body, m.headers) for m in other.stream("again").query()] == as_it_was


def test_a_report_counts_what_each_topic_holds(spark, still, clock, spool, tmp_path):
    """Rates, and times from a message to the next, over what is retained."""
    still.declare_stream("plants", topics=["plant/#"])
    for number in range(11):
        still.publish("plant/steady", b"x" * 10)
        if number in (0, 10):
            still.publish("plant/rare", b"y")
        clock.advance(2)
    steady, rare = report(spark, str(spool), ["plants"])
    assert (steady.stream, steady.topic, steady.messages, steady.bytes, steady.seconds) == (
        "plants",
        "plant/steady",
        11,
        110,
        20,
    )
    assert steady.rate_per_s == pytest.approx(0.5)
    assert steady.p50_ms == steady.p99_ms == pytest.approx(2000)
    assert (rare.messages, rare.longest_gap_s) == (2, pytest.approx(20))
    pytest.importorskip("matplotlib")
    draw([steady, rare], str(tmp_path / "report.png"))
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"


def test_a_stream_is_archived_from_a_shell(broker, plants, spool, tmp_path):
    """Beside the owner of the spool, with a Spark of its own."""
    publish(broker, 0, 10)
    command = ["pipeline", "run", spool, "plants", "--to", f"parquet:{tmp_path / 'out'}", "--master", "local[1]"]
    done = subprocess.run(
        [sys.executable, "-m", "qflow", *map(str, command), "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert json.loads(done.stdout)["messages"] == 10, done.stderr


class Lasting:
    """A session that a command does not end."""

    def __init__(self, spark: Any) -> None:
        self._spark = spark

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spark, name)

    def stop(self) -> None:
        """Others need it."""


def test_the_commands_say_what_they_did(spark, broker, plants, spool, tmp_path, monkeypatch):
    """A line for people, JSON for programs; what is wrong is a sentence on stderr and an exit code."""
    publish(broker, 0, 10)
    broker.close()
    monkeypatch.setattr(commands, "_session", lambda master: Lasting(spark))

    def run(*arguments: object) -> Any:
        return CliRunner().invoke(app, ["pipeline", *map(str, arguments)])

    out = tmp_path / "out"
    done = run("run", spool, "plants", "--to", f"parquet:{out}", "--partition-by", "topic, date")
    assert done.stdout == f"10 messages of stream plants were written to {out}\n"
    assert "batch 0: 10 messages in" in done.stderr
    done = run("load", out, "--into", spool, "plants")
    assert done.stdout == f"10 messages were published into stream plants of {spool}\n"
    done = run("load", out, "--into", spool, "nowhere")
    assert (done.exit_code, done.stderr.startswith("qflow: there is no stream 'nowhere' in")) == (2, True)
    assert run("run", spool, "plants", "--to", "csv:x").exit_code == 2
    (topic, *others) = json.loads(run("report", spool, "--json").stdout)["topics"]
    assert (topic["stream"], topic["topic"], topic["messages"], len(others)) == ("plants", "plant/0", 8, 2)
    assert run("report", spool).stdout.splitlines()[1].split()[:3] == ["plants", "plant/0", "8"]
    assert run("report", spool, "--stream", "nowhere").exit_code == 2
