"""Threads, tasks and processes that a function leaves: none keeps its process from ending, and none is a worker."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import qflow
from doors.command_line import CommandLine
from workers.conftest import Working

LEAVING = Path(__file__).with_name("leaving.py")
BOTH = pytest.mark.parametrize("function", ["leave", "leave_async"])


def work(cli: CommandLine, function: str, *bodies: bytes) -> Working:
    """Have one process do some messages, once each."""
    with qflow.open(cli.spool) as broker:
        broker.declare_queue("dead")
        broker.declare_queue("jobs", max_deliveries=1, dead_letter="dead").put_many(bodies)
    return Working(cli, function, "--processes", 1, file=LEAVING)


@BOTH
def test_a_process_that_exits_beside_a_thread_is_started_again(cli: CommandLine, function: str) -> None:
    """What is to be called at exit is called all the same."""
    working = work(cli, function, b"thread", b"exit", b"last")
    working.until("waits no longer for what its function has left: threads '")
    working.until("called at exit")
    working.until("exited with 3; it is started again")
    working.until("does last")
    working.signal()
    assert working.end() == 128 + signal.SIGTERM


def test_what_is_called_at_exit_is_called_also_where_the_function_has_taken_stderr_away(cli: CommandLine) -> None:
    """Nothing can be said about the thread then."""
    working = work(cli, "leave", b"mute", b"thread", b"exit", b"last")
    working.until("exited with 3; it is started again")
    working.until("does last")
    working.signal()
    assert working.end() == 128 + signal.SIGTERM
    assert working.lines.count("called at exit") == 2


@pytest.mark.parametrize(
    ("function", "what"), [("leave", b"thread"), ("leave_async", b"thread"), ("leave_async", b"task")]
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_ends_with_its_supervisor_whatever_a_function_has_left(
    cli: CommandLine, function: str, what: bytes, number: int
) -> None:
    """Which is told to end, or killed. A worker has the other end of stdout as long as it lives."""
    working = work(cli, function, what, b"last")
    working.until("does last")
    working.signal(number)
    assert working.end() == (128 + number if number == signal.SIGTERM else -number)
    assert "called at exit" in working.lines
    assert any("waits no longer for what its function has left" in line for line in working.lines)


def test_messages_come_though_all_threads_of_the_event_loop_hang(cli: CommandLine) -> None:
    working = work(cli, "leave_async", b"threads", b"last")
    working.until("does last")
    working.signal()
    assert working.end() == 128 + signal.SIGTERM


@BOTH
def test_threads_that_end_are_waited_for(cli: CommandLine, function: str) -> None:
    """Those of an executor wait for work until the interpreter ends."""
    working = work(cli, function, b"idle", b"patient")
    working.until("does patient")
    working.signal()
    assert working.end() == 128 + signal.SIGTERM
    assert working.lines.count("called at exit") == 1
    assert not any("waits no longer" in line for line in working.lines)


@BOTH
@pytest.mark.parametrize("beside", [b"idle", b"thread"])
def test_what_hangs_when_it_is_called_at_exit_is_cut_off(cli: CommandLine, function: str, beside: bytes) -> None:
    working = work(cli, function, b"hang at exit", beside)
    working.until(f"does {beside.decode()}")
    working.signal()
    assert working.end() == 128 + signal.SIGTERM


@BOTH
def test_a_process_that_a_function_forks_ends_where_the_function_does(cli: CommandLine, function: str) -> None:
    """As an interpreter ends; it is no worker, and takes no message."""
    working = work(cli, function, b"fork", b"fork exits", b"fork raises", b"last")
    first = working.until(r"(\d+) does fork")[1]
    working.until(f"{first} does last")
    working.until_all("it says why", "ValueError: no")
    working.signal()
    assert working.end() == 128 + signal.SIGTERM
    assert working.lines.count("written in a process of its own") == 3, working.lines
    assert working.lines.count("called at exit") == 1
    with qflow.open(cli.spool) as broker:
        assert len(broker.queue("jobs")) == len(broker.queue("dead")) == 0


def test_a_process_that_a_task_forks_beside_the_function_ends(cli: CommandLine) -> None:
    working = work(cli, "leave_async", b"later fork")
    assert working.until("it ended with (.*)")[1] == "1"
    working.signal()
    assert working.end() == 128 + signal.SIGTERM


def test_a_process_that_hangs_in_an_import_ends_after_its_supervisor(cli: CommandLine) -> None:
    with qflow.open(cli.spool) as broker:
        broker.declare_queue("jobs")
    working = Working(cli, "work", "--processes", 1, file=LEAVING.with_name("hanging.py"))
    working.until("is imported")
    working.signal(signal.SIGKILL)
    assert working.end() == -signal.SIGKILL
