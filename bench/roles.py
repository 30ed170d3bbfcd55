"""What child processes do: `python -m bench.roles [--cgroup PATH] ROLE ARGUMENTS`; see `children`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from bench import (
    attribution,
    flight,
    looking,
    memory,
    memory_shapes,
    overhead,
    pressure,
    promises,
    reading,
    restart,
    scale,
    scale_holds,
    spark_flight,
    spark_writing,
    stream_memory,
    stream_retention,
)
from bench.children import CANNOT, joined_group, report
from bench.errors import CannotRun

THEMES = (
    *(memory, memory_shapes, overhead, restart, pressure, promises, attribution, reading, spark_writing, spark_flight),
    *(scale, scale_holds, stream_memory, stream_retention, flight, looking),
)


def main(arguments: list[str]) -> None:
    group = joined_group()
    if group is not None:
        group.join()
        arguments = arguments[2:]
    roles: dict[str, Callable[..., None]] = {}
    for theme in THEMES:
        roles.update(theme.ROLES)
    try:
        roles[arguments[0]](*arguments[1:])
    except (CannotRun, ImportError) as error:
        report({CANNOT: str(error)})


if __name__ == "__main__":
    main(sys.argv[1:])
