"""Spark's checkpoint on the disk: what it says of a batch is synced before the batch is in a log.

Spark writes its checkpoint without a sync. A log that knows batch N beside a checkpoint that forgot it, after a power
cut, would have Spark plan another N, with more in it, of which the log would take nothing.
"""

from __future__ import annotations

import os
from contextlib import suppress

from xxhash import xxh3_64_hexdigest

from qflow.errors import StorageError
from qflow.spark.options import local_path
from qflow.storage.files import Files, read_whole, storage_error


def make_durable(location: str, batch: int, files: Files) -> str:
    """Force to the disk which query this is, and what goes into a batch; return a digest of that.

    Args:
        location: of the checkpoint, as Spark was given it. One that is elsewhere is left to those who keep it.

    Raises:
        StorageError: that failed, or the batch is not in the checkpoint.
    Cost: six syncs of small files, of which those that were synced before cost nothing.
    """
    path = local_path(location)
    if path is None:
        return ""
    offsets = os.path.join(path, "offsets")
    try:
        for directory, name in ((path, "metadata"), (offsets, str(batch))):
            files.sync_file(os.path.join(directory, name))
            with suppress(FileNotFoundError):  # Hadoop's checksum, where it writes one
                files.sync_file(os.path.join(directory, f".{name}.crc"))
        for directory in (offsets, path, os.path.dirname(path)):
            files.sync_directory(directory)
        return xxh3_64_hexdigest(read_whole(files, os.path.join(offsets, str(batch))))
    except FileNotFoundError as error:
        raise StorageError(
            f"batch {batch} is not in the checkpoint at {path} ({error.filename} is missing), and is not stored for "
            "good before it is: let nobody remove a checkpoint that is in use"
        ) from error
    except OSError as error:
        raise storage_error(error, "sync the checkpoint", path) from error
