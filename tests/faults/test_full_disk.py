"""A disk that is really full: a tmpfs of 4 MiB."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import qflow
from faults.seams import PATIENCE_S, drained, in_thread


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "qflow-test", disk], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def fill(disk: Path) -> Path:
    """Take all the space there is; return the file that holds it."""
    ballast = disk / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        size = 2**20
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
    return ballast


def test_a_full_disk_under_the_log_refuses_puts_and_nothing_else(small_disk):
    """I12, edge 9: DiskFull is clear, acks and gets go on, puts come back with the space, nothing confirmed is lost."""
    spool = small_disk / "spool"
    confirmed = []
    with qflow.open(spool) as broker:
        queue = broker.declare_queue("q")
        with pytest.raises(qflow.DiskFull, match="free some space"):
            while True:
                body = b"%06d" % len(confirmed) * 1_000
                queue.put(body)
                confirmed.append(body)
        assert len(confirmed) > 50
        assert isinstance(queue.submit(b"x" * 6_000).exception(timeout=PATIENCE_S), qflow.DiskFull)
        with pytest.raises(qflow.DiskFull):
            queue.put_many([b"x" * 6_000] * 3)
        assert broker.check() == []
        for body in confirmed[:20]:  # with not a byte left
            delivery = queue.get(0)
            assert delivery.body == body
            delivery.ack(wait=True)
        assert broker.check() == []
        for _ in range(20):
            queue.get(0).nack()
        ballast = None
    assert ballast is None
    with qflow.open(spool) as broker:  # opening needs no more than acks do
        queue = broker.queue("q")
        assert [delivery.body for delivery in queue.get_many(1000)] == confirmed[20:]


def test_puts_work_again_by_themselves_when_space_returns(small_disk):
    """I12: the same broker goes on after somebody made room."""
    with qflow.open(small_disk / "spool") as broker:
        queue = broker.declare_queue("q")
        queue.put(b"first")
        ballast = fill(small_disk)
        with pytest.raises(qflow.DiskFull):
            for _ in range(1_000):
                queue.put(b"x" * 10_000)
        count = len(queue)
        ballast.unlink()
        in_thread(lambda: queue.put(b"x" * 10_000))
        assert len(queue) == count + 1
        assert broker.check() == []
        assert len(drained(queue)) == count + 1


def test_a_full_disk_under_the_spill_store_holds_producers(small_disk):
    """I12, edge 9: what cannot be spilled stays in memory; DiskFull in time; gets, acks and later puts go on."""
    with qflow.open(small_disk / "spool", capacity_bytes=300_000) as broker:
        queue = broker.declare_queue("q", durable=False)
        fill(small_disk)
        bodies = []
        with pytest.raises(qflow.DiskFull, match="could not spill"):
            while True:
                body = b"%06d" % len(bodies) * 1_000
                queue.put(body, timeout_s=0)
                bodies.append(body)
        assert queue.stats().resident_bytes <= 300_000 + 6_100
        assert broker.check() == []
        with queue.get(0) as delivery:
            assert delivery.body == bodies.pop(0)
        os.unlink(small_disk / "ballast")
        for _ in range(20):
            body = b"%06d" % len(bodies) * 1_000
            in_thread(lambda body=body: queue.put(body))
            bodies.append(body)
        assert queue.stats().spilled_messages > 0
        assert drained(queue) == bodies
        assert broker.check() == []


def test_a_spool_cannot_be_made_on_a_full_disk_and_can_be_later(small_disk):
    """I11, I12: creation on a full disk is a clear error and leaves nothing that hinders the next."""
    ballast = fill(small_disk)
    with pytest.raises(qflow.StorageError):
        qflow.open(small_disk / "spool")
    ballast.unlink()
    with qflow.open(small_disk / "spool") as broker:
        assert broker.declare_queue("q").put(b"x") == 0


def test_a_spool_with_messages_opens_on_a_full_disk(small_disk):
    """I12: a full disk does not keep the owner from draining its queue."""
    with qflow.open(small_disk / "spool") as broker:
        broker.declare_queue("q").put_many([b"a", b"b"])
    fill(small_disk)
    with qflow.open(small_disk / "spool") as broker:
        assert drained(broker.queue("q")) == [b"a", b"b"]
