"""Which opening of a log wrote the messages of a stream: what is noted, kept, forgotten, and found damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lmdb
from qflow.storage.streams import eras

import qflow
from qflow.inspect import check_spool
from qflow.storage.block_log import ERAS
from unit.clocks import Clock, open_still


def records(spool: Path) -> list[int]:
    """Return the sequences from which on there is an era; nobody has the log open."""
    with lmdb.open(str(spool / "log"), map_size=2**30) as env, env.begin() as txn:
        return [int.from_bytes(key[6:], "big") for key, _ in txn.cursor() if key[0] == ERAS]


def known(spool: Path, sequences: range) -> list[int | None]:
    """Return the eras of some messages of the first stream."""
    with lmdb.open(str(spool / "log"), map_size=2**30) as env, env.begin() as txn:
        return [eras.era_of(txn, 1, 0, sequence) for sequence in sequences]


def test_each_opening_that_publishes_has_an_era(open_spool: Callable[..., qflow.Broker], spool: Path) -> None:
    """Of one number for all it publishes; others write nothing, and a stream that is deleted takes its eras along."""
    for number in range(3):
        with open_spool() as broker:
            broker.declare_stream("plants", topics=["plant"])
            for _ in range(2):
                broker.publish_many([("plant", b"%d" % number)] * 5)
        with open_spool() as broker:
            assert broker.stream("plants").owner == 1
    assert records(spool) == [0, 10, 20]
    found = known(spool, range(30))
    assert [found.count(era) for era in dict.fromkeys(found)] == [10, 10, 10]
    with open_still(spool, Clock()) as broker:
        broker.delete_stream("plants")
        while broker._remove_deleted():
            pass
    assert records(spool) == []


def test_eras_of_what_is_gone_are_forgotten(spool: Path) -> None:
    """But the one that the last message of those had: whoever has read as far as retention came asks for it."""
    for _ in range(4):
        with open_still(spool, Clock()) as broker:
            stream = broker.declare_stream("plants", topics=["plant"], retention_messages=5)
            broker.publish_many([("plant", b"")] * 10)
            while stream.retain():
                pass
    assert records(spool) == [20, 30]
    assert None not in known(spool, range(24, 40))


def test_a_damaged_era_is_named(open_spool: Callable[..., qflow.Broker], spool: Path) -> None:
    """By the check of a spool."""
    with open_spool() as broker:
        broker.declare_stream("plants", topics=["plant"])
        broker.publish("plant", b"")
    with lmdb.open(str(spool / "log"), map_size=2**30) as env, env.begin(write=True) as txn:
        ((key, value),) = [(key, value) for key, value in txn.cursor() if key[0] == ERAS]
        txn.put(key, bytes((value[0] ^ 1, *value[1:])))
    assert check_spool(spool) == ["the era of message 0 of stream 1, lane 0 does not match its checksum"]
