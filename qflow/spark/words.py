"""Errors as sentences: how what is raised in Spark's workers reaches the user."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from qflow.errors import NotFound, QflowError

LEAST_PYSPARK = (4, 2)
"""What has all of the interface that sources of streams need."""
INSTALL = "pip install -U '.[spark]' in a clone of qflow"


@contextmanager
def plainly() -> Iterator[None]:
    """Have an error of ours reach the user as its sentence, without the stack of the worker it was raised in."""
    try:
        yield
    except QflowError:
        if os.environ.get("SPARK_PYTHON_RUNTIME") == "PYTHON_WORKER":
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"  # Spark looks at it next, and ends the worker
        raise


def check_pyspark() -> None:
    """See that there is a PySpark, and one that is new enough.

    Raises:
        NotFound: there is none.
    """
    try:
        import pyspark
    except ImportError as error:
        raise NotFound(f"PySpark is not installed ({error}): {INSTALL}") from error
    if tuple(map(int, pyspark.__version__.split(".")[:2])) < LEAST_PYSPARK:
        least = ".".join(map(str, LEAST_PYSPARK))
        raise NotFound(f"PySpark is {pyspark.__version__}, format qflow needs {least} or newer: {INSTALL}")
