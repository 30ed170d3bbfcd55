"""`qflow pipe`: nothing confirmed is lost, whatever dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest

import qflow
from doors.command_line import CommandLine, numbers, python, summary, text
from qflow import inspect

COPY_LINES = "import sys\nfor line in sys.stdin: print(line, end='')"


def append_to(path: Path, then: str) -> list[str]:
    """Return a command that writes a JSON list of its input lines as a line of a file, then does something."""
    return python(
        "import json, os, signal, sys\n"
        "lines = sys.stdin.read().splitlines()\n"
        f"with open({str(path)!r}, 'a') as file: print(json.dumps(lines), file=file)\n" + then
    )


def runs(path: Path) -> list[list[str]]:
    """Return what `append_to` wrote, run by run."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_pass_to_stdout(cli: CommandLine) -> None:
    """Everything, in order, whatever the capacity; the summary says how many."""
    lines = numbers(0, 20_000)
    done = cli.run("pipe", cli.spool, "q", "--capacity", "256KiB", "--json", stdin=text(lines))
    assert done.returncode == 0
    assert done.stdout == text(lines)
    counts = {"found": 0, "stored": 20_000, "delivered": 20_000, "left": 0, "restarts": 0, "resume_from": 20_000}
    assert summary(done) == {"queue": "q", **counts}


@pytest.mark.parametrize(
    ("capacity", "command"),
    [("4KiB", ()), ("64KiB", ()), ("64KiB", ("--window", 0, "--", "cat")), ("1", ("--", "cat"))],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else value,
)
def test_it_ends_when_the_queue_is_empty_however_small_the_capacity(
    capacity: str, command: tuple[object, ...], cli: CommandLine
) -> None:
    """Nothing fits into memory beside lines on their way, which does not mean that there are no more."""
    lines = numbers(0, 3 if capacity == "1" else 5_000)
    cli.run("put", cli.spool, "q", stdin=text(lines))
    done = cli.run("pipe", cli.spool, "q", "--capacity", capacity, "--json", *command)
    assert done.returncode == 0
    assert done.stdout == text(lines)
    assert summary(done)["left"] == 0


@pytest.mark.parametrize("option", ["--backoff", "--timeout"])
def test_a_time_that_is_no_number_is_refused(option: str, cli: CommandLine) -> None:
    """It is neither below nor above any bound."""
    done = cli.run("pipe", cli.spool, "q", option, "nan", "--", "cat", stdin=b"a\n")
    assert done.returncode == 2
    assert option in done.stderr.decode()
    assert not cli.spool.exists()


def test_lines_pass_to_a_command(cli: CommandLine) -> None:
    """The command gets everything on its stdin, then the end; options after -- are its own."""
    lines = numbers(0, 50_000)
    done = cli.run("pipe", cli.spool, "q", "--", "grep", "-c", "7", stdin=text(lines))
    assert done.returncode == 0
    assert int(done.stdout) == sum(b"7" in line for line in lines)
    assert cli.waiting() == []


def test_a_line_passes_while_stdin_is_open(cli: CommandLine) -> None:
    """A slow producer's line does not wait for the next one."""
    process = cli.start("pipe", cli.spool, "q", "--", *python(COPY_LINES))
    assert process.stdin is not None
    assert process.stdout is not None
    for line in (b"first\n", b"second\n"):
        process.stdin.write(line)
        assert process.stdout.readline() == line
    process.stdin.close()
    assert process.wait() == 0


def test_what_an_earlier_run_left_goes_out_first(cli: CommandLine) -> None:
    """The queue is drained in order, old lines before new ones."""
    cli.run("put", cli.spool, "q", stdin=b"old\n")
    done = cli.run("pipe", cli.spool, "q", "--json", stdin=b"new\n")
    assert done.stdout == b"old\nnew\n"
    assert summary(done)["found"] == 1


def test_without_a_window_a_command_that_fails_loses_only_what_it_read(cli: CommandLine) -> None:
    """Lines that lay in the pipe or in the queue when the command died are delivered by the next run."""
    lines = numbers(0, 100_000)
    dying = python(
        "import os, signal\nleft = 5000\nwhile left: left -= len(os.read(0, left))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    options = ("--window", 0, "--retries", 0, "--json")
    done = cli.run("pipe", cli.spool, "q", *options, "--", *dying, stdin=text(lines))
    assert done.returncode == 5
    assert b"was ended by signal 9 before the end of its input" in done.stderr
    facts = summary(done)
    read = text(lines)[:5000]
    assert facts["delivered"] == read.count(b"\n")
    assert facts["left"] == facts["stored"] - facts["delivered"]
    waiting = cli.waiting()
    assert waiting == lines[facts["delivered"] : facts["stored"]]


@pytest.mark.parametrize(("window", "left"), [(0, b"5"), ("1MiB", b"1")])
def test_a_command_that_leaves_early_is_an_error_if_it_may_not_begin_again(
    cli: CommandLine, window: object, left: bytes
) -> None:
    """It exits with 0: without a window all it took is done, else the first line; the rest is in the queue."""
    lines = numbers(0, 100_000)
    reading = python("import os\nleft = 10\nwhile left: left -= len(os.read(0, left))")
    done = cli.run("pipe", cli.spool, "q", "--window", window, "--retries", 0, "--", *reading, stdin=text(lines))
    assert done.returncode == 5
    assert b"exited with 0 before the end of its input" in done.stderr
    assert b"say --batch N" in done.stderr
    assert cli.waiting()[0] == left


def test_a_command_that_takes_nothing_and_leaves_is_an_error(cli: CommandLine) -> None:
    """It gets another try, and the lines stay."""
    done = cli.run("pipe", cli.spool, "q", "--backoff", 0, "--", "true", stdin=b"a\n")
    assert done.returncode == 5
    assert (
        b"true exited with 0 before the end of its input at the last of 3 tries; 1 line it had been given is back in the queue"
        in done.stderr
    )
    assert cli.waiting() == [b"a"]


def test_a_command_that_fails_at_the_end_is_an_error(cli: CommandLine) -> None:
    """Its exit code is not hidden, and what it took comes again."""
    done = cli.run("pipe", cli.spool, "q", "--retries", 0, "--", "sh", "-c", "cat; exit 3", stdin=b"a\n")
    assert (done.returncode, done.stdout) == (5, b"a\n")
    assert b"sh exited with 3" in done.stderr
    assert cli.waiting() == [b"a"]


def test_a_reader_of_stdout_that_leaves_loses_nothing_it_did_not_read(cli: CommandLine) -> None:
    """After SIGPIPE, the lines that were stored and not read are in the queue."""
    process = cli.start("pipe", cli.spool, "q")
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"first\n")
    assert process.stdout.readline() == b"first\n"
    process.stdout.close()
    process.stdin.write(b"second\n")
    assert process.wait() == 128 + signal.SIGPIPE
    left = inspect.read_spool(cli.spool).queues[0]
    assert cli.waiting() == [b"second"][: left.messages]
    assert left.next_sequence - left.messages == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_the_command_finish_and_loses_nothing(cli: CommandLine, number: signal.Signals) -> None:
    """What was read is stored, what the command has is delivered, each line once."""
    process = cli.start("pipe", cli.spool, "q", "--", *python(COPY_LINES))
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"first\n")
    assert process.stdout.readline() == b"first\n"
    process.stdin.write(b"second\n")
    cli.wait_until_stored(2)
    process.send_signal(number)
    assert process.wait() == 128 + number
    assert [b"first", *process.stdout.read().splitlines(), *cli.waiting()] == [b"first", b"second"]


@pytest.mark.parametrize(
    ("first", "second"),
    [(signal.SIGTERM, signal.SIGINT), (signal.SIGTERM, signal.SIGTERM), (signal.SIGHUP, signal.SIGHUP)],
)
def test_a_second_signal_ends_a_command_that_does_not_read(
    cli: CommandLine, first: signal.Signals, second: signal.Signals
) -> None:
    """The first waits for the command, and says so; the second ends it. Nothing it did not read is acked."""
    command = python("import signal\nprint('ready', flush=True)\nsignal.pause()")
    lines = numbers(0, 1000)
    process = cli.start("pipe", cli.spool, "q", "--", *command)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(text(lines))
    assert process.stdout.readline() == b"ready\n"
    cli.wait_until_stored(1000)
    process.send_signal(first)
    assert b"to finish; a second signal ends it" in process.stderr.readline()
    process.send_signal(second)
    assert process.wait() == 128 + second
    assert process.stdout.read() == b""
    assert cli.waiting() == lines


def give(pipe: IO[bytes], data: bytes) -> None:
    """Write into a pipe until nobody reads it any more; it stays open, so that whoever reads does not come to its end."""
    with suppress(BrokenPipeError):
        while data:
            data = data[pipe.write(data) :]


@pytest.mark.parametrize("after", [1, 2_000, 20_000])
def test_a_killed_pipe_loses_nothing_it_had_stored(cli: CommandLine, after: int) -> None:
    """After SIGKILL, the next run delivers every stored line that was not delivered, in order; repeats are allowed."""
    lines = numbers(0, 40_000)
    delivered = cli.directory / "delivered"
    with delivered.open("wb") as sink:
        process = cli.start_on(subprocess.PIPE, sink, "pipe", cli.spool, "q", "--capacity", "256KiB")
        assert process.stdin is not None
        giving = threading.Thread(target=give, args=(process.stdin, text(lines)))
        giving.start()
        cli.wait_until_stored(after)
        process.kill()
        process.wait()
        giving.join()
    assert process.returncode == -signal.SIGKILL
    stored = inspect.read_spool(cli.spool).queues[0].next_sequence
    first_run = delivered.read_bytes().split(b"\n")[:-1]
    second_run = cli.waiting()
    assert stored >= after
    assert first_run == lines[: len(first_run)]
    assert second_run == lines[stored - len(second_run) : stored]
    assert len(first_run) + len(second_run) >= stored


def test_a_batch_is_a_run_of_the_command(cli: CommandLine) -> None:
    """N lines a run, fewer in the last."""
    done = cli.run("pipe", cli.spool, "q", "--batch", 1000, "--", "wc", "-l", stdin=text(numbers(0, 2500)))
    assert done.returncode == 0
    assert [int(count) for count in done.stdout.split()] == [1000, 1000, 500]
    assert cli.waiting() == []


def test_a_batch_that_fills_the_memory_is_smaller(cli: CommandLine) -> None:
    """The capacity bounds a batch, too: no run waits for lines that cannot come."""
    log = cli.directory / "runs"
    command = append_to(log, "")
    lines = numbers(10_000, 10_500)
    done = cli.run("pipe", cli.spool, "q", "--capacity", "8KiB", "--batch", 400, "--", *command, stdin=text(lines))
    assert done.returncode == 0
    assert len(runs(log)) > 2
    assert [line.encode() for run in runs(log) for line in run] == lines


def test_a_batch_that_fails_is_repeated_then_given_back(cli: CommandLine) -> None:
    """Each try gets the same lines; then the exit code says it, and the lines keep their place."""
    lines = numbers(0, 25)
    log = cli.directory / "runs"
    command = append_to(log, "sys.exit(7 if '10' in lines else 0)")
    done = cli.run("pipe", cli.spool, "q", "--batch", 10, "--retries", 1, "--json", "--", *command, stdin=text(lines))
    assert done.returncode == 5
    assert b"exited with 7 at the last of 2 tries; 10 lines it had been given are back in the queue" in done.stderr
    assert [run[0] for run in runs(log)] == ["0", "10", "10"]
    counts = {"found": 0, "stored": 25, "delivered": 10, "left": 15, "restarts": 1, "resume_from": 25}
    assert summary(done) == {"queue": "q", **counts}
    assert cli.waiting() == lines[10:]


def test_the_next_run_continues_with_the_batch_that_failed(cli: CommandLine) -> None:
    """A command that died in a run gets the same lines again."""
    lines = numbers(0, 25)
    dying = append_to(cli.directory / "first", "os.kill(os.getpid(), signal.SIGKILL)")
    done = cli.run("pipe", cli.spool, "q", "--batch", 10, "--retries", 0, "--", *dying, stdin=text(lines))
    assert done.returncode == 5
    assert b"was ended by signal 9; 10 lines" in done.stderr
    log = cli.directory / "second"
    assert cli.run("pipe", cli.spool, "q", "--batch", 10, "--", *append_to(log, "")).returncode == 0
    assert [line.encode() for run in runs(log) for line in run] == lines


def test_a_command_may_succeed_without_reading_its_batch(cli: CommandLine) -> None:
    """Its exit code counts, not what it read."""
    done = cli.run("pipe", cli.spool, "q", "--batch", 100_000, "--", "true", stdin=text(numbers(0, 100_000)))
    assert done.returncode == 0
    assert cli.waiting() == []


def test_a_signal_lets_a_batch_finish(cli: CommandLine) -> None:
    """The run in progress ends and its lines are acked; the next one does not start."""
    command = python("import sys\nlines = sys.stdin.readlines()\nprint('got', len(lines))")
    process = cli.start("pipe", cli.spool, "q", "--batch", 2, "--", *command)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"1\n2\n3\n")
    assert process.stdout.readline() == b"got 2\n"
    cli.wait_until_stored(3)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 128 + signal.SIGINT
    assert process.stdout.read() == b""
    assert cli.waiting() == [b"3"]


def test_a_batch_is_written_to_its_end_though_nobody_reads_stderr_any_more(cli: CommandLine) -> None:
    """Ctrl-C ends who reads stderr, too, as in `2>&1 | tee log`: a run that saw an early end would have it all acked."""
    command = python("import os, signal, sys\nos.kill(os.getppid(), signal.SIGINT)\nprint(len(sys.stdin.readlines()))")
    lines = numbers(0, 100_000)
    nobody, stderr = os.pipe()
    os.close(nobody)
    words = ("pipe", cli.spool, "q", "--capacity", "64MiB", "--batch", len(lines), "--", *command)
    cli.run("put", cli.spool, "q", stdin=text(lines))
    process = cli.start_on(subprocess.DEVNULL, subprocess.PIPE, *words, stderr=stderr)
    os.close(stderr)
    assert process.stdout is not None
    assert int(process.stdout.read()) == len(lines)
    assert process.wait() == 128 + signal.SIGINT
    assert cli.waiting() == []


def test_a_queue_at_its_limit_holds_stdin_back(cli: CommandLine) -> None:
    """A limit makes the producer wait, and everything passes all the same."""
    with qflow.open(cli.spool) as broker:
        broker.declare_queue("q", limit_messages=100)
    lines = numbers(0, 5000)
    assert cli.run("pipe", cli.spool, "q", stdin=text(lines)).stdout == text(lines)


def test_a_line_too_long_ends_the_pipe_after_the_lines_before_it(cli: CommandLine) -> None:
    """They are delivered, then the error names the line."""
    with qflow.open(cli.spool) as broker:
        broker.declare_queue("q", max_message_bytes=3)
    done = cli.run("pipe", cli.spool, "q", stdin=b"1\n22\n4444\n5\n")
    assert done.returncode == 2
    assert done.stdout == b"1\n22\n"
    assert b"stdin: line 3 is longer than 3 bytes" in done.stderr
