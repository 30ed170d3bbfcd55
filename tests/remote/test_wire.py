"""Frames, columns, errors and results come out as they went in, however they are torn; what is damaged is refused."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from damaging import damaged, torn
from qflow import GapError, InDoubt, QflowError, QueueEmpty, errors
from qflow.remote.wire.columns import lengths_of, total_of
from qflow.remote.wire.errors import KINDS, decode_error, encode_error
from qflow.remote.wire.frames import FrameReader, WireError, encode_frame, preamble, read_preamble
from qflow.remote.wire.results import decode_results, encode_results
from qflow.routing.results import PublishResult, duplicate_result, result_in_partitions
from qflow.storage.environment import CannotGrow

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
ALIKE = st.integers(0, 9).flatmap(lambda size: st.lists(st.binary(min_size=size, max_size=size), max_size=9))
COLUMNS = st.lists(st.lists(st.none() | st.binary(max_size=40), max_size=9) | ALIKE, max_size=4)
FRAMES = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.dictionaries(st.text(), VALUES, max_size=4), COLUMNS), max_size=6
)


@given(FRAMES, st.integers())
def test_frames_come_out_as_they_went_in(sent: list[tuple[int, dict[str, Any], list[Any]]], seed: int) -> None:
    """Torn anywhere; heads as JSON has them."""
    data = b"".join(b"".join(encode_frame(*frame)) for frame in sent)
    reader = FrameReader(2**20)
    came = [frame for piece in torn(data, random.Random(seed), (1, 7, 100, 10**6)) for frame in reader.feed(piece)]
    assert [(number, head, columns) for number, head, columns, _ in came] == sent
    assert sum(frame.size for frame in came) == len(data)
    assert reader.held == reader.missing == 0


@given(FRAMES)
def test_frames_that_come_by_themselves_are_the_same_where_their_heads_are_known(
    sent: list[tuple[int, dict[str, Any], list[Any]]],
) -> None:
    """Most come so: a put, and its answer."""
    reader = FrameReader(2**20)
    for number, head, columns in sent:
        data = b"".join(encode_frame(number, head, columns))
        for _ in range(2):
            assert list(reader.feed(data)) == [(number, head, columns, len(data))]
    assert reader.held == 0


@pytest.mark.parametrize("result", [["jobs"], {"jobs": 1}])
def test_what_an_answer_says_is_its_callers(result: Any) -> None:
    """Whoever changes a list that it was given changes no answer that comes after that."""
    reader, data = FrameReader(2**20), b"".join(encode_frame(1, {"result": result}))
    for _ in range(3):
        (frame,) = reader.feed(data)
        assert frame.head == {"result": result}
        frame.head["result"].clear()


@given(COLUMNS)
def test_lengths_are_known_of_what_came_and_of_what_is_to_be_sent(columns: list[list[bytes | None]]) -> None:
    """Alike or not; None has none."""
    (came,) = FrameReader(2**20).feed(b"".join(encode_frame(1, {}, columns)))
    for column, decoded in zip(columns, came.columns, strict=True):
        if None in column:
            with pytest.raises(TypeError):
                lengths_of(decoded)
            continue
        lengths = [len(item) for item in column if item is not None]
        assert lengths_of(decoded) == lengths_of(column) == lengths
        assert total_of(lengths) == sum(lengths)


@given(FRAMES, st.integers())
def test_frames_are_whole_when_something_else_is_read_into_the_buffer(
    sent: list[tuple[int, dict[str, Any], list[Any]]], seed: int
) -> None:
    """Nothing of what came points into it."""
    data = b"".join(b"".join(encode_frame(*frame)) for frame in sent)
    reader, buffer, came = FrameReader(2**20), memoryview(bytearray(len(data))), []
    for piece in torn(data, random.Random(seed), (1, 7, 100, 10**6)):
        buffer[: len(piece)] = piece
        came += reader.feed(buffer[: len(piece)])
        buffer[:] = b"\xff" * len(buffer)
    assert [(number, head, columns) for number, head, columns, _ in came] == sent


@given(FRAMES.filter(len), st.integers())
def test_damaged_frames_are_refused_in_a_sentence_or_are_frames(sent: list[Any], seed: int) -> None:
    """Nothing else is raised, and nothing is held beyond what came."""
    data = damaged(b"".join(b"".join(encode_frame(*frame)) for frame in sent), 1, random.Random(seed), 0.5)
    reader = FrameReader(2**20)
    with contextlib.suppress(WireError):
        assert all(isinstance(frame.head, dict) for frame in reader.feed(data))
    assert reader.held <= len(data)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff\xff\xff\xff", "says 4294967295"),
        (b"\x03\0\0\0", "says 3"),
        (b"\x0c\0\0\0" + b"\x01\0\0\0" + b"\xff\0\0\0" + b"{}  ", "255 bytes"),
        (b"\x0a\0\0\0" + b"\x01\0\0\0" + b"\x02\0\0\0" + b"[]", "object, not list"),
        (b"\x0a\0\0\0" + b"\x01\0\0\0" + b"\x02\0\0\0" + b"{]", "no JSON"),
        (b"\x0e\0\0\0" + b"\x01\0\0\0" + b"\x02\0\0\0" + b"{}" + b"\xff\xff\xff\xff", "4294967295 items"),
        (b"\x0c\0\0\0" + b"\x01\0\0\0" + b"\x02\0\0\0" + b"{}" + b"\0\0", "left over"),
        (b"\x12\0\0\0" + b"\x01\0\0\0" + b"\x02\0\0\0" + b"{}" + b"\x01\0\0\0\x09\0\0\0", "9 bytes more"),
    ],
)
def test_lies_are_named(data: bytes, said: str) -> None:
    """Lengths that cannot be, heads that are none."""
    with pytest.raises(WireError, match=said):
        list(FrameReader(2**20).feed(data))


def test_a_frame_is_taken_whole_or_not_at_all() -> None:
    """As long as the limit, and one byte longer."""
    frame = b"".join(encode_frame(1, {}, [[bytes(100)]]))
    assert len(list(FrameReader(len(frame) - 4).feed(frame))) == 1
    with pytest.raises(WireError):
        list(FrameReader(len(frame) - 5).feed(frame))


def test_heads_that_are_alike_are_read_once_and_those_that_differ_are_not_mixed_up() -> None:
    """However many there are."""
    reader = FrameReader(2**20)
    heads = [{"op": "put", "n": number % 150} for number in range(1000)]
    came = [frame.head for head in heads for frame in reader.feed(b"".join(encode_frame(1, head)))]
    assert came == heads


def test_preambles() -> None:
    """Any version is read; anything else is refused."""
    assert read_preamble(preamble(7)) == 7
    for data in (b"GET / HT", b"qflow\0\0\0", bytes(8)):
        with pytest.raises(WireError):
            read_preamble(data)


@pytest.mark.parametrize("kind", KINDS.values())
def test_every_error_comes_out_as_it_went_in(kind: type[QflowError]) -> None:
    """Its class, its text and its facts."""
    facts: dict[str, Any] = {"partition": 3, "first": 10, "end": 20, "messages": 4} if kind is GapError else {}
    error = kind("what was wrong, and the remedy", **facts)
    back = decode_error(json.loads(json.dumps(encode_error(error))))
    assert type(back) is kind
    assert (str(back), vars(back)) == (str(error), vars(error))


def test_errors_of_other_versions_are_told_all_the_same() -> None:
    """A class that is not known, facts that are not, none at all."""
    assert str(decode_error({"error": "NewError", "text": "new"})) == "NewError: new"
    assert type(decode_error({"error": "NewError", "text": "new"})) is QflowError
    with_fact = decode_error({"error": "QueueEmpty", "text": "none", "facts": {"new": 1}})
    assert type(with_fact) is QueueEmpty
    assert vars(with_fact) == {"new": 1}
    assert type(decode_error({"error": "GapError", "text": "gap", "facts": {}})) is QflowError
    assert str(decode_error({"error": 5})) == "5: None"
    assert encode_error(ZeroDivisionError("x"))["error"] == "QflowError"
    assert encode_error(CannotGrow("x"))["error"] == "DiskFull"
    assert KINDS["InDoubt"] is InDoubt is errors.InDoubt


RESULTS = st.lists(
    st.builds(
        result_in_partitions,
        st.dictionaries(st.sampled_from("ab"), st.integers(0, 5)),
        st.dictionaries(st.sampled_from("cd"), st.none() | st.integers(0, 5)),
        st.dictionaries(st.sampled_from("ab"), st.integers(0, 2)),
    )
    | st.builds(duplicate_result)
)


def told(result: PublishResult) -> tuple[Any, ...]:
    return tuple(result), dict(result.partitions), result.duplicate


@given(RESULTS)
def test_results_of_publishes_come_out_as_they_went_in(results: list[PublishResult]) -> None:
    """As runs on the way."""
    assert [told(one) for one in decode_results(encode_results(results))] == [told(one) for one in results]


def test_a_thousand_messages_of_one_stream_are_one_run() -> None:
    """Offsets and sequences that rise by one."""
    results = [PublishResult({"log": 7 + place}, {"jobs": 9 + place, "full": None}) for place in range(1000)]
    assert len(encode_results(results)) == 1
