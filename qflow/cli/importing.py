"""`qflow import`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from qflow.cli import facts, options
from qflow.cli.exits import Exit
from qflow.cli.lines import waiting
from qflow.cli.progress import counting
from qflow.cli.spool import AnyBroker, largest_message, reached
from qflow.cli.standard import stdin_bytes
from qflow.cli.stop import Stop, Stopped
from qflow.errors import InvalidArgument, MessageTooLarge, QflowError

if TYPE_CHECKING:
    from qflow.cli.portable.items import Declared
    from qflow.restoring import Item


@click.command("import")
@options.new_or_old_spool
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path), default="-")
@click.option("--to", metavar="NAME", help="Into this queue or stream instead of those that the file names.")
@click.option("--skip", type=click.IntRange(min=0), default=0, help="Leave out so many messages: those there already.")
@options.capacity
@options.as_json
def import_(spool: Path, file: Path, to: str | None, skip: int, capacity: int, as_json: bool) -> int | None:
    """Put the messages of FILE, or of stdin, into SPOOL as they were.

    Bodies, headers, priorities, times to expire and to be due, topics, keys and partitions are the same; sequences,
    offsets and times of putting are new. What has expired meanwhile is left out.

    While another process owns the spool, that one puts them; a spool that is missing is made. Queues and streams that
    are missing are declared as they were.

    Messages are put in batches, each all or not at all. However it ends, it prints how many are done: after an
    interrupt or a bad line, go on with --skip.

    \b
        qflow import SPOOL all.jsonl
        qflow import SPOOL jobs.parquet --to jobs.again
        qflow import SPOOL all.jsonl --skip 12500
    """
    from qflow.cli.portable import parquet

    if _is_parquet(file):
        parquet.check_installed()  # before a spool is made for it, and anything is told as done
    run = _Run(to=to, done=0, left_out=0)
    total = file.stat().st_size if _is_regular(file) else None
    with Stop() as stop:
        try:
            with counting("importing", total) as advance, reached(spool, capacity) as broker:
                source = _Source(file, advance, largest_message(broker), stop)
                run.run(broker, source, skip, stop)
        except Stopped:
            return stop.exit_code
        finally:
            run.print(skip, as_json)
    return Exit.FINE


def _is_regular(file: Path) -> bool:
    """Tell whether it is a file, and no pipe; `-` is stdin."""
    return str(file) != "-" and file.is_file()


def _is_parquet(file: Path) -> bool:
    from qflow.cli.portable import parquet

    if not _is_regular(file):
        return False
    with file.open("rb") as opened:
        return opened.read(4) == parquet.MAGIC


_ESCAPED, _BESIDE_BYTES = 6, 2**20
"""In a line of JSON a byte of a message takes six, at most: `\\u0001`. Beside it are names and a topic."""


@attrs.define
class _Source:
    """What a file holds, and where in it one is."""

    file: Path
    advance: Callable[[int], None]
    largest: int
    """How many bytes a message may have, which bounds a line."""
    stop: Stop
    where: str = ""

    def __iter__(self) -> Iterator[Declared | Item]:
        from qflow.cli.portable import parquet
        from qflow.cli.portable.items import Declared, parsed

        # A pipe is opened once: what is read of it is gone, and nobody may write into it again.
        if _is_parquet(self.file):
            rows = 0
            for one in parquet.read(self.file):
                rows += not isinstance(one, Declared)  # declarations are no rows
                self.where = f"row {rows:,} of {facts.readable(str(self.file))}"
                yield one
            return
        with stdin_bytes() if str(self.file) == "-" else self.file.open("rb") as opened:
            lines = waiting(opened, self.stop)
            for number in count(1):
                most = _ESCAPED * self.largest + _BESIDE_BYTES
                line = lines.readline(most + 1)
                if not line:
                    return
                self.where = f"line {number:,} of {facts.readable(str(self.file))}"
                if number == 1 and line.startswith(parquet.MAGIC):
                    raise InvalidArgument(
                        "Parquet is read from a file, and not from a pipe or stdin: write it to a file first"
                    )
                if len(line) > most:
                    raise MessageTooLarge(
                        f"it is longer than {most:,} bytes, the most that a message may take here as JSON; was it "
                        "written by qflow export?"
                    )
                self.advance(len(line))
                if line.strip():
                    yield parsed(line)


@attrs.define
class _Run:
    to: str | None
    done: int
    """Messages that are put, or left out for good."""
    left_out: int

    def run(self, broker: AnyBroker, source: _Source, skip: int, stop: Stop) -> None:
        """Put all; an error says at which line it was."""
        from qflow.cli.portable import restoring

        try:
            items = self._messages(broker, source)
            for _ in islice(items, skip):
                pass
            for batch in restoring.batches(items, lambda: source.where):
                stop.check()
                try:
                    self.left_out += restoring.put(broker, batch)
                except restoring.Refused as refused:
                    source.where = batch.places[refused.index]
                    raise refused.why from refused
                self.done += len(batch.items)
        except QflowError as error:
            error.args = (f"{source.where or 'the file'}: {error}",)
            raise

    def _messages(self, broker: AnyBroker, source: _Source) -> Iterator[Item]:
        from qflow.cli.portable import restoring
        from qflow.cli.portable.items import Declared

        names: dict[tuple[str, str], None] = {}
        there = restoring.names(broker)
        for found in source:
            one = found
            if self.to is not None:
                names[one.kind, one.name] = None
                if len(names) > 1:
                    raise InvalidArgument("--to is for a file with one queue or one stream; this is another one")
                one = attrs.evolve(one, name=self.to)
            if isinstance(one, Declared):
                source.largest = max(source.largest, restoring.declare(broker, one, there))
            else:
                yield one

    def print(self, skip: int, as_json: bool) -> None:
        """Print what was done."""
        if as_json:
            facts.print_json({"imported": self.done - self.left_out, "expired": self.left_out, "skipped": skip})
            return
        click.echo(f"messages imported: {self.done - self.left_out:,}")
        if self.left_out:
            click.echo(f"left out, because they have expired: {self.left_out:,}")
        if skip:
            click.echo(f"skipped: {skip:,}")
