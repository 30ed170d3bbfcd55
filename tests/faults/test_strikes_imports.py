"""Modules that a call is the first to need: a handler that raises leaves no lock of an import taken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import signal, sys, threading
import qflow

class Struck(Exception):
    pass

def strike(*_):
    raise Struck

def profile(frame, event, function):
    if event == "c_return" and function.__name__ == "acquire_lock":  # of all imports
        sys.setprofile(None)
        signal.raise_signal(signal.SIGUSR1)

signal.signal(signal.SIGUSR1, strike)
with qflow.open(sys.argv[1]) as broker:
    queue = broker.declare_queue("q")
    print(*{"inspect", "uuid"} & sys.modules.keys())
    sys.setprofile(profile)
    try:
        WORK
    except Struck:  # it is done, or not done
        pass
    finally:
        sys.setprofile(None)
    thread = threading.Thread(target=lambda: __import__("colorsys"), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    print(thread.is_alive())
"""
PATIENCE_S = 10


WORK = [
    "queue.consume(print).stop()",
    "broker.on_event(print)",
    "broker.uuid",
    "broker.recovery",
    "broker.redrive('q')",
]


@pytest.mark.parametrize("work", WORK)
def test_a_handler_that_raises_leaves_no_import_behind(tmp_path: Path, work: str) -> None:
    """CPython runs handlers between taking the lock of all imports and the `try` that gives it back.

    Whoever imports anything after that waits for good, in threads of the broker, too.
    """
    program = PROGRAM.replace("WORK", work).replace("PATIENCE_S", str(PATIENCE_S))
    command = [sys.executable, "-c", program, str(tmp_path / "spool")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = child.stdout.readline(), child.stdout.readline()
        child.kill()
    assert said == ("\n", "False\n")
