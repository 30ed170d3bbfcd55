"""Starting a thread, where the system may allow no more of them."""

from __future__ import annotations

from threading import Thread

from qflow.errors import NO_MORE_THREADS, NO_THREAD, QflowError


def start(thread: Thread) -> None:
    """Start a thread.

    Raises:
        QflowError: there can be no more of them. RuntimeError: none, since the interpreter is ending (Python 3.12).
    """
    try:
        thread.start()
    except RuntimeError as error:
        if str(error) == NO_THREAD:
            raise QflowError(NO_MORE_THREADS) from error
        raise
