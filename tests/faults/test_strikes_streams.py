"""A signal handler strikes calls of streams, subscriptions and transactions, at every place where one can.

It raises; or it uses the broker, and the call goes on; or it closes the broker. The call is done or not done then, and
all books agree.
"""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
from faults.seams import in_thread
from faults.strikes import TORTURE, Strike, places, reach
from qflow.queues.queue import parts_of

MOST = 5
"""Places of each call that are struck in a normal run, for each kind of handler."""
WHOLE = {"get", "get_many"}
"""Calls of which each place is struck by a handler that raises: they are few, and after one of them much is lost."""
MOST_CLOSED = 1
"""The same for one that closes: the spool is opened again for each."""
NEVER = 2**60


class Round:
    """One call that is struck: what is there before, what it is to change, and whom it may leave with something."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.base = [b"%d base %d" % (number, index) for index in range(4)]
        self.acked: list[bytes] = []
        """What the call acks."""
        self.gone: list[bytes] = []
        """What it has acked for sure."""
        self.maybe: list[bytes] = []
        """What it may have acked, by itself."""
        self.published: list[bytes] = []
        self.put: list[bytes] = []
        self.others: list[bytes] = []
        """What a handler published and put."""
        self.held: list[Any] = []
        """What the call has given to its caller."""
        self.opened: list[qflow.Subscription] = []
        self.sub: qflow.Subscription
        self.keeps = True
        """It may hold messages when the call was struck."""
        self.batch: Any = None
        self.one: Any = None

    @property
    def broker(self) -> qflow.Broker:
        return self.world.broker

    def publish(self, count: int) -> list[bytes]:
        """Return the bodies of messages that the call publishes."""
        self.published = [b"%d new %d" % (self.number, index) for index in range(count)]
        return self.published

    def use_broker(self) -> None:
        """Do what a handler might do."""
        self.others = [b"%d other" % self.number]
        self.broker.stats()
        self.broker.publish("t/other", self.others[0])
        self.broker.queue("q").put(self.others[0])

    def close_broker(self) -> None:
        before = time.monotonic()
        self.broker.close()
        assert time.monotonic() - before < 8, "closing takes long"


class World:
    """A spool with a stream, a durable subscription, and a queue."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rounds = 0
        self.renew()

    def renew(self) -> None:
        """Begin with a new spool, for the next call."""
        self.path = self._path / str(self.rounds)
        self.broker = qflow.open(self.path)
        self.stream = self.broker.declare_stream("s", topics=["t/#"], partitions=2)
        self.queue = self.broker.declare_queue("q", durable=True)
        self.broker.bind("q", "t/both")
        self.broker.subscribe("s", name="n", start="earliest").close()

    def begin(self) -> Round:
        """Publish some messages and open the subscription."""
        self.rounds += 1
        here = Round(self, self.rounds)
        self.broker.publish_many([("t/base", body) for body in here.base])
        here.sub = self.broker.subscribe("s", name="n")
        return here

    def reopen(self) -> None:
        if not self.broker.closed:
            before = time.monotonic()
            in_thread(self.broker.close)
            assert time.monotonic() - before < 8, "closing takes long"
        self.broker = qflow.open(self.path)
        assert self.broker.recovery.clean
        self.stream, self.queue = self.broker.stream("s"), self.broker.queue("q")

    def drained(self) -> tuple[list[bytes], list[bytes]]:
        """Return what the subscription and the queue deliver, and settle it."""
        with self.broker.subscribe("s", name="n", follow=False) as sub:
            found = sub.get_many(1000, 0)
            streamed = found.bodies
            found.ack(wait=True)
        batch = self.queue.get_many(1000, 0)
        queued = batch.bodies if batch else []
        if batch:
            batch.ack(wait=True)
        return streamed, queued

    def check_books(self) -> None:
        """Nothing is charged, reserved, held, enlisted or waiting."""
        broker: Any = self.broker
        broker.engine.log.drain()
        streams, room = broker.engine.streams, broker.engine.streams.room
        assert (room._incoming, room._held, room._slack, list(room._line)) == (0, 0, 0, [])
        assert not streams.producers._busy
        assert broker.engine.desk.borrowed == 0
        for partition in self.stream.partitions:
            assert not partition.joining
        for cursor in {*self.stream.cursors.values(), *self.stream.open_cursors()}:
            assert not cursor.members, cursor
            assert (cursor.held.unsettled, cursor.claims._done, cursor._line.watching) == (0, [], 0), cursor
        assert self.queue.stats().acquired_messages == 0
        assert not parts_of(self.queue).held.leaving  # type: ignore[attr-defined]
        assert not parts_of(self.queue).admission.pending  # type: ignore[attr-defined]
        assert broker.check() == []

    def verify(self, here: Round, struck: bool) -> None:
        """What was confirmed is delivered once, and what the call was to do is done, or not."""
        if struck and not here.keeps:
            assert inside.cursor(here.sub).held.unsettled == 0, "what nobody got is held"
        for held in here.held:
            held.nack()
        for sub in [here.sub, *here.opened]:
            sub.close()
        self.check_contents(here, struck)
        self.check_books()

    def check_contents(self, here: Round, struck: bool) -> None:
        self.broker.engine.log.drain()  # type: ignore[attr-defined]
        streamed, queued = map(Counter, self.drained())
        assert max([*streamed.values(), *queued.values()], default=0) <= 1, (streamed, queued)
        for body in here.others:
            assert streamed.pop(body) == queued.pop(body) == 1
        assert [body for body in here.gone if body in streamed] == []
        left = [body for body in here.base if body not in {*here.acked, *here.gone, *here.maybe}]
        assert [body for body in left if body not in streamed] == []
        acked = [body not in streamed for body in here.acked]
        published = [body in streamed for body in here.published]
        put = [body in queued for body in here.put]
        assert len({*acked, *published, *put}) <= 1, (acked, published, put)
        if not struck:
            assert all([*acked, *published, *put])
        assert set(streamed) <= {*here.base, *here.published}
        assert set(queued) <= set(here.put)


Before = Callable[[Round], object]
Act = Callable[[Round], object]
CALLS: dict[str, tuple[Before | None, Act]] = {}
COUNTS: dict[str, int] = {}
"""How many places each has."""


def call(name: str, before: Before | None = None) -> Callable[[Act], Act]:
    """Have a call struck."""

    def note(act: Act) -> Act:
        CALLS[name] = before, act
        return act

    return note


def hold_batch(here: Round) -> None:
    here.batch = here.sub.get_many(3, 0)


def hold_one(here: Round) -> None:
    here.one = here.sub.get(0)


@call("publish")
def _publish(here: Round) -> None:
    (body,) = here.publish(1)
    here.broker.publish("t/a", body)


@call("publish with a key")
def _publish_key(here: Round) -> None:
    (body,) = here.publish(1)
    here.broker.publish("t/a", body, key="k", headers={"a": 1})


@call("publish of a producer")
def _publish_producer(here: Round) -> None:
    (body,) = here.publish(1)
    here.broker.publish("t/a", body, producer="p", number=here.number)


@call("publish_many")
def _publish_many(here: Round) -> None:
    here.broker.publish_many([(f"t/{index}", body) for index, body in enumerate(here.publish(3))])


@call("publish_many of a producer")
def _publish_many_producer(here: Round) -> None:
    messages = [(f"t/{index}", body) for index, body in enumerate(here.publish(3))]
    here.broker.publish_many(messages, producer="p", number=here.number)


@call("publish to a queue, too")
def _publish_both(here: Round) -> None:
    here.put = here.publish(1)
    here.broker.publish("t/both", here.put[0])


@call("submit_publish")
def _submit_publish(here: Round) -> None:
    (body,) = here.publish(1)
    here.broker.submit_publish("t/a", body).result()


@call("subscribe")
def _subscribe(here: Round) -> None:
    here.opened.append(here.broker.subscribe("s", "t/#"))


@call("subscribe with a name", lambda here: here.broker.subscribe("s", name="other").close())
def _subscribe_name(here: Round) -> None:
    here.opened.append(here.broker.subscribe("s", name="other"))


@call("get")
def _get(here: Round) -> None:
    here.keeps = False
    here.held.append(here.sub.get(0))
    here.keeps = True


@call("get in vain", lambda here: hold_all(here))
def _get_in_vain(here: Round) -> None:
    with suppress(qflow.QueueEmpty):
        here.held.append(here.sub.get(0.001))  # what a handler publishes meanwhile


def hold_all(here: Round) -> None:
    here.batch = here.sub.get_many(1000, 0)


@call("get_many")
def _get_many(here: Round) -> None:
    here.keeps = False
    here.held.append(here.sub.get_many(3, 0))
    here.keeps = True


@call("iteration")
def _iterate(here: Round) -> None:
    for delivery in here.sub:
        here.gone += here.maybe
        here.maybe = [delivery.body]
        if len(here.gone) == 3:
            break


@call("ack", hold_one)
def _ack(here: Round) -> None:
    here.acked = [here.one.body]
    here.one.ack()


@call("ack and wait", hold_one)
def _ack_wait(here: Round) -> None:
    here.acked = [here.one.body]
    here.one.ack(wait=True)


@call("ack of a part", hold_batch)
def _ack_part(here: Round) -> None:
    here.acked = [here.batch[1].body]
    here.sub.ack(here.batch[1])


@call("ack of a part and wait", hold_batch)
def _ack_part_wait(here: Round) -> None:
    here.acked = [here.batch[1].body]
    here.batch[1].ack(wait=True)


@call("ack of a batch", hold_batch)
def _ack_batch(here: Round) -> None:
    here.acked = here.batch.bodies
    here.batch.ack()


@call("ack of a batch and wait", hold_batch)
def _ack_batch_wait(here: Round) -> None:
    here.acked = here.batch.bodies
    here.sub.ack(here.batch, wait=True)


@call("nack", hold_one)
def _nack(here: Round) -> None:
    here.one.nack()


@call("nack of a part", hold_batch)
def _nack_part(here: Round) -> None:
    here.batch[1].nack(delay_s=0.0001)


@call("nack of a batch", hold_batch)
def _nack_batch(here: Round) -> None:
    here.batch.nack()


@call("nack without requeueing", hold_one)
def _nack_away(here: Round) -> None:
    here.acked = [here.one.body]
    here.one.nack(requeue=False)


@call("extend", hold_one)
def _extend(here: Round) -> None:
    here.one.extend(30)


@call("seek", hold_one)
def _seek(here: Round) -> None:
    for number, position in enumerate(here.sub.positions):
        here.sub.seek(max(0, position - (here.one.partition == number)), partition=number)


@call("close", hold_batch)
def _close(here: Round) -> None:
    here.sub.close()


@call("lag, positions, statistics", hold_batch)
def _look(here: Round) -> None:
    assert here.sub.lag >= 0
    assert len(here.sub.positions) == 2
    here.sub.stats()
    here.world.stream.stats()


@call("query", hold_one)
def _query(here: Round) -> None:
    stream, end = here.world.stream, here.one.offset + 1
    assert len(list(stream.query(partition=here.one.partition, start=end - 1, end=end))) == 1


def transact(here: Round) -> None:
    with here.broker.transaction() as tx:
        here.acked = [here.one.body, here.batch[1].body]
        here.put = [b"%d put" % here.number, b"%d put many" % here.number]
        tx.put("q", here.put[0])
        tx.put_many("q", here.put[1:])
        tx.publish("t/a", here.publish(1)[0])
        tx.ack(here.one)
        tx.ack_many([here.batch[1]])
        if here.number % 2:
            tx.commit()


def hold_both(here: Round) -> None:
    hold_one(here)
    hold_batch(here)


CALLS["transaction"] = hold_both, transact


@call("transaction that is rolled back", hold_one)
def _roll_back(here: Round) -> None:
    tx = here.broker.transaction()
    tx.put("q", b"never")
    tx.put("q", b"never either")
    tx.ack(here.one)
    tx.rollback()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One spool for all calls."""
    made = World(tmp_path_factory.mktemp("strikes"))
    yield made
    made.reopen()
    made.check_books()
    made.broker.close()


@pytest.fixture(scope="module")
def seed() -> int:
    number = random.randrange(2**32)
    print(f"seed {number}")
    return number


def count_places(world: World, name: str) -> int:
    """Return how many places a call has. The first run opens what is opened once."""
    before, act = CALLS[name]
    if name in COUNTS:
        return COUNTS[name]
    for _ in range(2):
        here = world.begin()
        if before is not None:
            before(here)
        strike = Strike(NEVER)
        strike.run(lambda: act(here))  # noqa: B023
        in_thread(lambda: world.verify(here, False))  # noqa: B023
    COUNTS[name] = strike.seen
    return strike.seen


@pytest.mark.parametrize("name", CALLS)
def test_a_handler_that_raises_finds_a_call_done_or_not_done(world: World, name: str, seed: int) -> None:
    """At any place: nothing is kept for it, nothing is lost or doubled, and nobody hangs."""
    count = count_places(world, name)
    struck = 0
    for at in places(count, NEVER if name in WHOLE else MOST, seed):
        strike, ended = reach(at, lambda at: strike_once(world, name, at, None))
        struck += ended
        assert ended == (strike.where is not None)
    report(name, "raises", count, struck)
    assert struck


@pytest.mark.parametrize("name", CALLS)
def test_a_handler_may_use_the_broker(world: World, name: str, seed: int) -> None:
    """The call goes on as if nothing had been."""
    count = count_places(world, name)
    struck = 0
    for at in places(count, MOST, seed):
        strike, _ = reach(at, lambda at: strike_once(world, name, at, Round.use_broker))
        struck += strike.where is not None
    report(name, "uses the broker", count, struck)
    assert struck


@pytest.mark.parametrize("name", CALLS)
def test_a_handler_may_close_the_broker(world: World, name: str, seed: int) -> None:
    """The call ends as confirmed or refused, and the spool is clean."""
    count = count_places(world, name)
    struck = 0

    def close_at(at: int) -> tuple[Strike, bool]:
        here, before, act = world.begin(), *CALLS[name]
        if before is not None:
            before(here)
        refused: list[BaseException] = []
        strike = Strike(at, here.close_broker)
        try:
            strike.run(lambda: act(here))
        except (qflow.BrokerClosed, qflow.AlreadySettled) as error:  # what was held went back
            refused.append(error)
        assert (strike.where is None) != world.broker.closed
        closed = world.broker.closed
        in_thread(world.reopen)
        try:
            in_thread(lambda: world.check_contents(here, bool(refused) or world.broker.closed))
            in_thread(world.check_books)
        except BaseException as error:
            error.add_note(f"struck at place {at}: {strike.where}")
            world.renew()
            raise
        return strike, closed

    for at in places(count, MOST_CLOSED, seed):
        struck += reach(at, close_at)[1]
    report(name, "closes the broker", count, struck)
    assert struck


def strike_once(world: World, name: str, at: int, handler: Callable[[Round], object] | None) -> tuple[Strike, bool]:
    """Strike one call; check what is left."""
    here, before, act = world.begin(), *CALLS[name]
    if before is not None:
        before(here)
    strike = Strike(at, None if handler is None else lambda: handler(here))
    try:
        ended = strike.run(lambda: act(here))
        gc.collect(0)
        in_thread(lambda: world.verify(here, ended))
    except BaseException as error:
        error.add_note(f"struck at place {at}: {strike.where}")
        world.renew()
        raise
    return strike, ended


def report(name: str, what: str, count: int, struck: int) -> None:
    if TORTURE:
        print(f"{name}: a handler {what} at {struck} of {count} places")
