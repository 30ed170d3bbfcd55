"""Shared bodies alone: random histories of several lanes; counts and references agree, and nothing is left at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import lmdb
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from formats.test_hollow import ALL, Log
from qflow.errors import CorruptionError
from qflow.message import Message, Record, is_logged
from qflow.storage import blocks, encoding
from qflow.storage.blocks import NO_PREVIOUS, BlockKey, Reference
from qflow.storage.log import append, bodies, hollowing, removal, rows
from qflow.storage.log.bodies import Releases, Sharing, key_of_body
from qflow.storage.log.keys import BLOCKS
from qflow.storage.log.reading import find_message, read_unsettled
from qflow.storage.log.rows import purged_row
from thorough import examples

LINES = ((1, 0), (1, 3), (2, 0))
"""(queue, lane)."""

some_bodies = st.integers(0, 90).map(lambda size: bytes([size]) * size)
records: st.SearchStrategy[Record] = st.one_of(
    some_bodies,
    st.builds(Message, some_bodies, st.just(b'{"a":1}')),
    st.builds(Message, some_bodies, st.just(b""), st.just(False)),
)
lines = st.integers(0, len(LINES) - 1)
several = st.lists(st.tuples(records, st.sets(lines, min_size=1)), min_size=1, max_size=6)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), several, st.just(0)),
        st.tuples(st.just("put"), several, st.just(0)),
        st.tuples(st.just("settle"), lines, st.lists(st.tuples(st.integers(0, 99), st.integers(1, 60)), max_size=6)),
        st.tuples(st.just("hollow"), lines, st.integers(0, 40)),
        st.tuples(st.just("remove"), lines, st.tuples(st.integers(0, 3), st.integers(8, 20))),
        st.tuples(st.just("purge"), lines, st.just(0)),
    ),
    min_size=3,
    max_size=25,
)


class Lane(Log):
    """One lane of several that share bodies."""

    def put(self, batch: list[Record], sharing: Sharing, now_ms: int) -> None:
        first = self.row.next
        stand_ins = sharing.stand_ins(batch)
        key = BlockKey(BLOCKS, self.owner, self.lane, first)
        self.row = append.append_stand_ins(self.txn, key, self.row, stand_ins, now_ms)
        self.row = self.row._replace(next=first + len(batch))
        self.sent.update(enumerate(batch, first))
        self.times.update(dict.fromkeys(range(first, self.row.next), now_ms))
        self.unsettled |= set(range(first, self.row.next))

    def purge(self) -> None:
        self.row = purged_row(self.row, self.row.next)
        self.unsettled.clear()

    def pass_over(self, limit: int, most: int) -> None:
        """Hollow all of it, in steps of a few references."""
        position, more = 0, True
        while more:
            position, more, _ = hollowing.hollow_lane(
                self.txn, self.owner, self.lane, self.row, position, limit, Releases(most)
            )

    def check(self) -> None:
        super().check()
        expected = self.expected()
        assert self.row.messages == len(expected)
        assert self.row.bytes == sum(map(len, expected.values()))


class Lines:
    """All the lanes, and the bodies they share."""

    def __init__(self, txn: Any) -> None:
        self.txn = txn
        self.lanes = [Lane(txn, lane, owner) for owner, lane in LINES]
        self.numbers: set[int] = set()
        for lane in self.lanes:
            self.write_row(lane)

    def write_row(self, lane: Lane) -> None:
        rows.write_row(self.txn, lane.owner, lane.lane, lane.row)

    def put(self, some: list[tuple[Record, set[int]]], now_ms: int) -> None:
        """Put records into the lanes named with each; what goes to several is stored once."""
        shared = {id(record): record for record, places in some if len(places) > 1 and is_logged(record)}
        sharing = Sharing(self.txn, shared, now_ms)
        for place, lane in enumerate(self.lanes):
            batch = [record for record, places in some if place in places]
            if batch:
                lane.put(batch, sharing, now_ms)
        sharing.finish()
        for lane in self.lanes:
            self.write_row(lane)

    def play(self, history: list[tuple[str, Any, Any]]) -> None:
        for number, (kind, what, how) in enumerate(history):
            if kind == "put":
                before = self.found().keys()
                self.put(what, 1_000 + number)
                new = self.found().keys() - before
                assert not self.numbers & new, "a number was given twice"
                self.numbers |= new
            elif kind == "settle":
                lane = self.lanes[what]
                for share, width in how:
                    first = lane.row.floor + (lane.row.next - lane.row.floor) * share // 100
                    lane.settle(first, min(first + width, lane.row.next))
            elif kind == "hollow":
                self.lanes[what].pass_over(1 + how, 8 + how)
            elif kind == "remove":
                lane = self.lanes[what]
                limit, most = how
                removal.remove_settled(self.txn, lane.owner, lane.lane, lane.row, limit, Releases(most))
            else:
                self.lanes[what].purge()
            for lane in self.lanes:
                self.write_row(lane)

    def found(self) -> Counter[int]:
        """Count the references in all blocks, the plain way."""
        found: Counter[int] = Counter()
        for lane in self.lanes:
            for first, value in lane.blocks().items():
                block = blocks.decode(value, BlockKey(BLOCKS, lane.owner, lane.lane, first), where="here")
                found.update(record.number for record in block.records if type(record) is Reference)
        return found

    def counted(self) -> dict[int, int]:
        """Return the counts as they are stored; each has a body, and each body a count."""
        kept: dict[int, bytes] = {}
        with self.txn.cursor() as cursor:
            found = cursor.set_range(key_of_body(1))
            while found and cursor.key()[0] == bodies.BODIES:
                kept[int.from_bytes(cursor.key()[-8:], "big")] = cursor.value()
                found = cursor.next()
        assert {number for number in kept if number % 2} == {number + 1 for number in kept if number % 2 == 0}
        return {number - 1: int.from_bytes(value[:8], "little") for number, value in kept.items() if number % 2}

    def check(self) -> None:
        assert self.counted() == self.found()
        for limit in (1, 3, ALL):
            start: bytes | None = b""
            found: Counter[int] = Counter()
            while start is not None:
                part, start = removal.count_references(self.txn, start, limit)
                found += part
            assert found == self.found()
            assert list(bodies.problems(self.txn, found)) == []
        for lane in self.lanes:
            lane.check()


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A log; every example aborts its transaction."""
    env = lmdb.open(str(tmp_path_factory.mktemp("log")), map_size=2**28, lib_version=0)
    yield env
    env.close()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few messages, hollowed whenever three quarters of one are settled."""
    monkeypatch.setattr(append, "TAIL_BYTES", 250)
    monkeypatch.setattr(hollowing, "LEAST_GIVEN_BACK", 1)
    monkeypatch.setattr(encoding, "MAX_MESSAGES", 8)


any_history = settings(
    max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
BIG = b"x" * 5_000


@any_history
@given(history=steps, last=st.sampled_from(["settle", "purge", "delete"]))
@example(
    history=[("put", [(BIG, {0, 1, 2})] * 2, 0), ("settle", 0, [(0, 1)]), ("put", [(BIG, {0, 1})], 0)], last="settle"
)
@example(history=[*[("put", [(BIG, {0, 1})] * 8, 0)] * 3, ("settle", 0, [(30, 10)]), ("hollow", 0, 40)], last="settle")
def test_counts_are_the_references_in_blocks_and_nothing_is_left(history, last, env, small):
    """Whatever is put, settled, hollowed and removed, in any order: messages are whole, and bodies go with the last use."""
    with env.begin(write=True) as txn:
        log = Lines(txn)
        log.play(history)
        log.check()
        if last == "delete":
            while removal.delete_lanes(txn, 1, 3, Releases(8))[1]:
                assert list(bodies.problems(txn, removal.count_references(txn, b"", ALL)[0])) == []
            del log.lanes[:2]
            log.check()
            assert removal.delete_lanes(txn, 2)[1] is False
        for lane in log.lanes if last != "delete" else []:
            if last == "settle":
                lane.settle(lane.row.floor, lane.row.next)
            else:
                lane.purge()
            while removal.remove_settled(txn, lane.owner, lane.lane, lane.row, 3, Releases(8))[1]:
                pass
        assert log.found() == {}
        assert log.counted() == {}
        assert not bodies.any_stored(txn)
        txn.abort()


@any_history
@given(history=steps, choice=st.integers(0, 1_000), flipped=st.integers(0, 10_000), vanished=st.booleans())
def test_a_damaged_body_costs_the_messages_that_refer_to_it_and_no_other(
    history, choice, flipped, vanished, env, small
):
    """I4, I10: such a message is named and left out, wherever it is read; all others of its block are served."""
    with env.begin(write=True) as txn:
        log = Lines(txn)
        log.play(history)
        numbers = sorted(log.counted())
        if numbers:
            number = numbers[choice % len(numbers)]
            key = key_of_body(number)
            value = bytearray(txn.get(key))
            value[flipped % len(value)] ^= 4
            txn.delete(key) if vanished else txn.put(key, bytes(value))
            for lane in log.lanes:
                lost = set()
                for first, block in lane.blocks().items():
                    decoded = blocks.decode(block, BlockKey(BLOCKS, lane.owner, lane.lane, first), where="here")
                    for offset, record in zip(decoded.offsets, decoded.records, strict=True):
                        if type(record) is Reference and record.number == number and first + offset in lane.unsettled:
                            lost.add(first + offset)
                expected = {at: record for at, record in lane.expected().items() if at not in lost}
                replayed = read_unsettled(txn, lane.owner, lane.lane, lane.row, lane.row.floor, lane.row.next, ALL)
                assert {at: text for at, text, _ in replayed.problems}.keys() == lost
                assert {found for _, _, found in replayed.problems} <= ({b""} if vanished else {key})
                assert all(f"shared body {number}" in text for _, text, _ in replayed.problems)
                for most in (1, ALL):
                    assert lane.read(most=most)[0] == expected
                for at in lost:
                    with pytest.raises(CorruptionError, match=f"shared body {number}"):
                        find_message(txn, lane.owner, lane.lane, at)
            found = list(bodies.problems(txn, log.found()))
            assert found == ([f"shared body {number} has vanished"] if vanished else [])
        txn.abort()


def test_numbers_of_bodies_are_never_given_twice(env):
    """I13: not after the last body is gone, nor when the record of the last number is damaged or lost."""
    with env.begin(write=True) as txn:
        given_before = set()

        def store() -> int:
            sharing = Sharing(txn, {1: b"a"}, 0)
            (stand_in,) = sharing._references.values()
            sharing.finish()
            assert stand_in.number not in given_before
            given_before.add(stand_in.number)
            return stand_in.number

        first = store()
        txn.delete(key_of_body(first))
        txn.delete(key_of_body(first + 1))
        last = store()
        for value in (b"damaged", None):
            txn.put(key_of_body(0), value) if value else txn.delete(key_of_body(0))
            following = store()
            assert following > last + 2**31
            assert following % 2 == 0
            last = following
        txn.abort()


def test_a_body_under_another_number_is_not_believed(env):
    """I4: bodies that were swapped, or are longer than the reference says, are damaged."""
    with env.begin(write=True) as txn:
        one, two = b"a" * 10, b"b" * 10
        sharing = Sharing(txn, {id(one): one, id(two): two}, 0)
        first, second = sharing.stand_ins([one, two])
        assert (bodies.fetch(txn, first), bodies.fetch(txn, second)) == (one, two)
        kept = txn.get(key_of_body(first.number))
        txn.put(key_of_body(first.number), txn.get(key_of_body(second.number)))
        txn.put(key_of_body(second.number), kept)
        for reference in (first, second):
            with pytest.raises(CorruptionError, match="expected"):
                bodies.fetch(txn, reference)
        txn.put(key_of_body(first.number), kept)
        with pytest.raises(CorruptionError, match="10 bytes, expected 11"):
            bodies.fetch(txn, Reference(first.number, 11))
        txn.abort()


def test_a_block_that_refers_to_much_is_read_in_parts(env):
    """I6: what is read at once is bounded by the bytes it stands for, not by the blocks it lies in."""
    with env.begin(write=True) as txn:
        lane = Lane(txn, 0, 1)
        records = [b"%d" % number * 5_000 for number in range(100)]
        sharing = Sharing(txn, {id(record): record for record in records}, 0)
        lane.put(records, sharing, 0)
        sharing.finish()
        assert len(lane.blocks()) == 1
        position, parts = 0, 0
        while position < 100:
            replayed = read_unsettled(txn, 1, 0, lane.row, position, 100, 30_000)
            ((first, piece),) = replayed.pieces
            assert (first, piece) == (position, records[position : replayed.position])
            assert len(b"".join(piece)) < 50_000
            position, parts = replayed.position, parts + 1
        assert 20 < parts < 50
        txn.abort()


def test_a_damaged_count_keeps_its_body(env):
    """I1: nobody knows who refers to it, so it is not removed, and it is named."""
    with env.begin(write=True) as txn:
        lanes = Lines(txn)
        lanes.put([(BIG, {0, 1})], 0)
        (number,) = lanes.counted()
        txn.put(key_of_body(number + 1), b"damaged")
        assert ["is damaged" in text for text in bodies.problems(txn, lanes.found())] == [True]
        lanes.lanes[0].settle(0, 1)
        removal.remove_settled(txn, 1, 0, lanes.lanes[0].row)
        assert lanes.lanes[1].read() == ({3 << 56: BIG}, [])
        txn.abort()


@pytest.mark.parametrize("count", [0, 1, 3, None])
def test_a_count_that_differs_from_the_references_is_named(count, env):
    """Both ways: too many, too few, none at all; and a body that is referred to and gone."""
    with env.begin(write=True) as txn:
        lanes = Lines(txn)
        lanes.put([(BIG, {0, 1})], 0)
        (number,) = lanes.counted()
        key = key_of_body(number + 1)
        txn.delete(key) if count is None else txn.put(key, bodies._sealed(key, count))
        counted, _ = removal.count_references(txn, b"", ALL)
        found = list(bodies.problems(txn, counted))
        assert f"shared body {number} counts {count or 0} references, the blocks hold 2" in found
        assert (f"the count of shared body {number} has vanished" in found) is (count is None)
        txn.delete(key_of_body(number))
        assert f"shared body {number} has vanished" in list(bodies.problems(txn, counted))
        txn.abort()


def test_blocks_without_references_are_removed_unseen(env):
    """Only what lies below the last reference is looked at; the rest is deleted by its key."""
    with env.begin(write=True) as txn:
        lane = Lane(txn, 0, 1)
        large = [b"%d" % number * 3_000 for number in range(200)]
        lane.append(large)
        sharing = Sharing(txn, {id(large[0]): large[0]}, 0)
        lane.put(large[:1], sharing, 0)
        sharing.finish()
        lane.append(large)
        lane.settle(0, 401)

        class Watched:
            """A transaction that counts the blocks it reads."""

            def __init__(self) -> None:
                self.read: list[int] = []

            def get(self, key: bytes) -> Any:
                if key[0] == BLOCKS:
                    self.read.append(int.from_bytes(key[-8:], "big"))
                return txn.get(key)

            def __getattr__(self, name: str) -> Any:
                return getattr(txn, name)

        firsts = sorted(lane.blocks())
        watched = Watched()
        assert removal.remove_settled(watched, 1, 0, lane.row, limit=ALL)[1] is False
        assert watched.read == [first for first in firsts if first < lane.row.referring]
        assert max(watched.read) <= 200
        assert lane.blocks() == {}
        assert NO_PREVIOUS not in firsts
        txn.abort()
