"""Commands in processes forked from one that has imported them: most of a short command's time is that of importing.

    python -m doors.forking DESCRIPTOR

It takes requests from a socket, each with four descriptors: stdin, stdout, stderr, and where the exit status goes.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

STATUS = struct.Struct("=ii")
"""The number of a process, and how it has ended, as `waitpid` tells it."""
_HEAVY = {"demo"}
_MOST_BYTES = 2**20


class Forking:
    """Runs commands. Made when the first one is to run, in each process of pytest."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "doors.forking", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parents[1],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def run(
        self, arguments: list[str], stdin: bytes, stdout: Any, cwd: Path, timeout_s: float
    ) -> subprocess.CompletedProcess[bytes]:
        """Run `qflow` to its end, as `subprocess.run` does."""
        request = {"argv": arguments, "cwd": str(cwd), "environ": dict(os.environ)}
        given, out, err, told = os.pipe(), os.pipe() if stdout == subprocess.PIPE else None, os.pipe(), os.pipe()
        where = stdout.fileno() if hasattr(stdout, "fileno") else stdout
        theirs = [given[0], where if out is None else out[1], err[1], told[1]]
        socket.send_fds(self._socket, [json.dumps(request).encode()], theirs)
        for descriptor in {given[0], err[1], told[1]} | (set() if out is None else {out[1]}):
            os.close(descriptor)
        found: dict[str, bytes | None] = {"out": None}
        work = [threading.Thread(target=_write, args=(given[1], stdin), daemon=True)]
        for name, pipe in (("out", out), ("err", err), ("told", told)):
            if pipe is not None:
                work.append(threading.Thread(target=_read, args=(pipe[0], found, name), daemon=True))
        for thread in work:
            thread.start()
        for thread in work[::-1]:
            thread.join(timeout_s)
            assert not thread.is_alive(), f"qflow {arguments} hangs"
        told_status = found["told"]
        assert told_status, f"qflow {arguments} was never started"
        returncode = os.waitstatus_to_exitcode(STATUS.unpack(told_status)[1])
        return subprocess.CompletedProcess(arguments, returncode, found["out"], found["err"])

    def end(self) -> None:
        """End it."""
        self._socket.close()
        self._server.wait()


def _write(descriptor: int, data: bytes) -> None:
    with open(descriptor, "wb", buffering=0) as pipe:
        try:
            while data:
                data = data[pipe.write(data) or 0 :]
        except BrokenPipeError:
            return  # it has ended, or reads no more


def _read(descriptor: int, found: dict[str, bytes | None], name: str) -> None:
    with open(descriptor, "rb") as pipe:
        found[name] = pipe.read()


@cache
def forking() -> Forking:
    """Return the one of this process."""
    return Forking()


def end() -> None:
    """End that of this process, if there is one."""
    if forking.cache_info().currsize:
        forking().end()
        forking.cache_clear()


# The process that is forked -------------------------------------------------------------------------------------------


def serve(control: socket.socket) -> None:
    """Fork for each request; return in the process that is to be the command."""
    import qflow.broker
    import qflow.cli
    import qflow.doctor
    import qflow.inspect
    import qflow.remote.client.connecting

    for module in pkgutil.iter_modules(qflow.cli.__path__, "qflow.cli."):
        if module.name.rpartition(".")[2] not in _HEAVY:
            importlib.import_module(module.name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, _MOST_BYTES, 4)
        if not request:
            os._exit(0)
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            command = os.fork()
            if not command:
                _become(json.loads(request), descriptors)
                return
            for descriptor in descriptors[:3]:
                os.close(descriptor)
            os.write(descriptors[3], STATUS.pack(*os.waitpid(command, 0)))
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Make this process what a request asks for."""
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.argv = ["qflow", *request["argv"]]


def run_to_its_end() -> None:
    """Run the command, and end as Python does, but for taking down what was imported before the fork.

    That copies most of the memory, and is a quarter of a short command's time. Its threads are waited for, what is to be
    called at the exit is, and what it has left is collected, whose finalizers complain as ever.
    """
    from qflow.cli.main import main

    code: Any = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code or 0
    if not isinstance(code, int):
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except OSError:
        sys.exit(code)  # as Python tells of it
    os._exit(code & 0xFF)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
    run_to_its_end()
