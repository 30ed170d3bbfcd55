"""Dead letters: what a message says about its end, and where it came from. Pure; the broker carries them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from qflow.config import QueueSettings
from qflow.delivery import Raised, Segment
from qflow.errors import InvalidArgument
from qflow.message import HeaderValue, Message, Record, body_of, decode_headers, encode_headers
from qflow.named_tuples import NamedTuple

PREFIX = "dead_letter_"
QUEUE, REASON, NACK_REASON, EXCEPTION, TIME_S, SEQUENCE, DELIVERIES, COUNT = (
    PREFIX + name
    for name in ("queue", "reason", "nack_reason", "exception", "time_s", "sequence", "deliveries", "count")
)
"""Headers: the queue it was in, why it left, what the last `nack` gave as its reason, if it gave one, the same if that
is what an exception said, when it left, its sequence there (none if it was not admitted), how often it was delivered,
and how often it has become a dead letter."""


REJECTED = "rejected"
LARGE_BYTES = 8 * 2**20
"""Dead letters are copies, for which there is no room yet: so many bytes, about, leave with a commit."""


class Cause(NamedTuple):
    """Why messages become dead letters."""

    reason: str
    """`max_deliveries`, `rejected`, `expired` or `limit`."""
    nack_reason: str | None = None
    """What the `nack` that let them go gave as its reason."""

    def told(self, count: int) -> str:
        """Return what to tell of so many messages."""
        why = self.reason if self.nack_reason is None else f"{self.reason}: {self.nack_reason}"
        return f"{count} message{'s' * (count != 1)}: {why}"


def parted(segments: list[Segment]) -> Iterator[tuple[list[Segment], bool]]:
    """Yield what of messages leaves with one commit, and whether others follow; then nothing is left of the list."""
    if sum([sum(map(len, part.records)) for part in segments]) <= LARGE_BYTES:
        yield segments, False
        return
    segments.reverse()
    some: list[Segment] = []
    left = LARGE_BYTES
    while segments:
        first, records, marks = segments.pop()
        count = 0
        while count < len(records) and left > 0:
            left -= len(records[count])
            count += 1
        some.append(Segment(first, records[:count], marks))
        if count < len(records):
            segments.append(Segment(first + count, records[count:], marks))
        if left <= 0 and segments:
            yield some, True
            some, left = [], LARGE_BYTES
    yield some, False


def dead_letters(queue: str, segments: Iterable[Segment], cause: Cause, now_s: float) -> list[Record]:
    """Return messages as they go to a dead-letter queue: with headers that say from where, why, when and how often.

    They keep their topic and are logged; they neither expire nor wait any more.
    """
    return [
        _dead(queue, record, cause, now_s, first + index if first >= 0 else None, marks >> 1)
        for first, records, marks in segments
        for index, record in enumerate(records)
    ]


def _dead(queue: str, record: Record, cause: Cause, now_s: float, sequence: int | None, deliveries: int) -> Record:
    headers = headers_of(record)
    times = headers.get(COUNT)
    for name in (NACK_REASON, EXCEPTION):  # of an earlier death
        headers.pop(name, None)
    headers |= {
        QUEUE: queue,
        REASON: cause.reason,
        TIME_S: round(now_s, 3),
        SEQUENCE: sequence,
        DELIVERIES: deliveries,
        COUNT: (times if isinstance(times, int) else 0) + 1,
    }
    if cause.nack_reason is not None:
        headers[NACK_REASON] = str(cause.nack_reason)
    if isinstance(cause.nack_reason, Raised):
        headers[EXCEPTION] = str(cause.nack_reason)
    topic = record.topic if isinstance(record, Message) else ""
    return Message(body_of(record), encode_headers(headers), topic=topic)


def revived(record: Record) -> tuple[str | None, Record]:
    """Return (the queue a dead letter came from, the message as it is put there again); None if it was no dead letter.

    The count of its deaths stays with it.
    """
    headers = headers_of(record)
    queue = headers.get(QUEUE)
    if not isinstance(queue, str):
        return None, record
    kept = {name: value for name, value in headers.items() if not name.startswith(PREFIX) or name == COUNT}
    topic = record.topic if isinstance(record, Message) else ""
    return queue, Message(body_of(record), encode_headers(kept), topic=topic)


def headers_of(record: Record) -> dict[str, HeaderValue]:
    return decode_headers(record.header_bytes) if isinstance(record, Message) else {}


def check_no_cycle(queue: str, dead_letter: str | None, target_of: Callable[[str], str | None]) -> None:
    """Refuse a dead-letter queue from which messages would come back.

    Args:
        target_of: given a name, returns the name of that queue's dead-letter queue; None where there is none.
    """
    chain = [queue]
    following = dead_letter
    while following is not None:
        chain.append(following)
        if following == queue:
            raise InvalidArgument(f"dead letters would go round in a cycle: {' -> '.join(map(repr, chain))}")
        if following in chain[:-1]:
            return
        following = target_of(following)


def check_durable(source: str, settings: QueueSettings, target: QueueSettings) -> None:
    """Refuse a durable queue whose dead letters a restart would lose."""
    if settings.durable and not target.durable:
        raise InvalidArgument(
            f"queue {source!r} is durable and its dead-letter queue {settings.dead_letter!r} is not: dead letters "
            "would be lost at a restart; declare both durable, or neither"
        )
