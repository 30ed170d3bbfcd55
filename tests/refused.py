"""Runs commands as a user whom the modes of files hold: `python tests/refused.py`, which also root is then.

Reads a list of lists of arguments from stdin as JSON, and writes a list of [exit code, stderr].
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

from click.testing import CliRunner

from qflow.cli.main import app

VERSION = 0x20080522
OVERRIDES = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Set(ctypes.Structure):
    _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]


def give_up_overrides() -> None:
    """Have modes hold for root, too, in this thread and those it starts."""
    libc, header, sets = ctypes.CDLL(None, use_errno=True), _Header(VERSION, 0), (_Set * 2)()
    assert libc.capget(ctypes.byref(header), sets) == 0, os.strerror(ctypes.get_errno())
    sets[0].effective &= ~OVERRIDES
    assert libc.capset(ctypes.byref(header), sets) == 0, os.strerror(ctypes.get_errno())


def main() -> None:
    commands = json.load(sys.stdin)
    give_up_overrides()
    answers = []
    for arguments in commands:
        done = CliRunner().invoke(app, arguments, input="")
        unforeseen = done.exception is not None and not isinstance(done.exception, SystemExit)
        answers.append([done.exit_code, repr(done.exception) if unforeseen else done.stderr])
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
