"""Turns errors of Spark into a `QflowError` with one sentence, which is found within Spark's message."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from qflow import errors
from qflow.errors import DiskFull, InvalidArgument, QflowError, StorageError

_OURS = re.compile(r"qflow\.errors\.(\w+): (.*)")
_CAUSE = re.compile(r"(?:Caused by: |: )?(?:[\w$]+\.)+([\w$]*(?:Exception|Error)): (.*)")
_DISK = ("IOException", "FileNotFoundException", "FileSystemException", "AccessDeniedException", "FSError")
"""Endings of the names of Java's exceptions about files."""
_WRAPPED = re.compile(r"An error occurred while calling \w+\.|Traceback \(most recent call last\):")


@contextmanager
def spark_errors() -> Iterator[None]:
    """Raise a `QflowError` in place of an error of Spark."""
    try:
        yield
    except (QflowError, OSError):
        raise
    except Exception as error:
        raise plain(error) from error


def plain(error: Exception) -> QflowError:
    """Return a `QflowError` for an error of Spark.

    Returns:
        The error that qflow raised in a worker; or a `StorageError` for a file that Java could not use; or
        `InvalidArgument` with the first line of Spark's message.
    """
    said = _lines(str(error))
    lines = said + _lines(str(getattr(error, "_stackTrace", "")))  # Java's stack, which names the cause
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
