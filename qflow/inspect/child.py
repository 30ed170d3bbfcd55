"""Reads a log in a child process, which a damaged log may kill; its death by a signal becomes an error.

LMDB trusts the pages it maps: a damaged one may lead it to a failed assertion (SIGABRT), a division by zero (SIGFPE),
out of the file (SIGSEGV), or to pages that the disk cannot read (SIGBUS). Who reads cannot guard against that.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import resource
import select
import shutil
import signal
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar, cast

from qflow.descriptors import occupy_standard
from qflow.errors import CorruptionError, DiskFull, StorageError
from qflow.storage.forks import speak_for_parent

Result = TypeVar("Result")

PATIENCE_S = 30.0
"""How long a child that was interrupted may remove what it has begun: damaged pages can lead LMDB in circles."""

_FULL_BYTES = 64 * 1024
"""With less free on the disk, a page of a mapped file may not get a block, which also ends a process with SIGBUS."""

_OF_DAMAGE = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}
"""What a process gets for what it does itself; any other signal comes from outside."""

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl
"""Asks for a signal when the parent has ended. Looked up before a fork: a child must take no lock of other threads."""


def in_child(spool: str, work: Callable[[], Result]) -> Result:
    """Run a function that reads the log of a spool in a forked child; return its result, or raise its error.

    Raises:
        CorruptionError: the child was killed by what it read. DiskFull: or for it had no room to note that it reads.
        StorageError: it was killed, or could not be started.
        What interrupts the wait: the child is interrupted, too, and killed after `PATIENCE_S` or by a second interrupt.
    Cost: a fork, 1 to 5 ms, and 0.1 ms for each MiB of memory that this process has; and pickling the result.
    """
    occupy_standard()
    parent = os.getpid()
    source, target = os.pipe()
    blocked, collects = signal.pthread_sigmask(signal.SIG_BLOCK, []), gc.isenabled()
    try:
        gc.disable()  # the child must not run the parent's finalizers
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # nor go on as the parent, where one raises
        with warnings.catch_warnings():  # the child must take no lock that another thread may have held
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            _work(work, source, target, parent, blocked)
    except BaseException as error:
        os.close(source)
        os.close(target)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if isinstance(error, OSError):
            raise StorageError(f"no process could be started to read {spool}: {error}") from error
        raise
    finally:
        if collects:
            gc.enable()
    try:
        os.close(target)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        with open(source, "rb", closefd=False) as pipe:
            said = pipe.read()
    except BaseException:
        _interrupt(pid, source)
        raise
    finally:
        os.close(source)
        _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        raise _killed(spool, signal.Signals(os.WTERMSIG(status)))
    if not said:
        raise StorageError(f"the process that read {spool} ended without a word (exit code {status >> 8}): try again")
    succeeded, outcome = pickle.loads(said)
    if not succeeded:
        raise outcome
    return cast(Result, outcome)


def _interrupt(pid: int, pipe: int) -> None:
    """End a child: it may clean up first, for some time. An unfinished copy is left by one that must be killed."""
    os.kill(pid, signal.SIGINT)
    try:
        ended = select.poll()
        ended.register(pipe, 0)  # nothing but that the other end is closed
        gone = ended.poll(PATIENCE_S * 1000)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    if not gone:
        os.kill(pid, signal.SIGKILL)


def _killed(spool: str, number: signal.Signals) -> CorruptionError | StorageError:
    if number is signal.SIGBUS and _is_full(spool):
        return DiskFull(
            f"the log of {spool} could not be read: the disk is full, and who reads notes that in `log/lock.mdb`, "
            "which is mapped: free some space on that file system (`df -h`) and try again, before anything else"
        )
    if number in _OF_DAMAGE:
        return CorruptionError(
            f"the log of {spool} is damaged: reading it ended a process with {number.name}. Pages of it are not what "
            "was written, or the disk fails to read them: look at `dmesg`, copy the spool before you try repairs, and "
            "bring back a snapshot"
        )
    return StorageError(f"the process that read {spool} was ended with {number.name}: try again")


def _is_full(spool: str) -> bool:
    try:
        return shutil.disk_usage(spool).free < _FULL_BYTES
    except OSError:  # it was removed meanwhile
        return False


def _work(work: Callable[[], Any], source: int, target: int, parent: int, blocked: Iterable[int]) -> NoReturn:
    """Run the function in the child, send its result or error, and exit; also if the parent has ended.

    Args:
        blocked: the signals that were blocked before the fork; the others are let in where what they raise ends here.
    """
    code = 1
    try:
        os.close(source)
        speak_for_parent()
        gc.disable()
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # LMDB writes failed assertions to it
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in (signal.SIGINT, signal.SIGTERM):  # SIGTERM comes to all of a group
            signal.signal(number, signal.default_int_handler)
        _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGINT))  # an unfinished copy is removed, as at Ctrl-C
        if os.getppid() != parent:
            raise KeyboardInterrupt
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        with open(target, "wb") as pipe:
            pipe.write(_outcome(work))
        code = 0
    finally:
        os._exit(code)


def _outcome(work: Callable[[], Any]) -> bytes:
    try:
        return pickle.dumps((True, work()))
    except BaseException as error:
        return pickle.dumps((False, error))
