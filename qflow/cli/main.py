"""The group of subcommands; turns errors into a line on stderr and an exit code.

A command is one line in `COMMANDS`: its name, where it is (`module`, or `module:attribute` where the attribute is not
named as the command), and its short help. Its module is imported when it is called, not by `qflow --help`.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from qflow.cli.exits import EXIT_CODES, Exit, exit_code
from qflow.cli.standard import complain, complaining, discard_stdout, in_words, wait_for_readers
from qflow.cli.stop import Interrupted
from qflow.descriptors import occupy_standard
from qflow.errors import QflowError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

COMMANDS: dict[str, dict[str, tuple[str, str]]] = {
    "Messages": {
        "put": ("qflow.cli.put", "Put lines into a queue."),
        "get": ("qflow.cli.get", "Write messages to stdout and ack them."),
        "pipe": ("qflow.cli.pipe", "Buffer stdin durably on its way to a command."),
        "work": ("qflow.cli.work", "Call a function with each message, in processes of their own."),
        "publish": ("qflow.cli.publish", "Publish to a topic: into streams, and queues that are bound to it."),
        "subscribe": ("qflow.cli.subscribe", "Write messages of a stream to stdout, and change nothing."),
    },
    "Look inside": {
        "doctor": ("qflow.cli.doctor", "Say what is wrong with a spool, and what to do."),
        "ls": ("qflow.cli.ls", "List queues and streams, fast."),
        "du": ("qflow.cli.du", "Show what takes the disk: live and dead bytes by store and queue."),
        "diff": ("qflow.cli.diff", "Compare two spools: queues, settings, and messages one by one."),
        "stats": ("qflow.cli.stats", "Show the queues and streams of a spool."),
        "top": ("qflow.cli.top", "Watch a spool in the terminal: rates, lags, memory, events."),
        "metrics": ("qflow.cli.metrics", "Print the metrics of a spool, as Prometheus reads them."),
        "streams": ("qflow.cli.streams", "Show the streams of a spool, or declare one."),
        "sessions": ("qflow.cli.sessions", "Show the MQTT sessions of a spool, or delete one."),
        "peek": ("qflow.cli.peek", "Show the first messages of a queue."),
        "tail": ("qflow.cli.tail", "Show the last messages of a queue, and those that come."),
        "grep": ("qflow.cli.grep", "Find messages by what is in them."),
        "schedules": ("qflow.cli.schedules", "Show what is put again and again; add or cancel it."),
        "show": ("qflow.cli.show", "Show one message."),
        "spilled": ("qflow.cli.spilled", "List what lies in the spill directory."),
    },
    "Change": {
        "alter": ("qflow.cli.alter", "Change settings of a queue, or a stream."),
        "move": ("qflow.cli.move", "Move the messages of a queue to another one."),
        "redrive": ("qflow.cli.redrive", "Move dead letters back to the queues they came from."),
        "purge": ("qflow.cli.purge", "Delete the messages of a queue."),
        "delete": ("qflow.cli.delete", "Delete a queue, a stream, or single messages."),
    },
    "Keep": {
        "check": ("qflow.cli.check", "Verify every checksum of the log."),
        "compact": ("qflow.cli.compact", "Give the disk back that the log does not need."),
        "export": ("qflow.cli.export", "Write queues and streams as JSON lines or Parquet."),
        "import": ("qflow.cli.importing:import_", "Put what `qflow export` wrote into a spool."),
        "snapshot": ("qflow.cli.snapshot", "Copy a spool, also while it is used; bring a copy back."),
    },
    "Serve and connect": {
        "serve": ("qflow.cli.serve", "Serve a spool to clients on the network."),
        "users": ("qflow.cli.users", "Say who may log in to `qflow serve`, and what they may do."),
        "pipeline": ("qflow.cli.pipeline", "Move streams and Parquet files with Spark, and report on them."),
        "completion": ("qflow.cli.completion", "Print what completes commands in a shell."),
        "demo": ("qflow.cli.demo.command:demo", "A year of flights, and a kill in the middle."),
    },
}
"""Section of `qflow --help` -> name -> (where the command is, short help)."""
_BY_NAME = {name: command for section in COMMANDS.values() for name, command in section.items()}


class _Commands(click.Group):
    """A group whose commands return an exit code, or None for 0, and are imported when they are called."""

    def main(self, *given: Any, standalone_mode: bool = True, **more: Any) -> Any:
        """Run a command and exit, as click does, which gives 1 for Ctrl-C where it works itself, or asks something."""
        run: Callable[[], Any] = partial(super().main, *given, standalone_mode=False, **more)
        if not standalone_mode:
            return run()
        try:
            code = run()
        except click.Abort as abort:
            code = 128 + signal.SIGINT
            if not isinstance(abort.__context__, KeyboardInterrupt):
                complain("Aborted!")
                code = Exit.DIFFERS
        except click.ClickException as error:
            with complaining():
                error.show()
            code = error.exit_code
        sys.exit(code)

    def invoke(self, ctx: click.Context) -> None:
        from qflow.cli.damage import Damage

        damage = ctx.ensure_object(Damage)
        try:
            code = super().invoke(ctx) or Exit.FINE
            if sys.stdout is not None:  # it was closed from the start
                sys.stdout.flush()
        except Interrupted as interrupted:
            code = interrupted.exit_code
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        except BrokenPipeError:
            discard_stdout()
            code = 128 + signal.SIGPIPE
        except (QflowError, OSError) as error:
            code = _tell(error)
        finally:
            damage.tell()
        ctx.exit(Exit.DIFFERS if damage.lost and code == Exit.FINE else code)

    def make_context(self, *given: Any, **more: Any) -> click.Context:
        try:
            return super().make_context(*given, **more)
        except BrokenPipeError:  # of what `--help` and `--version` write
            discard_stdout()
            raise SystemExit(128 + signal.SIGPIPE) from None
        except OSError as error:
            raise SystemExit(_tell(error)) from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_BY_NAME)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _BY_NAME:
            return None
        where, short_help = _BY_NAME[cmd_name]
        module, _, attribute = where.partition(":")
        command = getattr(importlib.import_module(module), attribute or cmd_name)
        assert isinstance(command, click.Command)
        command.short_help = short_help
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not args[0].startswith("-") and args[0] not in _BY_NAME:
            import difflib

            nearest = " or ".join(map(repr, difflib.get_close_matches(args[0], _BY_NAME)))
            ctx.fail(f"no such command {args[0]!r}{f'; did you mean {nearest}?' if nearest else ''}")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name, help=short_help)
            for name, (_where, short_help) in _BY_NAME.items()
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section, commands in COMMANDS.items():
            with formatter.section(section):
                formatter.write_dl([(name, short_help) for name, (_where, short_help) in commands.items()])


def _tell(error: QflowError | OSError) -> Exit:
    """Print an error; return its exit code."""
    from qflow.doctor.words import harmless

    complain(f"qflow: {harmless(in_words(error))}")
    return exit_code(error)


@click.group(cls=_Commands, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="qflow")
@click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Colour; auto is on a terminal, unless NO_COLOR is set or TERM is dumb.",
)
@click.pass_context
def app(context: click.Context, color: str) -> None:
    """Queues in a directory: memory is bounded, disk is used when memory is full, confirmed messages survive a crash.

    A SPOOL is the directory of a qflow broker. One process owns it at a time. What changes a spool asks its owner, or
    owns it meanwhile if there is none; `pipe` and `serve` need it for themselves. What looks inside only reads, also
    beside an owner. `pipeline` and `work` go either way.
    """
    if color != "auto":
        context.color = color == "always"
    elif os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        context.color = False


def main(*, hears_interrupts: bool = False) -> None:
    """Run the command line; with `hears_interrupts`, Ctrl-C raises from now on, where it ended the process as it is."""
    try:
        if hears_interrupts:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        occupy_standard()
        wait_for_readers()
        app(prog_name="qflow")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
