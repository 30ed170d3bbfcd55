"""What fails inside Spark, as one sentence and an error of ours: the sentence is in the middle of what Spark says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from qflow import errors
from qflow.errors import DiskFull, InvalidArgument, QflowError, StorageError

_OURS = re.compile(r"qflow\.errors\.(\w+): (.*)")
_CAUSE = re.compile(r"(?:Caused by: )?(?:[\w$]+\.)+([\w$]*(?:Exception|Error)): (.*)")
_DISK = ("IOException", "FileNotFoundException", "FileSystemException", "AccessDeniedException", "FSError")
"""What Java says of files, in classes whose names end so."""
_WRAPPED = re.compile(r"An error occurred while calling \w+\.|Traceback \(most recent call last\):")


@contextmanager
def spark_errors() -> Iterator[None]:
    """Raise an error of ours in place of Spark's."""
    try:
        yield
    except (QflowError, OSError):
        raise
    except Exception as error:
        raise plain(error) from error


def plain(error: Exception) -> QflowError:
    """Return an error of ours in place of one of Spark's.

    Returns:
        what was raised on our side, in a worker; or a `StorageError` for a file that Java could not use; or
        `InvalidArgument` with the first thing that Spark says.
    """
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [found for found in map(_OURS.search, lines) if found is not None]
    if ours:
        kind = getattr(errors, ours[-1][1], None)
        if not (isinstance(kind, type) and issubclass(kind, QflowError)) or kind is errors.GapError:
            kind = StorageError
        return kind(ours[-1][2])
    causes = [found for found in map(_CAUSE.match, lines) if found is not None]
    if "No space left on device" in text:
        return DiskFull("Spark failed: there is no space left on the disk; make room, and start it again")
    if causes and causes[-1][1].endswith(_DISK):
        return StorageError(f"Spark failed: {causes[-1][2]}")
    said = [line for line in lines if not _WRAPPED.match(line)]
    first = causes[-1][2] if causes and causes[-1][2] else said[0] if said else type(error).__name__
    return InvalidArgument(f"Spark failed: {first}")
