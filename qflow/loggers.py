"""The loggers of this package: what a handler of the program raises never reaches the code that logs.

Handlers, filters and record factories are the program's, and run wherever something is logged: in threads that must
not end, and in the middle of work that has not failed. What they raise is shown as `logging` shows what a handler has
caught itself: on stderr, with the message, unless `logging.raiseExceptions` is False.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import Any

_shows = logging.NullHandler()
"""For its `handleError`, which is the same for all."""


class Logger(logging.LoggerAdapter[logging.Logger]):
    """A logger of Python whose methods raise nothing.

    But in the main thread what is no `Exception`: there it may be an interrupt, or that of a signal handler.
    """

    def log(self, level: int, msg: object, *args: object, **named: Any) -> None:
        """Write a message to the log. All other methods call this. `spool=`, `event=`: attributes of its record."""
        try:
            if self.logger.isEnabledFor(level):
                about = {name: named.pop(name) for name in ("spool", "event") if name in named}
                if about:
                    named["extra"] = about
                named["stacklevel"] = named.get("stacklevel", 1) + 1  # the caller is the one above this
                self.logger.log(level, msg, *args, **named)
        except BaseException as error:
            if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                raise
            with suppress(Exception):  # where stderr does not take it, nothing else is left
                _shows.handleError(logging.LogRecord(self.name, level, __file__, 0, msg, args, None))


def get_logger(name: str) -> Logger:
    """Return the logger of a name, as `logging.getLogger` does."""
    return Logger(logging.getLogger(name), None)
