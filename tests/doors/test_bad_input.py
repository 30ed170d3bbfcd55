"""Whatever is wrong: one clear line on stderr, the documented exit code, never a traceback."""

from __future__ import annotations

import os

import pytest

import qflow
from doors.command_line import CommandLine, error_line


@pytest.mark.parametrize("size", ["12 parsecs", "-5", "", "64 MiB MiB", "nan"])
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


@pytest.mark.parametrize("command", [("stats",), ("spilled",), ("check",), ("show", "q", "1")])
def test_a_directory_that_is_no_spool(cli: CommandLine, command: tuple[str, ...]) -> None:
    """The commands that only read leave it alone and say what is missing."""
    (cli.directory / "there").mkdir()
    done = cli.run(command[0], "there", *command[1:])
    assert done.returncode == 2
    assert "not a spool" in error_line(done)
    assert os.listdir(cli.directory / "there") == []


def test_a_directory_of_others_is_not_taken_over(cli: CommandLine) -> None:
    """A directory with other files does not become a spool."""
    (cli.directory / "there").mkdir()
    (cli.directory / "there" / "thesis.txt").write_bytes(b"precious")
    done = cli.run("put", "there", "q", stdin=b"x\n")
    assert done.returncode in (2, 4)
    assert "there" in done.stderr.decode()
    assert os.listdir(cli.directory / "there") == ["thesis.txt"]


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
