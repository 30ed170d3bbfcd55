"""A segment: a file of fixed size that holds blocks of spilled messages; and how it is read.

By default a segment is read with `pread` into a buffer that is used again. With `max_mapped` above 0 it is read through
a memory map instead, as the mmap-queue of Apache SkyWalking Satellite does it. Maps were found no faster (`python -m
bench read-mapped`, messages of 1 and 16 KiB): pages are entered one by one, and asked for beforehand so that a disk
that fails gives an error and does not kill the process; they pay where the same segments are read again and again.
"""

from __future__ import annotations

import mmap
import os
from array import array
from itertools import pairwise
from threading import Lock
from typing import Protocol, TypeAlias

from qflow.descriptors import EXHAUSTED
from qflow.errors import CorruptionError
from qflow.storage.files import READ, Files, read_from

NOTHING_FREED: dict[int, int] = {}
State: TypeAlias = tuple[
    tuple["array[int]", "array[int]", "array[int] | None"],
    int,
    tuple[int, int, int, int],
    dict[int, int],
    tuple[int, ...],
]


class Segment:
    """A file and what is in it. Block `i` holds the slots from `firsts[i]` on and begins at byte `starts[i]`."""

    __slots__ = (
        "area",
        "damaged",
        "end",
        "firsts",
        "freed",
        "identity",
        "keys",
        "live",
        "live_bytes",
        "map",
        "number",
        "pins",
        "retired",
        "size",
        "spans",
        "starts",
        "used",
    )

    def __init__(self, area: Area, number: int, size: int) -> None:
        self.area = area
        self.number = number
        self.size = size
        self.identity = 0
        """Of its file; see `identity_of`."""
        self.map: mmap.mmap | None = None
        self.pins = 0
        """Readers at this moment; it is not filled again meanwhile."""
        self.retired = False
        """Nothing leads here any more; kept when nobody reads it."""
        self.begin_anew()

    @property
    def path(self) -> str:
        return self.area.path(self.number)

    def begin_anew(self) -> None:
        """Hold nothing."""
        self.firsts, self.starts = array("Q"), array("I")
        self.spans: array[int] | None = None
        """How many slots each block covers; None: up to the next block."""
        self.end = 0
        """The slot after the last one."""
        self.used = 0
        """Bytes."""
        self.live = 0
        """Messages put into it and not freed."""
        self.live_bytes = 0
        """About how many of the bytes those take."""
        self.freed = NOTHING_FREED
        """Block: bits of its slots that hold nothing any more."""
        self.keys: tuple[int, ...] = ()
        """Where the index leads here."""
        self.damaged = False

    def add(self, slot: int, span: int, start: int, messages: int) -> None:
        """Enter a block behind the others, with so many messages in use."""
        if slot != self.end and self.firsts and self.spans is None:
            self.spans = array("H", map(self.span_of, range(len(self.firsts))))
        self.firsts.append(slot)
        self.starts.append(start)
        if self.spans is not None:
            self.spans.append(span)
        self.end = slot + span
        self.live += messages

    def state(self) -> State:
        """Return what `add` and `begin_anew` change, so that it can be had back."""
        arrays = self.firsts, self.starts, self.spans
        return (
            arrays,
            len(self.firsts),
            (self.end, self.used, self.live, self.live_bytes),
            self.freed,
            self.keys,
        )

    def restore(self, state: State) -> None:
        """Be again as `state` says."""
        (self.firsts, self.starts, self.spans), blocks, numbers, self.freed, self.keys = state
        self.end, self.used, self.live, self.live_bytes = numbers
        for column in (self.firsts, self.starts, self.spans):
            if column is not None:
                del column[blocks:]

    def span_of(self, block: int) -> int:
        """Return how many slots a block covers."""
        if self.spans is not None:
            return self.spans[block]
        stop = self.firsts[block + 1] if block + 1 < len(self.firsts) else self.end
        return stop - self.firsts[block]

    def end_of(self, block: int) -> int:
        """Return the byte after a block."""
        return self.starts[block + 1] if block + 1 < len(self.starts) else self.used

    def free(self, block: int, bits: int) -> None:
        """Set which slots of a block hold nothing any more."""
        if self.freed is NOTHING_FREED:
            self.freed = {}
        self.freed[block] = bits


class Area(Protocol):
    """What a segment's area tells: where files are, and which segments are the first and the last one."""

    tail: Segment | None

    @property
    def head(self) -> Segment | None: ...

    def path(self, number: int) -> str: ...


def identity_of(status: os.stat_result) -> int:
    """Return a number that tells a file from any other: device and inode."""
    return status.st_dev << 64 | status.st_ino


def open_segment(files: Files, segment: Segment) -> int:
    """Return a descriptor for reading a segment; raises OSError, or CorruptionError for another file in its place.

    It may have been cut short: what is left of it can be read.
    """
    fd = files.open(segment.path, READ, 0)
    try:
        status = files.status(fd)
        if identity_of(status) != segment.identity:
            raise CorruptionError(f"{segment.path}: not the file that was written")
    except BaseException:
        files.close(fd)
        raise
    return fd


class Maps:
    """The segments that are mapped, of all areas of a store: a bounded number, or none.

    When one more is needed, the one that hurts least goes: a free one, else the one that lies furthest behind its
    queue's head; heads and tails only where there is nothing else.
    """

    def __init__(self, files: Files, most: int) -> None:
        self._files = files
        self.most = most
        self._lock = Lock()
        self._mapped: set[Segment] = set()

    def view(self, segment: Segment, start: int, stop: int) -> memoryview:
        """Return bytes of a segment, mapping it if need be; raises OSError and CorruptionError."""
        mapped = segment.map or self._map(segment)
        self._files.bring_in(mapped, start, stop)
        return memoryview(mapped)[start:stop]

    def _map(self, segment: Segment) -> mmap.mmap:
        try:
            return self._try_to_map(segment)
        except OSError as error:
            if error.errno not in EXHAUSTED or not self._mapped:
                raise
            self.clear()  # the maps themselves hold the descriptors
            return self._try_to_map(segment)

    def _try_to_map(self, segment: Segment) -> mmap.mmap:
        fd = open_segment(self._files, segment)
        try:
            size = self._files.status(fd).st_size
            if size < segment.size:
                raise CorruptionError(f"{segment.path}: {size} bytes, expected {segment.size}")
            mapped = self._files.map(fd, segment.size)
        finally:
            self._files.close(fd)
        with self._lock:
            # One that is read at this moment stays mapped for its reader, though it does not count any more.
            if len(self._mapped) >= self.most and segment not in self._mapped:
                self._forget(max(self._mapped, key=_expendable))
            self._mapped.add(segment)
            segment.map = mapped
        return mapped

    def _forget(self, segment: Segment) -> None:
        segment.map = None
        self._mapped.discard(segment)

    def drop(self, segment: Segment) -> None:
        """Unmap a segment whose file is given up."""
        if segment.map is not None:
            with self._lock:
                self._forget(segment)

    def clear(self) -> None:
        """Unmap everything."""
        with self._lock:
            for segment in list(self._mapped):
                self._forget(segment)


def _expendable(segment: Segment) -> tuple[int, int]:
    """Rank mapped segments by how little it hurts to unmap them; a glance without the area's lock."""
    keys, head = segment.keys, segment.area.head
    first = head.keys if head is not None else ()
    if not keys or not first:
        return 2, 0
    if segment is segment.area.tail or segment is head:
        return 0, 0
    return 1, keys[0] - first[0]


class Reading:
    """Reads blocks one after the other; holds the descriptor of the segment it is in, so it must be left in the end."""

    def __init__(self, files: Files, maps: Maps) -> None:
        self._files = files
        self._maps = maps
        self._fd = -1
        self._segment: Segment | None = None
        self._buffer = bytearray()

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        fd, self._fd, self._segment = self._fd, -1, None
        if fd >= 0:
            self._files.close(fd)

    def view(self, segment: Segment, start: int, stop: int) -> memoryview:
        """Return bytes of a segment, good until the next call; raises OSError and CorruptionError.

        Cost: 1 µs, and 0.06 µs a KiB; 4 µs more for another segment than before.
        """
        if self._maps.most:
            return self._maps.view(segment, start, stop)
        self._enter(segment)
        size = stop - start
        if size > len(self._buffer):
            self._buffer = bytearray(size)
        view = memoryview(self._buffer)[:size]
        done = 0
        while done < size:
            read = self._files.preadv(self._fd, [view[done:]], start + done)
            if not read:
                raise CorruptionError(f"{segment.path}: ends at byte {start + done}")
            done += read
        return view

    def pieces(self, segment: Segment, start: int, stop: int, *cuts: int) -> list[bytes]:
        """Return bytes of a segment as copies, cut at these bytes after `start` (negative: before `stop`)."""
        self._enter(segment)
        edges = [start, *(cut + (start if cut >= 0 else stop) for cut in cuts), stop]
        return [read_from(self._files, self._fd, low, high - low) for low, high in pairwise(edges)]

    def _enter(self, segment: Segment) -> None:
        if segment is not self._segment:
            self._leave()
            self._fd = open_segment(self._files, segment)
            self._segment = segment
