"""`qflow pipe` survives the command at its end: what died, left, hangs or cannot be started."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import qflow
from doors.command_line import NOT_READING, CommandLine, numbers, python, summary, text
from qflow import inspect
from qflow.cli.main import app

LINE_BYTES = 6
"""Of the numbers below, with their ends."""
APPEND = (
    "import os, signal, sys\n"
    "def append(text): assert os.write(file, text) == len(text)\n"
    "file = os.open('out', os.O_WRONLY | os.O_APPEND | os.O_CREAT)\n"
)
"""Begins a command that writes what it has worked off to the file `out` of the test's directory."""


def worked_off(cli: CommandLine) -> list[bytes]:
    """Return the lines in the order in which they were worked off."""
    return (cli.directory / "out").read_bytes().splitlines()


def sentences(done: subprocess.CompletedProcess[bytes]) -> list[str]:
    """Return what is said on stderr, but for the summary."""
    return [line.removeprefix("qflow: ") for line in done.stderr.decode().splitlines() if not line.startswith("{")]


def shell(script: str) -> list[str]:
    """Return the command that runs a script of the shell."""
    return ["sh", "-c", script]


def test_a_command_killed_again_and_again_loses_nothing(cli: CommandLine) -> None:
    """All lines are worked off; those that are so twice are the last it took, no more than the window at each death."""
    lines = numbers(10_000, 40_000)
    window = 16 * 1024
    dying = APPEND + (
        "for number, line in enumerate(sys.stdin.buffer):\n"
        "    append(line)\n"
        "    if number == 8000: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    options = ("--window", window, "--backoff", 0, "--json")
    done = cli.run("pipe", cli.spool, "q", *options, "--", *python(dying), stdin=text(lines))
    assert done.returncode == 0, done.stderr
    facts = summary(done)
    assert (facts["stored"], facts["delivered"], facts["left"]) == (30_000, 30_000, 0)
    assert 3 <= facts["restarts"] <= 10
    assert "was ended by signal 9 before the end of its input; " in sentences(done)[0]
    found = worked_off(cli)
    assert sorted(set(found)) == lines
    assert len(found) - len(lines) <= facts["restarts"] * (window // LINE_BYTES + 1)
    jumps = [later for earlier, later in itertools.pairwise(found) if int(later) != int(earlier) + 1]
    assert len(jumps) == facts["restarts"]


@pytest.mark.parametrize(
    "leaving",
    [
        shell("read line; echo $line >> out"),
        shell("head -n 1 >> out"),
    ],
)
def test_a_command_that_leaves_after_each_line_gets_each_line_once(cli: CommandLine, leaving: list[str]) -> None:
    """What it took and did not work off comes again; one sentence tells how to have it otherwise."""
    lines = numbers(0, 16)
    done = cli.run("pipe", cli.spool, "q", "--json", "--", *leaving, stdin=text(lines))
    assert done.returncode == 0, done.stderr
    assert worked_off(cli) == lines
    assert summary(done)["delivered"] == 16
    (sentence,) = sentences(done)
    assert "exited with 0 before the end of its input" in sentence
    assert "say --batch N" in sentence
    assert cli.waiting() == []


TAKING_A_LINE = APPEND + (
    "import array, fcntl, termios\n"
    "line, lying = b'', array.array('i', [0])\n"
    "while not line.endswith(b'\\n'): line += os.read(0, 1)\n"
    "append(line)\n"
    "while lying[0] < 29 * 6: fcntl.ioctl(0, termios.FIONREAD, lying)\n"
    "print('taken', flush=True)\n"
    "open('door').read()\n"
)
"""Works off a line, waits until 29 more lie in the pipe, and says so; goes on when the FIFO `door` is opened."""
DYING = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("window", "last", "left"), [("1MiB", "", 1), (0, "", 1), (0, f"os.read(0, 9 * 6); {DYING}", 10)]
)
def test_after_a_signal_only_what_the_command_worked_off_is_acked(
    cli: CommandLine, window: object, last: str, left: int
) -> None:
    """It leaves with lines in the pipe, or with some that it only read: what it did is as sure as without a signal."""
    lines = numbers(10_000, 10_030)
    os.mkfifo(cli.directory / "door")
    command = python(TAKING_A_LINE + last)
    process = cli.start("pipe", cli.spool, "q", "--window", window, "--", *command)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(text(lines))
    assert process.stdout.readline() == b"taken\n"
    process.send_signal(signal.SIGTERM)
    assert process.stderr.readline().endswith(b") to finish; a second signal ends it\n")
    (cli.directory / "door").write_text("go\n")
    assert process.wait() == (5 if DYING in last else 128 + signal.SIGTERM)
    assert worked_off(cli) == lines[:1]
    assert cli.waiting() == lines[left:]


def test_after_a_signal_a_command_that_left_early_before_is_not_believed_more(cli: CommandLine) -> None:
    """It took all that lay in the pipe, and nobody saw whether it waited for more."""
    lines = numbers(10_000, 10_030)
    os.mkfifo(cli.directory / "door")
    leaving = APPEND + (
        "line = os.read(0, 6)\n"
        "append(line)\n"
        "if line == b'10000\\n': sys.exit()\n"
        "rest = b''\n"
        "while len(rest) < 28 * 6: rest += os.read(0, 28 * 6)\n"
        "print('taken', flush=True)\n"
        "open('door').read()\n"
    )
    process = cli.start("pipe", cli.spool, "q", "--", *python(leaving))
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(text(lines))
    assert process.stdout.readline() == b"taken\n"
    assert b"it is started again each time" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert b"to finish; a second signal ends it" in process.stderr.readline()
    (cli.directory / "door").write_text("go\n")
    assert process.wait() == 128 + signal.SIGTERM
    assert worked_off(cli) == lines[:2]
    assert cli.waiting() == lines[2:]


def test_after_a_signal_a_command_that_takes_nothing_and_leaves_gets_nothing_acked(cli: CommandLine) -> None:
    """What lay in the pipe is in the queue."""
    os.mkfifo(cli.directory / "door")
    process = cli.start("pipe", cli.spool, "q", "--", *shell("echo begun; read go < door"))
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(text(numbers(0, 30_000)))
    assert process.stdout.readline() == b"begun\n"
    cli.wait_until_stored(30_000)
    process.send_signal(signal.SIGINT)
    assert b"waiting for sh (process " in process.stderr.readline()
    (cli.directory / "door").write_text("go\n")
    assert process.wait() == 128 + signal.SIGINT
    assert cli.waiting() == numbers(0, 30_000)


def test_a_command_is_started_when_there_is_a_line_for_it(cli: CommandLine) -> None:
    """The end of an empty input is no event: a shell's `read` would work off an empty line."""
    done = cli.run("pipe", cli.spool, "q", "--", *shell("read line; echo begun >> out"))
    assert (done.returncode, done.stderr) == (0, b"qflow: 0 lines found, 0 stored, 0 delivered, 0 left\n")
    assert not (cli.directory / "out").exists()


def test_a_command_that_leaves_after_each_line_may_fail_at_it(cli: CommandLine) -> None:
    """An exit code that is no 0 acks nothing: the line comes again, and those before it do not."""
    script = "read line; test $line = 2 && mkdir tried && exit 1; echo $line >> out"
    done = cli.run("pipe", cli.spool, "q", "--backoff", 0, "--json", "--", *shell(script), stdin=text(numbers(0, 5)))
    assert done.returncode == 0
    assert worked_off(cli) == numbers(0, 5)
    assert any("sh exited with 1" in sentence for sentence in sentences(done))


def test_what_a_command_had_at_a_bad_end_goes_to_it_again(cli: CommandLine) -> None:
    """Only a good end acks the last lines, though all were taken."""
    script = "cat >> out; mkdir first && exit 3; exit 0"
    done = cli.run("pipe", cli.spool, "q", "--backoff", 0, "--json", "--", *shell(script), stdin=text(numbers(0, 9)))
    assert done.returncode == 0
    assert worked_off(cli) == numbers(0, 9) * 2
    assert (
        sentences(done)[0]
        == "sh exited with 3; 9 lines it had been given are back in the queue; it is started again after 0 s"
    )
    assert summary(done)["restarts"] == 1


def test_a_bad_end_is_seen_where_ends_of_children_are_ignored(cli: CommandLine) -> None:
    """Some supervisors start programs like that, and then nobody would be told an exit code."""
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    starter = f'exec {sys.executable} -c "{ignoring}" "$@"'
    arguments = ("--retries", 0, "--", *shell("cat > taken; exit 3"))
    done = cli.run("pipe", cli.spool, "q", *arguments, stdin=b"1\n", shell=starter)
    assert done.returncode == 5
    assert cli.waiting() == [b"1"]


def test_a_batch_goes_to_the_command_again_until_it_succeeds(cli: CommandLine) -> None:
    """Failures in a row are counted, not those of other batches."""
    script = "cat > taken; mkdir once.$(head -n 1 taken) && exit 1; cat taken >> out"
    options = ("--batch", 10, "--retries", 1, "--backoff", 0, "--json")
    done = cli.run("pipe", cli.spool, "q", *options, "--", *shell(script), stdin=text(numbers(0, 50)))
    assert done.returncode == 0
    assert worked_off(cli) == numbers(0, 50)
    assert summary(done)["restarts"] == 5


@pytest.mark.parametrize("options", [(), ("--batch", 1)])
def test_lines_are_stored_while_the_command_is_not_there(cli: CommandLine, options: tuple[object, ...]) -> None:
    """Neither its failure nor the pause after it keeps stdin waiting; a signal ends the pause."""
    process = cli.start("pipe", cli.spool, "q", *options, "--backoff", 1000, "--", "false")
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(b"0\n")
    assert b"false exited with 1" in process.stderr.readline()
    process.stdin.write(text(numbers(1, 5000)))
    cli.wait_until_stored(5000)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 128 + signal.SIGINT
    assert process.stderr.read().splitlines() == [
        b"qflow: 0 lines found, 5,000 stored, 0 delivered, 5,000 left",
        b"qflow: to go on with the same input, say --resume-from 5000",
    ]
    assert cli.waiting() == numbers(0, 5000)


def test_stdin_is_stored_to_its_end_when_the_command_is_given_up(cli: CommandLine) -> None:
    """The producer loses nothing; the exit code and the last sentence say what became of it."""
    process = cli.start("pipe", cli.spool, "q", "--retries", 1, "--backoff", 0, "--", "false")
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(b"0\n")
    while b"given up" not in (sentence := process.stderr.readline()):
        assert sentence
    for start, end in ((1, 1000), (1000, 2000), (2000, 3000)):
        process.stdin.write(text(numbers(start, end)))
        cli.wait_until_stored(end)
    process.stdin.close()
    assert process.wait() == 5
    assert process.stderr.read().endswith(
        b"3,000 left, 1 restart\nqflow: to go on with the same input, say --resume-from 3000\n"
    )
    assert cli.waiting() == numbers(0, 3000)


def test_a_queue_that_takes_no_more_ends_a_pipe_whose_command_is_given_up(cli: CommandLine) -> None:
    """It says how far stdin was stored, and from there the same input goes on."""
    with qflow.open(cli.spool) as broker:
        broker.declare_queue("q", limit_messages=10)
    lines = numbers(0, 100)
    done = cli.run("pipe", cli.spool, "q", "--retries", 0, "--", "false", stdin=text(lines))
    assert done.returncode == 5
    assert b"--resume-from 10\n" in done.stderr
    done = cli.run("pipe", cli.spool, "q", "--resume-from", 10, "--json", "--", "cat", stdin=text(lines))
    assert (done.returncode, done.stdout) == (0, text(lines))
    assert {**summary(done), "queue": 0} == {
        "queue": 0, "found": 10, "stored": 90, "delivered": 100, "left": 0, "restarts": 0, "resume_from": 100
    }  # fmt: skip


def test_a_killed_pipe_knows_how_much_of_its_input_it_had_stored(cli: CommandLine) -> None:
    """After SIGKILL, the same input with `--resume-from stored` puts each line into the queue once.

    So does the first run, in a directory that a service manager has made.
    """
    cli.spool.mkdir()
    lines = numbers(0, 40_000)
    (cli.directory / "input").write_bytes(text(lines))
    with (cli.directory / "input").open("rb") as source:
        process = cli.start_on(
            source, subprocess.DEVNULL, "pipe", cli.spool, "q", "--resume-from", "stored", "--", *NOT_READING
        )
        cli.wait_until_stored(5000)
        process.kill()
        process.wait()
    done = cli.run("pipe", cli.spool, "q", "--resume-from", "stored", "--", "cat", stdin=text(lines))
    assert (done.returncode, done.stdout) == (0, text(lines))
    assert inspect.read_spool(cli.spool).queues[0].next_sequence == 40_000


def test_an_input_that_is_shorter_than_what_is_left_out_is_another_one(cli: CommandLine) -> None:
    """It says so, and stores nothing."""
    done = cli.run("pipe", cli.spool, "q", "--resume-from", 4, "--json", "--", "cat", stdin=b"1\n2\n3\n")
    assert done.returncode == 2
    assert "stdin has 3 lines, fewer than the 4 of --resume-from" in done.stderr.decode()
    assert summary(done)["stored"] == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--resume-from", "-1", "--", "cat"], "a number of lines, or `stored`"),
        (["--retries", "1"], "--retries needs a COMMAND"),
        (["--backoff", "1"], "--backoff needs a COMMAND"),
        (["--timeout", "1"], "--timeout needs a COMMAND"),
        (["--window", "1MiB"], "--window needs a COMMAND"),
        (["--window", "much", "--", "cat"], "--window"),
        (["--window", "0", "--batch", "1", "--", "cat"], "--window says nothing to --batch"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: list[str], expected: str) -> None:
    """Named, with what to do, before anything is made."""
    done = CliRunner().invoke(app, ["pipe", str(tmp_path / "spool"), "q", *options])
    assert done.exit_code == 2
    assert expected in " ".join(done.output.split())
    assert not (tmp_path / "spool").exists()


@pytest.mark.parametrize("options", [(), ("--batch", 5)])
def test_a_command_that_never_reads_is_ended_at_its_timeout(cli: CommandLine, options: tuple[object, ...]) -> None:
    """It counts as failed, and nothing it was given is gone."""
    lines = numbers(0, 10)
    limits = ("--timeout", 0.2, "--retries", 0)
    done = cli.run("pipe", cli.spool, "q", *options, *limits, "--", "sleep", 1000, stdin=text(lines))
    assert done.returncode == 5
    assert "for 0.2 s, and was ended" in sentences(done)[0] or "within 0.2 s, and was ended" in sentences(done)[0]
    assert cli.waiting() == lines


def test_a_command_that_does_not_end_is_ended_at_its_timeout(cli: CommandLine) -> None:
    """What it took comes again, for nobody knows what became of it; what it has started ends, too."""
    hanging = shell("cat > taken; mkfifo never; cat never")
    done = cli.run("pipe", cli.spool, "q", "--timeout", 0.2, "--retries", 0, "--", *hanging, stdin=b"1\n2\n")
    assert done.returncode == 5
    assert sentences(done)[0].startswith(
        "sh did not end within 0.2 s after its input, and was ended; 2 lines it had been given are back"
    )
    assert cli.waiting() == [b"1", b"2"]


def test_a_command_that_closes_its_stdin_is_waited_for(cli: CommandLine) -> None:
    """A sentence tells what is waited for; when it is gone, the next one gets the lines."""
    os.mkfifo(cli.directory / "door")
    closing = shell("mkdir first || exec cat; exec 0<&-; read go < door; exit 4")
    process = cli.start("pipe", cli.spool, "q", "--backoff", 0, "--", *closing)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(b"1\n2\n")
    sentence = process.stderr.readline()
    assert b"sh closed its stdin before the end of its input and still runs, as process" in sentence
    assert b"--timeout TIME" in sentence
    process.stdin.write(b"3\n")
    (cli.directory / "door").write_text("go\n")
    process.stdin.close()
    assert process.stdout.read() == b"1\n2\n3\n"
    assert process.wait() == 0


def test_what_a_killed_command_has_started_does_not_keep_the_pipe(cli: CommandLine) -> None:
    """The command counts as dead though others hold its stdin; they are ended, and their lines go to the next run."""
    leaving = shell("mkdir first || exec cat; exec 3<&0; sleep 1000 <&3 & kill -9 $$")
    lines = numbers(0, 30_000)  # more than a pipe holds
    done = cli.run("pipe", cli.spool, "q", "--backoff", 0, "--", *leaving, stdin=text(lines))
    assert (done.returncode, done.stdout) == (0, text(lines))


def test_a_run_that_ended_well_is_done_whoever_holds_its_stdin(cli: CommandLine) -> None:
    """Its exit code counts, though the rest of a batch that is larger than a pipe cannot be written to the end."""
    os.mkfifo(cli.directory / "door")
    door = os.open(cli.directory / "door", os.O_RDWR)
    leaving = shell("exec 3<&0; cat door <&3 >/dev/null 2>&1 & exit 0")
    options = ("--batch", 30_000, "--timeout", 60, "--retries", 0, "--json")
    try:
        done = cli.run("pipe", cli.spool, "q", *options, "--", *leaving, stdin=text(numbers(0, 30_000)))
    finally:
        os.close(door)  # now that holder ends, too
    assert (done.returncode, summary(done)["delivered"], summary(done)["left"]) == (0, 30_000, 0)


def test_a_command_that_vanishes_is_named(cli: CommandLine) -> None:
    """It was there when the pipe began, and cannot be started again."""
    program = cli.directory / "program"
    program.write_text("#!/bin/sh\nrm program\nexit 1\n")
    program.chmod(0o755)
    done = cli.run("pipe", cli.spool, "q", "--retries", 1, "--backoff", 0, "--", program, stdin=b"1\n")
    assert done.returncode == 5
    assert "program cannot be started: No such file or directory" in sentences(done)[1]
    assert cli.waiting() == [b"1"]


def test_without_a_window_a_command_gets_no_line_twice(cli: CommandLine) -> None:
    """What it took and did not work off is gone with it: at most once."""
    dying = APPEND + "append(os.read(0, 6))\nos.read(0, 6)\nif not os.path.exists('end'): os.kill(os.getpid(), 9)"
    lines = numbers(10_000, 10_010)
    done = cli.run("pipe", cli.spool, "q", "--window", 0, "--backoff", 0, "--", *python(dying), stdin=text(lines))
    assert worked_off(cli) == lines[::2]
    assert cli.waiting() == []
    assert done.returncode == 5  # the last one died, and there was nothing for another


PIPE_LINES, BATCH_LINES = 64 * 1024 // LINE_BYTES, 1000
FULL = (
    APPEND + "import array, fcntl, termios\n"
    "held = array.array('i', [0])\n"
    "for _ in range(500): append(os.read(0, 6))\n"
    "while held[0] < 32 * 1024: fcntl.ioctl(0, termios.FIONREAD, held)\n"
    "print('full', flush=True)\n"
    "open('door').read()\n"
    "for line in sys.stdin.buffer: append(line)\n"
)
"""Works off 500 lines, waits until many more lie in the pipe, and says so; goes on when the FIFO `door` is opened."""


@pytest.mark.parametrize("lives_on", [True, False])
def test_a_pipe_without_a_window_that_is_killed_itself_loses_nothing(cli: CommandLine, lives_on: bool) -> None:
    """Its command works off what lies in the pipe, unless it was to end with qflow; what is not acked comes again."""
    lines = numbers(10_000, 90_000)
    (cli.directory / "input").write_bytes(text(lines))
    os.mkfifo(cli.directory / "door")
    ending = [] if lives_on else ["setpriv", "--pdeathsig", "KILL"]
    with (cli.directory / "input").open("rb") as source:
        arguments = ("pipe", cli.spool, "q", "--window", 0, "--", *ending, *python(FULL))
        process = cli.start_on(source, subprocess.PIPE, *arguments)
    assert process.stdout is not None
    assert process.stdout.readline() == b"full\n"
    process.kill()
    assert process.wait() == -signal.SIGKILL
    if lives_on:
        (cli.directory / "door").write_text("go\n")
    assert process.stdout.read() == b""  # the command has ended, too
    first = worked_off(cli)
    assert len(first) > 500 if lives_on else len(first) == 500
    assert first == lines[: len(first)]

    (cli.directory / "out").unlink()
    later = python(APPEND + "for line in sys.stdin.buffer: append(line)")
    done = cli.run("pipe", cli.spool, "q", "--window", 0, "--resume-from", "stored", "--", *later, stdin=text(lines))
    assert done.returncode == 0, done.stderr
    second = worked_off(cli)
    assert second == lines[-len(second) :]
    assert 0 <= len(first) + len(second) - len(lines) <= PIPE_LINES + BATCH_LINES


def test_a_window_is_no_larger_than_half_of_the_memory(cli: CommandLine) -> None:
    """Lines for which it leaves no room pass all the same, in order, whatever their size."""
    lines = [*numbers(0, 300), b"x" * 100_000, *numbers(0, 10), b"y" * 50_000, b"z" * 50_000, b"end"]
    done = cli.run("pipe", cli.spool, "q", "--capacity", "4KiB", "--", "cat", stdin=text(lines))
    assert (done.returncode, done.stdout) == (0, text(lines))
    assert cli.waiting() == []


def test_progress_is_shown_on_a_terminal_alone(cli: CommandLine) -> None:
    """One line says what came in, went out, waits, lies on disk, and how often the command was started again."""
    master, terminal = os.openpty()
    os.mkfifo(cli.directory / "door")
    script = "mkdir first && { read go < door; exit 1; }; read line; echo taken; cat"
    arguments = ("pipe", cli.spool, "q", "--backoff", 0, "--capacity", "64KiB", "--", *shell(script))
    with os.fdopen(master, "rb", buffering=0) as screen:
        process = cli.start_on(subprocess.PIPE, subprocess.PIPE, *arguments, stderr=terminal)
        os.close(terminal)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"1\n2\n3\n")
        shown = b""
        while b"restarts 0" not in shown:
            shown += screen.read(4096)
        (cli.directory / "door").write_text("go\n")
        assert process.stdout.readline() == b"taken\n"
        while b"in 3  out 3  waiting 0  spilled 0  restarts 1" not in shown:
            shown += screen.read(4096)
        process.stdin.close()
        assert process.stdout.read() == b"2\n3\n"
        while b"3 delivered, 0 left" not in shown:
            shown += screen.read(4096)
        assert process.wait() == 0
    assert b"qflow: sh exited with 1" in shown
    assert b"restarts 0qflow" not in shown  # a sentence has a line of its own
    done = cli.run("pipe", cli.spool, "q", "--", "cat", stdin=b"1\n")
    assert done.stderr == b"qflow: 0 lines found, 1 stored, 1 delivered, 0 left\n"
