"""`qflow demo`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from qflow.cli import facts, options
from qflow.cli.demo import flights
from qflow.cli.exits import Exit
from qflow.errors import InvalidArgument, NotFound


@click.command()
@click.option(
    "--spool",
    type=click.Path(file_okay=False, path_type=Path),
    help="A new directory for the spool, kept at the end.  [default: a temporary one]",
)
@click.option(
    "--rows",
    type=click.IntRange(min=8, max=flights.COUNT),
    default=flights.COUNT,
    show_default=True,
    help="How many flights.",
)
@click.option(
    "--capacity",
    metavar="SIZE",
    callback=options.parse_capacity,
    default="8MiB",
    show_default=True,
    help="Memory for messages.",
)
@click.option(
    "--png",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    default="qflow-demo.png",
    show_default=True,
    help="Where to draw memory against backlog.",
)
@options.as_json
def demo(spool: Path | None, rows: int, capacity: int, png: Path, as_json: bool) -> int:
    """Send a year of flights through a small queue, and kill it in the middle.

    A worker process puts the flights that left New York in 2013 into a durable queue, a JSON message each, as fast as
    it can; meanwhile it takes one for every three that are confirmed. So a backlog grows far beyond the memory. When
    half of the flights are confirmed, the worker is killed with SIGKILL. Another one opens the spool, puts the rest,
    and takes everything. Then the SHA-256 of what arrived is compared with that of the source.

    Exits with 1 if a flight is missing, out of place or different, or if memory went above the capacity.

    \b
    Examples:
      qflow demo --rows 20000
    """
    flights.data_file()  # raises when it is missing
    if find_spec("matplotlib") is None:
        raise NotFound("matplotlib is not installed: pip install '.[demo]' in a clone of qflow")
    from qflow.cli.demo.run import run

    with TemporaryDirectory(prefix="qflow-demo-") as directory:
        work = Path(directory)
        if spool is None:
            spool = work / "spool"
        elif spool.exists() and any(spool.iterdir()):
            raise InvalidArgument(f"{spool} is not empty: the demo needs a new directory")
        result = run(spool, work / "evidence", rows, capacity, png.absolute())
    result.draw()
    if as_json:
        facts.print_json(result.to_dict())
    else:
        result.print()
    return Exit.DIFFERS if result.problems else Exit.FINE
