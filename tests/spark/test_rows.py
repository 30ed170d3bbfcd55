"""Rows on their way into spools, without a Spark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

import qflow
from qflow.errors import InvalidArgument
from qflow.storage.blocks import BlockKey
from qflow.storage.inbox.batches import SINK_BATCHES

pa = pytest.importorskip("pyarrow", reason="PyArrow is not installed: pip install .[spark]")
pytest.importorskip("pyspark", reason="PySpark is not installed: pip install .[spark]")

from qflow.arrow.outgoing import Outgoing  # noqa: E402
from qflow.arrow.states import state_of  # noqa: E402
from qflow.arrow.takers import Takers  # noqa: E402


@pytest.fixture
def outgoing(tmp_path: Path) -> Callable[..., Outgoing]:
    """Checks rows of some columns for a stream that takes all topics."""
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_stream("plants", topics=["#"])
        with broker.engine.log.read() as txn:
            takers = Takers(state_of(txn, broker.path).found, broker.path)
    return lambda *names, topic=None: Outgoing({name: at for at, name in enumerate(names)}, topic, takers)


def test_a_header_whose_name_is_no_text_is_a_sentence(outgoing: Callable[..., Outgoing]) -> None:
    """Spark makes one of bytes by a cast; the name of a topic is looked at, too."""
    names = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")])
    pairs = pa.StructArray.from_arrays([names, pa.array([b"v"])], names=["key", "value"])
    rows = pa.RecordBatch.from_arrays([pa.array([b"v"]), pa.ListArray.from_arrays([0, 1], pairs)], ["value", "headers"])
    with pytest.raises(InvalidArgument, match=r"row 0 .*column 'headers' is a name that is not UTF-8"):
        outgoing("value", "headers", topic="a").add(rows, Mock())


def test_topics_that_are_many_are_not_all_kept(
    outgoing: Callable[..., Outgoing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage may have any number of them, and a door stages for others in the owner's memory."""
    monkeypatch.setattr("qflow.arrow.outgoing._MOST_KEPT", 10)
    one = outgoing("topic", "value")
    writer = Mock(key=BlockKey(SINK_BATCHES, 0, 0, 0))
    for number in range(0, 60, 3):
        topics = [f"plant/{each}" for each in range(number, number + 3)]
        one.add(pa.RecordBatch.from_pydict({"topic": topics, "value": [b"v"] * 3}), writer)
        assert len(one._rooms) <= 10


def test_files_that_are_links_are_known_by_where_they_are_named(tmp_path: Path) -> None:
    """What is loaded is known by the names and bytes of its files, and a link may lead anywhere."""
    from qflow.spark.loading import _identity

    for name in ("real", "links"):
        (tmp_path / name).mkdir()
    (tmp_path / "real" / "a.parquet").write_bytes(b"x")
    (tmp_path / "links" / "a.parquet").symlink_to(tmp_path / "real" / "a.parquet")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    found = {
        _identity(str(tmp_path / name), [tmp_path / name / "a.parquet"], "s", "") for name in ("real", "links", "link")
    }
    assert found == {_identity(f"{tmp_path}/links/../real", [tmp_path / "real" / "a.parquet"], "s", "")}


@pytest.mark.parametrize("key", [None, b"k"])
def test_a_row_without_a_topic_is_left_to_one_of_several_places(key: bytes | None) -> None:
    """Which refuses it: each took it for one of another place, and it was gone."""
    from qflow.spark.sink import shares_of

    rows = pa.RecordBatch.from_pydict(
        {"key": pa.array([None, key], pa.binary()), "value": [b"1", b"2"], "topic": ["a", None]}
    )
    for columns in ({"key": 0, "value": 1, "topic": 2}, {"value": 1, "topic": 2}):
        shares = shares_of(rows, columns, 3)
        assert sorted(body for share in shares for body in share.column("value").to_pylist()) == [b"1", b"2"]
