"""How one client catches up: what was in flight, then retained messages, then what it has missed, as it has room.

What is needed comes from the hub if it is recent, else from the log, read in a thread: a bounded part, as much as there
is room for. Where a subscription has reached what the hub sees next, it is live from then on, in one step of the loop.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Iterable
from functools import cached_property, partial
from itertools import islice
from operator import attrgetter

from qflow.aio.broker import in_thread
from qflow.errors import CorruptionError, QflowError
from qflow.loggers import get_logger
from qflow.mqtt.errors import MqttError, ReasonCode, as_mqtt_error
from qflow.mqtt.model.filters import Search
from qflow.mqtt.model.marks import Passed, comes_behind, is_stored
from qflow.mqtt.model.messages import Message, message_of, unpack
from qflow.mqtt.model.sessions import Flight, Subscribed
from qflow.mqtt.server.hub import Hub
from qflow.mqtt.server.outbound import Outbound
from qflow.mqtt.server.storing import RETAINED
from qflow.named_tuples import NamedTuple
from qflow.streams.stream import Stream
from qflow.streams.topic_filter import FilterTrie

_logger = get_logger("qflow.mqtt")

MOST_READ = 100
MOST_READ_BYTES = 256 * 1024
"""At once from the log."""
MOST_LOOKED = 2_000
"""Messages that are looked at, at once, where a client has many filters; and those of a topic, for one that is
retained."""
FEW_FILTERS = 8
"""So many are read one by one, by the index of topics; more in one pass over all messages."""

Starts = list[tuple[str, int]]
"""Filters, and from which offset on."""


class _Searching:
    """Retained messages that a subscription is still to get."""

    def __init__(self, subscribed: Subscribed, passed: Passed, before: int | None) -> None:
        self.subscribed = subscribed
        self.before = before
        """What is in the stream from there on the subscription gets as such; None: it gets what comes live."""
        self._behind = (subscribed.retained_from or "").encode()
        """The last topic that was sent before."""
        self.passed = passed
        """What passes by the hub after this comes live."""
        self.position = b""
        self.found: deque[Message] = deque()
        self.given: set[str] = set()
        """Topics whose retained message was given meanwhile: what was read of them is old."""
        self.is_through = False

    @cached_property
    def search(self) -> Search:
        """What it matches. Cost: 0.1 ms, so not before its turn comes: a client subscribes to thousands at once."""
        return Search(self.subscribed.filter)

    def wanted(self, topic: str) -> bool | str:
        """As `Search.wanted`; topics that were sent before the client left are passed over."""
        if self._behind and topic.encode() <= self._behind:
            return self._behind.decode() + "\0"
        return self.search.wanted(topic)


class Feeding:
    """See the module. In the loop alone; one task at a time reads."""

    def __init__(self, outbound: Outbound, hub: Hub) -> None:
        self._outbound = outbound
        self._hub = hub
        self._searches: dict[str, _Searching] = {}
        """By the name of the subscription, in the order in which they begin."""
        self._searching: _Searching | None = None
        """The one that has begun."""
        self._trie: FilterTrie[Subscribed] | None = None
        self._is_reading = False
        self._is_ended = False

    def search(self, subscribed: Subscribed, behind: str = "", before: int | None = None) -> None:
        """Send the retained messages that a subscription matches, of topics behind one; `pump` begins with it.

        Again: once more, at most.

        Args:
            before: leave out what is in the stream from there on.
        """
        self.forget(subscribed)
        subscribed.retained_from = behind
        self._searches[subscribed.name] = _Searching(subscribed, self._hub.marks.passed, before)

    def forget(self, subscribed: Subscribed) -> None:
        """Send no retained messages, where that has not begun."""
        self._searches.pop(subscribed.name, None)

    @property
    def _has_searches(self) -> bool:
        return self._searching is not None or bool(self._searches)

    def changed(self) -> None:
        """The client has other subscriptions than before."""
        self._trie = None

    def end(self) -> None:
        """Send nothing any more."""
        self._is_ended = True

    def pump(self) -> None:
        """Go on with what waits for room, if there is any."""
        out = self._outbound
        if self._is_reading or self._is_ended or not (out.behind or out.resends or self._has_searches) or not out.room:
            return
        if not out.resends and not self._has_searches and self._is_up_to_date():
            return
        self._is_reading = True
        self._hub.tasks.spawn(self._read())

    async def _read(self) -> None:
        out = self._outbound
        try:
            while out.room and not self._is_ended:
                if out.resends:
                    await self._resend()
                elif self._has_searches:
                    await self._go_on_searching()
                elif self._is_up_to_date():
                    return
                else:
                    await self._catch_up()
        except QflowError as error:
            out.fail(as_mqtt_error(error))
        except Exception:
            out.fail(MqttError(ReasonCode.UNSPECIFIED, "the server has failed"))
            raise
        finally:
            self._is_reading = False

    # What was in flight ----------------------------------------------------------------------------------------------

    async def _resend(self) -> None:
        out = self._outbound
        flights = [(one, out.state.flights.get(one)) for one in islice(out.resends, min(out.room, MOST_READ))]
        found = await in_thread(self._hub.broker, partial(self._flights, flights))
        for packet_id, message in found:
            if self._is_ended or not out.room:
                return
            out.resends.popleft()
            out.resend(packet_id, message)

    def _flights(self, flights: list[tuple[int, Flight | None]]) -> list[tuple[int, Message | None]]:
        """Read the first of some messages that were in flight, by packet id; in a thread. None: there is none."""
        found: list[tuple[int, Message | None]] = []
        size = 0
        for packet_id, flight in flights:
            message = None if flight is None or flight.released else self._flight(flight)
            found.append((packet_id, message))
            size += 0 if message is None else message.size
            if size >= MOST_READ_BYTES:
                break
        return found

    def _flight(self, flight: Flight) -> Message | None:
        if flight.offset < 0:
            try:
                kept = self._hub.broker.broker.engine.log.fact(RETAINED, flight.topic)
            except CorruptionError as error:
                _warn(str(error))
                return None
            message = None if kept is None else unpack(flight.topic, kept)
            if message is not None and flight.mark not in ("", message.mark) and is_stored(message.mark):
                return None  # another one, which comes by itself
            return message
        read = self._hub.stream.query(start=flight.offset, end=flight.offset + 1)
        return next(map(message_of, read), None)

    # Retained messages -----------------------------------------------------------------------------------------------

    async def _go_on_searching(self) -> None:
        out = self._outbound
        one = self._searching = self._searching or self._searches.pop(next(iter(self._searches)))
        if not one.found and not one.is_through:
            one.given.clear()
            out.given = one.given.add
            if self._hub.retaining is not None:
                await asyncio.wait([self._hub.retaining])
            log = self._hub.broker.broker.engine.log
            most = min(out.room, MOST_READ)
            work = partial(
                log.facts_page,
                RETAINED,
                one.search.prefix,
                one.position,
                most=most,
                wanted=one.wanted,
                report=_warn,
            )
            page = await in_thread(self._hub.broker, work)
            found = [unpack(topic, data) for topic, data in page.facts]
            if one.before is not None and any(is_stored(message.mark) for message in found):
                found = await in_thread(self._hub.broker, partial(self._not_coming, found, one.before))
            one.found.extend(found)
            out.given = partial(_give_up, one)
            for topic in one.given:
                _give_up(one, topic)
            one.position = page.position
            one.is_through = not page.position
        now_ms = self._hub.now_ms()
        while one.found and out.room and not self._is_ended:
            message = one.found.popleft()
            if one.subscribed.name not in self._searches:  # else all of it is to be sent once more
                one.subscribed.retained_from = message.topic
            if out.state.subscriptions.get(one.subscribed.name) is not one.subscribed:
                one.found.clear()
                one.is_through = True
            elif not (message.is_expired(now_ms) or self._hub.marks.is_later(message, one.passed)):
                out.replay(message, [one.subscribed], True)
        if not one.found and one.is_through:
            if one.subscribed.name not in self._searches:
                one.subscribed.retained_from = None
            self._searching = None
            out.given = None

    def _not_coming(self, found: list[Message], start: int) -> list[Message]:
        """Return the retained messages that are not in the stream from an offset on; in a thread."""
        return [message for message in found if not (is_stored(message.mark) and self._comes(message, start))]

    def _comes(self, message: Message, start: int) -> bool:
        """Tell whether a retained message is in the stream from an offset on.

        The first one of its topic and run says so, for they are stored in the order of their marks. What lies behind
        more than `MOST_LOOKED` that are not retained is taken for one that is not there, and comes twice.
        """
        for one in islice(map(message_of, self._hub.stream.query(message.topic, start=start)), MOST_LOOKED):
            if one.mark and (comes := comes_behind(message.mark, one.mark)) is not None:
                return comes
        return False

    # What was missed -------------------------------------------------------------------------------------------------

    def _is_up_to_date(self) -> bool:
        """Send what is among the recent messages; False if the log is to be read, True if there is nothing, or no room.

        What has reached the end is live.
        """
        out, hub = self._outbound, self._hub
        while out.behind:
            ones = self._first()
            low = min([one.cursor or 0 for one in ones])
            if low < hub.next:
                if not out.room:
                    return True
                if not hub.recent.has(low):
                    return False
            self._give(hub.recent.since(low, ones) if low < hub.next else (), ones, hub.next)
        return True

    def _first(self) -> set[Subscribed]:
        """Return the subscriptions that are to be served now: replays come after all others."""
        behind = self._outbound.behind
        return {one for one in behind if not one.is_replaying} or set(behind)

    async def _catch_up(self) -> None:
        """Read a part of the log, and send it."""
        out, hub = self._outbound, self._hub
        ones = {one: one.cursor or 0 for one in self._first()}
        starts = [(one.filter, cursor) for one, cursor in ones.items()]
        work = partial(read, hub.stream, starts, hub.next, min(out.room, MOST_READ))
        found = await in_thread(hub.broker, work)
        if not self._is_ended:
            hub.counts.lost += found.lost
            same = {one for one, cursor in ones.items() if one in out.behind and one.cursor == cursor}
            self._give(found.messages, same, found.position)

    def _give(self, messages: Iterable[Message], ones: set[Subscribed], position: int) -> None:
        """Send messages to subscriptions that are behind, while there is room; they go on at `position`, or before."""
        out, now_ms = self._outbound, self._hub.now_ms()
        for message in messages:
            if not out.room:
                position = message.offset
                break
            matching = [one for one in self._matching(message.topic, ones) if (one.cursor or 0) <= message.offset]
            if matching and not message.is_expired(now_ms):
                out.replay(message, matching)
        for one in ones:
            one.cursor = max(one.cursor or 0, position)
        self._go_live()

    def _go_live(self) -> None:
        """Have subscriptions that have come to the present get messages as they come, unless others are late."""
        out, present = self._outbound, self._hub.next
        late = [one for one in out.behind if (one.cursor or 0) < present]
        if all(one.is_replaying for one in late):
            for one in out.behind.difference(late):
                one.cursor = None
                one.is_replaying = False
            out.behind.intersection_update(late)

    def _matching(self, topic: str, ones: set[Subscribed]) -> list[Subscribed]:
        if len(ones) <= FEW_FILTERS:
            return [one for one in ones if one.matches(topic)]
        if self._trie is None:
            self._trie = FilterTrie()
            for one in self._outbound.state.subscriptions.values():
                self._trie.add(one.filter, one)
        return [one for one in self._trie.match(topic) if one in ones]


def _give_up(searching: _Searching, topic: str) -> None:
    """Do not send what was read of a topic."""
    searching.found = deque(message for message in searching.found if message.topic != topic)


class Read(NamedTuple):
    """A part of the stream."""

    messages: list[Message]
    position: int
    """Where the next part begins."""
    lost: int
    """Messages that retention has taken before."""


def read(stream: Stream, starts: Starts, end: int, most: int) -> Read:
    """Return messages that any of some filters matches, in order, each once; a bounded part. In a thread."""
    low = min(cursor for _, cursor in starts)
    lost = max(0, stream.stats().first_offsets[0] - low)
    wanted: FilterTrie[str] | None = None
    if len(starts) <= FEW_FILTERS:
        lines = [stream.query(one, start=cursor, end=end) for one, cursor in starts if cursor < end]
    else:
        lines = [stream.query(start=low, end=end)]
        wanted = FilterTrie()
        for one, _ in starts:
            wanted.add(one, one)
    found: list[Message] = []
    size, last = 0, -1
    for looked, message in enumerate(heapq.merge(*lines, key=attrgetter("offset"))):
        if message.offset == last:
            continue
        if len(found) >= most or size >= MOST_READ_BYTES or looked >= MOST_LOOKED:
            return Read(found, message.offset, lost)
        last = message.offset
        if wanted is not None and not wanted.match(message.topic):
            continue
        found.append(message_of(message))
        size += found[-1].size
    return Read(found, end, lost)


def _warn(problem: str) -> None:
    _logger.warning("%s: it is left out", problem)
