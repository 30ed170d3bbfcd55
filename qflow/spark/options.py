"""The options of `format("qflow")` for reading: Kafka's names, and a few more. An error is one sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from qflow.arrow.bounds import COMMITTED, EARLIEST, EARLIEST_OFFSET, LATEST, OFFSETS, TIMES, Bound
from qflow.config import parse_size
from qflow.errors import InvalidArgument
from qflow.spark.places.parse import OF_PLACES, SAME, parse_flag, parse_known, parse_places, where
from qflow.spark.places.place import Place
from qflow.streams.topic_filter import check_filter

_WORDS = (EARLIEST, LATEST, COMMITTED)
NAMES = (
    "subscribe",
    "subscribePattern",
    "assign",
    "queue",
    "filter",
    "group",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "startingOffsetsByTimestamp",
    "endingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "minPartitions",
    "maxRecordsPerPartition",
    "maxOffsetsPerTrigger",
    "maxBytesPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "failOnDataLoss",
    "includeHeaders",
    *OF_PLACES,
)
OF_KAFKA = re.compile(r"kafka\..*|kafkaconsumer\..*|fetchoffset\..*|groupidprefix")
"""Options for Kafka without a meaning here, which are ignored."""
_INSTEAD = {
    "topic": "name streams with subscribe; topics are chosen with filter",
    "topics": "name streams with subscribe; topics are chosen with filter",
    "stream": "name streams with subscribe",
}
_ONLY_STREAMING = ("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")
_ONLY_BATCH = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp", "queue")
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


@attrs.frozen(kw_only=True)
class ReadOptions:
    """The options of a reader; the table in the docs says what they mean."""

    places: tuple[Place, ...]
    streams: tuple[str, ...] | None
    partitions: Mapping[str, frozenset[int]]
    """Partitions to read, by stream; of other streams all."""
    pattern: str | None
    queue: str | None
    filter: str
    group: str | None
    starting: Bound
    ending: Bound
    min_partitions: int | None
    max_records_per_partition: int | None
    max_offsets_per_trigger: int | None
    max_bytes_per_trigger: int | None
    min_offsets_per_trigger: int | None
    max_trigger_delay_s: float
    fail_on_data_loss: bool
    include_headers: bool
    same_on_every_host: bool
    """Each path is the same spool, or a copy of one snapshot, on every host."""

    @property
    def path(self) -> str:
        """The paths and URLs, for errors."""
        return where(self.places)

    def selects(self, name: str, partition: int | None = None) -> bool:
        """Tell whether a stream, or a partition of it, is to be read."""
        if partition is not None and partition not in self.partitions.get(name, (partition,)):
            return False
        if self.streams is not None:
            return name in self.streams
        return self.pattern is not None and re.fullmatch(self.pattern, name) is not None


def parse(options: Mapping[str, str], *, streaming: bool | None = None) -> ReadOptions:
    """Return the options of a reader.

    Args:
        streaming: it reads for a streaming query; None = not known yet.

    Raises:
        InvalidArgument: an option makes no sense, or they do not go together.
    """
    values = parse_known(options, NAMES, OF_KAFKA, "reading", _INSTEAD)
    elsewhere = {None: (), False: _ONLY_STREAMING, True: _ONLY_BATCH}[streaming]
    for wrong in sorted(set(elsewhere) & set(values)):
        kind = "spark.read" if streaming else "spark.readStream"
        raise InvalidArgument(f"option {wrong!r} is for {kind} only: leave it out")
    _check_source(values)
    group = values.get("group")
    if group is not None and not group.strip():
        raise InvalidArgument("option 'group' is empty: give the group a name, or leave it out")
    starting = _bound(values, "starting", EARLIEST if not streaming else LATEST)
    if starting.kind == COMMITTED and group is None:
        raise InvalidArgument("startingOffsets is 'committed': say whose with option 'group'")
    strategy = values.get("startingOffsetsByTimestampStrategy", LATEST).strip().lower()
    if strategy not in ("error", LATEST):
        raise InvalidArgument(f"option 'startingOffsetsByTimestampStrategy' is {strategy!r:.120}: give error or latest")
    starting = attrs.evolve(starting, must_exist=strategy == "error")
    ending = _bound(values, "ending", LATEST)
    if ending.kind in (EARLIEST, COMMITTED):
        raise InvalidArgument(f"endingOffsets cannot be {ending.kind!r}: leave it out for 'latest', or give offsets")
    least, most = _limits(values)
    assigned = _assigned(values["assign"]) if "assign" in values else {}
    return ReadOptions(
        places=parse_places(values),
        streams=_names(values["subscribe"]) if "subscribe" in values else tuple(assigned) or None,
        partitions=assigned,
        pattern=_pattern(values.get("subscribePattern")),
        queue=values.get("queue"),
        filter=_parsed(values, "filter", check_filter, "#"),
        group=group,
        starting=starting,
        ending=ending,
        min_partitions=_count(values, "minPartitions"),
        max_records_per_partition=_count(values, "maxRecordsPerPartition"),
        max_offsets_per_trigger=most,
        max_bytes_per_trigger=_parsed(values, "maxBytesPerTrigger", _size, None),
        min_offsets_per_trigger=least,
        max_trigger_delay_s=_parsed(values, "maxTriggerDelay", _seconds, 15 * 60.0),
        fail_on_data_loss=parse_flag(values, "failOnDataLoss", default=True),
        include_headers=parse_flag(values, "includeHeaders", default=False),
        same_on_every_host=parse_flag(values, SAME, default=False),
    )


def naming(stream: str) -> tuple[str, str]:
    """Return the option that reads exactly this stream, even if its name has commas, at which `subscribe` splits."""
    if _split(stream) == [stream]:
        return "subscribe", stream
    return "subscribePattern", re.escape(stream)


def _check_source(values: Mapping[str, str]) -> None:
    one = [name for name in ("subscribe", "subscribePattern", "assign", "queue") if name in values]
    if len(one) != 1:
        given_ones = f"{' and '.join(one)} are" if one else "none of them is"
        raise InvalidArgument(
            "say what to read with one of the options subscribe (names of streams), subscribePattern (a pattern of "
            f"them), assign (their partitions) and queue (the name of a durable queue); {given_ones} given"
        )
    for name in values if "queue" in values else ():
        if name not in ("queue", "includeHeaders", *OF_PLACES):
            raise InvalidArgument(f"option {name!r} is for streams, and does not go with option 'queue': leave it out")


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(_split(text)))
    if not names:
        raise InvalidArgument("option 'subscribe' is empty: name one or more streams, with commas between")
    return names


def _split(text: str) -> list[str]:
    return list(filter(None, map(str.strip, text.split(","))))


def _assigned(text: str) -> dict[str, frozenset[int]]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"option 'assign' is no JSON ({error}): {text:.120}") from error
    if not (isinstance(found, dict) and found and all(map(_are_partitions, found.values()))):
        raise InvalidArgument(
            f"option 'assign' is {text:.120}: give the numbers of the partitions of each stream that are read, such as "
            '{"stream":[0,1]}'
        )
    return {name: frozenset(numbers) for name, numbers in found.items()}


def _are_partitions(numbers: Any) -> bool:
    return isinstance(numbers, list) and bool(numbers) and all(type(one) is int and one >= 0 for one in numbers)


def _pattern(text: str | None) -> str | None:
    if text is not None:
        try:
            re.compile(text)
        except re.error as error:
            raise InvalidArgument(f"option 'subscribePattern' is {text!r}, no regular expression: {error}") from error
    return text


def _parsed(values: Mapping[str, str], name: str, parse_it: Callable[[str], Any], default: Any) -> Any:
    if name not in values:
        return default
    try:
        return parse_it(values[name])
    except InvalidArgument as error:
        raise InvalidArgument(f"option {name!r}: {error}") from error


def _size(text: str) -> int:
    size = parse_size(text, "a size")
    if size < 1:
        raise InvalidArgument(f"a size is at least 1, not {text!r}")
    return size


def _limits(values: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Return (least, most) messages of a batch."""
    least, most = _count(values, "minOffsetsPerTrigger"), _count(values, "maxOffsetsPerTrigger")
    if least is not None and most is not None and least > most:
        raise InvalidArgument(
            f"minOffsetsPerTrigger is {least} and maxOffsetsPerTrigger {most}: a batch would wait for more than it may "
            "have"
        )
    return least, most


def _seconds(text: str) -> float:
    """Return the seconds of a span as Spark writes it: milliseconds, or a number with a unit."""
    found = re.fullmatch(r"\s*(\d{1,18})\s*(us|ms|s|m|min|h|d)?\s*", text.lower())
    if found is None:
        raise InvalidArgument(f"give a time such as 30s or 15m, not {text!r:.120}")
    return int(found[1]) * _UNITS_S[found[2] or "ms"]


def _count(values: Mapping[str, str], name: str) -> int | None:
    text = values.get(name)
    if text is None:
        return None
    number = _number(text)
    if number is None or number < 1:
        raise InvalidArgument(f"option {name!r} is {text!r:.120}: give a whole number, 1 or more")
    return number


def _number(text: str) -> int | None:
    found = re.fullmatch(r"\s*0*(\d{1,40})\s*", text)  # Python parses no number of 5,000 digits
    return None if found is None else int(found[1])


def _bound(values: Mapping[str, str], which: str, default: str) -> Bound:
    names = [f"{which}Timestamp", f"{which}OffsetsByTimestamp", f"{which}Offsets"]
    given = [name for name in names if name in values]
    if len(given) > 1:
        raise InvalidArgument(f"{given[0]} and {given[1]} say the same in two ways: leave one of them out")
    if not given:
        return Bound(default)
    (name,) = given
    text = values[name].strip()
    if name == names[0]:
        time_ms = _number(text)
        if time_ms is None:
            raise InvalidArgument(f"option {name!r} is {text!r:.120}: give milliseconds since 1970 (UTC)")
        return Bound(TIMES, time_ms=time_ms)
    if name == names[2] and text.lower() in _WORDS:
        return Bound(text.lower())
    if name == names[2] and not text.startswith("{"):
        raise InvalidArgument(
            f"option {name!r} is {text!r}: give earliest, latest, committed, or offsets such as "
            '{"stream":{"0":23,"1":-2}}, where -2 is earliest and -1 latest'
        )
    return Bound(TIMES if name == names[1] else OFFSETS, _numbers(text, name))


def _numbers(text: str, name: str) -> dict[str, dict[int, int]]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits raises one, too
        raise InvalidArgument(f"option {name!r} is no JSON ({error}): {text:.120}") from error
    wrong = InvalidArgument(
        f"option {name!r} is {text:.120}: give a number for each partition of each stream, such as "
        '{"stream":{"0":23}}'
    )
    if not isinstance(found, dict) or not all(isinstance(parts, dict) for parts in found.values()):
        raise wrong
    least = 0 if "Timestamp" in name else EARLIEST_OFFSET
    numbers: dict[str, dict[int, int]] = {}
    for stream, parts in found.items():
        numbers[stream] = {}
        for text_of, value in parts.items():
            number = _number(text_of)
            if number is None or type(value) is not int or value < least:
                raise wrong
            if number in numbers[stream]:
                raise InvalidArgument(
                    f"option {name!r} gives partition {number} of stream {stream!r} twice: {text:.120}"
                )
            numbers[stream][number] = value
    return numbers
