"""Messages taken apart in columns."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

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
