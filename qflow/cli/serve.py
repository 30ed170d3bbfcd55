"""`qflow serve`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from qflow.cli import options
from qflow.errors import InvalidArgument
from qflow.options import Spill
from qflow.serving.addresses import Address

if TYPE_CHECKING:
    from qflow.serving.certificates import Certificates

_FILE = click.Path(dir_okay=False, path_type=Path)


def _parse_address(_context: click.Context, _parameter: click.Parameter, value: str | None) -> Address | None:
    try:
        return None if value is None else Address.parse(value)
    except InvalidArgument as error:
        raise click.BadParameter(str(error)) from error


@click.command(short_help="Serve a spool to clients on the network.")
@options.new_or_old_spool
@click.option(
    "--amqp",
    metavar="[HOST:PORT]",
    is_flag=False,
    flag_value="127.0.0.1:5672",
    callback=_parse_address,
    help="Listen for AMQP 0-9-1, which RabbitMQ's clients speak; without an address, on 127.0.0.1:5672.",
)
@click.option("--amqps", metavar="HOST:PORT", callback=_parse_address, help="The same with TLS.")
@click.option("--cert", type=_FILE, help="The certificate of this server, and those that lead to it (PEM).")
@click.option("--key", type=_FILE, help="Its private key (PEM).")
@click.option("--ca", type=_FILE, help="Clients must have a certificate that one of these has signed (PEM).")
@click.option("--users", "users_file", type=_FILE, help="Who may log in: a file that `qflow users` makes.")
@options.capacity
@options.spill
@click.option(
    "--grace",
    "grace_s",
    metavar="SECONDS",
    type=options.Seconds(min=0, max=86_400),
    default=10.0,
    show_default=True,
    help="What clients have to finish, once the server is told to end.",
)
def serve(
    spool: Path,
    amqp: Address | None,
    amqps: Address | None,
    cert: Path | None,
    key: Path | None,
    ca: Path | None,
    users_file: Path | None,
    capacity: int,
    spill: Spill,
    grace_s: float,
) -> int:
    """Own SPOOL, which is made if it is missing, and serve it to clients on the network until a signal.

    A line on stdout says where it listens, such as `amqp on 127.0.0.1:5672`, when it does; a service manager is told
    by NOTIFY_SOCKET.

    Without --users, `guest` may log in with the password `guest`, from this machine; to listen anywhere but on
    loopback addresses, it needs --users.

    SIGTERM and SIGINT end it: clients are told, and have --grace seconds to finish; a second signal ends that at once.
    SIGHUP reads users and certificates again.
    """
    from qflow.cli import server

    wanted = [
        server.Wanted(name, address, has_tls)
        for name, address, has_tls in (("amqp", amqp, False), ("amqps", amqps, True))
        if address is not None
    ]
    if not wanted:
        raise click.UsageError("say what to serve: --amqp or --amqps")
    certificates = _certificates(amqps is not None, cert, key, ca)
    return server.run(spool, wanted, users_file, certificates, grace_s, capacity_bytes=capacity, spill=spill)


def _certificates(has_tls: bool, cert: Path | None, key: Path | None, ca: Path | None) -> Certificates | None:
    if not has_tls:
        if cert is not None or key is not None or ca is not None:
            raise click.UsageError("--cert, --key and --ca are for --amqps, which is missing")
        return None
    from qflow.serving.certificates import Certificates

    if cert is None or key is None:
        raise click.UsageError("--amqps needs --cert and --key")
    return Certificates(cert, key, ca)
