"""What producers have published, as records: the window against a set, records that are damaged, those that go."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import lmdb
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from qflow.storage.streams import producers
from qflow.storage.streams.producers import PRODUCER_EXPIRY_S, PRODUCERS, WINDOW, Forgotten, Window, with_number

import qflow
from qflow.storage.block_log import seal

NOW_MS = 1_700_000_000_000
WEEK_MS = PRODUCER_EXPIRY_S * 1000
FOREIGN = seal(bytes(144))
"""A value of another table that would be an old record in this one."""

numbers = st.one_of(st.integers(0, 3_000), st.integers(2**63 - 1_100, 2**63 - 1))


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    env = lmdb.open(str(tmp_path_factory.mktemp("log")), map_size=2**28, lib_version=0)
    yield env
    env.close()


@pytest.fixture
def txn(env: Any) -> Iterator[Any]:
    """A transaction that leaves nothing behind, over tables on both sides."""
    with env.begin(write=True) as txn:
        txn.put(bytes((PRODUCERS - 1,)) + b"x" * 200, FOREIGN)
        txn.put(bytes((PRODUCERS + 1,)), FOREIGN)
        yield txn
        txn.abort()


@given(added=st.lists(numbers, min_size=1, max_size=30))
@example(added=[0])
@example(added=[0, WINDOW])
@example(added=[0, WINDOW + 1])
@example(added=[WINDOW, 0])
@example(added=[5, 4, 5, WINDOW + 4, WINDOW + 5])
@example(added=[0, 2**63 - 1])
def test_a_window_says_what_a_set_says(added):
    """The highest number and the 1,024 below it, in whichever order they came; what lies below has no trace."""
    window = None
    for number in added:
        window = with_number(window, number, NOW_MS)
    assert window is not None
    highest = max(added)
    assert window.highest == highest
    asked = {*added, *(number + 1 for number in added), *(number - 1 for number in added), highest - WINDOW - 1}
    for number in asked:
        assert window.is_below(number) is (number < highest - WINDOW)
        if not window.is_below(number):
            assert window.has(number) is (number in added)
    assert window.seen < 2**WINDOW


@given(highest=st.integers(0, 2**63 - 1), seen=st.integers(0, 2**WINDOW - 1), seen_ms=st.integers(0, 2**63))
def test_a_record_says_what_was_written(highest, seen, seen_ms, env):
    """Every window has its bytes, and names do not run into each other."""
    with env.begin(write=True) as txn:
        window = Window(highest, seen, seen_ms)
        producers.write(txn, "ab", Window(1))
        producers.write(txn, "a", window)
        assert producers.read(txn, "a") == window
        assert producers.read(txn, "ab") == Window(1)
        assert producers.read(txn, "b") is None
        txn.abort()


def test_the_bytes_of_a_record_are_as_described(txn):
    """Spools that are on disks can be read by what comes later; the longest name is a key LMDB takes."""
    name = "ü" * 127 + "x"
    producers.write(txn, name, Window(5, 0b101, 7))
    value = txn.get(b"\x0d" + name.encode())
    assert value == seal(struct.pack("<Q", 5) + b"\x05" + bytes(127) + struct.pack("<Q", 7))


@pytest.mark.parametrize("damage", [b"", b"short", seal(b"whole, and too short"), "flip"])
def test_a_damaged_record_is_named_and_stays(damage, txn):
    """Taken for an empty one it would have messages stored twice: it is never overlooked, nor removed."""
    producers.write(txn, "sensor-7", Window(5, 1, 0))
    key = bytes((PRODUCERS,)) + b"sensor-7"
    if damage == "flip":
        value = txn.get(key)
        damage = value[:9] + bytes((value[9] ^ 1,)) + value[10:]
    txn.put(key, damage)
    producers.write(txn, "other", Window(1, 0, NOW_MS))
    with pytest.raises(qflow.CorruptionError, match=r"producer 'sensor-7' .*new producer name"):
        producers.read(txn, "sensor-7")
    (problem,) = producers.problems(txn)
    assert "'sensor-7'" in problem
    assert producers.forget(txn, NOW_MS) == Forgotten(0, b"")
    assert txn.get(key) == damage


def names(txn: Any) -> list[str]:
    """Return the producers that have a record, and see that the tables on both sides are whole."""
    assert txn.get(bytes((PRODUCERS - 1,)) + b"x" * 200) == FOREIGN
    assert txn.get(bytes((PRODUCERS + 1,))) == FOREIGN
    with txn.cursor() as cursor:
        return [key[1:].decode() for key, _ in cursor if key[0] == PRODUCERS]


def test_who_was_silent_for_a_week_is_forgotten_a_bounded_number_a_call(txn):
    """Every record is looked at once a round, whatever went meanwhile; those within the week stay."""
    kept = [f"p{number:03}" for number in range(100) if number % 3 == 0]
    for number in range(100):
        seen_ms = NOW_MS - WEEK_MS + (1 if number % 3 == 0 else -number)
        producers.write(txn, f"p{number:03}", Window(number, 0, seen_ms))
    position, calls, removed = b"", 0, 0
    while calls == 0 or position:
        before = len(names(txn))
        forgotten = producers.forget(txn, NOW_MS, position, 7)
        assert before - len(names(txn)) == forgotten.removed <= 7
        position, calls, removed = forgotten.position, calls + 1, removed + forgotten.removed
    assert names(txn) == kept
    assert (calls, removed) == (15, 66)
    assert producers.forget(txn, NOW_MS) == Forgotten(0, b"")


def test_a_record_is_forgotten_at_a_week_and_not_before(txn):
    """The border is exact, and a clock that was set back forgets nobody."""
    producers.write(txn, "one", Window(1, 0, NOW_MS))
    assert producers.forget(txn, NOW_MS + WEEK_MS - 1).removed == 0
    assert producers.forget(txn, NOW_MS - 10 * WEEK_MS).removed == 0
    assert producers.forget(txn, NOW_MS + WEEK_MS, b"", 1) == Forgotten(1, b"")
    assert producers.forget(txn, NOW_MS + WEEK_MS) == Forgotten(0, b"")
    assert names(txn) == []


def test_any_new_number_puts_off_the_end(txn):
    """Above the others, among them or below the window: the producer lives."""
    for number in (5_000, 4_999, 0, 5_001, 9_000):
        window = with_number(Window(5_000, 0, 0), number, NOW_MS)
        assert window.seen_ms == NOW_MS


def test_nothing_to_forget_in_an_empty_table(env):
    """The first call of a new spool, where no key lies behind the table, ends where it began."""
    with env.begin(write=True) as txn:
        assert producers.forget(txn, NOW_MS) == Forgotten(0, b"")
        producers.write(txn, "last", Window(1, 0, 0))
        assert producers.forget(txn, NOW_MS, b"", 1) == Forgotten(1, b"")
        txn.abort()
