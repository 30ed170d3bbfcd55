"""Settling twice is settling once: ranges that come again, whole or in part, and what was settled before, count once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from formats.test_hollow import ALL, OWNER, Log, env, play, records, small  # noqa: F401
from qflow.errors import CorruptionError
from qflow.message import is_logged
from qflow.storage import encoding
from qflow.storage.blocks import BlockKey
from qflow.storage.encoding import Messages
from qflow.storage.log import marks, windows
from qflow.storage.log.append import TAIL_BYTES, append_messages
from qflow.storage.log.keys import BLOCKS
from qflow.storage.log.marks import count_marks, settle_ranges, settled_ranges
from qflow.storage.log.reading import is_empty
from qflow.storage.log.rows import Settled
from thorough import examples

ranges = st.tuples(st.integers(0, 40), st.integers(1, 12))
rounds = st.lists(
    st.tuples(
        st.lists(ranges, max_size=6),  # what is settled
        st.lists(st.tuples(st.integers(0, 200), st.integers(0, 12), st.integers(1, 12)), max_size=4),  # and once more
        st.booleans(),  # whether blocks are hollowed then
    ),
    min_size=1,
    max_size=6,
)


@pytest.fixture(params=[windows.WINDOW, 8], ids=["windows", "small windows"])
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows as they are, and such that ranges are wider, and what is settled lies in many."""
    for module in (windows, marks):
        monkeypatch.setattr(module, "WINDOW", request.param)


def ranges_of(log: Log) -> list[tuple[int, int]]:
    """Return what lies above the floor and is settled."""
    edges = [log.row.floor - 1, *sorted(log.unsettled), log.row.next]
    return [(low + 1, high) for low, high in pairwise(edges) if low + 1 < high and low >= log.row.floor]


def counted(log: Log, first: int, end: int) -> Settled:
    """Return the settling of a range, with the counts of all of it."""
    found = [record for at in range(first, end) if is_logged(record := log.sent[at])]
    return Settled(first, end, len(found), sum(map(len, found)))


@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=st.lists(records, min_size=12, max_size=50), history=rounds, lane=st.sampled_from([0, 25]))
def test_what_is_settled_again_counts_once(batch, history, lane, env, small, window):  # noqa: F811
    """I19: after any history the row counts what the blocks hold and nobody settled, and reads give exactly that."""
    with env.begin(write=True) as txn:
        log = Log(txn, lane)
        play(log, [("append", batch)])
        start, end = log.row.floor, log.row.next
        done: list[tuple[int, int]] = []
        for news, repeated, hollows in history:
            parts: list[Settled] = []
            fresh = set(log.unsettled)
            for at, width in news:
                first, stop = start + at, min(start + at + width, end)
                if first < stop and set(range(first, stop)) <= fresh:  # nobody but who repeats settles anything twice
                    fresh -= set(range(first, stop))
                    parts.append(counted(log, first, stop))
                    done.append((first, stop))
            for which, skip, width in repeated:
                if done:
                    first, stop = done[which % len(done)]
                    first = min(first + skip, stop - 1)
                    parts.append(counted(log, first, min(first + width, stop)))
            log.row = settle_ranges(txn, OWNER, lane, log.row, parts)
            log.unsettled = fresh
            if hollows:
                log.hollow()
            left = log.expected()
            assert (log.row.messages, log.row.bytes) == (len(left), sum(map(len, left.values())))
            assert log.row.marks == count_marks(txn, OWNER, lane, log.row.floor)
            assert list(settled_ranges(txn, OWNER, lane, log.row.floor, ALL)) == ranges_of(log)
            assert is_empty(txn, OWNER, lane, log.row) == (not left)
            log.check()
        txn.abort()


def test_a_range_that_was_joined_with_its_repetition_counts_once(env):  # noqa: F811
    """I19: a repeated ack touches the next one: the two ranges overlap, and neither counts are those of what is new."""
    with env.begin(write=True) as txn:
        log = Log(txn)
        play(log, [("append", [b"a", b"bb", b"ccc", b"dddd"])])
        row = settle_ranges(txn, OWNER, 0, log.row, [Settled(1, 3, 2, 5), Settled(2, 4, 2, 7)])
        assert (row.messages, row.bytes) == (1, 1)
        row = settle_ranges(txn, OWNER, 0, row, [Settled(0, 2, 2, 3)])
        assert (row.floor, row.messages, row.bytes, row.marks) == (4, 0, 0, 0)
        txn.abort()


def test_counts_are_corrected_apart_from_ranges(env):  # noqa: F811
    """A correction has no range, and holds whatever it stands beside."""
    with env.begin(write=True) as txn:
        log = Log(txn)
        play(log, [("append", [b"a", b"bb", b"ccc"])])
        row = settle_ranges(txn, OWNER, 0, log.row, [Settled(0, 2, 2, 3), Settled(1, 1, -4, -40), Settled(1, 2, 1, 2)])
        assert (row.floor, row.messages, row.bytes) == (2, 5, 43)
        txn.abort()


@pytest.mark.parametrize("offsets", [[0, 0], [0, 2, 1], [3, 2]])
def test_a_block_with_two_messages_in_one_place_is_not_written(offsets):
    """I18 in depth: what was recovered wrongly would write over what is there."""
    with pytest.raises(CorruptionError, match="the same place"):
        encoding.encode(BlockKey(BLOCKS, OWNER, 0, 5), [b"x"] * len(offsets), offsets=offsets)


@pytest.mark.parametrize("behind", [0, 1])
def test_a_message_is_not_written_over_another(behind, env: Any):  # noqa: F811
    """I18 in depth: a row that is behind its blocks is refused, in the tail block and where a new one would begin."""
    with env.begin(write=True) as txn:
        log = Log(txn)
        play(log, [("append", [b"a" * TAIL_BYTES if behind == 0 else b"a", b"b"])])
        with pytest.raises(CorruptionError, match=r"message \d of queue 7, lane 0, was not written"):
            append_messages(txn, BlockKey(BLOCKS, OWNER, 0, behind), log.row, Messages([b"c"], [1], True), 1000)
        assert log.read() == ({0: log.sent[0], 1: b"b"}, [])
        txn.abort()
