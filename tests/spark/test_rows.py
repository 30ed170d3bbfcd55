"""Rows on their way into spools, without a Spark."""

from __future__ import annotations

import pytest

pa = pytest.importorskip("pyarrow", reason="PyArrow is not installed: pip install .[spark]")
pytest.importorskip("pyspark", reason="PySpark is not installed: pip install .[spark]")


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
