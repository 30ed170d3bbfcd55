"""Finds what a Python process of Spark is not told, by its Java: how many tasks run at once, by which master, and where
Spark was started."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

_SPARK = "org.apache.spark.deploy.SparkSubmit"
_MASTER, _DEFAULT = "spark.master", "spark.default.parallelism"
_ANCESTORS = 4
"""Parents that are looked at: Java starts Python processes itself, or by a daemon."""


def parallelism() -> int:
    """Return how many tasks run at once: `spark.default.parallelism`, or N of `local[N]`, else the processors.

    Cost: 50 µs.
    """
    return _tasks(_settings()) or len(os.sched_getaffinity(0))


def master() -> str | None:
    """Return the master that Spark's Java was started with, if its arguments say that. Cost: 50 µs."""
    return _settings().get(_MASTER)


def started_in() -> str:
    """Return the directory where Spark was started, which relative paths begin at; in no process of Spark, the current.

    With Spark Connect, the Python processes of a session run in a directory for its artifacts, and only its Java is
    where it was started. In other sessions, both are there. Cost: 50 µs.
    """
    if os.environ.get("SPARK_PYTHON_RUNTIME") == "PYTHON_WORKER":
        for pid, arguments in _ancestors():
            if os.path.basename(arguments[0]) == "java":
                try:
                    return os.readlink(f"/proc/{pid}/cwd")
                except OSError:  # it runs as another user
                    break
    return os.getcwd()


def _settings() -> dict[str, str]:
    """Return the settings of Spark that the arguments of its Java give."""
    for _, arguments in _ancestors():
        if _SPARK in arguments:
            return _read(arguments)
    return {}


def _ancestors() -> Iterator[tuple[int, list[str]]]:
    """Yield the ids and arguments of this process and its next parents."""
    pid = os.getpid()
    for _ in range(_ANCESTORS):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
            arguments = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
        except OSError:
            return
        yield pid, arguments
        pid = int(stat.rpartition(")")[2].split()[1])


def _tasks(said: Mapping[str, str]) -> int | None:
    """Return how many tasks these settings say that run at once; None if they do not."""
    default = said.get(_DEFAULT, "")
    if default.isdecimal() and int(default):
        return int(default)
    found = re.fullmatch(r"local(?:\[(\d+)(?:,\d+)?\])?", said.get(_MASTER, ""))
    return None if found is None else int(found[1] or 1)


def _read(arguments: Sequence[str]) -> dict[str, str]:
    said = {}
    for name, text in pairwise(arguments):
        if name == "--conf":
            key, _, value = text.partition("=")
            said[key] = value
        elif name == "--master":
            said[_MASTER] = text
    return said
