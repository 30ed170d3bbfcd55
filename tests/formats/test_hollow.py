"""Hollowing alone: random blocks and marks; what is not settled stays byte for byte, what is settled is given back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lmdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qflow.message import Message, Record, is_logged, is_plain
from qflow.storage import blocks, encoding
from qflow.storage.blocks import BlockKey
from qflow.storage.encoding import Messages
from qflow.storage.log import append, hollowing, removal
from qflow.storage.log.append import append_messages
from qflow.storage.log.keys import BLOCKS, MARKS, key_of, scan
from qflow.storage.log.marks import settle_ranges, settled_ranges
from qflow.storage.log.reading import find_message, read_unsettled
from qflow.storage.log.rows import Settled, new_row, write_row
from thorough import examples

OWNER = 7
ALL = 2**62

bodies = st.integers(0, 90).map(lambda size: bytes([size]) * size)
records: st.SearchStrategy[Record] = st.one_of(
    bodies,
    st.builds(Message, bodies, st.just(b'{"a":1}')),
    st.builds(Message, bodies, st.just(b""), st.just(False)),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(records, min_size=1, max_size=12)),
        st.tuples(st.just("settle"), st.lists(st.tuples(st.integers(0, 99), st.integers(1, 60)), max_size=6)),
        st.tuples(st.just("hollow"), st.integers(0, 40)),
        st.tuples(st.just("remove"), st.integers(0, 3)),
    ),
    min_size=3,
    max_size=25,
)


class Log:
    """One lane of a log, and what should be in it."""

    def __init__(self, txn: Any, lane: int = 0, owner: int = OWNER) -> None:
        self.txn = txn
        self.lane = lane
        self.owner = owner
        self.row = new_row(lane)
        self.sent: dict[int, Record] = {}
        self.times: dict[int, int] = {}
        self.unsettled: set[int] = set()  # unlogged ones, too

    def append(self, batch: list[Record]) -> None:
        first = self.row.next
        key = BlockKey(BLOCKS, self.owner, self.lane, first)
        messages = Messages(batch, list(map(len, batch)), is_plain(batch))
        self.row = append_messages(self.txn, key, self.row, messages, now_ms=1000 + first)
        self.row = self.row._replace(next=first + len(batch))
        self.sent.update(enumerate(batch, first))
        self.times.update((sequence, 1000 + first) for sequence in range(first, self.row.next))
        self.unsettled |= set(range(first, self.row.next))

    def settle(self, first: int, end: int) -> None:
        taken = [sequence for sequence in range(first, end) if sequence in self.unsettled]
        ranges = []
        for sequence in taken:
            record = self.sent[sequence]
            logged = is_logged(record)
            ranges.append(Settled(sequence, sequence + 1, logged, len(record) if logged else 0))
        self.row = settle_ranges(self.txn, self.owner, self.lane, self.row, ranges)
        self.unsettled -= set(taken)

    def hollow(self, position: int = 0, limit: int = ALL) -> int:
        """Run a whole pass; return its steps."""
        done = hollowing.hollow_lane(self.txn, self.owner, self.lane, self.row, position, limit)
        return done.steps + (self.hollow(done.position, limit) if done.more else 0)

    def expected(self) -> dict[int, Record]:
        return {sequence: self.sent[sequence] for sequence in sorted(self.unsettled) if is_logged(self.sent[sequence])}

    def read(self, position: int | None = None, most: int = ALL) -> tuple[dict[int, Record], list[str]]:
        found: dict[int, Record] = {}
        problems: list[str] = []
        at: int = self.row.floor if position is None else position
        last: int | None = None
        while at < self.row.next:
            replayed = read_unsettled(self.txn, self.owner, self.lane, self.row, at, self.row.next, most, last)
            for first, piece in replayed.pieces:
                found.update(enumerate(piece, first))
            problems += [text for _, text, _ in replayed.problems]
            assert replayed.position > at
            at, last = replayed.position, replayed.last_block
        return found, problems

    def blocks(self) -> dict[int, bytes]:
        found = scan(self.txn, self.owner, self.lane, 0, blocks.NO_PREVIOUS)
        return {int.from_bytes(key[-8:], "big"): value for key, value in found}

    def check(self) -> None:
        for most in (ALL, 1):
            assert self.read(most=most) == (self.expected(), [])
        for position in range(self.row.floor, self.row.next, 7):
            found, problems = self.read(position)
            assert found == {sequence: record for sequence, record in self.expected().items() if sequence >= position}
            assert problems == []
        for sequence, record in self.expected().items():
            assert find_message(self.txn, self.owner, self.lane, sequence) == (record, self.times[sequence])


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


def play(log: Log, history: list[tuple[str, Any]]) -> None:
    """Take some steps; after each the row is written, as a commit would."""
    for kind, argument in history:
        if kind == "append":
            log.append(argument)
        elif kind == "settle":
            for share, width in argument:
                first = log.row.floor + (log.row.next - log.row.floor) * share // 100
                log.settle(first, min(first + width, log.row.next))
        elif kind == "hollow":
            before = log.row
            log.hollow(argument, limit=1 + argument)
            assert log.row == before
        else:
            removal.remove_settled(log.txn, log.owner, log.lane, log.row, limit=argument)
        write_row(log.txn, log.owner, log.lane, log.row)


any_history = settings(
    max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@any_history
@given(history=steps, lane=st.sampled_from([0, 25]))
def test_what_is_not_settled_is_read_as_before_and_nothing_is_reported(history, lane, env, small):
    """Edge 24: after hollowing at any points of a history, reads give exactly what is not settled, from any position."""
    with env.begin(write=True) as txn:
        log = Log(txn, lane)
        play(log, history)
        log.hollow()
        log.check()
        after = log.blocks()
        log.hollow()
        assert log.blocks() == after, "something was done twice"
        play(log, [("append", [b"x" * 40] * 5), ("settle", [(10, 60), (60, 3)]), ("hollow", 0)])
        log.check()
        log.settle(log.row.floor, log.row.next)
        assert log.row.floor == log.row.next
        removal.remove_settled(txn, OWNER, lane, log.row, limit=ALL)
        assert log.blocks() == {}
        txn.abort()


@any_history
@given(history=steps, choice=st.integers(0, 1_000))
def test_a_block_that_vanished_is_told_from_one_that_was_removed(history, choice, env, small):
    """Edge 28: the loss of any block that holds a message is reported, whatever was removed around it."""
    with env.begin(write=True) as txn:
        log = Log(txn)
        play(log, history)
        log.hollow()
        firsts = sorted(log.blocks())
        holding = [max(first for first in firsts if first <= sequence) for sequence in log.expected()]
        candidates = sorted({first for first in holding if first in log.unsettled})
        if candidates:
            lost = candidates[choice % len(candidates)]
            txn.delete(key_of(BLOCKS, OWNER, 0, lost))
            found, problems = log.read()
            assert problems, f"the loss of block {lost} was not noticed"
            assert found.items() <= log.expected().items()
        txn.abort()


@any_history
@given(history=steps, choice=st.integers(0, 1_000), flipped=st.integers(0, 10_000), early=st.booleans())
def test_a_damaged_block_is_left_as_it_is(history, choice, flipped, early, env, small):
    """I10: a block that cannot be read is not written anew, and it alone is reported."""
    with env.begin(write=True) as txn:
        log = Log(txn)
        play(log, history)
        if early:
            log.hollow()
        firsts = sorted(log.blocks())
        holding = sorted({max(first for first in firsts if first <= sequence) for sequence in log.expected()})
        if holding:
            damaged = holding[choice % len(holding)]
            key = key_of(BLOCKS, OWNER, 0, damaged)
            value = bytearray(txn.get(key))
            value[flipped % len(value)] ^= 4
            txn.put(key, bytes(value))
            log.hollow()
            found, problems = log.read()
            assert found.items() <= log.expected().items()
            assert txn.get(key) == value
            assert problems
            assert all(text.startswith(f"block {damaged}:") for text in problems)
        txn.abort()


@any_history
@given(history=steps, choice=st.integers(0, 1_000))
def test_a_mark_damaged_after_the_pass_brings_no_wrong_bytes(history, choice, env, small):
    """I1, I4: what such a mark settled comes again whole, or not at all; nothing that waits is lost."""
    with env.begin(write=True) as txn:
        log = Log(txn)
        play(log, history)
        log.hollow()
        marks = [first for first, _ in settled_ranges(txn, OWNER, 0, 0, ALL)]
        if marks:
            txn.put(key_of(MARKS, OWNER, 0, marks[choice % len(marks)]), b"damaged")
            for _ in range(2):
                found, _ = log.read()
                assert log.expected().items() <= found.items() <= log.sent.items()
                log.hollow()
        txn.abort()
