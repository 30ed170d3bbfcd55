"""What a client says of a local server, in a URL; the one that starts the server decides."""

from __future__ import annotations

import os
from urllib.parse import parse_qsl, unquote

import attrs

from qflow.config import parse_size, parse_span
from qflow.errors import InvalidArgument

SCHEME = "qflow"
_FORM = "the URL of a spool is qflow:///absolute/path or qflow://./relative/path"


@attrs.frozen
class LocalSettings:
    """A spool, and how it is served.

    Args:
        spool: its absolute path.
        capacity_bytes: memory for messages; None = what `qflow.open` takes.
        idle_s: seconds after which a server that nobody is connected to ends.
    """

    spool: str
    capacity_bytes: int | None = None
    idle_s: float = 5.0

    @classmethod
    def parse(cls, url: str) -> LocalSettings:
        """Return what `qflow:///path/spool?capacity=256MiB&idle_s=60` says; `%XX` is a byte. Raises InvalidArgument."""
        scheme, _, rest = url.partition("://")
        quoted, _, query = rest.partition("?")
        if scheme != SCHEME or quoted.partition("/")[0] not in {"", ".", ".."}:
            raise InvalidArgument(f"{_FORM}, not {url!r}")
        path = unquote(quoted, errors="surrogateescape")
        if not path.strip("/") or "\0" in path:
            raise InvalidArgument(f"{_FORM}, not {url!r}")
        settings = cls(os.path.abspath(path))
        for name, value in parse_qsl(query, keep_blank_values=True):
            settings = _with(settings, name, value)
        return settings


def _with(settings: LocalSettings, name: str, value: str) -> LocalSettings:
    if name == "capacity":
        return attrs.evolve(settings, capacity_bytes=parse_size(value, name))
    if name != "idle_s":
        raise InvalidArgument(f"the URL of a spool may have capacity and idle_s, not {name!r}")
    return attrs.evolve(settings, idle_s=parse_span(value, name))
