"""Errors as sentences: brings an error raised in Spark's workers to the user."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from qflow.errors import NotFound, QflowError, StorageError

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
