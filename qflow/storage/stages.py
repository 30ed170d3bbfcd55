"""Batches of messages handed to a spool from outside, as files: what a sink writes, and what the owner reads.

    inbox/staging/<query>-<batch>.<token>/   a *stage* being written: files of blocks, and at last the manifest
    inbox/<query>-<batch>/                   handed in: whole and on the disk, for the owner to adopt
    inbox/<query>-<batch>~/                  being adopted
    inbox/refused/<query>-<batch>/           set aside, with the reason in a file

A stage is handed in by one rename, taken by another: who takes it back (`withdraw`) and who adopts it cannot both. Its
files are blocks one behind the other, with the topics of their messages; the sequence of a block is the number of its
first message in its file. The manifest (JSON with a CRC-32) names the files in order, what is in them, and whose they
are. So a file that is missing, torn or exchanged is noticed, and what tasks that failed have left is not read.

Each function does one step that may be repeated after a crash; what they raise besides is plain OSError.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple
from zlib import crc32

import attrs

from qflow.errors import CorruptionError, InvalidArgument
from qflow.storage import blocks
from qflow.storage.block_log import seal, unseal
from qflow.storage.blocks import CHECKSUM_BYTES, Block, BlockKey, Header
from qflow.storage.files import CREATE, FILE_MODE, READ, Files, make_directories, write_all
from qflow.storage.sink_batches import SINK_BATCHES

INBOX, STAGING, REFUSED = "inbox", "staging", "refused"
MANIFEST, REASON = "manifest", "reason"
WRITE_BYTES = 2**20
"""Blocks are gathered until there are so many bytes to be written at once."""
READ_BYTES = 2**20

_QUERY = re.compile(r"[A-Za-z0-9_-]{1,100}")
_HANDED = re.compile(rf"({_QUERY.pattern})-(\d{{1,19}})(~?)")
_STAGED = re.compile(rf"({_QUERY.pattern})-(\d{{1,19}})\.([0-9a-f]{{32}})")


class Batch(NamedTuple):
    """One batch of one query."""

    query: str
    batch: int

    @property
    def name(self) -> str:
        return f"{self.query}-{self.batch}"


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


@attrs.frozen(kw_only=True)
class Manifest:
    """What a stage is made of."""

    batch: Batch
    token: str
    """Of the stage: another attempt at the same batch has another one."""
    uuid: str
    """Of the log it was made for."""
    once: bool
    """Its query hands in no other batch."""
    files: tuple[StageFile, ...]

    @property
    def messages(self) -> int:
        return sum(file.messages for file in self.files)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def check_batch(query: str, batch: int) -> Batch:
    """Return a batch whose name can be one of a directory.

    Raises:
        InvalidArgument: the query's is not 1 to 100 letters, digits, `-` and `_`, or the number not 0 to 2**63 - 1.
    """
    if not _QUERY.fullmatch(query) or not 0 <= batch < 2**63:
        raise InvalidArgument(
            f"a batch has a query of 1 to 100 letters, digits, '-' and '_' and a number from 0 on, not {query!r:.120} "
            f"and {batch}"
        )
    return Batch(query, batch)


def parse_name(name: str) -> tuple[Batch, bool] | None:
    """Return the batch that a name in the inbox stands for, and whether it is being adopted; None for no stage."""
    found = _HANDED.fullmatch(name)
    return None if found is None else (Batch(found[1], int(found[2])), bool(found[3]))


def inbox(spool: str) -> str:
    return os.path.join(spool, INBOX)


def handed_in(spool: str, batch: Batch) -> str:
    return os.path.join(spool, INBOX, batch.name)


def being_adopted(spool: str, batch: Batch) -> str:
    return os.path.join(spool, INBOX, batch.name + "~")


def set_aside(spool: str, batch: Batch) -> str:
    return os.path.join(spool, INBOX, REFUSED, batch.name)


def staged(spool: str, batch: Batch, token: str) -> str:
    return os.path.join(spool, INBOX, STAGING, f"{batch.name}.{token}")


# Writing, by a sink --------------------------------------------------------------------------------------------------


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


def hand_in(files: Files, spool: str, manifest: Manifest) -> bool:
    """Hand a stage in whose files are finished; what else lies in its directory is removed.

    Returns:
        False: that batch was handed in before, by another attempt, and is not adopted yet. This one is removed.
    Cost: three syncs.
    """
    batch = manifest.batch
    source, target = staged(spool, batch, manifest.token), handed_in(spool, batch)
    wanted = {file.name for file in manifest.files}
    for name in files.list(source):
        if name not in wanted:
            files.unlink(os.path.join(source, name))
    remove_tree(files, set_aside(spool, batch))  # of an attempt before
    path = os.path.join(source, MANIFEST)
    files.write_replacing(path, seal(json.dumps(attrs.asdict(manifest, recurse=False)).encode()))
    files.sync_file(path)
    files.sync_directory(source)
    try:
        if files.exists(being_adopted(spool, batch)):
            raise FileExistsError
        files.rename(source, target)
    except OSError as error:
        if not isinstance(error, FileExistsError) and error.errno != errno.ENOTEMPTY:
            raise
        remove_tree(files, source)
        return False
    files.sync_directory(inbox(spool))
    return True


def withdraw(files: Files, spool: str, batch: Batch, token: str) -> bool:
    """Take back what was handed in and is not being adopted; False: somebody has it, or had it.

    Cost: a rename, and the removal of its files.
    """
    back = staged(spool, batch, token)
    try:
        files.rename(handed_in(spool, batch), back)
    except FileNotFoundError:
        return False
    files.sync_directory(inbox(spool))
    remove_tree(files, back)
    return True


def remove_staged(files: Files, spool: str, query: str, *, up_to: int) -> None:
    """Remove what attempts at batches of a query left that were not handed in, as far as that can be done."""
    for directory, batch in list_staged(files, spool):
        if batch.query == query and batch.batch <= up_to:
            with suppress(OSError):
                remove_tree(files, directory)


# Looking, by anybody -------------------------------------------------------------------------------------------------


def list_staged(files: Files, spool: str) -> list[tuple[str, Batch]]:
    """Return the directories of stages that are being written, or were left."""
    directory = os.path.join(spool, INBOX, STAGING)
    found = ((name, _STAGED.fullmatch(name)) for name in list_or_none(files, directory))
    return [(os.path.join(directory, name), Batch(match[1], int(match[2]))) for name, match in found if match]


def list_refused(files: Files, spool: str) -> list[Batch]:
    """Return the stages that were set aside."""
    found = map(parse_name, list_or_none(files, os.path.join(spool, INBOX, REFUSED)))
    return sorted(one[0] for one in found if one is not None)


def list_or_none(files: Files, directory: str) -> list[str]:
    """Return the names in a directory that need not be there."""
    try:
        return files.list(directory)
    except FileNotFoundError:
        return []


def why_refused(files: Files, spool: str, batch: Batch) -> str | None:
    """Return why a stage was set aside, None if it was not."""
    directory = set_aside(spool, batch)
    if not files.exists(directory):
        return None
    try:
        return _read_whole(files, os.path.join(directory, REASON)).decode()
    except FileNotFoundError:
        return "nobody could write down why"


# Reading, by the owner -----------------------------------------------------------------------------------------------


def read_manifest(files: Files, directory: str) -> Manifest:
    """Return what is in a stage.

    Raises:
        CorruptionError: its manifest is missing or damaged.
    """
    path = os.path.join(directory, MANIFEST)
    try:
        fields: dict[str, Any] = json.loads(unseal(_read_whole(files, path), path))
    except FileNotFoundError as error:
        raise CorruptionError(f"{path} is missing: let no cleaner work inside a spool") from error
    return Manifest(
        batch=Batch(*fields["batch"]),
        token=fields["token"],
        uuid=fields["uuid"],
        once=fields["once"],
        files=tuple(StageFile(*file) for file in fields["files"]),
    )


def _read_whole(files: Files, path: str) -> bytes:
    fd = files.open(path, READ, 0)
    try:
        return files.pread(fd, files.status(fd).st_size, 0)
    finally:
        files.close(fd)


class Piece(NamedTuple):
    """A block as it lies in a file; only its header was looked at."""

    data: memoryview
    header: Header
    where: str

    def check(self) -> None:
        """Raises CorruptionError: it is not what was written. Cost: 0.1 µs a KiB."""
        blocks.columns(self.data, self.header, where=self.where)

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
    if checksum != part.checksum:
        raise CorruptionError(
            f"{path} is another file than the one that was written: let nothing rename inside a spool"
        )


def remove_tree(files: Files, directory: str) -> None:
    """Remove a directory of files, if it is there; who else removes it meanwhile does no harm."""
    for name in list_or_none(files, directory):
        with suppress(FileNotFoundError):
            files.unlink(os.path.join(directory, name))
    with suppress(FileNotFoundError):
        files.remove_directory(directory)
