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
    print(*{"inspect", "uuid", "cronsim", "qflow.remote.client.connecting"} & sys.modules.keys())
    struck(sys.argv[2])
"""
NAMED = """
print(*{"qflow.opening", "qflow.inspect", "qflow.streams.subscription"} & sys.modules.keys())
struck(sys.argv[2])
"""
AGAIN = """
import os
going = threading.Event()

class Held:
    def find_spec(self, name, path, target=None):
        if name == "qflow.handlers" and not going.is_set():  # qflow.importing is there in part
            os.kill(os.getpid(), signal.SIGUSR1)
            going.wait()

sys.meta_path.insert(0, Held())
try:
    qflow.open
except Struck:
    print()
strikes = profile

def profile(frame, event, function):
    if event == "c_call" and function.__name__ == "acquire":  # by now it waits for the other thread again
        going.set()
    strikes(frame, event, function)

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
    "qflow.connect",
]

NAMES = ["qflow.open", "qflow.inspect", "from qflow import Subscription"]
"""What a program asks the package for first."""


@pytest.mark.parametrize(
    ("rest", "work"),
    [*((OPENED, work) for work in WORK), *((NAMED, name) for name in NAMES), (AGAIN, "qflow.open")],
    ids=[*WORK, *NAMES, "qflow.open again"],
)
def test_a_handler_that_raises_leaves_no_import_behind(tmp_path: Path, rest: str, work: str) -> None:
    """CPython runs handlers between taking the lock of all imports and the `try` that gives it back.

    Whoever imports anything after that waits for good, in threads of the broker, too.
    """
    program = (PROGRAM + rest).replace("PATIENCE_S", str(PATIENCE_S))
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


def test_names_are_there_where_there_can_be_no_more_threads() -> None:
    script = (
        "import _thread; _thread.start_new_thread = _thread.allocate_lock().__exit__  # raises RuntimeError\n"
        "import qflow; print(qflow.NotFound.__name__)"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (said.stdout, said.stderr) == ("NotFound\n", "")
