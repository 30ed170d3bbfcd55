"""Modules that a call is the first to need: a handler that raises leaves no lock of an import taken."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from qflow import importing
from unit.clocks import until

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

def struck(work):
    sys.setprofile(profile)
    try:
        exec(work)
    except Struck:  # it is done, or not done
        pass
    finally:
        sys.setprofile(None)
    thread = threading.Thread(target=lambda: __import__("colorsys"), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    print(thread.is_alive())

signal.signal(signal.SIGUSR1, strike)
"""
OPENED = """
with qflow.open(sys.argv[1]) as broker:
    queue = broker.declare_queue("q")
    print(*{"inspect", "uuid", "cronsim"} & sys.modules.keys())
    struck(sys.argv[2])
"""
PATIENCE_S = 10


WORK = [
    "queue.consume(print).stop()",
    "broker.on_event(print)",
    "broker.uuid",
    "broker.recovery",
    "broker.redrive('q')",
    "broker.schedule('nightly', 'q', b'x', cron='0 3 * * *')",
    "broker.schedule('nightly', 'q', b'x', cron='0 3 * * *', time_zone='Europe/Berlin')",
]


@pytest.mark.parametrize("work", WORK)
def test_a_handler_that_raises_leaves_no_import_behind(tmp_path: Path, work: str) -> None:
    """CPython runs handlers between taking the lock of all imports and the `try` that gives it back.

    Whoever imports anything after that waits for good, in threads of the broker, too.
    """
    program = (PROGRAM + OPENED).replace("PATIENCE_S", str(PATIENCE_S))
    command = [sys.executable, "-c", program, str(tmp_path / "spool"), work]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = child.stdout.readline(), child.stdout.readline()
        child.kill()
    assert said == ("\n", "False\n")


def test_a_handler_that_strikes_in_an_import_may_need_that_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that imports for the main thread waits for what that is about: it is not waited for for good."""
    monkeypatch.setattr(importing, "PATIENCE_S", 0.01)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "struck_module.py").write_text(
        "from qflow.importing import imported\nTOLD = 1\ntold = imported('struck_module').TOLD\n"
    )
    try:
        assert __import__("struck_module").told == 1
        until(lambda: "qflow-importing" not in {thread.name for thread in threading.enumerate()})
    finally:
        importing._found.pop("struck_module", None)
        sys.modules.pop("struck_module", None)


def test_what_a_handler_raises_meanwhile_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is what is raised if there can be no more threads."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_module.py").write_text(
        "import os, signal, threading\nstruck = threading.Event()\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\nstruck.wait()\n"
    )

    def strike(*_: object) -> None:
        sys.modules["slow_module"].struck.set()
        raise RuntimeError("struck")

    before = signal.signal(signal.SIGUSR1, strike)
    try:
        with pytest.raises(RuntimeError, match="struck"):
            importing.imported("slow_module")
        until(lambda: "slow_module" in importing._found)
    finally:
        signal.signal(signal.SIGUSR1, before)
        importing._found.pop("slow_module", None)
        sys.modules.pop("slow_module", None)
