"""`qflow ls`: queues and streams with what is in them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import qflow
from qflow.cli.main import app
from qflow.inspect import list_spool, read_spool
from qflow.names import choices


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    with qflow.open(tmp_path / "spool", capacity_bytes="1MiB") as broker:
        urgent = broker.declare_queue("mail-urgent", priorities=3)
        urgent.put_many([b"a" * 10] * 7, priority=2)
        urgent.put(b"later", delay_s=3600.0)
        broker.declare_queue("mail-slow").put_many([b"b"] * 1000)
        broker.declare_queue("jobs\x1b[31m")
        broker.declare_stream("plant", topics=["plant/#"])
        broker.publish("plant/1", b"12.5")
    return tmp_path / "spool"


def test_queues_and_streams_are_listed(spool: Path) -> None:
    """With the messages of all priorities, delayed ones included; a name does nothing to a terminal."""
    done = run("ls", spool)
    assert (done.exit_code, done.stderr) == (0, "")
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["name", "messages", "bytes", "held", "kind"],
        [r"'jobs\x1b[31m'", "0", "0", "-", "queue"],
        ["mail-slow", "1,000", "1,000", "-", "queue"],
        ["mail-urgent", "8", "88", "-", "queue"],
        ["plant", "1", "4", "-", "stream"],
    ]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["mail-*"], ["mail-slow", "mail-urgent"]),
        (["plant", "mail-u*", "--sort", "messages"], ["mail-urgent", "plant"]),
        (["nothing"], []),
    ],
)
def test_some_are_listed(spool: Path, arguments: list[str], names: list[str]) -> None:
    """Those that match a pattern, in an order that is asked for."""
    found: Any = json.loads(run("ls", spool, *arguments, "--json").stdout)
    assert [entry["name"] for entry in found["entries"]] == names


def test_what_is_listed_is_what_the_whole_log_says(spool: Path) -> None:
    """Though blocks are not read."""
    listed = {entry.name: (entry.messages, entry.bytes) for entry in list_spool(spool).entries if entry.kind == "queue"}
    assert listed == {queue.name: (queue.messages, queue.bytes) for queue in read_spool(spool).queues}


def test_a_listing_imports_little() -> None:
    """Neither the engine nor what is for streams only: that takes longer than the listing."""
    heavy = {"qflow.engine", "qflow.storage.log.writer", "qflow.inspect.stream_reader", "asyncio"}
    script = f"import sys, qflow.cli.ls; from qflow.inspect import list_spool; print({heavy!r} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout == b"set()\n"


def test_beside_an_owner_its_figures_are_listed(spool: Path) -> None:
    """Transient queues, too, and what is held."""
    owner = (
        "import sys, qflow\n"
        "from qflow.upkeep import Upkeep\n"
        "Upkeep._run = lambda upkeep: None\n"  # maintenance would write newer figures meanwhile
        f"broker = qflow.open({str(spool)!r}, capacity_bytes='1MiB')\n"
        "broker.declare_queue('fleeting', durable=False).put(b'x')\n"
        "held = broker.queue('mail-slow').get_many(10)\n"
        "urgent = broker.queue('mail-urgent')\n"
        "urgent.put(b'not logged', durable=False)\n"
        "broker.engine.figures.write()\n"
        "urgent.get_nowait().ack(wait=True)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", owner], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        found = list_spool(spool)
        told = json.loads((spool / "stats.json").read_text())
        (spool / "stats.json").write_text(json.dumps({**told, "time_s": told["time_s"] - 60}))
        old = list_spool(spool)
        process.communicate()
    by_name = {entry.name: entry for entry in found.entries}
    assert found.owner_pid == process.pid
    assert (by_name["fleeting"].durable, by_name["fleeting"].messages) == (False, 1)
    assert by_name["mail-slow"].held_messages == 10
    assert by_name["mail-urgent"].messages == 8, "one is not logged, and one has left since its owner told of nine"
    assert by_name["mail-urgent"].bytes == 88 - 10 + told["queues"]["mail-urgent"]["transient_bytes"]
    assert by_name["plant"].kind == "stream"
    assert "fleeting" not in {entry.name for entry in old.entries}, "its figures are not of now"
    assert {entry.held_messages for entry in old.entries} == {None}


def test_who_misspells_a_name_is_told_the_nearest(spool: Path) -> None:
    """And how to list the others, if there are many."""
    assert choices("mail-slw", ["mail-slow", "jobs"]) == "did you mean 'mail-slow'? there are: 'jobs', 'mail-slow'"
    assert choices("zzz", []) == "there are: none"
    assert choices("zzz", map(str, range(1000))) == "there are 1,000: `qflow ls` lists them"
    for command in (["peek"], ["purge", "--yes"], ["show"]):
        done = run(command[0], spool, "mail-slw", *(["0"] if command == ["show"] else command[1:]))
        assert (done.exit_code, "did you mean 'mail-slow'?" in done.stderr) == (2, True), done.stderr
