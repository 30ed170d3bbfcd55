"""A device that cannot write for a while, under ext4; then the power goes.

ext4 keeps a page whose write failed as if it had been written, and lets the next write and sync of it succeed, which
never reach the device. So a spool that is opened again after such an error has to read the device, and not the memory.

The device is a file on a tmpfs: where that is full, blocks that it does not have yet cannot be written. Copied as it is,
it is what a power cut leaves.
"""

from __future__ import annotations

import fcntl
import os
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import qflow
from faults.test_opening import descriptors
from thorough import TORTURE

BLOCK = 4096
DEVICE_BYTES, HOLDER_BYTES = 48 * 2**20, 160 * 2**20
UNWRITTEN = re.compile(r"^ *\d+: +\d+\.\. *\d+: +(\d+)\.\. *(\d+):.*unwritten", re.MULTILINE)


def run(*words: str | Path) -> str:
    """Run a command of the system; skip the test where it is missing, or may not do that."""
    if shutil.which(str(words[0])) is None:
        pytest.skip(f"there is no {words[0]} here")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{words[0]} cannot be used here: {done.stderr.strip()}")
    return done.stdout.strip()


@contextmanager
def mounted(*what: str | Path) -> Iterator[Path]:
    """Mount something, the last word says where; on a loop device, if it is a file."""
    where = Path(what[-1])
    where.mkdir()
    run("mount", *what)
    try:
        yield where
    finally:
        subprocess.run(["umount", "--lazy", where], check=True)  # a loop device lets go of its file a moment later


class Device:
    """A block device with ext4 on it."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self._holder = stack.enter_context(
            mounted("-t", "tmpfs", "-o", f"size={HOLDER_BYTES}", "none", directory / "holder")
        )
        self._image = self._holder / "device"
        self._filler = self._holder / "filler"
        self._image.write_bytes(random.Random(1).randbytes(DEVICE_BYTES))
        run("mkfs.ext4", "-q", "-b", str(BLOCK), "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard", self._image)
        with open(self._image, "r+b") as image:  # mkfs gives back what it fills with zeros: ext4's journal, for one
            os.posix_fallocate(image.fileno(), 0, DEVICE_BYTES)
        self.path = stack.enter_context(mounted("-o", "loop", self._image, directory / "disk"))

    def fail(self, file: Path) -> None:
        """From here on no block of a file can be written that was not written before."""
        os.sync()
        for first, last in UNWRITTEN.findall(run("filefrag", "-v", f"-b{BLOCK}", file)):
            at, size = int(first) * BLOCK, (int(last) - int(first) + 1) * BLOCK
            run("fallocate", "-p", "-o", str(at), "-l", str(size), self._image)
        with open(self._filler, "wb", buffering=0) as filler, pytest.raises(OSError, match="No space left"):
            while True:
                filler.write(bytes(BLOCK))

    def heal(self) -> None:
        self._filler.unlink()

    def after_a_power_cut(self) -> Path:
        """Return where what is on the device now is mounted."""
        copy = self._directory / "copy"
        shutil.copy(self._image, copy)
        return self._stack.enter_context(mounted("-o", "loop", copy, self._directory / "afterwards"))


@pytest.mark.parametrize("seed", range(30 if TORTURE else 2))
def test_what_is_confirmed_after_an_error_outlasts_a_power_cut(seed: int, tmp_path: Path) -> None:
    """And so does what was confirmed before it: blocks grow, and are written again."""
    random_ = random.Random(seed)
    confirmed: list[bytes] = []

    def put(queue: qflow.Queue, messages: int) -> None:
        for _ in range(messages):
            body = b"%d " % len(confirmed) + bytes(random_.randrange(10, 20_000))
            queue.put(body)
            confirmed.append(body)

    with ExitStack() as stack:
        device = Device(tmp_path, stack)
        broker = qflow.open(device.path / "spool")
        queue = broker.declare_queue("q")
        put(queue, random_.randrange(1, 20))
        device.fail(device.path / "spool" / "log" / "data.mdb")
        with pytest.raises(qflow.InDoubt):
            put(queue, 10_000)  # the log is written when the journal is full, if not before
        device.heal()
        broker.close()
        with qflow.open(device.path / "spool") as broker:
            put(broker.queue("q"), random_.randrange(1, 20))
            afterwards = device.after_a_power_cut()
        with qflow.open(afterwards / "spool") as broker:
            assert broker.recovery.problems == ()
            assert set(confirmed) <= set(broker.queue("q").get_many(1_000).bodies)


def test_a_commit_whose_last_page_cannot_be_written_is_no_damage(spool: Path, tmp_path: Path) -> None:
    """The broker has failed, and says so whatever it reads; opened again, nothing is wrong with the log."""
    broker = qflow.open(spool, journal="off", capacity_bytes=1_000)
    queue = broker.declare_queue("q")
    bodies = [b"%d" % number for number in range(100)]
    queue.put_many(bodies)
    data = spool / "log" / "data.mdb"
    fds = [int(name) for name, path in descriptors().items() if path == os.path.realpath(data)]
    [synced] = [fd for fd in fds if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DSYNC]  # LMDB writes these pages by it alone
    before, unwritable = os.dup(synced), os.open(data, os.O_RDONLY)
    os.dup2(unwritable, synced)
    with pytest.raises(qflow.InDoubt):
        queue.put(b"doubtful")
    for look in (
        lambda: broker.engine.log.fact("room", "key"),
        broker.check,
        lambda: broker.snapshot(tmp_path / "copy"),
    ):
        with pytest.raises(qflow.BrokerFailed, match="close the broker and open the spool again"):
            look()
    os.dup2(before, synced)
    os.close(before)
    os.close(unwritable)
    broker.close()
    with qflow.open(spool) as broker:
        assert broker.recovery.problems == ()
        assert broker.queue("q").get_many(1_000).bodies in (bodies, [*bodies, b"doubtful"])
        assert broker.check() == []
