"""Counts of earlier deliveries in the log: ranges that replace each other, against a dictionary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import lmdb
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from qflow.storage.log import marks, removal
from qflow.storage.log.keys import ATTEMPTS, key_of
from qflow.storage.log.marks import raise_all, raise_attempts, read_attempts, write_attempts
from qflow.storage.log.rows import Row
from thorough import examples

OWNER, LANE, MOST = 7, 3, 60

numbers = st.integers(0, 3)
places = st.integers(0, MOST)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("raise"), places, places, numbers),
        st.tuples(st.just("settle"), places, st.integers(0, 3), st.just(0)),
        st.tuples(st.just("close"), places, places, numbers),
    ),
    max_size=25,
)


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A log; every example aborts its transaction."""
    env = lmdb.open(str(tmp_path_factory.mktemp("log")), map_size=2**28, lib_version=0)
    yield env
    env.close()


def joined(known: dict[int, int], first: int, end: int) -> list[tuple[int, int, int]]:
    """Return what a dictionary says of [first, end) as the longest ranges of one number."""
    ranges: list[tuple[int, int, int]] = []
    for sequence in range(first, end):
        number = known.get(sequence, 0)
        if number and ranges and ranges[-1][1:] == (sequence, number):
            ranges[-1] = (ranges[-1][0], sequence + 1, number)
        elif number:
            ranges.append((sequence, sequence + 1, number))
    return ranges


def by_sequence(ranges: list[tuple[int, int, int]], first: int, end: int) -> dict[int, int]:
    """Return the number of each sequence in [first, end) that has one; no two ranges may speak of the same."""
    found: dict[int, int] = {}
    for low, high, number in ranges:
        assert low < high
        for sequence in range(max(low, first), min(high, end)):
            assert sequence not in found
            found[sequence] = number
    return found


@settings(max_examples=examples(500), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=steps)
@example(history=[("raise", 0, 10, 1), ("raise", 3, 5, 2), ("raise", 4, 12, 1)])
@example(history=[("raise", 5, 10, 1), ("raise", 10, 15, 2), ("raise", 3, 10, 2)])
@example(history=[("raise", 0, 3, 1), ("settle", 1, 0, 0), ("raise", 2, 3, 2), ("settle", 0, 0, 0)])
@example(
    history=[("raise", 0, 9, 1), ("raise", 12, 20, 1), ("settle", 5, 0, 0), ("raise", 5, 7, 0), ("settle", 6, 3, 0)]
)
def test_ranges_of_attempts_say_what_a_dictionary_says(history, env):
    """The last number given holds for each sequence, seen through any window, whatever overlapped it before."""
    with env.begin(write=True) as txn:
        for neighbour in (LANE - 1, LANE + 1):
            raise_attempts(txn, OWNER, neighbour, 0, MOST, 9)
        known: dict[int, int] = {}
        floor = 0
        for kind, one, two, number in history:
            if kind == "raise":
                first, end = sorted((max(one, floor), max(two, floor)))
                raise_attempts(txn, OWNER, LANE, first, end, number)
                known.update(dict.fromkeys(range(first, end), number))
            elif kind == "settle":
                floor = max(floor, one)
                removal.remove_settled(txn, OWNER, LANE, Row(next=MOST, floor=floor), limit=two)
            else:
                below, first = max(one, floor), max(min(one, two), floor)
                ranges = [(first, below, number)] if number and first < below else []
                write_attempts(txn, OWNER, LANE, below, ranges)
                for sequence in range(floor, below):
                    known[sequence] = number if sequence >= first else 0
            for first in range(floor, MOST, 7):
                for end in range(first, MOST + 8, 9):
                    found = by_sequence(read_attempts(txn, OWNER, LANE, first, end), first, end)
                    assert found == by_sequence(joined(known, first, end), first, end)
        for neighbour in (LANE - 1, LANE + 1):
            assert read_attempts(txn, OWNER, neighbour, 0, MOST) == [(0, MOST, 9)]
        removal.remove_settled(txn, OWNER, LANE, Row(next=MOST, floor=MOST))
        assert read_attempts(txn, OWNER, LANE, MOST, 2**62) == []
        txn.abort()


def test_ranges_given_one_by_one_become_one(env):
    """A thousand messages that were each returned once are one record, in whichever order."""
    with env.begin(write=True) as txn:
        for sequence in [*range(0, 1_000, 2), *range(999, 0, -2)]:
            raise_attempts(txn, OWNER, LANE, sequence, sequence + 1, 1)
        assert read_attempts(txn, OWNER, LANE, 0, 2_000) == [(0, 1_000, 1)]
        txn.abort()


def test_a_damaged_range_is_forgotten_and_hides_no_other(env):
    """I1: counts that do not match their checksum count nothing; those around them still do, and can be replaced."""
    with env.begin(write=True) as txn:
        for first, number in ((0, 1), (10, 2), (20, 3)):
            raise_attempts(txn, OWNER, LANE, first, first + 10, number)
        txn.put(key_of(ATTEMPTS, OWNER, LANE, 10), b"damaged")
        assert read_attempts(txn, OWNER, LANE, 5, 25) == [(0, 10, 1), (20, 30, 3)]
        raise_attempts(txn, OWNER, LANE, 8, 22, 4)
        assert read_attempts(txn, OWNER, LANE, 0, 30) == [(0, 8, 1), (8, 22, 4), (22, 30, 3)]
        txn.abort()


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    calls=st.lists(
        st.lists(st.tuples(st.integers(0, MOST - 1), st.integers(1, 9), st.integers(0, 2)), max_size=12), max_size=5
    )
)
def test_many_ranges_at_once_say_what_they_say_one_by_one(calls, env):
    """Near others or not, in whatever order, and where they overlap."""
    with env.begin(write=True) as txn, patch.object(marks, "FRESH_AT_ONCE", 3):
        for call in calls:
            ranges = [(first, min(MOST, first + length), number) for first, length, number in call]
            raise_all(txn, OWNER, LANE, ranges)
            for one in ranges:
                raise_attempts(txn, OWNER, LANE + 1, *one)
            assert read_attempts(txn, OWNER, LANE, 0, MOST) == read_attempts(txn, OWNER, LANE + 1, 0, MOST)
        txn.abort()


def test_many_ranges_of_which_nothing_is_known_are_not_looked_for_one_by_one(env, monkeypatch):
    """A commit of a hundred thousand would keep all others waiting for seconds. A damaged one is found, too."""
    looked = []
    monkeypatch.setattr(marks, "raise_attempts", lambda *arguments: looked.append(raise_attempts(*arguments)))
    ranges = [(first, first + 1, 1) for first in range(0, 3 * marks.FRESH_AT_ONCE, 3)]
    with env.begin(write=True) as txn:
        raise_all(txn, OWNER, LANE, ranges)
        assert looked == []
        assert read_attempts(txn, OWNER, LANE, 0, MOST * 100) == ranges
        raise_all(txn, OWNER, LANE, [(2_000_000, 2_000_010, 1), (2_000_020, 2_000_030, 2)])
        txn.put(key_of(ATTEMPTS, OWNER, LANE, 2_000_020), b"damaged")
        raise_all(txn, OWNER, LANE, [(2_000_018, 2_000_028, 4)])
        assert len(looked) == 1
        assert read_attempts(txn, OWNER, LANE, 2_000_025, 2_000_026) == [(2_000_018, 2_000_028, 4)]
        txn.abort()
