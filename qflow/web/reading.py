"""A process of its own that reads the first messages of a queue: the log is open in that of the broker.

`python -m qflow.web.reading SPOOL QUEUE MOST` writes a JSON object: `messages`, or `error` and its `kind`.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from typing import Any

from qflow.errors import NotFound, QflowError, StorageError

KEPT_BYTES = 64 * 1024
"""Of a body."""
PATIENCE_S = 30.0


def first_messages(path: str, queue: str, most: int) -> list[dict[str, Any]]:
    """Return messages as `main` writes them. Blocks.

    Raises:
        NotFound: no such queue in the log. StorageError: it could not be read.
    Cost: 0.3 s of a processor, most of it the start of Python.
    """
    command = [sys.executable, "-m", "qflow.web.reading", path, queue, str(most)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        said = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S, check=False
        )
        found = json.loads(said.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise StorageError(f"the messages of queue {queue!r} could not be read: {error}") from error
    if "error" in found:
        raise (NotFound if found["kind"] == "NotFound" else StorageError)(found["error"])
    messages: list[dict[str, Any]] = found["messages"]
    return messages


def main(path: str, queue: str, most: int) -> dict[str, Any]:
    """Return what is written."""
    from qflow import inspect
    from qflow.web.text import plain

    try:
        found = inspect.read_waiting(path, queue, most)
    except QflowError as error:
        return {"error": str(error), "kind": type(error).__name__}
    return {
        "messages": [
            {
                "sequence": one.sequence,
                "size_bytes": len(one.body),
                "body": base64.b64encode(one.body[:KEPT_BYTES]).decode(),
                "headers": {key: plain(value) for key, value in one.headers.items()},
                "time_ms": one.time_ms,
            }
            for one in found
        ]
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
