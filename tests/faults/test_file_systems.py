"""What file systems do in ways of their own, when they are nearly full: XFS, Btrfs."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import qflow
from faults.seams import drained
from faults.test_failing_device import mounted, run
from qflow.broker import make_broker
from qflow.config import BrokerSettings
from qflow.inspect import check_spool
from qflow.storage.files import Files

# XFS -----------------------------------------------------------------------------------------------------------------


class WholesaleFiles(Files):
    """XFS: gives disk space for a range of a file only where so much is free, whatever the file has of it."""

    free = 6 * 2**20

    def allocate(self, fd: int, size: int, start: int = 0) -> None:
        if size - start > self.free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(fd, size, start)


@pytest.mark.parametrize("has_holes", [False, True])
def test_a_log_that_is_longer_than_what_is_free_takes_puts_and_opens(has_holes, tmp_path):
    """Of XFS: only what a log grows by is asked for; one with holes, as `cp` makes of what is not written yet, too."""
    bodies = [b"%02d" % number + bytes(500_000) for number in range(40)]
    spool, files = tmp_path / "spool", WholesaleFiles()
    with make_broker(spool, BrokerSettings(), files=files) as broker:
        queue = broker.declare_queue("q")
        for body in bodies[:-1]:
            queue.put(body)
    with open(spool / "log" / "data.mdb", "r+b") as data:
        assert data.seek(0, os.SEEK_END) > 3 * files.free
        if has_holes:
            data.truncate(data.tell() + 2**20)
    with make_broker(spool, BrokerSettings(), files=files) as broker:
        broker.queue("q").put(bodies[-1])
        assert drained(broker.queue("q")) == bodies


def test_a_log_that_is_longer_than_what_is_free_opens_where_it_cannot_grow(tmp_path):
    """Of XFS: what the file has is not asked for again."""
    spool, files = tmp_path / "spool", WholesaleFiles()
    with make_broker(spool, BrokerSettings(), files=files) as broker:
        broker.declare_queue("q").put_many([b"a", b"b"])
    files.free = 0
    with make_broker(spool, BrokerSettings(), files=files) as broker:
        assert drained(broker.queue("q")) == [b"a", b"b"]


# Btrfs ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def btrfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 120 MiB."""
    image = tmp_path / "device"
    with open(image, "wb") as file:
        file.truncate(120 * 2**20)
    run("mkfs.btrfs", "-q", image)
    with mounted("-o", "loop", image, tmp_path / "disk") as disk:
        yield disk


SETTLES = """
import sys
import qflow
from faults.test_full_disk import fill
from pathlib import Path
spool = Path(sys.argv[1])
with qflow.open(spool, capacity_bytes="1MiB") as broker:
    queue = broker.declare_queue("q")
    queue.put_many([b"%04d" % number + bytes(2_000) for number in range(500)])
    for number in range(500, 1_000):
        queue.put(b"%04d" % number)
    fill(spool.parent)
    for number in range(400):
        delivery = queue.get(0)
        assert delivery.body.startswith(b"%04d" % number), delivery.body
        delivery.ack(wait=True)
"""


def test_a_full_btrfs_takes_acks_and_is_looked_into_and_opened(btrfs: Path) -> None:
    """What is written over has its blocks: else its owner, and whoever looks, is killed as they note what they read."""
    spool = btrfs / "spool"
    subprocess.run([sys.executable, "-c", SETTLES, spool], check=True, cwd=Path(__file__).parents[1])
    assert check_spool(spool) == []
    with qflow.open(spool) as broker:
        assert [int(body[:4]) for body in drained(broker.queue("q"))] == list(range(400, 1_000))


class Watched(Files):
    """Notes what lay in each directory when its files were told to be overwritten in place."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {}

    def overwrite_in_place(self, directory: str) -> None:
        self.found[directory] = self.list(directory)
        super().overwrite_in_place(directory)


def test_a_spool_and_a_snapshot_are_overwritten_in_place_from_their_first_file_on(tmp_path: Path) -> None:
    """Btrfs knows that of the files that are made later."""
    files = Watched()
    with make_broker(tmp_path / "spool", BrokerSettings(), files=files) as broker:
        broker.snapshot(tmp_path / "copy")
    assert files.found == {str(tmp_path / "spool"): [], str(tmp_path / "copy"): []}
