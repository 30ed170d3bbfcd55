"""Exit codes: what each means, and which error gives which."""

from __future__ import annotations

import enum

from qflow.errors import (
    BrokerClosed,
    CorruptionError,
    PermissionDenied,
    QflowError,
    QueueFull,
    SpoolInUse,
    StorageError,
)


class Exit(enum.IntEnum):
    """The exit codes."""

    FINE = 0
    DIFFERS = 1
    USAGE = 2
    IN_USE = 3
    STORAGE = 4
    COMMAND = 5
    URGENT = 6


EXIT_CODES = """\b
Exit codes:
  0  fine
  1  something is not as it should be: messages are lost to damage, or all that
     the spool holds was looked at, and something is damaged; `qflow grep` found
     nothing; `qflow diff` found a difference; a message to delete does not wait;
     the demo's result differs; or you said no
  2  bad usage or bad input: no spool, or one that you may not read, an unknown
     option, queue or file, a line too long
  3  another process owns the spool, or writes the archive of `qflow pipeline run`
  4  the disk or the queue takes no more, or cannot be read; the owner of the
     spool has ended meanwhile
  5  the command of `qflow pipe` was given up; its lines are in the queue
  6  `qflow doctor` found something urgent; with less than that it ends with 1
  128+n  ended by signal n: 130 for Ctrl-C, 141 when the reader of stdout is gone
"""


def exit_code(error: QflowError | OSError) -> Exit:
    """Return the exit code for an error."""
    match error:
        case SpoolInUse():
            return Exit.IN_USE
        case CorruptionError():
            return Exit.DIFFERS
        case PermissionDenied() | PermissionError():
            return Exit.USAGE
        case StorageError() | QueueFull() | BrokerClosed() | OSError():
            return Exit.STORAGE
        case _:
            return Exit.USAGE
