"""What time it is, in one place, so that tests may say so."""

from __future__ import annotations

import time


class Clock:
    """The clocks of this machine."""

    def now_ms(self) -> int:
        """Return the time of day, milliseconds since the epoch."""
        return int(time.time() * 1000)

    def monotonic(self) -> float:
        """Return seconds from some beginning; they do not jump."""
        return time.monotonic()
