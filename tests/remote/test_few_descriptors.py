"""Connecting in a process that has hardly any descriptor left."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import qflow
import qflow.aio
from doors import event_loop
from other_owner import owned

MOST = 8
"""As many are enough to connect."""


@contextmanager
def left(count: int) -> Iterator[None]:
    """Leave this process so many descriptors."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + MOST, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for one in taken:
            os.close(one)


def check_refusals(spool: Path, refusals: list[qflow.StorageError]) -> None:
    """Each names the spool and what helps, and leaves nothing open; there is one for the socket at the least."""
    assert refusals
    for error in refusals:
        assert str(spool) in str(error)
        assert "`ulimit -n`" in str(error)


def test_connecting_with_too_few_descriptors_is_one_sentence(spool: Path) -> None:
    """Whatever of it comes first to want one more than there are."""
    refusals: list[qflow.StorageError] = []
    with owned(spool):
        qflow.connect(spool).close()
        before = os.listdir("/proc/self/fd")
        for count in range(MOST):
            with left(count):
                try:
                    with qflow.connect(spool) as remote:
                        remote.queue("jobs").put(b"x")
                except qflow.StorageError as error:
                    refusals.append(error)
            assert len(os.listdir("/proc/self/fd")) == len(before)
    check_refusals(spool, refusals)
    assert len(refusals) < MOST


def test_a_task_that_connects_with_too_few_descriptors_is_told_the_same(spool: Path) -> None:
    """In a loop that has its own."""
    refusals: list[qflow.StorageError] = []

    async def scenario() -> None:
        for count in range(MOST):
            with left(count):
                try:
                    async with qflow.aio.connect(spool) as remote:
                        await remote.queue("jobs").put(b"x")
                except qflow.StorageError as error:
                    refusals.append(error)

    with owned(spool):
        event_loop.run(scenario())
    check_refusals(spool, refusals)
    assert len(refusals) < MOST
