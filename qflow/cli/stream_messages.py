"""All messages of a stream, as commands read them: also of topics that `#` leaves out, or that it takes no more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qflow.cli import facts
from qflow.cli.messages import moment

if TYPE_CHECKING:
    from qflow import StreamMessage
    from qflow.inspect import Gap


def batches(spool: Path, name: str, problems: list[str]) -> Iterator[list[StreamMessage]]:
    """Yield the messages there are, in batches; each partition in order.

    Args:
        problems: is added a text for each stretch that is damaged, as it is come upon.
    """
    from qflow import inspect

    def note(gap: Gap) -> None:
        if gap.damaged:
            problems.append(f"stream {name!r}, partition {gap.partition}: {gap.reason}")

    with inspect.read_stream(spool, name, None, on_gap=note) as reader:
        yield from reader.new()


def described(message: StreamMessage) -> dict[str, Any]:
    """Return a message of a stream as JSON has it."""
    return {
        "stream": message.stream,
        "partition": message.partition,
        "offset": message.offset,
        "topic": message.topic,
        "published_at": moment(message.time_ms),
        **facts.text_fields("key", message.key),
        "headers": message.headers,
        **facts.text_fields("body", message.body),
    }
