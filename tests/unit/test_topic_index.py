"""The topic index of a stream, against a plain scan of what was published."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lmdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from formats.indexed import OWNER, Indexed
from qflow.errors import CorruptionError
from qflow.message import LANE_SHIFT
from qflow.storage.log.keys import BLOCKS, key_of
from qflow.storage.topics import index as topic_index
from qflow.storage.topics import names as topic_names
from qflow.storage.topics import postings
from qflow.storage.topics import selection as topic_selection
from qflow.storage.topics.records import TABLES, TOPIC_NAMES, TOPICS, any_left, delete_index, piece_key, read_names_row
from qflow.storage.topics.selection import Selection
from qflow.streams.topic_filter import matches
from thorough import examples

LONG = "long" * 130
levels = st.sampled_from(["", "a", "b", "é", "$s", "a.b", LONG, LONG + "x", LONG + "y"])
topics = st.lists(levels, min_size=1, max_size=3).map("/".join).filter(bool)
filters = st.tuples(st.lists(st.one_of(levels, st.just("+")), max_size=3), st.booleans()).map(
    lambda parts: "/".join([*parts[0], *["#"] * parts[1]]) or "+"
)
lanes = st.integers(0, 1)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), lanes, st.lists(topics, min_size=1, max_size=4)),
        st.tuples(st.just("publish"), lanes, st.lists(topics, min_size=1, max_size=4)),
        st.tuples(st.just("index"), st.just(0), st.integers(1, 3)),
        st.tuples(st.sampled_from(["retain", "retain a little"]), lanes, st.integers(0, 30)),
        st.tuples(st.just("look"), lanes, st.integers(0, 30)),
        st.tuples(st.just("rebuild"), st.just(0), st.integers(1, 5)),
    ),
    max_size=30,
)


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A log; every test aborts its transaction."""
    env = lmdb.open(str(tmp_path_factory.mktemp("log")), map_size=2**28, lib_version=0)
    yield env
    env.close()


@pytest.fixture
def stream(env: Any) -> Iterator[Indexed]:
    """A stream in a transaction that is not committed."""
    with env.begin(write=True) as txn:
        yield Indexed(txn)
        txn.abort()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that has a size ends early, so that a few blocks make many of each."""
    monkeypatch.setattr(topic_index, "SEGMENT_BLOCKS", 3)
    monkeypatch.setattr(topic_index, "NEW_TOPICS", 4)
    monkeypatch.setattr(topic_names, "PIECE_BYTES", 24)
    monkeypatch.setattr(topic_selection, "SEGMENTS_AT_ONCE", 2)
    monkeypatch.setattr(postings, "GROUP", 2)
    monkeypatch.setattr(postings, "_FEW", 1)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=steps, wanted=st.lists(filters, min_size=1, max_size=4, unique=True), buffers=st.booleans())
def test_a_selection_names_the_blocks_that_a_scan_finds(history, wanted, buffers, env, small):
    """Whatever was published, indexed, dropped and made anew: exactly the blocks with a match, all where it is broad."""
    with env.begin(write=True, buffers=buffers) as txn:
        stream = Indexed(txn)
        lasting = [Selection(OWNER, one) for one in wanted]
        for kind, lane, detail in [*history, ("index", 0, 1), ("look", 0, 0), ("look", 1, 0)]:
            start = lane << LANE_SHIFT
            if kind == "publish":
                stream.publish(lane, detail)
            elif kind == "index":
                assert stream.index_all(detail) == []
            elif kind.startswith("retain") and lane in stream.lanes:
                stream.retain(lane, min(start + detail, stream.row(lane).next), 1000 if kind == "retain" else 1)
            elif kind == "rebuild":
                while delete_index(txn, OWNER, detail):
                    for one in lasting:
                        assert one.blocks(txn, 0, 0, 5) == ([], 0, [])
                stream.index.check(txn)
            elif kind == "look":
                position = start + detail
                for one, known in zip(wanted, lasting, strict=True):
                    for selection, limit in ((known, 1000), (Selection(OWNER, one), 1000), (Selection(OWNER, one), 1)):
                        found, end, problems = stream.found(selection, lane, position, limit)
                        assert problems == []
                        assert end == max(position, stream.indexed_to(lane))
                        assert found == stream.expected("#" if selection.broad else one, lane, position) or (
                            selection.broad and set(found) >= set(stream.expected(one, lane, position))
                        )
        txn.abort()


@settings(max_examples=examples(300), deadline=None)
@given(topic_filter=filters, names=st.lists(topics, min_size=1, max_size=6))
def test_a_filter_finds_in_names_what_it_matches(topic_filter, names):
    """One expression over many names agrees with the levels, one by one."""
    agreed = [name for name in names if matches(topic_filter, name)]
    piece = topic_names.joined(names)
    assert [name.decode() for name in topic_names.pattern_of(topic_filter).findall(piece)] == agreed


def test_the_last_block_of_a_lane_is_not_indexed(stream):
    """It may grow: what is not closed belongs to the reader."""
    assert stream.index.plan(stream.txn, 0, stream.row(0), 1) is None
    stream.publish(0, ["a"])
    assert stream.index.plan(stream.txn, 0, stream.row(0), 1) is None
    second = stream.publish(0, ["b", "c"])
    stream.index_all()
    assert stream.indexed_to(0) == second
    assert stream.found(Selection(OWNER, "#"), 0, 0) == ([0], second, [])


def test_few_blocks_wait_for_more(stream):
    """Segments are not made smaller than asked for."""
    for _ in range(4):
        stream.publish(0, ["a"])
    assert stream.index.plan(stream.txn, 0, stream.row(0), 4) is None
    segment = stream.index.plan(stream.txn, 0, stream.row(0), 3)
    assert segment is not None
    assert (segment.first, segment.end, segment.blocks, segment.names) == (0, 3, 3, [b"a"])


def test_a_row_of_an_earlier_moment_names_an_earlier_tail(stream):
    """What was the tail then is not taken for closed, nor is what came after it."""
    stream.publish(0, ["a"])
    second = stream.publish(0, ["b"])
    early = stream.row(0)
    stream.publish(0, ["c"])
    segment = stream.index.plan(stream.txn, 0, early, 1)
    assert segment is not None
    assert segment.end == second


def test_a_row_of_a_later_moment_closes_nothing_that_is_still_the_tail(stream):
    """A block that the transaction does not see does not close the one before it."""
    stream.publish(0, ["a"])
    assert stream.index.plan(stream.txn, 0, stream.row(0)._replace(tail=1, next=2), 1) is None


def test_a_commit_that_failed_is_run_again(env):
    """The same segment is written by the second transaction, as it was planned."""
    with env.begin(write=True) as txn:
        stream = Indexed(txn)
        for name in ("a", "b", "c"):
            stream.publish(0, [name])
        segment = stream.index.plan(txn, 0, stream.row(0), 1)
        assert segment is not None
        with env.begin(write=True, parent=txn) as failing:
            assert stream.index.write(failing, segment)
            failing.abort()
        assert not any_left(txn, OWNER)
        assert stream.index.write(txn, segment)
        assert stream.found(Selection(OWNER, "+"), 0, 0) == ([0, 1], 2, [])
        txn.abort()


def test_a_segment_is_not_written_twice(stream):
    """Not even one that lists nothing, which leaves the list of topics as it was."""
    for _ in range(5):
        stream.publish(0, ["a"])
    for tail in (2, 4):
        segment = stream.index.plan(stream.txn, 0, stream.row(0)._replace(tail=tail), 1)
        assert segment is not None
        assert stream.index.write(stream.txn, segment)
    assert segment.names == []
    assert not stream.index.write(stream.txn, segment)


def test_the_block_that_the_floor_lies_in_is_indexed(stream):
    """What is left of it is still read."""
    for _ in range(3):
        stream.publish(0, ["a", "b", "b"])
    stream.retain(0, 4)
    stream.index_all()
    assert stream.found(Selection(OWNER, "b"), 0, 0) == ([3], 6, [])
    assert stream.found(Selection(OWNER, "b"), 0, 5) == ([3], 6, [])


def test_what_is_indexed_is_not_indexed_again(stream):
    """Not where the block is gone that would have been the next, either."""
    for _ in range(3):
        stream.publish(0, ["a"])
    stream.index_all()
    stream.txn.delete(key_of(BLOCKS, OWNER, 0, 2))
    for _ in range(3):
        stream.publish(0, ["a"])
    segment = stream.index.plan(stream.txn, 0, stream.row(0), 1)
    assert segment is not None
    assert (segment.first, segment.end, segment.blocks) == (2, 5, 2)


def test_topics_of_equal_numbers_share_their_blocks(env, monkeypatch):
    """A block too many, never one too few."""
    for module in (topic_index, topic_selection):
        monkeypatch.setattr(module, "topic_number", lambda name: len(name) % 2)
    with env.begin(write=True) as txn:
        stream = Indexed(txn)
        for names in (["a"], ["bb"], ["c", "a"], ["dd", "e"], ["tail"]):
            stream.publish(0, names)
        stream.index_all()
        assert stream.found(Selection(OWNER, "a"), 0, 0) == ([0, 2, 4], 6, [])
        assert stream.found(Selection(OWNER, "bb"), 0, 0) == ([1, 4], 6, [])
        assert stream.found(Selection(OWNER, "+"), 0, 0) == ([0, 1, 2, 4], 6, [])
        txn.abort()


@pytest.mark.parametrize("change", ["the same", "another lane", "a new epoch", "made anew"])
def test_a_segment_whose_index_has_changed_is_planned_again(stream, change):
    """Topics it took for listed may not be: nothing is written."""
    for name in ("a", "b", "c", "d"):
        stream.publish(0, [name])
        stream.publish(1, [name])
    first = stream.index.plan(stream.txn, 1, stream.row(1)._replace(tail=(1 << LANE_SHIFT) + 1), 1)
    assert first is not None
    assert stream.index.write(stream.txn, first)
    segment = stream.index.plan(stream.txn, 0, stream.row(0), 1)
    assert segment is not None
    if change == "the same":
        assert stream.index.write(stream.txn, segment)
    elif change == "another lane":
        other = stream.index.plan(stream.txn, 1, stream.row(1), 1)
        assert other is not None
        assert stream.index.write(stream.txn, other)
    elif change == "a new epoch":
        assert stream.index.forget_below(stream.txn, 1, (1 << LANE_SHIFT) + 1) > 0
    else:
        assert not delete_index(stream.txn, OWNER)
    before = [stream.records(table) for table in TABLES]
    assert not stream.index.write(stream.txn, segment)
    assert [stream.records(table) for table in TABLES] == before


def test_an_index_half_removed_is_not_gone_on_with(stream):
    """After a crash in the middle of `delete_index`, what is left must not be taken for a whole index."""
    for name in ("a", "b", "c"):
        stream.publish(0, [name])
    stream.index_all()
    assert delete_index(stream.txn, OWNER, 2)
    for ask in (stream.index.check, lambda txn: stream.index.plan(txn, 0, stream.row(0), 1)):
        with pytest.raises(CorruptionError, match="remove its index"):
            ask(stream.txn)
    assert stream.indexed_to(0) == 0
    while delete_index(stream.txn, OWNER, 1):
        pass
    assert not any_left(stream.txn, OWNER)
    stream.index.check(stream.txn)
    stream.index_all()
    assert stream.found(Selection(OWNER, "+"), 0, 0) == ([0, 1], 2, [])


def test_the_index_of_another_stream_is_left_alone(env):
    """Neighbours in the keyspace keep theirs, and see nothing of this one."""
    with env.begin(write=True) as txn:
        stream = Indexed(txn)
        stream.publish(0, ["a"])
        stream.publish(0, ["b"])
        stream.index_all()
        before = [stream.records(table) for table in TABLES]
        for neighbour in (OWNER - 1, OWNER + 1):
            assert not any_left(txn, neighbour)
            assert not delete_index(txn, neighbour)
            assert Selection(neighbour, "a").blocks(txn, 0, 0, 10) == ([], 0, [])
        assert [stream.records(table) for table in TABLES] == before
        txn.abort()


def test_a_filter_that_matches_many_topics_is_broad(stream, monkeypatch):
    """It keeps no topics, and every block is a candidate; until what it saw is gone."""
    monkeypatch.setattr(topic_selection, "MOST_TOPICS", 3)
    for number in range(6):
        stream.publish(0, [f"a/{number}"])
        stream.publish(0, ["b"])
    stream.index_all()
    many, few = Selection(OWNER, "a/+"), Selection(OWNER, "a/1")
    assert stream.found(many, 0, 0) == (list(range(11)), 11, [])
    assert (many.broad, len(many._known)) == (True, 0)
    assert stream.found(few, 0, 0) == ([2], 11, [])
    assert not few.broad
    for _ in range(8):
        stream.publish(0, ["b", "a/9"])
        stream.index_all()
        stream.retain(0, stream.row(0).tail - 2)
    found, _, problems = stream.found(many, 0, 0)
    assert problems == []
    assert set(found) >= set(stream.expected("a/+", 0, 0))
    assert (many.broad, len(many._known)) == (False, 1)


def test_topics_that_retention_dropped_are_forgotten(stream, small):
    """The list follows what is kept, however many topics there ever were, and lists again what comes back."""
    most = 0
    for number in range(300):
        stream.publish(0, [f"run/{number}", "always"])
        stream.index_all()
        stream.retain(0, stream.row(0).next - 20, calls=2)
        most = max(most, len(stream.records(TOPICS)))
        pieces = stream.records(TOPIC_NAMES)
        assert len(pieces) < 40
        row = read_names_row(stream.txn, OWNER)
        current = [piece for key, piece in pieces.items() if row is not None and key >= piece_key(OWNER, row.border)]
        assert sum(piece.count(b"\0always\0") for piece in current) <= 1
    assert most < 45
    end = stream.indexed_to(0)
    for topic_filter in ("always", "+", "run/+", "run/295"):
        found, _, problems = stream.found(Selection(OWNER, topic_filter), 0, 0)
        assert (found, problems) == (stream.expected(topic_filter, 0, 0, end), [])


def test_an_idle_lane_keeps_its_topics(stream, small):
    """What one lane still holds is found, however often the others begin an epoch."""
    stream.publish(1, ["kept/here"])
    stream.publish(1, ["tail"])
    for number in range(60):
        stream.publish(0, [f"run/{number}"])
        stream.index_all()
        stream.retain(0, stream.row(0).next - 5)
    start = 1 << LANE_SHIFT
    assert stream.found(Selection(OWNER, "kept/+"), 1, start) == ([start], start + 1, [])


def test_what_wildcards_find_goes_on_from_where_it_was(stream, small, monkeypatch):
    """A look after new topics reads what was appended, not the list."""
    read: list[int] = []
    whole = topic_names.read_piece
    monkeypatch.setattr(topic_names, "read_piece", lambda txn, owner, n: read.append(n) or whole(txn, owner, n))
    selection = Selection(OWNER, "a/+")
    for number in range(30):
        stream.publish(0, [f"a/{number}"])
        stream.index_all()
        del read[:]
        found, end, _ = stream.found(selection, 0, 0)
        assert found == stream.expected("a/+", 0, 0, end)
        assert len(read) <= 2
    assert len(stream.records(TOPIC_NAMES)) > 5
