"""The token that a client shows, in a file: that of the broker will do, of lines as `flight.access` describes."""

from __future__ import annotations

from pathlib import Path

from qflow.errors import NotFound


def token_in(text: str) -> str | None:
    """Return the first token of a file; None if there is none."""
    lines = (line.split() for line in text.splitlines() if not line.lstrip().startswith("#"))
    return next((words[0] for words in lines if words), None)


def read_token(path: Path) -> str:
    """Return the first token of a file.

    Raises:
        NotFound: it cannot be read, or has none.
    """
    try:
        found = token_in(path.read_text("utf-8", errors="replace"))
    except OSError as error:
        raise NotFound(f"the file of the token {str(path)!r} cannot be read: {error.strerror}") from error
    if found is None:
        raise NotFound(f"the file of the token {str(path)!r} has none: write it on a line")
    return found
