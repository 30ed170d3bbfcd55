"""A stream against plain lists, through random histories of all that publishers, subscribers and time do to it.

The model has each partition as a list, and for each subscription what must come next of it. What is delivered must be
the next that its filter matches, whole, in order, once unless it was returned; what is passed over must be acked, or
told as a gap, or behind what retention took. Blocks, reads and memory are small, so that histories of a few dozen
messages go through every seam: parts of blocks, evicted tails, readers that fall behind, the index of topics.
"""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, invariant, precondition, rule

import inside
import qflow
from model.spool_machine import SpoolMachine
from qflow.broker import make_broker
from qflow.config import BrokerSettings
from qflow.storage import encoding
from qflow.storage.log import append, removal
from qflow.storage.streams import partitions
from qflow.streams import part as part_module
from qflow.streams import read_ahead
from qflow.streams import room as room_module
from qflow.streams.deliveries import StreamDeliveries, StreamDelivery
from qflow.upkeep import Upkeep
from thorough import TORTURE
from unit.clocks import Clock

TOPICS = ["a/x", "a/y", "a/x/z", "b", "a", "$s/x", "q/x"]
FILTERS = ["#", "a/+", "a/#", "+/x", "a/x", "$s/#", "b", "q/+"]
KEYS = [None, None, b"k1", b"k2", b"k3"]
DURABLE = ("one", "two")
GROUP = "group"
LEASE_S = 15.0
EXPIRY_S = 50.0


def is_wanted(topic_filter: str, topic: str) -> bool:
    """MQTT's rules, written down once more."""
    wanted, levels = topic_filter.split("/"), topic.split("/")
    if levels[0].startswith("$") and wanted[0] in "+#":
        return False
    while wanted and levels and wanted[0] in ("+", levels[0]):
        wanted, levels = wanted[1:], levels[1:]
    return wanted == ["#"] or (not wanted and not levels)


class Sent:
    """One message of a partition."""

    def __init__(self, topic: str, body: bytes, key: bytes | None, headers: dict[str, Any] | None, time_ms: int):
        self.topic, self.body, self.key, self.headers, self.time_ms = topic, body, key, headers or {}, time_ms


class Held:
    """What somebody holds."""

    def __init__(self, delivery: StreamDelivery, batch: StreamDeliveries, member: qflow.Subscription, until: float):
        self.delivery, self.batch, self.member, self.until = delivery, batch, member, until


class Line:
    """What the model knows of a subscription in one partition."""

    def __init__(self, start: int) -> None:
        self.base = start
        """Nothing below it is to come."""
        self.next = start
        """Everything below it was delivered since the subscription was opened, or is not to come."""
        self.acked: set[int] = set()
        self.unlogged: set[int] = set()
        """Of these, what is perhaps not in the log: after a crash it may come again."""
        self.maybe: set[int] = set()
        """What may, since there was a crash."""
        self.again: set[int] = set()
        self.later: dict[int, float] = {}
        self.held: dict[int, Held] = {}
        self.returned: dict[int, int] = {}
        """How often each was returned since the subscription was opened."""
        self.seen: set[int] = set()
        """Delivered before it was opened, or before a seek."""
        self.doubtful = 0
        """What is below may have been delivered."""

    def forget(self) -> None:
        """Nobody has it open: only what is acked is known."""
        self.doubtful = max(self.doubtful, self.next)
        self.seen |= {*self.held, *self.again, *self.later, *self.returned}
        self.seen |= set(range(self.base, self.next))
        self.next = self.base
        self.again, self.later, self.held, self.returned = set(), {}, {}, {}


class Reader:
    """What the model knows of a subscription, or a group."""

    def __init__(self, name: str | None, topic_filter: str, starts: list[int], skips: bool, lease: float | None):
        self.name, self.filter, self.skips, self.lease = name, topic_filter, skips, lease
        self.lines = [Line(start) for start in starts]
        self.members: list[qflow.Subscription] = []
        self.expires = False
        self.left_at = 0.0
        """When it was open last."""
        self.is_vague = False
        """A restart came while it was open: perhaps the log knows of an earlier moment."""
        self.is_jumped = False
        """The clock was set since it was open."""

    @property
    def is_group(self) -> bool:
        return self.name == GROUP

    def all_held(self) -> list[tuple[int, int]]:
        return [(number, offset) for number, line in enumerate(self.lines) for offset in line.held]


class StreamMachine(SpoolMachine):
    """The model of one stream with its subscriptions."""

    def __init__(self) -> None:
        super().__init__()
        for place, name, value in (
            (append, "TAIL_BYTES", 400),
            (removal, "REMOVED_AT_ONCE", 4),
            (encoding, "MAX_MESSAGES", 3),
            (partitions, "BLOCKS_AT_ONCE", 2),
            (part_module, "HINTS", 2),
            (read_ahead, "READ_BYTES", 600),
            (read_ahead, "LEAST_READ_BYTES", 300),
            (read_ahead, "BATCH_BYTES", 1_000),
            (room_module, "TAIL_SHARE", 2),
        ):
            self.patch.setattr(place, name, value)
        self.patch.setattr(Upkeep, "_run", lambda upkeep: None)  # nor in that of a snapshot
        self.clock = Clock()
        self.bodies = 0
        self.place_of: dict[bytes | str, int] = {}
        self.readers: list[Reader] = []

    @initialize(
        partitions=st.sampled_from([1, 1, 2, 3]),
        messages=st.sampled_from([None, None, 12]),
        size=st.sampled_from([None, None, 900]),
        age=st.sampled_from([None, None, 60.0]),
        consumed=st.booleans(),
        capacity=st.sampled_from([0, 3_000, 12_000, 1_000_000]),
        filters=st.tuples(st.sampled_from(FILTERS), st.sampled_from(FILTERS)),
    )
    def begin(
        self,
        partitions: int,
        messages: int | None,
        size: int | None,
        age: float | None,
        consumed: bool,
        capacity: int,
        filters: tuple[str, str] = ("#", "a/+"),
    ) -> None:
        self.partitions, self.capacity = partitions, capacity
        self.retention = {
            "retention_messages": messages,
            "retention_bytes": size,
            "retention_s": age,
            "retain_until_consumed": consumed,
        }
        self.lines: list[list[Sent]] = [[] for _ in range(partitions)]
        self.floors = [0] * partitions
        self.open()
        self.subscribe(None, filters[0], "earliest", 0, False, None, False)
        self.subscribe("one", filters[1], "earliest", 0, False, None, False)

    def open(self) -> None:
        settings = BrokerSettings(capacity_bytes=self.capacity, journal_bytes="8KiB")
        self.still(make_broker(self.path, settings, clock=self.clock.wall, monotonic=self.clock.monotonic))
        self.broker.bind(self.broker.declare_queue("q"), "q/#")
        self.declare()

    def declare(self) -> None:
        self.stream = self.broker.declare_stream(
            "s", topics=["#", "$s/#", "a/+"], partitions=self.partitions, **self.retention
        )

    # What is expected ------------------------------------------------------------------------------------------------

    def wanted(self, reader: Reader, number: int, low: int, high: int) -> list[int]:
        """Offsets of what a reader is to get of [low, high), and has not acked."""
        line, sent = reader.lines[number], self.lines[number]
        return [
            offset
            for offset in range(low, min(high, len(sent)))
            if is_wanted(reader.filter, sent[offset].topic) and offset not in line.acked
        ]

    def release_late(self, reader: Reader) -> None:
        """What time gives back when somebody looks."""
        now = self.clock.monotonic_s
        for line in reader.lines:
            for offset, due in list(line.later.items()):
                if due <= now:
                    del line.later[offset]
                    line.again.add(offset)
            for offset, held in list(line.held.items()):
                if held.until <= now:
                    self.give_back(line, offset)

    def give_back(self, line: Line, offset: int, due: float | None = None) -> None:
        line.held.pop(offset)
        line.returned[offset] = line.returned.get(offset, 0) + 1
        if due is None:
            line.again.add(offset)
        else:
            line.later[offset] = due

    def pass_over(self, reader: Reader, number: int, end: int) -> None:
        """What lies before `end` does not come any more: acked, or, in doubt after a crash, acked after all."""
        line = reader.lines[number]
        left = set(self.wanted(reader, number, line.next, end))
        gone = {offset for offset in left if offset < self.floors[number]} if reader.skips else set()
        assert left <= line.maybe | gone, f"{left} were passed over"
        line.acked |= left  # what was skipped is, too, for whoever opens it next and does not skip
        line.maybe -= left
        line.next = max(line.next, end)

    def take(self, reader: Reader, member: qflow.Subscription, batch: StreamDeliveries) -> None:
        """Note what was delivered, and that it had to be."""
        until = float("inf") if reader.lease is None else self.clock.monotonic_s + reader.lease
        fresh_came = [False] * self.partitions
        for delivery in batch:
            number, offset = delivery.partition, delivery.offset
            line, sent = reader.lines[number], self.lines[number][delivery.offset]
            assert (delivery.topic, delivery.body, delivery.key) == (sent.topic, sent.body, sent.key)
            assert delivery.headers == sent.headers
            assert delivery.time_ms == sent.time_ms
            assert is_wanted(reader.filter, sent.topic), "it was not asked for"
            assert offset not in line.held, "somebody holds it"
            if offset in line.again:
                assert not fresh_came[number], "what was returned comes first"
                assert offset == min(line.again), "out of order"
                line.again.discard(offset)
            else:
                fresh_came[number] = True
                assert offset >= line.next, "it came twice"
                self.pass_over(reader, number, offset)
                assert offset not in line.acked, "it was acked"
                line.maybe.discard(offset)
                line.next = offset + 1
            returned = line.returned.get(offset, 0)
            assert delivery.delivery_count == returned + 1
            if returned or offset in line.seen:
                assert delivery.redelivered
            elif offset >= line.doubtful:
                assert not delivery.redelivered
            line.held[offset] = Held(delivery, batch, member, until)

    def ready(self, reader: Reader) -> bool:
        """Something is there that a get must return, or tell."""
        return any(
            line.again or set(self.wanted(reader, number, line.next, len(self.lines[number]))) - line.maybe
            for number, line in enumerate(reader.lines)
        )

    # Publishing ------------------------------------------------------------------------------------------------------

    def published(self, result: Any, sent: Sent) -> None:
        number = result.partitions.get("s", 0)
        assert result.offsets["s"] == len(self.lines[number]), "offsets are dense"
        sent.time_ms = max(sent.time_ms, *(other.time_ms for other in self.lines[number][-1:]), 0)
        self.lines[number].append(sent)
        assert ("q" in result.sequences) == sent.topic.startswith("q/")
        place = self.place_of.setdefault(sent.key or sent.topic, number)
        assert place == number, "messages of one key are in one partition"

    def message(self, topic: str, size: int, key: bytes | None, headers: bool) -> Sent:
        self.bodies += 1
        body = b"%d:" % self.bodies + bytes(size)
        return Sent(topic, body, key, {"n": self.bodies} if headers else None, int(self.clock.wall_s * 1000))

    def all_logged(self) -> None:
        """A commit has taken along every ack that was not waited for."""
        for reader in self.readers:
            for line in reader.lines:
                line.unlogged.clear()

    def confirm(self, reader: Reader, line: Line, offset: int, wait: bool) -> None:
        line.acked.add(offset)
        line.maybe.discard(offset)
        if wait:
            self.all_logged()
        elif reader.name is not None:
            line.unlogged.add(offset)

    @rule(
        topic=st.sampled_from(TOPICS),
        size=st.sampled_from([0, 10, 100, 300, 700, 5_000]),
        key=st.sampled_from(KEYS),
        headers=st.booleans(),
    )
    def publish(self, topic: str, size: int, key: bytes | None, headers: bool) -> None:
        sent = self.message(topic, size, key, headers)
        result = self.broker.publish(topic, sent.body, key=key, headers=sent.headers or None)
        self.published(result, sent)
        self.all_logged()

    @rule(
        parts=st.lists(
            st.tuples(st.sampled_from(TOPICS), st.sampled_from([0, 50, 200]), st.sampled_from(KEYS)),
            min_size=1,
            max_size=3,
        ),
        times=st.sampled_from([0, 1, 2, 8, 12]),
        plain=st.booleans(),
        headers=st.booleans(),
    )
    def publish_many(self, parts: list[tuple[str, int, bytes | None]], times: int, plain: bool, headers: bool) -> None:
        batch = [self.message(topic, size, None if plain else key, False) for topic, size, key in parts * times]
        both = {"all": True} if headers else None
        given = [(one.topic, one.body) if plain else (one.topic, one.body, one.key) for one in batch]
        results = self.broker.publish_many(given, headers=both)
        assert len(results) == len(batch)
        for result, sent in zip(results, batch, strict=True):
            sent.headers = both or {}
            self.published(result, sent)
        if batch:
            self.all_logged()

    def publish_many_of(self, parts: list[tuple[str, int, bytes | None]]) -> None:
        batch = [self.message(topic, size, key, False) for topic, size, key in parts]
        for result, sent in zip(self.broker.publish_many([(one.topic, one.body) for one in batch]), batch, strict=True):
            self.published(result, sent)
        self.all_logged()

    # Subscribing -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: sum(len(reader.members) for reader in self.readers) < 4)
    @rule(
        name=st.sampled_from([None, None, *DURABLE, GROUP, GROUP]),
        topic_filter=st.sampled_from(FILTERS),
        start=st.sampled_from(["earliest", "earliest", "latest", "offset", "moment", "committed"]),
        back=st.integers(0, 60),
        skips=st.booleans(),
        lease=st.sampled_from([None, LEASE_S]),
        expires=st.booleans(),
    )
    def subscribe(
        self,
        name: str | None,
        topic_filter: str,
        start: str,
        back: int,
        skips: bool,
        lease: float | None,
        expires: bool,
    ) -> None:
        known = next((reader for reader in self.readers if name is not None and reader.name == name), None)
        if known is None and start == "committed":
            with pytest.raises(qflow.InvalidArgument if name is None else qflow.NotFound):
                self.broker.subscribe("s", topic_filter, name=name, start=start)
            return
        if known is not None and known.members and (not known.is_group or len(known.members) > 2):
            return
        if known is None and len([reader for reader in self.readers if reader.name is None]) > 2:
            return
        if known is not None:
            topic_filter, start, lease, expires = known.filter, "committed", known.lease, known.expires
        elif start == "offset" and self.partitions > 1:
            start = "earliest"
        if name == GROUP:
            lease, skips = LEASE_S, False
        given: Any = start
        places = [len(line) for line in self.lines] if start == "latest" else list(self.floors)
        if start == "offset":
            given = max(0, len(self.lines[0]) - back)
            places = [given]
        elif start == "moment":
            moment = int(self.clock.wall_s) - back
            given = datetime.fromtimestamp(moment, UTC)
            places = [self.first_at(number, moment * 1000) for number in range(self.partitions)]
        member = self.broker.subscribe(
            "s",
            topic_filter,
            name=None if name == GROUP else name,
            group=GROUP if name == GROUP else None,
            start=given,
            ack_timeout_s=lease,
            session_expiry_s=EXPIRY_S if expires and name is not None else None,
            on_gap="skip" if skips else "raise",
        )
        if known is None:
            known = Reader(name, topic_filter, places, skips, lease)
            known.expires = expires and name is not None
            self.readers.append(known)
            self.all_logged()
        if not known.members:
            self.all_logged()
        known.skips = skips
        known.members.append(member)

    def first_at(self, number: int, time_ms: int) -> int:
        """The first retained message that is not earlier."""
        line = self.lines[number]
        return next((at for at in range(self.floors[number], len(line)) if line[at].time_ms >= time_ms), len(line))

    def some_reader(self, data: st.DataObject) -> tuple[Reader, qflow.Subscription]:
        reader = data.draw(st.sampled_from([reader for reader in self.readers if reader.members]))
        return reader, data.draw(st.sampled_from(reader.members))

    @precondition(lambda self: any(reader.members for reader in self.readers))
    @rule(data=st.data(), most=st.sampled_from([1, 1, 3, 10, 1000]))
    def get(self, data: st.DataObject, most: int) -> None:
        self.get_some(*self.some_reader(data), most)

    def get_some(self, reader: Reader, member: qflow.Subscription, most: int) -> int:
        self.release_late(reader)
        if reader.name is None:  # who asks for more has done with what he got
            for line in reader.lines:
                line.acked |= line.held.keys()
                line.held.clear()
        while True:
            before = member.stats().gap_total
            try:
                batch = member.get_many(most, 0)
            except qflow.GapError as error:
                self.miss(reader, member, error, before)
                continue
            except qflow.TooManyUnsettled:
                assert self.capacity < 1_000_000
                assert reader.all_held()
                return 0
            break
        if not batch:
            assert not self.misses_something(reader)
        else:
            self.take(reader, member, batch)
        return len(batch)

    @precondition(lambda self: any(reader.members for reader in self.readers))
    @rule(data=st.data(), topic=st.sampled_from(TOPICS), count=st.sampled_from([1, 4, 20]))
    def publish_and_get(self, data: st.DataObject, topic: str, count: int) -> None:
        """One after the other: most of what a stream does is that."""
        self.publish_many_of([(topic, 50, None)] * count)
        self.get_some(*self.some_reader(data), 1000)

    @precondition(lambda self: any(reader.members for reader in self.readers))
    @rule(data=st.data(), most=st.sampled_from([2, 1000]))
    def catch_up(self, data: st.DataObject, most: int) -> None:
        """Read to the end, and be live from then on."""
        reader, member = self.some_reader(data)
        count = -1
        while count:
            count = self.get_some(reader, member, most)
            for line in reader.lines if reader.name is not None else ():
                for offset, held in list(line.held.items()):
                    held.delivery.ack()
                    del line.held[offset]
                    self.confirm(reader, line, offset, False)

    @precondition(lambda self: self.bodies % 3 == 1)
    @rule()
    def evict(self) -> None:
        """Queues take the memory of live tails."""
        self.broker.engine.streams.room.give_way(2**30)

    def misses_something(self, reader: Reader) -> bool:
        """Something is ready, and neither skipped nor held back for want of memory."""
        if self.capacity < 1_000_000 and reader.all_held():
            return False
        if reader.skips:
            for number in range(self.partitions):
                self.pass_over(reader, number, self.floors[number])
        return self.ready(reader)

    def miss(self, reader: Reader, member: qflow.Subscription, gap: qflow.GapError, before: int) -> None:
        """Messages that were to come are gone: just those, and they are."""
        assert member.stats().gap_total == before + gap.messages
        line = reader.lines[gap.partition]
        assert not reader.skips
        assert line.base <= gap.first < gap.end <= self.floors[gap.partition]
        assert gap.first >= line.next or line.next == line.base
        self.pass_over(reader, gap.partition, gap.first)
        line.acked |= set(
            self.wanted(reader, gap.partition, gap.first, gap.end)
        )  # told once; perhaps again, if reopened
        line.next = gap.end

    @precondition(lambda self: any(reader.all_held() for reader in self.readers))
    @rule(data=st.data(), whole=st.booleans(), wait=st.booleans())
    def ack(self, data: st.DataObject, whole: bool, wait: bool) -> None:
        reader, line, held = self.some_held(data)
        if not whole:
            held.delivery.ack(wait)
            del line.held[held.delivery.offset]
            self.confirm(reader, line, held.delivery.offset, wait)
            with pytest.raises(qflow.AlreadySettled):
                held.delivery.ack()
            return
        held.batch.ack(wait)
        for other in reader.lines:
            for offset, one in list(other.held.items()):
                if one.batch is held.batch:
                    del other.held[offset]
                    self.confirm(reader, other, offset, wait)

    def some_held(self, data: st.DataObject) -> tuple[Reader, Line, Held]:
        reader = data.draw(st.sampled_from([reader for reader in self.readers if reader.all_held()]))
        number, offset = data.draw(st.sampled_from(reader.all_held()))
        return reader, reader.lines[number], reader.lines[number].held[offset]

    @precondition(lambda self: any(reader.all_held() for reader in self.readers))
    @rule(
        data=st.data(),
        whole=st.booleans(),
        requeue=st.sampled_from([True, True, False]),
        delay=st.sampled_from([0.0, 0.0, 4.0]),
    )
    def nack(self, data: st.DataObject, whole: bool, requeue: bool, delay: float) -> None:
        reader, _line, held = self.some_held(data)
        if whole:
            held.batch.nack(requeue, delay)
        else:
            held.delivery.nack(requeue, delay)
        due = self.clock.monotonic_s + delay if delay else None
        for other in reader.lines:
            for offset, one in list(other.held.items()):
                if one is held or (whole and one.batch is held.batch):
                    if requeue:
                        self.give_back(other, offset, due)
                    else:
                        del other.held[offset]
                        self.confirm(reader, other, offset, False)

    @precondition(lambda self: any(reader.all_held() for reader in self.readers))
    @rule(
        data=st.data(),
        whole=st.booleans(),
        topic=st.sampled_from(TOPICS),
        commits=st.booleans(),
        size=st.integers(0, 99),
    )
    def transaction(self, data: st.DataObject, whole: bool, topic: str, commits: bool, size: int) -> None:
        """Publish and ack together, or neither."""
        reader, _line, held = self.some_held(data)
        sent = self.message(topic, size, None, False)
        tx = self.broker.transaction()
        tx.publish(topic, sent.body)
        if whole:
            tx.ack_many(held.batch)
        else:
            tx.ack(held.delivery)
        if not commits:
            tx.rollback()
            return
        (result,) = tx.commit()
        self.published(result, sent)
        for other in reader.lines:
            for offset, one in list(other.held.items()):
                if one is held or (whole and one.batch is held.batch):
                    del other.held[offset]
                    other.acked.add(offset)
                elif one.batch is held.batch and reader.lease is not None:  # no lease ran during the commit
                    one.until = self.clock.monotonic_s + reader.lease
        self.all_logged()

    @precondition(lambda self: any(reader.members for reader in self.readers))
    @rule(
        data=st.data(),
        to=st.integers(0, 80),
        number=st.sampled_from([None, 0, 1]),
        by_time=st.booleans(),
    )
    def seek(self, data: st.DataObject, to: int, number: int | None, by_time: bool) -> None:
        reader, member = self.some_reader(data)
        if number is not None:
            number %= self.partitions
        numbers = range(self.partitions) if number is None else [number]
        late: list[StreamDelivery] = []
        if by_time:
            moment = int(self.clock.wall_s) - to
            member.seek(datetime.fromtimestamp(moment, UTC), partition=number)
            places = {one: self.first_at(one, moment * 1000) for one in numbers}
        elif number is None and self.partitions > 1:
            with pytest.raises(qflow.InvalidArgument):
                member.seek(to)
            return
        else:
            (one,) = numbers
            if to > len(self.lines[one]):
                with pytest.raises(qflow.InvalidArgument):
                    member.seek(to, partition=number)
                to %= len(self.lines[one]) + 1
            member.seek(to, partition=number)
            places = {one: to}
        for one, place in places.items():
            old = reader.lines[one]
            late += [held.delivery for held in old.held.values()]
            old.forget()
            line = reader.lines[one] = Line(place)
            line.seen, line.doubtful = old.seen, old.doubtful
        for delivery in late:
            delivery.ack(wait=True)  # nothing happens
        if reader.name is not None:
            self.all_logged()

    @precondition(lambda self: any(reader.members for reader in self.readers))
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        reader, member = self.some_reader(data)
        reader.members.remove(member)
        for line in reader.lines:
            for offset, held in list(line.held.items()):
                if held.member is member:
                    self.give_back(line, offset)
        member.close()
        with pytest.raises(qflow.InvalidArgument):
            member.get(0)
        if not reader.members:
            self.forget(reader)
            if reader.expires:
                self.all_logged()

    def forget(self, reader: Reader) -> None:
        reader.left_at, reader.is_jumped = self.clock.wall_s, False
        for line in reader.lines:
            line.forget()
        if reader.name is None:
            self.readers.remove(reader)

    @precondition(lambda self: any(reader.name is not None for reader in self.readers))
    @precondition(lambda self: self.bodies % 5 == 4)
    @rule(data=st.data())
    def delete_subscription(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from([reader for reader in self.readers if reader.name is not None]))
        self.broker.delete_subscription("s", str(reader.name))
        for member in reader.members:
            with pytest.raises(qflow.StreamDeleted):
                member.get(0)
        self.readers.remove(reader)
        self.all_logged()

    # Time and upkeep -------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0, 10.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: self.bodies % 5 == 3)
    @rule(jump=st.sampled_from([-20.0, 20.0]))
    def clock_jumps(self, jump: float) -> None:
        """Whether that moves the moments written down before it depends on how long the clock was looked at."""
        self.clock.wall_s += jump
        for reader in self.readers:
            reader.is_jumped |= not reader.members

    @rule()
    def maintain(self) -> None:
        """All that the maintenance thread would do."""
        for reader in self.readers:
            if reader.members:
                self.release_late(reader)
        before = self.stream.stats()
        for _ in range(50):
            inside.is_due(self.broker)
            more = self.broker.engine.streams.tick()
            for stream in self.broker.engine.streams.all():
                more |= stream.index(1)
            if not (more | inside.upkeep(self.broker).remove_settled() | inside.upkeep(self.broker).remove_deleted()):
                break
        else:
            raise AssertionError("maintenance never ends")
        self.broker.engine.log.drain()
        self.all_logged()
        for reader in [reader for reader in self.readers if reader.expires and not reader.members]:
            is_late = self.clock.wall_s - reader.left_at > EXPIRY_S
            is_gone = reader.name not in self.stream.cursors
            assert is_gone == is_late or (is_gone and reader.is_vague) or reader.is_jumped
            if is_gone:
                self.readers.remove(reader)
        self.check_retention(before)

    def check_retention(self, before: qflow.StreamStats) -> None:
        """What went had to go, and what had to go went."""
        after = self.stream.stats()
        floors = after.first_offsets
        kept = [line[floor:] for line, floor in zip(self.lines, floors, strict=True)]
        most, size, age = (self.retention[f"retention_{name}"] for name in ("messages", "bytes", "s"))
        pins = self.retention["retain_until_consumed"]
        durable = [reader for reader in self.readers if reader.name is not None]
        total = sum(map(len, kept))
        assert after.messages == total
        assert after.dropped_total - before.dropped_total == sum(floors) - sum(self.floors)
        reasons = [most is not None, size is not None, age is not None]
        for number, floor in enumerate(floors):
            assert floor >= self.floors[number], "a floor never falls"
            if pins:
                for reader in durable:
                    line = reader.lines[number]
                    first = max(line.base, self.floors[number])  # a seek may have gone behind what is there
                    left = set(self.wanted(reader, number, first, len(self.lines[number]))) - line.maybe
                    assert floor <= max(first, min(left, default=len(self.lines[number]))), (
                        f"{reader.name} was to get it"
                    )
            if floor > self.floors[number] and not (pins and not any(reasons)):
                last = self.lines[number][floor - 1]
                too_old = age is not None and last.time_ms < int((self.clock.wall_s - age) * 1000)
                too_many = most is not None and total + self.partitions > most
                slack = len(last.body) + 200 if self.partitions == 1 else 5_200 * self.partitions
                too_large = size is not None and after.bytes + slack > size
                assert too_old or too_many or too_large
            if age is not None and not pins and kept[number]:
                assert kept[number][0].time_ms >= int((self.clock.wall_s - age) * 1000)
        if not pins or not durable:
            assert most is None or total <= most
            assert size is None or after.bytes <= size
        if most is not None and size is None and age is None and not pins and before.messages > most:
            assert total >= most - self.partitions, "more was dropped than had to be"
        if not pins and not any(reasons):
            assert floors == self.floors
        self.floors = floors

    @precondition(lambda self: not self.retention["retain_until_consumed"])
    @rule(messages=st.sampled_from([None, 5, 40]))
    def alter(self, messages: int | None) -> None:
        self.broker.alter_stream("s", retention_messages=messages)
        self.retention["retention_messages"] = messages
        self.all_logged()

    @precondition(lambda self: self.bodies % 8 == 7)
    @rule()
    def delete_and_declare(self) -> None:
        self.broker.delete_stream("s")
        for reader in self.readers:
            for member in reader.members:
                with pytest.raises(qflow.StreamDeleted):
                    member.get(0)
            for number, offset in reader.all_held():
                reader.lines[number].held[offset].delivery.ack()  # late: a no-op
        assert self.broker.publish("a/x", b"").offsets == {}
        self.readers.clear()
        self.lines = [[] for _ in range(self.partitions)]
        self.floors = [0] * self.partitions
        self.declare()

    @precondition(lambda self: self.bodies % 4 == 3)
    @rule(dirty=st.booleans(), drained=st.booleans())
    def restart(self, dirty: bool, drained: bool) -> None:
        if drained or not dirty:
            self.broker.engine.log.drain()
            self.all_logged()
        if dirty:
            self.crash_broker()
        else:
            self.broker.close()
        for reader in list(self.readers):
            was_open, left_at = bool(reader.members), reader.left_at
            reader.members.clear()
            self.forget(reader)
            reader.is_vague |= was_open
            if not was_open:
                reader.left_at = left_at
            for number, line in enumerate(reader.lines):
                if dirty:
                    line.acked -= line.unlogged
                    line.maybe |= line.unlogged
                    line.doubtful = len(self.lines[number])
                line.unlogged.clear()
        self.open()
        assert self.broker.recovery.problems == ()
        stats = self.stream.stats()
        assert stats.first_offsets == self.floors
        assert stats.next_offsets == [len(line) for line in self.lines]

    # Looking ---------------------------------------------------------------------------------------------------------

    @rule(
        topic_filter=st.sampled_from(FILTERS),
        number=st.sampled_from([None, 0, 1]),
        newest=st.sampled_from([None, None, 1, 7]),
        skip=st.sampled_from([0, 2]),
        limit=st.sampled_from([None, 5]),
    )
    def query(self, topic_filter: str, number: int | None, newest: int | None, skip: int, limit: int | None) -> None:
        if number is not None:
            number %= self.partitions
        numbers = range(self.partitions) if number is None else [number]
        lines = [
            [
                (sent.time_ms, one, offset)
                for offset, sent in enumerate(self.lines[one])
                if offset >= self.floors[one] and is_wanted(topic_filter, sent.topic)
            ]
            for one in numbers
        ]
        expected = sorted(entry for line in lines for entry in line)
        found = list(self.stream.query(topic_filter, partition=number, newest=newest, skip=skip, limit=limit))
        times = [message.time_ms for message in found]
        assert times == sorted(times)
        if newest is not None:
            expected = expected[-newest:] if len(numbers) == 1 else expected
        if newest is None or len(numbers) == 1:
            expected = expected[skip:][:limit]
            assert [(one.time_ms, one.partition, one.offset) for one in found] == expected
        for message in found:
            sent = self.lines[message.partition][message.offset]
            assert (message.topic, message.body, message.key) == (sent.topic, sent.body, sent.key)

    @precondition(lambda self: self.bodies % 6 == 5)
    @rule()
    def compact(self) -> None:
        self.broker.compact()
        self.all_logged()

    @precondition(lambda self: self.bodies % 6 == 4)
    @rule()
    def snapshot(self) -> None:
        """A copy opens as a spool, and has what the log has."""
        self.broker.engine.log.drain()
        self.all_logged()
        path = self.directory / "snapshot"
        self.broker.snapshot(path)
        copy = make_broker(
            path, BrokerSettings(journal_bytes="8KiB"), clock=self.clock.wall, monotonic=self.clock.monotonic
        )
        try:
            stats = copy.stream("s").stats()
            assert (stats.first_offsets, stats.next_offsets) == (self.floors, [len(line) for line in self.lines])
            found = [(one.partition, one.offset, one.body) for one in copy.stream("s").query("#")]
            mine = [(one.partition, one.offset, one.body) for one in self.stream.query("#")]
            assert found == mine
            theirs = {one.name: one.committed for one in stats.subscriptions}
            ours = {one.name: one.committed for one in self.stream.stats().subscriptions if one.name is not None}
            assert theirs == ours
            assert copy.check() == []
        finally:
            copy.close()
        shutil.rmtree(path)

    # After every step ------------------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "broker"):
            return
        self.check_now_and_then()
        stats = self.stream.stats()
        assert stats.next_offsets == [len(line) for line in self.lines]
        assert stats.first_offsets == self.floors
        assert stats.messages == sum(map(len, self.lines)) - sum(self.floors)
        assert stats.damaged_total == 0
        room = self.broker.engine.streams.room
        assert room._incoming == 0
        cursors = {inside.cursor(reader.members[0]) for reader in self.readers if reader.members}
        assert room._held == sum(map(inside.charged_to, cursors))
        assert room._slack <= room._held
        for reader in self.readers:
            if reader.members:
                self.check_reader(reader)

    def check_reader(self, reader: Reader) -> None:
        stats = reader.members[0].stats()
        assert stats.members == len(reader.members)
        assert stats.unsettled_messages == len(reader.all_held())
        for number, line in enumerate(reader.lines):
            floor = self.floors[number]
            waiting = {*line.again, *line.later}
            fresh = self.wanted(reader, number, max(line.next, floor), len(self.lines[number]))
            waiting |= set(fresh) - line.maybe
            assert stats.positions[number] <= min(waiting, default=len(self.lines[number]))
            if stats.committed is not None:
                left = waiting | line.held.keys()
                assert stats.committed[number] <= min(left, default=len(self.lines[number]))


StreamMachine.TestCase.settings = settings(
    max_examples=100 if TORTURE else 50,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
TestStreamModel = StreamMachine.TestCase
