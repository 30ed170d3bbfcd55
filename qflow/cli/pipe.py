"""`qflow pipe`."""

from __future__ import annotations

import json
import math
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs
import click

from qflow.cli import facts, options
from qflow.cli.command import Command, CommandFailed, Restarts, Run, RunFailed, say
from qflow.cli.exits import Exit
from qflow.cli.flow import STDIN, Flow
from qflow.cli.pipe_stream import to_command, to_stdout
from qflow.cli.spool import owned, queue_to_fill
from qflow.cli.standard import complain
from qflow.cli.stop import Stop, Stopped
from qflow.config import LONGEST_S
from qflow.deliveries import Deliveries
from qflow.errors import NotFound, QflowError
from qflow.options import Spill

_FIRST_PAUSE_S = 0.2
_WINDOW_BYTES = 1024 * 1024
_STDERR = 2
_FRAMES_PER_SECOND = 4
_STORED = "stored"


def _parse_window(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    return None if value is None else options.parse_capacity(context, parameter, value)


def _parse_resume(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | str:
    if value is None:
        return 0
    if value == _STORED:
        return value
    digits = value.replace(",", "")
    if not (digits.isascii() and digits.isdecimal()):
        raise click.BadParameter(f"it is a number of lines, or `{_STORED}`, not {value!r}")
    return int(digits[:40])  # more digits are past any end, too


@attrs.frozen(kw_only=True)
class _Settings:
    """The options about COMMAND; None = not given."""

    batch: int | None
    retries: int | None
    backoff: float | None
    timeout: float | None
    window: int | None

    def check(self, words: tuple[str, ...]) -> None:
        """Refuse options that have no meaning here, and a command that does not exist."""
        given = [name for name, value in attrs.asdict(self).items() if value is not None]
        if given and not words:
            raise click.UsageError(f"--{given[0]} needs a COMMAND to run")
        if self.batch is not None and self.window is not None:
            raise click.UsageError("--window says nothing to --batch, which gives a run that fails all its lines again")
        if words and shutil.which(words[0]) is None:
            raise click.UsageError(
                f"there is no command {words[0]!r}, or it may not be executed; give its path, or see PATH and chmod +x"
            )


class _Pipe(click.Command):
    """The command class; explains `--` if an option of COMMAND is taken for one of `qflow pipe`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        apart = "--" in args
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if apart:
                raise
            hint = f"{error.message} If it is one of COMMAND, put `--` before COMMAND."
            raise click.NoSuchOption(error.option_name, hint, error.possibilities, ctx) from error


@click.command(cls=_Pipe)
@options.new_or_old_spool
@options.queue_name
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--batch", type=click.IntRange(min=1), metavar="N", help="Run COMMAND once for every N lines.")
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    metavar="N",
    help="How many failures of COMMAND in a row are followed by another try.  [default: any number while stdin is "
    "open, then 2]",
)
@click.option(
    "--backoff",
    type=options.Seconds(min=0, max=LONGEST_S),
    metavar="TIME",
    help="The pause before COMMAND is started again; each next one of a row is twice as long, up to 30 s.  "
    "[default: 0.2]",
)
@click.option(
    "--timeout",
    type=options.Seconds(min=0, min_open=True, max=LONGEST_S),
    metavar="TIME",
    help="End COMMAND, as if it failed, when it takes nothing of its input, or does not end after it, for so long; "
    "with --batch, when a run takes longer.  [default: wait]",
)
@click.option(
    "--window",
    metavar="SIZE",
    callback=_parse_window,
    help="What COMMAND took last, so many bytes of lines, goes to it again when it dies; 0: nothing.  [default: 1MiB]",
)
@click.option(
    "--resume-from",
    metavar="N",
    callback=_parse_resume,
    help=f"Leave out the first N lines of stdin; `{_STORED}`: as many as QUEUE was ever given.",
)
@options.delimiter
@options.capacity
@options.spill
@options.as_json
def pipe(
    spool: Path,
    queue_name: str,
    command: tuple[str, ...],
    resume_from: int | str,
    delimiter: bytes,
    capacity: int,
    spill: Spill,
    as_json: bool,
    **settings: int | float | None,
) -> int | None:
    """Buffer stdin durably in QUEUE on its way to COMMAND's stdin, or to stdout.

    \b
        producer | qflow pipe SPOOL QUEUE | consumer
        producer | qflow pipe SPOOL QUEUE -- consumer --its-option
        producer | qflow pipe SPOOL QUEUE --batch 500 -- load-into-database

    The producer waits for the consumer only at a limit of the queue or on a full disk. What an earlier run left in the
    queue goes out first. It ends when stdin has ended and the queue is empty; a summary goes to stderr, and so does
    progress if that is a terminal.

    A line is safe once it is synced in QUEUE. Lines are stored as fast as they arrive, with one sync for all there are.

    When COMMAND fails, it is started again, and stdin is stored meanwhile. A line is acked, and so never goes out
    again:

    \b
    - with --batch N: when the run of COMMAND that got it on stdin has exited
      with 0. A run gets N lines, fewer at the end of stdin, or as many as fit
      into --capacity. A run that fails is repeated with the same lines.
    - else: when COMMAND has exited with 0 after the end of its input, or has
      taken --window more bytes behind the line. If it dies, what it took last
      goes to it again, so nothing is lost of a COMMAND that works in order
      and keeps less than --window to itself: what it took last may be worked
      off twice, never more than --window (and half of --capacity in memory)
      and what lay in the pipe. It must take more than --window before it
      dies, or it gets nowhere: use --batch. With --window 0, a line is acked
      once it was taken, and what COMMAND kept to itself dies with it.
    - else, if COMMAND exits with 0 before the end of its input: the first
      line it was given, and what lies more than --window back. It is started
      again at once. One that works off N lines and leaves needs --batch N.
    - to stdout: once it is written; if that is to a pipe, once the other end
      has taken it out of the pipe (Linux).

    After --retries failures in a row, none of which got a line acked, COMMAND is given up: the rest of stdin is stored
    until it ends or the queue takes no more, and qflow exits with 5. The next run continues with the first line not
    acked. The summary says where to go on if the same input is given again: with --resume-from. After SIGKILL there is
    no summary; if QUEUE was given this input alone, `--resume-from stored` knows.

    The first SIGINT, SIGTERM or SIGHUP stores what was read and lets COMMAND finish with what lies in its pipe: it runs
    in a process group of its own, so Ctrl-C does not reach it. If it exits with 0 and leaves some of that, the first
    line it was given is acked alone. A second signal ends COMMAND. After SIGKILL or a power cut, lines that were synced
    and not acked go out again: at least once, in order.
    """
    wanted = _Settings(**settings)  # type: ignore[arg-type]
    wanted.check(command)
    skip = _count_stored(spool, queue_name) if isinstance(resume_from, str) else resume_from
    with Stop() as stop, owned(spool, capacity, spill=spill, door=True) as broker:
        flow = Flow(queue_to_fill(broker, queue_name), capacity, delimiter, skip, stop)
        try:
            code = _run(flow, command, wanted)
        finally:
            _print(flow, as_json)
        return stop.exit_code if code is None else code


def _count_stored(spool: Path, queue_name: str) -> int:
    """Return how many lines were ever put into a queue that was given nothing else."""
    from qflow import inspect

    try:
        found = inspect.read_spool(spool)
    except NotFound:  # it is made, also in a directory that is there
        return 0
    return next((queue.next_sequence for queue in found.queues if queue.name == queue_name), 0)


def _run(flow: Flow, words: tuple[str, ...], wanted: _Settings) -> Exit | None:
    """Move lines; return 5 if the command was given up.

    Raises:
        BrokenPipeError: the reader of stdout is gone.
        QflowError: stdin cannot be read or stored.
    """
    code = None
    with suppress(Stopped), ThreadPoolExecutor(1) as threads, _progress_shown(flow):
        flow.start(threads)
        try:
            _send(flow, words, wanted)
        except CommandFailed as failure:
            code = Exit.COMMAND
            say(str(failure))
            if not flow.input_ended:
                say("the command is given up; what comes from stdin is stored until it ends")
                flow.store_rest()
        finally:
            flow.stop.request()
    try:
        flow.finish()
    except QflowError as error:
        if code is None:
            raise
        say(str(error))
    return code


def _send(flow: Flow, words: tuple[str, ...], wanted: _Settings) -> None:
    if not words:
        to_stdout(flow)
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, no exit code can be read
    command = Command(words, wanted.timeout, flow.stop)
    restarts = Restarts(wanted.retries, _FIRST_PAUSE_S if wanted.backoff is None else wanted.backoff, flow)
    if wanted.batch:
        to_runs(flow, command, restarts, wanted.batch)
    else:
        to_command(flow, command, restarts, _WINDOW_BYTES if wanted.window is None else wanted.window)


@contextmanager
def _progress_shown(flow: Flow) -> Iterator[None]:
    """Show progress on stderr, if that is a terminal and stdin is not."""
    if not os.isatty(_STDERR) or os.isatty(STDIN):
        yield
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    def line() -> Text:
        return Text(_describe(flow), no_wrap=True, overflow="ellipsis")

    console = Console(stderr=True, highlight=False)
    with Live(get_renderable=line, console=console, refresh_per_second=_FRAMES_PER_SECOND, redirect_stdout=False):
        yield


def _describe(flow: Flow) -> str:
    """Return the progress of a pipe in words.

    Lines stored from stdin, lines handed out, lines waiting, how many of these are not in memory, and restarts of the
    command.
    """
    stats = flow.queue.stats()
    on_disk = stats.spilled_messages + stats.logged_messages
    return (
        f"in {flow.stored:,}  out {flow.handed_out:,}  waiting {stats.lag_messages:,}  spilled {on_disk:,}  "
        f"restarts {flow.restarts:,}"
    )


def _print(flow: Flow, as_json: bool) -> None:
    left = len(flow.queue)
    resume_from = flow.skipped + flow.stored
    if as_json:
        summary = {
            "queue": flow.queue.name,
            "found": flow.found,
            "stored": flow.stored,
            "delivered": flow.delivered,
            "left": left,
            "restarts": flow.restarts,
            "resume_from": resume_from,
        }
        complain(json.dumps(summary))
        return
    restarts = f", {facts.counted(flow.restarts, 'restart')}" if flow.restarts else ""
    found = facts.counted(flow.found, "line")
    say(f"{found} found, {flow.stored:,} stored, {flow.delivered:,} delivered, {left:,} left{restarts}")
    if left and resume_from:
        say(f"to go on with the same input, say --resume-from {resume_from}")


_PATIENCE_MS = int(Stop.PATIENCE_S * 1000)


def to_runs(flow: Flow, command: Command, restarts: Restarts, size: int) -> None:
    """Run a command for every `size` lines until stdin has ended and nothing is left.

    Raises:
        CommandFailed: a run failed, and so did its repetitions.
        Stopped: asked to stop.
    """
    while batch := _collect(flow, size):
        lines = [body for part in batch for body in part.bodies]
        try:
            _run_until_done(flow, command, restarts, lines)
        except BaseException:
            for part in batch:
                part.nack()
            flow.handed_out -= len(lines)
            raise
        for part in batch:
            part.ack()
        flow.delivered += len(lines)


def _collect(flow: Flow, size: int) -> list[Deliveries]:
    """Return batches of `size` lines together, fewer at the end of stdin or if no more fit into the capacity."""
    batch: list[Deliveries] = []
    count = 0
    while count < size:
        part = flow.take(size - count, Stop.PATIENCE_S)
        if not part and not flow.is_empty(count):
            # More lines wait, perhaps since this moment: if they still do not come, memory is full of this batch.
            part = flow.take(size - count, Stop.PATIENCE_S)
            if not part and batch:
                break
        if part:
            batch.append(part)
            count += len(part)
        elif part is None and flow.is_empty(count):
            break
    return batch


def _run_until_done(flow: Flow, command: Command, restarts: Restarts, lines: list[bytes]) -> None:
    data = b"".join(line + flow.delimiter for line in lines)
    back = flow.back_in_words(len(lines))
    done = False
    while not done:
        try:
            _run_once(command, data)
        except RunFailed as failure:
            restarts.failed(str(failure), back)
        else:
            done = True
    restarts.succeeded()


def _run_once(command: Command, data: bytes) -> None:
    most_s = command.timeout_s
    deadline = math.inf if most_s is None else time.monotonic() + most_s
    with command.started() as run:
        with suppress(BrokenPipeError):  # it may exit without reading everything: its exit code counts
            _write(run, data, deadline)
        if time.monotonic() < deadline:  # else a run could take it for the end of its input, and exit with 0
            run.stdin.close()
        if not run.ends_within(None if most_s is None else max(0, deadline - time.monotonic())):
            run.end()
            run.stdin.close()
            raise RunFailed(f"{command.name} did not end within {most_s:g} s, and was ended")
        run.process.wait()
    if run.process.returncode != 0:
        raise RunFailed(run.how_it_ended())


def _write(run: Run, data: bytes, deadline: float) -> None:
    """Write to a run until it has taken all, has exited, or the deadline comes."""
    descriptor = run.stdin.fileno()
    os.set_blocking(descriptor, False)
    writable = select.poll()
    writable.register(descriptor, select.POLLOUT)
    left = memoryview(data)
    while left and not run.has_ended() and time.monotonic() < deadline:
        if writable.poll(_PATIENCE_MS):
            left = left[os.write(descriptor, left) :]
