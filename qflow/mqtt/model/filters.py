"""What a client asks for with a SUBSCRIBE, beyond the filter: where to begin, a group, offsets.

    $share/GROUP/FILTER     one of the members of a group gets each message
    $replay/START/FILTER    what is retained in the stream first, from START on, for clients of 3.1.1
    qflow-start: START      the same, as a user property of MQTT 5, for filters that have no START of their own
    qflow-offsets: yes      each message has its offset, as the user property `qflow-offset`

START is what `read_start` reads; a time needs a time zone.
"""

from __future__ import annotations

from datetime import UTC, datetime

from qflow.errors import InvalidArgument
from qflow.mqtt.errors import MqttError, ReasonCode
from qflow.mqtt.wire import split_shared
from qflow.mqtt.wire.packets import Properties
from qflow.mqtt.wire.packets import Subscription as Asked
from qflow.named_tuples import NamedTuple
from qflow.streams.starts import read_start
from qflow.streams.topic_filter import check_filter, compile_filter

Start = int | datetime | None
"""An offset, a time, or None: it says nothing, so it begins with now."""

START, OFFSETS, OFFSET = "qflow-start", "qflow-offsets", "qflow-offset"
_REPLAY = "$replay/"
LATEST = 2**63
"""Behind all offsets."""
EPOCH = datetime.fromtimestamp(0, UTC)
WILDCARDS = ("+", "#")


class Wish(NamedTuple):
    """A filter of a SUBSCRIBE, understood."""

    name: str
    """As the client gives it to an UNSUBSCRIBE: with its group, and with its `$replay/START/`."""
    filter: str
    group: str
    """Empty if it is not shared."""
    start: Start
    asked: Asked
    identifier: int
    """Of the subscription; 0 for none."""
    has_offsets: bool


def wish_of(asked: Asked, properties: Properties, now_s: float) -> Wish:
    """Return what a client asks for. Raises MqttError: TOPIC_FILTER_INVALID; also for a start that is none."""
    group, rest = split_shared(asked.filter)
    users = dict(properties.get("user_properties", ()))
    text = users.get(START)
    if rest == _REPLAY[:-1] or rest.startswith(_REPLAY):
        text, _, rest = rest.removeprefix(_REPLAY).partition("/")
        if not rest or rest.startswith("$"):
            raise MqttError(
                ReasonCode.TOPIC_FILTER_INVALID,
                f"{asked.filter[:200]!r} is not $replay/START/FILTER, or $share/GROUP/$replay/START/FILTER",
            )
    try:
        check_filter(rest)
    except InvalidArgument as error:
        raise MqttError(ReasonCode.TOPIC_FILTER_INVALID, str(error)) from error
    identifier = next(iter(properties.get("subscription_identifiers", ())), 0)
    has_offsets = users.get(OFFSETS) == "yes"
    return Wish(asked.filter, rest, group, start_of(text, now_s), asked, identifier, has_offsets)


def start_of(text: str | None, now_s: float) -> Start:
    """Return where a replay begins; None where nothing is said. Raises MqttError: TOPIC_FILTER_INVALID; it is none."""
    if text is None:
        return None
    try:
        start = read_start(text, datetime.fromtimestamp(now_s, UTC))
    except OverflowError:
        start = EPOCH
    except ValueError:
        start = ""
    if start == "earliest":
        return 0
    if start == "latest":
        return LATEST
    if isinstance(start, int):
        return min(start, LATEST)
    if isinstance(start, str) or start.tzinfo is None:
        raise MqttError(
            ReasonCode.TOPIC_FILTER_INVALID,
            f"{text[:80]!r} is no start: give earliest, latest, an offset, a date or time with a time zone, or an age "
            "such as -1h30m",
        )
    return max(start, EPOCH)


class Search:
    """A filter, as `facts_page` asks it about one topic after the other, in the order of their UTF-8."""

    __slots__ = ("_levels", "_matches", "prefix")

    def __init__(self, topic_filter: str) -> None:
        self._matches = compile_filter(topic_filter)
        self._levels = topic_filter.split("/")
        literal: list[str] = []
        for level in self._levels:
            if level in WILDCARDS:
                break
            literal.append(level)
        self.prefix = "/".join(literal)
        """All topics that match begin so."""
        if len(literal) < len(self._levels) and self._levels[-1:] != ["#"]:
            self.prefix += "/" if literal else ""

    def wanted(self, topic: str) -> bool | str:
        """Tell whether a topic matches; text: no, nor does any other before that one."""
        if self._matches(topic):
            return True
        levels = topic.split("/")
        for index, level in enumerate(levels):
            if index == len(self._levels):
                return _behind_all_below(levels[:index])
            wish = self._levels[index]
            if wish == "#":
                return False  # at the first level, of a topic that begins with $
            if wish in ("+", level):
                continue
            before = "".join(one + "/" for one in levels[:index])
            for place in (before + wish, before + wish + "/"):
                if topic.encode() < place.encode():
                    return place
            return _behind_all_below(levels[:index])
        return False


def _behind_all_below(levels: list[str]) -> str | bool:
    """Return the first text behind all topics below some levels; False where all there are would be below them."""
    return "/".join(levels) + chr(ord("/") + 1) if levels else False
