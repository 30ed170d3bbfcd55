"""Starting a thread, where the system may allow no more of them, or the interpreter."""

from __future__ import annotations

from threading import Thread

from qflow.errors import NO_MORE_THREADS, NO_THREAD, BrokerClosed, QflowError


def start(thread: Thread) -> None:
    """Start a thread. Raises QflowError: there can be no more. BrokerClosed: the interpreter ends (Python 3.12)."""
    try:
        thread.start()
    except RuntimeError as error:
        if str(error) == NO_THREAD:
            raise QflowError(NO_MORE_THREADS) from error
        if "interpreter shutdown" in str(error):
            raise BrokerClosed("the interpreter is ending, and starts no more threads: do it before that") from error
        raise
