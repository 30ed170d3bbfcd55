"""`qflow export`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from qflow.cli import facts, options
from qflow.cli.damage import tell_of_examination
from qflow.cli.progress import counting
from qflow.cli.standard import stdout_bytes
from qflow.errors import StorageError

if TYPE_CHECKING:
    from qflow.cli.portable.reading import Contents
    from qflow.restoring import Item


@click.command()
@options.existing_spool
@click.argument("names", metavar="[QUEUE|STREAM]...", nargs=-1, shell_complete=options.queues_and_streams)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="A new file, and not stdout.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["json", "parquet"]),
    help="Parquet needs pyarrow and --output.  [default: as the name of the file ends, else json]",
)
def export(spool: Path, names: tuple[str, ...], output: Path | None, form: str | None) -> int:
    """Write the messages of durable queues that nobody has acked, and of streams, with all that `qflow import` needs.

    Nothing is taken, also beside an owner; what is put or acked meanwhile may be in it or not. First comes how each
    queue and stream is declared, then a line or row for each message. A file has its name when it is whole; until then
    it is OUTPUT.PID.part, which an export that was killed leaves: remove it. Exits with 1 if something cannot be read;
    the rest is written.

    \b
        qflow export SPOOL > all.jsonl
        qflow export SPOOL jobs -o jobs.parquet
        qflow export SPOOL jobs | jq -r 'select(.queue) | .body'
    """
    from qflow.cli.portable.reading import contents

    form = form or ("parquet" if output is not None and output.suffix == ".parquet" else "json")
    if form == "parquet" and output is None:
        raise click.UsageError("Parquet is no stream of lines: name a file by --output")
    if output is not None and os.path.lexists(output):
        raise click.UsageError(f"{str(output)!r} is there already: name a new file")
    found = contents(spool, names)
    written = 0
    with counting("exporting", found.messages) as advance:

        def counted() -> Iterator[list[Item]]:
            nonlocal written
            for batch in found.batches():
                yield batch
                written += len(batch)
                advance(len(batch))

        if output is None:
            _write_lines(stdout_bytes(), found, counted())
        else:
            _write_file(output, form, found, counted())
    code = tell_of_examination(spool, found.problems)
    if output is not None:
        click.echo(f"messages exported to {facts.readable(str(output))}: {written:,}")
    return code


def _write_file(output: Path, form: str, found: Contents, batches: Iterator[list[Item]]) -> None:
    """Write under another name, which is its own at the end."""
    from qflow.cli.portable import parquet

    part = output.with_name(f"{output.name}.{os.getpid()}.part")
    try:
        if form == "parquet":
            parquet.write(part, found.declared, batches)
        else:
            with open(part, "xb") as file:
                _write_lines(file, found, batches)
        _sync(part)
        os.replace(part, output)
        with suppress(PermissionError):  # a directory that one may write to, and not read
            _sync(output.parent)
    except OSError as error:
        if error.filename not in (None, str(part)):
            raise
        raise StorageError(f"cannot write {output}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Force what a file or directory holds to the disk."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _write_lines(file: BinaryIO, found: Contents, batches: Iterator[list[Item]]) -> None:
    from qflow.cli.portable.items import line_of

    for declared in found.declared:
        file.write(line_of(declared).encode() + b"\n")
    for batch in batches:
        file.write(b"".join(line_of(one).encode() + b"\n" for one in batch))
