"""`qflow serve`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from qflow.cli import options
from qflow.errors import InvalidArgument
from qflow.options import Spill
from qflow.serving.addresses import Address

if TYPE_CHECKING:
    from qflow.serving.certificates import Certificates

Command = TypeVar("Command", bound=Callable[..., object])
_FILE = click.Path(dir_okay=False, path_type=Path)


def _parse_addresses(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[Address, ...]:
    try:
        return tuple(map(Address.parse, values))
    except InvalidArgument as error:
        raise click.BadParameter(str(error)) from error


_DOORS = (
    ("amqp", "Listen for AMQP 0-9-1, which RabbitMQ's clients speak", "127.0.0.1:5672"),
    ("amqps", "The same with TLS", None),
    ("mqtt", "Listen for MQTT 3.1.1 and 5", "127.0.0.1:1883"),
    ("mqtts", "The same with TLS", None),
    ("ws", "MQTT over WebSockets", None),
    ("wss", "The same with TLS", None),
    ("flight", "Listen for Arrow Flight, with TLS if --cert and --key are given", "127.0.0.1:7420"),
    ("metrics", "Answer Prometheus, whoever asks, at /metrics", "127.0.0.1:9465"),
    ("http", "Show a page for browsers, and its JSON API", "127.0.0.1:7480"),
    ("https", "The same with TLS", None),
)
"""Kinds of doors, each with an option that says where they are; one with a default needs no address."""


def _doors(command: Command) -> Command:
    """Give a command an option for each of `_DOORS`."""
    for name, text, default in reversed(_DOORS):
        more: dict[str, Any] = {"metavar": "HOST:PORT", "help": f"{text}."}
        if default is not None:
            told = f"{text}; without an address, on {default}."
            more = {"metavar": "[HOST:PORT]", "is_flag": False, "flag_value": default, "help": told}
        command = click.option(f"--{name}", multiple=True, callback=_parse_addresses, **more)(command)
    return command


@click.command()
@options.new_or_old_spool
@_doors
@click.option("--token-file", type=_FILE, help="Tokens, a line each: a client of Arrow Flight must show one.")
@click.option("--cert", type=_FILE, help="The certificate of this server, and those that lead to it (PEM).")
@click.option("--key", type=_FILE, help="Its private key (PEM).")
@click.option("--ca", type=_FILE, help="Clients must have a certificate that one of these has signed (PEM).")
@click.option("--users", "users_file", type=_FILE, help="Who may log in: a file that `qflow users` makes.")
@click.option(
    "--mqtt-max-keep-alive",
    "max_keep_alive_s",
    metavar="TIME",
    type=options.Seconds(1, 65_535),
    help="What clients of MQTT 5 are told that want a longer keep-alive, or none.",
)
@click.option(
    "--mqtt-session-expiry",
    "max_session_expiry_s",
    metavar="TIME",
    type=options.Seconds(1, 2**32 - 2),
    help="How long MQTT sessions last at the most without their clients; those of 3.1.1 have no end otherwise.",
)
@click.option(
    "--mqtt-redirect",
    "redirect",
    metavar="REFERENCE",
    help="Take no clients of MQTT, and tell those of MQTT 5 to use this server, such as other.example:1883.",
)
@click.option(
    "--mqtt-redirect-permanent",
    "redirect_permanent",
    is_flag=True,
    default=None,
    help="With --mqtt-redirect: for good, since this server has moved there.",
)
@options.capacity
@options.spill
@click.option(
    "--grace",
    "grace_s",
    metavar="TIME",
    type=options.Seconds(min=0, max=86_400),
    default=10.0,
    show_default=True,
    help="What clients have to finish, once the server is told to end.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="How stderr tells of troubles: in sentences, or a JSON object a line with fields.",
)
def serve(
    spool: Path,
    token_file: Path | None,
    cert: Path | None,
    key: Path | None,
    ca: Path | None,
    users_file: Path | None,
    capacity: int,
    spill: Spill,
    grace_s: float,
    log_format: str,
    **given: Any,
) -> int:
    """Own SPOOL, which is made if it is missing, and serve it to clients on the network until a signal.

    Lines on stdout say where it listens, such as `amqp on 127.0.0.1:5672`, when it does; a service manager is told by
    NOTIFY_SOCKET. An option that says where may be given several times.

    Without --users, whoever comes from this machine is let in: by AMQP as `guest` with the password `guest`, by MQTT
    under any name; the page shows everything and changes nothing. To listen anywhere but on loopback addresses, it
    needs --users. By Arrow Flight, whoever comes from this machine is let in, or who has a token; anywhere else it
    needs --token-file, --cert and --key. --metrics knows neither: whoever reaches its address reads the figures, with
    the names of queues, from other machines, too.

    SIGTERM and SIGINT end it: clients are told, and have --grace seconds to finish; a second signal ends that at once.
    SIGHUP reads users, tokens and certificates again (those of Arrow Flight stay as they are).

    \b
    Examples:
      qflow serve spool --amqp --mqtt --http
      qflow serve spool --amqps 0.0.0.0:5671 --users users.json --cert server.pem --key server.key
    """
    from qflow.cli import server

    by_tls = {} if cert is None else {server.FLIGHT: server.FLIGHT_TLS}
    wanted = [server.Wanted(by_tls.get(name, name), address) for name, _, _ in _DOORS for address in given.pop(name)]
    terms = {name: value for name, value in given.items() if value is not None}
    if "redirect_permanent" in terms and "redirect" not in terms:
        raise click.UsageError("--mqtt-redirect-permanent says how --mqtt-redirect is meant: give that, too")
    if terms and not any(one.kind.protocol == "mqtt" for one in wanted):
        raise click.UsageError("--mqtt-max-keep-alive, --mqtt-session-expiry and --mqtt-redirect go with --mqtt")
    if not wanted:
        raise click.UsageError(f"say what to serve: {', '.join(f'--{name}' for name, _, _ in _DOORS)}")
    if token_file is not None and not any(one.kind.protocol == "flight" for one in wanted):
        raise click.UsageError("--token-file is for clients of Arrow Flight: say --flight")
    certificates = _certificates([one.name for one in wanted if one.kind.has_tls], cert, key, ca)
    of_flight = {"token_file": token_file, "certificates": certificates}
    by_protocol: dict[str, Mapping[str, object]] = {"mqtt": terms, "flight": of_flight}
    doors = [one._replace(terms=by_protocol.get(one.kind.protocol, {})) for one in wanted]
    return server.run(spool, doors, users_file, certificates, grace_s, log_format, capacity_bytes=capacity, spill=spill)


def _certificates(names: list[str], cert: Path | None, key: Path | None, ca: Path | None) -> Certificates | None:
    """Return the certificates of doors with these names; None if there are no such doors."""
    if not names:
        if cert is not None or key is not None or ca is not None:
            raise click.UsageError(
                "--cert, --key and --ca are for --amqps, --mqtts, --wss, --https and --flight, none of which is given"
            )
        return None
    from qflow.serving.certificates import Certificates

    if cert is None or key is None:
        raise click.UsageError(f"--{names[0].partition('+')[0]} needs --cert and --key")
    return Certificates(cert, key, ca)
