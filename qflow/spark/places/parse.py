"""The options that say where a query reads or writes: `path`, and for brokers elsewhere how to reach them."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import unquote

from qflow.errors import InvalidArgument
from qflow.spark.parallelism import master, started_in
from qflow.spark.places.local import LocalPlace
from qflow.spark.places.place import Place

SAME = "sameOnEveryHost"
OF_PLACES = ("path", "token", "tokenFile", "ca", "brokerTimeout", SAME)
_URL = re.compile(r"grpc(\+tls|\+tcp)?://.+", re.IGNORECASE)
"""What is meant as a URL; `check_url` looks at it."""
_BEGINS = re.compile(r"\s*(grpc(\+tls|\+tcp)?://|file:|/)", re.IGNORECASE)
"""A URL, or an absolute path."""
BROKER_TIMEOUT_S = 60.0


_A_VIEW = (
    "a table cannot be made of a spool, for Spark gives none of its options to a source in Python: use CREATE "
    "TEMPORARY VIEW ... USING qflow OPTIONS (...)"
)


def parse_known(
    options: Mapping[str, str],
    names: Sequence[str],
    ignored: re.Pattern[str],
    what: str,
    instead: Mapping[str, str] = {},
) -> dict[str, str]:
    """Return the options that have one of these names, whatever letters of it are large.

    Args:
        what: what the options are for.
        ignored: matches options without a meaning here, in small letters.
        instead: what to do in place of some options that there are not.

    Raises:
        InvalidArgument: there is no such option; or Spark makes or uses a table with them.
    """
    given = {name.lower(): value for name, value in options.items()}
    if "provider" in given:
        raise InvalidArgument(_A_VIEW)
    if not given:
        raise InvalidArgument(f"no option is given, not even 'path'; if a table is read or written, {_A_VIEW}")
    known = {name.lower(): name for name in names}
    for name in given:
        if name in instead:
            raise InvalidArgument(f"format qflow has no option {name!r}: {instead[name]}")
        if name not in known and not ignored.fullmatch(name):
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {known[close[0]]!r}?" if close else f"there are: {', '.join(names)}"
            raise InvalidArgument(f"format qflow has no option {name!r} for {what}; {hint}")
    return {known[name]: value for name, value in given.items() if name in known}


def parse_places(values: Mapping[str, str]) -> tuple[Place, ...]:
    """Return the places that options name. Raises InvalidArgument: there is none, or one makes no sense."""
    given = values.get("path", "").strip()
    if not given:
        raise InvalidArgument(
            "say where the spool is: .load('/path/to/spool') or .option('path', '/path/to/spool'); that of a broker on "
            "another host by its URL, grpc+tls://HOST:PORT"
        )
    places = tuple(_place(text, values) for text in _named(given))
    names = [place.where for place in places]
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgument(f"option 'path' names {name} twice: name each place once")
    return places


def _named(given: str) -> list[str]:
    """Return what is named, with commas between; there may be one in the name of a directory, too."""
    if _is_there(given):
        return [given]
    texts: list[str] = []
    for part in given.split(","):
        joined = ",".join([*texts[-1:], part])
        begins = _is_there(part.strip()) and not _is_there(joined.strip())
        if not texts or begins or _BEGINS.match(part) or _URL.fullmatch(texts[-1].strip()):
            texts.append(part)
        else:
            texts[-1] = joined
    return list(filter(None, map(str.strip, texts)))


def _is_there(text: str) -> bool:
    return text != "" and os.path.isdir(_absolute(text))


def _place(text: str, values: Mapping[str, str]) -> Place:
    if _URL.fullmatch(text):
        from qflow.spark.places.flight import FlightPlace  # needs the extra `net`

        return FlightPlace.of(
            text,
            token=values.get("token"),
            token_file=_file(values, "tokenFile"),
            ca=_file(values, "ca"),
            patience_s=parse_seconds(values, "brokerTimeout", BROKER_TIMEOUT_S),
        )
    path = local_path(text)
    if path is None:
        raise InvalidArgument(
            f"{text}: a spool lies on a local disk and cannot be read through {text.partition(':')[0]!r}: give the "
            "path of its directory on the host where Spark runs, or the URL of its broker, grpc+tls://HOST:PORT"
        )
    if text.lower().startswith("file:") and not os.path.exists(path):
        path = unquote(path)  # as `Path.as_uri` writes one with spaces
    return LocalPlace(path)


def where(places: Iterable[Place]) -> str:
    """Return the names of places, for errors."""
    return ", ".join(place.where for place in places)


def local_path(location: str) -> str | None:
    """Return the absolute path of a path or URI; None if it is not on a disk of this host."""
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", location)
    if scheme is None:
        return _absolute(location)
    return _absolute("/" + location[scheme.end() :].lstrip("/")) if scheme[1].lower() == "file" else None


def _absolute(path: str) -> str:
    """Return a path that does not depend on where the process is."""
    return os.path.normpath(path if os.path.isabs(path) else os.path.join(started_in(), path))


def _file(values: Mapping[str, str], name: str) -> str | None:
    """Return the absolute path that an option names; a task that reads the file runs in another directory."""
    return _absolute(values[name]) if values.get(name) else values.get(name)


def parse_flag(values: Mapping[str, str], name: str, *, default: bool) -> bool:
    """Return the value of an option that is true or false."""
    text = values.get(name, str(default)).strip().lower()
    if text not in ("true", "false"):
        raise InvalidArgument(f"option {name!r} is {values[name]!r}: give true or false")
    return text == "true"


def parse_seconds(values: Mapping[str, str], name: str, default: float) -> float:
    """Return the value of an option that is a time, such as 60 or 60s."""
    if name not in values:
        return default
    text = values[name]
    try:
        seconds = float(text.strip().removesuffix("s"))
    except ValueError:
        seconds = -1.0
    if seconds <= 0 or not math.isfinite(seconds):
        raise InvalidArgument(f"option {name!r} is {text!r}: give seconds, such as 60 or 60s")
    return seconds


_HERE = re.compile(r"local(-cluster)?(\[.*\])?")


def check_hosts(places: Iterable[Place], *, same: bool) -> None:
    """Check that every task will see the spools that are given as paths. Cost: 50 us.

    A task that cannot see a spool would fail, be repeated elsewhere, and perhaps find it: the result would be luck.

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
