"""Settings, in two halves: *behaviour* (what a user of the queue sees) and *performance* (where its bytes lie).

Declaring a queue again with other performance settings applies them; other behaviour settings are a conflict.
"""

from __future__ import annotations

import enum
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from qflow.durations import EXPECTED, Duration, seconds_of
from qflow.errors import InvalidArgument
from qflow.settings import Settings, setting

Policy = TypeVar("Policy", bound=enum.Enum)

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[_letter + "ib"] = _UNITS[_letter] = 1024**_power
    _UNITS[_letter + "b"] = 1000**_power
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
_URL = re.compile("[A-Za-z][A-Za-z0-9+.-]+:/")
"""How a URL begins, also where `pathlib` has made one slash of two."""

MAX_NAME_BYTES = 1024
MAX_MESSAGE_BYTES = 2**31
MAX_PRIORITIES = 10
MAX_PARTITIONS = 64
AMQP_STREAMS = "amqp-stream/"
"""How topics of streams begin that AMQP declared."""
APART_IN_STREAMS = ("$", AMQP_STREAMS)
"""How topics begin that a stream has by no filter that begins with a wildcard."""
LONGEST_S = 100 * 366 * 86_400.0
"""No time span is longer, so that a moment in milliseconds always fits."""
SPILL_STORES = ("files", "segments")
JOURNALS = ("auto", "off")
MIN_JOURNAL_BYTES, MAX_JOURNAL_BYTES = 8 * 1024, 256 * 1024**2
MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES = 4 * 1024, 256 * 1024**2


class Overflow(enum.Enum):
    """What happens to a put at a queue's limit. Independent of spilling: a queue may do both."""

    BLOCK = "block"
    """Wait for room, as long as `timeout_s` allows, then `QueueFull`."""
    REJECT = "reject"
    """`QueueFull` at once."""
    DROP_OLDEST = "drop_oldest"
    """Make room (a ring): what waits goes, the oldest of the lowest priority first; where nothing waits, what is
    delayed, the soonest due first. What is acquired is skipped."""
    DROP_NEWEST = "drop_newest"
    """The arriving message goes: a put returns None, a batch an empty range."""
    DEAD_LETTER = "dead_letter"
    """The arriving message goes to the dead-letter queue instead; returns as DROP_NEWEST."""


class SlowConsumer(enum.Enum):
    """What happens to a consumer that holds a message for too long, after the event that tells of it."""

    NOTIFY = "notify"
    """Nothing more."""
    RELEASE = "release"
    """What it has held for too long goes back to the queue, as after an ack timeout."""
    CLOSE = "close"
    """So does that, and a `Consumer` that held it takes no more; the callback that is running is not stopped."""


def parse_size(value: int | str, what: str) -> int:
    """Return a size in bytes from an int or a text such as `"64MiB"`, `"1.5 GB"` or `"4096"`."""
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        unit = _UNITS.get(match[2].lower()) if match else None
        size = float(match[1]) * unit if match is not None and unit is not None else math.inf
        if math.isinf(size):
            raise InvalidArgument(
                f'{what} must be a number of bytes such as 65536, "64KiB" or "1.5GB", not {value!r:.100}'
            )
        return int(size)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(f"{what} must be an int or a text with a unit, not {type(value).__name__}")
    if value < 0:
        raise InvalidArgument(f"{what} must not be negative, got {value}")
    return value


def parse_timeout(value: Duration | None) -> float | None:
    """Return a time-out in seconds; None waits without end."""
    if value is None:
        return None
    seconds = seconds_of(value)
    if seconds is None or not seconds >= 0:
        raise InvalidArgument(f"timeout_s must be None, or at least 0: {EXPECTED}; got {value!r}")
    return None if seconds > LONGEST_S else float(seconds)


def parse_span(value: Any, what: str) -> float:
    """Return a time span in seconds: finite, not negative, at most 100 years."""
    seconds = seconds_of(value)
    if seconds is None or not 0 <= seconds <= LONGEST_S:
        raise InvalidArgument(f"{what} must be from 0 to {LONGEST_S:.0f} s: {EXPECTED}; got {value!r}")
    return float(seconds)


def parse_moment(value: Any, what: str) -> float:
    """Return a moment in seconds since the epoch, from such a number or an aware datetime."""
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise InvalidArgument(f"{what} needs a time zone, for example datetime.now(UTC); got {value!r}")
        value = value.timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 100 * LONGEST_S:
        raise InvalidArgument(
            f"{what} must be a datetime with a time zone or seconds since the epoch, not before 1970, got {value!r}"
        )
    return float(value)


def parse_count(value: Any, what: str, *, least: int = 1, most: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgument(f"{what} must be an int of at least {least}, got {value!r}")
    if most is not None and value > most:
        raise InvalidArgument(f"{what} must be at most {most}, got {value!r}")
    return value


def parse_sequences(sequences: Iterable[int]) -> list[int]:
    """Return sequences of messages that were checked, each once."""
    if isinstance(sequences, str | bytes) or not isinstance(sequences, Iterable):
        raise InvalidArgument(f"sequences must be several ints, such as a list of them, got {sequences!r}")
    return list(dict.fromkeys(parse_count(sequence, "sequence", least=0) for sequence in sequences))


def check_name(name: object, what: str = "queue") -> str:
    """Return a valid name of a queue, or of something else: any text that UTF-8 can encode, 1 to 1,024 bytes of it."""
    if not isinstance(name, str):
        raise InvalidArgument(f"a {what} name must be str, not {type(name).__name__}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{what} name {name!r} cannot be encoded as UTF-8: {error.reason}") from error
    if not 0 < size <= MAX_NAME_BYTES:
        raise InvalidArgument(f"a {what} name takes 1 to {MAX_NAME_BYTES} bytes of UTF-8; this one takes {size}")
    return name


def check_names(names: Iterable[str]) -> list[str]:
    """Return valid names of queues."""
    if isinstance(names, str | bytes):
        raise InvalidArgument(f"names of queues must be a list, or another iterable, not {names!r} alone")
    return [check_name(name) for name in names]


def is_url(target: object) -> bool:
    """Tell whether a target is the URL of a broker on another host."""
    return isinstance(target, str) and target.startswith("grpc") and "://" in target


def spool_path(path: str | os.PathLike[str], what: str = "spool") -> str:
    """Return the absolute path of a spool. Raises InvalidArgument: it is none, or a URL, which names no directory."""
    given = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    if not isinstance(given, str) or not given or "\0" in given or not _names_a_file(given):
        if isinstance(given, str) and _is_text(given):
            raise InvalidArgument(
                f"the path of a {what} has characters that the locale of this process ({sys.getfilesystemencoding()}) "
                f"does not: {given!r}; set one with UTF-8, such as LC_ALL=C.UTF-8, or PYTHONUTF8=1"
            )
        raise InvalidArgument(f"the path of a {what} must be a path without NUL and half characters, not {path!r}")
    if _URL.match(given):
        raise InvalidArgument(
            f"a spool is a local directory, not a URL: {given}; a directory of that name is ./{given}"
        )
    try:
        return os.path.abspath(given)
    except FileNotFoundError as error:
        raise InvalidArgument(
            f"the {what} {given!r} is in the current directory, which is no more: give an absolute path"
        ) from error


def _is_text(path: str) -> bool:
    return bool(path) and "\0" not in path and not any("\ud800" <= character <= "\udfff" for character in path)


def _names_a_file(path: str) -> bool:
    """Tell whether the file system may have it: a text may hold half a character, which has no bytes."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


def _flag(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgument(f"{what} must be True or False, got {value!r}")
    return value


def _positive(value: Any, what: str, parse: Callable[[Any, str], Any], words: str) -> Any:
    found = parse(value, what)
    if not found > 0:
        raise InvalidArgument(f"{what} must be more than {words}")
    return found


_timeout = partial(_positive, parse=parse_span, words="0 seconds; None is no time-out")
_KEEPS_NOTHING = "a stream that keeps nothing is none; None keeps all"


def _ratio(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InvalidArgument(f"{what} must be a number from 0 to 1, got {value!r}")
    return float(value)


def _one_of(value: Any, what: str, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        words = " or ".join(f'"{one}"' for one in choices)
        raise InvalidArgument(f"{what} must be {words}, got {value!r}")
    return value


def parse_policy(kind: type[Policy], value: Any, what: str) -> Policy:
    """Return one of several policies, which may be given by its value."""
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(f"{kind.__name__}.{policy.name}" for policy in kind)
        raise InvalidArgument(f"{what} must be one of {choices}, got {value!r}") from None


class QueueSettings(Settings):
    """Settings of a queue, parsed; `options.QueueOptions` says what each is."""

    fixed = frozenset({"durable", "priorities"})
    durable: bool = setting(_flag, default=True)
    limit_messages: int | None = setting(parse_count, default=None)
    limit_bytes: int | None = setting(parse_size, default=None)
    max_message_bytes: int = setting(parse_size, default="64MiB")
    on_overflow: Overflow = setting(partial(parse_policy, Overflow), default=Overflow.BLOCK)
    ttl_s: float | None = setting(parse_span, default=None)
    max_deliveries: int | None = setting(parse_count, default=None)
    dead_letter: str | None = setting(lambda value, _what: check_name(value), default=None)
    ack_timeout_s: float | None = setting(_timeout, default=None)
    dedupe_window_s: float | None = setting(_timeout, default=None)
    priorities: int = setting(partial(parse_count, most=MAX_PRIORITIES), default=1)
    capacity_bytes: int | None = setting(parse_size, default=None, performance=True)
    resume_ratio: float = setting(_ratio, default=0.8, performance=True)

    def check(self) -> None:
        if self.max_message_bytes > MAX_MESSAGE_BYTES:
            raise InvalidArgument(
                f"max_message_bytes must be at most {MAX_MESSAGE_BYTES}, got {self.max_message_bytes}"
            )
        if self.dedupe_window_s is not None and not self.durable:
            raise InvalidArgument("dedupe_window_s is for durable queues: keys are stored with their messages")
        if self.on_overflow is Overflow.DEAD_LETTER and self.dead_letter is None:
            raise InvalidArgument("on_overflow=Overflow.DEAD_LETTER needs dead_letter, the name of a queue")


def _topics(value: Any, what: str) -> tuple[str, ...]:
    try:
        topics = () if isinstance(value, str) else tuple(value)
    except TypeError:
        topics = ()
    if not topics or not all(isinstance(one, str) for one in topics):
        raise InvalidArgument(f"{what} must be a list of topic filters, which are str, at least one, got {value!r}")
    return tuple(dict.fromkeys(topics))


class StreamSettings(Settings):
    """Settings of a stream, parsed; `options.StreamOptions` says what each is."""

    of = " of a stream"
    fixed = frozenset({"partitions"})
    topics: tuple[str, ...] = setting(_topics, default=None)
    partitions: int = setting(partial(parse_count, most=MAX_PARTITIONS), default=1)
    retention_s: float | None = setting(
        partial(_positive, parse=parse_span, words=f"0 seconds: {_KEEPS_NOTHING}"), default=None
    )
    retention_bytes: int | None = setting(
        partial(_positive, parse=parse_size, words=f"0: {_KEEPS_NOTHING}"), default=None
    )
    retention_messages: int | None = setting(parse_count, default=None)
    retain_until_consumed: bool = setting(_flag, default=False)
    max_message_bytes: int = setting(parse_size, default="64MiB")

    def check(self) -> None:
        if self.topics is None:
            raise InvalidArgument("topics of a stream must be a list of topic filters, at least one")
        if not 0 < self.max_message_bytes <= MAX_MESSAGE_BYTES:
            raise InvalidArgument(
                f"max_message_bytes of a stream must be more than 0 and at most {MAX_MESSAGE_BYTES}, got "
                f"{self.max_message_bytes}"
            )

    @property
    def has_limit(self) -> bool:
        """Something but consumption limits what is kept."""
        return any(one is not None for one in (self.retention_s, self.retention_bytes, self.retention_messages))

    def conflicts(self, other: StreamSettings) -> list[tuple[str, Any, Any]]:
        """Return (name, mine, other's) of each setting that differs; topics in another order do not."""
        found = super().conflicts(other)
        return [one for one in found if one[0] != "topics" or set(self.topics) != set(other.topics)]


class BrokerSettings(Settings):
    """Settings of a broker, parsed; `options.BrokerOptions` says what each is."""

    of = " of a broker"
    capacity_bytes: int = setting(parse_size, default="64MiB")
    spill: str = setting(partial(_one_of, choices=SPILL_STORES), default="files")
    segment_bytes: int = setting(parse_size, default="8MiB")
    max_mapped_segments: int = setting(partial(parse_count, least=0), default=0)
    max_transaction_bytes: int = setting(parse_size, default="64MiB")
    unsafe_filesystem: bool = setting(_flag, default=False)
    journal: str = setting(partial(_one_of, choices=JOURNALS), default="auto")
    journal_bytes: int = setting(parse_size, default="4MiB")
    door: bool = setting(_flag, default=True)

    def check(self) -> None:
        if not MIN_JOURNAL_BYTES <= self.journal_bytes <= MAX_JOURNAL_BYTES:
            raise InvalidArgument(f'journal_bytes must be from "8KiB" to "256MiB", got {self.journal_bytes} bytes')
        if not MIN_SEGMENT_BYTES <= self.segment_bytes <= MAX_SEGMENT_BYTES:
            raise InvalidArgument(f'segment_bytes must be from "4KiB" to "256MiB", got {self.segment_bytes} bytes')
