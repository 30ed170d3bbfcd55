"""`qflow show`."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from qflow.amqp import letters
from qflow.cli import facts, messages, options
from qflow.cli.standard import stdout_bytes

SHOWN_BYTES, SHOWN_VALUE = 64 * 1024, 1000
"""Of a body, and characters of the value of a header: what is longer is cut, and that is said."""


@click.command()
@options.existing_spool
@options.queue_name
@click.argument("sequence", type=click.IntRange(min=0))
@click.option("--body", "only_body", is_flag=True, help="Write the body alone, as it is.")
@options.as_json
def show(spool: Path, queue_name: str, sequence: int, only_body: bool, as_json: bool) -> None:
    """Show one message of a durable queue, as the log has it; nothing is acked.

    A settled message may still be found for a while. Of a long body the first 64 KiB are shown. With --json, a body
    that is not UTF-8 text is in `body_base64`.

    Of a message that came by AMQP, exchange, routing key and properties are shown; with --json under `amqp`.

    \b
    Examples:
      qflow show spool jobs 17
      qflow show spool jobs 17 --body > body.bin
    """
    from qflow import inspect

    found = inspect.read_message(spool, queue_name, sequence)
    if only_body:
        stdout_bytes().write(found.body)
        return
    put_at = messages.moment(found.time_ms)
    if as_json:
        facts.print_json(
            {"queue": queue_name, "sequence": found.sequence, "put_at": put_at, "settled": found.settled}
            | messages.described(found)
        )
        return
    click.echo(f"queue     {facts.readable(queue_name)}")
    click.echo(f"sequence  {found.sequence}{' (settled)' if found.settled else ''}")
    click.echo(f"put at    {put_at}")
    by_amqp = letters.described(found.headers)
    if by_amqp is None:
        _print_headers(found.headers)
    else:
        _print_amqp(**by_amqp)
        _print_headers({name: value for name, value in found.headers.items() if name not in letters.DESCRIBED})
    click.echo(f"body      {facts.counted(len(found.body), 'byte')}\n\n{_start(found.body)}")
    if len(found.body) > SHOWN_BYTES:
        click.echo("... cut: --body writes all of it")


def _start(body: bytes) -> str:
    """Return the beginning of a body, as a terminal may show it; the last letter of what is cut is a whole one."""
    part = body[:SHOWN_BYTES]
    try:
        text = getincrementaldecoder("utf-8")().decode(part, final=part == body)
    except UnicodeDecodeError:
        return repr(part)
    return text if all(letter.isprintable() or letter in "\n\t" for letter in text) else repr(part)


def _value(value: object) -> str:
    """Return the value of a header or property, cut if it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN_VALUE else f"{text[:SHOWN_VALUE]}... (cut)"


def _print_amqp(exchange: str, routing_key: str, properties: dict[str, Any]) -> None:
    click.echo(f"exchange  {facts.readable(exchange)}")
    click.echo(f"key       {facts.readable(routing_key)}")
    for name, value in properties.items():
        if name != "headers":
            click.echo(f"property  {name} = {_value(value)}")
    _print_headers(properties.get("headers", {}))


def _print_headers(headers: Mapping[str, Any]) -> None:
    for name, value in headers.items():
        click.echo(f"header    {facts.readable(name)} = {_value(value)}")
