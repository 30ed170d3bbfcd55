"""What any spill store must do, and what the store of files does besides; the slots, and the wipe.

A store is made by a function of (files, spool); the tests of the contract run on each in STORES.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
import threading
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qflow import config, options
from qflow.errors import DiskFull, PermissionDenied, StorageError
from qflow.message import OVERHEAD_BYTES, Message
from qflow.spool import SPILL_STORES
from qflow.storage.files import Files
from qflow.storage.spill import files as spill_files
from qflow.storage.spill.files import FilesArea, SpillFiles
from qflow.storage.spill.segments import SpillSegments
from qflow.storage.spill.store import Ranges, Slots, SpillStore, directory_name
from qflow.storage.spill.wiper import Wiper, wipe_spill

STORES: dict[str, Callable[[Files, str], SpillStore]] = {
    "files": SpillFiles,
    "segments": partial(SpillSegments, segment_bytes=4096),
    "mapped segments": partial(SpillSegments, segment_bytes=4096, max_mapped=3),
    "segments of one message": partial(SpillSegments, segment_bytes=256),
}
MUCH = 2**40
HOT = ("open", "close", "read", "pwrite", "lseek", "ftruncate", "unlink")
SAME = {"pwritev": "pwrite", "bring_in": "read", "pread": "read", "preadv": "read"}
"""Operations that count, and fail, as another one does."""
COLD = (
    *SAME,
    "status",
    "lstat",
    "exists",
    "make_directory",
    "remove_directory",
    "rename",
    "list",
    "scan",
)


class Crash(BaseException):
    """The process ends here."""


class FaultyFiles(Files):
    """Files whose operations fail on request: after so many calls of an operation (or of any), for so many calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failures: dict[str, tuple[int, int, BaseException]] = {}
        self.crash_at = MUCH
        for name in HOT + COLD:
            setattr(self, name, self._watched(SAME.get(name, name), getattr(super(), name)))

    def fail(self, operation: str, error: int | BaseException, after: int = 0, times: int = MUCH) -> None:
        failure = OSError(error, os.strerror(error)) if isinstance(error, int) else error
        self.failures[operation] = (after, after + times, failure)

    def heal(self) -> None:
        self.failures.clear()

    def _watched(self, name, real):
        def operation(*arguments):
            self.calls.append(name)
            if len(self.calls) > self.crash_at:
                raise Crash
            if name in self.failures:
                start, stop, failure = self.failures[name]
                self.failures[name] = (start - 1, stop - 1, failure)
                if start <= 0 < stop:
                    raise failure
            return real(*arguments)

        return operation


@pytest.fixture
def spool(tmp_path):
    path = str(tmp_path)
    wipe_spill(Files(), path)
    return path


@pytest.fixture
def files():
    return FaultyFiles()


@pytest.fixture(params=STORES.values(), ids=STORES)
def make(request):
    return request.param


@pytest.fixture
def store(make, files, spool):
    with_store = make(files, spool)
    yield with_store
    with_store.close()


@pytest.fixture
def area(store):
    return store.area("orders", 7, 3)


@pytest.fixture
def path_of(spool):
    """The path of a slot of `area`, for the store of files."""
    return lambda slot: os.path.join(spool, "spill", directory_name("orders", 7, 3), f"{slot:x}")


def bodies(count: int, size: int = 100, seed: int = 0) -> list:
    source = random.Random(seed)
    return [source.randbytes(size) for _ in range(count)]


def all_files(top: str) -> list[str]:
    return sorted(
        os.path.relpath(os.path.join(folder, name), top) for folder, _, names in os.walk(top) for name in names
    )


def good(area, first: int, slots: Slots, expected: list) -> bool:
    return area.read(first, slots, MUCH, max(map(len, expected))) == (expected, [])


# The contract --------------------------------------------------------------------------------------------------------


def test_every_store_that_may_be_chosen_is_made_and_under_this_contract():
    """By the same names in the settings, for type checkers and here."""
    assert set(SPILL_STORES) == set(config.SPILL_STORES) == set(get_args(options.Spill))
    assert SPILL_STORES.keys() <= STORES.keys()


def test_what_was_written_is_read(area):
    """Bodies, empty ones, headers and the mark of a message that is not logged come back as they were."""
    records = [b"", b"body", Message(b"body", b'{"a":1}'), Message(b"", b"", logged=False), b"x" * 5000]
    slots = area.write(2**40, records)
    assert len(slots) == 5
    assert good(area, 2**40, slots, records)
    assert good(area, 2**40, slots, records), "reading frees nothing"
    assert area.counters().read > 0
    assert area.problems(Ranges.of(slots)) == []


@pytest.mark.parametrize("size", [2**16 - 100, 2**16 - 61, 2**16 - 60, 2**16 - 1, 2**16, 2**16 + 1, 3 * 2**20])
def test_large_messages_come_back_too(area, size):
    """Sizes around and above the bound where bodies are no longer copied, alone or among small ones."""
    records = [b"small", *bodies(1, size), Message(*bodies(1, size), b'{"h":1}'), b""]
    slots = area.write(5, records)
    assert good(area, 5, slots, records)
    area.free(slots)
    slots = area.write(9, records[::-1])
    assert good(area, 9, slots, records[::-1])
    assert area.problems(Ranges.of(slots)) == []


def test_places_are_used_again(area):
    """Messages written over freed ones, shorter and longer, come back as they were, and take no new files."""
    sizes = [100, 10, 150, 0, 100, 99, 100, 150]
    created = []
    for first, size in enumerate(sizes * 2):
        records = bodies(20, size, seed=first)
        slots = area.write(first * 20, records)
        assert good(area, first * 20, slots, records)
        assert area.problems(Ranges.of(slots)) == []
        area.free(slots)
        created.append(area.counters().created)
    counters = area.counters()
    assert created[-1] == created[len(sizes)]
    assert counters.overwritten > counters.created or counters.created == 1, "one segment begins anew each time"
    assert counters.created - counters.kept in (0, 1), "a segment that is still appended to is not kept"
    assert counters.unlinked == 0


def test_parts_of_a_run_can_be_read_and_freed(area):
    """Slots split from a run are read under their own first sequence and freed alone."""
    records = bodies(30)
    head, rest = area.write(100, records).take(10)
    middle, tail = rest.take(10)
    area.free(middle)
    again = area.write(500, records[:10])
    assert good(area, 100, head, records[:10])
    assert good(area, 120, tail, records[20:])
    assert good(area, 500, again, records[:10])
    assert area.problems(Ranges.of([*head, *tail, *again])) == []


def test_reading_stops_at_the_bytes_asked_for(area):
    """No more is read than the charges of the messages allow, yet one message always, and half of what is allowed."""
    records = [b"x" * size for size in (100, 50, 200, 0, 100)]
    slots = area.write(0, records)
    ends = [sum(len(record) + OVERHEAD_BYTES for record in records[:count]) for count in range(1, 6)]
    for room in range(ends[-1] + 2):
        found, problems = area.read(0, slots, room, 200)
        assert problems == []
        assert found == records[: len(found)]
        assert max(1, sum(end <= room / 2 for end in ends)) <= len(found) <= max(1, sum(end <= room for end in ends))
        if isinstance(area, FilesArea) or room == ends[-1]:
            assert len(found) == max(1, sum(end <= room for end in ends))


def test_areas_do_not_see_each_other(store):
    """Two queues, and two lives of one queue, keep their messages apart."""
    keys = [("a", 1, 1), ("a", 2, 1), ("a", 1, 2), ("A", 1, 3), ("b", 3, 1)]
    areas = [store.area(*key) for key in keys]
    written = [area.write(0, bodies(3, seed=number)) for number, area in enumerate(areas)]
    for number, (area, slots) in enumerate(zip(areas, written, strict=True)):
        assert good(area, 0, slots, bodies(3, seed=number))


def test_a_check_tells_of_files_that_are_missing_or_nobodys(area, spool):
    """What was removed under messages, and what no message has, are named by their paths."""
    slots = area.write(0, bodies(3, 3000))
    assert area.problems(Ranges.of(slots)) == []
    first, *_ = sorted(path for path in all_files(spool) if path.startswith("spill"))
    stray = os.path.join(spool, os.path.dirname(first), "abcdef")
    with open(stray, "w"):
        os.unlink(os.path.join(spool, first))
    assert area.problems(Ranges.of(slots)) == [
        f"{os.path.join(spool, first)} is missing",
        f"1 spill files belong to no message, such as {stray}",
    ]


HOSTILE = [
    "..", ".", "/", "../../etc/passwd", "\0", "a\0b", "", "x" * 300, "😀" * 100, "naïve", "a b\n", "%2F", "\ud800",
    "CON", ".hidden", "-rf", "~", "a.00000001-0000000000000001", "*",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_any_queue_name_will_do(store, spool, name):
    """Names that mean something to a file system, or that it cannot hold, make no difference."""
    before = set(os.listdir(os.path.dirname(spool)))
    area = store.area(name, 1, 1)
    slots = area.write(0, [b"body"])
    assert good(area, 0, slots, [b"body"])
    assert set(os.listdir(os.path.dirname(spool))) == before
    assert set(os.listdir(spool)) == {"spill", "wiping"}
    assert all(file.startswith("spill" + os.sep) for file in all_files(spool))


FULL = [errno.ENOSPC, errno.EDQUOT]
FAULTS = [*FULL, errno.EFBIG, errno.EMFILE, errno.EIO, errno.EROFS, errno.EACCES]
KINDS = {errno.ENOSPC: DiskFull, errno.EDQUOT: DiskFull, errno.EFBIG: DiskFull, errno.EACCES: PermissionDenied}


def calls_of(files, operation: str, action: Callable[[], object]) -> int:
    """Do something and return how often it called an operation."""
    files.calls.clear()
    action()
    return files.calls.count(operation)


def check_failed_write(make, files, spool, number: int, operation: str, kept: int, records: list) -> None:
    def prepared(name: str):
        area = make(files, spool).area(name, 7, 3)
        old = area.write(0, bodies(5, 3000))
        if kept:
            area.free(area.write(50, bodies(kept, 3000)))
        return area, old

    rehearsal = prepared("rehearsal")[0]
    calls = calls_of(files, operation, lambda: rehearsal.write(100, records))
    assert calls > 0
    area, old = prepared("orders")
    before = area.counters().kept
    files.fail(operation, number, calls * 2 // 3)
    with pytest.raises(StorageError) as caught:
        area.write(100, records)
    assert type(caught.value) is KINDS.get(number, StorageError)

    files.heal()
    assert area.problems(Ranges.of(old)) == []
    assert good(area, 0, old, bodies(5, 3000))
    kept_now = area.counters().kept
    assert kept_now == 0 if number in FULL else kept_now >= before - 1  # a full disk was given all of them
    new = area.write(100, records)
    assert good(area, 100, new, records)
    assert area.problems(Ranges.of([*old, *new])) == []


@pytest.mark.in_memory
@pytest.mark.parametrize("number", FAULTS, ids=errno.errorcode.get)
@pytest.mark.parametrize("operation", ["open", "pwrite", "close"])
@pytest.mark.parametrize("kept", [0, 4, 10])
def test_a_write_that_fails_in_the_middle_leaves_nothing(make, files, spool, number, operation, kept):
    """Nothing of the failed call is left in use, what was there before is unharmed, and the next write works."""
    check_failed_write(make, files, spool, number, operation, kept, bodies(10, 3000))


@pytest.mark.in_memory
@pytest.mark.parametrize("number", [number for number in FAULTS if number not in FULL], ids=errno.errorcode.get)
@pytest.mark.parametrize("operation", ["lseek", "ftruncate"])
def test_a_write_that_cannot_cut_an_old_file_leaves_nothing(files, spool, number, operation):
    """A shorter message over a longer one needs the old file cut, or the write fails as a whole.

    On a full disk old files are given back, and the messages go to new ones.
    """
    check_failed_write(SpillFiles, files, spool, number, operation, 10, bodies(10, 50))


@pytest.mark.parametrize("number", FAULTS, ids=errno.errorcode.get)
def test_a_segment_that_cannot_be_made_leaves_nothing(files, spool, number):
    """A new segment is given its size at once, or the write fails as a whole."""
    make = partial(SpillSegments, segment_bytes=4096)
    check_failed_write(make, files, spool, number, "ftruncate", 2, bodies(10, 3000))


@pytest.mark.in_memory
def test_a_disk_that_stays_full_has_each_area_looked_at_once(make, files, spool, monkeypatch):
    """With 10,000 queues a look takes 10 ms, and each of them that has to spill tries again and again."""
    store = make(files, spool)
    writer, other = store.area("orders", 7, 3), store.area("other", 8, 3)
    asked = []
    monkeypatch.setattr(type(other), "shed", lambda area, wanted: asked.append(area) or 0)
    files.fail("open", errno.ENOSPC)
    for _ in range(3):
        with pytest.raises(DiskFull):
            writer.write(0, bodies(3, 3000))
    assert asked == [other, writer]
    files.heal()
    other.free(other.write(0, bodies(200, 100)))
    assert other.counters().kept
    files.fail("open", errno.ENOSPC)
    with pytest.raises(DiskFull):
        writer.write(0, bodies(3, 3000))
    assert asked == 2 * [other, writer]


def test_an_interrupted_write_leaves_nothing(area, files):
    """Ctrl-C in the middle of a write is passed on, and cleaned up after."""
    area.free(area.write(0, bodies(3, 3000)))
    kept = area.counters().kept
    files.fail("pwrite", KeyboardInterrupt(), after=5)
    with pytest.raises(KeyboardInterrupt):
        area.write(0, bodies(10, 3000))
    assert area.problems(Ranges([])) == []
    assert area.counters().kept == kept
    files.heal()
    slots = area.write(0, bodies(10, 3000))
    assert good(area, 0, slots, bodies(10, 3000))


def test_a_shorter_message_after_a_failed_longer_one_is_whole(area, files):
    """What a failed write left behind is not seen by the shorter message that takes its place."""
    area.free(area.write(0, [b"x" * 10]))

    def half(fd, data, position):
        if position:
            raise OSError(errno.ENOSPC, "full")
        return os.pwrite(fd, data[:2500], 0)

    whole = files.pwrite, files.pwritev
    files.pwrite, files.pwritev = half, lambda fd, pieces, position: half(fd, b"".join(pieces), position)
    with pytest.raises(DiskFull):
        area.write(1, [b"x" * 5000])
    files.pwrite, files.pwritev = whole
    for sequence, size in ((1, 5), (2, 2000), (3, 3000)):
        slots = area.write(sequence, [b"y" * size])
        assert good(area, sequence, slots, [b"y" * size])
        area.free(slots)


def test_files_that_a_failing_disk_leaves_behind_do_no_harm(area, files):
    """A file that could neither be written nor unlinked is not used again, and messages after it are whole."""
    area.free(area.write(0, [b"x" * 10]))
    files.fail("close", errno.EIO, times=1)
    files.fail("unlink", errno.EIO)
    with pytest.raises(StorageError):
        area.write(1, [b"x" * 5000])
    files.fail("close", errno.ENOSPC, times=1)
    with pytest.raises(StorageError):
        area.write(1, [b"x" * 5000])
    files.heal()
    for sequence in range(2, 6):
        slots = area.write(sequence, [b"short"])
        assert good(area, sequence, slots, [b"short"])
        area.free(slots)


def test_short_writes_are_continued(area, files):
    """A system that takes a few bytes at a time still stores whole messages."""
    files.pwrite = lambda fd, data, position: os.pwrite(fd, bytes(data[:33]), position)
    files.pwritev = lambda fd, pieces, position: files.pwrite(fd, b"".join(pieces), position)
    for first, sizes in enumerate([(1000, 50), (1000, 50), (70_000, 10), (70_000, 10)]):
        records = [bytes([first]) * size for size in sizes]
        slots = area.write(first * 10, records)
        assert good(area, first * 10, slots, records)
        area.free(slots)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM])
def test_reading_without_descriptors_or_rights_loses_nothing(area, files, number):
    """When no file can be opened for now, what was read is returned, or the call fails; nothing is called damaged."""
    records = bodies(5, 3000)
    slots = area.write(0, records)
    files.fail("open", number, after=2)
    assert area.read(0, slots, MUCH, 3000) == (records[:2], [])
    with pytest.raises(StorageError):
        area.read(2, slots.take(2)[1], MUCH, 3000)
    files.heal()
    assert good(area, 0, slots, records)


def test_an_unreadable_message_is_reported_and_the_next_one_served(area, files):
    """A message the disk does not give back is None, with its sequence and the reason."""
    records = bodies(3, 3000)
    slots = area.write(10, records)
    files.fail("read", errno.EIO, after=1, times=1)
    found, problems = area.read(10, slots, MUCH, 3000)
    assert found == [records[0], None, records[2]]
    assert [sequence for sequence, _ in problems] == [11]
    assert os.strerror(errno.EIO) in problems[0][1]


def test_reading_under_another_sequence_is_noticed(area):
    """Slots read for the wrong messages give no bytes."""
    slots = area.write(10, bodies(2))
    found, problems = area.read(11, slots, MUCH, 100)
    assert found == [None, None]
    assert [sequence for sequence, _ in problems] == [11, 12]


def keep_at_most(area, files):
    """Have an area of either store keep so many freed files."""
    getattr(area, "_pool", area)._max_kept = files


def test_freeing_never_raises(area, files):
    """Places that cannot be given back are counted."""
    keep_at_most(area, 0)
    slots = area.write(0, bodies(5, 3000))
    files.fail("unlink", errno.EACCES, times=2)
    area.free(slots)
    assert area.counters().unlink_failures == 2
    assert area.counters().unlinked in (2, 3), "the segment written last is not unlinked"


def test_a_removed_area_is_empty_and_refuses(area, store, spool, files):
    """After remove no message is readable, freeing late slots is harmless, writing fails; a next life starts clean."""
    slots = area.write(0, bodies(3))
    area.remove()
    area.remove()
    area.free(slots)
    assert area.counters().kept == 0
    with pytest.raises(StorageError):
        area.write(3, bodies(1))
    assert area.read(0, slots, MUCH, 100)[0] == [None] * 3
    assert area.problems(Ranges([])) == []
    again = store.area("orders", 7, 4)
    assert good(again, 0, again.write(0, [b"new"]), [b"new"])
    drain(files, spool)
    assert len(all_files(spool)) == 1


def test_a_queue_deleted_while_it_spills_leaves_nothing(area, files, spool):
    """A write that is under way when the area is removed fails, and does not bring its directory back."""
    turns = []

    def removing(write):
        def remove_then_write(fd, data, position):
            turns.append(position)
            if len(turns) == 3:
                area.remove()
            return write(fd, data, position)

        return remove_then_write

    files.pwrite, files.pwritev = removing(files.pwrite), removing(files.pwritev)
    with pytest.raises(StorageError):
        area.write(0, bodies(6, 3000))
    drain(Files(), spool)
    assert all_files(spool) == []
    assert os.listdir(os.path.join(spool, "spill")) == []


def test_an_area_never_written_to_is_removed_without_trace(store, spool):
    """A queue that never spilled has nothing on disk, before or after."""
    area = store.area("idle", 1, 1)
    area.free(Slots())
    area.remove()
    assert os.listdir(os.path.join(spool, "spill")) == os.listdir(os.path.join(spool, "wiping")) == []
    assert area.counters().unlink_failures == 0


def test_threads_share_an_area(area):
    """Threads that write, read and free at once get their own messages and no slot twice."""
    wrong: list = []
    held: list[Slots] = []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        start.wait()
        for turn in range(60):
            first = (number * 60 + turn) * 8
            records = bodies(8, 20 + turn, seed=first)
            slots = area.write(first, records)
            if area.read(first, slots, MUCH, 100) != (records, []):
                wrong.append(first)
            (held.append if turn % 10 == 0 else area.free)(slots)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert area.problems(Ranges.of([slot for slots in held for slot in slots])) == []


class AnyHistory(RuleBasedStateMachine):
    """An area against a plain list of runs, with failures in between."""

    make = staticmethod(STORES["files"])

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        wipe_spill(Files(), self.folder.name)
        self.files = FaultyFiles()
        self.area = self.make(self.files, self.folder.name).area("q", 1, 1)
        keep_at_most(self.area, 6)
        self.runs: list[tuple[int, Slots, list]] = []
        self.next = 0

    @rule(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=8))
    def write(self, sizes):
        records = [bytes([self.next % 256]) * size for size in sizes]
        self.runs.append((self.next, self.area.write(self.next, records), records))
        self.next += len(records)

    @rule(
        operation=st.sampled_from(["open", "pwrite", "lseek", "ftruncate", "close", "make_directory"]),
        number=st.sampled_from([errno.ENOSPC, errno.EIO, errno.EMFILE]),
        after=st.integers(0, 6),
        sizes=st.lists(st.integers(0, 300), min_size=1, max_size=8),
    )
    def write_with_a_failure(self, operation, number, after, sizes):
        self.files.fail(operation, number, after, times=1)
        try:
            self.write(sizes)
        except StorageError:
            pass
        finally:
            self.files.heal()

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def free_the_head_of_a_run(self, data):
        index = data.draw(st.integers(0, len(self.runs) - 1))
        first, slots, records = self.runs.pop(index)
        count = data.draw(st.integers(1, len(slots)))
        head, rest = slots.take(count)
        self.area.free(head)
        if rest:
            self.runs.insert(index, (first + count, rest, records[count:]))

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def free_the_middle_of_a_run(self, data):
        index = data.draw(st.integers(0, len(self.runs) - 1))
        first, slots, records = self.runs.pop(index)
        low = data.draw(st.integers(0, len(slots) - 1))
        high = data.draw(st.integers(low + 1, len(slots)))
        head, rest = slots.take(low)
        middle, tail = rest.take(high - low)
        self.area.free(middle)
        self.runs[index:index] = [
            run for run in ((first, head, records[:low]), (first + high, tail, records[high:])) if run[1]
        ]

    @invariant()
    def every_message_is_there(self):
        for first, slots, records in self.runs:
            assert good(self.area, first, slots, records)
        assert self.area.problems(Ranges.of([slot for _, slots, _ in self.runs for slot in slots])) == []
        assert self.area.counters().kept <= 6 + 8  # a failed write may give back what it took

    def teardown(self):
        self.folder.cleanup()


class AnyHistoryOfSegments(AnyHistory):
    make = staticmethod(partial(SpillSegments, segment_bytes=700))


class AnyHistoryOfMappedSegments(AnyHistory):
    make = staticmethod(partial(SpillSegments, segment_bytes=700, max_mapped=2))


TestAnyHistory = AnyHistory.TestCase
TestAnyHistoryOfSegments = AnyHistoryOfSegments.TestCase
TestAnyHistoryOfMappedSegments = AnyHistoryOfMappedSegments.TestCase
ANY_HISTORY = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestAnyHistory.settings = TestAnyHistoryOfSegments.settings = TestAnyHistoryOfMappedSegments.settings = ANY_HISTORY


# The store of files --------------------------------------------------------------------------------------------------


def damage_flip(path):
    with open(path, "r+b") as file:
        file.seek(60)
        byte = file.read(1)[0]
        file.seek(60)
        file.write(bytes([byte ^ 1]))


def damage_truncate(path):
    os.truncate(path, os.path.getsize(path) - 1)


def damage_empty(path):
    os.truncate(path, 0)


def damage_lengthen(path):
    with open(path, "ab") as file:
        file.write(b"\0")


def damage_lengthen_much(path):
    with open(path, "ab") as file:
        file.write(b"\0" * 100_000)


def damage_swap(path):
    other = path[:-1] + "0"
    os.rename(path, path + ".tmp")
    os.rename(other, path)
    os.rename(path + ".tmp", other)


def damage_copy_of_another(path):
    with open(path[:-1] + "2", "rb") as file:
        data = file.read()
    with open(path, "wb") as file:
        file.write(data)


def damage_remove(path):
    os.unlink(path)


def damage_fifo(path):
    os.unlink(path)
    os.mkfifo(path)


def damage_link_to_another(path):
    os.rename(path, path + ".moved")
    os.symlink(path + ".moved", path)


def damage_directory(path):
    os.unlink(path)
    os.mkdir(path)


DAMAGES = {name: value for name, value in globals().items() if name.startswith("damage_")}


@pytest.fixture
def file_area(files, spool):
    """The area of `path_of`."""
    return SpillFiles(files, spool).area("orders", 7, 3)


@pytest.mark.parametrize("size", [100, 70_000])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_detected(file_area, path_of, damage, size):
    """Whatever is done to a file, its message is None with a problem naming the file, and the others are served."""
    records = bodies(3, size)
    slots = file_area.write(10, records)
    damage(path_of(1))
    found, problems = file_area.read(10, slots, MUCH, size)
    assert found[1:] == [None, records[2]]
    assert found[0] in (records[0], None)
    assert (found[0] is None) == (damage is damage_swap)
    assert {sequence for sequence, _ in problems} == ({10, 11} if damage is damage_swap else {11})
    assert path_of(1) in dict(problems)[11]


@pytest.mark.parametrize("plant", ["symlink", "fifo", "fifo with a reader", "directory", "missing"])
def test_what_stands_in_a_kept_files_place_is_not_written_to(file_area, path_of, tmp_path, plant):
    """A kept file that was replaced is left alone, its message goes elsewhere, in order."""
    file_area.free(file_area.write(0, bodies(3)))
    os.unlink(path_of(1))
    precious = tmp_path / "precious"
    precious.write_text("precious")
    reader = -1
    if plant == "symlink":
        os.symlink(precious, path_of(1))
    elif plant == "directory":
        os.mkdir(path_of(1))
    elif plant != "missing":
        os.mkfifo(path_of(1))
        reader = os.open(path_of(1), os.O_RDONLY | os.O_NONBLOCK) if "reader" in plant else -1
    records = bodies(5)
    slots = file_area.write(10, records)
    assert good(file_area, 10, slots, records)
    assert (1 in list(slots)) == (plant == "missing")
    assert precious.read_text() == "precious"
    assert file_area.problems(Ranges.of(slots)) == []
    if reader >= 0:
        assert os.read(reader, 10) == b"", "something was written into the pipe"
        os.close(reader)
    file_area.free(slots)
    assert 1 not in list(file_area.write(20, records)) or plant == "missing"


@pytest.mark.parametrize("plant", ["file", "symlink", "fifo", "directory"])
def test_what_stands_in_a_fresh_files_place_is_left_alone(file_area, path_of, plant):
    """A number that somebody else uses is skipped for good, and never removed, also when the write fails."""
    file_area.write(0, bodies(1))
    path = path_of(2)
    {
        "file": lambda: open(path, "w").close(),
        "symlink": lambda: os.symlink("/nowhere", path),
        "fifo": lambda: os.mkfifo(path),
        "directory": lambda: os.mkdir(path),
    }[plant]()
    before = os.lstat(path)
    records = bodies(4)
    slots = file_area.write(10, records)
    assert good(file_area, 10, slots, records)
    assert 2 not in list(slots)
    file_area.free(slots)
    file_area.write(20, bodies(10))
    assert (os.lstat(path).st_ino, os.lstat(path).st_size) == (before.st_ino, before.st_size)


def test_a_planted_file_survives_a_failed_write(file_area, files, path_of):
    """Undoing a write removes only what the write made."""
    file_area.write(0, bodies(1))
    for slot in (2, 5):
        with open(path_of(slot), "w") as file:
            file.write("precious")
    files.fail("pwrite", errno.ENOSPC, after=2)
    with pytest.raises(DiskFull):
        file_area.write(10, bodies(10))
    assert sorted(os.listdir(os.path.dirname(path_of(0)))) == ["0", "2", "5"]


@pytest.mark.parametrize("gone", ["queue", "spill"])
@pytest.mark.parametrize("kept", [0, 3])
def test_a_directory_removed_underneath_is_made_again(file_area, path_of, spool, gone, kept):
    """Messages in it are missing; new ones are written as if nothing had happened."""
    lost = file_area.write(0, bodies(2))
    file_area.free(file_area.write(5, bodies(kept)))
    shutil.rmtree(os.path.dirname(path_of(0)) if gone == "queue" else os.path.join(spool, "spill"))
    records = bodies(6)
    slots = file_area.write(10, records)
    assert good(file_area, 10, slots, records)
    assert file_area.read(0, lost, MUCH, 100)[0] == [None, None]
    assert file_area.problems(Ranges.of(slots)) == []
    assert stat.S_IMODE(os.stat(os.path.dirname(path_of(0))).st_mode) == 0o700


def test_a_directory_that_cannot_be_made_again_is_an_error(file_area, path_of):
    """A file in the directory's place is refused and left alone."""
    with open(os.path.dirname(path_of(0)), "w") as file:
        file.write("precious")
    with pytest.raises(StorageError):
        file_area.write(0, bodies(1))
    with open(os.path.dirname(path_of(0))) as file:
        assert file.read() == "precious"


def test_files_and_directories_are_private(file_area, path_of):
    """Directories are 0700 and files 0600."""
    file_area.write(0, bodies(1))
    assert stat.S_IMODE(os.stat(path_of(0)).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(path_of(0))).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(os.path.dirname(os.path.dirname(path_of(0)))).st_mode) == 0o700


def test_no_more_files_are_kept_than_the_bound(files, spool):
    """Freed files over the bound are unlinked."""
    area = SpillFiles(files, spool, max_kept=5).area("orders", 7, 3)
    slots = area.write(0, bodies(8))
    area.free(slots)
    assert (area.counters().kept, area.counters().unlinked) == (5, 3)
    assert len(all_files(spool)) == 5
    assert area.problems(Ranges([])) == []
    slots = area.write(10, bodies(8))
    head, rest = slots.take(3)
    area.free(head)
    area.free(rest)
    assert area.counters().kept == len(all_files(spool)) == 5


def test_kept_files_are_bounded_in_bytes_too(files, spool, monkeypatch):
    """Fewer files are kept when the messages are large."""
    monkeypatch.setattr(spill_files, "MAX_KEPT_BYTES", 10_000)
    area = SpillFiles(files, spool).area("orders", 7, 3)
    area.free(area.write(0, bodies(8, 3000)))
    assert area.counters().kept == 3


def test_files_freed_in_any_order_are_kept_as_few_ranges(files, spool):
    """A range takes more than 100 bytes: 32,768 files, each a range, would take 4 MB of a queue that holds nothing."""
    area = SpillFiles(files, spool).area("jobs", owner=7, incarnation=1)
    count = 4000
    written = area.write(1, [b""] * count)
    slots = list(written)
    random.Random(1).shuffle(slots)
    for slot in slots:
        area.free(Slots([range(slot, slot + 1)]))
    again = area.write(1, [b""] * count)
    assert sorted(again) == sorted(slots), "those that were kept"
    assert len(list(again.ranges())) <= 256


def test_a_file_that_grew_huge_is_not_read(file_area, path_of, files):
    """No more is read into memory than a message of the run can be long."""
    slots = file_area.write(0, bodies(1, 70_000))
    os.truncate(path_of(0), 2**40)
    files.calls.clear()
    found, problems = file_area.read(0, slots, MUCH, 70_000)
    assert found == [None]
    assert str(2**40) in problems[0][1]
    assert "read" not in files.calls


def test_an_overwritten_message_costs_three_operations(file_area, files):
    """Over a kept file of the same size: open, write, close; and a read is open, read, close."""
    file_area.free(file_area.write(0, bodies(10)))
    files.calls.clear()
    slots = file_area.write(10, bodies(10))
    assert files.calls == ["open", "pwrite", "close"] * 10
    files.calls.clear()
    file_area.read(10, slots, MUCH, 100)
    assert files.calls == ["open", "read", "close"] * 10


def test_a_bad_file_does_not_fail_every_later_write(file_area, files, path_of):
    """A kept file that the disk refuses is dropped, so the next write takes another."""
    file_area.free(file_area.write(0, bodies(1)))
    files.fail("open", errno.EIO, times=1)
    with pytest.raises(StorageError):
        file_area.write(1, bodies(1))
    files.calls.clear()
    slots = file_area.write(1, bodies(1))
    assert list(slots) == [1]
    assert not os.path.exists(path_of(0))


def test_a_file_of_another_owner_is_read_all_the_same(file_area, files):
    """To leave a file's time of access alone is for its owner; others read it in the common way."""
    records = bodies(2)
    slots = file_area.write(0, records)
    files.fail("open", errno.EPERM, times=1)
    assert good(file_area, 0, slots, records)


def test_directory_names_are_safe_and_told_apart_by_the_numbers(spool):
    """Names are plain ASCII below the limit of any file system, and unique without regard to case."""
    names = [directory_name(name, owner, 5) for owner, name in enumerate([*HOSTILE, "Ab", "aB", "x" * 301])]
    assert len({name.lower() for name in names}) == len(names)
    for name in names:
        assert name.isascii()
        assert len(name) <= 130
        assert "/" not in name
        assert not name.startswith("..")
    assert directory_name("orders", 7, 3) == "orders.00000007-0000000000000003"
    assert directory_name("a/b.c", 7, 3) == "a%2Fb%2Ec.00000007-0000000000000003"


# Slots ---------------------------------------------------------------------------------------------------------------


def test_adjacent_slots_are_one_range():
    """Ranges that follow each other are joined when made and when added."""
    assert list(Slots([range(3), range(3, 5), range(0), range(9, 10)]).ranges()) == [range(5), range(9, 10)]
    assert list((Slots([range(3)]) + Slots([range(3, 6), range(1)])).ranges()) == [range(6), range(1)]


def test_slots_of_nothing_are_false_and_equal():
    """No slots are no messages."""
    assert not Slots()
    assert Slots() == Slots([range(0)])
    assert Slots() + Slots() == Slots()
    assert repr(Slots([range(3), range(7, 9)])) == "Slots([0:3, 7:9])"


operations = st.lists(
    st.one_of(
        st.tuples(st.just("new"), st.integers(0, 40), st.integers(0, 5)),
        st.tuples(st.just("add"), st.integers(0, 20), st.integers(0, 20)),
        st.tuples(st.just("take"), st.integers(0, 20), st.integers(-1, 12)),
    ),
    max_size=60,
)


@given(operations)
def test_slots_are_values(steps):
    """Any mix of adding and splitting gives what lists would give, and changes no value made before."""
    values: list[tuple[Slots, list[int]]] = [(Slots(), [])]
    for kind, one, two in steps:
        if kind == "new":
            values.append((Slots([range(one, one + two)]), list(range(one, one + two))))
        elif kind == "add":
            (left, left_list), (right, right_list) = values[one % len(values)], values[two % len(values)]
            if len(left_list) + len(right_list) < 2000:
                values.append((left + right, left_list + right_list))
        else:
            slots, expected = values[one % len(values)]
            head, rest = slots.take(two)
            cut = max(0, two)
            values += [(head, expected[:cut]), (rest, expected[cut:])]
    for slots, expected in values:
        assert list(slots) == expected
        assert len(slots) == len(expected)
        assert all(slots.ranges())


def test_a_value_extended_twice_gives_two_values():
    """The second one to extend a value gets a copy, and the first is not changed."""
    base = Slots([range(3), range(10, 12)])
    one = base + Slots([range(20, 22)])
    two = base + Slots([range(30, 33)])
    three = one + Slots([range(40, 41)])
    assert list(base) == [0, 1, 2, 10, 11]
    assert list(one) == [0, 1, 2, 10, 11, 20, 21]
    assert list(two) == [0, 1, 2, 10, 11, 30, 31, 32]
    assert list(three) == [0, 1, 2, 10, 11, 20, 21, 40]


def test_a_queue_of_slots_does_not_grow_behind_its_head():
    """Taking from the front while appending at the end keeps the shared list short."""
    slots = Slots([range(1)])
    for number in range(1, 5000):
        slots = slots + Slots([range(2 * number, 2 * number + 1)])
        if len(slots) > 10:
            _, slots = slots.take(1)
    assert len(slots._ranges) < 300


# The wipe ------------------------------------------------------------------------------------------------------------


def drain(files: Files, spool: str) -> Wiper:
    wiper = Wiper(files, spool)
    while wiper.step(3):
        pass
    return wiper


def fill(spool: str) -> None:
    """Two queues with files of ours, and things of somebody else's in and beside them."""
    store = SpillFiles(Files(), spool)
    first = os.path.join(spool, "spill", directory_name("a", 1, 1))
    store.area("a", 1, 1).write(0, bodies(7))
    store.area("b", 2, 1).write(0, bodies(4))
    for path in FOREIGN:
        full = path if os.path.isabs(path) else os.path.join(first, path)
        if path.endswith("link"):
            os.symlink("/nowhere", full)
        elif path.endswith("dir"):
            os.mkdir(full)
            with open(os.path.join(full, "5"), "w") as file:
                file.write(path)
        else:
            with open(full, "w") as file:
                file.write(path)
    os.symlink("/nowhere", os.path.join(first, "abc"))  # named as ours, but no file
    os.mkdir(os.path.join(spool, "spill", "backup.1.2"))
    for path in (("spill", "notes.txt"), ("spill", "backup.1.2", "0"), ("wiping", "0"), ("spill", "0")):
        with open(os.path.join(spool, *path), "w") as file:
            file.write("precious")
    os.symlink(spool, os.path.join(spool, "spill", directory_name("link", 3, 1)))
    with open(os.path.join(spool, "spill", directory_name("file", 4, 1)), "w") as file:
        file.write("precious")


FOREIGN = ["notes.txt", "00", "A", "0x1", "x.link", "sub.dir", "12345678901234567"]


def foreign_files(spool: str) -> list[str]:
    first = os.path.join("spill", directory_name("a", 1, 1))
    inside = [os.path.join(first, name, "5") if name.endswith("dir") else os.path.join(first, name) for name in FOREIGN]
    beside = ["spill/notes.txt", "spill/backup.1.2/0", "wiping/0", "spill/0"]
    beside += ["spill/" + directory_name("file", 4, 1), "spill/" + directory_name("link", 3, 1)]
    return sorted([*inside, os.path.join(first, "abc"), *beside])


def non_directories(spool: str) -> list[str]:
    found = []
    for folder, folders, names in os.walk(spool):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        found += [os.path.relpath(os.path.join(folder, name), spool) for name in names + links]
    return sorted(found)


def test_the_wipe_sets_aside_and_a_wiper_removes(spool, files):
    """Setting aside takes a rename a queue; the files go later, a few at a time; what is not ours stays or returns."""
    fill(spool)
    files.calls.clear()
    assert sorted(wipe_spill(files, spool)) == [directory_name("a", 1, 1), directory_name("b", 2, 1)]
    assert files.calls.count("rename") == 2
    assert "unlink" not in files.calls
    wiper = Wiper(files, spool)
    files.calls.clear()
    assert wiper.step(4)
    assert files.calls.count("unlink") + files.calls.count("rename") <= 4
    while wiper.step(4):
        pass
    assert wiper.unlinked == 11
    assert wiper.failures == 0
    assert non_directories(spool) == foreign_files(spool)
    assert os.listdir(os.path.join(spool, "wiping")) == ["0"]
    assert not wiper.step(4)


def test_the_wipe_removes_at_once_where_directories_cannot_be_renamed(spool, files):
    """As with overlayfs, where they came with an image: what is not ours stays where it is, any other error is one."""
    fill(spool)
    files.fail("rename", errno.EXDEV)
    assert sorted(wipe_spill(files, spool)) == [directory_name("a", 1, 1), directory_name("b", 2, 1)]
    assert files.calls.count("unlink") == 11
    assert non_directories(spool) == foreign_files(spool)
    assert not os.path.exists(os.path.join(spool, "spill", directory_name("b", 2, 1)))
    assert os.listdir(os.path.join(spool, "wiping")) == ["0"]
    files.fail("unlink", errno.EIO)
    store = STORES["files"](Files(), spool)
    store.area("c", 3, 1).write(0, [b"x"])
    store.close()
    with pytest.raises(StorageError, match="Input/output error"):
        wipe_spill(files, spool)


def test_the_wipe_of_a_new_spool_makes_the_directories(tmp_path):
    """Both directories are made, private, and there is nothing to remove."""
    assert wipe_spill(Files(), str(tmp_path)) == []
    assert sorted(os.listdir(tmp_path)) == ["spill", "wiping"]
    assert stat.S_IMODE(os.stat(tmp_path / "spill").st_mode) == 0o700
    assert not Wiper(Files(), str(tmp_path)).step(10)


def test_the_wipe_can_be_repeated(spool):
    """Wiping again and again changes nothing more."""
    fill(spool)
    for _ in range(3):
        wipe_spill(Files(), spool)
        drain(Files(), spool)
        assert non_directories(spool) == foreign_files(spool)


@pytest.mark.in_memory
def test_a_crash_at_any_step_of_the_wipe_ends_well(tmp_path):
    """Wherever the process dies, over and over, nothing foreign is lost and the next start goes on."""
    step = 0
    finished = False
    while not finished:
        spool = str(tmp_path / str(step))
        os.mkdir(spool)
        wipe_spill(Files(), spool)
        fill(spool)
        finished = True
        for _ in range(2):  # die twice at the same distance
            files = FaultyFiles()
            files.crash_at = step
            try:
                wipe_spill(files, spool)
                drain(files, spool)
            except Crash:
                finished = False
        wipe_spill(Files(), spool)
        drain(Files(), spool)
        assert non_directories(spool) == foreign_files(spool), f"died after {step} operations"
        assert os.listdir(os.path.join(spool, "wiping")) == ["0"]
        step += 1
    assert step > 30


def test_the_same_directory_can_be_set_aside_again(spool):
    """A queue that spilled again before its old files were gone is set aside under another number."""
    for _ in range(3):
        SpillFiles(Files(), spool).area("a", 1, 1).write(0, bodies(2))
        assert wipe_spill(Files(), spool) == [directory_name("a", 1, 1)]
    assert len(os.listdir(os.path.join(spool, "wiping"))) == 3
    drain(Files(), spool)
    assert non_directories(spool) == []


def test_a_foreign_file_does_not_replace_what_a_queue_wrote_since(spool):
    """If its old place is taken by now, a foreign entry stays where it is, and is counted."""
    area = SpillFiles(Files(), spool).area("a", 1, 1)
    area.write(0, bodies(1))
    place = os.path.join(spool, "spill", directory_name("a", 1, 1), "1")
    os.symlink("/nowhere", place)
    wipe_spill(Files(), spool)
    area = SpillFiles(Files(), spool).area("a", 1, 1)
    slots = area.write(0, bodies(2))
    wiper = drain(Files(), spool)
    assert wiper.failures > 0
    assert good(area, 0, slots, bodies(2))
    assert os.path.islink(os.path.join(spool, "wiping", directory_name("a", 1, 1) + "~0", "1"))


def test_a_queue_can_spill_while_its_old_files_go(spool):
    """Live files of a queue are not touched by the wiper."""
    fill(spool)
    wipe_spill(Files(), spool)
    area = SpillFiles(Files(), spool).area("a", 1, 1)
    wiper = Wiper(Files(), spool)
    written = Slots()
    sequence = 0
    while wiper.step(1):
        written = written + area.write(sequence, [b"%d" % sequence])
        sequence += 1
    assert good(area, 0, written, [b"%d" % number for number in range(sequence)])


def test_files_that_cannot_be_unlinked_are_left_for_the_next_round(spool, files):
    """A failing unlink is counted, does not stop the others, and does not spin."""
    fill(spool)
    wipe_spill(files, spool)
    wiper = Wiper(files, spool)
    files.fail("unlink", errno.EIO, times=3)
    while wiper.step(2):
        pass
    assert wiper.failures >= 3
    files.fail("unlink", errno.EIO)
    while wiper.step(2):
        pass
    files.heal()
    while wiper.step(2):
        pass
    assert non_directories(spool) == foreign_files(spool)


def test_entries_that_a_scan_misses_are_found_by_the_next(spool, files):
    """Some file systems leave out entries when a directory shrinks under a scan: it is scanned again."""
    SpillFiles(Files(), spool).area("a", 1, 1).write(0, bodies(9))
    wipe_spill(files, spool)
    scan = files.scan
    files.scan = lambda path: (entry for number, entry in enumerate(list(scan(path))) if number % 2 == 0)
    wiper = Wiper(files, spool)
    while wiper.step(2):
        pass
    assert (wiper.unlinked, wiper.failures) == (9, 0)
    assert os.listdir(os.path.join(spool, "wiping")) == []


@pytest.mark.parametrize("operation", ["list", "scan", "remove_directory", "rename", "make_directory"])
def test_a_wiper_never_raises(spool, files, operation):
    """Whatever fails is counted and met again."""
    fill(spool)
    wipe_spill(files, spool)
    wiper = Wiper(files, spool)
    files.fail(operation, errno.EIO)
    while wiper.step(2):
        pass
    assert wiper.failures > 0
    files.heal()
    while wiper.step(2):
        pass
    assert non_directories(spool) == foreign_files(spool)


@pytest.mark.parametrize("name", ["spill", "wiping"])
@pytest.mark.parametrize("plant", ["symlink", "file", "dangling", "unreadable"])
def test_an_unusable_directory_is_refused(tmp_path, name, plant):
    """A link, a file or a closed directory where spill files should go is an error, and nothing is touched."""
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / directory_name("a", 1, 1)).mkdir()
    spool = tmp_path / "spool"
    spool.mkdir()
    path = spool / name
    if plant == "symlink":
        path.symlink_to(target)
    elif plant == "dangling":
        path.symlink_to(tmp_path / "missing")
    elif plant == "file":
        path.write_text("precious")
    else:
        path.mkdir(mode=0o500)
    with pytest.raises(StorageError, match=name):
        wipe_spill(Files(), str(spool))
    assert os.listdir(target) == [directory_name("a", 1, 1)]
    assert not (tmp_path / "missing").exists()


def test_another_users_directory_is_refused(spool, monkeypatch):
    """A spill directory of another user is not trusted."""
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(spool).st_uid + 1)
    with pytest.raises(StorageError, match="belongs to user"):
        wipe_spill(Files(), spool)


@pytest.mark.parametrize("operation", ["list", "rename", "make_directory", "lstat"])
def test_a_wipe_that_fails_is_a_storage_error(tmp_path, files, operation):
    """The start fails with a sentence, and works once the disk does."""
    if operation != "make_directory":
        wipe_spill(Files(), str(tmp_path))
        fill(str(tmp_path))
    files.fail(operation, errno.EIO)
    with pytest.raises(StorageError, match="set aside"):
        wipe_spill(files, str(tmp_path))
    files.heal()
    wipe_spill(files, str(tmp_path))
