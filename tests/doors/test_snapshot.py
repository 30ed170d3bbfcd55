"""`qflow snapshot create`, `qflow snapshot load` and `qflow compact`; and how asyncio calls them."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

import qflow
import qflow.aio
from doors.command_line import NOT_READING, CommandLine, error_line, numbers, python, text
from doors.event_loop import run
from qflow import inspect
from qflow.cli.main import app


def test_a_snapshot_of_a_spool_that_nobody_owns(cli: CommandLine) -> None:
    """Created, loaded and drained; each copy is a spool of its own, and the original is not touched."""
    cli.run("put", cli.spool, "q", stdin=text(numbers(0, 1000)))
    before = (cli.spool / "log" / "data.mdb").read_bytes()
    facts = cli.json("snapshot", "create", cli.spool, "taken")
    assert (facts["queues"], facts["messages"], facts["bytes"], facts["clean"]) == (1, 1000, 2890, True)
    assert facts["path"] == str(cli.directory / "taken")
    assert (cli.spool / "log" / "data.mdb").read_bytes() == before
    loaded = cli.run("snapshot", "load", "taken", "back")
    assert loaded.returncode == 0, loaded.stderr
    assert b"1 queue, 0 streams, 1,000 messages of 2,890 bytes; " in loaded.stdout
    assert b" KiB on disk" in loaded.stdout
    uuids = [inspect.read_spool(cli.directory / name).uuid for name in ("spool", "taken", "back")]
    assert len(set(uuids)) == 3
    assert inspect.read_spool(cli.directory / "back").origin == uuids[1] == facts["uuid"]
    assert cli.run("get", "back", "q").stdout == text(numbers(0, 1000))
    assert cli.json("stats", "taken")["queues"][0]["messages"] == 1000


def test_a_snapshot_beside_a_live_owner(cli: CommandLine) -> None:
    """The owner goes on; the copy holds what was stored, and opens as after a crash."""
    process = cli.start("pipe", cli.spool, "q", "--", *NOT_READING)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(text(numbers(0, 500)))
    assert process.stdout.readline() == b"ready\n"
    cli.wait_until_stored(500)
    facts = cli.json("snapshot", "create", cli.spool, "taken")
    assert (facts["messages"], facts["clean"], facts["problems"]) == (500, False, [])
    process.stdin.write(text(numbers(500, 600)))
    cli.wait_until_stored(600)
    assert cli.json("check", "taken")["problems"] == []
    assert cli.run("get", "taken", "q").stdout == text(numbers(0, 500))
    assert cli.json("compact", cli.spool)["problems"] == []


@pytest.mark.parametrize("command", ["create", "load"])
def test_bad_input_to_a_snapshot(cli: CommandLine, command: str) -> None:
    """One line on stderr, the documented exit code, and nothing is made or changed."""
    cli.run("put", cli.spool, "q", stdin=b"x\n")
    (cli.directory / "file").write_bytes(b"precious")
    (cli.directory / "no spool").mkdir()
    (cli.directory / "full").mkdir()
    (cli.directory / "full" / "file").write_bytes(b"precious")
    there = sorted(os.listdir(cli.directory))
    for source, target, code, expected in (
        ("spool", "full", 2, "it holds 'file'"),
        ("spool", "spool", 2, "inside the spool"),
        ("spool", "spool/log/copy", 2, "inside the spool"),
        ("no spool", "new", 2, "it holds no log"),
    ):
        done = cli.run("snapshot", command, source, target)
        assert (done.returncode, expected in error_line(done)) == (code, True), done.stderr
    for source, target in (("nowhere", "new"), ("file", "new"), ("spool", "file")):
        done = cli.run("snapshot", command, source, target)
        assert done.returncode == 2
        assert b"Traceback" not in done.stderr
    assert sorted(os.listdir(cli.directory)) == there
    assert os.listdir(cli.directory / "full") == ["file"]


@pytest.mark.parametrize("command", ["create", "load"])
@pytest.mark.parametrize("existed", [False, True], ids=["new", "empty"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_copy_that_is_ended_in_its_check_is_removed(
    spool: Path, monkeypatch: pytest.MonkeyPatch, command: str, existed: bool, number: signal.Signals
) -> None:
    """The same command may be given again; an empty directory that was there stays."""
    with qflow.open(spool) as broker:
        broker.declare_queue("q").put(b"x")
    target = spool.parent / "taken"
    if existed:
        target.mkdir()

    def ended(path: Path) -> inspect.Examination:
        found = inspect.read_spool(path)
        assert found.queues[0].messages == 1
        os.kill(os.getpid(), number)
        raise AssertionError("the signal was not heard")

    with monkeypatch.context() as patched:
        patched.setattr("qflow.inspect.log_check.examine", ended)
        done = CliRunner().invoke(app, ["snapshot", command, str(spool), str(target)])
    assert done.exit_code == 128 + number, done.output
    assert (target.exists(), target.exists() and (target / "log").exists()) == (existed, False)
    done = CliRunner().invoke(app, ["snapshot", command, str(spool), str(target)])
    assert done.exit_code == 0, done.output


def test_what_is_no_snapshot_any_more_is_not_loaded(cli: CommandLine) -> None:
    """A damaged or shortened log is found out before a directory is made."""
    cli.run("put", cli.spool, "q", stdin=b"x\n")
    cli.run("snapshot", "create", cli.spool, "taken")
    data = cli.directory / "taken" / "log" / "data.mdb"
    whole = data.read_bytes()
    for damaged in (whole[: len(whole) - 4096], bytes(len(whole))):
        data.write_bytes(damaged)
        done = cli.run("snapshot", "load", "taken", "back")
        assert done.returncode in (1, 4)
        assert "taken" in error_line(done)
        assert not (cli.directory / "back").exists()
    data.unlink()
    assert "holds no data.mdb" in error_line(cli.run("snapshot", "load", "taken", "back"))


def test_compact_gives_the_disk_back(cli: CommandLine) -> None:
    """The file is smaller, what waits is the same; a directory without a spool stays empty."""
    with qflow.open(cli.spool) as broker:
        queue = broker.declare_queue("q")
        queue.put_many([b"x" * 10_000] * 2000)
        queue.purge()
        queue.put(b"kept")
    facts = cli.json("compact", cli.spool)
    assert facts["bytes_before"] > 2 * facts["bytes_after"]
    assert (cli.spool / "log" / "data.mdb").stat().st_size == facts["bytes_after"]
    shown = cli.run("compact", cli.spool).stdout.decode()
    assert shown.startswith("log: ")
    assert shown.endswith("MiB now\n")
    assert cli.waiting() == [b"kept"]
    (cli.directory / "no spool").mkdir()
    done = cli.run("compact", "no spool")
    assert (done.returncode, "holds no log" in error_line(done)) == (2, True)
    assert os.listdir(cli.directory / "no spool") == []


KILLED = python(
    "import os, signal, sys, qflow\n"
    "broker = qflow.open(sys.argv[1], capacity_bytes=0)\n"
    "broker.declare_queue('transient', durable=False).put_many([b'x'] * int(sys.argv[2]))\n"
    "os.kill(os.getpid(), signal.SIGKILL)\n"
)
"""Spills so many messages, a file each, and is killed."""


def spill_and_die(cli: CommandLine, messages: int) -> None:
    """Leave so many spill files in a spool that nobody owns."""
    subprocess.run([*KILLED, str(cli.spool), str(messages)], check=False)
    assert sum(path.is_file() for path in (cli.spool / "spill").rglob("*")) >= messages - 2


def test_compact_removes_the_spill_files_of_an_owner_that_was_killed(cli: CommandLine) -> None:
    """All of them, also those that the commands before it did not come to: what it frees is on disk when it ends."""
    spill_and_die(cli, 2_000)
    assert cli.run("compact", cli.spool).returncode == 0
    assert os.listdir(cli.spool / "spill") == os.listdir(cli.spool / "wiping") == []


def test_each_command_that_owns_a_spool_removes_some_spill_files_of_before(cli: CommandLine) -> None:
    """However shortly it lives: a few are gone with the first one."""
    spill_and_die(cli, 200)
    assert cli.run("put", cli.spool, "q", stdin=b"x\n").returncode == 0
    assert os.listdir(cli.spool / "spill") == os.listdir(cli.spool / "wiping") == []


def test_compact_of_a_live_broker_removes_what_was_set_aside_meanwhile(spool: Path) -> None:
    """The spill files of a queue that was deleted, whatever maintenance is at."""
    with qflow.open(spool, capacity_bytes=0) as broker:
        queue = broker.declare_queue("transient", durable=False)
        queue.put_many([b"x"] * 600)
        broker.delete_queue("transient")
        broker.compact()
        assert os.listdir(spool / "wiping") == []


def test_readers_beside_an_owner_who_compacts_see_the_log_whole_each_time(cli: CommandLine) -> None:
    """At whatever moment they open it: before, between the renames, or after."""
    reading = python(
        "import sys\nfrom qflow import inspect\n"
        "for _ in range(150):\n"
        "    (queue,) = inspect.read_spool(sys.argv[1]).queues\n"
        "    assert queue.messages == 100\n"
        "    assert inspect.check_spool(sys.argv[1]) == []\n"
    )
    with qflow.open(cli.spool) as broker:
        broker.declare_queue("q").put_many([b"x" * 100] * 100)
        reader = subprocess.Popen([*reading, str(cli.spool)], stderr=subprocess.PIPE)
        compactions = 0
        while reader.poll() is None:
            broker.compact()
            compactions += 1
        _, errors = reader.communicate()
        assert reader.returncode == 0, errors
        assert compactions > 10


def test_tasks_make_snapshots_and_compact(spool: Path, tmp_path: Path) -> None:
    """Other tasks go on meanwhile; errors are those of the broker."""

    async def main() -> None:
        async with qflow.aio.open(spool) as broker:
            queue = await broker.declare_queue("q")
            await queue.put_many([b"x" * 1000] * 1000)
            report = await broker.snapshot(tmp_path / "copy")
            assert report.messages == 1000
            with pytest.raises(qflow.InvalidArgument, match="is a spool already"):
                await broker.snapshot(tmp_path / "copy")
            await queue.purge()
            compacted = await broker.compact()
            assert compacted.bytes_after <= compacted.bytes_before
            await queue.put(b"new")
            assert await broker.check() == []
        with pytest.raises(qflow.BrokerClosed):
            await broker.snapshot(tmp_path / "late")
        with pytest.raises(qflow.BrokerClosed):
            await broker.compact()

    run(main())
    with qflow.open(tmp_path / "copy") as copy:
        assert len(copy.queue("q")) == 1000


def test_help_names_the_new_commands(cli: CommandLine) -> None:
    """`qflow --help` and `qflow snapshot --help`."""
    shown = cli.run("--help").stdout.decode()
    assert "snapshot" in shown
    assert "compact" in shown
    shown = cli.run("snapshot", "--help").stdout.decode()
    assert "create" in shown
    assert "load" in shown
