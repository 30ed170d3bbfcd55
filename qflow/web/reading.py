"""A process of its own that reads the log: it is open in that of the broker, and LMDB opens a file once in a process.

`python -P -m qflow.web.reading` reads `["SPOOL", "QUEUE", "MOST"]` as JSON from stdin, for an argument cannot have all
that a name may have. It writes a JSON object with the first `messages` of the queue, and where that is not given one
with the `health` of the log; or `error` and its `kind`.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from typing import Any

import attrs

from qflow import __version__, children
from qflow.amqp import letters
from qflow.errors import NotFound, QflowError, StorageError
from qflow.inspect import Health, LettersFacts, MessageFacts

KEPT_BYTES = 64 * 1024
"""Of a body."""
MOST_BYTES = 64 * 2**20
"""Of bodies; what comes behind so much is not read."""
MOST_KEPT_BYTES = 16 * 2**20
"""Of what is kept of them, with their headers; likewise."""
PATIENCE_S = 30.0
_MOST_TOLD = 300
"""Characters of what a process says that has failed."""


def first_messages(path: str, queue: str, most: int) -> list[dict[str, Any]]:
    """Return messages as `_messages` writes them. Blocks.

    Raises:
        NotFound: no such queue in the log. StorageError: it could not be read.
    Cost: 0.3 s of a processor, most of it the start of Python.
    """
    try:
        found: list[dict[str, Any]] = _told(path, queue, str(most))["messages"]
    except NotFound as error:
        if repr(queue) not in str(error):  # the spool itself
            raise
        raise NotFound(f"queue {queue!r} was deleted meanwhile") from error  # others are not for whoever asks
    return found


def health(path: str) -> Health:
    """Return how the log is. Blocks.

    Raises:
        StorageError: it could not be read.
    Cost: as `first_messages`; it reads a row for each lane, and some hundred dead letters.
    """
    found = _told(path)["health"]
    try:
        dead = [LettersFacts(**one | {"reasons": tuple(map(tuple, one["reasons"]))}) for one in found["letters"]]
        return Health(**found | {"letters": dead, "readers": [(pid, ago) for pid, ago in found["readers"]]})
    except (TypeError, KeyError) as error:  # the process has the package as it is now
        text = f"the log of {path} was read by another version of qflow than {__version__}: restart this process"
        raise StorageError(text) from error


def _told(*arguments: str) -> dict[str, Any]:
    """Return what the process says of a spool."""
    try:
        said = subprocess.run(
            children.command("qflow.web.reading"), env=children.environment(), input=json.dumps(arguments).encode(),
            capture_output=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise StorageError(f"the log of {arguments[0]} could not be read: {error}") from error
    try:
        found: dict[str, Any] = json.loads(said.stdout)
    except ValueError as error:
        raise StorageError(f"the log of {arguments[0]} could not be read: {_last_words(said)}") from error
    if "error" in found:
        raise (NotFound if found["kind"] == "NotFound" else StorageError)(found["error"])
    return found


def _last_words(said: subprocess.CompletedProcess[bytes]) -> str:
    """Return what a process that has failed said last, shortened."""
    lines = said.stderr[-10 * _MOST_TOLD :].decode(errors="replace").strip().splitlines()
    return lines[-1][:_MOST_TOLD] if lines else f"the process that reads it ended with {said.returncode}"


def main(path: str, queue: str | None = None, most: str = "0") -> dict[str, Any]:
    """Return what is written."""
    from qflow import inspect

    try:
        if queue is not None:
            return {"messages": _messages(path, queue, int(most))}
        return {"health": attrs.asdict(inspect.read_health(path, legible=letters.headers_of))}
    except QflowError as error:
        return {"error": str(error), "kind": type(error).__name__}


def _messages(path: str, queue: str, most: int) -> list[dict[str, Any]]:
    from qflow import inspect
    from qflow.web.text import plain

    found: list[MessageFacts] = []
    positions: dict[int, int] | None = None
    while (
        len(found) < most
        and sum(one.size_bytes for one in found) < MOST_BYTES
        and sum(map(_kept_bytes, found)) < MOST_KEPT_BYTES
    ):
        page = inspect.read_page(path, queue, positions, most=most - len(found), body_bytes=KEPT_BYTES)
        found += page.messages
        positions = page.positions
        if not page.more:
            break
    return [
        {
            "sequence": one.sequence,
            "size_bytes": one.size_bytes,
            "body": base64.b64encode(one.body).decode(),
            "headers": {key: plain(value) for key, value in one.headers.items()},
            "time_ms": one.time_ms,
        }
        for one in found
    ]


def _kept_bytes(one: MessageFacts) -> int:
    return len(one.body) + sum(len(name) + len(str(value)) for name, value in one.headers.items())


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*json.load(sys.stdin))))
