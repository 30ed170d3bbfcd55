"""`qflow metrics`: the metrics of a spool, with an owner and without."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

import qflow
from doors.command_line import CommandLine
from qflow.metrics.spools import source_of_spool


def scraped(text: bytes) -> dict[str, float]:
    """Return each sample of a text."""
    samples = [one for family in text_string_to_metric_families(text.decode()) for one in family.samples]
    return {" ".join([one.name, *one.labels.values()]): one.value for one in samples}


def test_a_live_spool_is_asked_and_a_dead_one_read(cli: CommandLine) -> None:
    """What waits is told either way; that there is no owner is told by a metric."""
    with qflow.open(cli.spool) as broker:
        jobs = broker.declare_queue("jobs")
        jobs.put_many([b"abc"] * 4)
        jobs.get().ack()
        stream = broker.declare_stream("flights", topics=["#"])
        broker.subscribe(stream, name="board", start="earliest").close()
        broker.publish("flights/UA", b"x")
        live = cli.run("metrics", cli.spool)
    dead = cli.run("metrics", cli.spool)
    assert (live.returncode, live.stderr, dead.returncode, dead.stderr) == (0, b"", 0, b"")
    beside, after = scraped(live.stdout), scraped(dead.stdout)
    assert (beside["qflow_up"], after["qflow_up"]) == (1, 0)
    assert beside["qflow_queue_acked_messages_total jobs"] == 1
    assert "qflow_queue_acked_messages_total jobs" not in after, "it is not known any more"
    for found in (beside, after):
        assert found["qflow_queue_messages jobs"] == 3
        assert found["qflow_queue_bytes jobs"] == 9
        assert found["qflow_stream_messages flights"] == 1
        assert found["qflow_subscription_lag_messages flights board"] == 1


def test_an_owner_that_lets_nobody_in_has_written_what_is_told(cli: CommandLine) -> None:
    """As far as it is in `stats.json`."""
    with qflow.open(cli.spool, door=False) as broker:
        jobs = broker.declare_queue("jobs")
        jobs.put_many([b"abc"] * 4)
        broker.engine.figures.note_changed([jobs])
        broker.engine.figures.write()
        found = scraped(cli.run("metrics", cli.spool).stdout)
    assert (found["qflow_up"], found["qflow_queue_put_messages_total jobs"]) == (1, 4)


def test_an_owner_that_hangs_is_not_up(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it told last is told all the same."""

    def silent(_: str) -> Any:
        raise qflow.StorageError("the owner has not answered within 10 s")

    monkeypatch.setattr("qflow.metrics.spools.connect", silent)
    owner = (
        f"import sys, qflow\nbroker = qflow.open({str(cli.spool)!r})\njobs = broker.declare_queue('jobs')\njobs.put(b'abc')\n"
        "broker.engine.figures.note_changed([jobs])\nbroker.engine.figures.write()\nprint(flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", owner], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        told = source_of_spool(cli.spool).look()
        process.communicate()
    assert not told.has_owner
    assert told.queues.keys() == {"jobs"}


def test_names_do_not_reach_the_terminal_as_they_are(cli: CommandLine) -> None:
    """Control characters are escaped, and the text can be read."""
    with qflow.open(cli.spool) as broker:
        broker.declare_queue("\x1b[2J\x07\u202e")
    out = cli.run("metrics", cli.spool, "--named", "1").stdout
    assert out.decode().replace("\n", "").isprintable()
    assert scraped(out)["qflow_queue_messages \\x1b[2J\\x07\\u202e"] == 0


def test_where_there_is_no_spool_it_says_so(cli: CommandLine) -> None:
    """With the exit code that all commands have for that, and nothing on stdout that a collector would take."""
    os.mkdir(cli.directory / "empty")
    for place in ("empty", "missing"):
        done = cli.run("metrics", cli.directory / place)
        assert (done.returncode, done.stdout) == (2, b""), place
        assert done.stderr
        assert b"Traceback" not in done.stderr
