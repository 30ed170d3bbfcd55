"""Shared subscriptions: each message of a group goes to one of its members that has room.

What a member has not acknowledged with QoS 1 when it goes is given to another one, before anything new. With QoS 2 an
exchange that was begun is the member's own: its session goes on with it when the client is back, and nobody else gets
the message: MQTT 5.0, section 4.8.2.

A group with a member whose session lasts has a record in the log, `mqtt.groups`: group, NUL, filter → where it is, what
is given and not acknowledged, and who its lasting members are. It ends with the last of them.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable
from functools import partial
from typing import Any

from qflow.aio.broker import in_thread, keep
from qflow.errors import QflowError
from qflow.mqtt.errors import MqttError, ReasonCode, as_mqtt_error
from qflow.mqtt.model.messages import Message, message_of
from qflow.mqtt.model.sessions import Subscribed
from qflow.mqtt.server.feeding import MOST_READ, read
from qflow.mqtt.server.hub import Hub
from qflow.mqtt.server.keeping import Held
from qflow.mqtt.server.outbound import Outbound
from qflow.mqtt.server.storing import GROUPS, Rooms

MOST_MEMBERS = 500
"""That are connected."""
MOST_LASTING = 1_000
GIVEN_BACK_AT_ONCE = 20
"""Messages that are read by their offsets, one by one."""


class Group:
    """A group some of whose members are connected. In the loop alone; one task at a time reads."""

    is_group = True

    def __init__(self, hub: Hub, group: str, topic_filter: str, cursor: int) -> None:
        self.key = key_of(group, topic_filter)
        self.subscribed = Subscribed("", topic_filter, group)
        self.subscribed.qos = 2
        self.subscribed.owner = self
        self.subscribed.cursor = cursor
        self.members: dict[Outbound, Subscribed] = {}
        """Who are connected; whose turn it is comes first."""
        self.lasting: set[str] = set()
        """Client ids of members whose sessions last."""
        self.returned: list[int] = []
        """Offsets that are to be given to another member; a heap."""
        self._leases: set[int] = set()
        self._hub = hub
        self._is_reading = False
        self.is_ended = False
        """Nobody of it is connected, and the log has what there is of it."""

    # Its record ------------------------------------------------------------------------------------------------------

    def as_fact(self) -> tuple[str, str, bytes]:
        """Return room, key and value of its record."""
        one = self.subscribed
        fields = {
            "cursor": self._hub.next if one.cursor is None else one.cursor,
            "open": sorted([*self.returned, *self._leases]),
            "members": sorted(self.lasting),
        }
        return GROUPS, self.key, json.dumps(fields, ensure_ascii=False).encode()

    def rooms(self) -> Rooms:
        """Return what the log is to have of it: nothing, if nobody is left whose session lasts."""
        room, key, record = self.as_fact()
        return {room: {key: record if self.lasting else None}}

    def take_held(self) -> Held:
        """Nothing waits for its record."""
        return []

    def go_on(self, held: Held) -> None:
        """Nothing has waited."""

    def fail(self, error: MqttError) -> None:
        """Nothing: where its record is not written, what it gave since may be given again."""

    def _changed(self, soon: bool = False) -> None:
        if self.lasting and not self.is_ended:
            (self._hub.keeper.soon if soon else self._hub.keeper.lazily)(self)

    # Messages --------------------------------------------------------------------------------------------------------

    def take(self, message: Message, _: object) -> None:
        """Give a message to the next member that has room; where none has, the group falls behind at its offset."""
        if not self._give(message):
            if message.qos:
                self.subscribed.cursor = message.offset
            else:
                self._hub.counts.dropped += 1

    def _give(self, message: Message) -> bool:
        """Give a message to the next member that has room for it; False if none has. One that has expired is done."""
        if message.is_expired(self._hub.now_ms()):
            return True
        for outbound, one in self.members.items():
            qos = min(message.qos, one.qos)
            if outbound.is_congested or (qos and not outbound.room):
                continue
            del self.members[outbound]
            self.members[outbound] = one
            if qos:
                self._send(outbound, message, one, qos)
            else:
                outbound.replay(message, [one])
            return True
        return False

    def _send(self, outbound: Outbound, message: Message, one: Subscribed, qos: int) -> None:
        self._changed(soon=qos == 2 and outbound.state.is_durable)  # in the commit in which that session has it
        packet_id = outbound.send(message, [one], qos)
        if packet_id and qos == 1:
            outbound.state.flights[packet_id].group = self
            self._leases.add(message.offset)

    def acknowledged(self, offset: int) -> None:
        """A member has a message."""
        self._leases.discard(offset)
        self._changed()

    def give_back(self, offset: int) -> None:
        """A member has gone that had a message."""
        if not self.is_ended:
            self._leases.discard(offset)
            heapq.heappush(self.returned, offset)

    # Catching up -----------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Go on with what waits for room."""
        if self._is_reading or self.is_ended or (self.subscribed.cursor is None and not self.returned):
            return
        if self._has_room() and not self._is_up_to_date():
            self._is_reading = True
            self._hub.tasks.spawn(self._read())

    def _has_room(self) -> bool:
        return any(outbound.room for outbound in self.members)

    def _is_up_to_date(self) -> bool:
        """Give what is among the recent messages; False if the log is to be read."""
        one, hub = self.subscribed, self._hub
        while self.returned:
            if not hub.recent.has(self.returned[0]):
                return False
            messages = hub.recent.since(self.returned[0])
            if not self._give(next(messages)):
                return True
            heapq.heappop(self.returned)
        while one.cursor is not None:
            if one.cursor < hub.next and not hub.recent.has(one.cursor):
                return False
            unread = hub.recent.since(one.cursor, [one]) if one.cursor < hub.next else ()
            if not self._give_all(unread, hub.next):
                return True
        return True

    def _give_all(self, messages: Iterable[Message], position: int) -> bool:
        """Give messages that lead to a position; False if there was no room for one."""
        one = self.subscribed
        for message in messages:
            if one.matches(message.topic) and not self._give(message):
                one.cursor = message.offset
                return False
        one.cursor = None if position >= self._hub.next else position
        self._changed()
        return True

    async def _read(self) -> None:
        hub, one = self._hub, self.subscribed
        try:
            while self._has_room() and not self.is_ended and not self._is_up_to_date():
                if self.returned:
                    await self._read_returned()
                    continue
                cursor = one.cursor or 0
                work = partial(read, hub.stream, [(one.filter, cursor)], hub.next, MOST_READ)
                found = await in_thread(hub.broker, work)
                if not self.is_ended:
                    hub.counts.lost += found.lost
                    self._give_all(found.messages, found.position)
        except QflowError as error:
            self._end_members(as_mqtt_error(error))
        except Exception:
            self._end_members(MqttError(ReasonCode.UNSPECIFIED, "the server has failed"))
            raise
        finally:
            self._is_reading = False

    def _end_members(self, error: MqttError) -> None:
        for outbound in list(self.members):
            outbound.fail(error)

    async def _read_returned(self) -> None:
        offsets = heapq.nsmallest(GIVEN_BACK_AT_ONCE, self.returned)
        found = await in_thread(self._hub.broker, partial(self._messages_at, offsets))
        done: set[int] = set()
        try:
            for offset in offsets:
                if self.is_ended or (offset in found and not self._give(found[offset])):
                    return
                done.add(offset)
        finally:
            self.returned = [offset for offset in self.returned if offset not in done]
            heapq.heapify(self.returned)

    def _messages_at(self, offsets: list[int]) -> dict[int, Message]:
        stream = self._hub.stream
        return {one: message_of(message) for one in offsets for message in stream.query(start=one, end=one + 1)}

    def end(self) -> None:
        """Nobody of it is connected any more."""
        self.is_ended = True
        self._hub.remove(self.subscribed)
        self._hub.keeper.drop(self)


class Groups:
    """The groups of a hub. In the loop alone."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._groups: dict[str, Group] = {}

    async def join(self, outbound: Outbound, one: Subscribed, start: int | None = None) -> Group:
        """Make a client a member of a group, which begins at `start`, or now, if there is none.

        Raises:
            MqttError: QUOTA_EXCEEDED; it has too many members.
        """
        key = key_of(one.group, one.filter)
        async with self._hub.turn(f"\0{key}"):
            group = self._groups.get(key)
            if group is None:
                group = await self._load(one, start)
                self._groups[key] = group
                self._hub.add(group.subscribed)
        try:
            _check_room(group, outbound)
        except MqttError:
            self.release(group)  # it may have been loaded for this one
            raise
        group.members[outbound] = one
        if outbound.state.is_durable:
            group.lasting.add(outbound.client_id)
        return group

    async def _load(self, one: Subscribed, start: int | None) -> Group:
        hub = self._hub
        fact: Any = partial(hub.broker.broker.engine.log.fact, GROUPS, key_of(one.group, one.filter))
        record = await in_thread(hub.broker, fact)
        group = Group(hub, one.group, one.filter, hub.next if start is None else start)
        if record is not None:
            fields = json.loads(record)
            group.subscribed.cursor = fields["cursor"]
            hub.wake([group.subscribed])
            group.returned = fields["open"]
            group.lasting = set(fields["members"])
        return group

    def leave(self, group: Group, outbound: Outbound, for_good: bool) -> Rooms:
        """Let a member go; return what the log is to have of the group. When it has that, or cannot, `release`.

        Args:
            for_good: it has unsubscribed, or its session ends; else its session sleeps.
        """
        was_lasting = bool(group.lasting)
        group.members.pop(outbound, None)
        if for_good:
            group.lasting.discard(outbound.client_id)
        return group.rooms() if was_lasting else {}

    def as_they_are(self, rooms: Rooms) -> Rooms:
        """Return what is to be kept with the groups in it as they are now, and with the sessions they gave to."""
        loaded = [group for key in rooms.get(GROUPS, {}) if (group := self._groups.get(key)) is not None]
        for group in loaded:
            rooms[GROUPS] |= group.rooms()[GROUPS]
        return self._hub.keeper.with_urgent(rooms) if loaded else rooms

    def release(self, group: Group) -> None:
        """Forget a group of which nobody is connected: the log has what there is of it."""
        if not group.members and not group.is_ended:
            group.end()
            del self._groups[group.key]

    async def forget(self, client_id: str, shared: Iterable[tuple[str, str]]) -> Rooms:
        """Have a member whose session ends while it sleeps be none; return what the log is to have of its groups.

        Groups that sleep as well are written here, before anybody can wake them.
        """
        hub = self._hub
        rooms: Rooms = {GROUPS: {}}
        for key in [key_of(*one) for one in shared]:
            async with hub.turn(f"\0{key}"):
                group = self._groups.get(key)
                if group is not None:
                    group.lasting.discard(client_id)
                    rooms[GROUPS] |= group.rooms()[GROUPS]
                    continue
                record: Any = await in_thread(hub.broker, partial(hub.broker.broker.engine.log.fact, GROUPS, key))
                if record is not None:
                    fields = json.loads(record)
                    fields["members"] = [one for one in fields["members"] if one != client_id]
                    left = json.dumps(fields, ensure_ascii=False).encode() if fields["members"] else None
                    await keep(hub.broker, {GROUPS: {key: left}})
        return rooms if rooms[GROUPS] else {}


def _check_room(group: Group, outbound: Outbound) -> None:
    """Refuse a member that is one already, or one too many."""
    if outbound in group.members:
        raise MqttError(ReasonCode.TOPIC_FILTER_INVALID, "the client is in this group by another subscription")
    if len(group.members) >= MOST_MEMBERS:
        raise MqttError(ReasonCode.QUOTA_EXCEEDED, f"a group has at most {MOST_MEMBERS} members at a time")
    lasts = outbound.state.is_durable and outbound.client_id not in group.lasting
    if lasts and len(group.lasting) >= MOST_LASTING:
        text = f"a group has at most {MOST_LASTING:,} members whose sessions last"
        raise MqttError(ReasonCode.QUOTA_EXCEEDED, text)


def key_of(group: str, topic_filter: str) -> str:
    """Return under which key the record of a group is kept."""
    return f"{group}\0{topic_filter}"
