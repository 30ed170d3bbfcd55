"""The check that no process outlives a test run finds those that do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import processes


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is alive is found at once; the mark of the run is put back."""
    monkeypatch.setattr("processes.PATIENCE_S", 0)
    monkeypatch.setenv(processes.MARK, os.environ[processes.MARK])


def test_a_process_whose_parent_is_gone_is_found_and_ended() -> None:
    """As a command is that is left behind by a `qflow pipe` that was killed."""
    mark = processes.mark_children()
    others = processes.left_over(mark)  # children of this process that other tests share
    sleeping = "import signal, sys; print('ready', flush=True); signal.pause()"
    begin = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=2).pid)"
    parent = subprocess.Popen(
        [sys.executable, "-c", begin, sleeping], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stderr is not None
    with parent.stdout, parent.stderr:
        orphan = int(parent.stdout.read())
        assert parent.wait() == 0
        assert parent.stderr.readline() == "ready\n"
        found = [process for process in processes.left_over(mark) if process not in others]
        assert [process.pid for process in found] == [orphan]
        processes.end(found)
        assert parent.stderr.read() == ""  # it is gone
    assert processes.left_over(mark) == others


def test_a_child_without_the_mark_is_found() -> None:
    """One that was forked, or begun with an environment of its own, has a parent."""
    reading = "import sys; print('ready', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", reading]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={}) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert child.pid in [process.pid for process in processes.left_over(b"no such mark")]
