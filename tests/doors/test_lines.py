"""Lines come out of a descriptor as they went in, however they are torn on the way."""

from __future__ import annotations

import os
from tempfile import TemporaryFile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qflow.cli.lines import Lines
from qflow.cli.stop import Stop
from qflow.config import QueueSettings
from qflow.errors import MessageTooLarge, StorageError
from qflow.message import charge

SETTINGS = QueueSettings()


class Torn(Lines):
    """Lines of a source that gives what it has in pieces."""

    def __init__(self, pieces: list[bytes], delimiter: bytes, settings: QueueSettings = SETTINGS) -> None:
        super().__init__(0, "pieces", delimiter, settings, Stop())
        self._pieces = iter(pieces)

    def _read(self) -> bytes:
        return next(filter(None, self._pieces), b"")


@given(st.lists(st.text("ab\n\r").map(str.encode), max_size=20), st.sampled_from([b"\n", b"\r\n", b"aab"]))
def test_lines_are_those_of_split(pieces: list[bytes], delimiter: bytes) -> None:
    """Any data, in any pieces, gives the lines that splitting the whole gives; an empty last one is none."""
    expected = b"".join(pieces).split(delimiter)
    if not expected[-1]:
        expected.pop()
    assert [line for batch in Torn(pieces, delimiter) for line in batch] == expected


def test_a_long_line_comes_whole() -> None:
    """A line of many reads is one line, and goes alone."""
    line = os.urandom(3_000_000).replace(b"\n", b"")
    with TemporaryFile(buffering=0) as file:
        os.write(file.fileno(), b"a\n" + line + b"\nb")
        file.seek(0)
        assert list(Lines(file.fileno(), "file", b"\n", SETTINGS, Stop())) == [[b"a"], [line], [b"b"]]


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


@pytest.mark.parametrize("size", [1, 50, 5_000])
def test_batches_fit_into_a_quarter_of_the_memory(size: int) -> None:
    """A larger one would be spilled on its way, line by line; a line that is larger is alone."""
    lines = [b"x" * size] * (400_000 // (size + 80))
    with TemporaryFile() as file:
        file.write(b"\n".join(lines))
        file.seek(0)
        batches = list(Lines(file.fileno(), "file", b"\n", SETTINGS, Stop(), 128 * 1024))
    assert [line for batch in batches for line in batch] == lines
    assert all(charge(batch) <= 32 * 1024 for batch in batches)
    assert len(batches) < 30
    with TemporaryFile() as file:
        file.write(b"\n".join([b"y" * 100] * 3))
        file.seek(0)
        assert len(list(Lines(file.fileno(), "file", b"\n", SETTINGS, Stop(), 0))) == 3


def test_batches_fit_below_the_limits_of_the_queue() -> None:
    """No batch could be too deep for the queue it is for."""
    data = b"".join(b"%d\n" % number for number in range(100))
    assert {len(batch) for batch in Torn([data], b"\n", QueueSettings(limit_messages=7))} == {7, 100 % 7}
    assert max(sum(map(len, batch)) for batch in Torn([data], b"\n", QueueSettings(limit_bytes=10))) <= 10


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
