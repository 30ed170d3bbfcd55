"""`qflow top` as its users have it: a command in a terminal."""

from __future__ import annotations

import importlib
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from base64 import b64encode
from contextlib import ExitStack, suppress
from pathlib import Path
from types import ModuleType

import click.testing
import pytest

import qflow
import top_seen
from qflow.cli.main import app
from qflow.cli.top import top
from top_terminal import DEADLINE_S, needs_tmux, opened

pytest.importorskip("textual", reason="needs the extra `top`")


@needs_tmux
def test_a_spool_is_watched_in_a_terminal(spool: Path) -> None:
    """It is opened, purged and followed to its next owner, in a terminal that becomes narrow; a signal leaves it sane."""
    script = "broker.declare_queue('pay\\x1bments').put_many([b'first\\x07', b'second'])"
    with ExitStack() as stack:
        with top_seen.owned(spool, script) as process:
            terminal = stack.enter_context(opened(spool, 120))
            terminal.sees(f"live · pid {process.pid}", r"pay\x1bments", "2 messages", "quit")
            terminal.press("Enter")
            terminal.sees("limits and settings", r"first\x07", "second")
            terminal.press("x")
            terminal.sees("Delete 2 messages of", "[y] yes")
            terminal.press("y")
            terminal.sees("messages deleted from", ": 2")
            terminal.press("Escape")
            terminal.sees("1 queue: 0 messages")
        terminal.sees("not owned", "nobody owns it: read-only")
        terminal.tmux("resize-window", "-x", "40", "-y", "12")
        with top_seen.owned(spool, "broker.queue('pay\\x1bments').put(b'third')") as process:
            screen = terminal.sees(f"live · pid {process.pid}", "1 queue: 1 message")
            assert max(map(len, screen.splitlines())) <= 40
            terminal.send(signal.SIGTERM)
            ended = terminal.sees("code 143", "isig icanon", " echo ")
            assert "live" not in ended


@needs_tmux
def test_a_message_of_amqp_is_shown_by_the_headers_of_its_client(spool: Path) -> None:
    """Those that say why it is dead come first; they lie in its properties, of which nobody can read anything."""
    commands = pytest.importorskip("pamqp.commands")
    properties = commands.Basic.Properties(headers={"tenant": "acme", "x-first-death-reason": "expired"})
    encoded = b64encode(properties.marshal()).decode()
    with qflow.open(spool) as broker:
        headers = {"amqp.exchange": "", "amqp.routing_key": "dead", "amqp.properties": encoded}
        broker.declare_queue("dead").put(b"x", headers=headers)
    with opened(spool, 120) as terminal:
        terminal.sees("1 queue: 1 message")
        terminal.press("Enter")
        terminal.sees("x-first-death-reason expired · tenant acme", but="amqp.properties")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_ends_it_whose_terminal_takes_nothing_more(spool: Path, number: signal.Signals) -> None:
    """It is gone, which the system tells with SIGHUP, or stopped, as by Ctrl-S, while there is something to draw.

    A signal that comes again and again does not put the end off.
    """
    with qflow.open(spool) as broker:
        broker.declare_queue("jobs")
    master, slave = pty.openpty()
    take = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", take, sys.executable, "-m", "qflow", "top", str(spool)]
    terminal = {"stdin": slave, "stdout": slave, "stderr": slave, "start_new_session": True}
    with ExitStack() as stack:
        stack.callback(os.close, slave)
        process = stack.enter_context(subprocess.Popen(command, env={**os.environ, "TERM": "xterm"}, **terminal))
        stack.callback(process.kill)
        shown = b""
        while b"quit" not in shown:
            assert select.select([master], [], [], DEADLINE_S)[0]
            shown += os.read(master, 65_536)
        if number is signal.SIGTERM:
            stack.callback(os.close, master)
            termios.tcflow(slave, termios.TCOOFF)
        os.write(master, b"?" * 100)
        if number is signal.SIGHUP:
            os.close(master)
            assert process.wait(DEADLINE_S) == 128 + number
        for _ in range(2 * DEADLINE_S):
            process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
        assert process.returncode == 128 + number


def test_a_byte_that_is_no_utf_8_is_passed_over(spool: Path) -> None:
    """An umlaut of a terminal that writes Latin-1: the next key does what it does."""
    with qflow.open(spool) as broker:
        broker.declare_queue("jobs")
    master, slave = pty.openpty()
    terminal = {"stdin": slave, "stdout": slave, "stderr": slave, "start_new_session": True}
    command = [sys.executable, "-m", "qflow", "top", str(spool)]
    with ExitStack() as stack:
        stack.callback(os.close, master)
        process = stack.enter_context(subprocess.Popen(command, env={**os.environ, "TERM": "xterm"}, **terminal))
        stack.callback(process.kill)
        os.close(slave)
        shown = b""
        while b"quit" not in shown:
            assert select.select([master], [], [], DEADLINE_S)[0]
            shown += os.read(master, 65_536)
        os.write(master, b"\xf6")
        with suppress(OSError):  # its end
            for _ in range(2 * DEADLINE_S):
                os.write(master, b"\x03")
                if select.select([master], [], [], 0.5)[0]:
                    shown += os.read(master, 65_536)
        assert process.wait(DEADLINE_S) == 130
        assert b"Traceback" not in shown


@pytest.mark.parametrize(("code", "returned", "expected"), [(None, None, 1), (None, 0, 0), (143, 0, 143)])
def test_what_ends_it_without_a_code_is_a_failure(
    spool: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, returned: int | None, expected: int
) -> None:
    """Textual shows a traceback then, and says nothing of a code."""
    application = importlib.import_module("qflow.top.app")
    with qflow.open(spool):
        pass
    monkeypatch.setattr(application.Top, "run", lambda self: code)
    monkeypatch.setattr(application.Top, "return_code", returned)
    assert application.run(application.Source(spool)) == expected


def test_without_a_terminal_it_is_refused_with_a_sentence(spool: Path) -> None:
    """Its output is a pipe, or there is no spool."""
    with qflow.open(spool):
        pass
    run = click.testing.CliRunner().invoke
    done = run(app, ["top", str(spool)])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "needs a terminal" in done.stderr
    (spool.parent / "none").mkdir()
    done = run(app, ["top", str(spool.parent / "none")])
    assert done.exit_code == 2
    assert "is not a spool" in done.stderr


def test_a_missing_package_is_named(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it."""
    with qflow.open(spool):
        pass

    imported = importlib.import_module

    def import_module(name: str, package: str | None = None) -> ModuleType:
        if name == "qflow.top.app":
            raise ModuleNotFoundError(name, name="textual")
        return imported(name, package)

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("qflow.cli.top.is_terminal", lambda: True)
    monkeypatch.setattr("importlib.import_module", import_module)
    assert top.callback is not None
    with pytest.raises(qflow.NotFound, match="pip install textual"):
        top.callback(spool)


def test_a_terminal_that_cannot_move_its_cursor_is_refused(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of an editor's shell."""
    with qflow.open(spool):
        pass
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("qflow.cli.top.is_terminal", lambda: True)
    assert top.callback is not None
    with pytest.raises(qflow.InvalidArgument, match="TERM=dumb"):
        top.callback(spool)
