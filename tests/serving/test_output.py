"""What a server says: lines for stdout and stderr that a thread writes, whoever reads them or not."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import qflow
from qflow.cli import output as module
from qflow.cli.output import Output
from unread import full_pipe

WATCHDOG_S = 120


@contextmanager
def serving(directory: Path, *words: str, **where: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Serve a spool until the block ends; begin it when the service manager is told that it is ready."""
    command = [sys.executable, "-m", "qflow", *(words or ("serve", "spool", "--http", "127.0.0.1:0"))]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(directory / "manager"))
        manager.settimeout(WATCHDOG_S)
        environment = os.environ | {"NOTIFY_SOCKET": str(directory / "manager")}
        environment.pop("PYTHONUNBUFFERED", None)
        with subprocess.Popen(command, cwd=directory, env=environment, **where) as process:
            try:
                assert manager.recv(100) == b"READY=1"
                yield process
            finally:
                process.kill()


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_server_goes_on_and_ends_where_nobody_reads_what_it_says(name: str, tmp_path: Path) -> None:
    """As behind a log shipper that hangs: it reads its users again, answers, and ends with the code of the signal."""
    with full_pipe() as (_, writing), serving(tmp_path, **{name: writing}) as process:
        process.send_signal(signal.SIGHUP)
        with qflow.connect(tmp_path / "spool") as remote:
            remote.declare_queue("jobs").put(b"x")
        process.send_signal(signal.SIGTERM)
        assert process.wait(WATCHDOG_S) == 128 + signal.SIGTERM


def test_workers_end_where_nobody_reads_what_is_said_of_them(tmp_path: Path) -> None:
    """Stdout and stderr are full."""
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_queue("jobs").put(b"x")
    (tmp_path / "job.py").write_text("def run(delivery): pass")
    words = ("work", "spool", "jobs", "./job.py:run", "--processes", "1")
    with full_pipe() as (_, writing), serving(tmp_path, *words, stdout=writing, stderr=writing) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(WATCHDOG_S) == 128 + signal.SIGTERM


def test_a_server_whose_log_cannot_be_written_ends_with_the_code_of_the_signal(tmp_path: Path) -> None:
    """As on a disk that is full, or where the reader is gone; Python says 120 of what it could not flush."""
    reading, gone = os.pipe()
    os.close(reading)
    with open("/dev/full", "wb") as full, open(gone, "wb") as closed:
        for number, stderr in enumerate((full, closed)):
            directory = tmp_path / str(number)
            directory.mkdir()
            with serving(directory, stderr=stderr, stdout=subprocess.DEVNULL) as process:
                process.send_signal(signal.SIGTERM)
                assert process.wait(WATCHDOG_S) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("words", "code"), [(("ls", "nowhere"), 2), (("serve", "spool"), 2), (("get", "spool", "nothing"), 2)]
)
def test_an_error_that_cannot_be_told_has_its_exit_code(words: tuple[str, ...], code: int, tmp_path: Path) -> None:
    """All the same."""
    with qflow.open(tmp_path / "spool"):
        pass
    command = [sys.executable, "-m", "qflow", *words]
    with open("/dev/full", "wb") as full:
        assert subprocess.run(command, cwd=tmp_path, stderr=full, timeout=WATCHDOG_S).returncode == code


@contextmanager
def opened(descriptor: int, **options: int) -> Iterator[Output]:
    """Open an output at a descriptor."""
    with open(descriptor, "w", closefd=False) as stream:
        made = Output(stream, lambda count: f"{count} missing", **options)
        try:
            yield made
        finally:
            made.close()


def test_lines_come_in_order_and_all_of_them(tmp_path: Path) -> None:
    """At an ordinary end."""
    file = tmp_path / "log"
    with open(file, "w") as log, opened(log.fileno()) as lines:
        for number in range(5000):
            lines.put(str(number))
    assert file.read_text().splitlines() == [str(number) for number in range(5000)]


def test_lines_that_find_no_room_are_counted(tmp_path: Path) -> None:
    """Those before them are written, in order; how many are missing is said where they are."""
    with full_pipe() as (reading, writing):
        with opened(writing, most_bytes=100) as lines:
            for number in range(200):
                lines.put(f"{number:03}")
            os.read(reading, 2**20)
        *told, missing = os.read(reading, 2**16).decode().splitlines()
    assert told == [f"{number:03}" for number in range(len(told))]
    assert missing == f"{200 - len(told)} missing"


def until_failed(lines: Output) -> None:
    """Return when a line could not be written."""
    with suppress(OSError):
        while True:
            lines.check()


def test_lines_that_cannot_be_written_are_counted_before_the_next(tmp_path: Path) -> None:
    """As where a disk was full for a while."""
    file = tmp_path / "log"
    with open("/dev/full", "wb") as log, opened(log.fileno()) as lines:
        lines.put("lost")
        until_failed(lines)
        with open(file, "wb") as room:
            os.dup2(room.fileno(), log.fileno())
        lines.put("next")
    assert file.read_text() == "1 missing\nnext\n"


def test_a_pipe_that_others_have_made_non_blocking_is_waited_for() -> None:
    """It is theirs, too: a program that this one was started by."""
    with full_pipe() as (reading, writing):
        os.set_blocking(writing, False)
        with opened(writing) as lines:
            lines.put("line")
            os.read(reading, 2**20)
        assert os.read(reading, 2**16) == b"line\n"


def test_the_end_does_not_wait_for_who_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written there afterwards, as an error of the command, waits for nobody, either."""
    monkeypatch.setattr(module, "LONGEST_END_S", 0)
    with full_pipe() as (_, writing):
        with opened(writing) as lines:
            lines.put("line")
        assert os.write(writing, b"x" * 2**20) == 2**20


def test_what_has_no_descriptor_is_written_to_as_well() -> None:
    """As what a program keeps in memory that calls the command line."""
    kept = io.StringIO()
    lines = Output(kept)
    lines.put("né")
    lines.close()
    assert kept.getvalue() == "né\n"


def test_who_can_start_no_thread_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As an error of qflow."""

    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with open(tmp_path / "log", "w") as log, pytest.raises(qflow.QflowError, match="starts no more threads"):
        Output(log)
