"""`qflow show`."""

from __future__ import annotations

import base64
import sys
from datetime import UTC, datetime
from pathlib import Path

import click

from qflow.cli import facts, options


@click.command(short_help="Show one message.")
@options.existing_spool
@options.queue_name
@click.argument("sequence", type=click.IntRange(min=0))
@click.option("--body", "only_body", is_flag=True, help="Write the body alone, as it is.")
@options.as_json
def show(spool: Path, queue_name: str, sequence: int, only_body: bool, as_json: bool) -> None:
    """Show one message of a durable queue, as the log has it; nothing is acked.

    A settled message may still be found for a while. With --json, a body that is not UTF-8 text is in `body_base64`.
    """
    from qflow import inspect

    found = inspect.read_message(spool, queue_name, sequence)
    if only_body:
        sys.stdout.buffer.write(found.body)
        return
    text = _text(found.body)
    put_at = datetime.fromtimestamp(found.time_ms / 1000, UTC).isoformat(timespec="milliseconds")
    if as_json:
        encoded = {"body_base64": base64.b64encode(found.body).decode()} if text is None else {"body": text}
        facts.print_json(
            {
                "queue": queue_name,
                "sequence": found.sequence,
                "put_at": put_at,
                "settled": found.settled,
                "headers": found.headers,
                "size_bytes": len(found.body),
                **encoded,
            }
        )
        return
    click.echo(f"queue     {facts.readable(queue_name)}")
    click.echo(f"sequence  {found.sequence}{' (settled)' if found.settled else ''}")
    click.echo(f"put at    {put_at}")
    for name, value in found.headers.items():
        click.echo(f"header    {facts.readable(name)} = {value!r}")
    harmless = text is not None and all(letter.isprintable() or letter in "\n\t" for letter in text)
    click.echo(f"body      {facts.counted(len(found.body), 'byte')}\n\n{text if harmless else repr(found.body)}")


def _text(body: bytes) -> str | None:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None
