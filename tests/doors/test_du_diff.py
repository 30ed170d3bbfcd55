"""`qflow du` and `qflow diff`: what takes the disk, and how two spools differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import qflow
from qflow.cli.main import app
from qflow.inspect import compare, copy_spool, read_usage


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    with qflow.open(tmp_path / "spool", capacity_bytes="1MiB") as broker:
        jobs = broker.declare_queue("jobs", priorities=2)
        jobs.put_many([b"a" * 1000] * 200)
        jobs.put(b"urgent", priority=1)
        broker.declare_queue("empty\x1b[31m")
        broker.declare_stream("plant", topics=["plant/#"])
        for number in range(5):
            broker.publish(f"plant/{number % 2}", b"%d" % number, headers={"n": number})
    return tmp_path / "spool"


@pytest.fixture
def copy(spool: Path, tmp_path: Path) -> Path:
    copy_spool(spool, tmp_path / "copy")
    return tmp_path / "copy"


def test_what_takes_the_disk_is_shown_by_store_and_queue(spool: Path) -> None:
    """What is settled in a block with what is not is dead; so is a log's room for more."""
    with qflow.open(spool, capacity_bytes="1MiB") as broker:
        broker.queue("jobs").get_many(100, timeout_s=0).ack()
    found = read_usage(spool)
    stores = {store.name: store for store in found.stores}
    log = stores["log"]
    assert log.live_bytes is not None
    assert 100_000 < log.live_bytes <= (spool / "log" / "data.mdb").stat().st_size
    assert stores["spill"].live_bytes == 0
    lanes = {lane.name: lane for lane in found.lanes}
    assert lanes["jobs"].dead_bytes + lanes["jobs"].live_bytes == lanes["jobs"].log_bytes
    assert 100_000 <= lanes["jobs"].live_bytes < 120_000
    assert lanes["jobs"].dead_bytes >= 0
    assert (lanes["plant"].kind, lanes["plant"].dead_bytes) == ("stream", 0)
    assert lanes["empty\x1b[31m"].log_bytes == 0


def test_a_body_that_lies_elsewhere_counts_for_those_who_refer_to_it(tmp_path: Path) -> None:
    """One that is stored in pieces for its queue, one that two queues share for each of them by half."""
    spool = tmp_path / "spool"
    with qflow.open(spool) as broker:
        for name in ("one", "two"):
            broker.declare_queue(name)
            broker.bind(name, "both")
        broker.publish("both", b"b" * 100_000)
        broker.queue("two").put(b"p" * (9 * 2**20))
    lanes = {lane.name: lane for lane in read_usage(spool).lanes}
    assert 50_000 < lanes["one"].live_bytes == lanes["one"].log_bytes < 51_000
    assert 9 * 2**20 + 50_000 < lanes["two"].live_bytes == lanes["two"].log_bytes < 9 * 2**20 + 51_000


def test_usage_is_shown_as_tables_and_as_json(spool: Path) -> None:
    """Names do nothing to a terminal."""
    shown = run("du", spool)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert "\x1b" not in shown.stdout
    assert [line.split()[0] for line in shown.stdout.splitlines() if line][:2] == ["store", "log"]
    assert {lane["name"] for lane in json.loads(run("du", spool, "--json").stdout)["lanes"]} >= {"jobs", "plant"}


def test_a_copy_does_not_differ(spool: Path, copy: Path) -> None:
    """Nor a spool from itself."""
    for other in (copy, spool):
        done = run("diff", spool, other)
        assert (done.exit_code, done.stdout) == (0, "no differences\n")


def test_differences_are_told_by_sequence(spool: Path, copy: Path) -> None:
    """What is in one of them only, and what differs; messages in a row as one."""
    with qflow.open(copy, capacity_bytes="1MiB") as broker:
        jobs = broker.queue("jobs")
        jobs.get_many(11, timeout_s=0).ack()  # the urgent one, and 0 to 9
        jobs.put_many([b"new"] * 3)
        broker.alter_queue("jobs", limit_messages=7000)
        broker.declare_queue("only here")
        broker.publish("plant/1", b"5")
    found = [(one.name, one.what, one.first, one.last, one.a, one.b) for one in compare(spool, copy)]
    urgent = 1 << 56
    assert found == [
        ("jobs", "limit_messages", None, None, None, 7000),
        ("jobs", "messages", None, None, 201, 193),
        ("jobs", "bytes", None, None, 200_006, 190_009),
        ("jobs", "only in a", 0, 9, None, None),
        ("jobs", "only in b", 200, 202, None, None),
        ("jobs", "only in a", urgent, urgent, None, None),
        ("only here", "only in b", None, None, None, None),
        ("plant", "messages", None, None, 5, 6),
        ("plant", "bytes", None, None, found[8][4], found[8][5]),
        ("plant", "only in b", 5, 5, None, None),
    ]
    done = run("diff", spool, copy)
    assert done.exit_code == 1
    assert "queue jobs: 10 messages only in a: sequences 0 to 9" in done.stdout.splitlines()
    assert "queue jobs: limit_messages: none in a, 7000 in b" in done.stdout.splitlines()
    assert "stream plant, partition 0: 1 message only in b: offset 5" in done.stdout.splitlines()


def test_other_content_under_the_same_sequence_is_told(tmp_path: Path) -> None:
    """Bodies and headers."""
    for name, bodies in (("a", [b"1", b"2", b"3"]), ("b", [b"1", b"other", b"3"])):
        with qflow.open(tmp_path / name, capacity_bytes="1MiB") as broker:
            queue = broker.declare_queue("q")
            queue.put_many(bodies)
            queue.put(b"4", headers={"from": name})
    done = run("diff", tmp_path / "a", tmp_path / "b", "--json")
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["what"], line["first"], line["last"]) for line in lines if line["first"] is not None] == [
        ("differ", 1, 1),
        ("differ", 3, 3),
    ]
    counts = run("diff", tmp_path / "a", tmp_path / "b", "--counts", "--json")
    assert [json.loads(line)["what"] for line in counts.stdout.splitlines()] == ["bytes"]


def test_what_is_no_spool_is_bad_usage(spool: Path, tmp_path: Path) -> None:
    """On either side."""
    for arguments in (("du", tmp_path), ("diff", spool, tmp_path), ("diff", tmp_path, spool)):
        done = run(*arguments)
        assert (done.exit_code, "no log" in done.stderr) == (2, True)
