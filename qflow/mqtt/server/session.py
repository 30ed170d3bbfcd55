"""A session whose client is connected: its subscriptions change, it ends, it goes to sleep."""

from __future__ import annotations

from datetime import datetime
from functools import partial

from qflow.aio.broker import in_thread, keep
from qflow.errors import BrokerClosed, QflowError
from qflow.loggers import get_logger
from qflow.mqtt.errors import MqttError, ReasonCode, as_mqtt_error
from qflow.mqtt.model.filters import Wish, wish_of
from qflow.mqtt.model.sessions import Options, SessionState, Subscribed, expires_ms
from qflow.mqtt.model.wills import Will
from qflow.mqtt.server.access import Access
from qflow.mqtt.server.feeding import Feeding
from qflow.mqtt.server.groups import Group
from qflow.mqtt.server.house import House
from qflow.mqtt.server.inbound import Inbound
from qflow.mqtt.server.leaving import NO_ROOM
from qflow.mqtt.server.outbound import Line, Outbound
from qflow.mqtt.server.storing import GROUPS, MOST_RECORD_BYTES, SESSIONS, WILLS, Rooms, forgetting
from qflow.mqtt.wire.packets import Suback, Subscribe, Unsuback, Unsubscribe

Before = dict[Subscribed, tuple[Options, int | None, bool]]
"""Subscriptions that a SUBSCRIBE changes: options, cursor and whether it is a replay, as they were."""

_logger = get_logger("qflow.mqtt")


class Session:
    """See the module. In the loop alone; `subscribe`, `unsubscribe` and `leave` by one task at a time."""

    def __init__(self, house: House, state: SessionState, line: Line, access: Access, will: Will | None) -> None:
        hub = house.hub
        self.state = state
        self.inbound = Inbound(state, line, access, hub)
        self.outbound = Outbound(state, line, hub.clock, hub.counts, hub.keeper)
        self.outbound.record = self.record
        self.outbound.may_have = access.may_subscribe
        self.feeding = Feeding(self.outbound, hub)
        self.outbound.pump = self.pump
        self._hub = hub
        self._leaving = house.leaving
        self._groups = house.groups
        self._shared: list[Subscribed] = []
        self._left_groups: list[Group] = []
        """What the log is to have of them is on its way."""
        self._will = will
        self._line = line
        self._access = access
        self._is_left = False

    def record(self) -> bytes:
        """Return what the log is to have of it, while its client is there."""
        return self.state.record(self._hub.next, 0)

    # Beginning -------------------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Go on where the session was: its client has been told that it is there."""
        await self._keep_to_permissions()
        self.outbound.resends.extend(self.state.flights)
        shared = [one for one in self.state.subscriptions.values() if one.group]
        own = [one for one in self.state.subscriptions.values() if not one.group]
        for one in own:
            if not one.qos:
                one.cursor = one.retained_from = None  # what has QoS 0 does not wait for who is away
            if one.retained_from is not None:
                self.feeding.search(one, one.retained_from, one.cursor)
        self._hub.wake([one for one in own if one.qos])
        for one in own:
            self._attach(one)
        self._subscriptions_changed()
        for one in shared:
            try:
                await self._join(one)
            except QflowError as error:
                self.outbound.fail(as_mqtt_error(error))
        self.pump()

    async def _join(self, one: Subscribed, start: int | None = None) -> None:
        one.owner = await self._groups.join(self.outbound, one, start)
        if self._is_left:  # taken over meanwhile
            self._detach(one, not self.state.is_durable)
            self._release_groups()

    def pump(self) -> None:
        """Go on with what waits for room."""
        self.feeding.pump()
        for one in self._shared:
            if one.owner is not None:
                one.owner.pump()

    def forbidden(self) -> list[Subscribed]:
        """Return the subscriptions that the client may not have: they are of another user, or were permitted once."""
        return [one for one in self.state.subscriptions.values() if not self._access.may_subscribe(one.filter)]

    async def _keep_to_permissions(self) -> None:
        """End subscriptions that the client may not have, before any of them begins."""
        forbidden = self.forbidden()
        if not forbidden:
            return
        for one in forbidden:
            self.state.unsubscribe(one.name)
        shared = [(one.group, one.filter) for one in forbidden if one.group]
        try:
            await self._keep([await self._groups.forget(self.state.client_id, shared)])
        except QflowError as error:
            self.outbound.fail(as_mqtt_error(error))

    def _attach(self, one: Subscribed) -> None:
        one.owner = self.outbound
        if one.cursor is not None:
            self.outbound.behind.add(one)
        self._hub.add(one)

    def _detach(self, one: Subscribed, for_good: bool = True) -> Rooms:
        """Have a subscription get nothing any more; return what the log is to have of its group."""
        owner, one.owner = one.owner, None
        if owner is not None and one.group:
            self._left_groups.append(owner)
            return self._groups.leave(owner, self.outbound, for_good)
        if owner is not None:
            self._hub.remove(one)
            self.outbound.behind.discard(one)
            self.feeding.forget(one)
        return {}

    def _subscriptions_changed(self) -> None:
        self.feeding.changed()
        self._shared = [one for one in self.state.subscriptions.values() if one.group]
        self.inbound.wants_publisher = any(one.no_local for one in self.state.subscriptions.values())

    # Subscribing -----------------------------------------------------------------------------------------------------

    async def subscribe(self, packet: Subscribe) -> None:
        """Add subscriptions; the answer goes when they are in the log, retained messages and replays after it."""
        codes: list[int] = []
        texts: list[str] = []
        begun: list[tuple[Subscribed, bool]] = []
        before: Before = {}
        await self._hub.catch_up()
        for asked in packet.subscriptions:
            try:
                wish = wish_of(asked, packet.properties, self._hub.now_ms() / 1000)
                begun.append(await self._begin_subscribing(wish, before))
                codes.append(asked.qos)
            except MqttError as error:
                codes.append(error.code)
                texts.append(error.text)
            except QflowError as error:
                codes.append(as_mqtt_error(error).code)
                texts.append(str(error))
        try:
            await self._keep(
                [one.owner.rooms() for one, _ in begun if one.owner is not None and one.group and one.owner.lasting]
            )
        except QflowError as error:
            for one, _ in begun:
                self._take_back(one, before.get(one))
            self._release_groups()
            codes = [max(code, as_mqtt_error(error).code) for code in codes]
            texts, begun = [str(error)], []
        if self._is_left:
            return
        self._line.machine.send(Suback(packet.packet_id, codes, {"reason_string": texts[0][:1000]} if texts else {}))
        self._line.flush_soon()
        for one, wants_retained in begun:
            if self.state.subscriptions.get(one.name) is one:
                if one.owner is None and not one.group:
                    self._attach(one)
                if wants_retained:
                    if one.cursor is None:  # what is published from now on comes behind what is retained now
                        one.cursor = self._hub.next
                    self.outbound.behind.add(one)
                    self.feeding.search(one)
        self._subscriptions_changed()
        self.pump()

    def _take_back(self, one: Subscribed, before: tuple[Options, int | None, bool] | None) -> None:
        """Have a subscription as it was before a SUBSCRIBE that the log does not take; none, if it was not there."""
        if before is None:
            self._detach(one)
            self.state.unsubscribe(one.name)
            return
        one.options = before[0]
        one.retained_from = None
        if one.owner is None and not one.group and not self._is_left:  # it was to be replayed
            one.cursor, one.is_replaying = before[1:]
            self._attach(one)

    async def _begin_subscribing(self, wish: Wish, before: Before) -> tuple[Subscribed, bool]:
        """Return a subscription that is not live yet, and whether retained messages are to be sent."""
        if not self._access.may_subscribe(wish.filter):
            raise MqttError(ReasonCode.NOT_AUTHORIZED, f"not allowed to subscribe to {wish.filter[:200]!r}")
        start = await self._start(wish)
        one = self.state.subscriptions.get(wish.name)
        is_new = one is None
        if one is None:
            one = Subscribed(wish.name, wish.filter, wish.group)
            one.cursor = self._hub.next if wish.asked.qos else None
            self.state.subscribe(one)
        if one.group:
            if not is_new:
                before.setdefault(one, (one.options, None, False))
            await self._subscribe_shared(one, start, wish)
            return one, False
        if start is not None:
            self._detach(one)
        if not is_new:
            before.setdefault(one, (one.options, one.cursor, one.is_replaying))
        if start is not None:
            one.cursor, one.is_replaying = start, True
        _set_options(one, wish)
        handling = wish.asked.retain_handling
        wants_retained = start is None and (handling == 0 or (handling == 1 and is_new))
        if wants_retained:
            one.retained_from = ""
        return one, wants_retained

    async def _subscribe_shared(self, one: Subscribed, start: int | None, wish: Wish) -> None:
        _set_options(one, wish)
        one.cursor = None
        if one.owner is None:
            try:
                await self._join(one, start)
            except BaseException:
                self.state.unsubscribe(one.name)
                raise

    async def _start(self, wish: Wish) -> int | None:
        """Return the offset where a replay begins; None without one."""
        start = wish.start
        if isinstance(start, datetime):
            start = await in_thread(self._hub.broker, partial(self._offset_at, start, self._hub.next))
        return None if start is None else min(max(start, self._hub.floor), self._hub.next)

    def _offset_at(self, moment: datetime, after: int) -> int:
        """Return the offset of the first message from a moment on; `after`, that of the next one, if there is none."""
        first = next(self._hub.stream.query(start=moment, limit=1), None)
        return after if first is None else first.offset

    async def unsubscribe(self, packet: Unsubscribe) -> None:
        """Remove subscriptions; the answer goes when that is in the log. What was sent is acknowledged as before."""
        codes: list[int] = []
        groups: list[Rooms] = []
        for name in packet.filters:
            one = self.state.unsubscribe(name)
            if one is not None:
                groups.append(self._detach(one))
            codes.append(ReasonCode.NO_SUBSCRIPTION_EXISTED if one is None else ReasonCode.SUCCESS)
        self._subscriptions_changed()
        try:
            await self._keep(groups)
        except QflowError as error:
            self.outbound.fail(as_mqtt_error(error))
        self._line.machine.send(Unsuback(packet.packet_id, codes))
        self._line.flush_soon()

    async def _keep(self, groups: list[Rooms]) -> None:
        """Keep the session if it lasts, and changes of groups, in one commit."""
        rooms = joined(groups)
        if self.state.is_durable and not self._is_left:
            record = self.record()
            if len(record) > MOST_RECORD_BYTES:
                raise MqttError(ReasonCode.QUOTA_EXCEEDED, "the session is too large to be kept")
            rooms[SESSIONS] = {self.state.client_id: record}
        try:
            if rooms:
                await keep(self._hub.broker, self._groups.as_they_are(rooms))
        finally:
            self._release_groups()

    def _release_groups(self) -> None:
        left, self._left_groups = self._left_groups, []
        for group in left:
            self._groups.release(group)

    # Leaving ---------------------------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Its client is gone: the session sleeps in the log, or ends. Twice is fine.

        What it published is stored by then, or withdrawn.
        """
        if self._is_left:
            return
        self._is_left = True
        self.feeding.end()
        self._hub.keeper.drop(self.outbound)
        groups = self._leave_all()
        ends_ms: int | None = self._hub.now_ms()  # its record does not say yet that the client has gone
        try:
            await self.inbound.settle()
            ends_ms = await self._sleep(groups)
        except BrokerClosed:
            _logger.debug("the session of %r sleeps as it was written last", self.state.client_id)
        except QflowError as error:
            _logger.warning("the session of %r sleeps as it was written last: %s", self.state.client_id, error)
        finally:
            self._release_groups()
            if self._hub.sessions.get(self.state.client_id) is self:
                del self._hub.sessions[self.state.client_id]
            if ends_ms is not None:
                self._leaving.ends(ends_ms)

    def _leave_all(self) -> Rooms:
        """End all subscriptions; other members of groups get what this one has not acknowledged."""
        state = self.state
        for packet_id, flight in list(state.flights.items()):
            if flight.group is not None:
                flight.group.give_back(flight.offset)
                del state.flights[packet_id]
        shared = [one.owner for one in self._shared if one.owner is not None]
        rooms = joined([self._detach(one, not state.is_durable) for one in state.subscriptions.values()])
        for group in shared:
            group.pump()
        return rooms

    async def _sleep(self, rooms: Rooms) -> int | None:
        """Write what is to be known of it, and what becomes of the will, in one commit.

        Return when it is to be looked at, as it ends, milliseconds since the epoch; None: never, or it has ended.
        """
        state, hub, will = self.state, self._hub, self._will
        rooms = self._groups.as_they_are(rooms)
        ends_ms = None
        if state.is_durable:
            left_ms = hub.now_ms()
            record = state.record(hub.next, left_ms)
            if len(record) <= MOST_RECORD_BYTES:
                rooms[SESSIONS] = {state.client_id: record}
                ends_ms = expires_ms(record, left_ms)
            else:
                ends_ms = left_ms
                _logger.warning("the session of %r is too large to be kept as it is now", state.client_id)
        elif state.is_kept:
            rooms = {**rooms, **forgetting(state.client_id, state.received)}
        if will is not None:
            delay_s = min(will.delay_s, state.expiry_s)
            rooms[WILLS] = {state.client_id: None}
            is_due = self._line.will_is_due and self._access.may_publish(will.topic)
            if is_due and not delay_s:
                try:
                    await self._leaving.publish_now(state.client_id, will, rooms)
                    return ends_ms
                except NO_ROOM:  # there may be room for what is smaller; the log has the will as it is
                    del rooms[WILLS]
                    is_due = False
            if is_due:
                will.due_ms = hub.now_ms() + delay_s * 1000
                rooms[WILLS] = {state.client_id: will.pack()}
                self._leaving.wait_for(will.due_ms, state.client_id)
        if rooms:
            await keep(hub.broker, rooms)
        return ends_ms


def _set_options(one: Subscribed, wish: Wish) -> None:
    one.qos = wish.asked.qos
    one.no_local, one.retain = wish.asked.no_local, wish.asked.retain_as_published
    one.identifier, one.has_offsets = wish.identifier, wish.has_offsets


def joined(groups: list[Rooms]) -> Rooms:
    """Return the records of several groups as one."""
    records = {key: value for rooms in groups for key, value in rooms.get(GROUPS, {}).items()}
    return {GROUPS: records} if records else {}
