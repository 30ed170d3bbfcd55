"""Files of a batch in the inbox of a spool on this host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from qflow.arrow.takers import Takers
from qflow.spark.places.place import Staging, Written
from qflow.spark.spools import reading
from qflow.storage.files import Files, storage_error
from qflow.storage.inbox import stages
from qflow.storage.inbox.stage_files import StageWriter
from qflow.storage.log import recovery

if TYPE_CHECKING:
    import pyarrow as pa

    from qflow.arrow.outgoing import Outgoing


class LocalStage:
    """One file that a task writes; see `Stage`. The file is made with the first rows."""

    def __init__(self, spool: str, asked: Staging) -> None:
        with reading(spool, asked.uuid) as txn:
            found = recovery.read(txn, spool)
        self._takers = Takers(found, spool, asked.stream)
        self._asked = asked
        self._spool = spool
        self._directory = stages.staged(spool, asked.batch, asked.token)
        self._outgoing: Outgoing | None = None
        self._writer: StageWriter | None = None

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows."""
        with as_sentences(self._directory):
            if self._outgoing is None or self._writer is None:
                from qflow.arrow.outgoing import Outgoing

                columns = {name: number for number, name in enumerate(rows.schema.names)}
                self._outgoing = Outgoing(columns, self._asked.topic, self._takers)
                if self._asked.replaces:
                    stages.remove_earlier(Files(), self._spool, self._asked.batch, self._asked.token)
                self._writer = StageWriter(Files(), self._directory, self._asked.name)
            self._outgoing.add(rows, self._writer)

    def finish(self) -> Written:
        """Have them on the disk. One sync."""
        with as_sentences(self._directory):
            file = None if self._writer is None else self._writer.finish()
        return Written(file, frozenset(self._takers.found))

    def discard(self) -> None:
        """Remove what was written, as far as that can be done."""
        if self._writer is not None:
            self._writer.discard()


@contextmanager
def as_sentences(directory: str) -> Iterator[None]:
    """Raise StorageError in place of OSError."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, "write a batch", directory) from error
