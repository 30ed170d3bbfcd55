"""What the store of segments does besides the contract: what is reused, moved, mapped, and left alone."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
from pathlib import Path

import pytest

from contract.test_spill_store import MUCH, FaultyFiles, bodies, good
from qflow.errors import DiskFull
from qflow.message import Message
from qflow.storage import encoding
from qflow.storage.blocks import BlockKey
from qflow.storage.files import Files
from qflow.storage.spill import segments as spill_segments
from qflow.storage.spill.segments import SegmentsArea, SpillSegments
from qflow.storage.spill.store import Ranges, Slots, directory_name
from qflow.storage.spill.wiper import wipe_spill

SEGMENT = 4096
PER_SEGMENT = 3
"""Messages of 1,000 bytes."""


@pytest.fixture
def files():
    return FaultyFiles()


@pytest.fixture
def spool(tmp_path):
    wipe_spill(Files(), str(tmp_path))
    return str(tmp_path)


@pytest.fixture(params=[0, 3], ids=["read", "mapped"])
def area(request, files, spool):
    store = SpillSegments(files, spool, segment_bytes=SEGMENT, max_mapped=request.param)
    yield store.area("orders", 7, 3)
    store.close()


@pytest.fixture
def directory(spool):
    return Path(spool, "spill", directory_name("orders", 7, 3))


def numbers(directory: Path) -> list[int]:
    return sorted(int(name, 16) for name in os.listdir(directory))


def open_below(directory: str) -> list[str]:
    """Return the files in a directory that this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # others are opened and closed meanwhile
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if path.startswith(f"{directory}/")]


def singles(slots: Slots) -> list[Slots]:
    return [Slots([range(slot, slot + 1)]) for slot in slots]


def test_segments_are_of_one_size_and_private(area, directory):
    """Each file has its full size at once, mode 0600, in a directory of mode 0700."""
    area.write(0, bodies(10, 1000))
    assert numbers(directory) == [0, 1, 2, 3]
    assert {path.stat().st_size for path in directory.iterdir()} == {SEGMENT}
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


@pytest.mark.parametrize("order", [range(12), range(11, -1, -1), [7, 0, 11, 3, 5, 1, 9, 2, 10, 4, 8, 6]], ids=str)
def test_a_segment_is_free_when_its_last_message_goes_in_whatever_order(area, order):
    """Settles out of order free a segment exactly when nothing is left in it; it is filled again, not made anew."""
    slots = singles(area.write(0, bodies(12, 1000)))
    left = set(range(12))
    for place in order:
        area.free(slots[place])
        left.discard(place)
        full = {message // PER_SEGMENT for message in left} | {3}  # the last one is still appended to
        assert area.counters().kept == 4 - len(full)
        assert area.problems(Ranges.of([slot for place in left for slot in slots[place]])) == []
    area.write(100, bodies(12, 1000))
    counters = area.counters()
    assert (counters.created, counters.overwritten, counters.unlinked) == (4, 3, 0)


def test_what_is_freed_while_it_is_appended_to_makes_room_in_the_same_segment(area, directory):
    """A queue that swings about its capacity writes one segment over and over."""
    for first in range(0, 300, 3):
        slots = area.write(first, bodies(3, 1000, seed=first))
        assert good(area, first, slots, bodies(3, 1000, seed=first))
        area.free(slots)
    assert numbers(directory) == [0]


def test_a_message_larger_than_a_segment_has_a_file_of_its_own_that_goes_with_it(area, directory):
    """It is unlinked when it is freed; a segment's size is not changed by it."""
    records = [b"small", *bodies(1, 3 * SEGMENT), b"small", Message(*bodies(1, 40 * SEGMENT), b"{}"), b"end"]
    slots = area.write(0, records)
    assert good(area, 0, slots, records)
    sizes = sorted(path.stat().st_size for path in directory.iterdir())
    assert len([size for size in sizes if size > SEGMENT]) == 2
    area.free(slots)
    area.write(10, [b"next"])
    assert [path.stat().st_size for path in directory.iterdir()] == [SEGMENT] * len(os.listdir(directory))
    assert area.counters().unlinked == 2


def test_no_more_segments_are_kept_than_the_bound(spool, files, monkeypatch):
    """Free segments above the bound are unlinked."""
    monkeypatch.setattr(spill_segments, "MAX_KEPT_BYTES", 3 * SEGMENT)
    area = SpillSegments(files, spool, segment_bytes=SEGMENT).area("orders", 7, 3)
    area.free(area.write(0, bodies(30, 1000)))
    assert (area.counters().kept, area.counters().unlinked) == (3, 6)
    assert area.problems(Ranges([])) == []


# Compaction ----------------------------------------------------------------------------------------------------------


def scattered(area, segments: int = 30) -> tuple[list[Slots], list[bytes], int]:
    """Fill segments and free two of three messages; return the slots left, their bodies, and the step between."""
    records = bodies(segments * PER_SEGMENT, 1000)
    slots = singles(area.write(0, records))
    for place, slot in enumerate(slots):
        if place % PER_SEGMENT:
            area.free(slot)
    return slots[::PER_SEGMENT], records[::PER_SEGMENT], PER_SEGMENT


def all_good(area, slots: list[Slots], records: list, step: int) -> bool:
    return all(
        good(area, place * step, slot, [record])
        for place, (slot, record) in enumerate(zip(slots, records, strict=True))
    )


def test_what_is_left_in_sparse_segments_moves_together(area, directory):
    """Survivors keep their slots and bytes, and no more than twice their size and four segments are in use."""
    slots, records, step = scattered(area)
    in_use = len(numbers(directory)) - area.counters().kept
    bound = 2 * sum(map(len, records)) + 5 * SEGMENT  # in bytes written; three of four fit in these segments
    assert in_use * SEGMENT * 3 / 4 <= bound < 30 * SEGMENT * 3 / 4
    assert all_good(area, slots, records, step)
    assert area.problems(Ranges.of([slot for piece in slots for slot in piece])) == []
    for slot in slots:
        area.free(slot)
    assert area.problems(Ranges([])) == []


def test_a_queue_read_in_order_is_never_compacted(area):
    """What is about to be read anyway is not moved."""
    slots = area.write(0, bodies(60, 1000))
    created = area.counters().created
    while slots:
        head, slots = slots.take(1)
        area.free(head)
    assert area.counters().created == created


def test_what_was_moved_can_be_moved_again(area):
    """Survivors of survivors come back as they were."""
    records = bodies(240, 100)
    slots = dict(enumerate(singles(area.write(0, records))))
    for keep in (2, 4, 8, 16, 48):
        for place in list(slots):
            if place % keep:
                area.free(slots.pop(place))
        for place, slot in slots.items():
            assert good(area, place, slot, [records[place]])
        assert area.problems(Ranges.of([slot for piece in slots.values() for slot in piece])) == []
    assert area.counters().created > 240 // (SEGMENT // 120), "nothing was ever moved"


@pytest.mark.parametrize("operation", ["open", "pwrite", "read", "ftruncate", "close"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EMFILE], ids=errno.errorcode.get)
def test_a_compaction_that_fails_changes_nothing(area, files, operation, number):
    """Freeing raises nothing, every message stays where it is, and a later compaction goes through."""
    records = bodies(90, 1000)
    slots = singles(area.write(0, records))
    files.fail(operation, number)
    for place, slot in enumerate(slots):
        if place % PER_SEGMENT:
            area.free(slot)
    files.heal()
    left = slots[::PER_SEGMENT]
    assert all_good(area, left, records[::PER_SEGMENT], PER_SEGMENT)
    assert area.problems(Ranges.of([slot for piece in left for slot in piece])) == []
    assert area.counters().created == 30
    assert len(numbers(Path(area._directory.prefix))) == 30


def test_messages_freed_while_they_are_moved_are_freed_at_their_new_place(area, files):
    """The copy of a message that went meanwhile is no message."""
    records = bodies(90, 1000)
    slots = singles(area.write(0, records))
    write, turns = files.pwritev, []

    def free_one_then_write(fd, pieces, position):
        turns.append(position)
        if len(turns) == 1:
            area.free(slots[0])
            area.free(slots[3])
        return write(fd, pieces, position)

    files.pwritev = free_one_then_write
    for place, slot in enumerate(slots):
        if place % PER_SEGMENT:
            area.free(slot)
    assert turns
    left = [slots[place] for place in range(6, 90, 3)]
    assert area.problems(Ranges.of([slot for piece in left for slot in piece])) == []
    for place, slot in zip(range(6, 90, 3), left, strict=True):
        assert good(area, place, slot, [records[place]])


def test_a_damaged_segment_is_not_moved_and_stops_no_other(area, directory):
    """Compaction passes damage by; who reads the message is told."""
    records = bodies(90, 1000)
    slots = singles(area.write(0, records))
    with open(directory / "2", "r+b") as file:
        file.seek(200)
        file.write(b"damage")
    for place, slot in enumerate(slots):
        if place % PER_SEGMENT:
            area.free(slot)
    for place in range(0, 90, PER_SEGMENT):
        found, problems = area.read(place, slots[place], MUCH, 1000)
        assert found == [None if place == 6 else records[place]]
        assert bool(problems) == (place == 6)
    assert area.counters().created > 30, "nothing was moved"


def test_survivors_of_very_many_small_blocks_move_too(spool, files):
    """More pieces than the system takes with one call are written with several."""
    area = SpillSegments(files, spool, segment_bytes=2**18).area("orders", 7, 3)
    left = {}
    for turn in range(1500):
        first, *rest = singles(area.write(10 * turn, bodies(10, 100, seed=turn)))
        left[turn] = first
        area.free(rest[0] + rest[1] + rest[2] + rest[3] + rest[4] + rest[5] + rest[6] + rest[7] + rest[8])
    assert area.counters().created - area.counters().unlinked < 20
    assert area._patience == 0, "a compaction failed"
    for turn, slot in left.items():
        assert good(area, 10 * turn, slot, bodies(1, 100, seed=turn))


def test_the_index_does_not_remember_every_compaction(area):
    """Ranges of slots that hold nothing any more are forgotten, and neighbours joined."""
    left: list[Slots] = []
    for turn in range(300):
        slots = singles(area.write(12 * turn, bodies(12, 300, seed=turn)))
        for slot in slots[1:]:
            area.free(slot)
        left.append(slots[0])
        if len(left) > 20:
            area.free(left.pop(0))
    assert area.counters().created > 30
    assert len(area._pool.index._keys) < 40
    assert area.problems(Ranges.of([slot for piece in left for slot in piece])) == []


def test_a_whole_block_of_another_shape_is_damage(area, directory):
    """Foreign content with right checksums stops neither a reader nor a compaction."""
    slots = [area.write(10 * turn, bodies(10, 100, seed=turn)) for turn in range(300)]
    foreign = encoding.encode(BlockKey(0xFF, 7, 0, 999_999), [b"y" * 1036])
    assert len(foreign) == len(encoding.encode(BlockKey(0xFF, 7, 0, 0), bodies(10, 100)))
    with open(directory / "0", "r+b") as file:
        file.write(foreign)
    for turn, slot in enumerate(slots):
        kept, rest = slot.take(1)
        area.free(rest)
        slots[turn] = kept
    assert area.read(0, slots[0], MUCH, 100)[0] == [None]
    for turn in range(3, 300):
        assert good(area, 10 * turn, slots[turn], bodies(1, 100, seed=turn))


def test_without_descriptors_nothing_is_called_damaged(area, files):
    """A compaction that finds no descriptor goes through when there are some again."""
    records = bodies(180, 1000)
    slots = singles(area.write(0, records))
    files.fail("open", errno.EMFILE)
    for place in range(90):
        if place % PER_SEGMENT:
            area.free(slots[place])
    files.heal()
    for place in range(90, 180):
        if place % PER_SEGMENT:
            area.free(slots[place])
    assert area.counters().kept > 20
    assert all_good(area, slots[::PER_SEGMENT], records[::PER_SEGMENT], PER_SEGMENT)


def test_small_and_large_messages_in_turn_share_no_file(area):
    """A large message's own file does not end the segment that small ones go to."""
    for turn in range(50):
        slots = area.write(2 * turn, [b"small", *bodies(1, 2 * SEGMENT)])
        assert good(area, 2 * turn, slots, [b"small", *bodies(1, 2 * SEGMENT)])
    assert area.counters().created == 50 + 1


class Strike:
    """Raises KeyboardInterrupt at one call or return of a call; a signal never strikes before a lock is let go."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame, event, argument) -> None:
        if event in ("call", "c_return") or (event == "c_call" and argument.__name__ not in ("__exit__", "setprofile")):
            self.left -= 1
            if self.left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # struck while a generator is closed
@pytest.mark.parametrize("action", ["write", "compact"])
@pytest.mark.in_memory
def test_an_interrupt_anywhere_costs_no_other_message(action, tmp_path):
    """Ctrl-C in the middle of a write or a compaction: what others wrote stays readable, and writes go on."""
    struck = True
    at = 0
    while struck:
        spool = tmp_path / str(at)
        spool.mkdir()
        wipe_spill(Files(), str(spool))
        area = SpillSegments(Files(), str(spool), segment_bytes=SEGMENT).area("q", 1, 1)
        records = bodies(75, 1000)
        slots = singles(area.write(0, records))
        kept = range(0, 75, PER_SEGMENT)
        for place in set(range(72)) - set(kept):
            area.free(slots[place])
        compacted = area.counters().created
        struck = False
        sys.setprofile(Strike(at))
        try:
            if action == "write":
                area.write(100, bodies(7, 1000))
            else:
                area._patience = -MUCH
                area._compact()
        except KeyboardInterrupt:
            struck = True
        finally:
            sys.setprofile(None)
        for place in kept:
            assert good(area, place, slots[place], [records[place]]), f"struck at {at}"
        written = area.write(200, bodies(9, 1000))
        assert good(area, 200, written, bodies(9, 1000)), f"struck at {at}"
        at += 1 if at < 40 else 5
    assert at > 40
    assert action == "write" or area.counters().created > compacted


# Maps ----------------------------------------------------------------------------------------------------------------


def mapped(area: SegmentsArea) -> set[int]:
    return {segment.number for segment in area._pool.maps._mapped}


def test_no_more_segments_are_mapped_than_allowed_and_the_farthest_goes_first(spool, files):
    """Head and tail stay mapped; of the others the one that will be read last is unmapped."""
    store = SpillSegments(files, spool, segment_bytes=SEGMENT, max_mapped=4)
    area = store.area("orders", 7, 3)
    records = bodies(30, 1000)
    slots = singles(area.write(0, records))

    def read(segment: int) -> None:
        assert good(area, 3 * segment, slots[3 * segment], [records[3 * segment]])

    for segment in (0, 9, 3, 6):
        read(segment)
    assert mapped(area) == {0, 3, 6, 9}
    read(4)
    assert mapped(area) == {0, 3, 4, 9}
    read(1)
    assert mapped(area) == {0, 1, 3, 9}
    for place in range(3):
        area.free(slots[place])
    read(5)
    assert mapped(area) == {1, 3, 5, 9}, "a free one goes before all others"
    for segment in range(1, 10):
        read(segment)
        assert len(mapped(area)) <= 4
        assert {1, 9} <= mapped(area) or segment == 1
    store.close()
    assert mapped(area) == set()


def test_maps_give_way_when_descriptors_run_out(spool, files):
    """The store unmaps its own segments and tries again before it says that no file can be opened."""
    area = SpillSegments(files, spool, segment_bytes=SEGMENT, max_mapped=100).area("orders", 7, 3)
    records = bodies(30, 1000)
    slots = area.write(0, records)
    assert good(area, 0, slots.take(15)[0], records[:15])
    files.fail("open", errno.EMFILE, times=1)
    assert good(area, 15, slots.take(15)[1], records[15:])
    assert len(mapped(area)) == 5


def test_the_bound_holds_for_all_queues_together(spool, files):
    """Two queues share the maps of their broker."""
    store = SpillSegments(files, spool, segment_bytes=SEGMENT, max_mapped=2)
    areas = [store.area(str(number), number, 1) for number in range(3)]
    records = bodies(9, 1000)
    for _ in range(2):
        for area in areas:
            assert good(area, 0, area.write(0, records), records)
            assert len(store._maps._mapped) <= 2
    for area in areas:
        area.remove()
    assert store._maps._mapped == set()


def test_nothing_is_mapped_unless_asked_for(spool, files):
    """By default segments are read, and no descriptor is held between calls."""
    area = SpillSegments(files, spool, segment_bytes=SEGMENT).area("orders", 7, 3)
    records = bodies(30, 1000)
    assert good(area, 0, area.write(0, records), records)
    assert mapped(area) == set()
    assert open_below(spool) == []
    assert "map" not in files.calls


# Damage --------------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:1500] + bytes([data[1500] ^ 1]) + data[1501:])


def replace(path: Path, make) -> None:
    path.rename(path.with_suffix(".moved"))
    make()


DAMAGES = {
    "flipped bit": flip,
    "cut short": lambda path: os.truncate(path, 700),
    "empty": lambda path: os.truncate(path, 0),
    "overwritten by another": lambda path: path.write_bytes((path.parent / "2").read_bytes()),
    "removed": lambda path: path.unlink(),
    "another file": lambda path: replace(path, lambda: shutil.copy(path.with_suffix(".moved"), path)),
    "link": lambda path: replace(path, lambda: path.symlink_to(path.with_suffix(".moved"))),
    "fifo": lambda path: replace(path, lambda: os.mkfifo(path)),
    "directory": lambda path: replace(path, path.mkdir),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("read_before", [False, True])
def test_a_damaged_segment_gives_no_wrong_bytes(area, directory, damage, read_before):
    """Messages of a damaged segment are None with a problem that names the file; the others are served.

    A segment that is mapped already is still the file that was written, whatever its name leads to by now.
    """
    records = bodies(9, 1000)
    slots = area.write(10, records)
    if read_before:
        assert good(area, 10, slots, records)
    damage(directory / "1")
    found, problems = area.read(10, slots, MUCH, 1000)
    assert found[:3] + found[6:] == records[:3] + records[6:]
    if found[3:6] == records[3:6]:
        assert read_before
        assert area._pool.maps.most
        assert damage not in (DAMAGES["flipped bit"], DAMAGES["cut short"], DAMAGES["empty"])
    else:
        assert found[3:6] == [None] * 3
        assert [sequence for sequence, _ in problems] == [13, 14, 15]
        assert all(str(directory / "1") in problem for _, problem in problems)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("damage", ["removed", "another file", "link", "fifo", "directory"])
def test_what_stands_in_a_segments_place_is_not_written_to(area, directory, damage, kept):
    """Neither in that of a kept one nor in that of the one that is appended to; the messages go elsewhere."""
    slots = area.write(0, bodies(4, 1000))
    if kept:
        area.free(slots.take(3)[0])
        slots = slots.take(3)[1]
    victim = directory / ("0" if kept else "1")
    DAMAGES[damage](victim)
    before = victim.read_bytes() if victim.is_file() else b""
    records = bodies(9, 1000, seed=1)
    written = area.write(10, records)
    assert good(area, 10, written, records)
    assert (victim.read_bytes() if victim.is_file() else b"") == before
    area.free(written)
    again = area.write(20, records)
    assert good(area, 20, again, records)


@pytest.mark.parametrize("plant", ["file", "link", "fifo", "directory"])
def test_what_stands_in_a_new_segments_place_is_left_alone(area, directory, plant):
    """A number that somebody else uses is given up, also when the write fails."""
    area.write(0, bodies(1, 1000))
    path = directory / "2"
    makers = {
        "file": path.touch,
        "link": lambda: path.symlink_to("/nowhere"),
        "fifo": lambda: os.mkfifo(path),
        "directory": path.mkdir,
    }
    makers[plant]()
    before = path.lstat()
    area._files.fail("pwrite", errno.ENOSPC, after=3)
    with pytest.raises(DiskFull):
        area.write(10, bodies(20, 1000))
    area._files.heal()
    slots = area.write(10, bodies(20, 1000))
    assert good(area, 10, slots, bodies(20, 1000))
    area.free(slots)
    assert (path.lstat().st_ino, path.lstat().st_size) == (before.st_ino, before.st_size)


@pytest.mark.parametrize("whole", [True, False], ids=["spill", "the queue's own"])
def test_a_directory_removed_underneath_is_made_again(area, directory, spool, whole):
    """Messages in it are missing; new ones are written as if nothing had happened."""
    lost = area.write(0, bodies(4, 1000))
    shutil.rmtree(Path(spool, "spill") if whole else directory)
    records = bodies(8, 1000)
    slots = area.write(10, records)
    assert good(area, 10, slots, records)
    assert area.read(0, lost, MUCH, 1000)[0] == [None] * 4
    area.free(lost)
    assert area.problems(Ranges.of(slots)) == []


def test_a_kernel_that_cannot_bring_pages_in_still_tells_a_file_cut_short(spool, files, monkeypatch, directory):
    """Without MADV_POPULATE_READ the length of the file is looked at instead, so that nothing is killed."""
    monkeypatch.setattr("qflow.storage.files._POPULATE_READ", 9999)
    area = SpillSegments(files, spool, segment_bytes=SEGMENT, max_mapped=4).area("orders", 7, 3)
    records = bodies(9, 1000)
    slots = area.write(0, records)
    assert good(area, 0, slots, records)
    os.truncate(directory / "1", 0)
    assert area.read(0, slots, MUCH, 1000)[0] == [*records[:3], None, None, None, *records[6:]]


def test_an_operation_a_segment_not_a_message(area, files):
    """A thousand messages of 100 bytes take a few writes and reads."""
    area = SpillSegments(files, area._directory._spool, segment_bytes=2**20).area("many", 1, 1)
    records = bodies(1000, 100)
    files.calls.clear()
    slots = area.write(0, records)
    assert len(files.calls) < 10
    files.calls.clear()
    assert good(area, 0, slots, records)
    assert len(files.calls) < 10
