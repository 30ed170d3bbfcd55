"""Whatever is wrong: one clear line on stderr, the documented exit code, never a traceback."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import qflow
import qflow.inspect
from doors.command_line import CommandLine, error_line
from qflow.cli.main import app

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("size", ["12 parsecs", "-5", "", "64 MiB MiB", "nan", "--5", "9" * 5000])
@pytest.mark.parametrize("command", [("put",), ("get",), ("pipe",)])
def test_a_bad_size_is_refused_before_anything_is_made(cli: CommandLine, command: tuple[str], size: str) -> None:
    """The message shows what a size looks like."""
    (cli.directory / "there").mkdir()
    done = cli.run(*command, "there", "q", f"--capacity={size}")
    assert done.returncode == 2
    assert "capacity" in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()
    assert os.listdir(cli.directory / "there") == []


@pytest.mark.parametrize("command", [("put", "q"), ("get", "q"), ("pipe", "q"), ("stats",), ("spilled",), ("check",)])
def test_a_file_where_a_spool_should_be(cli: CommandLine, command: tuple[str, ...]) -> None:
    """A file is no spool, and stays as it is."""
    (cli.directory / "file").write_bytes(b"precious")
    done = cli.run(command[0], "file", *command[1:])
    assert done.returncode == 2
    assert "'file' is a file" in done.stderr.decode()
    assert (cli.directory / "file").read_bytes() == b"precious"


@pytest.mark.parametrize("command", [("get", "q"), ("stats",), ("spilled",), ("check",), ("show", "q", "1")])
def test_commands_that_read_make_no_spool(cli: CommandLine, command: tuple[str, ...]) -> None:
    """A misspelt path is an error and not a new, empty spool."""
    done = cli.run(command[0], "nowhere", *command[1:])
    assert done.returncode == 2
    assert "'nowhere' does not exist" in done.stderr.decode()
    assert not (cli.directory / "nowhere").exists()


@pytest.mark.parametrize(
    "command", [("stats",), ("spilled",), ("check",), ("show", "q", "1"), ("get", "q"), ("redrive", "q")]
)
def test_a_directory_that_is_no_spool(cli: CommandLine, command: tuple[str, ...]) -> None:
    """The commands that need what is in one leave it alone and say what is missing."""
    (cli.directory / "there").mkdir()
    done = cli.run(command[0], "there", *command[1:])
    assert done.returncode == 2
    assert "not a spool" in error_line(done)
    assert os.listdir(cli.directory / "there") == []


@pytest.mark.parametrize(
    "command",
    [
        ("put", "there", "q"),
        ("pipe", "there", "q"),
        ("streams", "there", "--declare", "s", "--topics", "#"),
        ("get", "there", "q"),
        ("redrive", "there", "q"),
        ("stats", "there"),
    ],
)
def test_a_directory_of_others_is_not_taken_over(cli: CommandLine, command: tuple[str, ...]) -> None:
    """A directory with other files does not become a spool."""
    (cli.directory / "there").mkdir()
    (cli.directory / "there" / "thesis.txt").write_bytes(b"precious")
    done = cli.run(*command, stdin=b"x\n")
    assert done.returncode == 2
    assert "there is not a spool" in done.stderr.decode()
    assert os.listdir(cli.directory / "there") == ["thesis.txt"]


@pytest.mark.parametrize("name", ["", "x" * 1025], ids=["empty", "long"])
@pytest.mark.parametrize("verb", ["put", "pipe"])
def test_a_bad_name_of_a_queue_makes_no_spool(verb: str, name: str, cli: CommandLine) -> None:
    """It is refused before anything is opened."""
    done = cli.run(verb, cli.spool, name, stdin=b"x\n")
    assert done.returncode == 2
    assert "a queue name takes 1 to 1024 bytes" in done.stderr.decode()
    assert not cli.spool.exists()


@pytest.mark.parametrize("url", ["s3://bucket/spool", "http://host/spool", "gs://bucket", "file:///tmp/spool"])
def test_a_url_is_no_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Neither here nor in Python: the system would make a directory of that name."""
    monkeypatch.chdir(tmp_path)
    qflow.open("spool").close()
    shell = CliRunner()
    for command in (
        ["put", url, "q"],
        ["pipe", url, "q", "--", "cat"],
        ["streams", url, "--declare", "s", "--topics", "#"],
        ["stats", url],
        ["get", url, "q"],
        ["snapshot", "create", "spool", url],
        ["snapshot", "load", "spool", url],
        ["snapshot", "load", url, "new"],
    ):
        done = shell.invoke(app, command, input="x\n")
        assert (done.exit_code, "a spool is a local directory, not a URL: " in " ".join(done.output.split())) == (
            2,
            True,
        ), done.output
        assert "confirmed" not in done.output
    for path in (url, Path(url)):
        with pytest.raises(qflow.InvalidArgument, match="a spool is a local directory, not a URL: "):
            qflow.open(path)
    assert os.listdir() == ["spool"]
    qflow.open(f"./{url}").close()
    assert (tmp_path / url / "log").is_dir()


def test_a_spool_without_a_log_is_not_begun_anew(cli: CommandLine) -> None:
    """What is left of it says that there was one."""
    cli.run("put", cli.spool, "q", stdin=b"x\n")
    shutil.rmtree(cli.spool / "log")
    there = sorted(os.listdir(cli.spool))
    looking = (["ls"], ["check"], ["stats"], ["du"], ["peek", "q"], ["snapshot", "create", "taken"])
    for command, *more in (["put", "q"], ["pipe", "q"], ["get", "q"], ["purge", "q"], *looking):
        words = [command, cli.spool, *more] if command != "snapshot" else [command, more[0], cli.spool, more[1]]
        done = cli.run(*words, stdin=b"x\n")
        assert done.returncode == 1, command
        assert b"its log is gone: restore it from a snapshot" in done.stderr
    assert sorted(os.listdir(cli.spool)) == there


@pytest.mark.parametrize(
    "name",
    ["journal", "journal.new", "spill", "wiping", "door", "inbox", "cursors", "stats.json", "stats.json.new"],
)
def test_whatever_is_left_of_a_spool_says_that_there_was_a_log(name: str, tmp_path: Path) -> None:
    """To who opens it as to who looks: none of it is made where there was none."""
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / name).write_bytes(b"x")
    for look in (qflow.open, qflow.inspect.check_there, qflow.inspect.check_spool):
        with pytest.raises(qflow.CorruptionError, match=f"it holds '{name}'.* its log is gone: restore it from a snap"):
            look(tmp_path / "spool")
    assert set(os.listdir(tmp_path / "spool")) == {"lock", name}
    assert (tmp_path / "spool" / name).read_bytes() == b"x"


def test_every_name_in_a_spool_that_the_reference_lists_is_one_of_ours(tmp_path: Path) -> None:
    """It is not taken for something of somebody else, whether there was a log or not."""
    text = (ROOT / "docs" / "reference" / "index.md").read_text().split("## A spool on disk")[1].split("```")[1]
    names = [line.split()[0].rstrip("/") for line in text.strip().splitlines()]
    assert {"lock", "journal", "amqp"} < set(names)
    told: dict[str, str] = {}
    for name in set(names) - {"log", "log.old"}:
        spool = tmp_path / name
        spool.mkdir()
        (spool / name).write_bytes(b"") if name in ("lock", "journal") else (spool / name).mkdir()
        try:
            qflow.open(spool).close()
        except qflow.QflowError as error:
            told[name] = str(error)
    assert [text for text in told.values() if "its log is gone" not in text] == []


@pytest.mark.parametrize("data", [b"x" * 40_000, None])
def test_a_log_that_was_overwritten_or_cut_short(cli: CommandLine, data: bytes | None) -> None:
    """Damage, for each command: a snapshot brings it back."""
    cli.run("put", cli.spool, "q", stdin=b"x\n")
    log = cli.spool / "log" / "data.mdb"
    log.write_bytes(log.read_bytes()[:9000] if data is None else data)
    for command in ("get", "put", "pipe", "check", "stats", "streams", "compact"):
        done = cli.run(command, cli.spool, *(["q"] if command in ("get", "put", "pipe") else []))
        assert (done.returncode, b"restore it from a snapshot" in done.stderr) == (1, True), (command, done.stderr)
    cli.discard_spool()


def test_where_no_directory_can_be_made() -> None:
    """No cleaner has removed anything in /proc."""
    with pytest.raises(qflow.StorageError, match="no directory can be made in /proc: name one on a disk"):
        qflow.open("/proc/spool")


def test_a_snapshot_where_there_can_be_no_directory_says_so(spool):
    """As a spool there does, in the same words."""
    with qflow.open(spool) as broker:
        with pytest.raises(qflow.StorageError, match="a snapshot .* no directory can be made in /proc: name one on a"):
            broker.snapshot("/proc/copy")
        assert broker.check() == []


@pytest.mark.parametrize("command", ["get", "redrive"])
def test_a_queue_that_is_not_there(cli: CommandLine, command: str) -> None:
    """Those there are are named."""
    for name in ("b", "a"):
        cli.run("put", cli.spool, name, stdin=b"x\n")
    done = cli.run(command, cli.spool, "nope")
    assert done.returncode == 2
    assert error_line(done).endswith("spool; there are: 'a', 'b'")


def test_a_missing_input_file(cli: CommandLine) -> None:
    """Nothing is put when one of the files is not there."""
    (cli.directory / "a").write_bytes(b"1\n")
    done = cli.run("put", cli.spool, "q", "a", "missing")
    assert done.returncode == 2
    assert "'missing' does not exist" in done.stderr.decode()
    assert not cli.spool.exists()


@pytest.mark.parametrize("name", ["..", "a/b", "\t", "🛫", "x" * 300])
def test_any_text_is_a_queue_name(cli: CommandLine, name: str) -> None:
    """Names mean nothing to the file system."""
    assert cli.run("put", cli.spool, name, stdin=b"x\n").returncode == 0
    assert cli.run("get", cli.spool, name).stdout == b"x\n"
    assert cli.json("stats", cli.spool)["queues"][0]["name"] == name


@pytest.mark.parametrize("name", ["", "x" * 1025, "\udcff"])
def test_a_name_that_is_none(cli: CommandLine, name: str) -> None:
    """Empty, too long, or no text."""
    done = cli.run("put", cli.spool, name, stdin=b"x\n")
    assert done.returncode == 2
    assert "queue name" in error_line_of_put(done.stderr)


def error_line_of_put(stderr: bytes) -> str:
    (line,) = stderr.decode().splitlines()
    return line


def test_a_delimiter_must_not_be_empty(cli: CommandLine) -> None:
    """The error tells how to write a zero byte."""
    done = cli.run("put", cli.spool, "q", "--delimiter=", stdin=b"x\n")
    assert done.returncode == 2
    assert r"write '\0'" in done.stderr.decode()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--batch", "3"], "--batch needs a COMMAND"),
        (["--batch", "0", "--", "cat"], "'--batch'"),
        (["--", "no-such-command"], "no command 'no-such-command'"),
        (["wc", "-l"], "put `--` before COMMAND"),
    ],
)
def test_a_pipe_that_cannot_be(cli: CommandLine, arguments: list[str], expected: str) -> None:
    """Refused before stdin is read or the spool is made."""
    done = cli.run("pipe", cli.spool, "q", *arguments, stdin=b"x\n")
    assert done.returncode == 2
    assert expected in done.stderr.decode()
    assert not cli.spool.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do anything")
def test_no_permission(cli: CommandLine) -> None:
    """A spool that may not be opened is a matter of storage."""
    qflow.open(cli.spool).close()
    cli.spool.chmod(0o000)
    done = cli.run("put", cli.spool, "q", stdin=b"x\n")
    cli.spool.chmod(0o700)
    assert done.returncode == 4
    assert "access" in error_line(done)


def test_help_documents_the_exit_codes(cli: CommandLine) -> None:
    """Every code a script may see, and every command."""
    shown = cli.run("--help").stdout.decode()
    for code in range(6):
        assert f"\n    {code}  " in shown
    for command in (
        "demo",
        "put",
        "get",
        "pipe",
        "publish",
        "subscribe",
        "streams",
        "stats",
        "spilled",
        "show",
        "check",
    ):
        assert f"\n  {command} " in shown
        assert cli.run(command, "--help").returncode == 0


def test_a_reader_of_facts_that_leaves_is_no_traceback(cli: CommandLine) -> None:
    """`qflow stats | true` ends like any other command."""
    cli.run("put", cli.spool, "q", stdin=b"x\n")
    done = cli.run("stats", cli.spool, shell='"$@" | true')
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("words", "shell", "said"),
    [
        (("export", "spool"), '"$@" >&-', "cannot write to stdout: it is closed"),
        (("show", "spool", "q", "0", "--body"), '"$@" >&-', "cannot write to stdout: it is closed"),
        (("import", "spool"), '"$@" <&-', "cannot read stdin: it is closed"),
        *(
            (words, 'unset PYTHONUNBUFFERED; "$@" >/dev/full', "cannot write to stdout: No space left on device")
            for words in (
                ("--help",),
                ("--version",),
                ("ls", "--help"),
                ("ls", "spool"),
                ("peek", "spool", "q", "--json"),
                ("export", "spool"),
                ("show", "spool", "q", "0", "--body"),
            )
        ),
    ],
)
def test_standard_streams_that_are_closed_or_full(
    cli: CommandLine, words: tuple[str, ...], shell: str, said: str
) -> None:
    """One sentence that says which: nobody takes it for the disk of the spool."""
    with qflow.open(cli.spool) as broker:
        broker.declare_queue("q").put(b"x")
    done = cli.run(*words, shell=shell)
    assert (done.returncode, said in error_line(done)) == (4, True), done.stderr


@pytest.mark.parametrize("stderr", ["/dev/full", "closed"])
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("subscribe", "spool", "s", "other"), 0),
        (("delete", "spool", "q", "--sequence", "7", "--yes"), 1),
        (("pipe", "spool", "q"), 0),
        (("pipe", "spool", "q", "--backoff", "0", "--batch", "1", "--", "mkdir", "made"), 5),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),
)
def test_a_stderr_that_cannot_be_written_is_no_trouble_of_what_is_done(
    cli: CommandLine, words: tuple[str, ...], code: int, stderr: str
) -> None:
    """What would be said there goes nowhere: nobody takes it for stdout, and what was begun is done."""
    with qflow.open(cli.spool) as broker:
        broker.declare_queue("q").put_many([b"x", b"y"])
        broker.declare_stream("s", topics=["t"])
    where = "2>&1 >/dev/null | true" if stderr == "closed" else f"2>{stderr}"
    done = cli.run(*words, shell=f'{{ "$@"; echo $? >code; }} {where}')
    assert int((cli.directory / "code").read_text()) == code, done.stdout
    if words[0] == "pipe":
        assert cli.waiting() == ([] if code == 0 else [b"y"])


def test_a_file_that_cannot_be_written_is_named(cli: CommandLine) -> None:
    """And what was begun of it is removed."""
    with qflow.open(cli.spool) as broker:
        broker.declare_queue("q").put_many([b"x" * 1000] * 100)
    limited = 'export PYTHONDONTWRITEBYTECODE=1; ulimit -f 8; trap "" XFSZ; "$@"'  # it would cut bytecode of all short
    done = cli.run("export", cli.spool, "-o", "out.jsonl", shell=limited)
    assert (done.returncode, "cannot write out.jsonl: File too large" in error_line(done)) == (4, True), done.stderr
    assert sorted(os.listdir(cli.directory)) == ["spool"]


@pytest.mark.parametrize(
    "words",
    [
        ("peek", "mial"),
        ("show", "mial", "0"),
        ("spilled", "mial"),
        ("purge", "mial", "--yes"),
        ("move", "mial", "orders", "--yes"),
        ("move", "mail", "ordres", "--yes"),
        ("redrive", "mail", "--to", "ordres"),
        ("export", "plnat"),
        ("subscribe", "plnat"),
        ("streams", "reset", "plnat", "group", "--to", "0", "--yes"),
        ("streams", "unsubscribe", "plnat", "group", "--yes"),
        ("delete", "plnat", "--stream", "--yes"),
        ("sessions", "list", "--stream", "plnat"),
        ("pipeline", "report", "--stream", "plnat"),
    ],
)
def test_the_nearest_name_is_told(tmp_path: Path, words: tuple[str, ...]) -> None:
    """To whoever misspells that of a queue or a stream; nothing else is said, and nothing done."""
    spool = tmp_path / "spool"
    with qflow.open(spool) as broker:
        for name in ("mail", "orders"):
            broker.declare_queue(name).put(b"x")
        broker.declare_stream("plant", topics=["plant/#"])
    where = 2 if words[0] in ("streams", "sessions", "pipeline") else 1
    done = CliRunner().invoke(app, [*words[:where], str(spool), *words[where:]])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.output
    assert re.search("did you mean '(mail|orders|plant)'", done.stderr), done.stderr
    with qflow.open(spool) as broker:
        assert {name: len(broker.queue(name)) for name in broker.queues()} == {"mail": 1, "orders": 1}


@pytest.mark.parametrize(
    "words", [("peek", "x"), ("get", "x"), ("subscribe", "x"), ("move", "x", "y"), ("delete", "x")]
)
def test_an_error_does_nothing_to_a_terminal(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Names that it tells of are escaped, and it stays a line."""
    spool = tmp_path / "spool"
    with qflow.open(spool) as broker:
        broker.declare_queue("\x1b[2J\x9bm\nq\u202e")
        broker.declare_stream("\x1b[2J\ns", topics=["t"])
    done = CliRunner().invoke(app, [words[0], str(spool), *words[1:]], color=True)  # as at a terminal
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert done.stderr[:-1].isprintable()
    assert r"there are: '\x1b[2J" in done.stderr


@pytest.mark.parametrize("words", [["--help"], ["ls", "--help"], ["--version"], ["completion", "bash"]])
def test_a_pager_that_is_left_ends_it_with_141(words: list[str]) -> None:
    """Also where nothing but a text is written, and without a word."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as stdout:
        done = subprocess.run([sys.executable, "-m", "qflow", *words], stdout=stdout, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, b"")


def test_what_is_no_spool_is_told_from_one_that_may_not_be_read(tmp_path: Path) -> None:
    """By those who ask from Python as well."""
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "others").mkdir()
    for place, why in (("none", "no such"), ("file", "no directory"), ("file/below", "no such"), ("others", "no log")):
        with pytest.raises(qflow.NotFound, match=why):
            qflow.inspect.read_spool(tmp_path / place)


def test_a_pipe_in_the_spill_directory_is_a_problem_and_is_not_waited_for(cli: CommandLine) -> None:
    """Nor is a link followed; what is beside them is listed."""
    with qflow.open(cli.spool, capacity_bytes=10_000) as broker:
        broker.declare_queue("q", durable=False).put_many([b"x" * 1000] * 30)
        (area,) = (cli.spool / "spill").iterdir()
        os.mkfifo(area / "pipe")
        (area / "link").symlink_to("/dev/zero")
        lines = [json.loads(line) for line in cli.run("spilled", cli.spool, "--json").stdout.splitlines()]
    problems = {Path(line["file"]).name: line["problem"] for line in lines if line["problem"]}
    assert problems.keys() == {"pipe", "link"}
    assert len(lines) > len(problems)


def test_a_queue_that_goes_while_its_largest_message_is_asked_is_no_trouble(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As queues of clients do that come and go: the lines are not for it."""
    with qflow.open(cli.spool) as broker:
        broker.declare_stream("s", topics=["t"])
        gone = "gone", *broker.queues()
    monkeypatch.setattr(qflow.Broker, "queues", lambda _broker: gone)
    monkeypatch.setattr(qflow.Broker, "streams", lambda _broker: ["s", "gone"])
    done = CliRunner().invoke(app, ["import", str(cli.spool)], input='{"stream": "s", "topic": "t", "body": "x"}')
    assert (done.exit_code, done.stdout) == (0, "messages imported: 1\n"), done.stderr
