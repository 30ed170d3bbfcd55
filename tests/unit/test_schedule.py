"""The schedule of delayed messages: order by (due time, sequence), through spilling, restoring and interrupts."""

from __future__ import annotations

import gc
import math
import random
import sys
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import inside
from qflow.delivery import Segment
from qflow.memory import chunk as chunk_module
from qflow.memory import group as group_module
from qflow.memory import inventory
from qflow.memory import schedule as schedule_module
from qflow.memory import shelves as shelves_module
from qflow.memory.chunk import CHUNK_BYTES, WRAPPING_BYTES, Chunk, rises
from qflow.memory.group import GROUP_BYTES, GROUP_MESSAGES, Group, groups_of
from qflow.memory.schedule import Schedule
from qflow.memory.seeking import Found, Seeking, find_spilled
from qflow.message import OVERHEAD_BYTES, Message, Record, charge
from thorough import TORTURE

ALL = 10**6
LATE = 10**13
"""A time when everything is due."""


class Places:
    """Slots as a spill area might return them; a value."""

    def __init__(self, places: Iterable[int]) -> None:
        self.places = tuple(places)

    def __len__(self) -> int:
        return len(self.places)

    def __add__(self, other: Places) -> Places:
        return Places(self.places + other.places)

    def take(self, count: int) -> tuple[Places, Places]:
        return Places(self.places[:count]), Places(self.places[count:])


class Store:
    """A spill area in memory."""

    def __init__(self) -> None:
        self.records: dict[int, bytes] = {}

    def write(self, first: int, wrapped: list[bytes]) -> Places:
        assert wrapped
        assert all(type(piece) is bytes for piece in wrapped)
        for position, piece in enumerate(wrapped, first):
            assert position not in self.records
            self.records[position] = piece
        return Places(range(first, first + len(wrapped)))

    def read(self, slots: Places, count: int) -> list[bytes]:
        return [self.records[place] for place in slots.places[:count]]

    def free(self, slots: Places) -> None:
        for place in slots.places:
            del self.records[place]


def spill(schedule: Schedule, store: Store, wanted: int = 1) -> Chunk | None:
    """Spill the far end, as the owner does."""
    claim = object()
    chunk = schedule.claim_far(claim, wanted)
    if chunk is not None:
        assert schedule.chunk_spilled(claim, store.write(chunk.first, chunk.packed())) is not None
    return chunk


def spill_all(schedule: Schedule, store: Store, wanted: int = 1) -> None:
    while spill(schedule, store, wanted):
        pass


def restore(schedule: Schedule, store: Store, now: int, count: int) -> bool:
    """Restore the front of the chunk that comes next; False if there is none."""
    claim = object()
    chunk = schedule.claim_next(claim, now)
    if chunk is None:
        return False
    store.free(schedule.restored(claim, chunk.unpacked(store.read(chunk.slots, count))))
    return True


def deliver(schedule: Schedule, store: Store, now: int = LATE, piece: int = 2, most: int = 3) -> list[Segment]:
    """Take and restore until nothing is due."""
    segments: list[Segment] = []
    while schedule.take(most, now, segments) or restore(schedule, store, now, piece):
        pass
    return segments


def flat(segments: Iterable[Segment]) -> list[tuple[int, Record, int]]:
    return [
        (first + index, record, marks) for first, records, marks in segments for index, record in enumerate(records)
    ]


def sequences(segments: Iterable[Segment]) -> list[int]:
    return [sequence for sequence, _, _ in flat(segments)]


def bodies(count: int, size: int = 10) -> list[Record]:
    return [b"%0*d" % (size, number) for number in range(count)]


def same(one: Record, two: Record) -> bool:
    return type(one) is type(two) and one == two


@pytest.fixture
def schedule() -> Iterator[Schedule]:
    """An empty schedule; at the end of the test it must pass its own check."""
    made = Schedule()
    yield made
    assert inventory.problems(made) == []


@pytest.fixture
def store() -> Store:
    return Store()


# In memory -----------------------------------------------------------------------------------------------------------


def test_messages_come_by_due_time_then_sequence_and_not_before(schedule: Schedule) -> None:
    """The order of arrival plays no part, and what is due a millisecond later stays."""
    for due, sequence in ((50, 1), (30, 2), (40, 3), (30, 4), (41, 5)):
        schedule.shelves.add(due, sequence, [b"x"], 0)
    segments: list[Segment] = []
    assert schedule.take(ALL, 29, segments) == 0
    assert schedule.take(ALL, 40, segments) == 3
    assert sequences(segments) == [2, 4, 3]
    assert schedule.next_due_ms() == 41
    assert schedule.take(ALL, 50, segments) == 2
    assert sequences(segments) == [2, 4, 3, 5, 1]
    assert schedule.next_due_ms() is None


def test_a_batch_is_one_segment_whatever_its_size(schedule: Schedule) -> None:
    """Its groups are joined, and a message more is one segment more only if its sequence does not follow."""
    records = bodies(2 * GROUP_MESSAGES + 5)
    schedule.shelves.add(7, 100, list(records), 4)
    schedule.shelves.add(8, 100 + len(records), [b"follows"], 4)
    schedule.shelves.add(9, 100 + len(records) + 1, [b"other marks"], 6)
    schedule.shelves.add(10, 5, [b"does not follow"], 6)
    segments: list[Segment] = []
    assert schedule.take(ALL, 10, segments) == len(records) + 3
    assert [(first, len(records), marks) for first, records, marks in segments] == [
        (100, len(records) + 1, 4),
        (100 + len(records) + 1, 1, 6),
        (5, 1, 6),
    ]
    assert segments[0].records == [*records, b"follows"]


def test_a_batch_is_taken_in_parts_of_any_size(schedule: Schedule) -> None:
    """What is left of it keeps its place before what comes later."""
    records = bodies(GROUP_MESSAGES + 44)
    schedule.shelves.add(7, 0, list(records), 0)
    schedule.shelves.add(8, 1000, [b"last"], 0)
    segments: list[Segment] = []
    for most in (1, 0, 99, GROUP_MESSAGES - 100, 1, 43, 5):
        before = schedule.overhead_bytes
        taken = schedule.take(most, 8, segments)
        assert taken == (most if most != 5 else 1)
        assert schedule.overhead_bytes <= before
        assert inventory.problems(schedule) == []
    assert segments == [Segment(0, records, 0), Segment(1000, [b"last"], 0)]
    assert schedule.overhead_bytes == schedule.messages == 0


def test_a_message_that_is_returned_with_a_delay_has_its_place_among_later_ones(schedule: Schedule) -> None:
    """Its sequence is lower than that of others that are due at the same time."""
    schedule.shelves.add(20, 10, [b"later"], 0)
    schedule.shelves.add(20, 3, [b"returned"], 2)
    segments: list[Segment] = []
    schedule.take(ALL, 20, segments)
    assert segments == [Segment(3, [b"returned"], 2), Segment(10, [b"later"], 0)]


def test_what_is_charged_on_top_of_messages_grows_with_their_groups(schedule: Schedule) -> None:
    """Those that are added at once are in as few as there can be."""
    for count in (0, 1, GROUP_MESSAGES, GROUP_MESSAGES + 1, 5 * GROUP_MESSAGES):
        before = schedule.overhead_bytes
        schedule.shelves.add(count, 10_000 * count, bodies(count), 0)
        assert schedule.overhead_bytes - before == GROUP_BYTES * math.ceil(count / GROUP_MESSAGES)


def test_what_is_added_to_incoming_is_in_the_schedule(schedule: Schedule) -> None:
    """Whatever is asked first counts it."""
    questions: list[Callable[[], Any]] = [
        lambda: schedule.messages,
        lambda: schedule.overhead_bytes // GROUP_BYTES,
        lambda: schedule.tally().resident_messages,
        lambda: schedule.next_due_ms(),
        lambda: inside.due_resident(schedule, 1),
        lambda: len(list(inside.entries(schedule))),
        lambda: schedule.take(1, 1, []),
        lambda: schedule.claim_far(object(), 1).count,
    ]
    for question in questions:
        schedule.drop_all()
        schedule.shelves.incoming += groups_of(1, 0, [b"x"], 0)
        assert question() == 1


def test_shelves_stay_short_in_every_pattern_of_due_times(schedule: Schedule) -> None:
    """No call sorts or moves more than one of them."""
    number = random.Random(5)
    patterns: list[Callable[[int], int]] = [
        lambda index: number.randrange(10**6),
        lambda index: index,
        lambda index: 10**6 - index,
        lambda index: 77,
    ]
    sequence = 0
    for pattern in patterns:
        for index in range(4000):
            schedule.shelves.add(pattern(index), sequence, [b"x"], 0)
            sequence += 1
        schedule.shelves.add(pattern(0), sequence, bodies(GROUP_MESSAGES * 1000), 0)
        sequence += GROUP_MESSAGES * 1000
        assert max(map(len, schedule.shelves.all)) <= 2 * shelves_module.SHELF
        assert len(schedule.shelves.all) <= 5 + sum(map(len, schedule.shelves.all)) // shelves_module.SHELF


# Expiry --------------------------------------------------------------------------------------------------------------


def expiring(moments: Iterable[int]) -> list[Record]:
    """Return messages that expire at these moments; those at 0 never do, and have headers."""
    return [Message(b"%d" % moment, b"" if moment else b'{"a":1}', expires_ms=moment) for moment in moments]


def expire(schedule: Schedule, now_ms: int, most: int = 100) -> tuple[list[Segment], int]:
    """Take all that has expired; return it, and how many steps there were."""
    segments: list[Segment] = []
    steps = 1
    while schedule.shelves.take_expired(now_ms, most, segments):
        steps += 1
        assert steps < 10_000, "it does not end"
    return segments, steps


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """The groups that are looked at for what has expired."""
    seen: list[Group] = []
    expiries_of = shelves_module.expiries_of
    monkeypatch.setattr(shelves_module, "expiries_of", lambda group: seen.append(group) or expiries_of(group))
    return seen


def test_each_group_is_looked_at_once_until_one_of_its_shelf_expires(schedule: Schedule, looks: list[Group]) -> None:
    """In bounded steps; what is added later by itself, wherever it belongs, and nothing while nothing changes."""
    chance = random.Random(4)
    dues = [chance.randrange(10**6) for _ in range(20_000)]
    for sequence, due in enumerate(dues):
        schedule.shelves.add(due, sequence, expiring([1_000 if due // 1_000 == 500 else 5_000]), 0)
    assert schedule.shelves.take_expired(10, 100, [])
    assert 0 < len(looks) <= 100
    expire(schedule, 10)
    assert len(looks) == 20_000
    looks.clear()
    assert expire(schedule, 999) == ([], 1 + len(schedule.shelves.all) // 100)
    assert not looks
    schedule.take(500, 10**6, [])  # what is left of its shelf is as it was
    expire(schedule, 999)
    assert not looks
    for sequence in range(20_000, 20_050):
        schedule.shelves.add(chance.randrange(10**6), sequence, expiring([0]), 0)
    expire(schedule, 999)
    assert 50 <= len(looks) <= 50 + 4 * shelves_module.SHELF  # a few may be split, or are in order
    looks.clear()
    found, _ = expire(schedule, 1_000)
    assert sorted(sequences(found)) == [sequence for sequence, due in enumerate(dues) if due // 1_000 == 500]
    assert 0 < len(looks) <= 4 * shelves_module.SHELF
    looks.clear()
    expire(schedule, 4_999)
    assert not looks


def test_what_changes_all_the_time_holds_up_the_look_at_nothing(schedule: Schedule) -> None:
    """However much comes in front of it in each step: it goes on where it was."""
    sequence = 0
    for due in range(5_000):
        schedule.shelves.add(10_000 + due, sequence, expiring([1 if due == 4_900 else 0]), 0)
        sequence += 1
    segments: list[Segment] = []
    for _ in range(300):
        for due in range(100):
            schedule.shelves.add(due, sequence, expiring([0]), 0)
            sequence += 1
        schedule.shelves.take_expired(5, 100, segments)
    assert sequences(segments) == [4_900]


@pytest.mark.parametrize("seed", range(4))
def test_all_that_has_expired_in_memory_leaves_from_wherever_it_is(store: Store, seed: int) -> None:
    """Among batches and single messages, plain ones too, that are taken, spilled and restored; the rest stays in order."""
    chance = random.Random(seed)
    schedule = Schedule()
    held: dict[int, tuple[int, Record]] = {}
    now_ms = sequence = 0
    for turn in range(60):
        for _ in range(chance.randrange(40)):
            count = chance.choice([1, 1, 1, 5]) if turn % 20 else 2 * GROUP_MESSAGES
            moments = [chance.choice([0, now_ms + chance.randrange(1, 40)]) for _ in range(count)]
            records = expiring(moments) if chance.random() < 0.8 else bodies(count)
            due = chance.randrange(1, 1_000)
            schedule.shelves.add(due, sequence, list(records), 0)
            held.update((sequence + index, (due, record)) for index, record in enumerate(records))
            sequence += count
        now_ms += chance.randrange(5)
        action = chance.randrange(4)
        if action == 0:
            spill(schedule, store, 5_000)
        elif action == 1:
            for one in sequences(deliver(schedule, store, now=chance.randrange(100), piece=50, most=50)):
                del held[one]
        found, _ = expire(schedule, now_ms, chance.choice([30, 1_000]))
        for one, record, _ in flat(found):
            assert 0 < record.expires_ms <= now_ms  # type: ignore[union-attr]
            assert same(held.pop(one)[1], record)
        spilled = {one for chunk in schedule.spilled for one in chunk.sequences}
        late = [
            one
            for one, (_, record) in held.items()
            if isinstance(record, Message) and 0 < record.expires_ms <= now_ms and one not in spilled
        ]
        assert not late
        assert inventory.problems(schedule) == []
        assert schedule.messages == len(held)
    order = sorted(held, key=lambda one: (held[one][0], one))
    assert sequences(deliver(schedule, store, piece=50, most=50)) == order
    schedule.shelves.add(5, sequence, expiring([1]), 0)
    assert sequences(expire(schedule, 1)[0]) == [sequence]
    assert schedule.overhead_bytes == schedule.messages == 0


# Spilled and restored ------------------------------------------------------------------------------------------------


def test_records_come_back_byte_for_byte_and_of_their_type(schedule: Schedule, store: Store) -> None:
    """Plain bytes, headers, topics, transient ones, empty ones, ones that look like others; with their marks."""
    message = Message(b"body", b'{"a":1}', expires_ms=5, due_ms=6, topic="a/b")
    records: list[Record] = [b"", bytes(message), message, Message(b"", logged=False), b"\x00" * 20]
    mixed = [*records, *reversed(records)]
    schedule.shelves.add(10, 0, list(mixed), 0)
    schedule.shelves.add(2**48, 50, [records[2]], 2**32 - 1)
    schedule.shelves.add(0, 60, [records[1]], 1)
    spill_all(schedule, store, 200)
    segments = deliver(schedule, store, now=2**48)
    assert sequences(segments) == [60, *range(10), 50]
    found = [record for _, record, _ in flat(segments)]
    assert all(map(same, found, [records[1], *mixed, records[2]]))
    assert {sequence: marks for sequence, _, marks in flat(segments) if sequence >= 50} == {50: 2**32 - 1, 60: 1}
    assert not store.records


@pytest.mark.parametrize("batch", [1, 300])
def test_the_collector_does_not_follow_messages_of_a_schedule(schedule: Schedule, store: Store, batch: int) -> None:
    """Put, or restored; a few lists it does."""
    gc.collect()
    before = len(gc.get_objects())
    for first in range(0, 6_000, batch):
        messages: list[Record] = [Message(b"%d" % first, due_ms=first + 1) for _ in range(batch)]
        schedule.shelves.add(first + 1, first, messages, 0)
    del messages
    gc.collect()
    assert len(gc.get_objects()) - before < 100
    spill_all(schedule, store, 10**6)
    assert restore(schedule, store, LATE, 4_000)
    gc.collect()
    assert schedule.tally().resident_messages > 1_000
    assert len(gc.get_objects()) - before < 100


def test_the_far_end_is_spilled_and_the_near_end_stays(schedule: Schedule, store: Store) -> None:
    """As much as was wanted is freed, and no more than it takes."""
    order = list(range(100))
    random.Random(3).shuffle(order)
    for due in order:
        schedule.shelves.add(due, due, [bytes(100)], 0)
    before = schedule.tally().resident_bytes + 100 * OVERHEAD_BYTES + schedule.overhead_bytes
    claim = object()
    chunk = schedule.claim_far(claim, 5_000)
    assert chunk is not None
    freed = schedule.chunk_spilled(claim, store.write(chunk.first, chunk.packed()))
    assert freed is not None
    assert 5_000 <= freed < 5_000 + 100 + OVERHEAD_BYTES + GROUP_BYTES
    tally = schedule.tally()
    assert before - freed == tally.resident_bytes + tally.resident_messages * OVERHEAD_BYTES + schedule.overhead_bytes
    assert list(chunk.sequences) == list(range(100 - chunk.count, 100))
    assert sequences(deliver(schedule, store)) == list(range(100))


def test_a_big_group_is_cut_and_whole_again_when_the_write_fails(schedule: Schedule, store: Store) -> None:
    """Failing again and again costs no byte of charge."""
    schedule.shelves.add(5, 0, bodies(200), 0)
    for wanted in range(1, 10_000, 500):
        claim = object()
        before = schedule.overhead_bytes
        chunk = schedule.claim_far(claim, wanted)
        assert chunk is not None
        assert 0 < chunk.count < 200
        assert schedule.overhead_bytes == before == GROUP_BYTES
        schedule.unclaim(claim)
        assert schedule.overhead_bytes == before
        assert inventory.problems(schedule) == []
    spill(schedule, store, 10_000)
    assert sequences(deliver(schedule, store)) == list(range(200))


def test_a_message_that_frees_nothing_is_spilled_when_it_is_the_last(schedule: Schedule, store: Store) -> None:
    """A chunk of one small message costs more than it; the caller is told so."""
    schedule.shelves.add(5, 0, [b"x"], 0)
    claim = object()
    chunk = schedule.claim_far(claim, 1)
    assert chunk is not None
    freed = schedule.chunk_spilled(claim, store.write(chunk.first, chunk.packed()))
    assert freed == 1 + OVERHEAD_BYTES + GROUP_BYTES - CHUNK_BYTES - 8
    assert schedule.claim_far(object(), 1) is None
    assert sequences(deliver(schedule, store)) == [0]


def test_take_never_passes_what_a_spilled_chunk_may_hold(schedule: Schedule, store: Store) -> None:
    """It stops there, says so through claim_next, and goes on when that is restored."""
    schedule.shelves.add(10, 0, [bytes(2000)], 0)
    spill(schedule, store)
    schedule.shelves.add(5, 1, [b"before"], 0)
    schedule.shelves.add(10, 2, [b"after"], 0)
    segments: list[Segment] = []
    assert schedule.claim_next(object(), 20) is None, "something in memory comes first"
    assert inside.due_resident(schedule, 20)
    assert schedule.take(ALL, 20, segments) == 1
    assert not inside.due_resident(schedule, 20)
    assert schedule.next_due_ms() == 10
    assert schedule.take(ALL, 20, segments) == 0
    assert schedule.claim_next(object(), 9) is None, "it is not due"
    assert restore(schedule, store, 20, 1)
    assert schedule.take(ALL, 20, segments) == 2
    assert sequences(segments) == [1, 0, 2]


def test_many_chunks_that_are_due_at_once_are_merged(schedule: Schedule, store: Store) -> None:
    """Each holds messages of the whole time; pieces of a few are read of each."""
    number = random.Random(11)
    expected = []
    for sequence in range(600):
        due = number.randrange(50)
        schedule.shelves.add(due, sequence, [b"%d" % sequence], 0)
        expected.append((due, sequence))
        if sequence % 60 == 59:
            spill_all(schedule, store, 60 * (OVERHEAD_BYTES + GROUP_BYTES))
    assert len(schedule.spilled) == 10
    assert sequences(deliver(schedule, store, piece=7, most=13)) == [sequence for _, sequence in sorted(expected)]


def test_one_restored_message_can_be_delivered_though_the_next_has_a_lower_sequence(
    schedule: Schedule, store: Store
) -> None:
    """What is left of a chunk is known to be due later than what was restored of it, or to have a higher sequence."""
    schedule.shelves.add(10, 9, [bytes(100)], 0)
    schedule.shelves.add(20, 1, [bytes(100)], 0)
    schedule.shelves.add(20, 2, [bytes(100)], 0)
    spill(schedule, store, 500)
    assert schedule.tally().spilled_messages == 3
    for sequence in (9, 1, 2):
        assert restore(schedule, store, 30, 1)
        segments: list[Segment] = []
        assert schedule.take(ALL, 30, segments) == 1
        assert sequences(segments) == [sequence]


def test_a_chunk_goes_on_where_the_one_before_it_ends(schedule: Schedule, store: Store) -> None:
    """With one delay for all, the whole spilled backlog is one chunk and costs 8 bytes a message."""
    weight = 100 + OVERHEAD_BYTES - 8 + GROUP_BYTES
    for sequence in range(300):
        schedule.shelves.add(1000 + sequence, sequence, [bytes(100)], 0)
        if sequence >= 100 and sequence % 20 == 19:
            spill(schedule, store, 20 * weight - CHUNK_BYTES)
    assert schedule.overhead_bytes == 100 * GROUP_BYTES + CHUNK_BYTES + 8 * 200
    assert list(schedule.spilled[0].sequences) == list(range(100, 300))
    assert sequences(deliver(schedule, store)) == list(range(300))


def test_a_chunk_does_not_go_on_under_the_hands_of_who_restores_it(schedule: Schedule, store: Store) -> None:
    """What is spilled meanwhile is a chunk of its own."""
    for sequence in range(20):
        schedule.shelves.add(1000, sequence, [bytes(100)], 0)
    spill(schedule, store, 10_000)
    claim = object()
    chunk = schedule.claim_next(claim, 1000)
    assert chunk is not None
    schedule.shelves.add(1000, 20, [bytes(100)], 0)
    spill(schedule, store)
    assert len(schedule.spilled) == 2
    store.free(schedule.restored(claim, chunk.unpacked(store.read(chunk.slots, 20))))
    assert sequences(deliver(schedule, store)) == list(range(21))


def test_a_chunk_is_not_joined_beyond_a_bound(
    schedule: Schedule, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So restoring a piece of it copies no more than that many sequences."""
    monkeypatch.setattr(chunk_module, "CHUNK_MESSAGES", 5)
    for sequence in range(20):
        schedule.shelves.add(sequence, 2 * sequence, [bytes(2000), bytes(2000)], 0)
        spill(schedule, store, 3_000)
    assert [chunk.count for chunk in schedule.spilled] == [4] * 10


def test_two_cannot_restore_one_chunk(schedule: Schedule, store: Store) -> None:
    """The second gets it when the first gave up."""
    schedule.shelves.add(1, 0, [bytes(2000)], 0)
    spill(schedule, store)
    claim = object()
    assert schedule.claim_next(claim, 1) is not None
    assert schedule.claim_next(object(), 1) is None
    schedule.unclaim(claim)
    schedule.unclaim(claim)
    assert schedule.restored(claim, Chunk(0, [(1, 0, 0, b"")], 1, 0, False).unpacked([])) is None
    assert sequences(deliver(schedule, store)) == [0]


def test_lost_messages_are_told_and_the_others_come(schedule: Schedule, store: Store) -> None:
    """What the chunk still weighs before its last message comes is theirs, too."""
    records: list[Record] = [bytes([65 + index]) * (10 + index) for index in range(8)]
    records[3] = Message(b"transient", logged=False)
    schedule.shelves.add(5, 10, list(records), 0)
    claim = object()
    spill(schedule, store, 600)
    chunk = schedule.claim_next(claim, 5)
    assert chunk is not None
    assert chunk.count == 8
    pieces: list[bytes | None] = list(store.read(chunk.slots, 8))
    pieces[0] = pieces[3] = pieces[6] = None
    first = chunk.unpacked(pieces[:4])
    assert first.lost == [10, 13]
    schedule.restored(claim, first)
    assert (chunk.count, chunk.weight.message_bytes) == (4, sum(map(len, records)) - len(records[1]) - len(records[2]))
    assert schedule.claim_next(claim, 5) is None, "what was restored comes first"
    segments: list[Segment] = []
    assert schedule.take(ALL, 5, segments) == 2
    assert schedule.claim_next(claim, 5) is chunk
    second = chunk.unpacked(pieces[4:])
    assert second.lost == [16]
    schedule.restored(claim, second)
    assert (chunk.count, chunk.weight.message_bytes) == (0, 0)
    schedule.shelves.add(5, 10, [records[0]], 0)  # found in the log
    assert schedule.take(ALL, 5, segments) == 4
    assert sequences(segments) == [11, 12, 10, 14, 15, 17]
    assert schedule.tally() == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("read", "bound"), [("-", (11, 3)), ("--", (11, 5)), ("---", (12, 1)), ("x-", (11, 5)), ("xx-", (21, 1))]
)
def test_lost_messages_do_not_set_a_chunk_back(
    schedule: Schedule, store: Store, read: str, bound: tuple[int, int]
) -> None:
    """What follows them is due no earlier than what was known before, and later where its sequence is lower."""
    for due, sequence in ((10, 9), (20, 3), (20, 5), (30, 1)):
        schedule.shelves.add(due, sequence, [bytes(100)], 0)
    spill(schedule, store, 1000)
    claim = object()
    chunk = schedule.claim_next(claim, LATE)
    assert chunk is not None
    pieces = [piece if kind == "x" else None for kind, piece in zip(read, store.read(chunk.slots, 4), strict=False)]
    schedule.restored(claim, chunk.unpacked(pieces))
    assert chunk.bound == bound


def test_a_chunk_that_is_lost_as_a_whole_is_gone(schedule: Schedule, store: Store) -> None:
    """Nothing is held up by it."""
    schedule.shelves.add(5, 0, bodies(10), 0)
    spill_all(schedule, store)
    claim = object()
    while chunk := schedule.claim_next(claim, 5):
        schedule.restored(claim, chunk.unpacked([None] * chunk.count))
    assert schedule.messages == schedule.overhead_bytes == 0
    assert schedule.next_due_ms() is None


@pytest.mark.parametrize("size", [0, 5, 300])
def test_what_is_restored_fits_into_the_room_it_was_read_for(schedule: Schedule, store: Store, size: int) -> None:
    """The budget of a read is smaller than the room, for each message comes back with a group of its own."""
    for sequence in range(300):
        schedule.shelves.add(sequence, 1000 - sequence, [bytes(size + sequence % 3)], 0)
    spill(schedule, store, 30_000)
    claim = object()
    room = 10_000
    chunk = schedule.claim_next(claim, LATE)
    segments: list[Segment] = []
    if chunk is None:
        schedule.take(ALL, LATE, segments)
        chunk = schedule.claim_next(claim, LATE)
    assert chunk is not None
    budget = chunk.readable(room)
    assert budget > room // 4
    pieces: list[bytes] = []
    for piece in store.read(chunk.slots, chunk.count):
        budget -= len(piece) + OVERHEAD_BYTES
        if budget < 0:
            break
        pieces.append(piece)
    assert len(pieces) > 5
    before = schedule.overhead_bytes
    unpacked = chunk.unpacked(pieces)
    schedule.restored(claim, unpacked)
    used = schedule.overhead_bytes - before + unpacked.message_bytes + OVERHEAD_BYTES * len(pieces)
    assert used <= room


# Claims --------------------------------------------------------------------------------------------------------------


def test_a_moving_chunk_that_is_due_is_taken_back_when_its_turn_comes(schedule: Schedule, store: Store) -> None:
    """Not before; and what was written of it is refused."""
    schedule.shelves.add(5, 0, [bytes(2000)], 0)
    schedule.shelves.add(6, 1, [bytes(2000)], 0)
    claim = object()
    chunk = schedule.claim_far(claim, 1)
    assert chunk is not None
    assert (chunk.count, schedule.messages) == (1, 2)
    wrapped = chunk.packed()
    segments: list[Segment] = []
    assert schedule.take(1, 10, segments) == 1
    assert claim in schedule.claims, "one message was enough"
    assert inside.due_resident(schedule, 10)
    assert schedule.next_due_ms() == 6
    assert schedule.take(1, 10, segments) == 1
    assert schedule.chunk_spilled(claim, store.write(chunk.first, wrapped)) is None
    assert sequences(segments) == [0, 1]
    assert schedule.tally() == (0, 0, 0, 0)


def test_a_part_taken_back_finds_the_group_it_was_cut_off(schedule: Schedule) -> None:
    """Also when the front of that is gone meanwhile, or all of it."""
    for taken in (0, 30, 40):
        schedule.shelves.add(5, 0, bodies(60), 0)
        claim = object()
        chunk = schedule.claim_far(claim, 20 * (10 + OVERHEAD_BYTES - 8) - CHUNK_BYTES)
        assert chunk is not None
        assert chunk.count == 20
        segments: list[Segment] = []
        schedule.take(taken, 5, segments)
        schedule.unclaim(claim)
        assert schedule.overhead_bytes == GROUP_BYTES
        assert chunk.packed(), "its claim is void, but who writes it must not stumble"
        schedule.take(ALL, 5, segments)
        assert sequences(segments) == list(range(60))


def test_a_purge_leaves_nothing_and_no_claim(schedule: Schedule, store: Store) -> None:
    """Who moves something at that moment learns that it came too late."""
    schedule.shelves.add(1, 0, bodies(40, 100), 0)
    spill(schedule, store, 1_000)
    spill(schedule, store, 1_000)
    restoring, moving = object(), object()
    segments: list[Segment] = []
    schedule.take(schedule.tally().resident_messages - 5, 1, segments)
    schedule.shelves.add(9, 100, bodies(10, 1000), 0)
    moved = schedule.claim_far(moving, 1)
    schedule.take(5, 1, segments)
    restored = schedule.claim_next(restoring, 1)
    assert moved is not None
    assert restored is not None
    unpacked = restored.unpacked(store.read(restored.slots, 3))
    for slots in schedule.drop_all()[0]:
        store.free(slots)
    assert not store.records
    assert schedule.restored(restoring, unpacked) is None
    assert schedule.chunk_spilled(moving, store.write(moved.first, moved.packed())) is None
    schedule.unclaim(moving)
    assert schedule.messages == schedule.overhead_bytes == 0
    schedule.shelves.add(3, 200, [b"new"], 0)
    assert sequences(deliver(schedule, Store())) == [200]


def test_positions_are_never_used_twice(schedule: Schedule, store: Store) -> None:
    """A write that is still on its way for a void claim must not meet another's."""
    schedule.shelves.add(1, 0, bodies(30, 1000), 0)
    seen: list[int] = []
    for fails in (True, False, True, False, False):
        claim = object()
        chunk = schedule.claim_far(claim, 2_000)
        assert chunk is not None
        seen += range(chunk.first, chunk.first + chunk.count)
        if fails:
            schedule.unclaim(claim)
        else:
            schedule.chunk_spilled(claim, store.write(chunk.first, chunk.packed()))
    assert seen == sorted(set(seen))


def test_entries_show_every_message_once(schedule: Schedule, store: Store) -> None:
    """In memory with size and due time, moving ones too; spilled ones with neither."""
    schedule.shelves.add(3, 0, [b"abc", b"de"], 0)
    schedule.shelves.add(1, 9, [b"first"], 0)
    schedule.shelves.add(7, 5, [bytes(2000)], 0)
    schedule.shelves.add(8, 6, [bytes(3000)], 0)
    spill(schedule, store)
    schedule.claim_far(object(), 1)
    assert list(inside.entries(schedule)) == [
        (9, 5, "resident", 1),
        (0, 3, "resident", 3),
        (1, 2, "resident", 3),
        (5, 2000, "resident", 7),
        (6, None, "spilled", None),
    ]


def test_groups_are_gone_through_a_shelf_at_a_time(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, from any (due time, sequence) on, whatever came before it meanwhile, or went."""
    monkeypatch.setattr(shelves_module, "SHELF", 4)
    added = [(random.Random(number).randrange(90), number) for number in range(100)]
    for due, number in added:
        schedule.shelves.add(due, number, [b"x"], 0)
    added.sort()
    some, key = schedule.shelves.groups_from((), 3)
    assert 3 <= len(some) <= 8
    assert key is not None
    deliver(schedule, Store(), now=40, most=100)
    schedule.shelves.add(5, 200, [b"x"], 0)
    others, end = schedule.shelves.groups_from((60, 0), 1000)
    assert end is None
    assert [group[:2] for group in others] == [one for one in added if one >= (60, 0)]
    rest, _ = schedule.shelves.groups_from(key, 1000)
    assert [group[:2] for group in rest] == [one for one in added if one >= key and one[0] > 40]


@pytest.mark.parametrize(
    "damage",
    [
        lambda schedule: schedule.shelves.__setattr__("messages", 7),
        lambda schedule: schedule.shelves.__setattr__("overhead", 7),
        lambda schedule: schedule.__setattr__("spilled_bytes", 7),
        lambda schedule: schedule.shelves.all[0].reverse(),
        lambda schedule: schedule.shelves.all.append(shelves_module.Shelf()) or schedule.shelves.lows.append((10,)),
        lambda schedule: schedule.shelves.all[0].append((1, 0, 0, b"x")),
        lambda schedule: schedule.shelves.all[0].append((50, 0, 0, *bodies(GROUP_MESSAGES + 1))),
        lambda schedule: schedule.spilled.reverse(),
        lambda schedule: schedule.spilled[0].sequences.pop(),
        lambda schedule: schedule.spilled[0].__setattr__("claim", 7),
        lambda schedule: schedule.spilled[0].weight.__setattr__("chunks", 2),
    ],
)
def test_the_check_finds_what_is_wrong(damage: Callable[[Schedule], None]) -> None:
    """Each kind of damage is told in words."""
    schedule, store = Schedule(), Store()
    for due in (4, 3, 2, 1):
        schedule.shelves.add(due, due, [bytes(2000)], 0)
    spill(schedule, store)
    spill(schedule, store)
    inside.due_resident(schedule, 0)
    assert inventory.problems(schedule) == []
    damage(schedule)
    assert inventory.problems(schedule)


# One message ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("comes", ["restored", "given up"])
def test_what_is_moved_behind_a_look_is_found(
    schedule: Schedule, store: Store, monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    """From the disk, or from the way there, to a shelf that was looked at before: it is looked at again."""
    monkeypatch.setattr(shelves_module, "SHELF", 2)
    for sequence in range(30):
        schedule.shelves.add(sequence, sequence, [bytes(100)], 0)
    schedule.shelves.add(30, 30, [bytes(100)] * 10, 0)
    claim = object()
    chunk = schedule.claim_far(claim, 1)
    assert chunk is not None
    assert chunk.cut, "what comes back becomes one with what it was cut off"
    if comes == "restored":
        assert schedule.chunk_spilled(claim, store.write(chunk.first, chunk.packed())) is not None
    for sequence in range(40, 80):
        schedule.shelves.add(sequence, sequence, [bytes(100)], 0)
    seeking = Seeking(schedule, 39)
    while seeking._start is not None and seeking._start < (45,):
        assert seeking.look(1) is None
    if comes == "restored":
        schedule.claim_spilled(claim, chunk)
        store.free(schedule.restored(claim, chunk.unpacked(store.read(chunk.slots, chunk.count))))
    else:
        schedule.unclaim(claim)
    group = None
    while group is None:
        assert not seeking.is_over
        group = seeking.look(1)
    assert schedule.shelves.take_out(group, 39).first == 39
    seeking.end()
    assert not schedule.shelves.sought
    assert sequences(deliver(schedule, store)) == [one for one in range(80) if one != 39]
    assert inventory.problems(schedule) == []


def test_a_chunk_is_cut_where_a_message_is(schedule: Schedule, store: Store) -> None:
    """The parts are due in their order, and weigh together what the whole did, until the last of them is gone."""
    for sequence, due in enumerate((5, 9, 5, 7, 7, 8, 6)):
        schedule.shelves.add(due, sequence, [bytes(100 + sequence)], 0)
    spill(schedule, store, 10_000)
    (chunk,) = schedule.spilled
    assert list(chunk.sequences) == [0, 2, 6, 3, 4, 5, 1]
    found = find_spilled([(chunk, chunk.sequences)], 3)
    assert found == (chunk, chunk.sequences, 3, 1)
    part = schedule.cut_off(chunk, 3, 5 + found.rise)
    rest = schedule.cut_off(part, 1, 6)
    assert [list(one.sequences) for one in schedule.spilled] == [[0, 2, 6], [3], [4, 5, 1]]
    assert [one.bound for one in schedule.spilled] == [(5, 0), (6, 3), (6, 4)]
    assert schedule.cut_off(rest, 0, 6) is schedule.cut_off(rest, 3, 6) is rest
    assert schedule.overhead_bytes == 3 * CHUNK_BYTES + 7 * 8
    assert inventory.problems(schedule) == []
    schedule.shelves.add(10, 7, [bytes(100)], 0)
    spill(schedule, store)
    assert [list(one.sequences) for one in schedule.spilled] == [[0, 2, 6], [3], [4, 5, 1, 7]]
    assert sequences(deliver(schedule, store)) == [0, 2, 6, 3, 4, 5, 1, 7]
    assert schedule.tally() == (0, 0, 0, 0)


# Interrupts ----------------------------------------------------------------------------------------------------------


class Strike:
    """Raises KeyboardInterrupt at one call or return of a call."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_return") or (event == "c_call" and argument.__name__ != "setprofile"):
            self.left -= 1
            if self.left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt


def struck(at: int, action: Callable[[], Any]) -> bool:
    """Do something, struck at the call of that number; return whether there were as many."""
    gc.disable()  # what is called when it collects would be struck, too
    sys.setprofile(Strike(at))
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
        gc.enable()
    return False


class Struck:
    """A schedule and one step of it, that is struck at some call."""

    def __init__(self, action: str, at: int) -> None:
        self.schedule, self.store = Schedule(), Store()
        self.claim = object()
        self.segments: list[Segment] = []
        self.added: list[int] = []
        number = random.Random(at % 7)
        self.due: dict[int, int] = {}
        for sequence in range(0, 90, 3):
            self.due |= dict.fromkeys(range(sequence, sequence + 3), number.randrange(20))
            self.schedule.shelves.add(self.due[sequence], sequence, bodies(3, 100), 0)
        self.early = sum(due <= 8 for due in self.due.values())
        self.chunk: Chunk | None = None
        self.wrapped: list[bytes] = []
        if action in ("take_back", "chunk_spilled", "unclaim"):
            self.chunk = self.schedule.claim_far(self.claim, 4_500)
            self.wrapped = self.chunk.packed()
        if action in ("claim_next", "restored", "cut_off"):
            spill_all(self.schedule, self.store, 3_000)
        if action == "cut_off":
            self.chunk = self.schedule.spilled[0]
        if action == "restored":
            self.chunk = self.schedule.claim_next(self.claim, LATE)
        self.struck = struck(at, getattr(self, action))

    def add(self) -> None:
        self.added.append(1000)
        self.schedule.shelves.add(5, 1000, [b"x"], 0)

    def add_many(self) -> None:
        self.added += range(1000, 1010)
        self.schedule.shelves.add(5, 1000, bodies(10), 0)

    def incoming(self) -> None:
        groups = groups_of(5, 1000, bodies(10), 0)
        self.added += range(1000, 1010)
        self.schedule.shelves.incoming += groups
        assert self.schedule.messages == len(self.due) + 10

    def take(self) -> None:
        self.schedule.take(self.early - 1, 8, self.segments)

    def take_back(self) -> None:
        self.schedule.take(ALL, LATE, self.segments)

    def claim_far(self) -> None:
        self.schedule.claim_far(self.claim, 5_000)

    def chunk_spilled(self) -> None:
        slots = Places(range(self.chunk.first, self.chunk.first + self.chunk.count))
        self.schedule.chunk_spilled(self.claim, slots)

    def unclaim(self) -> None:
        self.schedule.unclaim(self.claim)

    def claim_next(self) -> None:
        self.schedule.claim_next(self.claim, LATE)

    def restored(self) -> None:
        self.schedule.restored(self.claim, self.chunk.unpacked(self.store.read(self.chunk.slots, 5)))

    def cut_off(self) -> None:
        self.schedule.cut_off(self.chunk, 3, self.chunk.bound[0] + rises(self.chunk.sequences[:4]))

    def take_out(self) -> None:
        group = self.schedule.shelves.head()[0]
        self.segments += (self.schedule.shelves.take_out(group, group[1]),)

    def everything(self) -> list[int]:
        """Settle what the step left, as its owner does, and deliver all there is."""
        if self.wrapped and self.claim not in self.schedule.claims:
            self.store.write(self.chunk.first, self.wrapped)
        self.schedule.unclaim(self.claim)
        assert inventory.problems(self.schedule) == []
        return sequences(self.segments + deliver(self.schedule, self.store, piece=5))


ACTIONS = [name for name in vars(Struck) if not name.startswith("_") and name != "everything"]


@pytest.mark.parametrize("action", ACTIONS)
def test_an_interrupt_anywhere_loses_and_doubles_nothing(action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at any call of any step: it is done or not, and every message comes once, in order."""
    monkeypatch.setattr(shelves_module, "SHELF", 4)
    for module in (group_module, chunk_module, inventory):
        monkeypatch.setattr(module, "GROUP_MESSAGES", 3)
    at = 0
    while (step := Struck(action, at)).struck:
        found = step.everything()
        due = dict(step.due)
        if len(found) > len(due):
            due |= dict.fromkeys(step.added, 5)
        assert found == sorted(due, key=lambda sequence: (due[sequence], sequence)), f"struck at {at}"
        at += 1
    assert at > 3


# Against a model -----------------------------------------------------------------------------------------------------

plain = st.integers(0, 40).map(lambda size: b"%d" % size * size)
records_ = st.one_of(
    plain,
    plain.map(lambda body: Message(body, b"{}")),
    plain.map(lambda body: Message(body, logged=False)),
    plain.map(lambda body: bytes(Message(body, topic="t"))),
)


class Moving:
    """A chunk that the model knows to be on its way to the store."""

    def __init__(self, claim: object, chunk: Chunk, members: list[int]) -> None:
        self.claim, self.chunk, self.members = claim, chunk, members


class ScheduleMachine(RuleBasedStateMachine):
    """The model: a sorted list of (due time, sequence) and what each message is and where."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.schedule = Schedule()
        self.store = Store()
        self.now = 100
        self.next = 0
        self.line: list[tuple[int, int]] = []
        self.due: dict[int, int] = {}
        self.record: dict[int, Record] = {}
        self.marks: dict[int, int] = {}
        self.resident: set[int] = set()  # moving ones too
        self.moving: list[Moving] = []
        self.void: list[Moving] = []
        self.restoring: list[tuple[object, Chunk]] = []
        self.seekings: list[Seeking] = []

    @initialize(
        shelf=st.sampled_from([1, 3, 256]), group=st.sampled_from([1, 3, 256]), chunk=st.sampled_from([5, 65_536]),
        cost=st.sampled_from([0, 1024]),
    )  # fmt: skip
    def begin(self, shelf: int, group: int, chunk: int, cost: int) -> None:
        self.patch.setattr(shelves_module, "SHELF", shelf)
        self.patch.setattr(group_module, "GROUP_MESSAGES", group)
        self.patch.setattr(chunk_module, "GROUP_MESSAGES", group)
        self.patch.setattr(inventory, "GROUP_MESSAGES", group)
        self.patch.setattr(chunk_module, "CHUNK_MESSAGES", chunk)
        for module in (chunk_module, schedule_module):
            self.patch.setattr(module, "CHUNK_BYTES", cost)
        self.cost = cost

    def teardown(self) -> None:
        self.patch.undo()

    def note(self, due: int, sequence: int, record: Record, marks: int) -> None:
        insort(self.line, (due, sequence))
        self.due[sequence], self.record[sequence], self.marks[sequence] = due, record, marks
        self.resident.add(sequence)

    def forget(self, sequence: int) -> None:
        self.line.remove((self.due[sequence], sequence))
        self.resident.discard(sequence)

    def key(self, sequence: int) -> tuple[int, int]:
        return self.due[sequence], sequence

    # Steps -----------------------------------------------------------------------------------------------------------

    @rule(
        delay=st.integers(-3, 12),
        batch=st.lists(records_, max_size=9),
        marks=st.sampled_from([0, 0, 0, 1, 5]),
        gap=st.booleans(),
        aside=st.booleans(),
    )
    def add(self, delay: int, batch: list[Record], marks: int, gap: bool, aside: bool) -> None:
        first, due = self.next + gap, self.now + delay
        if aside:
            self.schedule.shelves.incoming += groups_of(due, first, list(batch), marks)
        else:
            self.schedule.shelves.add(due, first, list(batch), marks)
        self.next = first + len(batch)
        for sequence, record in enumerate(batch, first):
            self.note(due, sequence, record, marks)

    @rule(steps=st.lists(st.tuples(st.integers(0, 12), plain), min_size=5, max_size=25))
    def add_singles(self, steps: list[tuple[int, bytes]]) -> None:
        for delay, body in steps:
            self.add(delay, [body], 0, False, False)

    @precondition(lambda self: self.line)
    @rule(most=st.integers(0, 30), by=st.integers(0, 6))
    def take(self, most: int, by: int) -> None:
        self.now += by
        self.taken(most)

    def taken(self, most: int) -> int:
        resident = inside.due_resident(self.schedule, self.now)
        segments: list[Segment] = []
        count = self.schedule.take(most, self.now, segments)
        got = flat(segments)
        assert count == len(got) <= most
        assert bool(count) == (resident and most > 0)
        assert [sequence for sequence, _, _ in got] == [sequence for _, sequence in self.line[:count]]
        assert all(due <= self.now for due, _ in self.line[:count])
        for one, two in pairwise(segments):
            assert one.first + len(one.records) != two.first or one.marks != two.marks
        for sequence, record, marks in got:
            assert sequence in self.resident
            assert same(record, self.record[sequence])
            assert marks == self.marks[sequence]
            self.forget(sequence)
        for moving in list(self.moving):
            if any(sequence not in self.resident for sequence in moving.members):
                self.moving.remove(moving)
                self.void.append(moving)
        return count

    @precondition(lambda self: self.line)
    @rule(most=st.integers(1, 20), piece=st.integers(1, 6), by=st.integers(0, 6))
    def get_many(self, most: int, piece: int, by: int) -> None:
        """All that is due comes, if need be from the store, unless somebody else is restoring what comes first."""
        self.now += by
        while most:
            most -= self.taken(most)
            if most and not self.restore_next(piece, set()):
                break
        if most and self.line and self.line[0][0] <= self.now:
            assert self.restoring

    @precondition(lambda self: len(self.moving) < 3)
    @rule(wanted=st.integers(1, 2_500))
    def claim_far(self, wanted: int) -> None:
        claim = object()
        overhead = self.schedule.overhead_bytes
        moving = {sequence for moving in self.moving for sequence in moving.members}
        chunk = self.schedule.claim_far(claim, wanted)
        assert self.schedule.overhead_bytes == overhead
        free = sorted((self.key(sequence) for sequence in self.resident - moving), reverse=True)
        if chunk is None:
            assert not free
            return
        members = [sequence for _, sequence in reversed(free[: chunk.count])]
        assert [first + index for _, first, _, *records in chunk.groups for index in range(len(records))] == members
        frees = [len(self.record[sequence]) + OVERHEAD_BYTES - 8 for sequence in members]
        groups = len(chunk.groups) - chunk.cut
        assert chunk.count == len(free) or sum(frees) + GROUP_BYTES * groups >= wanted + self.cost
        assert chunk.count == 1 or sum(frees[1:]) + GROUP_BYTES * (len(chunk.groups) - 1) < wanted + self.cost
        assert chunk.charged == charge([self.record[sequence] for sequence in members])
        self.moving.append(Moving(claim, chunk, members))

    @precondition(lambda self: self.moving or self.void)
    @rule(data=st.data())
    def install(self, data: st.DataObject) -> None:
        self.write(data.draw(st.sampled_from([*self.moving, *self.void])))

    @rule(wanted=st.integers(1, 2_500))
    def spill(self, wanted: int) -> None:
        known = len(self.moving)
        self.claim_far(wanted)
        if len(self.moving) > known:
            self.write(self.moving[-1])

    @rule(wanted=st.integers(1, 1_000))
    def spill_all(self, wanted: int) -> None:
        free = True
        while free:
            self.spill(wanted)
            free = self.resident > {sequence for moving in self.moving for sequence in moving.members}

    def write(self, moving: Moving) -> None:
        before = self.charged()
        slots = self.store.write(moving.chunk.first, moving.chunk.packed())
        freed = self.schedule.chunk_spilled(moving.claim, slots)
        if moving in self.void:
            self.void.remove(moving)
            assert freed is None
            self.store.free(slots)
            return
        self.moving.remove(moving)
        self.resident -= set(moving.members)
        assert before - self.charged() == freed

    @precondition(lambda self: len(self.moving) + len(self.void) > 1)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        moving = data.draw(st.sampled_from([*self.moving, *self.void]))
        self.schedule.unclaim(moving.claim)
        if moving in self.moving:
            self.moving.remove(moving)
        else:
            self.void.remove(moving)

    @precondition(lambda self: len(self.resident) < len(self.line))
    @rule(
        piece=st.integers(0, 12),
        lost=st.sets(st.integers(0, 12), max_size=3),
        repair=st.booleans(),
        by=st.integers(0, 6),
    )
    def restore(self, piece: int, lost: set[int], repair: bool, by: int) -> None:
        self.now += by
        while self.taken(20):
            pass
        self.restore_next(piece, lost, repair)

    def restore_next(self, piece: int, lost: set[int], repair: bool = False) -> bool:
        self.begin_restoring()
        if not self.restoring:
            return False
        before = len(self.restoring)
        self.end_restoring(before - 1, piece, lost, repair)
        return True

    @precondition(lambda self: len(self.resident) < len(self.line))
    @rule()
    def begin_restoring(self) -> None:
        claim = object()
        chunk = self.schedule.claim_next(claim, self.now)
        if chunk is None:
            return
        assert chunk not in [other for _, other in self.restoring]
        assert self.line
        held = [key for key in self.line if key[1] in self.resident]
        assert not held or held[0] > chunk.bound
        self.restoring.append((claim, chunk))

    @precondition(lambda self: self.restoring)
    @rule(data=st.data(), piece=st.integers(0, 12), lost=st.sets(st.integers(0, 12), max_size=3), repair=st.booleans())
    def finish_restoring(self, data: st.DataObject, piece: int, lost: set[int], repair: bool) -> None:
        self.end_restoring(data.draw(st.integers(0, len(self.restoring) - 1)), piece, lost, repair)

    def end_restoring(self, index: int, piece: int, lost: set[int], repair: bool) -> None:
        claim, chunk = self.restoring.pop(index)
        pieces: list[bytes | None] = list(self.store.read(chunk.slots, piece))
        members = list(chunk.sequences)[: len(pieces)]
        gone = [members[place] for place in sorted(lost) if place < len(members)]
        for place in lost:
            if place < len(pieces):
                pieces[place] = None
        bound = chunk.bound
        unpacked = chunk.unpacked(pieces)
        assert unpacked.lost == gone
        read = [self.record[sequence] for sequence in members if sequence not in gone]
        assert unpacked.message_bytes == sum(map(len, read))
        slots = self.schedule.restored(claim, unpacked)
        assert len(slots) == len(pieces)
        self.store.free(slots)
        assert chunk.bound >= bound
        assert not chunk.count or all(self.key(sequence) < chunk.bound for sequence in members if sequence not in gone)
        for sequence in members:
            if sequence in gone:
                self.forget(sequence)
            else:
                self.resident.add(sequence)
        if repair:
            for sequence in gone:
                self.schedule.shelves.add(self.due[sequence], sequence, [self.record[sequence]], self.marks[sequence])
                self.note(self.due[sequence], sequence, self.record[sequence], self.marks[sequence])

    @rule(data=st.data())
    def begin_seeking(self, data: st.DataObject) -> None:
        there = [sequence for _, sequence in self.line] or [0]
        self.seekings.append(Seeking(self.schedule, data.draw(st.sampled_from([*there, self.next]))))

    @precondition(lambda self: self.seekings)
    @rule(data=st.data(), most=st.integers(1, 4), steps=st.integers(1, 4), piece=st.integers(1, 6))
    def seek(self, data: st.DataObject, most: int, steps: int, piece: int) -> None:
        """Whatever happens between two looks, a message that is there is found, and taken out from wherever it is."""
        seeking = data.draw(st.sampled_from(self.seekings))
        sequence = seeking.sought.sequence
        is_there = sequence in [one for _, one in self.line]
        for _ in range(steps):
            group = seeking.look(most)
            self.note_void()
            if group is not None:
                self.take_out(group, sequence)
                break
            if not seeking.is_over:
                continue
            found = find_spilled([(chunk, chunk.sequences) for chunk in self.schedule.spilled], sequence)
            if found is None:
                assert not is_there
                break
            if found.chunk.claim is not None:
                return
            start = found.chunk.bound
            self.fetch(found, piece)
            seeking.begin_at(start)
        else:
            return
        seeking.end()
        self.seekings.remove(seeking)

    def take_out(self, group: Group, sequence: int) -> None:
        assert sequence in self.resident
        before = self.charged()
        first, (record,), marks = self.schedule.shelves.take_out(group, sequence)
        assert (first, marks) == (sequence, self.marks[sequence])
        assert same(record, self.record[sequence])
        freed = before - self.charged() - charge([record])
        assert freed in (GROUP_BYTES, 0, -GROUP_BYTES)
        self.forget(sequence)

    def note_void(self) -> None:
        """What was sought may have been on its way to the disk."""
        for moving in list(self.moving):
            if moving.claim not in self.schedule.claims:
                self.moving.remove(moving)
                self.void.append(moving)

    def fetch(self, found: Found, count: int) -> None:
        """Restore a message of a spilled chunk, and some that follow it."""
        chunk, sequences, place, rise = found
        due_ms = chunk.bound[0] + rise
        part = self.schedule.cut_off(chunk, place, due_ms)
        end = place + count
        if end < len(sequences):
            rest = self.schedule.cut_off(part, count, due_ms + rises(sequences[place : end + 1]))
            assert list(rest.sequences) == list(sequences[end:])
        assert list(part.sequences) == list(sequences[place:end])
        claim = object()
        self.restoring.append((claim, self.schedule.claim_spilled(claim, part)))
        self.end_restoring(len(self.restoring) - 1, count, set(), False)

    @precondition(lambda self: self.restoring)
    @rule()
    def abandon_restoring(self) -> None:
        self.schedule.unclaim(self.restoring.pop()[0])

    @precondition(lambda self: len(self.line) > 40)
    @rule()
    def drop_all(self) -> None:
        for slots in self.schedule.drop_all()[0]:
            self.store.free(slots)
        self.line.clear()
        self.resident.clear()
        self.void += self.moving
        self.moving.clear()
        for claim, chunk in self.restoring:
            assert self.schedule.restored(claim, chunk.unpacked([])) is None
        self.restoring.clear()

    def charged(self) -> int:
        tally = self.schedule.tally()
        return tally.resident_bytes + OVERHEAD_BYTES * tally.resident_messages + self.schedule.overhead_bytes

    # After every step --------------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        schedule = self.schedule
        inventory.look(schedule, ALL)  # only at what has changed since the last check
        assert list(inventory.problems_seen(schedule)) == []
        assert inventory.problems(schedule) == []
        spilled = {sequence for _, sequence in self.line} - self.resident
        tally = schedule.tally()
        assert tally.resident_messages == len(self.resident)
        assert tally.resident_bytes == sum(len(self.record[sequence]) for sequence in self.resident)
        assert tally.spilled_messages == len(spilled)
        assert tally.spilled_bytes >= sum(len(self.record[sequence]) for sequence in spilled)
        assert tally.spilled_bytes == 0 or spilled
        assert schedule.messages == len(self.line)
        groups = [*schedule.shelves.groups(), *(group for moving in self.moving for group in moving.chunk.groups)]
        cuts = sum(moving.chunk.cut for moving in self.moving)
        chunks = self.cost * len(schedule.spilled) + 8 * len(spilled)
        assert schedule.overhead_bytes == GROUP_BYTES * (len(groups) - cuts) + chunks
        assert {place for chunk in schedule.spilled for place in chunk.slots.places} == set(self.store.records)
        for chunk in schedule.spilled:
            pieces = self.store.read(chunk.slots, chunk.count)
            assert chunk.slots.places == tuple(range(chunk.first, chunk.first + chunk.count))
            assert chunk.bound <= self.key(chunk.sequences[0])
            assert all(chunk.smallest <= len(piece) <= chunk.largest for piece in pieces)
            assert [len(piece) - WRAPPING_BYTES for piece in pieces] == [
                len(self.record[one]) for one in chunk.sequences
            ]
            assert sorted(chunk.sequences, key=self.key) == list(chunk.sequences)
        entries = list(inside.entries(schedule))
        assert sorted(entry[0] for entry in entries) == sorted(sequence for _, sequence in self.line)
        for sequence, size, place, due in entries:
            if sequence in self.resident:
                assert (size, place, due) == (len(self.record[sequence]), "resident", self.due[sequence])
            else:
                assert (size, place, due) == (None, "spilled", None)
        next_due = schedule.next_due_ms()
        assert (next_due is None) == (not self.line)
        if next_due is not None:
            assert next_due <= self.line[0][0]
            assert next_due == self.line[0][0] or spilled


ScheduleMachine.TestCase.settings = settings(
    max_examples=300 if TORTURE else 100,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
TestScheduleModel = ScheduleMachine.TestCase
