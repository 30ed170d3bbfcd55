"""Functions that workers call."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading

import qflow

ORPHAN_TRIES = 1000
"""So often it is looked whether an orphan is still there."""


def say(delivery: qflow.Delivery) -> None:
    """Print the process and the message, in one write: others print there, too."""
    os.write(1, f"{os.getpid()} does {delivery.body.decode()}\n".encode())


def wait(delivery: qflow.Delivery) -> None:
    """Wait until a pipe, which the message names, is opened to be written to, and closed."""
    say(delivery)
    with open(delivery.body) as pipe:
        pipe.read()


def fail(delivery: qflow.Delivery) -> None:
    raise ValueError(f"no {delivery.body.decode()}")


def mute(delivery: qflow.Delivery) -> None:
    """Take away what is written to on stderr, as the message says, and raise."""
    match delivery.body:
        case b"none":
            sys.stderr = None  # type: ignore[assignment]
        case b"closed":
            sys.stderr.close()
        case b"descriptor":
            os.close(2)
    raise ValueError(f"no {delivery.body.decode()}")


def hang(delivery: qflow.Delivery) -> None:
    """Hear no signal but SIGKILL, if the message says so, and return no more; nor does a process that it starts."""
    say(delivery)
    if delivery.body == b"hang":
        subprocess.Popen(["sleep", "1000"])
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        threading.Event().wait()


def crash(delivery: qflow.Delivery) -> None:
    say(delivery)
    if delivery.body == b"crash":
        os.kill(os.getpid(), signal.SIGSEGV)


def note(delivery: qflow.Delivery) -> None:
    """Append the message to the file `done`, in one write."""
    file = os.open("done", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, delivery.body + b"\n")
    os.close(file)


def fork(delivery: qflow.Delivery) -> None:
    """End a process that it has forked, and say how that ended."""
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    child = context.Process(target=lambda: (begun.set(), threading.Event().wait()))
    child.start()
    begun.wait()
    child.terminate()
    child.join(60)
    os.write(1, f"it ended with {child.exitcode}\n".encode())
    child.kill()


def show(delivery: qflow.Delivery) -> None:
    """Write to the file `done` what stdout and stderr are, and have the supervisor end."""
    print("on stdout", flush=True)
    print("on stderr", file=sys.stderr, flush=True)
    with open("done", "a") as file:
        file.write(" ".join(os.readlink(f"/proc/self/fd/{number}") for number in (1, 2)))
    os.kill(os.getppid(), signal.SIGTERM)


def orphan(delivery: qflow.Delivery) -> None:
    """Leave an orphan, which ends, in a message; in the next, raise until nothing is left of it, and end process 1."""
    if delivery.body == b"leave":
        if os.fork() == 0:
            if (left := os.fork()) == 0:
                os._exit(0)
            os.write(os.open("left", os.O_WRONLY | os.O_CREAT), b"%d" % left)
            os._exit(0)
        os.wait()
        return
    with open("left") as file, contextlib.suppress(ProcessLookupError):
        os.kill(int(file.read()), 0)
        if delivery.delivery_count < ORPHAN_TRIES:
            raise RuntimeError("it is dead, and nobody has asked how it ended")
        os.write(1, b"it is there for good\n")
    os.kill(os.getppid(), signal.SIGTERM)
