"""Errors as sentences: what qflow raised in workers of Spark, and what Spark raised itself."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from qflow import errors
from qflow.errors import DiskFull, InvalidArgument, NotFound, QflowError, StorageError

LEAST_PYSPARK = (4, 2)
"""The first version with everything that streaming sources need."""
INSTALL = "pip install -U '.[spark]' in a clone of qflow"


class Away(StorageError):
    """A broker could not be reached for as long as a query waits. To the user it is a StorageError."""

    def __init__(self, text: str, *, is_silent: bool = False) -> None:
        super().__init__(text)
        self.is_silent = is_silent
        """It has said nothing since it was asked."""


class Ended(Away):
    """The token of a call has ended, and there is another one: it can be begun again."""


@contextmanager
def plainly() -> Iterator[None]:
    """Bring a `QflowError` to the user as its sentence, without the stack of the worker that raised it."""
    try:
        try:
            yield
        except Away as error:
            raise StorageError(str(error)) from None
    except QflowError:
        if os.environ.get("SPARK_PYTHON_RUNTIME") == "PYTHON_WORKER":
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"  # Spark reads it next, and ends the worker
        raise


def check_pyspark() -> None:
    """Check that PySpark is installed and new enough. Raises NotFound: it is not."""
    try:
        import pyspark
    except ImportError as error:
        raise NotFound(f"PySpark is not installed ({error}): {INSTALL}") from error
    if tuple(map(int, pyspark.__version__.split(".")[:2])) < LEAST_PYSPARK:
        least = ".".join(map(str, LEAST_PYSPARK))
        raise NotFound(f"PySpark is {pyspark.__version__}, format qflow needs {least} or newer: {INSTALL}")


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
