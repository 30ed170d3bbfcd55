"""Messages taken apart in columns."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qflow
from qflow.message import Message, encode_headers

pytest.importorskip("pyarrow", reason="PyArrow is not installed: pip install .[spark]")


def test_parts_are_those_of_the_messages() -> None:
    """Whatever stands before the key, beside messages that are bodies only."""
    from qflow.arrow.record_batches import take_apart

    header_bytes = encode_headers({"a": "ä", "n": 1})
    records: list[Any] = [b"", b"plain"]
    choices = product((0, 5), (0, 7), ("", "a/topic"), (b"", b"k", b"long" * 100), (b"", header_bytes), (b"", b"body"))
    for expires_ms, due_ms, topic, key, headers, body in choices:
        records.append(Message(body, headers, True, expires_ms=expires_ms, due_ms=due_ms, topic=topic, key=key))
        records.append(b"\x1fplain")
    ends = np.cumsum([len(record) for record in records])
    parts = take_apart(b"".join(records), ends, np.array([isinstance(record, Message) for record in records]))
    whole = [record if isinstance(record, Message) else Message(record) for record in records]
    assert parts.bodies.to_pylist() == [record.body for record in whole]
    assert parts.keys.to_pylist() == [record.key or None for record in whole]
    assert parts.headers.to_pylist() == [record.header_bytes for record in whole]


READS = """
import sys
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType
from qflow.spark.source import QflowDataSource
types = {"key": BinaryType(), "value": BinaryType(), "topic": StringType(), "offset": LongType()}
schema = StructType([StructField(name, type_) for name, type_ in types.items()])
reader = QflowDataSource({"subscribe": "plants", "path": sys.argv[1], "filter": "plant/0/+"}).reader(schema)
print(*[batch.num_rows for part in reader.partitions() for batch in reader.read(part)], "pandas" in sys.modules)
"""


def test_a_worker_that_reads_does_not_wait_for_pandas(tmp_path: Path) -> None:
    """Its import takes a process 0.2 s and 30 MiB, and pyarrow does it wherever it makes a column of an array."""
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_stream("plants", topics=["#"])
        broker.publish_many([(f"plant/{number % 2}/heat", b"x") for number in range(10)])
        broker.publish("plant/0/heat", b"keyed", key=b"k")
    done = subprocess.run(
        [sys.executable, "-c", READS, str(tmp_path / "spool")], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["6", "False"], done.stderr
