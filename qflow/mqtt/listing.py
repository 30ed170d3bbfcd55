"""What a log has of MQTT: sessions, groups and retained messages, read by who does not own the spool."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import attrs

from qflow.errors import NotFound
from qflow.mqtt.model.sessions import SessionState, expires_ms, left_ms_of
from qflow.mqtt.server.storing import GROUPS, RECEIVED, RETAINED, SESSIONS, STREAM
from qflow.mqtt.wire.packets import NEVER_EXPIRES_S
from qflow.names import choices

MOST_READS = 16
"""Of the log, for one session or group that is counted: 4,096 blocks of the stream at the most."""


class Partition(Protocol):
    """Of a stream."""

    @property
    def first_offset(self) -> int: ...
    @property
    def next_offset(self) -> int: ...


class Stream(Protocol):
    """A stream, as far as who is behind in it is concerned."""

    @property
    def name(self) -> str: ...
    @property
    def partitions(self) -> Sequence[Partition]: ...


class Rooms(Protocol):
    """A log that is read; see `inspect.spools.Rooms`."""

    problems: list[str]

    @property
    def is_owned(self) -> bool: ...
    @property
    def streams(self) -> Sequence[Stream]: ...
    def facts(self, room: str) -> Iterator[tuple[str, bytes]]: ...
    def count_waiting(self, stream: str, starts: list[tuple[str, int]], end: int, reads: int) -> tuple[int, bool]: ...


@attrs.frozen(kw_only=True)
class SubscriptionFacts:
    """A subscription of a session."""

    name: str
    """As the client gave it."""
    filter: str
    group: str | None
    qos: int
    offset: int | None
    """Where the session goes on in the stream; None: nothing waits for it, since it has QoS 0, or its group's place."""


@attrs.frozen(kw_only=True)
class SessionFacts:
    """A session as the log has it; what happened since its record was written is not in it: a second at the most."""

    client_id: str
    connected: bool
    """Its client is there; where nobody owns the spool, it was there when the server was killed."""
    left_ms: int | None
    """When the client has gone, milliseconds since the epoch."""
    expiry_s: int | None
    """Seconds that the session lasts without its client; None: for ever."""
    expires_ms: int | None
    """When it ends, if its client does not come back; None: never, or the client is there."""
    subscriptions: list[SubscriptionFacts]
    unacknowledged: int
    """Messages with QoS 1 and 2 that were sent and that the client has not acknowledged."""
    unreleased: int
    """Messages with QoS 2 that came from the client, are stored, and that it has not released."""
    behind_messages: int | None
    """Messages that the stream still has from where the session goes on, of all topics: so many, at the most, are to be
    sent. None: not known, since the client is there, or there is no such stream."""
    waiting_messages: int | None
    """Those of them that its filters match, also where they have expired. None: as there, or they were not counted."""
    waiting_is_exact: bool | None
    """False: they are so many at the most, since there are too many to be looked at."""
    lost_messages: int | None
    """Messages that retention took from there on, of all topics."""


@attrs.frozen(kw_only=True)
class GroupFacts:
    """A group of which a member has a session that lasts."""

    group: str
    filter: str
    members: list[str]
    """Client ids of the members whose sessions last."""
    offset: int
    unacknowledged: int
    """Messages that members got, or are to get again, and none has acknowledged."""
    behind_messages: int | None
    """As that of a session; where a server runs, as the record was written last."""
    waiting_messages: int | None
    waiting_is_exact: bool | None
    """Both as those of a session."""


@attrs.frozen(kw_only=True)
class MqttFacts:
    """What a log has of MQTT."""

    stream: str
    next_offset: int | None
    """Of the stream; None: there is none of that name."""
    is_owned: bool
    """A process has the spool open."""
    sessions: list[SessionFacts]
    groups: list[GroupFacts]
    retained_messages: int
    retained_bytes: int
    """Of their topics, payloads and properties."""
    problems: list[str]


class _Place:
    """A stream, and how far others are behind in it."""

    def __init__(self, rooms: Rooms, stream: Stream | None, counts: bool) -> None:
        self._rooms = rooms
        self._name = None if stream is None or not counts else stream.name
        self._counted: dict[frozenset[tuple[str, int]], tuple[int, bool]] = {}
        self._first = self.next = None if stream is None else 0
        if stream is not None:
            self._first, self.next = stream.partitions[0].first_offset, stream.partitions[0].next_offset

    def behind(self, offset: int) -> int | None:
        """Return how many messages there are from an offset on."""
        return None if self._first is None or self.next is None else max(0, self.next - max(self._first, offset))

    def waiting(self, starts: list[tuple[str, int]]) -> tuple[int, bool] | tuple[None, None]:
        """Return how many messages filters match from offsets on, and whether that is exact; None: not counted."""
        if self._name is None or self._first is None or self.next is None:
            return None, None
        retained = frozenset((one, max(self._first, offset)) for one, offset in starts)
        found = self._counted.get(retained)
        if found is None:
            counted = self._rooms.count_waiting(self._name, list(retained), self.next, MOST_READS)
            found = self._counted[retained] = counted[0], counted[1]
        return found

    def lost(self, offset: int) -> int | None:
        """Return how many were taken from there on."""
        return None if self._first is None else max(0, self._first - offset)


def read_mqtt(
    rooms: Rooms,
    stream: str | None = None,
    wanted: Callable[[str], object] = lambda _: True,
    counts: bool = False,
) -> MqttFacts:
    """Return what a log has of MQTT. Cost: 3 µs a retained message, 30 µs a session.

    Args:
        stream: that the server follows; None: `mqtt`, if there is one.
        wanted: tells whether sessions of a client id are asked for, and groups with such a member.
        counts: count what waits for each by its filters; those with the same filters and places are counted once. Cost:
            0.2 µs for each message in a block with a topic that matches, and at most `MOST_READS` reads each.

    Raises:
        NotFound: there is no such stream.
    """
    name = stream or STREAM
    found = next((one for one in rooms.streams if one.name == name), None)
    if found is None and stream is not None:
        names = (one.name for one in rooms.streams)
        raise NotFound(f"there is no stream {name!r} in the log; {choices(name, names)}")
    place = _Place(rooms, found, counts)
    unreleased: dict[str, int] = {}
    for key, _ in rooms.facts(RECEIVED):
        client_id = key.rpartition("\0")[0]
        unreleased[client_id] = unreleased.get(client_id, 0) + 1
    sessions = [
        _session(client_id, record, place, unreleased.get(client_id, 0), rooms.is_owned)
        for client_id, record in rooms.facts(SESSIONS)
        if wanted(client_id)
    ]
    groups = [
        _group(key, fields, place)
        for key, fields in ((key, json.loads(record)) for key, record in rooms.facts(GROUPS))
        if any(map(wanted, fields["members"]))
    ]
    retained = [len(topic.encode()) + len(packed) for topic, packed in rooms.facts(RETAINED)]
    return MqttFacts(
        stream=name,
        next_offset=place.next,
        is_owned=rooms.is_owned,
        sessions=sessions,
        groups=groups,
        retained_messages=len(retained),
        retained_bytes=sum(retained),
        problems=rooms.problems,
    )


def _session(client_id: str, record: bytes, place: _Place, unreleased: int, is_owned: bool) -> SessionFacts:
    state = SessionState.of_record(client_id, record)
    left_ms = left_ms_of(record)
    subscriptions = [
        SubscriptionFacts(
            name=one.name,
            filter=one.filter,
            group=one.group or None,
            qos=one.qos,
            offset=one.cursor if one.qos and not one.group else None,
        )
        for one in state.subscriptions.values()
    ]
    is_known = bool(left_ms) or not is_owned
    starts = [(one.filter, one.offset) for one in subscriptions if one.offset is not None]
    offset = min((start for _, start in starts), default=None)
    waiting, is_exact = place.waiting(starts) if is_known else (None, None)
    return SessionFacts(
        client_id=client_id,
        connected=not left_ms,
        left_ms=left_ms or None,
        expiry_s=None if state.expiry_s == NEVER_EXPIRES_S else state.expiry_s,
        expires_ms=expires_ms(record, left_ms) if left_ms else None,
        subscriptions=subscriptions,
        unacknowledged=len(state.flights),
        unreleased=unreleased,
        behind_messages=None if not is_known else place.behind(offset) if offset is not None else 0,
        waiting_messages=waiting,
        waiting_is_exact=is_exact,
        lost_messages=None if not is_known else place.lost(offset) if offset is not None else 0,
    )


def _group(key: str, fields: dict[str, Any], place: _Place) -> GroupFacts:
    group, _, topic_filter = key.partition("\0")
    waiting, is_exact = place.waiting([(topic_filter, fields["cursor"])])
    return GroupFacts(
        group=group,
        filter=topic_filter,
        members=fields["members"],
        offset=fields["cursor"],
        unacknowledged=len(fields["open"]),
        behind_messages=place.behind(fields["cursor"]),
        waiting_messages=waiting,
        waiting_is_exact=is_exact,
    )
