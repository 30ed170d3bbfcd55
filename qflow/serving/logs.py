"""Records of Python's logging on one line each: for people, or as JSON for programs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


class OneLine(logging.Formatter):
    """Puts a record on one line, unless it has a traceback: what comes from a client may have line ends."""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(super().format(record).split()) if record.exc_info is None else super().format(record)


class JsonLines(logging.Formatter):
    """Makes a JSON object of a record, on one line.

    It has `time` (UTC), `level`, `logger`, `message`, the fields of the record's `extra`, such as `spool`, `queue` and
    `event`, and `exception`, the traceback, if there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        told |= {name: value for name, value in vars(record).items() if name not in _STANDARD and name not in told}
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


FORMATTERS: dict[str, Callable[[], logging.Formatter]] = {
    "text": lambda: OneLine("qflow: %(message)s"),
    "json": JsonLines,
}
"""By the names that `--log-format` takes."""
