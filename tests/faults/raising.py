"""A handler of logging that raises."""

from __future__ import annotations

import logging


class Raising(logging.Handler):
    """Raises for each record, as many a handler does that sends lines elsewhere."""

    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__()
        self._kind = kind

    def emit(self, record: logging.LogRecord) -> None:
        raise self._kind("the handler")
