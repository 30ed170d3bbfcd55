"""The group of subcommands; turns errors into a line on stderr and an exit code."""

from __future__ import annotations

import os
import signal
import sys

import click

from qflow.cli.check import check
from qflow.cli.compact import compact
from qflow.cli.damage import Damage
from qflow.cli.demo.command import demo
from qflow.cli.exits import EXIT_CODES, Exit, exit_code
from qflow.cli.get import get
from qflow.cli.pipe import pipe
from qflow.cli.pipeline import pipeline
from qflow.cli.publish import publish
from qflow.cli.put import put
from qflow.cli.redrive import redrive
from qflow.cli.serve import serve
from qflow.cli.show import show
from qflow.cli.snapshot import snapshot
from qflow.cli.spilled import spilled
from qflow.cli.stats import stats
from qflow.cli.stop import Interrupted
from qflow.cli.streams import streams
from qflow.cli.subscribe import subscribe
from qflow.cli.users import users
from qflow.errors import QflowError


class _Commands(click.Group):
    """A group whose commands return an exit code, or None for 0."""

    def invoke(self, ctx: click.Context) -> None:
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
            _discard_stdout()
            code = 128 + signal.SIGPIPE
        except (QflowError, OSError) as error:
            click.echo(f"qflow: {' '.join(str(error).split())}", err=True)
            code = exit_code(error)
        finally:
            damage.tell()
        ctx.exit(Exit.DIFFERS if damage.lost and code == Exit.FINE else code)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def _discard_stdout() -> None:
    """Redirect stdout to /dev/null: the interpreter flushes it once more at its end."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)


@click.group(cls=_Commands, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="qflow")
def app() -> None:
    """Queues in a directory: memory is bounded, disk is used when memory is full, confirmed messages survive a crash.

    A SPOOL is the directory of a qflow broker. One process owns it at a time: `put`, `get`, `pipe`, `redrive`,
    `publish`, `serve` and `compact` need it for themselves; `subscribe`, `streams`, `stats`, `spilled`, `show`, `check`
    and `snapshot` only read, also beside an owner. `pipeline` works either way.
    """


_COMMANDS = (
    *(demo, put, get, pipe, redrive, publish, subscribe, streams),
    *(serve, users),
    *(stats, spilled, show, check, snapshot, compact, pipeline),
)
for _command in _COMMANDS:
    app.add_command(_command)


def main() -> None:
    """Run the command line."""
    _occupy_standard_descriptors()
    app(prog_name="qflow")


def _occupy_standard_descriptors() -> None:
    """Open a dummy for a closed stdin, stdout or stderr, so that no file of the spool gets its number."""
    for descriptor, refusing in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, refusing)
