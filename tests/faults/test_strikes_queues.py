"""A signal handler strikes calls of queues and of the broker, at every place where one can.

It raises; or it uses the broker, and the call goes on; or it closes the broker. The call is done or not done then, and
all books agree.
"""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
from faults.seams import PATIENCE_S, in_thread
from faults.strikes import TORTURE, Strike, places, reach
from qflow.queues.queue import parts_of

MOST = 2
"""Places of each call, on each kind of queue, that are struck in a normal run by a handler that raises."""
MOST_USED = 1
"""The same for one that uses the broker."""
MOST_CLOSED = 4
"""Calls, on each kind of queue, that one strikes that closes it: the spool is opened again for each."""
NEVER = 2**60
LIMIT = 8
KINDS: dict[str, dict[str, Any]] = {
    "transient": {"durable": False},
    "durable": {"durable": True},
    "limited": {"durable": False, "limit_messages": LIMIT},
    "ranked": {"durable": True, "max_deliveries": 5, "priorities": 2, "dead_letter": "dead"},
    "timed": {"durable": False, "ttl_s": 1000, "ack_timeout_s": 100},
}


class Round:
    """One call that is struck: what is there before, what it is to change, and whom it may leave with something."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.name = f"name {number}"
        self.base = [b"%d base %d" % (number, index) for index in range(4)]
        self.acked: list[bytes] = []
        """What the call settles."""
        self.maybe: list[bytes] = []
        """What it may settle."""
        self.bodies: list[bytes] = []
        """What it puts."""
        self.others: list[bytes] = []
        """What a handler put."""
        self.others_stay = True
        """The call does not take them away."""
        self.held: list[Any] = []
        """What the caller holds."""
        self.keeps = True
        """It may hold messages when the call was struck."""
        self.dead = False
        """What is settled becomes a dead letter, where the queue has any."""
        self.batch: Any = None

    @property
    def is_closed(self) -> bool:
        """A handler has closed the broker: queues say that they are empty."""
        return self.world.broker.closed

    @property
    def broker(self) -> qflow.Broker:
        return self.world.broker

    @property
    def queue(self) -> qflow.Queue:
        return self.world.queue

    def new(self, number: int) -> list[bytes]:
        """Return the bodies of messages that the call puts."""
        self.bodies = [b"%d new %d" % (self.number, index) for index in range(number)]
        return self.bodies

    def use_broker(self) -> None:
        """Do what a handler might do."""
        body = b"%d other" % self.number
        self.broker.stats()
        self.broker.queue("other").put(body)
        with suppress(qflow.QueueFull):
            self.queue.put(body, timeout_s=0)
            self.others = [body]

    def close_broker(self) -> None:
        before = time.monotonic()
        self.broker.close()
        assert time.monotonic() - before < 8, "closing takes long"


class World:
    """A spool with a queue of some kind, and others."""

    def __init__(self, path: Path, kind: str) -> None:
        self._path = path
        self.settings = KINDS[kind]
        self.durable: bool = self.settings["durable"]
        self.rounds = 0
        self.counts: dict[str, int] = {}
        """How many places each call has."""
        self.renew()

    def renew(self) -> None:
        """Begin with a new spool, for the next call."""
        self.path = self._path / str(self.rounds)
        self._open()

    def _open(self) -> None:
        self.broker = qflow.open(self.path, capacity_bytes="1MiB")
        self.other = self.broker.declare_queue("other")
        self.dead = self.broker.declare_queue("dead")
        self.queue = self.broker.declare_queue("q", **self.settings)

    def begin(self, name: str) -> Round:
        """Put some messages, and do what comes before a call."""
        self.rounds += 1
        here = Round(self, self.rounds)
        self.queue.put_many(here.base)
        before = CALLS[name].before
        if before is not None:
            before(here)
        return here

    def reopen(self) -> None:
        if not self.broker.closed:
            before = time.monotonic()
            self.broker.close()
            assert time.monotonic() - before < 8, "closing takes long"
        self._open()
        assert self.broker.recovery.clean

    def drained(self, queue: qflow.Queue) -> Counter[bytes]:
        """Return what a queue delivers, and settle it."""
        found: Counter[bytes] = Counter()
        while queue.stats().messages:
            batch = queue.get_many(1000, PATIENCE_S)
            found.update(batch.bodies)
            batch.ack(wait=True)
        return found

    def check_books(self) -> None:
        """Nothing is charged, reserved, held or waiting."""
        broker: Any = self.broker
        broker.engine.log.drain()
        for queue in (self.queue, self.other, self.dead):
            assert inside.left_behind(queue) == {}
            stats = queue.stats()
            assert (stats.messages, stats.acquired_messages, stats.resident_bytes) == (0, 0, 0)
        assert broker.engine.desk.borrowed == 0
        assert sorted(broker.queues()) == ["dead", "other", "q"]
        assert broker.check() == []

    def verify(self, name: str, here: Round, struck: bool) -> None:
        """What was confirmed is delivered once, and what the call was to do is done, or not."""
        if struck and not here.keeps:
            assert self.queue.stats().acquired_messages == 0, "what nobody got is held"
        for held in here.held:
            with suppress(qflow.AlreadySettled):
                held.nack()
        if CALLS[name].after is not None:
            CALLS[name].after(here, struck)
        self.check_contents(here, struck)
        self.check_books()

    def check_contents(self, here: Round, struck: bool) -> None:
        self.broker.engine.log.drain()  # type: ignore[attr-defined]
        found, others, dead = self.drained(self.queue), self.drained(self.other), self.drained(self.dead)
        assert max([*found.values(), *others.values(), *dead.values()], default=0) <= 1, (found, others, dead)
        for body in here.others:
            assert others.pop(body) == 1
            assert found.pop(body, 0) == 1 or not here.others_stay
        left = {*here.base} - {*here.acked, *here.maybe}
        assert left <= set(found)
        acked = [body not in found for body in here.acked]
        put = [body in found for body in here.bodies]
        assert len({*acked, *put}) <= 1, (acked, put)
        if not struck:
            assert all([*acked, *put])
        assert set(found) <= {*here.base, *here.bodies}
        gone = set(here.acked) - set(found)
        assert set(dead) == (gone if here.dead and self.settings.get("dead_letter") else set())


Act = Callable[[Round], object]
After = Callable[[Round, bool], object]


class Call:
    """A call, what comes before it, what is looked at after it, and the kinds of queues where it makes sense."""

    def __init__(self, act: Act, before: Act | None, after: After | None, kinds: tuple[str, ...]) -> None:
        self.act, self.before, self.after, self.kinds = act, before, after, kinds


CALLS: dict[str, Call] = {}


def call(
    name: str, before: Act | None = None, after: After | None = None, kinds: tuple[str, ...] = tuple(KINDS)
) -> Callable[[Act], Act]:
    """Have a call struck."""

    def note(act: Act) -> Act:
        CALLS[name] = Call(act, before, after, kinds)
        return act

    return note


def hold_one(here: Round) -> None:
    here.held = [here.queue.get(0)]


def hold_three(here: Round) -> None:
    here.held = [here.queue.get(0) for _ in range(3)]


def hold_batch(here: Round) -> None:
    here.batch = here.queue.get_many(3, 0)
    here.held = [here.batch]


def hold_all(here: Round) -> None:
    here.held = [here.queue.get_many(1000, 0)]


def fill(here: Round) -> None:
    more = [b"%d more %d" % (here.number, index) for index in range(LIMIT - len(here.base))]
    here.queue.put_many(more)
    here.base += more


@call("put")
def _put(here: Round) -> None:
    here.queue.put(here.new(1)[0])


@call("put with headers")
def _put_headers(here: Round) -> None:
    here.queue.put(here.new(1)[0], headers={"a": 1})


@call("put delayed")
def _put_delayed(here: Round) -> None:
    here.queue.put(here.new(1)[0], delay_s=0.0001)


@call("put of a priority", kinds=("ranked",))
def _put_priority(here: Round) -> None:
    here.queue.put(here.new(1)[0], priority=1)


@call("put that is not logged", kinds=("durable",))
def _put_unlogged(here: Round) -> None:
    here.queue.put(here.new(1)[0], durable=False)


def bind_two(here: Round) -> None:
    """Have what is published go into the queue, and into another one of its kind."""
    fan = here.broker.declare_queue(f"{here.name} fan", durable=here.world.durable)
    fan.put(b"")  # borrows its memory
    fan.get(0).ack(wait=True)
    for queue in (here.queue, fan):
        here.broker.bind(queue, "fan/#")


def in_both(here: Round, struck: bool) -> None:
    """Both queues have it, or neither."""
    fan = here.broker.queue(f"{here.name} fan")
    found = []
    for queue in (here.queue, fan):
        here.broker.unbind(queue, "fan/#")
        found.append(False)
        if len(queue):
            batch = queue.get_many(1000)
            found[-1] = here.bodies[0] in batch.bodies
            batch.nack()
    assert found in ([True, True], [False, False]) if struck else found == [True, True]
    here.world.drained(fan)
    assert inside.left_behind(fan) == {}
    here.broker.delete_queue(fan.name)


@call("publish into several queues", bind_two, in_both, kinds=("transient", "durable", "ranked"))
def _publish(here: Round) -> None:
    here.broker.publish("fan/out", here.new(1)[0])


@call("put_nowait")
def _put_nowait(here: Round) -> None:
    here.queue.put_nowait(here.new(1)[0])


@call("put_nowait at a limit", fill, kinds=("limited",))
def _put_at_limit(here: Round) -> None:
    with pytest.raises(qflow.QueueFull):
        here.queue.put_nowait(b"no room")


@call("put that waits at a limit", fill, kinds=("limited",))
def _put_waiting(here: Round) -> None:
    with pytest.raises(qflow.QueueFull):
        here.queue.put(b"no room", timeout_s=0.001)


@call("put_many")
def _put_many(here: Round) -> None:
    here.queue.put_many(here.new(3))


@call("put_many with headers")
def _put_many_headers(here: Round) -> None:
    here.queue.put_many(here.new(3), headers={"a": 1})


@call("submit")
def _submit(here: Round) -> None:
    here.queue.submit(here.new(1)[0]).result()


@call("get")
def _get(here: Round) -> None:
    here.keeps = False
    here.held.append(here.queue.get(0))
    here.keeps = True


@call("get in vain", hold_all)
def _get_in_vain(here: Round) -> None:
    with suppress(qflow.QueueEmpty):
        here.held.append(here.queue.get(0.001))  # what a handler puts meanwhile


@call("get_many")
def _get_many(here: Round) -> None:
    here.keeps = False
    here.held.append(here.queue.get_many(3, 0))
    here.keeps = True


@call("ack", hold_one)
def _ack(here: Round) -> None:
    here.acked = [here.held[0].body]
    here.held[0].ack()


@call("ack and wait", hold_one)
def _ack_wait(here: Round) -> None:
    here.acked = [here.held[0].body]
    here.held[0].ack(wait=True)


@call("ack of a batch", hold_batch)
def _ack_batch(here: Round) -> None:
    here.acked = here.batch.bodies
    here.batch.ack()


@call("ack of a batch and wait", hold_batch)
def _ack_batch_wait(here: Round) -> None:
    here.acked = here.batch.bodies
    here.batch.ack(wait=True)


@call("ack of a part", hold_batch)
def _ack_part(here: Round) -> None:
    here.acked = [here.batch[1].body]
    here.batch[1].ack()


@call("ack of a part and wait", hold_batch)
def _ack_part_wait(here: Round) -> None:
    here.acked = [here.batch[1].body]
    here.batch[1].ack(wait=True)


@call("ack_many and wait", hold_three)
def _ack_many(here: Round) -> None:
    here.acked = [held.body for held in here.held]
    here.queue.ack_many(here.held, wait=True)


@call("transaction that acks and puts", hold_one)
def _transaction(here: Round) -> None:
    here.acked = [here.held[0].body]
    with here.broker.transaction() as tx:
        tx.ack(here.held[0])
        tx.put(here.queue, here.new(1)[0])


@call("transaction that puts", kinds=("transient", "durable", "limited"))
def _transaction_put(here: Round) -> None:
    with here.broker.transaction() as tx:
        tx.put(here.queue, here.new(1)[0])


@call("nack", hold_one)
def _nack(here: Round) -> None:
    here.held[0].nack()


@call("nack delayed", hold_one)
def _nack_delayed(here: Round) -> None:
    here.held[0].nack(delay_s=0.0001)


@call("nack of a batch", hold_batch)
def _nack_batch(here: Round) -> None:
    here.batch.nack()


@call("nack of a part", hold_batch)
def _nack_part(here: Round) -> None:
    here.batch[1].nack()


@call("nack without requeueing", hold_one)
def _nack_away(here: Round) -> None:
    here.dead = True
    here.acked = [here.held[0].body]
    here.held[0].nack(requeue=False)


def spend_without_room(here: Round) -> None:
    """Have the first message delivered as often as it may be, and no room for it as a dead letter."""
    for _ in range(here.world.settings["max_deliveries"]):
        here.queue.get(0).nack()
    exits = parts_of(here.queue).exits
    exits.bury = lambda *_: False
    here.queue.get(0).nack()  # from now on gets go past the first
    here.acked, here.dead = here.base[:1], True


def make_room(here: Round, struck: bool) -> None:
    exits = parts_of(here.queue).exits
    exits.bury, exits._bury_again_at = exits.context.shared.bury, 0.0


@call("get that goes past a message", spend_without_room, make_room, kinds=("ranked",))
def _get_past(here: Round) -> None:
    here.held = [here.queue.get(0)]
    assert here.held[0].body == here.base[1]


@call("extend", hold_one)
def _extend(here: Round) -> None:
    here.held[0].extend(30)


@call("purge", hold_one)
def _purge(here: Round) -> None:
    here.others_stay = False
    here.acked = here.base
    here.queue.purge()


def choose(here: Round) -> None:
    """Have the second message deleted."""
    here.batch = [entry.sequence for entry in here.queue.browse()][1]
    here.acked = [here.base[1]]


def choose_spilled(here: Round) -> None:
    choose(here)
    list(here.queue.browse())[1].spill()


def choose_delayed(here: Round) -> None:
    choose(here)
    held = here.queue.get_many(2, 0)
    held[1].nack(delay_s=0.0001)
    held.nack()


@call("delete", choose)
def _delete_message(here: Round) -> None:
    assert here.queue.delete(here.batch)


@call("delete of a spilled message", choose_spilled)
def _delete_spilled(here: Round) -> None:
    assert here.queue.delete(here.batch)


@call("delete of what was given back for later", choose_delayed, kinds=("durable", "timed"))
def _delete_delayed(here: Round) -> None:
    assert here.queue.delete(here.batch)


def choose_two(here: Round) -> None:
    """Have two messages deleted, or moved: each by itself."""
    here.batch = [entry.sequence for entry in here.queue.browse()][1:3]
    here.maybe = here.base[1:3]


def in_one_queue(here: Round, struck: bool) -> None:
    """What was to be moved is in the other queue, or where it was."""
    here.world.broker.engine.log.drain()  # type: ignore[attr-defined]
    batch = here.world.other.get_many(1000, 0)
    here.acked, here.maybe = [body for body in batch.bodies if body in here.maybe], []
    batch.nack()
    assert struck or len(here.acked) == 2


@call("delete of several messages", choose_two)
def _delete_many(here: Round) -> None:
    assert here.queue.delete_many(here.batch) == here.batch or here.is_closed


@call("move of some messages", choose_two, in_one_queue)
def _redrive_chosen(here: Round) -> None:
    here.broker.redrive("q", to="other", sequences=here.batch)


def move_all(here: Round) -> None:
    here.maybe = here.base


def all_in_one_queue(here: Round, struck: bool) -> None:
    in_one_queue(here, struck=True)
    assert struck or set(here.acked) == set(here.base)


@call("move of the first messages", move_all, all_in_one_queue)
def _redrive_all(here: Round) -> None:
    here.broker.redrive("q", to="other", limit=len(here.base))


@call("browse")
def _browse(here: Round) -> None:
    assert len(list(here.queue.browse())) >= len(here.base) or here.is_closed


@call("statistics and length", hold_one)
def _look(here: Round) -> None:
    assert here.queue.stats().acquired_messages == 1 or here.is_closed
    assert len(here.queue) >= 3 or here.is_closed


def no_consumer(here: Round, struck: bool) -> None:
    """One that nobody was given takes nothing; what the others acked is done."""
    for consumer in list(parts_of(here.queue).consumers.listed):  # type: ignore[attr-defined]
        assert (here.batch is not None and consumer is inside.consuming(here.batch)) or not consumer.running
        consumer.close()


@call("consume", after=no_consumer)
def _consume(here: Round) -> None:
    here.others_stay = False
    here.maybe = here.base
    here.batch = here.queue.consume(lambda delivery: None, prefetch=2)


@call("close of a consumer", lambda here: consume(here), after=no_consumer)
def _close_consumer(here: Round) -> None:
    here.others_stay = False
    here.maybe = here.base
    here.batch.close()


def consume(here: Round) -> None:
    here.batch = here.queue.consume(lambda delivery: None, prefetch=2)


def declared(here: Round, struck: bool) -> None:
    """The queue is there, or can be made, and works; it is deleted."""
    assert struck or here.name in here.broker.queues()
    queue = here.broker.declare_queue(here.name, **here.world.settings)
    queue.put(b"1")
    assert here.world.drained(queue) == {b"1": 1}
    here.broker.delete_queue(here.name)


@call("declare_queue", after=declared)
def _declare(here: Round) -> None:
    here.broker.declare_queue(here.name, **here.world.settings)


def declare_one(here: Round) -> None:
    here.batch = here.broker.declare_queue(here.name, **here.world.settings)
    here.batch.put(b"1")


def altered(here: Round, struck: bool) -> None:
    """It has the one setting or the other, and can be changed again."""
    assert here.batch.settings.max_message_bytes in ((2**20, 2**26) if struck else (2**20,))
    here.broker.alter_queue(here.batch, max_message_bytes="2MiB")
    assert here.batch.settings.max_message_bytes == 2**21
    here.broker.delete_queue(here.name)


@call("alter_queue", declare_one, altered)
def _alter(here: Round) -> None:
    here.broker.alter_queue(here.name, max_message_bytes="1MiB")


def bound(here: Round, struck: bool) -> None:
    """The binding is there, or not; it can be made again, and taken away."""
    assert struck or here.name in here.broker.publish("t/x", b"2").sequences
    here.broker.bind(here.name, "t/#")
    assert set(here.broker.publish("t/x", b"2").sequences) == {here.name}
    unbound(here, True)


def unbound(here: Round, struck: bool) -> None:
    if struck:
        here.broker.bind(here.name, "t/#")
        here.broker.unbind(here.name, "t/#")
    assert not here.broker.publish("t/x", b"2").sequences
    here.broker.delete_queue(here.name)


@call("bind", declare_one, bound)
def _bind(here: Round) -> None:
    here.broker.bind(here.name, "t/#")


def bind_one(here: Round) -> None:
    declare_one(here)
    here.broker.bind(here.name, "t/#")


@call("unbind", bind_one, unbound)
def _unbind(here: Round) -> None:
    here.broker.unbind(here.name, "t/#")


def deleted(here: Round, struck: bool) -> None:
    """It is as it was, or gone; another of its name is empty."""
    if here.name in here.broker.queues():
        assert struck
        assert here.world.drained(here.batch) == {b"1": 1}
        here.broker.delete_queue(here.name)
    with pytest.raises(qflow.QueueDeleted):
        here.batch.put(b"1")
    declared(here, True)


@call("delete_queue", bind_one, deleted)
def _delete(here: Round) -> None:
    here.broker.delete_queue(here.name)


def declare_with_keys(here: Round) -> None:
    here.batch = here.broker.declare_queue(here.name, **here.world.settings, dedupe_window_s=100)


def once(here: Round, struck: bool) -> None:
    """It is there once, whoever put it."""
    here.batch.put(b"1", dedupe_key="k")
    assert here.world.drained(here.batch) == {b"1": 1}
    here.broker.delete_queue(here.name)


@call("put with a dedupe_key", declare_with_keys, once, kinds=("durable", "ranked"))
def _put_once(here: Round) -> None:
    here.batch.put(b"1", dedupe_key="k")


def all_declared(here: Round, struck: bool) -> None:
    """All of them are there, or can be made."""
    names = [f"{here.name} {number}" for number in range(3)]
    assert struck or not set(names) - set(here.broker.queues())
    for queue in here.broker.declare_queues(names, **here.world.settings):
        queue.put(b"1")
        assert here.world.drained(queue) == {b"1": 1}
        here.broker.delete_queue(queue.name)


@call("declare_queues", after=all_declared)
def _declare_all(here: Round) -> None:
    here.broker.declare_queues([f"{here.name} {number}" for number in range(3)], **here.world.settings)


def goes_on(here: Round, struck: bool) -> None:
    here.queue.resume()
    here.queue.on_slow_consumer(None)


@call("pause and resume", after=goes_on)
def _pause(here: Round) -> None:
    here.queue.pause()
    here.queue.resume()


@call("on_slow_consumer", hold_one, goes_on)
def _watch(here: Round) -> None:
    here.queue.on_slow_consumer(100)


def scheduled(here: Round, struck: bool) -> None:
    """It is there, or can be made; and ended."""
    assert struck or here.name in [one.name for one in here.broker.schedules()]
    here.broker.schedule(here.name, here.queue, b"1", every_s=3600)
    here.broker.cancel_schedule(here.name)
    assert here.broker.schedules() == []


@call("schedule", after=scheduled, kinds=("durable", "ranked"))
def _schedule(here: Round) -> None:
    here.broker.schedule(here.name, here.queue, b"1", every_s=3600)


def schedule_one(here: Round) -> None:
    here.broker.schedule(here.name, here.queue, b"1", every_s=3600)


def cancelled(here: Round, struck: bool) -> None:
    there = here.broker.schedules()
    assert struck or not there
    if there:
        here.broker.cancel_schedule(here.name)
    assert here.broker.schedules() == []


@call("cancel_schedule", schedule_one, cancelled, kinds=("durable", "ranked"))
def _cancel(here: Round) -> None:
    here.broker.cancel_schedule(here.name)


@call("snapshot", kinds=("durable",))
def _snapshot(here: Round) -> None:
    here.broker.snapshot(f"{here.broker.path} copy {here.number}")


@call("compact", kinds=("durable",))
def _compact(here: Round) -> None:
    here.broker.compact()


@call("statistics of the broker")
def _stats(here: Round) -> None:
    assert here.broker.stats().messages >= 4


@call("check")
def _check(here: Round) -> None:
    assert here.broker.check() == []


CASES = [(kind, name) for kind in KINDS for name, found in CALLS.items() if kind in found.kinds]
CASE_IDS = [f"{kind}: {name}" for kind, name in CASES]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, World]]:
    """One spool for each kind of queue."""
    made = {kind: World(tmp_path_factory.mktemp("strikes"), kind) for kind in KINDS}
    yield made
    for world in made.values():
        world.reopen()
        world.check_books()
        world.broker.close()


@pytest.fixture(scope="module")
def seed() -> int:
    number = random.randrange(2**32)
    print(f"seed {number}")
    return number


def count_places(world: World, name: str) -> int:
    """Return how many places a call has. The first run opens what is opened once."""
    if name not in world.counts:
        for _ in range(2):
            strike, _ = strike_once(world, name, NEVER, None)
            world.counts[name] = strike.seen
    return world.counts[name]


@pytest.mark.parametrize(("kind", "name"), CASES, ids=CASE_IDS)
def test_a_handler_that_raises_finds_a_call_done_or_not_done(
    worlds: dict[str, World], kind: str, name: str, seed: int
) -> None:
    """At any place: nothing is kept for it, nothing is lost or doubled, and nobody hangs."""
    world = worlds[kind]
    number = count_places(world, name)
    struck = 0
    for at in places(number, MOST, seed):
        strike, ended = reach(at, lambda at: strike_once(world, name, at, None))
        struck += ended
        assert ended == (strike.where is not None)
    report(kind, name, "raises", number, struck)
    assert struck or not number


@pytest.mark.parametrize(("kind", "name"), CASES, ids=CASE_IDS)
def test_a_handler_may_use_the_broker(worlds: dict[str, World], kind: str, name: str, seed: int) -> None:
    """The call goes on as if nothing had been."""
    world = worlds[kind]
    number = count_places(world, name)
    struck = 0
    for at in places(number, MOST_USED, seed):
        strike, _ = reach(at, lambda at: strike_once(world, name, at, Round.use_broker))
        struck += strike.where is not None
    report(kind, name, "uses the broker", number, struck)
    assert struck or not number


@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_may_close_the_broker(worlds: dict[str, World], kind: str, seed: int) -> None:
    """The call ends as confirmed or refused, and the spool is clean."""
    world = worlds[kind]
    names = [name for name, found in CALLS.items() if kind in found.kinds]
    closed = 0
    for name in names if TORTURE else random.Random(f"{seed} {kind}").sample(names, MOST_CLOSED):
        number = count_places(world, name)
        struck = 0
        for at in places(number, 1, seed):
            here = world.begin(name)
            strike = Strike(at, here.close_broker)
            with suppress(qflow.BrokerClosed, qflow.AlreadySettled):  # what was held went back
                strike.run(lambda: CALLS[name].act(here))  # noqa: B023
            assert (strike.where is None) != world.broker.closed
            struck += world.broker.closed
            check_reopened(world, here, strike)
        closed += struck
        report(kind, name, "closes the broker", number, struck)
    assert closed


HANDLERS: dict[str, Callable[[Round], object] | None] = {
    "raises": None,
    "uses the broker": lambda here: use_if_open(here),
    "closes the broker": Round.close_broker,
}


def use_if_open(here: Round) -> None:
    """Use a broker that may be closing."""
    here.others_stay = False
    with suppress(qflow.BrokerClosed):
        here.use_broker()


@pytest.mark.parametrize("what", HANDLERS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_close_of_a_broker_can_be_struck(worlds: dict[str, World], kind: str, what: str, seed: int) -> None:
    """It goes on: the spool is closed, and clean."""
    world, handler = worlds[kind], HANDLERS[what]
    here, strike = world.begin("put"), Strike(NEVER)
    strike.run(world.broker.close)
    check_reopened(world, here, strike)
    number, struck = strike.seen, 0
    for at in places(number, 1, seed):
        here = world.begin("get")
        hold_batch(here)
        strike = Strike(at, None if handler is None else lambda: handler(here))  # noqa: B023
        strike.run(world.broker.close)
        struck += strike.where is not None
        check_reopened(world, here, strike)
    report(kind, "close", what, number, struck)
    assert struck


def check_reopened(world: World, here: Round, strike: Strike) -> None:
    """The spool opens clean, and has what was confirmed."""
    try:
        in_thread(world.reopen)
        if world.durable:
            in_thread(lambda: world.check_contents(here, True))
        else:
            in_thread(lambda: [world.drained(queue) for queue in (world.other, world.dead)])
        for name in [name for name in world.broker.queues() if name.startswith(here.name)]:
            in_thread(lambda: world.broker.delete_queue(name))  # noqa: B023
        for one in world.broker.schedules():
            in_thread(lambda: world.broker.cancel_schedule(one.name))  # noqa: B023
        in_thread(world.check_books)
    except BaseException as error:
        error.add_note(f"struck at {strike.where}")
        world.renew()
        raise


def strike_once(world: World, name: str, at: int, handler: Callable[[Round], object] | None) -> tuple[Strike, bool]:
    """Strike one call; check what is left."""
    here = world.begin(name)
    strike = Strike(at, None if handler is None else lambda: handler(here))
    try:
        ended = strike.run(lambda: CALLS[name].act(here))
        gc.collect(0)
        in_thread(lambda: world.verify(name, here, ended))
    except BaseException as error:
        error.add_note(f"struck at place {at}: {strike.where}")
        world.renew()
        raise
    return strike, ended


def report(kind: str, name: str, what: str, number: int, struck: int) -> None:
    if TORTURE:
        print(f"{kind} queue, {name}: a handler {what} at {struck} of {number} places")
