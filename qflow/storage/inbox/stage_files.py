"""The files of a stage (see `stages`): blocks of messages with their topics, one behind the other.

A file is what one task of a sink has written. The sequence of a block is the number of its first message in its file,
and the checksum of a file is that of the checksums of its blocks: so one that is cut, torn or exchanged is noticed.

What these raise besides is plain OSError.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from zlib import crc32

from qflow.errors import CorruptionError
from qflow.named_tuples import NamedTuple
from qflow.storage import blocks
from qflow.storage.blocks import CHECKSUM_BYTES, Block, BlockKey, Header
from qflow.storage.files import CREATE, FILE_MODE, READ, Files, make_directories, write_all
from qflow.storage.inbox.batches import SINK_BATCHES

WRITE_BYTES = 2**20
"""Blocks are gathered until there are so many bytes to be written at once."""
READ_BYTES = 2**20


class StageFile(NamedTuple):
    """What one task has written."""

    name: str
    messages: int
    bytes: int
    """Of the messages."""
    length: int
    """Of the file."""
    checksum: int
    """CRC-32 of the checksums of its blocks."""


def check_no_link(files: Files, directory: str) -> None:
    """Refuse something else in the place of a stage, or of the two directories of the inbox it is in."""
    staging = os.path.dirname(directory)
    for path in (os.path.dirname(staging), staging, directory):
        if files.exists(path) and not stat.S_ISDIR(files.lstat(path).st_mode):
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)


class StageWriter:
    """One file of a stage. Not thread-safe; what is not finished is to be discarded."""

    def __init__(self, files: Files, directory: str, name: str) -> None:
        """Make the file, and the directory if need be; that of the spool is there."""
        self._files = files
        self._name = name
        self._path = os.path.join(directory, name)
        self._gathered: list[bytes] = []
        self._gathered_bytes = self._position = 0
        self._bytes = self._checksum = 0
        self.messages = 0
        check_no_link(files, directory)
        make_directories(files, directory)
        self._fd = files.open(self._path, CREATE, FILE_MODE)

    @property
    def key(self) -> BlockKey:
        """Of the next block."""
        return BlockKey(SINK_BATCHES, 0, 0, self.messages)

    def add(self, block: bytes, messages: int, size: int) -> None:
        """Add a block of `messages`, `size` bytes together, that was encoded under `key`."""
        self._gathered.append(block)
        self._gathered_bytes += len(block)
        self._checksum = crc32(block[-CHECKSUM_BYTES:], self._checksum)
        self.messages += messages
        self._bytes += size
        if self._gathered_bytes >= WRITE_BYTES:
            self._write()

    def _write(self) -> None:
        self._position = write_all(self._files, self._fd, b"".join(self._gathered), self._position)
        self._gathered, self._gathered_bytes = [], 0

    def finish(self) -> StageFile:
        """Have it on the disk. One sync."""
        self._write()
        self._close()
        self._files.sync_file(self._path)
        return StageFile(self._name, self.messages, self._bytes, self._position, self._checksum)

    def discard(self) -> None:
        """Remove it, as far as that can be done."""
        with suppress(OSError):
            self._close()
        with suppress(OSError):
            self._files.unlink(self._path)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._files.close(fd)


class Piece(NamedTuple):
    """A block as it lies in a file; only its header was looked at."""

    data: memoryview
    header: Header
    where: str

    def decode(self) -> Block:
        """Raises CorruptionError: it is not what was written. Cost: 0.1 µs a message."""
        return blocks.decode(self.data, self.header.key, where=self.where, header=self.header)


def read_pieces(files: Files, directory: str, parts: Iterable[StageFile]) -> Iterator[Piece]:
    """Yield the blocks of a stage's files, in order.

    Raises:
        CorruptionError: a file is missing, or is not what was written.
    Cost: a MiB, or the largest message, in memory.
    """
    for part in parts:
        path = os.path.join(directory, part.name)
        try:
            fd = files.open(path, READ, 0)
        except FileNotFoundError as error:
            raise CorruptionError(f"{path} is missing: let no cleaner work inside a spool") from error
        try:
            yield from _read_file(files, fd, path, part)
        finally:
            files.close(fd)


def _read_file(files: Files, fd: int, path: str, part: StageFile) -> Iterator[Piece]:
    length = files.status(fd).st_size
    if length != part.length:
        raise CorruptionError(f"{path} has {length} bytes, expected {part.length}")
    position = first = checksum = 0
    room = READ_BYTES
    while position < length:
        window = memoryview(files.pread(fd, room, position))
        start = 0
        while len(window) - start >= blocks.HEADER_BYTES:
            where = f"{path}, byte {position + start}"
            rest = window[start:]
            header = blocks.read_header(rest, where=where)
            total = header.total_bytes(rest)
            if not 0 < total <= len(rest):
                break
            if header.key != BlockKey(SINK_BATCHES, 0, 0, first):
                raise CorruptionError(f"{where}: holds the block of {header.key}, expected message {first}")
            yield Piece(rest[:total], header, where)
            first += header.count
            checksum = crc32(rest[total - CHECKSUM_BYTES : total], checksum)
            start += total
        if not start and position + len(window) >= length:
            raise CorruptionError(f"{path} is cut off at byte {position}")
        room = READ_BYTES if start else room * 2
        position += start
    if checksum != part.checksum or first != part.messages:
        raise CorruptionError(
            f"{path} is another file than the one that was written: let nothing rename inside a spool"
        )
