"""What the journal holds, read over a log that nobody owns: the same as the log would say that holds it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
from sortedcontainers import SortedDict

from qflow.storage.log.changes import UNFIT, Changes, play, played
from qflow.storage.log.overlay import _Over

KEYS = [bytes((one, other)) for one in range(6) for other in range(6)]


@pytest.fixture
def env(tmp_path: Path) -> Iterator[lmdb.Environment]:
    with lmdb.open(str(tmp_path), map_size=2**24) as env:
        yield env


def all_ways(txn: Any) -> list[Any]:
    """Read everything, by every call that readers make."""
    found: list[Any] = [txn.get(key) for key in KEYS]
    cursor = txn.cursor()
    found += [list(cursor.iternext()), list(cursor.iternext(values=False))]
    for key in [b"", *KEYS, b"\xff"]:
        there = cursor.set_range(key)
        found.append(there and cursor.item())
        found.append(there and cursor.next() and cursor.key())
        there = cursor.set_range(key)
        found.append(there and cursor.prev() and cursor.item())
        found.append(bool(cursor.set_key(key or b"none")))
        if cursor.set_range(key):
            found.append(list(cursor.iternext(values=False)))
    found.append(cursor.last() and cursor.item())
    found.append(list(cursor.getmulti(KEYS)))
    return found


def change(txn: Any, chance: random.Random) -> None:
    """Change some pairs, in each way that a writer does."""
    for _ in range(chance.randrange(12)):
        key = chance.choice(KEYS)
        match chance.randrange(4):
            case 0:
                txn.put(key, chance.randbytes(5))
            case 1:
                txn.delete(key)
            case 2:
                with txn.cursor() as cursor:
                    if cursor.set_range(key):
                        cursor.delete()
            case 3:
                before = txn.get(key)
                if before is not None:
                    txn.put_grown(key, b"head" + before[1:4] + b"tail", 1, len(before[1:4]), 4)


@pytest.mark.parametrize("seed", range(15))
def test_an_overlay_reads_as_the_log_does_that_holds_it(env: lmdb.Environment, seed: int) -> None:
    """And so does a log into which the changes are played, in one transaction or in several."""
    chance = random.Random(seed)
    with env.begin(write=True) as txn:
        for key in chance.sample(KEYS, 15):
            txn.put(key, chance.randbytes(6))
    records = []
    txn = env.begin(write=True)
    noted = Changes(txn)
    for _ in range(3):
        change(noted, chance)
        records.append(noted.take())
    wanted = all_ways(txn)
    txn.abort()
    with env.begin() as txn:
        changed: SortedDict[bytes, bytes | None] = SortedDict()
        for record in records:
            for key, value in played(_Over(txn, changed).get, record):
                changed[key] = value
        assert all_ways(_Over(txn, changed)) == wanted
    for record in records:
        with env.begin(write=True) as txn:
            assert play(txn, record) == 0
    with env.begin() as txn:
        assert all_ways(txn) == wanted


@pytest.mark.parametrize("value", [b"", b"\0", b"x"], ids=repr)
def test_a_value_of_a_byte_or_none_is_played_as_any(env: lmdb.Environment, value: bytes) -> None:
    txn = env.begin(write=True)
    noted = Changes(txn)
    noted.put(b"key", value)
    changes = noted.take()
    txn.abort()
    assert [found for found in played(lambda key: None, changes) if found[1] is not UNFIT] == [(b"key", value)]
    with env.begin(write=True) as txn:
        assert play(txn, changes) == 0
        assert txn.get(b"key") == value


class _Counted:
    """A cursor that counts its steps, and a transaction that gives it."""

    def __init__(self, txn: Any) -> None:
        self.txn = txn
        self.steps = 0
        self.get, self.id, self.abort = txn.get, txn.id, txn.abort
        self.inner: Any = None

    def cursor(self) -> _Counted:
        self.inner = self.txn.cursor()
        return self

    def __getattr__(self, name: str) -> Any:
        self.steps += name in ("next", "prev")
        return getattr(self.inner, name)


class _LookedAt(SortedDict[bytes, bytes | None]):
    """Counts how often it is asked whether a key is still there."""

    looks = 0

    def __getitem__(self, key: bytes) -> bytes | None:
        self.looks += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("is_put", [True, False], ids=["renewed", "removed"])
def test_a_reader_passes_each_changed_key_once(env: lmdb.Environment, is_put: bool) -> None:
    """Thousands of queues that were given the same have their rows side by side, and all of them in the journal."""
    keys = [number.to_bytes(2, "big") for number in range(600)]
    with env.begin(write=True) as txn:
        for key in keys:
            txn.put(key, b"before")
    changed = _LookedAt(dict.fromkeys(keys[300:], b"after" if is_put else None))
    wanted = keys if is_put else keys[:300]
    with env.begin() as txn:
        counted = _Counted(txn)
        over = _Over(counted, changed).cursor()
        assert list(over.iternext(values=False)) == wanted
        assert counted.steps <= 2 * len(keys)
        assert changed.looks <= 2 * len(keys)
        found, there = [], over.last()
        while there:
            found.append(over.key())
            there = over.prev()
        assert found[::-1] == wanted
        assert counted.steps <= 5 * len(keys)
        assert changed.looks <= 5 * len(keys)
