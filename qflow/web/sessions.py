"""Who has logged in by the form, while the process lives: a cookie that no script can read, and a token for forms."""

from __future__ import annotations

import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

import attrs

IDLE_S = 1800.0
LONGEST_S = 12 * 3600.0
MOST = 1000
"""Sessions; the one that was used longest ago gives way."""


@attrs.define(eq=False)
class Session:
    """One login of a browser."""

    user_name: str
    password: str = attrs.field(repr=False)
    """The hash of the one that it began with, as the users file had it."""
    csrf: str
    began_s: float
    used_s: float
    notes: list[tuple[str, str]] = attrs.field(factory=list)
    """What the next page says first: kind and sentence."""

    def note(self, kind: str, sentence: str) -> None:
        """Have the next page say something; the last ten are kept."""
        self.notes = [*self.notes[-9:], (kind, sentence)]

    def matches(self, token: str) -> bool:
        """Tell whether a form is one of this session."""
        return hmac.compare_digest(self.csrf.encode(), token.encode(errors="replace"))


class Sessions:
    """Those of one door."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_key: OrderedDict[str, Session] = OrderedDict()

    def open(self, user_name: str, password: str) -> tuple[str, Session]:
        """Return the value of a new cookie, and the session."""
        now = self._clock()
        key, session = secrets.token_urlsafe(32), Session(user_name, password, secrets.token_urlsafe(32), now, now)
        self._by_key[key] = session
        while len(self._by_key) > MOST:
            self._by_key.popitem(last=False)
        return key, session

    def find(self, key: str) -> Session | None:
        """Return the session of a cookie; None if there is none, or it is over."""
        session = self._by_key.get(key)
        if session is None:
            return None
        now = self._clock()
        if now - session.used_s > IDLE_S or now - session.began_s > LONGEST_S:
            del self._by_key[key]
            return None
        session.used_s = now
        self._by_key.move_to_end(key)
        return session

    def close(self, key: str) -> None:
        """End a session; twice is fine."""
        self._by_key.pop(key, None)
