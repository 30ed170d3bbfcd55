"""The topic index at rest: what is read is what was written, and damage is reported or makes no difference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.indexed import OWNER, Indexed
from qflow.errors import CorruptionError
from qflow.storage import blocks, encoding
from qflow.storage.log.keys import BLOCKS, key_of
from qflow.storage.topics import index as topic_index
from qflow.storage.topics import names as topic_names
from qflow.storage.topics import postings
from qflow.storage.topics.postings import Postings
from qflow.storage.topics.records import INDEX, POSTINGS, TABLES, TOPIC_NAMES, TOPICS, delete_index, lane_key, name_key
from qflow.storage.topics.selection import Selection
from thorough import TORTURE, examples

FILTERS = ("a/1", "a/7", "a/+", "+/2/#", "b", "nothing", "no/+", "#", "long" * 200)

names = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=20)
repeated = st.tuples(names, st.integers(1, 60), names).map(lambda parts: parts[0] * parts[1] + parts[2])
segments = st.dictionaries(
    st.integers(0, 2**32 - 1), st.sets(st.integers(0, 255), min_size=1, max_size=30).map(sorted), max_size=20
)


@pytest.fixture
def env(tmp_path: Any) -> Iterator[Any]:
    """An empty log."""
    env = lmdb.open(str(tmp_path), map_size=2**28, lib_version=0)
    yield env
    env.close()


@pytest.fixture
def stream(env: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Indexed]:
    """A stream with several segments and pieces of names, some blocks above them, and one long name."""
    monkeypatch.setattr(topic_index, "SEGMENT_BLOCKS", 4)
    monkeypatch.setattr(topic_names, "PIECE_BYTES", 24)
    monkeypatch.setattr(postings, "GROUP", 2)
    with env.begin(write=True) as txn:
        stream = Indexed(txn)
        for number in range(12):
            stream.publish(0, [f"a/{number % 8}", f"a/{number % 3}/c", "b" if number == 5 else "x"])
        stream.publish(0, ["long" * 200])
        stream.publish(0, ["tail"])
        assert stream.index_all() == []
        yield stream
        txn.abort()


def damages(value: bytes, step: int = 1) -> Iterator[bytes | None]:
    """Yield a value with each byte changed, or each so many, without its end, empty, and gone."""
    for position in range(0, len(value), step):
        for change in (1, 0x80):
            yield value[:position] + bytes((value[position] ^ change,)) + value[position + 1 :]
    yield value[:-1]
    yield value + b"\0"
    yield b""
    yield None


def replace(txn: Any, key: bytes, value: bytes | None) -> None:
    """Put a value, or delete it."""
    if value is None:
        txn.delete(key)
    else:
        txn.put(key, value)


@settings(max_examples=examples(200), deadline=None)
@given(
    found=segments, unread=st.sets(st.integers(0, 255), max_size=3), view=st.booleans(), position=st.integers(0, 2600)
)
def test_a_segment_says_what_was_put_into_it(found, unread, view, position):
    """For one topic, several, and any; from any position on."""
    firsts = [10 * number for number in range(256)]
    data = postings.encode(OWNER, 3, 0, 2560, firsts, sorted(unread), found)
    segment = Postings(memoryview(data) if view else data, OWNER, 3, 0)
    assert (segment.first, segment.end, list(segment.blocks)) == (0, 2560, firsts)
    topics = sorted(found)
    lowest = min(position // 10, 255)
    for wanted in ([], topics[:1], topics[-1:], topics[::2], topics, [0, *topics, 2**32 - 1]):
        expected = unread.union(*(found.get(number, ()) for number in wanted))
        assert segment.find(wanted, position) == [10 * number for number in sorted(expected) if number >= lowest]
    assert segment.find(None, position) == firsts[lowest:]


def test_a_large_group_of_wanted_topics_is_found():
    """Where many are wanted, each still brings its own blocks."""
    found = {number * 3: [number % 256] for number in range(1000)}
    segment = Postings(postings.encode(OWNER, 0, 0, 256, range(256), [], found), OWNER, 0, 0)
    assert segment.find([number * 3 for number in range(1000)], 0) == list(range(256))
    assert segment.find([number * 3 for number in range(100)], 0) == list(range(100))
    assert segment.find([number * 3 + 1 for number in range(1000)], 0) == []


def test_a_damaged_segment_is_noticed_or_says_what_it_said():
    """Each byte changed: an error, or the same answer."""
    found = {number: [number % 5] for number in range(postings.GROUP + 3)}
    data = postings.encode(OWNER, 0, 0, 50, range(0, 50, 10), [4], found)
    noticed = 0
    for damaged in damages(data):
        for wanted in ([0], [postings.GROUP + 1], [2**31], list(found)):
            try:
                named = Postings(damaged or b"", OWNER, 0, 0).find(wanted, 0)
            except CorruptionError:
                noticed += 1
            else:
                expected = {4}.union(*(found.get(number, ()) for number in wanted))
                assert named == [10 * number for number in sorted(expected)]
    assert noticed > 2 * len(data)


@pytest.mark.parametrize("place", [(OWNER + 1, 0, 0), (OWNER, 1, 0), (OWNER, 0, 1)])
def test_a_segment_of_another_place_is_not_taken(place):
    """Not from under another key."""
    data = postings.encode(OWNER, 0, 0, 50, [0], [], {})
    with pytest.raises(CorruptionError, match="belongs here"):
        Postings(data, *place)


@settings(max_examples=examples(300), deadline=None)
@given(one=repeated, other=repeated)
def test_names_of_any_length_have_keys_of_their_own(one, other):
    """LMDB admits 511 bytes, topics have up to 65,535."""
    for name in (one, one * 50, other):
        assert len(name_key(OWNER, name.encode())) <= 511
    if one != other:
        assert name_key(OWNER, one.encode()) != name_key(OWNER, other.encode())
        assert name_key(OWNER, (one * 50 + "1").encode()) != name_key(OWNER, (one * 50 + "2").encode())


@pytest.mark.parametrize("table", TABLES)
def test_damage_hides_no_message(stream, table):
    """Any byte of any record: no block is missed, and an answer that is not the right one comes with a report."""
    right = {one: stream.found(Selection(OWNER, one), 0, 0) for one in FILTERS}
    end = stream.indexed_to(0)
    assert all(found == stream.expected(one, 0, 0, end) for one, (found, _, _) in right.items())
    reported = 0
    for key, value in stream.records(table).items():
        for damaged in damages(value, 1 if TORTURE else 1 + len(value) // 50):
            replace(stream.txn, key, damaged)
            for one in FILTERS:
                for limit in (1000, 2):
                    found, end, problems = stream.found(Selection(OWNER, one), 0, 0, limit)
                    assert set(found) >= set(stream.expected(one, 0, 0, end))
                    if (found, end) != right[one][:2]:
                        gone = table == INDEX and damaged is None  # nothing is indexed: the reader looks for itself
                        assert problems or (gone and end == 0)
                    reported += bool(problems)
        stream.txn.put(key, value)
    assert reported or table == TOPICS


def test_a_block_beside_a_gap_is_named_once(stream):
    """Where a segment vanished, and with it the block it began with."""
    second = sorted(stream.records(POSTINGS))[1]
    stream.txn.delete(second)
    stream.txn.delete(key_of(BLOCKS, OWNER, 0, int.from_bytes(second[-8:], "big")))
    candidates = Selection(OWNER, "a/+").blocks(stream.txn, 0, 0, 1000)
    assert candidates.blocks == sorted(set(candidates.blocks))
    assert len(candidates.problems) == 1


def test_a_lane_whose_row_vanished_is_indexed_again(stream):
    """Over segments that are still there, cut elsewhere; what lies above is left to the reader until then."""
    end = stream.indexed_to(0)
    stream.txn.delete(lane_key(OWNER, 0))
    stream.index.check(stream.txn)
    assert stream.indexed_to(0) == 0
    for tail, reached in ((2, 6), (7, 18), (13, 30), (13, end)):
        segment = stream.index.plan(stream.txn, 0, stream.row(0)._replace(tail=stream.lanes[0][tail][0]), 1)
        assert segment is not None
        assert stream.index.write(stream.txn, segment)
        assert segment.end == reached
        for one in FILTERS:
            for position in (0, 5, reached - 4):  # there is an old segment that reaches further
                found = stream.found(Selection(OWNER, one), 0, position)
                assert found == (stream.expected(one, 0, position), reached, [])


@pytest.mark.parametrize("table", [INDEX, TOPIC_NAMES, POSTINGS])
def test_a_damaged_index_can_be_made_anew(stream, table):
    """Removing it is the remedy that the error names."""
    for key, value in stream.records(table).items():
        stream.txn.put(key, value[:-1] + bytes((value[-1] ^ 1,)))
    if table == INDEX:
        with pytest.raises(CorruptionError, match="row"):
            stream.index.check(stream.txn)
        with pytest.raises(CorruptionError, match="row"):
            stream.index.plan(stream.txn, 0, stream.row(0), 1)
        assert stream.index.forget_below(stream.txn, 0, stream.row(0).next) == 0
    while delete_index(stream.txn, OWNER, 3):
        pass
    stream.index.check(stream.txn)
    stream.index_all()
    for one in FILTERS:
        found, end, problems = stream.found(Selection(OWNER, one), 0, 0)
        assert (found, problems) == (stream.expected(one, 0, 0, end), [])


def test_a_name_whose_record_is_damaged_is_listed_again(stream):
    """A record that is not its own says nothing; the name is found either way."""
    records = stream.records(TOPICS)
    key, value = next(iter(records.items()))
    for damaged in damages(value):
        replace(stream.txn, key, damaged)
        name = key[5:]
        assert topic_names.unlisted(stream.txn, OWNER, 1, [name]) == [name]
    other = name_key(OWNER, b"never/listed")
    stream.txn.put(other, value)
    stream.publish(0, ["never/listed"])
    stream.publish(0, ["tail"])
    stream.index_all()
    found, end, problems = stream.found(Selection(OWNER, "never/+"), 0, 0)
    assert (found, problems) == (stream.expected("never/+", 0, 0, end), [])
    assert len(found) == 1


def test_names_go_on_behind_a_damaged_piece(stream):
    """It is reported; what is listed afterwards is whole."""
    pieces = stream.records(TOPIC_NAMES)
    last = max(pieces)
    stream.txn.put(last, pieces[last][:-1] + b"?")
    stream.publish(0, ["new/1"])
    stream.publish(0, ["tail"])
    stream.index_all()
    assert stream.records(TOPIC_NAMES)[last] == pieces[last][:-1] + b"?"
    selection = Selection(OWNER, "new/+")
    found, end, problems = stream.found(selection, 0, 0)
    assert set(found) > set(stream.expected("new/+", 0, 0, end))
    assert len(problems) == 1
    assert stream.found(selection, 0, 0)[2] == []  # said once


@pytest.mark.parametrize("how", ["damaged", "gone", "of another place", "without topics"])
def test_a_block_whose_topics_cannot_be_read_may_hold_any(stream, how):
    """It is a candidate of every filter."""
    first = stream.publish(0, ["secret"])
    stream.publish(0, ["tail"])
    key = key_of(BLOCKS, OWNER, 0, first)
    value = stream.txn.get(key)
    if how == "damaged":
        at = value.index(b"secret")
        stream.txn.put(key, value[:at] + b"x" + value[at + 1 :])
    elif how == "gone":
        stream.txn.delete(key)
    elif how == "of another place":
        stream.txn.put(key, stream.txn.get(key_of(BLOCKS, OWNER, 0, 0)))
    else:
        stream.txn.put(key, encoding.encode(blocks.BlockKey(BLOCKS, OWNER, 0, first), [b"body"]))
    problems = stream.index_all()
    assert len(problems) == (how in ("damaged", "of another place"))
    for one in ("secret", "nothing", "no/+", "#"):
        found, end, _ = stream.found(Selection(OWNER, one), 0, first)
        assert end > first
        assert (first in found) == (how != "gone")
