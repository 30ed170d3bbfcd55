"""What a task has sent to a door, kept until the door has stored it: a broker that is restarted has it no more."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from qflow.loggers import get_logger

if TYPE_CHECKING:
    import pyarrow as pa

MOST_HELD_BYTES = 16 * 2**20
"""That are kept in memory: of more, all is written to a file."""
_logger = get_logger("qflow.spark")


class Sent:
    """Record batches, in memory while they are few, else in a file without a name where Spark has its own: it ends with
    the task, however that ends. If the disk does not take it, nothing is kept.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.is_kept = True
        """All of it is there."""
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._files: list[Any] = []
        self._writer: Any = None

    def add(self, rows: pa.RecordBatch) -> None:
        """Keep rows. Cost: nothing, or 1.2 ms a MiB where there are many."""
        if not self.is_kept:
            return
        self._held.append(rows)
        self._held_bytes += rows.nbytes
        if self._writer is not None or self._held_bytes > MOST_HELD_BYTES:
            try:
                self._write()
            except OSError as error:
                self.close()
                _logger.warning("a task keeps no copy of its rows (%s): it fails if the broker goes away", error)

    def _write(self) -> None:
        import pyarrow as pa

        if self._writer is None:
            descriptor, path = tempfile.mkstemp(prefix="qflow-", dir=_directory())
            try:
                os.close(descriptor)
                self._files = [pa.OSFile(path, "wb"), pa.OSFile(path, "rb")]
            finally:
                os.unlink(path)
            self._writer = pa.ipc.new_stream(self._files[0], self.schema)
        while self._held:
            self._writer.write_batch(self._held.pop(0))

    def batches(self) -> Iterable[pa.RecordBatch]:
        """Return all of it, in order."""
        import pyarrow as pa

        if self._writer is None:
            return self._held
        _, file = self._files
        file.seek(0)
        reader: Iterable[pa.RecordBatch] = pa.ipc.open_stream(file)
        return reader

    def close(self) -> None:
        """Keep it no longer."""
        self.is_kept = False
        self._held = []
        for file in self._files:
            file.close()


def _directory() -> str | None:
    """Return the first of Spark's directories for files that do not last; None: that of the system."""
    return os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or None
