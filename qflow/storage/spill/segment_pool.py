"""What an area knows of its segments, under one lock: which hold messages, which are kept to be filled again.

The lock is never held during a file operation: what is dropped under it is unlinked after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from threading import Lock

from qflow.storage.files import Files
from qflow.storage.spill.segment import Maps, Segment
from qflow.storage.spill.segment_index import SegmentIndex
from qflow.storage.spill.shedding import Shedding
from qflow.storage.spill.store import AreaDirectory


class SegmentPool:
    """See the module. What is not said to take the lock is called under it."""

    def __init__(
        self,
        files: Files,
        directory: AreaDirectory,
        segment_bytes: int,
        max_kept: int,
        maps: Maps,
        shedding: Shedding,
    ) -> None:
        self.files = files
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.maps = maps
        self.shedding = shedding
        self.path = directory.path
        self._max_kept = max_kept
        self.lock = Lock()
        self.index = SegmentIndex(segment_bytes)
        self.tail: Segment | None = None
        """The segment that was written last."""
        self.kept: deque[Segment] = deque()
        self._dropped: list[Segment] = []
        self.next_slot = self._next_number = 0
        self.created = self.overwritten = self.read = self.unlinked = self.unlink_failures = 0
        self.given_up = 0

    @property
    def head(self) -> Segment | None:
        """The segment with the lowest slot."""
        return self.index.head

    def retire(self, segment: Segment) -> None:
        """Keep a segment that holds nothing, as soon as nobody reads it."""
        self.index.take_out(segment)
        segment.retired = True
        if not segment.pins:
            if segment.size != self.segment_bytes:
                self._dropped.append(segment)
                return
            self.keep([segment])
            if len(self.kept) > self._max_kept:
                self._dropped.append(self.kept.popleft())

    def keep(self, segments: Iterable[Segment]) -> None:
        """Keep segments to be filled again."""
        self.kept += segments
        self.shedding.note_kept()

    def take_dropped(self) -> list[Segment]:
        """Return the segments that are not kept; the caller unlinks them."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def unpin(self, segment: Segment) -> None:
        """Note that one reads a segment no more. Takes the lock."""
        with self.lock:
            segment.pins -= 1
            if not segment.retired or segment.pins or self.directory.removed:
                return
            self.retire(segment)
            dropped = self.take_dropped()
        for other in dropped:
            self.unlink(other)

    def unlink(self, segment: Segment) -> None:
        """Remove the file of a segment that nothing leads to. Takes the lock."""
        self.maps.drop(segment)
        done = failed = 0
        try:
            self.directory.unlink(segment.number)
            done = 1
        except FileNotFoundError:
            pass
        except OSError:
            failed = 1
        with self.lock:
            self.unlinked += done
            self.unlink_failures += failed

    def new_number(self) -> int:
        """Return the number of the next file. Takes the lock."""
        with self.lock:
            number = self._next_number
            self._next_number += 1
        return number

    def give_up(self) -> None:
        """Count a file that something else stands in the place of. Takes the lock."""
        with self.lock:
            self.given_up += 1

    def clear(self) -> list[Segment]:
        """Forget everything, and return what was known. Takes the lock."""
        with self.lock:
            known = {*self.index.segments(), *self.kept, *filter(None, (self.tail,))}
            self.index.clear()
            self.kept.clear()
            self.tail = None
        return list(known)
