"""`qflow put` and `qflow get`."""

from __future__ import annotations

import errno
import json
import os
import signal

import pytest

import qflow
from doors.command_line import CommandLine, error_line, numbers, text
from faults.seams import Faults, faulty_broker
from qflow import inspect
from qflow.opening import with_door


def test_lines_come_out_as_they_went_in(cli: CommandLine) -> None:
    """Any bytes but the delimiter, empty lines too, in order; the last line needs no delimiter."""
    lines = [b"one", b"", bytes(set(range(256)) - {10}), "grüße 🛫".encode(), b"last"]
    done = cli.run("put", cli.spool, "q", stdin=b"\n".join(lines))
    assert (done.returncode, done.stdout) == (0, b"lines confirmed in q: 5 (274 bytes)\n")
    assert cli.run("get", cli.spool, "q").stdout == text(lines)
    assert cli.run("get", cli.spool, "q").stdout == b""


def test_files_are_put_one_after_the_other(cli: CommandLine) -> None:
    """Files in the order given, stdin where there is a dash; --json says what was confirmed."""
    (cli.directory / "a").write_bytes(b"1\n2")
    (cli.directory / "b").write_bytes(b"4\n")
    done = cli.run("put", cli.spool, "q", "a", "-", "b", "--json", stdin=b"3")
    assert json.loads(done.stdout) == {
        "queue": "q", "confirmed": 4, "bytes": 4, "first_sequence": 0, "last_sequence": 3,
    }  # fmt: skip
    assert cli.waiting() == [b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize(
    ("option", "delimiter"), [(r"\0", b"\0"), (r"\r\n", b"\r\n"), ("--", b"--"), (r"\x1e", b"\x1e")]
)
def test_the_delimiter_can_be_chosen(cli: CommandLine, option: str, delimiter: bytes) -> None:
    """Zero bytes, several bytes, escapes: in put and in get."""
    cli.run("put", cli.spool, "q", f"--delimiter={option}", stdin=delimiter.join([b"a\nb", b"c"]))
    assert cli.run("get", cli.spool, "q", f"--delimiter={option}").stdout == b"a\nb" + delimiter + b"c" + delimiter


def test_what_could_not_be_acked_is_no_success(cli: CommandLine) -> None:
    """It was written, and comes again: the log of the owner has failed. It ended with 0, each time."""
    faults = Faults()
    with faulty_broker(cli.spool, faults, door=True) as broker:
        queue = with_door(broker).declare_queue("q")
        queue.put_many([b"1", b"2"])
        faults.fail("commit", errno.EIO)
        with pytest.raises(qflow.InDoubt):
            queue.put(b"3")
        done = cli.run("get", cli.spool, "q", "--max=2")
        assert (done.returncode, done.stdout) == (4, b"1\n2\n")
        assert "the log failed earlier" in error_line(done)


def test_nothing_is_confirmed_of_nothing(cli: CommandLine) -> None:
    """Without a line, the queue is made and stays empty."""
    facts = cli.json("put", cli.spool, "q")
    assert (facts["confirmed"], facts["first_sequence"]) == (0, None)
    assert cli.waiting() == []


def test_more_than_the_memory_can_be_put_and_got(cli: CommandLine) -> None:
    """A capacity far below the data: everything comes out, and put leaves nothing in the spill directory."""
    lines = numbers(0, 50_000)
    cli.run("put", cli.spool, "q", "--capacity", "2MiB", stdin=text(lines))
    assert cli.run("spilled", cli.spool).stdout == b""
    done = cli.run("get", cli.spool, "q", "--capacity", "64KiB")
    assert done.stdout == text(lines)


def test_put_does_not_wait_to_fill_a_batch(cli: CommandLine) -> None:
    """A line from a slow pipe is confirmed while the pipe is still open."""
    process = cli.start("put", cli.spool, "q")
    assert process.stdin is not None
    process.stdin.write(b"first\nsecond\nthi")
    cli.wait_until_stored(2)
    output, _ = process.communicate(b"rd")
    assert output == b"lines confirmed in q: 3 (16 bytes)\n"
    assert cli.waiting() == [b"first", b"second", b"third"]


def test_put_stops_on_a_signal_and_says_what_is_confirmed(cli: CommandLine) -> None:
    """After SIGINT, the count printed is what the queue holds, and an unfinished line is named."""
    process = cli.start("put", cli.spool, "q")
    assert process.stdin is not None
    process.stdin.write(b"first\nsec")
    cli.wait_until_stored(1)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 128 + signal.SIGINT
    output, error = process.communicate()
    assert output == b"lines confirmed in q: 1 (5 bytes)\n"
    assert b"its first 3 bytes were not stored" in error
    assert cli.waiting() == [b"first"]


def test_a_line_too_long_is_named_and_the_lines_before_it_are_confirmed(cli: CommandLine) -> None:
    """The queue's own bound counts."""
    with qflow.open(cli.spool) as broker:
        broker.declare_queue("q", max_message_bytes=3)
    (cli.directory / "input").write_bytes(b"1\n22\n333\n4444\n5\n")
    done = cli.run("put", cli.spool, "q", "input")
    assert done.returncode == 2
    assert "input: line 4 is longer than 3 bytes" in error_line(done)
    assert done.stdout == b"lines confirmed in q: 3 (6 bytes)\n"
    assert cli.waiting() == [b"1", b"22", b"333"]


def test_a_queue_at_its_limit_takes_no_more(cli: CommandLine) -> None:
    """Put gives up instead of waiting for a consumer that cannot come; what it confirmed is there."""
    with qflow.open(cli.spool) as broker:
        broker.declare_queue("q", limit_messages=10)
    done = cli.run("put", cli.spool, "q", stdin=text(numbers(0, 15)))
    assert done.returncode == 4
    assert "limit" in error_line(done)
    assert done.stdout == b"lines confirmed in q: 10 (10 bytes)\n"
    assert cli.waiting() == numbers(0, 10)


def test_get_takes_no_more_than_asked(cli: CommandLine) -> None:
    """--max counts across batches, and the rest stays."""
    cli.run("put", cli.spool, "q", stdin=text(numbers(0, 5000)))
    assert cli.run("get", cli.spool, "q", "--max", 1500).stdout == text(numbers(0, 1500))
    assert cli.waiting() == numbers(1500, 5000)


def test_a_reader_that_leaves_loses_nothing_it_did_not_read(cli: CommandLine) -> None:
    """What lay in the pipe when its reader went away is still in the queue; a line read in part comes again."""
    lines = numbers(0, 100_000)
    cli.run("put", cli.spool, "q", stdin=text(lines))
    process = cli.start("get", cli.spool, "q")
    assert process.stdout is not None
    read = process.stdout.readline()
    while len(read) < 30_001:
        read += os.read(process.stdout.fileno(), 30_001 - len(read))
    cli.wait_until_full(process.stdout)
    process.stdout.close()
    assert process.wait() == 128 + signal.SIGPIPE
    assert process.stderr is not None
    assert process.stderr.read() == b""
    whole = read[: read.rindex(b"\n")].split(b"\n")
    assert whole + cli.waiting() == lines


def test_get_acks_nothing_it_could_not_write(cli: CommandLine) -> None:
    """A full disk behind stdout is an error, and the messages stay."""
    cli.run("put", cli.spool, "q", stdin=b"a\nb\n")
    with open("/dev/full", "wb") as full:
        done = cli.run("get", cli.spool, "q", stdout=full)
    assert done.returncode == 4
    assert "cannot write" in error_line(done)
    assert cli.waiting() == [b"a", b"b"]


def test_get_follows_what_others_put(cli: CommandLine) -> None:
    """--follow leaves the spool to others while the queue is empty, and goes on; a signal ends it."""
    cli.run("put", cli.spool, "q", stdin=b"a\n")
    process = cli.start("get", cli.spool, "q", "--follow")
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 100) == b"a\n"
    while cli.run("put", cli.spool, "q", stdin=b"b\n").returncode == 3:
        pass
    assert os.read(process.stdout.fileno(), 100) == b"b\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    assert inspect.read_spool(cli.spool).queues[0].messages == 0


@pytest.mark.parametrize("closed", [0, 1])
def test_a_closed_descriptor_is_never_mistaken_for_a_file_of_the_spool(cli: CommandLine, closed: int) -> None:
    """Without stdin or stdout, put and get fail before they touch a message."""
    cli.run("put", cli.spool, "q", stdin=b"a\n")
    shell = f'exec "$@" {closed}{"<" if closed == 0 else ">"}&-'
    done = cli.run("put" if closed == 0 else "get", cli.spool, "q", shell=shell)
    assert done.returncode == 4
    assert "Bad file descriptor" in error_line(done)
    assert cli.waiting() == [b"a"]
