"""Syncs what Spark's checkpoint says of a batch before the batch is in a log.

Spark writes its checkpoint without a sync. If a power cut lost batch N there and not in the log, Spark would plan
another batch N with more messages, and the log would take it for a repetition and store none of them.
"""

from __future__ import annotations

import os
from contextlib import suppress

from xxhash import xxh3_64_hexdigest

from qflow.errors import StorageError
from qflow.spark.places.parse import local_path
from qflow.storage.files import Files, read_whole, storage_error


def make_durable(location: str, batch: int, files: Files) -> str:
    """Sync the query's id and the plan of a batch in a checkpoint; return a digest of the plan.

    Args:
        location: of the checkpoint, as Spark was given it. One that is not on a disk of this host is left alone.

    Raises:
        StorageError: the sync failed, or the batch is not in the checkpoint.
    Cost: six syncs of small files; those synced before cost nothing.
    """
    path = local_path(location)
    if path is None:
        return ""
    offsets = os.path.join(path, "offsets")
    try:
        for directory, name in ((path, "metadata"), (offsets, str(batch))):
            files.sync_file(os.path.join(directory, name))
            with suppress(FileNotFoundError):  # Hadoop's checksum, if it writes one
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
