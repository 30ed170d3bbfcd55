"""`qflow top`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from qflow.cli import options
from qflow.errors import InvalidArgument


@click.command()
@options.existing_spool
def top(spool: Path) -> int:
    """Watch queues and streams, again and again; press ? for what its keys do, q to leave.

    With an owner that lets others in it also purges, redrives and pauses queues; beside one that does not, or of a
    spool that nobody owns, it shows what is known and changes nothing. Needs a terminal, and the package textual.

    \b
    Examples:
      qflow top spool
    """
    from qflow import inspect
    from qflow.amqp import letters
    from qflow.serving.extras import load

    inspect.check_there(spool)
    if not is_terminal():
        raise InvalidArgument(
            "qflow top needs a terminal at stdin, stdout and stderr; elsewhere there is `qflow stats`"
        )
    if os.environ.get("TERM", "dumb") == "dumb":
        raise InvalidArgument(
            "qflow top needs a terminal that can move its cursor; with TERM=dumb there is `qflow stats`"
        )
    for name in ("COLUMNS", "LINES"):  # exported by a shell, they would count for more than the size of the terminal
        os.environ.pop(name, None)
    application = load("qflow.top.app", needs="textual", what="qflow top")
    code: int = application.run(application.Source(spool, legible=letters.legible))
    return code


def is_terminal() -> bool:
    """Tell whether there is one to draw on and to read keys from; Textual draws on stderr."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
