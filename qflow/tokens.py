"""The token that a client shows, in a file: that of the broker will do, of lines as `flight.access` describes."""

from __future__ import annotations

import os
from pathlib import Path

from qflow.errors import InvalidArgument, NotFound


def token_in(text: str) -> str | None:
    """Return the first token of a file; None if there is none."""
    lines = (line.split() for line in text.splitlines() if not line.lstrip().startswith("#"))
    return next((words[0] for words in lines if words), None)


def check_token(token: object) -> str:
    """Return a token without white space around it. Raises InvalidArgument: it is none; the text does not show it."""
    if not isinstance(token, str):
        raise InvalidArgument(f"a token must be a text, not {type(token).__name__}")
    found = token.strip()
    if not all("!" <= character <= "~" for character in found):
        raise InvalidArgument(
            "the token has spaces, ends of lines or characters that are not ASCII, which no token has: give one as it "
            "stands in the file of tokens of the door, without what follows in its line"
        )
    return found


def token_of(token: str | None, file: str | os.PathLike[str] | None) -> str | None:
    """Return a token that is given, or the first of a file that is; None if neither is.

    Raises:
        InvalidArgument: both are. NotFound: the file cannot be read, or has none.
    """
    if file is None:
        return token
    if token is not None:
        raise InvalidArgument("token and token_file say the same in two ways: leave one of them out")
    try:
        found = token_in(Path(file).read_text("utf-8", errors="replace"))
    except OSError as error:
        raise NotFound(f"the file of the token {os.fspath(file)!r} cannot be read: {error.strerror}") from error
    if found is None:
        raise NotFound(f"the file of the token {os.fspath(file)!r} has none: write it on a line")
    return found


def headers_of(token: str | None) -> list[tuple[bytes, bytes]]:
    """Return what goes with each call of Arrow Flight. Raises InvalidArgument: the token is none."""
    return [] if token is None else [(b"authorization", b"Bearer " + check_token(token).encode())]
