"""What the event loop of a process that serves does otherwise than those of other programs."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from functools import partial

import pytest

from doors.event_loop import run, until
from qflow.serving.loops import telling_of_few_files


class Door(asyncio.Protocol):
    """What a door makes for a connection."""

    def __init__(self, lost: list[object]) -> None:
        self._lost = lost

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.append(exc)


def _look(port: int) -> None:
    """Look whether a port is open."""
    socket.create_connection(("127.0.0.1", port)).close()


def test_a_loop_that_can_accept_nobody_says_so_in_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And not for each try, of which there are as many a second as may wait to be accepted. Other faults are as ever."""
    monkeypatch.setattr("asyncio.constants.ACCEPT_RETRY_DELAY", 0)
    accept, refusals = socket.socket.accept, [OSError(errno.EMFILE, os.strerror(errno.EMFILE)) for _ in range(300)]

    def try_to(listening: socket.socket) -> tuple[socket.socket, object]:
        if refusals:
            raise refusals.pop()
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", try_to)

    async def serve() -> str:
        loop = asyncio.get_running_loop()
        lost: list[object] = []
        with telling_of_few_files():
            async with await loop.create_server(partial(Door, lost), "127.0.0.1", 0) as server:
                host, port = server.sockets[0].getsockname()
                await asyncio.to_thread(_look, port)
                await until(lambda: not refusals)
                loop.call_soon(lambda: 1 // 0)
                await until(lambda: len(caplog.records) >= 2)
                await until(lambda: bool(lost))  # it was let in at last, and had left
        return f"{host}:{port}"

    with caplog.at_level(logging.WARNING):
        address = run(serve())
    short, other, last = caplog.records
    assert (short.name, last.name) == ("qflow", "qflow")
    remedy = "this process has too many open files: close some, or raise `ulimit -n`"
    assert short.getMessage() == last.getMessage() == f"{address}: nobody else is let in for now: {remedy}"
    assert other.exc_info is not None
    assert other.exc_info[0] is ZeroDivisionError
