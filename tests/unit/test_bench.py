"""`python -m bench` runs from end to end, whatever is missing; what it measures is nobody's business here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # at the end: qflow itself may be the installed one

from bench.__main__ import main  # noqa: E402
from bench.themes import THEMES  # noqa: E402
from faults.strikes import TORTURE  # noqa: E402

WITHOUT_SPARK = [theme for theme in THEMES if theme != "spark"]
"""Spark takes long to start: `tests/spark/test_bench.py` runs its theme in the session that is there."""
ENGINES = ["qflow-files", "qflow-files-durable", "queue.Queue", "sqlite-full", "litequeue", "append", "lmdb-block"]
ROWS = (
    "transient put+get+ack, 100 B",
    "transient put_many, get_many, .bodies, ack, 1,000 x 100 B",
    "the same with `for delivery in batch`",
    "durable put, 1 KiB, one thread: time over a raw LMDB commit",
    "durable put, 1 KiB, one thread: time over the best synced peer",
    "durable put, 1 KiB, 4 threads",
    "durable put, 1 KiB, 64 threads: rate over the best synced peer",
    "durable put, 1 KiB, 64 threads: rate over one thread",
    "durable put_many, 1,000 x 100 B",
    "durable put_many, 1,000 x 1 KiB",
    "durable get_many + ack, batches of 1,000, resident",
    "the same from the log, after a reopen",
    "get + ack(wait=True), batches of 1,000",
    "get + ack(wait=True), one by one",
    "spill to files, 1 KiB, drained and filled again",
    "spill to segments, 1 KiB, write + read + free",
    "Satellite's push + pop, 8 KiB messages, segments of 128 KiB, 10 k waiting",
    "the first fill of a queue",
    "files: file operations a message",
    "segments: file operations a message",
    "1 GiB backlog of 1 KiB messages",
    "1,000,000 x 100 B put one by one",
    "every other small message given back",
    "deliveries taken one by one and held",
    "a wide range of settled messages",
    "long topics",
    "memory over the body of a waiting message of 100 B",
    "asyncio: durable put, 100 B, 1,000 tasks in flight",
    "asyncio: durable put, 100 B, 1,000 tasks in flight: rate over awaiting one by one",
    "asyncio: transient put+get+ack, 100 B: time over the same by a thread",
    "open after SIGKILL to the first get",
    "transient put_many, get_many, ack of 1,000 x 100 B after",
    "durable put_many, get_many, ack of 1,000 x 100 B with",
    "the log's file over what it needs then: with 400 durable messages, half of them acked in random order",
    "the longest durable put into another queue meanwhile: with 400 durable messages, half of them acked in random order",
    "the longest put while it runs: with 1,000 durable messages, half of them held one by one",
    "memory it takes: with 1,000 durable messages, half of them held one by one",
    "peak RssAnon in the put of a durable body through 64 MiB, over the body: with 2 MiB",
    "transient publish to 10 queues",
    "durable publish to 10 queues",
    "transient put+get+ack, 100 B, 10 priorities at random, one by one",
    "transient put+get+ack, 100 B, 10 priorities at random, 500 put and then taken",
    "durable transaction, 100 puts of 100 B and the ack of a batch of 100",
    "5,000 transient delayed messages, 100 B, through 0.32 MiB, in batches of 1,000: rate",
    "5,000 transient delayed messages, 100 B, through 0.32 MiB, in batches of 1,000: peak",
    "5,000 durable delayed messages, 100 B, through 0.32 MiB, in batches of 1,000",
    "5,000 transient delayed messages, 100 B, through 0.32 MiB, one by one",
    "get + ack from segments, 16 KiB, one by one: time through maps",
    "get + ack from segments, 16 KiB, one by one: time with the allocator not told",
    "AMQP publish, confirms in windows of 500, aio-pika",
    "AMQP publish, confirms in windows of 500, pika",
    "AMQP consume, an ack for 100, aio-pika",
    "AMQP consume, an ack for 100, pika",
    "AMQP publish, 5 connections at once, one message each, confirmed, aio-pika",
    "AMQP publish, confirmed one by one, aio-pika",
    "AMQP publish, confirmed one by one, pika",
    "AMQP: RssAnon of the broker, 2 MiB of 1 KiB waiting",
    "AMQP: a broker killed and started, 2,000 messages waiting, to the first delivery",
    "publish_many, 1,000 x 256 B, 100 topics a batch: rate over raw LMDB commits",
    "publish_many, 1,000 x 256 B, 1,000 topics a batch: rate over raw LMDB commits",
    "replay of 10,000 x 256 B to one subscriber, batches of 1,000, without a name",
    "replay of 10,000 x 256 B to one subscriber, batches of 1,000, durable",
    "publish_many, 1,000 x 256 B, 1,000 live subscribers with distinct filters",
    "publish, 256 B, 1,000 live subscribers with distinct filters",
    "replay of one topic of 1,000, 100,000 messages, in 1 % of the batches: blocks read",
    "replay of one topic of 1,000, 100,000 messages, in 1 % of the batches: time",
    "`site/+/temp` over 10,000 topics, 100 sites x 100: which topics it matches",
    "`site/+/temp` over 10,000 topics, 10,000 sites x 1: time of a block",
    "open after SIGKILL to the first message, 5,000 retained in a stream",
    "retention drops 8 MiB of 256 B messages while one thread publishes",
    "retention drops 8 MiB: p99 of a publish during it over before",
    "20 MiB retained, 10 lagging subscribers",
    "`qflow --help`, from start to end",
    "`qflow ls`, 1,000 messages in 10 queues, without an owner",
    "the same: peak RSS, without an owner",
    "`qflow ls`, 1,000 messages in 10 queues, beside its owner",
    "the same: peak RSS, beside its owner",
    "`qflow doctor`, 1,000 messages in 10 queues, without an owner",
    "`qflow doctor`, 1,000 messages in 10 queues, beside its owner",
    "`qflow check`, 1,000 messages in 10 queues: rate over a plain read of the log's file",
    "`qflow top`, 80 columns, 1 of 4 queues change each second: share of a core",
    "`qflow top`, 200 columns, 4 of 4 queues change each second: share of a core",
    "the page, overview and queues open, 1 of 4 queues change each second: share of a core",
    "the page, overview and queues open, 4 of 4 queues change each second: share of a core",
    "a scrape, 4 queues, a transient put each ms",
    "a scrape, 4 queues, a durable put each ms",
    "p99 of puts, 4 queues, a transient put each ms: with a scrape each second over without",
    "p99 of puts, 4 queues, a durable put each ms: with a scrape each second over without",
)
ALLOWED_TO_LACK = ("not installed", "quick run", "is installed and chosen", "segments", "cgroup", "RssAnon")
"""What a machine or a quick run may lack: the peers, the second spill store, a cgroup, Linux's /proc."""


def bench(*arguments: str, timeout: float = 1000) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def rows(report: Path) -> list[dict[str, Any]]:
    return [row for workload in json.loads(report.read_text())["workloads"] for row in workload["rows"]]


@pytest.mark.skipif(not TORTURE, reason="takes a minute and more: `tox -e torture` runs it")
@pytest.mark.timeout(1200)  # a hundred workloads, most in processes of their own: a minute where nothing else runs
def test_a_quick_run_measures_every_row(tmp_path: Path) -> None:
    """Each row of the table is there, with a figure or the reason why this machine has none."""
    output = tmp_path / "report.json"
    found = bench(
        *WITHOUT_SPARK,
        "--quick",
        "--json",
        "--rounds",
        "1",
        "--output",
        str(output),
        "--directory",
        str(tmp_path),
        "--engines",
        *ENGINES,
    )
    assert found.returncode == 0, found.stderr
    problems = [row["problem"] for row in rows(output) if row["problem"]]
    assert [one for one in problems if not any(reason in one for reason in ALLOWED_TO_LACK)] == []
    names = [row["name"] for row in rows(output)]
    assert [row for row in ROWS if not any(name.startswith(row) for name in names)] == []
    assert str(tmp_path) not in found.stdout
    assert list(tmp_path.glob(".bench-*")) == []


def test_a_text_ranks_equal_promises_only(tmp_path: Path) -> None:
    """A ranking table names its promise, and engines of another one are not in it."""
    found = bench("put", "--quick", "--directory", str(tmp_path), "--engines", "deque", "sqlite-normal", "sqlite-full")
    assert found.returncode == 0, found.stderr
    tables = found.stdout.partition("Why an engine")[0].split("; promise: ")[1:]
    assert [table.split("\n")[0] for table in tables] == ["memory", "survives kill", "synced before return"]
    for table, engine in zip(tables, ("deque", "sqlite-normal", "sqlite-full"), strict=True):
        assert [one for one in ("deque", "sqlite-normal", "sqlite-full") if one in table] == [engine]


def test_two_commits_are_measured_in_turns(tmp_path: Path) -> None:
    """Both sides have figures, and no work tree is left behind."""
    if subprocess.run(["git", "rev-parse", "HEAD"], check=False, cwd=ROOT, capture_output=True).returncode:
        pytest.skip("this is no git checkout")
    found = bench(
        "put",
        "--engines",
        "qflow-files",
        "--quick",
        "--json",
        "--directory",
        str(tmp_path),
        "--compare",
        "HEAD",
        "HEAD",
    )
    assert found.returncode == 0, found.stderr
    changes = json.loads(found.stdout)["rows"]
    assert [len(change[side]["values"]) for change in changes for side in ("old", "new")] == [3] * 4
    trees = subprocess.run(["git", "worktree", "list"], check=True, cwd=ROOT, capture_output=True, text=True).stdout
    assert str(tmp_path) not in trees


def test_ctrl_c_keeps_what_there_is(tmp_path: Path) -> None:
    """The rows of before, one that says it was interrupted, and the exit code of a shell."""
    output = tmp_path / "report.json"
    command = [sys.executable, "-m", "bench", "transient-single", "restart-batches", "--quick", "--json"]
    command += ["--output", str(output), "--directory", str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        assert child.stderr is not None
        seen = ""
        while "restart-batches" not in seen:  # the workload before is done
            seen += child.stderr.read(1)
        os.killpg(child.pid, signal.SIGINT)
        child.stderr.read()
    assert child.returncode == 130
    found = rows(output)
    assert found[0]["figure"]
    assert found[-1]["problem"] == "interrupted"
    assert "INTERRUPTED" in output.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "'nonsense'"),
        (["put", "--engines", "nonsense"], "'nonsense'"),
        (["put", "--rounds", "0"], "at least 1"),
        (["--directory", "/nonexistent"], "no directory"),
        (["--output", "/nonexistent/report.txt"], "no directory"),
        (["--compare", "nonsense", "HEAD"], "neither two reports nor two commits"),
    ],
)
def test_wrong_arguments_are_told_apart(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sentence on stderr and exit code 2, before anything is measured."""
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    found = capsys.readouterr()
    assert ended.value.code == 2
    assert said in found.err.splitlines()[-1]
    assert found.out == ""
