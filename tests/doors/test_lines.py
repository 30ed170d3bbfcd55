"""Lines come out of a descriptor as they went in, however they are torn on the way."""

from __future__ import annotations

import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qflow.cli.lines import Lines
from qflow.cli.stop import Stop
from qflow.config import QueueSettings
from qflow.errors import MessageTooLarge, StorageError

SETTINGS = QueueSettings()


def read(chunks: list[bytes], delimiter: bytes, settings: QueueSettings = SETTINGS) -> list[list[bytes]]:
    """Return the batches of what a pipe delivers; each chunk is written when the one before was taken."""
    reading, writing = os.pipe()
    lines = Lines(reading, "pipe", delimiter, settings, Stop())

    def write() -> None:
        for chunk in chunks:
            os.write(writing, chunk)
        os.close(writing)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        return list(lines)
    finally:
        os.close(reading)
        thread.join()


@given(st.lists(st.text("ab\n\r").map(str.encode), max_size=20), st.sampled_from([b"\n", b"\r\n", b"aab"]))
def test_lines_are_those_of_split(chunks: list[bytes], delimiter: bytes) -> None:
    """Any data, in any pieces, gives the lines that splitting the whole gives; an empty last one is none."""
    expected = b"".join(chunks).split(delimiter)
    if not expected[-1]:
        expected.pop()
    assert [line for batch in read(chunks, delimiter) for line in batch] == expected


def test_a_long_line_comes_whole() -> None:
    """A line of many reads is one line."""
    line = os.urandom(3_000_000).replace(b"\n", b"")
    assert read([b"a\n", line, b"\nb"], b"\n")[0][0] == b"a"
    assert [body for batch in read([b"a\n", line, b"\nb"], b"\n") for body in batch] == [b"a", line, b"b"]


def test_lines_before_one_that_is_too_long_are_handed_on() -> None:
    """The error names the line, and all before it are there."""
    reading, writing = os.pipe()
    os.write(writing, b"1\n22\n333\n4444\n5\n")
    os.close(writing)
    lines = iter(Lines(reading, "pipe", b"\n", QueueSettings(max_message_bytes=3), Stop()))
    assert next(lines) == [b"1", b"22", b"333"]
    with pytest.raises(MessageTooLarge, match="pipe: line 4 is longer than 3 bytes"):
        next(lines)
    os.close(reading)


def test_an_endless_line_is_not_kept() -> None:
    """A line is refused as soon as it is too long, not when it ends."""
    with open("/dev/zero", "rb", buffering=0) as zeros:
        lines = Lines(zeros.fileno(), "zeros", b"\n", QueueSettings(max_message_bytes=5_000_000), Stop())
        with pytest.raises(MessageTooLarge, match="line 1 "):
            list(lines)


def test_batches_fit_below_the_limits_of_the_queue() -> None:
    """No batch could be too deep for the queue it is for."""
    data = b"".join(b"%d\n" % number for number in range(100))
    assert {len(batch) for batch in read([data], b"\n", QueueSettings(limit_messages=7))} == {7, 100 % 7}
    assert max(sum(map(len, batch)) for batch in read([data], b"\n", QueueSettings(limit_bytes=10))) <= 10


def test_a_stop_leaves_out_an_unfinished_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A line whose end was not seen is not handed on as if it were whole, and that is said."""
    reading, writing = os.pipe()
    os.write(writing, b"whole\ncut of")
    stop = Stop()
    lines = Lines(reading, "pipe", b"\n", SETTINGS, stop)
    taken = []
    for batch in lines:
        taken += batch
        stop.request()
    lines.warn_of_unfinished()
    assert taken == [b"whole"]
    assert "its first 6 bytes were not stored" in capsys.readouterr().err
    os.close(reading)
    os.close(writing)


def test_a_descriptor_that_cannot_be_read_is_an_error() -> None:
    """What goes wrong names the source."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    with pytest.raises(StorageError, match="cannot read input"):
        list(Lines(descriptor, "input", b"\n", SETTINGS, Stop()))
    os.close(descriptor)
