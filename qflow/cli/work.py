"""`qflow work`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from qflow.cli import options
from qflow.cli.output import missing, output
from qflow.errors import InvalidArgument
from qflow.options import Spill

_FILE = click.Path(exists=True, dir_okay=False, resolve_path=True)


@click.command()
@click.argument("spool", type=options.SpoolOrUrl())
@options.queue_name
@click.argument("function", metavar="MODULE:FUNCTION")
@click.option(
    "--processes",
    "-p",
    type=click.IntRange(min=1, max=10_000),
    help="How many; by default one for each processor.",
)
@click.option(
    "--lease",
    "lease_s",
    metavar="TIME",
    type=options.Seconds(min=0, min_open=True, max=86_400 * 365),
    help="A process that holds a message for longer is killed; by default the queue's ack timeout, if it has one.",
)
@click.option(
    "--retry-delay",
    "retry_delay_s",
    metavar="TIME",
    type=options.Seconds(min=0, max=86_400),
    default=1.0,
    show_default=True,
    help="How long a message that failed waits; twice as long after the next time, and so on up to an hour.",
)
@click.option("--token-file", type=_FILE, help="For a URL: the file of a token, read anew for each connection.")
@click.option("--ca", type=_FILE, help="For a URL: certificates (PEM) to trust in place of the system's.")
@click.option("--cert", type=_FILE, help="For a URL that asks for one: the certificate to show (PEM).")
@click.option("--key", type=_FILE, help="The private key of --cert.")
@options.capacity
@options.spill
def work(
    spool: Path | str,
    queue_name: str,
    function: str,
    processes: int | None,
    lease_s: float | None,
    retry_delay_s: float,
    token_file: str | None,
    ca: str | None,
    cert: str | None,
    key: str | None,
    capacity: int,
    spill: Spill,
) -> int:
    """Call a function with each message of QUEUE, in processes of their own, until a signal.

    MODULE:FUNCTION, or FILE.py:FUNCTION, is imported by each process, from the current directory or where packages are
    installed. The function gets a delivery: `delivery.body` has the bytes. When it returns, the message is acked; when
    it raises, the message is tried again later, as often as the queue's `max_deliveries` says, and the exception's text
    is the reason of the dead letter.

    If another process owns SPOOL, such as `qflow serve`, the processes work there; else this command owns it, with
    --capacity and --spill. A line on stdout says when all of them work.

    SPOOL may be the URL of a broker on another host, where `qflow serve --flight` runs: grpc+tls://HOST:PORT.

    SIGTERM, SIGINT and SIGHUP end it: each process finishes the message at hand; a second signal kills those that still
    work, and their messages go back. A process that dies is started again, and its message goes to another.

    \b
    Examples:
      qflow work spool jobs shop.mail:send --processes 4
      qflow work spool jobs ./job.py:run --lease 60
    """
    from qflow.workers import supervisor
    from qflow.workers.job import Reach

    reach = Reach(token_file, ca, cert, key)
    paths = [os.getcwd(), *sys.path]
    try:
        job = supervisor.make_job(
            spool, queue_name, function, processes, lease_s, retry_delay_s, reach=reach, sys_path=paths
        )
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error
    with output(sys.stdout) as told, output(sys.stderr, lambda count: f"qflow: {missing(count)}") as lines:
        return 128 + supervisor.supervise(
            job,
            {"capacity_bytes": capacity, "spill": spill},
            tell=lambda sentence: lines.put(f"qflow: {sentence}"),
            ready=told.put,
            alone=True,
        )
