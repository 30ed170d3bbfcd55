"""`qflow export` and `import`: what goes out comes back as it was, whole batch by whole batch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result

import qflow
from doors.command_line import WATCHDOG_S, CommandLine
from qflow import inspect
from qflow.cli.main import app
from qflow.cli.portable import parquet, restoring
from qflow.cli.portable.items import Declared, line_of, parsed
from qflow.cli.portable.reading import contents
from qflow.restoring import Item


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    """Queues and streams with all that a message may have."""
    path = tmp_path / "spool"
    with qflow.open(path) as broker:
        jobs = broker.declare_queue("jobs", priorities=3, limit_messages=50)
        jobs.put_many([b"plain", b"", b"\xff\x00\n", "körper".encode()])
        jobs.put(b"odd", headers={"a": 1, "b": 2.5, "c": None, "d": True, "é\n": "ü"}, priority=2)
        jobs.put(b"short", ttl_s=3600)
        jobs.put(b"later", delay_s=3600, ttl_s=60, priority=1)
        broker.declare_queue("bound\n", dead_letter="jobs")
        broker.bind("bound\n", "plant/#")
        broker.declare_stream("plant", topics=["plant/#", "$own/#"], partitions=3)
        broker.declare_stream("all", topics=["#"])
        for number in range(12):
            broker.publish(f"plant/{number % 5}", b"%d" % number, key=b"\xfe%d" % (number % 4), headers={"n": number})
        broker.publish("$own/a", b"own")
    return path


def run(*words: object) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(word) for word in words])


def told(spool: Path) -> tuple[list[Any], dict[Any, list[Item]]]:
    """Return all that an export holds but what is new where it goes, by queue and partition."""
    found = contents(spool, ())
    lines: dict[Any, list[Item]] = {}
    for batch in found.batches():
        for one in batch:
            lines.setdefault((one.kind, one.name, one.partition), []).append(attrs.evolve(one, number=0, time_ms=0))
    return found.declared, lines


def owner_of(path: Path, owned: bool) -> AbstractContextManager[object]:
    """Return another owner of the spool, through whose door an import goes; or none."""
    return qflow.open(path) if owned else nullcontext()


def test_a_reader_is_waited_for_where_the_pipe_does_not_block(cli: CommandLine) -> None:
    """Another process that has the pipe, too, has set that: node and ssh do."""
    with qflow.open(cli.spool) as broker:
        broker.declare_queue("q").put_many([b"x" * 1000] * 200)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    process = cli.start_on(subprocess.DEVNULL, writing, "export", cli.spool)
    os.close(writing)
    with open(reading, "rb") as pipe:
        assert len(pipe.readlines()) == 201
    assert process.wait(WATCHDOG_S) == 0


def test_what_is_printed_is_there_at_once_where_python_is_to_keep_nothing_back() -> None:
    """As in containers, by PYTHONUNBUFFERED: `qflow pipe` said only at its end why its command was started again."""
    program = (
        "import os, sys; from qflow.cli.standard import wait_for_readers; wait_for_readers()\n"
        "print('out'); print('err', file=sys.stderr); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-u", "-c", program], capture_output=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == (b"out\n", b"err\n")


def test_what_is_exported_to_a_file_is_on_the_disk_before_it_has_its_name(
    spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut would leave the name, and nothing in it."""
    file = tmp_path / "all.jsonl"
    synced: list[tuple[int, bool]] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append((os.fstat(fd).st_ino, file.exists())))
    assert run("export", spool, "-o", file).exit_code == 0
    assert synced == [(file.stat().st_ino, False), (tmp_path.stat().st_ino, True)]


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_what_is_exported_is_imported_as_it_was(spool: Path, tmp_path: Path, suffix: str, owned: bool) -> None:
    """Bodies, headers, priorities, expiry, delays, topics, keys and partitions, and how all is declared."""
    if suffix == "parquet":
        pytest.importorskip("pyarrow.parquet")
    file = tmp_path / f"all.{suffix}"
    done = run("export", spool, "-o", file)
    assert (done.exit_code, done.stdout.splitlines()) == (0, [f"messages exported to {file}: 44"])
    with owner_of(tmp_path / "new", owned):
        done = run("import", tmp_path / "new", file)
    assert (done.exit_code, done.stdout) == (0, "messages imported: 44\n")
    (declared, lines), (declared_before, lines_before) = told(tmp_path / "new"), told(spool)
    assert declared == declared_before
    for place, before in lines_before.items():
        assert lines[place] == before, place
    assert inspect.check_spool(tmp_path / "new") == []
    assert [name.name for name in tmp_path.iterdir() if name.suffix == ".part"] == []


def test_lines_go_through_pipes_to_another_queue(spool: Path, tmp_path: Path) -> None:
    """Of one queue alone, under another name; beside what is in it."""
    exported = run("export", spool, "jobs")
    assert exported.exit_code == 0
    lines = exported.stdout_bytes
    assert all(isinstance(json.loads(line), dict) and line.isascii() for line in lines.splitlines())
    for _ in range(2):
        done = CliRunner().invoke(app, ["import", str(spool), "-", "--to", "copy", "--json"], input=lines)
        assert json.loads(done.stdout) == {"imported": 7, "expired": 0, "skipped": 0}
    assert {queue.name: queue.messages for queue in inspect.read_spool(spool).queues}["copy"] == 14


def test_a_pipe_with_a_name_is_read_once(tmp_path: Path) -> None:
    """As a shell makes of `<(qflow export ...)`: what looks what the file is takes nothing from those who read it."""
    lines = [line_of(Item(kind="queue", name="q", body=b"%d" % number)) for number in range(100)]
    lines.insert(0, line_of(Declared(kind="queue", name="q", settings={})))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    written = threading.Thread(target=pipe.write_text, args=["\n".join(lines) + "\n"])
    written.start()
    done = run("import", tmp_path / "spool", pipe)
    written.join()
    assert (done.exit_code, done.stdout) == (0, "messages imported: 100\n")
    page = inspect.read_page(tmp_path / "spool", "q")
    assert [message.body for message in page.messages] == [b"%d" % number for number in range(100)]


def test_parquet_is_not_read_from_a_pipe_which_is_said(tmp_path: Path) -> None:
    """It begins with what stands at its end; lines of JSON are told from it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    written = threading.Thread(target=pipe.write_bytes, args=[b"PAR1\x15\x04\x15"])
    written.start()
    done = run("import", tmp_path / "spool", pipe)
    written.join()
    piped = CliRunner().invoke(app, ["import", str(tmp_path / "spool")], input=b"PAR1\x15\x04\x15")
    for one in (done, piped):
        assert (one.exit_code, one.stdout) == (2, "messages imported: 0\n")
        assert "Parquet is read from a file, and not from a pipe or stdin: write it to a file first" in one.stderr


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ("{", "no JSON"),
        ("[]", "no JSON object"),
        ('{"body": "x"}', "no queue and no stream"),
        ('{"queue": "q", "body": 5}', "body is missing"),
        ('{"queue": "q", "body_base64": "?"}', "no base64"),
        ('{"queue": "q", "priority": 7}', "priority must be"),
        ('{"queue": "q", "headers": {"a": []}}', "header 'a'"),
        ('{"queue": "q", "body": "\\ud800"}', "no text"),
        ('{"queue": "other"}', "'other'"),
        ('{"queue": "q", "body": "x", "prio": 3}', "'prio' is none of"),
        ('{"declare": "queue", "name": "x", "settings": {"limit": 1}}', "'limit'"),
        ('{"stream": "plant", "partition": 9, "topic": "plant/1"}', "plant"),
        ('{"queue": "q", "topic": "\\ud800"}', "topic"),
        ('{"queue": "q", "topic": "plant/#"}', "topic"),
        (json.dumps({"queue": "q", "key": "k" * 65_536}), "key"),
        ('{"declare": "table", "name": "x", "settings": {}}', "queue or stream"),
        ('{"declare": "queue", "name": "x", "settings": {"limit_messages": -1}}', "limit_messages"),
    ],
)
def test_a_bad_line_ends_it_after_whole_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str, sentence: str, owned: bool
) -> None:
    """It is named, and so is how many messages are there; --skip goes on behind them."""
    monkeypatch.setattr(restoring, "BATCH_MESSAGES", 2)
    lines = ['{"declare": "queue", "name": "q", "settings": {}}']
    lines += [line_of(Item(kind="queue", name="q", body=b"%d" % number)) for number in range(5)]
    file = tmp_path / "file"
    file.write_text("\n".join([*lines[:5], bad, *lines[5:]]) + "\n")
    with owner_of(tmp_path / "spool", owned):
        done = run("import", tmp_path / "spool", file)
    assert (done.exit_code, done.stdout) == (2, "messages imported: 4\n")
    assert f"line 6 of {file}" in done.stderr
    assert sentence in done.stderr
    file.write_text("\n".join(lines) + "\n")
    assert run("import", tmp_path / "spool", file, "--skip", 4).exit_code == 0
    page = inspect.read_page(tmp_path / "spool", "q")
    assert [message.body for message in page.messages] == [b"%d" % number for number in range(5)]


@pytest.mark.parametrize("owned", [False, True])
def test_a_line_is_as_long_as_a_message_may_be_and_no_longer(tmp_path: Path, owned: bool) -> None:
    """A file without line ends is not read into memory; the largest message, in JSON, is."""
    file = tmp_path / "file"
    item = Item(kind="queue", name="q", body=b"\x01" * 2**20)
    settings = {"max_message_bytes": 2**20}
    declared = line_of(Declared(kind="queue", name="q", settings=settings))
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_queue("small", max_message_bytes=100)
    with file.open("w") as lines:
        lines.write(f"{declared}\n{line_of(item)}\n")
        lines.truncate(2**35)  # of nothing, which takes no disk
    with owner_of(tmp_path / "spool", owned):
        tracemalloc.start()
        try:
            done = run("import", tmp_path / "spool", file)
            assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
        finally:
            tracemalloc.stop()
    assert (done.exit_code, done.stdout) == (2, "messages imported: 0\n")
    assert f"line 3 of {file}: it is longer than {7 * 2**20:,} bytes, the most that a message may take" in done.stderr
    file.write_text(f"{declared}\n{line_of(item)}\n")
    assert run("import", tmp_path / "spool", file).stdout == "messages imported: 1\n"


@pytest.mark.parametrize("owned", [False, True])
def test_a_full_queue_and_an_owner_that_lets_nobody_in_say_so(spool: Path, tmp_path: Path, owned: bool) -> None:
    """It is not waited for; the owner of a spool is not cut off."""
    file = tmp_path / "file"
    file.write_text("".join(line_of(Item(kind="queue", name="jobs", body=b"x")) + "\n" for _ in range(50)))
    with owner_of(spool, owned):
        done = run("import", spool, file)
    assert (done.exit_code, done.stdout) == (4, "messages imported: 0\n")
    with qflow.open(spool, door=False):
        assert run("import", spool, file).exit_code == 3


def test_what_has_expired_is_left_out(tmp_path: Path) -> None:
    """It is told, and counted as done."""
    file = tmp_path / "file"
    lines = [line_of(Item(kind="queue", name="q", expires_ms=moment, body=b"x")) for moment in (1, 2**41 + 2**40)]
    file.write_text('{"declare": "queue", "name": "q", "settings": {}}\n' + "\n".join(lines))
    done = run("import", tmp_path / "spool", file)
    assert done.stdout.splitlines() == ["messages imported: 1", "left out, because they have expired: 1"]


def test_an_export_takes_no_file_that_is_there(spool: Path, tmp_path: Path) -> None:
    """Nor Parquet without a file, nor a queue that is not there."""
    file = tmp_path / "file"
    file.write_text("precious")
    for words in (["-o", file], ["--format", "parquet"], ["job"]):
        assert run("export", spool, *words).exit_code == 2
    assert file.read_text() == "precious"
    file.write_bytes(b"PAR1 and no more")
    assert run("import", tmp_path / "new", file).exit_code == 2


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_parquet_without_pyarrow_is_refused_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """No spool is made, and no number is told of messages that are done."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    file = tmp_path / "file.parquet"
    file.write_bytes(parquet.MAGIC)
    result = run("import", tmp_path / "new", file, *flags)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Parquet needs pyarrow" in result.stderr
    assert not (tmp_path / "new").exists()


def test_parquet_is_read_as_it_was_written_a_few_messages_at_once(tmp_path: Path) -> None:
    """Large bodies of many batches are not in memory together: neither as Arrow has them nor as Python does."""
    arrow = pytest.importorskip("pyarrow")
    file = tmp_path / "file.parquet"
    item = Item(kind="queue", name="jobs", body=b"x" * 2**20)
    small = [Item(kind="queue", name="jobs", number=number) for number in range(2500)]
    parquet.write(file, [], [*([item] * 4 for _ in range(16)), small])
    held = arrow.total_allocated_bytes()
    most, numbers = 0, []
    tracemalloc.start()
    try:
        for one in parquet.read(file):
            assert isinstance(one, Item)
            numbers.append(one.number)
            most = max(most, arrow.total_allocated_bytes() - held)
        assert (most < 8 * 2**20, tracemalloc.get_traced_memory()[1] < 8 * 2**20) == (True, True)
    finally:
        tracemalloc.stop()
    assert numbers == [*[0] * 64, *range(2500)]


def test_headers_that_are_nested_too_deeply_are_a_bad_file(tmp_path: Path) -> None:
    """Like any others that are no JSON."""
    pq = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "file.parquet"
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_queue("jobs").put(b"x")
    assert run("export", tmp_path / "spool", "-o", file).exit_code == 0
    table = pq.read_table(file)
    place = table.schema.get_field_index("headers")
    pq.write_table(table.set_column(place, table.schema.field(place), [["[" * 100_000]]), file)
    result = run("import", tmp_path / "new", file)
    assert (result.exit_code, "is no Parquet file of qflow export, or is damaged" in result.stderr) == (2, True)


def test_a_line_is_what_it_was_made_of() -> None:
    """Also with names and texts that JSON writes as escapes."""
    item = Item(kind="queue", name="\x1b\n", headers={"\x00": "\x7f"}, key=b"\xff", body=b"\xff" * 3, priority=9)
    assert parsed(line_of(item).encode()) == item


def test_what_a_stream_takes_no_more_is_exported_in_its_order(tmp_path: Path) -> None:
    """Retained messages of topics that it took before, also of those that begin with `$`."""
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_stream("s", topics=["$own/#", "a", "b"])
        for topic in ("a", "$own/1", "b", "$own/2", "b"):
            broker.publish(topic, b"body of " + topic.encode())
        broker.alter_stream("s", topics=["b"])
    wanted = ["a", "$own/1", "b", "$own/2", "b"]
    lines = [json.loads(line) for line in run("export", tmp_path / "spool").stdout.splitlines()]
    assert [line["topic"] for line in lines[1:]] == wanted
    assert run("grep", tmp_path / "spool", "-c", "body").stdout == "s: 5\n"
    run("export", tmp_path / "spool", "-o", tmp_path / "all.jsonl")
    assert run("import", tmp_path / "again", tmp_path / "all.jsonl").stdout == "messages imported: 5\n"
    (items,) = told(tmp_path / "again")[1].values()
    assert [one.topic for one in items] == wanted


def test_an_export_into_no_directory_names_the_file_that_was_asked_for(spool: Path, tmp_path: Path) -> None:
    """And not the one that it has until it is whole."""
    done = run("export", spool, "-o", tmp_path / "nowhere" / "all.jsonl")
    assert done.exit_code == 4
    assert done.stderr == f"qflow: cannot write {tmp_path}/nowhere/all.jsonl: No such file or directory\n"


def test_an_import_that_waits_for_a_pipe_hears_a_signal(cli: CommandLine) -> None:
    """Nothing need come; what it has put is told, and an unfinished batch is left out as a whole."""
    importing = cli.start("import", cli.spool)
    assert importing.stdin is not None
    assert importing.stdout is not None
    declared = line_of(Declared(kind="queue", name="q", settings={}))
    lines = [declared, *('{"queue": "q", "body": "x"}',) * (restoring.BATCH_MESSAGES + 1), '{"queue":']
    importing.stdin.write("\n".join(lines).encode())
    cli.wait_until_stored(restoring.BATCH_MESSAGES)
    importing.send_signal(signal.SIGTERM)
    assert importing.wait() == 128 + signal.SIGTERM
    assert importing.stdout.read() == b"messages imported: %d\n" % restoring.BATCH_MESSAGES
    assert len(cli.waiting()) == restoring.BATCH_MESSAGES


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("body", [b"a", None], "body is None"),
        ("body", ["a", "b"], "body is 'a'"),
        ("expires_ms", [0, -5], "expires_ms is -5"),
        ("due_ms", ["5", "6"], "due_ms is '5'"),
        ("kind", ["queue", "que"], "kind is queue or stream, not 'que'"),
        ("more", [1, 2], "more is 1"),
        ("priority", [0, 3], "row 2 of changed.parquet: priority must be an int from 0 to 0"),
        ("settings", None, "settings is missing, or no dict"),
    ],
)
def test_a_parquet_file_that_another_program_has_changed_is_refused(
    name: str, values: list[Any] | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a sentence, whatever is in its columns."""
    arrow, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    item = Item(kind="queue", name="q", number=0, body=b"x")
    parquet.write(Path("file.parquet"), [Declared(kind="queue", name="q", settings={})], [[item, item]])
    table = pq.read_table("file.parquet")
    metadata = table.schema.metadata
    if values is None:
        metadata = {b"qflow.declared": b'[{"kind": "queue", "name": "q", "settings": null}]'}
    elif name in table.column_names:
        table = table.set_column(table.column_names.index(name), name, arrow.array(values))
    else:
        table = table.append_column(name, arrow.array(values))
    pq.write_table(table.replace_schema_metadata(metadata), "changed.parquet")
    result = run("import", "spool", "changed.parquet")
    assert (result.exit_code, said in result.stderr) == (2, True), result.output
