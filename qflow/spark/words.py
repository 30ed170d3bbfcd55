"""Errors as sentences: how what is raised in Spark's workers reaches the user."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from qflow.errors import QflowError


@contextmanager
def plainly() -> Iterator[None]:
    """Have an error of ours reach the user as its sentence, without the stack of the worker it was raised in."""
    try:
        yield
    except QflowError:
        if os.environ.get("SPARK_PYTHON_RUNTIME") == "PYTHON_WORKER":
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"  # Spark looks at it next, and ends the worker
        raise
