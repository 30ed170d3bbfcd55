"""`qflow pipe` without --batch: lines are written to one run of the command, or to stdout."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from qflow.cli.command import Command, Restarts, Run, RunFailed, say
from qflow.cli.flow import Flow
from qflow.cli.outlet import Outlet
from qflow.cli.stop import Stop, Stopped
from qflow.deliveries import Deliveries

STDOUT = 1
_UNREAD_CHECK_S = 0.01
_IDLE_S = 10.0
"""Seconds after which a command that takes nothing is reported on stderr."""
_LINGER_S = 1.0
"""Seconds a command may take to exit after it closed its stdin, before that is reported on stderr."""


def to_stdout(flow: Flow) -> None:
    """Write lines to stdout until all of stdin was taken. Raises BrokenPipeError: the reader is gone. Stopped."""
    outlet = Outlet(STDOUT, flow.delimiter, flow.stop)
    try:
        _copy(flow, outlet)
    finally:
        outlet.settle()
        outlet.settle_lines()
        flow.delivered = outlet.acked


def to_command(flow: Flow, command: Command, restarts: Restarts, window: int) -> None:
    """Write lines to the stdin of a command until stdin has ended and the command has ended well.

    Args:
        window: bytes the command must have taken behind a line before it is acked; see `Flow.window`.

    Raises:
        CommandFailed: it failed, and is not started again.
        Stopped: asked to stop.
    """
    done = False
    while not done and (first := flow.first()):  # not before there is a line: an empty input might mean something to it
        try:
            with command.started() as run:
                feed = _Feed(flow, run, window)
                feed.write(first)
                feed.wait_for_end()
        except RunFailed as failure:
            flow.give_back(first)
            restarts.failed(str(failure), "the lines are in the queue")
        else:
            done = feed.settle(restarts)


class _Feed:
    """Writes lines to one run of the command and settles them by how it ends."""

    def __init__(self, flow: Flow, run: Run, window: int) -> None:
        self._flow = flow
        self._run = run
        os.set_blocking(run.stdin.fileno(), False)
        self._outlet = Outlet(run.stdin.fileno(), flow.delimiter, flow.stop, flow.window(window), self._watch)
        self._idle = Idle(run.command)
        self._early = self._stopped = False
        self._stuck: str | None = None

    def write(self, first: Deliveries) -> None:
        """Write a batch and what follows, until there is no more, the command takes no more, or a signal asks to stop.

        Its stdin is closed once it has taken everything in the pipe, so that what it leaves there is seen.
        """
        outlet = self._outlet
        try:
            try:
                _send(self._flow, outlet, first)
                _copy(self._flow, outlet)
            except Stopped:
                self._stopped = True
                outlet.check()  # which says after a signal what is waited for
                outlet.wait(may_stop=False)
                outlet.check()
        except BrokenPipeError:
            self._early = True
        except RunFailed as failure:
            self._stuck = str(failure)
        finally:
            outlet.settle()
            self._run.stdin.close()
        if outlet.is_taken and self._flow.is_drained(outlet.lines):
            self._early = False  # it had taken all lines before its stdin was closed

    def wait_for_end(self) -> None:
        """Wait until the run exits, or end it."""
        run, command = self._run, self._run.command
        if self._early and not run.ends_within(_LINGER_S):
            say(
                f"{command.name} closed its stdin before the end of its input and still runs, as process "
                f"{run.process.pid}; its end is waited for: end it, or say --timeout TIME"
            )
        if self._stuck is None and not run.ends_within(command.timeout_s):
            self._stuck = f"{command.name} did not end within {command.timeout_s:g} s after its input, and was ended"
        if self._early or self._stuck is not None:
            run.end()
        else:
            run.process.wait()

    def settle(self, restarts: Restarts) -> bool:
        """Ack what is done and give the rest back; return True if all is done, False once a restart is due.

        Raises:
            CommandFailed: it is not to be started again.
            Stopped: asked to stop before it could be started again.
        """
        flow, outlet = self._flow, self._outlet
        exited_well = self._stuck is None and self._run.process.returncode == 0
        if self._stopped and restarts.leaves_early:
            self._early = True  # as before: it is not known whether it waited for more
        outlet.settle_lines(everything_was_read=exited_well and not self._early)
        if exited_well and self._early:
            outlet.ack_first()
        back = outlet.take_back()
        flow.delivered += outlet.acked
        flow.handed_out -= back
        done = exited_well and (not self._early or self._stopped or flow.is_drained())
        if not done:
            self._prepare_next(restarts, exited_well, self._flow.back_in_words(back))
        return done

    def _prepare_next(self, restarts: Restarts, exited_well: bool, back: str) -> None:
        how = self._stuck or self._run.how_it_ended()
        if self._early:
            how += " before the end of its input"
        if exited_well and self._outlet.acked:
            restarts.left_early(how, back)
        else:
            final = self._stopped or self._flow.is_drained()
            restarts.failed(how, back, progressed=self._outlet.acked > 0, final=final)

    def _watch(self) -> None:
        """Check on the run while lines are written.

        Raises:
            BrokenPipeError: it has exited, though its children may still have its stdin.
            RunFailed: it has taken nothing for too long.
        """
        if self._run.has_ended():
            raise BrokenPipeError
        self._outlet.settle()
        self._idle.look(self._outlet.taken, self._outlet.unread)


class Idle:
    """Measures for how long a command has taken nothing though the pipe is not empty.

    Args:
        command: says how long it may be idle.
        clock: returns seconds.
    """

    def __init__(self, command: Command, clock: Callable[[], float] = time.monotonic) -> None:
        self._command = command
        self._clock = clock
        self._taken = 0
        self._since_s = clock()
        self._said = False

    def look(self, taken: int, unread: int) -> None:
        """Note how many bytes it has taken, and how many are in the pipe; report once if it is idle.

        Raises:
            RunFailed: it was idle for longer than it may be.
        """
        now_s = self._clock()
        if taken != self._taken or not unread:
            self._taken, self._since_s = taken, now_s
            return
        name, most_s = self._command.name, self._command.timeout_s
        if most_s is not None and now_s - self._since_s >= most_s:
            raise RunFailed(f"{name} took nothing of its input for {most_s:g} s, and was ended")
        if not self._said and now_s - self._since_s >= _IDLE_S:
            self._said = True
            say(
                f"{name} has taken nothing of its input for {_IDLE_S:g} s, and is waited for; --timeout TIME ends "
                "such a command and starts it again"
            )


def _copy(flow: Flow, outlet: Outlet) -> None:
    """Write lines until stdin has ended, none is left, and all were taken."""
    while True:
        batch = flow.take(outlet.most, _UNREAD_CHECK_S if outlet.unread else Stop.PATIENCE_S)
        if batch:
            _send(flow, outlet, batch)
            continue
        outlet.settle()
        outlet.check()
        if outlet.unread:  # messages not read from the pipe may fill the capacity
            if batch is None:
                outlet.wait()
        elif outlet.lines and (flow.is_held_back or not flow.is_empty(outlet.lines)):
            _make_room(flow, outlet)
        elif batch is None and flow.is_empty(outlet.lines):
            return


def _make_room(flow: Flow, outlet: Outlet) -> None:
    """Send waiting lines; if memory has no room for them beside the window, ack the window."""
    batch = flow.take(outlet.most, Stop.PATIENCE_S)  # they may have come since the last look
    if batch:
        _send(flow, outlet, batch)
    else:
        outlet.shed()


def _send(flow: Flow, outlet: Outlet, batch: Deliveries) -> None:
    outlet.send(batch, last_apart=outlet.has_window and flow.is_last(outlet.lines + len(batch)))
    outlet.check()
