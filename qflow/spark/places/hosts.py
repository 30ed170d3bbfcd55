"""Whether tasks run on the host whose directories the driver sees: where they may not, a path is refused.

A task that cannot see a spool would fail, be repeated elsewhere, and perhaps find it: the result would be luck.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from qflow.errors import InvalidArgument
from qflow.spark.parallelism import master
from qflow.spark.places.local import LocalPlace
from qflow.spark.places.place import Place

_HERE = re.compile(r"local(-cluster)?(\[.*\])?")


def check_hosts(places: Iterable[Place], *, same: bool) -> None:
    """Check that every task will see the spools that are given as paths. Cost: 50 us.

    Args:
        same: the user says that each path is the same spool on every host.

    Raises:
        InvalidArgument: tasks may run on other hosts.
    """
    paths = [place.where for place in places if isinstance(place, LocalPlace)]
    if same or not paths:
        return
    given = master()
    if given is not None and not _HERE.fullmatch(given):
        raise InvalidArgument(
            f"Spark runs tasks by {given}, on hosts that may not see the spool at {paths[0]}: serve it with `qflow "
            f"serve {paths[0]} --flight HOST:PORT`, and give grpc+tls://HOST:PORT as the path. (If that path is the "
            "same spool, or a copy of one snapshot, on every host, set option sameOnEveryHost to true)"
        )
