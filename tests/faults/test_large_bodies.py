"""Large bodies on their way into the log: how much memory they take beside the body, whatever the disk says."""

from __future__ import annotations

import errno
import os
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

import qflow
from faults.bare_log import ALL, bare_log, declared, in_log
from faults.seams import Faults, FaultyFiles
from qflow.message import Message
from qflow.storage.log.keys import scan
from qflow.storage.log.transaction_log import Unit

MIB = 2**20
SIZE = 8 * MIB


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
def log(spool, faults, monkeypatch):
    monkeypatch.setattr("faults.bare_log.Files", lambda: FaultyFiles(faults))
    with bare_log(spool, faults) as log:
        yield log
        assert log.problems() == []


def copied(work: Callable[[], Any]) -> int:
    """Return how many bytes Python held at most for some work; what LMDB keeps of its pages is not among them."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("record", [b"b" * SIZE, Message(b"m" * SIZE, b'{"a":1}')], ids=["plain", "headers"])
def test_no_copy_of_a_large_body_is_made_for_the_log(log, spool, record):
    """The one in LMDB's page is the only one, also where it is not a bare body; and that is a piece of a body."""
    line = declared(log, 1)
    files, fds = os.listdir(spool / "log"), len(os.listdir("/proc/self/fd"))
    put = line.put(record)
    assert copied(lambda: log.wait(log.put(put))) < 2 * MIB
    assert put.error is None
    assert (os.listdir(spool / "log"), len(os.listdir("/proc/self/fd"))) == (files, fds)
    assert in_log(log, line) == {0: record}


def test_no_copy_of_a_large_body_for_several_queues_is_made(log):
    lines, record = [declared(log, 1), declared(log, 2)], b"b" * SIZE
    unit = Unit([line.put(record) for line in lines])
    assert copied(lambda: log.wait(log.join(unit))) < MIB
    assert unit.error is None
    assert [in_log(log, line) for line in lines] == [{0: record}] * 2


@pytest.mark.parametrize("name", ["open", "pwrite", "read"])
@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSPC, errno.EMFILE, errno.EIO])
def test_a_large_body_is_logged_where_there_can_be_no_file_for_it(log, faults, name, number):
    """It takes memory then: what LMDB has room for is not refused."""
    line = declared(log, 1)
    fds = len(os.listdir("/proc/self/fd"))
    faults.fail(name, number)
    put = log.put(line.put(b"b" * SIZE))
    log.wait(put)
    faults.heal()
    assert put.error is None
    assert len(os.listdir("/proc/self/fd")) == fds
    assert in_log(log, line) == {0: b"b" * SIZE}


def test_no_copy_of_a_large_body_is_made_by_what_comes_after_it(log):
    """The next put does not look into its block, nor does what settles it, in order or not."""
    line = declared(log, 1)
    bodies = [b"small", *[bytes([number]) * SIZE for number in range(4)]]
    for body in bodies:
        assert copied(lambda body=body: log.wait(log.put(line.put(body)))) < MIB
    assert copied(lambda: log.wait(log.put(line.put(b"behind")))) < MIB
    for sequence in (2, 0, 1, 3, 4, 5):
        assert copied(lambda at=sequence: log.wait(log.settle(*line.settled(at)))) < MIB
        assert copied(lambda: log.wait(log.hollow(line.lane))) < MIB
    with log.read() as txn:
        assert list(scan(txn, 1, 0, 0, ALL)) == []


@pytest.mark.parametrize("size", [SIZE // 2, 2 * SIZE], ids=["whole", "pieces"])
def test_a_large_body_is_read_into_memory_once(size, tmp_path):
    """LMDB's map is read where it lies: what is read into memory is the body alone, and one piece of it at most."""
    body = b"b" * size
    with qflow.open(tmp_path / "spool", capacity_bytes=4 * SIZE) as broker:
        broker.declare_queue("q", max_message_bytes=size).put(body)
    with qflow.open(tmp_path / "spool", capacity_bytes=4 * SIZE) as broker:
        found: list[qflow.Delivery] = []
        assert copied(lambda: found.append(broker.queue("q").get(0))) < size + 2 * MIB
        assert found[0].body == body
        found[0].ack(wait=True)
