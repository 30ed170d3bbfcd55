"""A broker against plain lists, through random histories of everything a queue is asked for.

Policies at limits, expiry, delays, priorities, dead letters, leases, bindings, transactions, changed settings, purge,
deleted messages and queues, maintenance, clean and dirty restarts. Each message has a body of its own, so the model knows where each one may
be. What is acked here is waited for, and what dead letters do is drained: a crash finds the log in a known state.
(`test_queue_model` covers what is not confirmed.)
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, invariant, precondition, rule

import inside
import qflow
from model.spool_machine import SpoolMachine
from qflow.broker import make_broker
from qflow.config import SPILL_STORES, BrokerSettings
from qflow.delivery import Delivery
from qflow.queues import admission, exits
from qflow.queues.admission import Admission
from qflow.queues.dead_letters import COUNT, QUEUE, REASON
from thorough import TORTURE

LARGEST = 300
QUEUES = ("work", "copy", "dead")
RETRY_S = 0.005
"""So long, by the clock of the model, nothing is tried again that was without room."""
POLICIES = [policy for policy in qflow.Overflow if policy is not qflow.Overflow.BLOCK]


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1_000_000_000.0

    def __call__(self) -> float:
        return self.now


class Sent:
    """What the model knows of one message in one queue."""

    def __init__(
        self, number: int, body: bytes, priority: int, due: float, expires: float | None, durable: bool
    ) -> None:
        self.number = number
        self.body = body
        self.priority = priority
        self.due = self.own_due = due
        self.expires = expires
        self.durable = durable
        self.sequence = -1
        self.deliveries = 0
        self.is_doubtful = False
        """After a crash: how often it was delivered is what the log knows."""
        self.is_spent = False
        """It was delivered too often, and is a dead letter as soon as somebody looks."""
        self.reason: str | None = None
        """Why it is a dead letter."""
        self.is_delayed = due > 0
        self.returned_ms: int | None = None
        """When it is due by the monotonic clock, where it was given back as a delayed one."""

    def rank(self) -> tuple[Any, ...]:
        """Its place in line, once it is due: of two at the same moment, what was put before what came back."""
        due = self.due if self.is_delayed else 0
        return (-self.priority, not self.is_delayed, due, self.returned_ms is not None, self.sequence)


class BrokerMachine(SpoolMachine):
    """The model: for each queue what waits, and what is held."""

    def __init__(self) -> None:
        super().__init__()
        self.never_stuck()
        self.bodies = self.waits = 0
        self.clock, self.monotonic = Clock(), Clock()
        self.waiting: dict[str, dict[int, Sent]] = {name: {} for name in QUEUES}
        self.perhaps_dead: list[Sent] = []
        """What was late and is gone: dropped, or a dead letter before that."""
        self.held: dict[str, dict[int, tuple[Delivery, Sent, float]]] = {name: {} for name in QUEUES}

    @initialize(
        durable=st.booleans(),
        priorities=st.sampled_from([1, 3]),
        policy=st.sampled_from(POLICIES),
        limit=st.sampled_from([None, None, 6]),
        ttl=st.sampled_from([None, None, 20.0]),
        max_deliveries=st.sampled_from([None, 2]),
        ack_timeout=st.sampled_from([None, 15.0]),
        buries=st.booleans(),
        capacity=st.sampled_from([0, 700, 100_000]),
        spill=st.sampled_from(SPILL_STORES),
    )
    def begin(self, spill: str, capacity: int, durable: bool, buries: bool, **behaviour: Any) -> None:
        names = {"policy": "on_overflow", "limit": "limit_messages", "ttl": "ttl_s", "ack_timeout": "ack_timeout_s"}
        self.durable = durable
        self.settings = {names.get(name, name): value for name, value in behaviour.items()}
        self.settings["dead_letter"] = "dead" if buries else None
        if not buries and self.settings["on_overflow"] is qflow.Overflow.DEAD_LETTER:
            self.settings["on_overflow"] = qflow.Overflow.REJECT
        self.broker_settings = BrokerSettings(
            capacity_bytes=capacity, spill=spill, segment_bytes="4KiB", journal_bytes="8KiB"
        )
        self.open()

    def never_stuck(self) -> None:
        """There is one thread here that could make room: who waits for more than a commit is stuck."""
        patience = Admission.patience_s

        def checked(queue: Admission, *arguments: Any) -> float:
            self.waits += 1
            assert self.waits < 4, f"a put waits for ever: {vars(queue)}"
            return patience(queue, *arguments)

        self.patch.setattr(Admission, "patience_s", checked)
        for room in (admission, exits):
            self.patch.setattr(room, "RETRY_S", RETRY_S)

    def open(self) -> None:
        self.still(make_broker(self.path, self.broker_settings, clock=self.clock, monotonic=self.monotonic))
        self.broker.declare_queue("work", durable=self.durable, **self.settings)
        self.broker.declare_queue("copy", durable=self.durable, priorities=2)
        self.broker.declare_queue("dead", durable=self.durable)
        self.broker.bind("copy", "a/+")
        self.broker.bind("work", "a/b")
        while inside.upkeep(self.broker).sweep():  # what is delayed is known only when it was read
            pass

    def queue(self, name: str) -> qflow.Queue:
        return self.broker.queue(name)

    # What is expected --------------------------------------------------------------------------------------------

    def message(self, size: int, priority: int, due: float, ttl: float | None, name: str, durable: bool = True) -> Sent:
        self.bodies += 1
        spans = [span for span in (ttl, self.settings["ttl_s"] if name == "work" else None) if span is not None]
        now_ms = int(self.clock.now * 1000)
        expires = max(due, now_ms) + min(spans) * 1000 if spans else None
        return Sent(self.bodies, b"%d:" % self.bodies + bytes(size), priority, due, expires, self.durable and durable)

    def is_late(self, sent: Sent) -> bool:
        """It is not to be delivered, and may be in the queue still, or gone."""
        return sent.is_spent or (sent.expires is not None and sent.expires <= self.clock.now * 1000)

    def depth(self, name: str) -> int:
        return len(self.waiting[name]) + len(self.held[name])

    def is_full(self, name: str, count: int) -> bool:
        limit = self.settings["limit_messages"] if name == "work" else None
        return limit is not None and self.depth(name) + count > limit

    def knows_depth(self) -> bool:
        """Nothing has expired, or all that has is there: nobody has noticed."""
        is_any_late = any(self.is_late(sent) for sent in self.waiting["work"].values())
        return not is_any_late or self.queue("work").stats().messages == self.depth("work")

    def arrive(self, name: str, messages: list[Sent], first: int | None) -> None:
        """Note what a put that returned `first` must have done, by the queue's policy."""
        if not messages:
            return
        policy = self.settings["on_overflow"]
        if first is None:
            assert name == "work"
            assert policy in (qflow.Overflow.DROP_NEWEST, qflow.Overflow.DEAD_LETTER)
            if policy is qflow.Overflow.DEAD_LETTER:
                self.bury(messages, "limit")
            return
        if self.is_full(name, len(messages)):
            assert policy is qflow.Overflow.DROP_OLDEST
            self.drop(self.depth(name) + len(messages) - self.settings["limit_messages"])
        for sequence, sent in enumerate(messages, first):
            sent.sequence = sequence
            self.waiting[name][sent.number] = sent

    def drop(self, count: int) -> None:
        """Note what a ring must have dropped."""
        waiting = self.waiting["work"]
        for _ in range(count):
            del waiting[min(waiting.values(), key=self.turn_to_go).number]

    def turn_to_go(self, sent: Sent) -> tuple[Any, ...]:
        """Its place among what a ring drops: what waits, in the order of its delivery, then what is not due."""
        if not sent.is_delayed:
            return (False, sent.priority, True, 0, False, sent.sequence)
        is_returned = sent.returned_ms is not None
        due_in = sent.returned_ms - self.now_ms() if is_returned else sent.due - int(self.clock.now * 1000)
        return (due_in > 0, sent.priority, False, due_in, is_returned, sent.sequence)

    def now_ms(self) -> int:
        """The time by the clock of what is given back."""
        return int(self.monotonic.now * 1000)

    def bury(self, messages: list[Sent], reason: str) -> None:
        for sent in messages:
            if self.settings["dead_letter"] is not None:
                dead = Sent(sent.number, sent.body, 0, 0, None, self.durable)
                dead.reason = reason
                self.waiting["dead"][sent.number] = dead

    def can_put(self, name: str, count: int) -> bool:
        """The model can tell what a put will do."""
        if not self.is_full(name, count):
            return True
        if not self.knows_depth() or count > self.settings["limit_messages"]:
            return False
        if self.settings["on_overflow"] is qflow.Overflow.DROP_OLDEST:
            return len(self.held[name]) + count <= self.settings["limit_messages"]  # else it waits
        return True

    def refuses(self, name: str, count: int) -> bool:
        return self.is_full(name, count) and self.settings["on_overflow"] is qflow.Overflow.REJECT

    # Steps -------------------------------------------------------------------------------------------------------

    @rule(
        name=st.sampled_from(["work", "work", "work", "copy"]),
        size=st.integers(0, LARGEST),
        count=st.sampled_from([1, 1, 1, 4]),
        priority=st.integers(0, 2),
        ttl=st.sampled_from([None, None, 5.0, 50.0]),
        delay=st.sampled_from([None, None, None, 3.0, 3.0, 12.0, 40.0]),
        logged=st.sampled_from([True, True, True, False]),
    )
    def put(
        self, name: str, size: int, count: int, priority: int, ttl: float | None, delay: float | None, logged: bool
    ) -> None:
        priority %= self.settings["priorities"] if name == "work" else 2
        if not self.can_put(name, count):
            return
        due = int((self.clock.now + delay) * 1000) if delay else 0
        messages = [self.message(size, priority, due, ttl, name, logged) for _ in range(count)]
        options: dict[str, Any] = {"priority": priority, "ttl_s": ttl, "delay_s": delay, "timeout_s": 0}
        if self.durable and not logged:
            options["durable"] = False
        refused = self.refuses(name, count)
        try:
            if count == 1:
                first = self.queue(name).put(messages[0].body, **options)
            else:
                sequences = self.queue(name).put_many([sent.body for sent in messages], **options)
                first = sequences[0] if sequences else None
        except qflow.QueueFull:
            assert refused
            return
        assert not refused
        self.arrive(name, messages, first)

    @precondition(lambda self: self.settings["limit_messages"] is not None)
    @rule(
        kinds=st.lists(
            st.tuples(
                st.integers(0, 2),
                st.sampled_from([None, 3.0, 5.0, 12.0]),
                st.sampled_from([None, 2.0, 4.0, 11.0]),
                st.sampled_from([None, None, 1.0]),
            ),
            min_size=4,
            max_size=6,
        )
    )
    def crowd(self, kinds: list[tuple[int, float | None, float | None, float | None]]) -> None:
        """Put some one by one, with a delay and a life or without; and give what comes first back, with a delay."""
        for priority, delay, again, ttl in kinds:
            self.put("work", 10, 1, priority, ttl, delay, True)
            held = set(self.held["work"])
            if again:
                self.get("work", 1)
            for number in set(self.held["work"]) - held:
                delivery, sent, _ = self.held["work"].pop(number)
                delivery.nack(delay_s=again)
                self.broker.engine.log.drain()
                self.give_back("work", sent, again or 0.0)

    @rule(topic=st.sampled_from(["a/b", "a/c", "b"]), size=st.integers(0, LARGEST))
    def publish(self, topic: str, size: int) -> None:
        names = {"a/b": ["work", "copy"], "a/c": ["copy"], "b": []}[topic]
        if not all(self.can_put(name, 1) for name in names):
            return
        messages = {name: self.message(size, 0, 0, None, name) for name in names}
        body = b"%d:" % self.bodies + bytes(size)
        for name, sent in messages.items():  # one body in all of them
            sent.body, sent.number = body, self.bodies if name == "work" else -self.bodies
        try:
            result = self.broker.publish(topic, body)
        except qflow.QueueFull:
            assert any(self.refuses(name, 1) for name in names)
            return
        assert set(result.sequences) == set(names)
        for name, sent in messages.items():
            self.arrive(name, [sent], result.sequences[name])

    @rule(name=st.sampled_from(QUEUES), count=st.sampled_from([1, 1, 3]))
    def get(self, name: str, count: int) -> None:
        queue = self.queue(name)
        if name == "work":
            self.release_late()
        for _ in range(count):
            ready = self.ready(name)
            try:
                delivery = self.get_one(queue)
            except qflow.QueueEmpty:
                assert not ready or any(self.held.values()), "a message is stuck"
                return
            ready = self.ready(name)  # the clock may have gone on
            ahead_ms = int(self.clock.now * 1000) - self.now_ms()
            for one in ready:
                if one.returned_ms is not None:  # of two clocks, by how long each is late
                    one.due = one.returned_ms + ahead_ms
            if name == "dead":
                self.notice_dead(delivery)
                ready = list(self.waiting[name].values())
            sent = next(sent for sent in ready if sent.body == delivery.body)
            if name == "dead":
                assert delivery.headers[REASON] == sent.reason
                assert delivery.headers[QUEUE] == "work"
                assert delivery.headers[COUNT] == 1
            else:
                assert sent is min(ready, key=Sent.rank), "out of order"
                assert delivery.sequence == sent.sequence
            if sent.is_doubtful:
                assert delivery.redelivered
                sent.deliveries = delivery.delivery_count - 1
            assert delivery.delivery_count == sent.deliveries + 1
            del self.waiting[name][sent.number]
            self.held[name][sent.number] = (delivery, sent, self.monotonic.now)

    def ready(self, name: str) -> list[Sent]:
        """What a get may return: what was given back with a delay is due by another clock."""
        return [sent for sent in self.waiting[name].values() if self.is_due(sent) and not self.is_late(sent)]

    def is_due(self, sent: Sent) -> bool:
        return sent.due <= self.clock.now * 1000 if sent.returned_ms is None else sent.returned_ms <= self.now_ms()

    def get_one(self, queue: qflow.Queue) -> Delivery:
        """Get a message; what is on its way to be a dead letter may have to be gone first."""
        for _ in range(10):
            try:
                return queue.get(0)
            except qflow.QueueEmpty:
                self.broker.engine.log.drain()
                self.monotonic.now += RETRY_S
        return queue.get(0)

    def notice_dead(self, delivery: Delivery) -> None:
        """A dead letter that nobody told the model of was late in its queue."""
        for sent in [*self.waiting["work"].values(), *self.perhaps_dead]:
            if sent.body == delivery.body and self.is_late(sent):
                self.waiting["work"].pop(sent.number, None)
                self.perhaps_dead = [other for other in self.perhaps_dead if other is not sent]
                self.bury([sent], "max_deliveries" if sent.is_spent else "expired")

    def release_late(self) -> None:
        """What is held for longer than the ack timeout goes back when somebody looks."""
        timeout = self.settings["ack_timeout_s"]
        if timeout is None:
            return
        for number, (_, sent, since) in list(self.held["work"].items()):
            if since + timeout <= self.monotonic.now:
                del self.held["work"][number]
                self.give_back("work", sent, 0.0)

    def give_back(self, name: str, sent: Sent, delay: float) -> None:
        sent.deliveries += 1
        most = self.settings["max_deliveries"] if name == "work" else None
        if most is not None and sent.deliveries >= most:
            self.bury([sent], "max_deliveries")
            return
        if delay:
            sent.is_delayed, sent.due = True, int(self.clock.now * 1000) + int(delay * 1000)
            sent.returned_ms = self.now_ms() + int(delay * 1000)
        elif sent.sequence >> 56 < 16:
            sent.is_delayed, sent.due, sent.returned_ms = False, 0, None
        else:
            ahead_ms = int(self.clock.now * 1000) - self.now_ms()
            sent.returned_ms = min(sent.own_due - ahead_ms, self.now_ms())
        self.waiting[name][sent.number] = sent

    def some_held(self, data: st.DataObject) -> tuple[str, Delivery, Sent, float] | None:
        name = data.draw(st.sampled_from([name for name in QUEUES if self.held[name]]))
        number = data.draw(st.sampled_from(sorted(self.held[name])))
        delivery, sent, since = self.held[name].pop(number)
        timeout = self.settings["ack_timeout_s"] if name == "work" else None
        if timeout is not None and since + timeout <= self.monotonic.now:  # it may have gone back, or not yet
            self.held[name][number] = (delivery, sent, since)
            return None
        return name, delivery, sent, since

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        found = self.some_held(data)
        if found is not None:
            found[1].ack(wait=True)

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), requeue=st.sampled_from([True, True, False]), delay=st.sampled_from([0.0, 0.0, 4.0]))
    def nack(self, data: st.DataObject, requeue: bool, delay: float) -> None:
        found = self.some_held(data)
        if found is None:
            return
        name, delivery, sent, _ = found
        delivery.nack(requeue, delay)
        self.broker.engine.log.drain()
        if requeue:
            self.give_back(name, sent, delay)
        elif name == "work":
            self.bury([sent], "rejected")

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), size=st.integers(0, LARGEST), commits=st.booleans(), publishes=st.booleans())
    def transaction(self, data: st.DataObject, size: int, commits: bool, publishes: bool) -> None:
        """Take one in, put two out: all of it, or nothing."""
        found = self.some_held(data)
        if found is None:
            return
        name, delivery, sent, since = found
        if not self.can_put("work", 1) or self.refuses("work", 1):
            self.held[name][sent.number] = (delivery, sent, since)
            return
        one, two = (self.message(size, 0, 0, None, target) for target in ("work", "copy"))
        tx = self.broker.transaction()
        tx.put("work", one.body)
        if publishes:
            tx.publish("a/c", two.body)
        else:
            tx.put(self.queue("copy"), two.body)
        tx.ack(delivery)
        if not commits:
            tx.rollback()
            self.held[name][sent.number] = (delivery, sent, since)
            return
        first, second = tx.commit()
        self.arrive("work", [one], first)
        self.arrive("copy", [two], second.sequences["copy"] if publishes else second)

    @rule(seconds=st.sampled_from([1.0, 4.0, 10.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.monotonic.now += seconds

    @rule()
    def maintain(self) -> None:
        """All that the maintenance thread would do."""
        inside.is_due(self.broker)
        inside.upkeep(self.broker).tick()
        self.release_late()
        while (
            inside.upkeep(self.broker).sweep()
            or inside.upkeep(self.broker).remove_settled()
            or inside.upkeep(self.broker).hollow()
        ):
            pass
        self.broker.engine.log.drain()

    @rule(
        capacity=st.sampled_from([None, 0, 500, 5_000]),
        limit=st.sampled_from([None, 4, 8]),
    )
    def alter(self, capacity: int | None, limit: int | None) -> None:
        is_ring = self.settings["on_overflow"] is qflow.Overflow.DROP_OLDEST and limit is not None
        if is_ring and (self.held["work"] or not self.knows_depth()):
            return  # what is dropped at once, and what when it comes back, is not for the model to tell
        self.broker.alter_queue("work", capacity_bytes=capacity, limit_messages=limit)
        self.settings["limit_messages"] = limit
        if is_ring:
            while inside.fit(self.queue("work")):
                pass
            self.drop(self.depth("work") - limit)

    @rule(name=st.sampled_from(["work", "work", "copy"]), data=st.data(), count=st.sampled_from([1, 3]))
    def delete(self, name: str, data: st.DataObject, count: int) -> None:
        """Messages that wait are gone; those that are held are left alone, those that are late may be gone before."""
        for _ in range(count):
            waiting = list(self.waiting[name].values())
            held = [sent for _, sent, _ in self.held[name].values()]
            if not waiting and not held:
                return
            sent = data.draw(st.sampled_from([*waiting, *held[:1]]))
            deleted = self.queue(name).delete(sent.sequence)
            assert deleted == (sent.number in self.waiting[name]) or (not deleted and self.is_late(sent))
            if sent.number in self.waiting[name]:
                del self.waiting[name][sent.number]
                if not deleted and name == "work":
                    self.perhaps_dead.append(sent)

    @rule(name=st.sampled_from(QUEUES))
    def purge(self, name: str) -> None:
        self.queue(name).purge()
        if name == "dead":
            self.perhaps_dead.clear()
        elif name == "work":
            self.perhaps_dead += filter(self.is_late, self.waiting[name].values())
        self.waiting[name].clear()
        self.held[name].clear()

    @rule()
    def delete_and_declare(self) -> None:
        self.broker.delete_queue("copy")
        self.waiting["copy"].clear()
        for delivery, _, _ in self.held["copy"].values():
            delivery.ack()  # late: a no-op
        self.held["copy"].clear()
        assert self.broker.publish("a/c", b"").sequences == {}
        self.broker.declare_queue("copy", durable=self.durable, priorities=2)
        self.broker.bind("copy", "a/+")

    @rule(dirty=st.booleans())
    def restart(self, dirty: bool) -> None:
        self.broker.engine.log.drain()
        if dirty and self.durable:
            self.crash_broker()
        else:
            dirty = False
            self.broker.close()
        most = self.settings["max_deliveries"]
        for name in QUEUES:
            for _, sent, _ in self.held[name].values():
                if not dirty or (name == "work" and most is not None and (sent.deliveries or sent.is_doubtful)):
                    sent.deliveries += 1
                self.waiting[name][sent.number] = sent
            self.held[name].clear()
            if not self.durable:
                self.perhaps_dead.clear()
            elif name == "work":
                gone = [sent for sent in self.waiting[name].values() if not sent.durable]
                self.perhaps_dead += filter(self.is_late, gone)
            self.waiting[name] = {
                number: sent for number, sent in self.waiting[name].items() if self.durable and sent.durable
            }
            for sent in self.waiting[name].values():
                sent.is_doubtful |= dirty
                sent.is_spent |= name == "work" and most is not None and sent.deliveries >= most
                sent.is_delayed, sent.due = sent.own_due > 0, sent.own_due  # a delay of a nack ends with a restart
                sent.returned_ms = None
        self.open()
        assert self.broker.recovery.problems == ()

    # After every step --------------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "broker"):
            return
        self.waits = 0
        self.broker.engine.log.drain()
        self.check_now_and_then()
        for name in QUEUES:
            stats = self.queue(name).stats()
            late = sum(map(self.is_late, self.waiting["work"].values()))
            if name == "dead":
                assert self.depth(name) <= stats.messages <= self.depth(name) + late + len(self.perhaps_dead)
            elif name == "work":
                assert self.depth(name) - late <= stats.messages <= self.depth(name)
            else:
                own = sum(map(self.is_late, self.waiting[name].values()))
                assert self.depth(name) - own <= stats.messages <= self.depth(name)
            assert stats.lost_total == stats.quarantined_total == 0


class RingMachine(BrokerMachine):
    """The same of a ring that is small, and full most of the time."""

    @initialize(
        durable=st.booleans(),
        priorities=st.sampled_from([1, 3]),
        limit=st.sampled_from([4, 6]),
        capacity=st.sampled_from([0, 700, 100_000]),
        buries=st.booleans(),
    )
    def begin(self, capacity: int, durable: bool, buries: bool, **behaviour: Any) -> None:
        behaviour |= {"policy": qflow.Overflow.DROP_OLDEST, "ttl": None, "max_deliveries": None, "ack_timeout": None}
        BrokerMachine.begin(self, "files", capacity, durable, buries, **behaviour)


for machine in (BrokerMachine, RingMachine):
    machine.TestCase.settings = settings(
        max_examples=100 if TORTURE else 50,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
TestBrokerModel = BrokerMachine.TestCase
TestRingModel = RingMachine.TestCase
