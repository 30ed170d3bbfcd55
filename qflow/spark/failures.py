"""What fails inside Spark, as one sentence and an error of ours: the sentence is in the middle of what Spark says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from qflow import errors
from qflow.errors import DiskFull, InvalidArgument, QflowError, StorageError

_OURS = re.compile(r"qflow\.errors\.(\w+): (.*)")
_CAUSE = re.compile(r"(?:Caused by: |: )?(?:[\w$]+\.)+([\w$]*(?:Exception|Error)): (.*)")
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
    said = _lines(str(error))
    lines = said + _lines(str(getattr(error, "_stackTrace", "")))  # where Java tells what caused it
    ours = [found for found in map(_OURS.search, lines) if found is not None]
    if ours:
        kind = getattr(errors, ours[-1][1], None)
        if not (isinstance(kind, type) and issubclass(kind, QflowError)) or kind is errors.GapError:
            kind = StorageError
        return kind(ours[-1][2])
    if any("No space left on device" in line for line in lines):
        return DiskFull("Spark failed: there is no space left on the disk; make room, and start it again")
    causes = [found for found in map(_CAUSE.match, lines) if found is not None]
    of_files = [found[2] for found in causes if found[1].endswith(_DISK)]
    if of_files:
        return StorageError(f"Spark failed: {of_files[-1]}")
    first = [*(line for line in said if not _WRAPPED.match(line)), type(error).__name__][0]
    return InvalidArgument(f"Spark failed: {first.removeprefix(': ')}")


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]
