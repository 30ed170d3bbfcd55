"""Who is let in: bearers of a token. The tokens are in a file, which may be read again at any time.

A line of the file is a token, 16 characters or more without spaces, and perhaps the moment at which it ends:

    # of the cluster
    3f2a0c8e51d94b7f9a6b1c2d 2030-01-01T00:00:00Z
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.flight as pf

from qflow.errors import InvalidArgument

LEAST_CHARACTERS = 16
NAME = "access"
"""Under which a call finds its bearer."""

Tokens = Mapping[bytes, float]
"""When tokens end, in seconds since the epoch, by their digests."""


def digest(token: str) -> bytes:
    """Return what a token is known by: comparing digests tells nothing of it by the time that takes."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def read_tokens(path: Path) -> Tokens:
    """Return the tokens of a file. Raises InvalidArgument: it is missing, empty or wrong; the text shows no token."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidArgument(f"the file of tokens {str(path)!r} cannot be read: {why}") from error
    found: dict[bytes, float] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words[0]) < LEAST_CHARACTERS or not words[0].isascii():
            raise InvalidArgument(
                f"line {number} of {str(path)!r}: a token has at least {LEAST_CHARACTERS} characters of ASCII: make "
                "one with `openssl rand -hex 24`"
            )
        found[digest(words[0])] = _end_of(words[1:], number, path)
    if not found:
        raise InvalidArgument(f"the file of tokens {str(path)!r} has none: write one on a line")
    return found


def _end_of(words: list[str], number: int, path: Path) -> float:
    if not words:
        return float("inf")
    try:
        moment = datetime.fromisoformat(*words)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"line {number} of {str(path)!r}: behind a token there may be the moment at which it ends, such as "
            "2030-01-01T00:00:00Z, and nothing else"
        ) from error
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


class Access:
    """The tokens that are good now. Thread-safe: they are replaced as a whole."""

    def __init__(self, tokens: Tokens | None, clock: Callable[[], float] = time.time) -> None:
        """`tokens`: None lets everybody in."""
        self.tokens = tokens
        self._clock = clock

    def check(self, bearer: bytes | None) -> None:
        """Check a token that was shown. Raises FlightUnauthenticatedError: it is missing, wrong, or has ended."""
        tokens = self.tokens
        if tokens is None:
            return
        if bearer is None:
            raise pf.FlightUnauthenticatedError(
                "this door needs a token, and the call has none: send it as `authorization: Bearer TOKEN`, by "
                "qflow.connect(url, token=...)"
            )
        end = tokens.get(bearer)
        if end is None or end <= self._clock():
            which = "is not one of this door, or not any more" if end is None else "has ended"
            raise pf.FlightUnauthenticatedError(f"the token of this call {which}: ask for another one")


class Bearer(pf.ServerMiddleware):  # type: ignore[misc]
    """Who makes a call."""

    def __init__(self, access: Access, bearer: bytes | None) -> None:
        self._access = access
        self._bearer = bearer

    def check(self) -> None:
        """Raises FlightUnauthenticatedError: the token has ended meanwhile."""
        self._access.check(self._bearer)


class Bearers(pf.ServerMiddlewareFactory):  # type: ignore[misc]
    """Looks at the token of each call before it begins."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def start_call(self, info: pf.CallInfo, headers: Mapping[str, list[Any]]) -> Bearer:
        """Called by gRPC."""
        said = [value for name, values in headers.items() if name.lower() == "authorization" for value in values]
        text = said[0] if said and isinstance(said[0], str) else ""
        kind, _, token = text.partition(" ")
        bearer = digest(token.strip()) if kind.lower() == "bearer" and token else None
        self._access.check(bearer)
        return Bearer(self._access, bearer)
