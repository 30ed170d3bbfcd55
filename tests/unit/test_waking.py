"""Who is woken: as many as there is something for, first come first served, and none of it is lost."""

from __future__ import annotations

import itertools
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import inside
import qflow
from calls import count
from faults.strikes import Strike, Struck
from qflow.memory import waiting
from qflow.memory.line import FOREVER, Alarm, Line
from qflow.memory.waiting import shelter
from qflow.message import OVERHEAD_BYTES
from qflow.queues import fan_out, showing
from qflow.queues.admission import TURN, Admission
from qflow.queues.getting import Getting
from qflow.queues.putting import Putting
from qflow.queues.queue import parts_of
from unit.clocks import LONG_S, Clock, until

Open = Callable[..., qflow.Broker]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often threads were woken, looked, and had another thread work for them."""
    counts: Counter[str] = Counter()
    count(monkeypatch, counts, Alarm, "__call__", "woken")
    count(monkeypatch, counts, Putting, "step", "tried")
    count(monkeypatch, counts, Getting, "step", "tried")
    count(monkeypatch, counts, Admission, "rebalance", "looked")
    count(monkeypatch, counts, waiting._Shelter, "call", "hops")
    return counts


@pytest.fixture
def threads() -> Iterator[list[threading.Thread]]:
    """Threads that have ended when the test does."""
    begun: list[threading.Thread] = []
    yield begun
    for thread in begun:
        thread.join(LONG_S)
        assert not thread.is_alive()


def line_of(queue: qflow.Queue) -> Any:
    return parts_of(queue).admission.line


class Blocked:
    """A put that waits as a thread does, without one."""

    latest: Blocked
    """The one that was made last."""

    def __init__(
        self, queue: qflow.Queue, body: bytes, *, alone: bool = True, waits: bool = True, timeout_s: float | None = None
    ) -> None:
        Blocked.latest = self
        self.queue = queue
        self.woken = 0
        puts = parts_of(queue).puts
        self.put = puts.draft([body], True, 0)
        self.putting = puts.begin([self.put], timeout_s)
        self.putting.alone = self.putting.in_turn = alone
        self.waits_s = self.go_on()
        self.waits = self.waits_s is not None
        assert self.waits or not waits

    def wake(self) -> None:
        self.woken += 1

    def go_on(self) -> float | None:
        return shelter(partial(parts_of(self.queue).puts._try_enter, self.put, self.putting, self.wake))

    def leave(self) -> None:
        shelter(self.putting.give_up)


def test_a_line_wakes_in_the_order_of_the_first_wait() -> None:
    """Who comes back has its place again, whoever else comes back before; who leaves is not woken."""
    line = Line()
    woken: list[int] = []
    watchers = [line.watch(partial(woken.append, number)) for number in range(6)]
    line.notify(3)
    assert (woken, line.watching) == ([0, 1, 2], 3)
    line.watch(partial(woken.append, 2), watchers[2].number)
    line.watch(partial(woken.append, 0), watchers[0].number)
    line.unwatch(watchers[4])
    line.unwatch(watchers[4])
    late = line.watch(partial(woken.append, 1), watchers[1].number)
    line.unwatch(late)
    assert line.watching == 4
    line.notify(2)
    line.watch(partial(woken.append, 6))
    line.notify_all()
    assert woken == [0, 1, 2, 0, 2, 3, 5, 6]
    assert not line.watching


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("producers", [16, 256])
def test_each_blocked_put_is_woken_once(
    open_spool: Open, counted: Counter[str], threads: list[threading.Thread], producers: int, durable: bool
) -> None:
    """A message that is taken wakes as many as there is room for: none above the mark, then all that fit."""
    queue = open_spool().declare_queue("q", durable=durable, limit_messages=100)
    queue.put_many([b""] * 100)
    for number in range(1, producers + 1):
        threads.append(threading.Thread(target=queue.put, args=(b"%d" % number,)))
        threads[-1].start()
        until(lambda number=number: len(line_of(queue)) == number)
    counted.clear()
    for _ in range(19):
        queue.get(0).ack()
    assert (counted["woken"], counted["looked"], counted["hops"]) == (0, 0, 0)
    received = [queue.get(LONG_S) for _ in range(81)]
    for delivery in received:
        delivery.ack()
    bodies = []
    for _ in range(producers):
        with queue.get(LONG_S) as delivery:
            bodies.append(int(delivery.body))
    for thread in threads:
        thread.join(LONG_S)
    assert bodies == sorted(bodies) or durable  # what passed together may meet in the log in any order
    assert sorted(bodies) == list(range(1, producers + 1))
    own = counted["woken"] - producers
    assert own <= producers + 100  # the consumer may have had to wait for each
    assert counted["tried"] <= 3 * (producers + 100)
    assert not inside.left_behind(queue)


def test_as_many_are_admitted_as_there_is_room_for(open_spool: Open) -> None:
    """Ten places, thirty who wait: ten have theirs, one of them is woken to go on, and wakes the next."""
    queue = open_spool().declare_queue("q", durable=False, limit_messages=20, resume_ratio=0.5)
    queue.put_many([b"old"] * 20)
    line = [Blocked(queue, b"%02d" % number) for number in range(30)]
    queue.get_many(9).ack()
    assert not sum(one.woken for one in line)
    queue.get(0).ack()
    assert len(line_of(queue)) == 20
    assert [one.woken for one in line] == [1] + [0] * 29
    for number in range(10):
        assert line[number].go_on() is None
        assert [one.woken for one in line] == [1] * min(10, number + 2) + [0] * (30 - min(10, number + 2))
    assert len(queue) == 20
    assert [delivery.body for delivery in queue.get_many(20, 0)][10:] == [b"%02d" % number for number in range(10)]
    for one in line[10:]:
        one.leave()
    assert not line_of(queue)


def test_what_was_admitted_is_there_for_a_get_before_its_thread_comes(open_spool: Open) -> None:
    """A consumer does not wait for threads that are on their way."""
    queue = open_spool().declare_queue("q", durable=False, limit_messages=2, resume_ratio=0)
    queue.put_many([b"", b""])
    line = [Blocked(queue, b"%d" % number) for number in range(4)]
    queue.get_many(2, 0).ack()
    assert [delivery.body for delivery in queue.get_many(4, 0)] == [b"0", b"1"]
    for one in line[:2]:
        assert one.go_on() is None
        assert one.put.first >= 0
    for one in line[2:]:
        one.leave()
    queue.purge()
    assert not inside.left_behind(queue)


@pytest.mark.parametrize("alone", [True, False])
def test_who_was_admitted_and_leaves_hands_the_place_on(open_spool: Open, alone: bool) -> None:
    """I15: a signal handler may raise in a thread, and a task be cancelled, after it was woken."""
    queue = open_spool().declare_queue("q", durable=False, limit_messages=1)
    queue.put(b"")
    line = [Blocked(queue, b"%d" % number, alone=alone) for number in range(4)]
    queue.get(0).ack()
    assert [one.woken for one in line] == [1, 0, 0, 0]
    line[0].leave()
    assert [one.woken for one in line] == [1, 1, 0, 0]
    line[2].leave()
    line[1].leave()
    line[1].leave()
    assert [one.woken for one in line] == [1, 1, 0, 1]
    assert line[3].go_on() is None
    assert queue.get(0).body == b"3"
    assert not inside.left_behind(queue)


def test_a_thread_that_is_to_wake_the_next_and_leaves_does_so(open_spool: Open) -> None:
    """Whether it was interrupted before its message was there, or after."""
    queue = open_spool().declare_queue("q", durable=False, limit_messages=4, resume_ratio=0)
    queue.put_many([b""] * 4)
    line = [Blocked(queue, b"%d" % number) for number in range(4)]
    queue.get_many(4, 0).ack()
    assert [one.woken for one in line] == [1, 0, 0, 0]
    line[0].leave()
    assert [one.woken for one in line] == [1, 1, 0, 0]
    got = [delivery.body for delivery in queue.get_many(4, 0)]
    line[1].leave()
    assert [one.woken for one in line] == [1, 1, 1, 0]
    line[3].leave()  # before it was its turn
    assert line[2].go_on() is None
    assert [one.woken for one in line] == [1, 1, 1, 0]
    assert got == [b"1", b"2", b"3"]
    assert not inside.left_behind(queue)


@pytest.mark.parametrize(
    "limits", [{"limit_messages": 100}, {"limit_bytes": 100}, {"limit_messages": 100, "limit_bytes": 100}]
)
@pytest.mark.parametrize("timeout_s", [None, LONG_S])
def test_a_thread_puts_for_a_turn_and_then_waits_behind_those_that_have_their_places(
    open_spool: Open, limits: dict[str, Any], timeout_s: float | None
) -> None:
    """First come first served: no thread fills the queue while others wait to be woken. Its message does not wait."""
    queue = open_spool().declare_queue("q", durable=False, resume_ratio=0, **limits)
    queue.put_many([b"o"] * 100)
    line = [Blocked(queue, b"%d" % number) for number in range(4)]
    queue.get_many(100, 0).ack()
    expected = [b"0", b"1", b"2", b"3"]
    for number in range(3):
        assert [one.woken for one in line] == [1] * (number + 1) + [0] * 3
        assert line[number].go_on() is None
        turn = put_until_it_waits(queue, timeout_s)
        assert turn == TURN + 1  # the last of it, by a thread that waits now
        line.append(Blocked.latest)
        expected += [b"t"] * turn
        assert len(queue) == len(expected)
        assert Blocked(queue, b"t", waits=False, timeout_s=0).put.first == len(expected) + 100  # whoever may not wait
        expected.append(b"t")
    for number in range(3, 7):
        assert [one.woken for one in line] == [1] * (number + 1) + [0] * (6 - number)
        assert line[number].go_on() is None
    assert [delivery.body for delivery in queue.get_many(100, 0)] == expected
    assert not Blocked(queue, b"t", waits=False).waits
    assert not inside.left_behind(queue)


def test_a_thread_that_waits_for_its_turn_and_leaves_has_put(open_spool: Open) -> None:
    """I15: what it waits for is no place; whoever is behind it is woken all the same."""
    queue = open_spool().declare_queue("q", durable=False, limit_messages=100, resume_ratio=0)
    queue.put_many([b""] * 100)
    line = [Blocked(queue, b"%d" % number) for number in range(2)]
    queue.get_many(100, 0).ack()
    put_until_it_waits(queue)
    left = Blocked.latest
    put_until_it_waits(queue)
    line += [left, Blocked.latest]
    left.leave()
    assert line[0].go_on() is None
    line[1].leave()
    assert [one.woken for one in line] == [1, 1, 0, 1]
    assert line[3].go_on() is None
    assert left.put.first >= 0
    assert inside.left_behind(queue) == {}


def test_a_thread_waits_for_its_turn_no_longer_than_its_time_out_and_has_put_then(open_spool: Open) -> None:
    """It is told no time-out, for its message is in the queue; whoever is behind it is woken all the same."""
    queue = open_spool().declare_queue("q", durable=False, limit_messages=100, resume_ratio=0)
    queue.put_many([b""] * 100)
    line = [Blocked(queue, b"%d" % number) for number in range(2)]
    queue.get_many(100, 0).ack()
    put_until_it_waits(queue, LONG_S)
    turn = Blocked.latest
    assert turn.go_on() is None  # as after a wake-up that was too early: it has put, and waits for nothing
    assert turn.put.first >= 0
    over = Blocked(queue, b"in time", timeout_s=LONG_S)
    assert over.waits_s is not None
    assert 0 < over.waits_s <= LONG_S
    assert len(queue) == over.put.first - 100 + 1
    assert over.go_on() is None  # when that is over
    assert line[0].go_on() is None
    assert [one.woken for one in line] == [1, 1]
    assert line[1].go_on() is None
    assert inside.left_behind(queue) == {}


def test_a_handler_that_puts_at_the_limit_that_the_main_thread_waits_at_gets_through(
    open_spool: Open, threads: list[threading.Thread]
) -> None:
    """I17: what it interrupts is admitted before it, and cannot go on; nobody waits for that."""
    queue = open_spool().declare_queue("q", durable=False, limit_messages=3, resume_ratio=0)
    queue.put_many([b"old"] * 3)

    def interrupt() -> None:
        until(lambda: len(line_of(queue)) == 1)
        threads.append(threading.Thread(target=queue.put, args=(b"behind",)))
        threads[-1].start()
        until(lambda: len(line_of(queue)) == 2)
        while not struck.is_set():  # again: one that comes right before a wait is handled after it
            signal.pthread_kill(main, signal.SIGUSR1)
            struck.wait(0.01)
        until(lambda: len(line_of(queue)) == 3)
        queue.get_many(3, 0).ack()

    def handle(*_: object) -> None:
        if not struck.is_set():
            struck.set()
            queue.put(b"handler")

    struck, main = threading.Event(), threading.get_ident()
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        threads.append(threading.Thread(target=interrupt))
        threads[-1].start()
        queue.put(b"main")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [delivery.body for delivery in queue.get_many(3, 0)] == [b"main", b"behind", b"handler"]


def put_until_it_waits(queue: qflow.Queue, timeout_s: float | None = None) -> int:
    """Put as one thread would, until it has to wait; return how many messages that were."""
    puts = 1
    while True:
        if parts_of(queue).puts.put_at_once((b"t",), 1, in_loop=True) is None:
            if Blocked(queue, b"t", waits=False, timeout_s=timeout_s).waits:
                return puts
            assert puts < 1_000, "its turn does not end"
        puts += 1


def test_a_higher_limit_admits_as_many_as_fit_and_a_lower_one_nobody(open_spool: Open) -> None:
    """A line of 256: the steps that follow do not grow with it."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=False, limit_messages=10, resume_ratio=1)
    queue.put_many([b""] * 10)
    line = [Blocked(queue, b"%d" % number, alone=False) for number in range(256)]
    broker.alter_queue("q", limit_messages=5)
    assert not sum(one.woken for one in line)
    for _ in range(5):
        queue.get(0).ack()
    assert not sum(one.woken for one in line)
    broker.alter_queue("q", limit_messages=15)
    assert [one.woken for one in line] == [1] * 10 + [0] * 246
    broker.alter_queue("q", limit_messages=None)
    assert [one.woken for one in line] == [1] * 256
    for one in line:
        assert one.go_on() is None
    assert len(queue) == 261
    assert not inside.left_behind(queue)


def test_a_large_message_at_the_head_holds_the_line_until_there_is_room(open_spool: Open) -> None:
    """First come first served; it is tried again at each message that leaves, and nobody is woken for nothing."""
    queue = open_spool().declare_queue("q", durable=False, limit_bytes=100, resume_ratio=1)
    for _ in range(10):
        queue.put(bytes(10))
    large, small = Blocked(queue, bytes(50)), Blocked(queue, bytes(1))
    for _ in range(4):
        queue.get(0).ack()
        assert not large.woken + small.woken
    queue.get(0).ack()
    assert (large.woken, small.woken) == (1, 0)
    assert large.go_on() is None
    queue.get(0).ack()
    assert small.woken == 1
    assert small.go_on() is None
    assert not inside.left_behind(queue)


def test_a_message_that_comes_wakes_one_getter(
    open_spool: Open, counted: Counter[str], threads: list[threading.Thread]
) -> None:
    """256 wait: the first of them has it, and nobody else looks."""
    queue = open_spool().declare_queue("q", durable=False)
    received: list[bytes] = []
    for _ in range(256):
        threads.append(threading.Thread(target=lambda: received.append(queue.get(LONG_S).body)))
        threads[-1].start()
    until(lambda: parts_of(queue).gate.getters == 256)
    counted.clear()
    for number in range(1, 101):
        queue.put(b"%d" % number)
        until(lambda number=number: len(received) == number)
    assert counted["woken"] == 100
    assert parts_of(queue).gate.getters == 156
    queue.put_many([b"x"] * 156)
    until(lambda: len(received) == 256)
    assert counted["woken"] == 256


def test_a_commit_that_has_to_wait_for_nothing_is_one_hop(open_spool: Open, counted: Counter[str]) -> None:
    """The main thread has another gather its puts, and then do all of the commit."""
    broker = open_spool()
    queue = with_room(broker)
    counted.clear()
    with broker.transaction() as tx:
        tx.put(queue, b"1")
        tx.put(queue, b"2")
    assert tx.result == [1, 2]
    assert counted["hops"] == 2


class Getter:
    """A get that waits as a thread does, without one; or as a task."""

    def __init__(self, queue: qflow.Queue, *, is_task: bool = False) -> None:
        self._getting = parts_of(queue).gets.begin(1, None, "getter", single=True)
        self._is_task = is_task
        assert not self.goes_on()

    def goes_on(self) -> bool:
        """Tell whether it has what it waits for, after another step."""
        self.alarm = Alarm()
        wake = self.alarm.__call__ if self._is_task else self.alarm
        return shelter(partial(self._getting.step, wake, may_work=True)) is None

    @property
    def is_woken(self) -> bool:
        """It was, since this was asked for last."""
        return self.alarm._lock.acquire(blocking=False)

    @property
    def body(self) -> bytes | None:
        return None if self._getting.delivery is None else self._getting.delivery.body

    def give_up(self) -> None:
        shelter(self._getting.give_up)


def with_room(broker: qflow.Broker) -> qflow.Queue:
    """Return a queue that need not borrow memory for a small message."""
    queue = broker.declare_queue("q", durable=False)
    queue.put(b"warm")
    queue.get().ack()
    return queue


def test_puts_wake_the_first_getter_without_a_hop_and_it_wakes_the_others(
    open_spool: Open, counted: Counter[str]
) -> None:
    """As many as there are messages, in the order they came; those that come as it wakes up wake nobody."""
    queue = with_room(open_spool())
    getters = [Getter(queue) for _ in range(4)]
    counted.clear()
    for number in range(3):
        queue.put(b"%d" % number, headers={"n": number} if number == 1 else None)
    assert (counted["woken"], counted["hops"]) == (1, 0)
    assert [one.is_woken for one in getters] == [True, False, False, False]
    assert getters[0].goes_on()
    assert [one.is_woken for one in getters] == [False, True, True, False]
    assert [one.goes_on() for one in getters[1:]] == [True, True, False]
    assert [one.body for one in getters] == [b"0", b"1", b"2", None]
    queue.put(b"3")
    assert getters[3].is_woken
    assert getters[3].goes_on()
    assert not inside.left_behind(queue)


@pytest.mark.parametrize("several", [False, True])
def test_a_handler_that_waits_for_what_comes_of_its_put_is_not_kept_waiting(
    open_spool: Open, monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    """It strikes a put that has counted its message, and is yet to ring: that goes on when the handler returns."""
    broker = open_spool()
    queue = with_room(broker)
    other = broker.declare_queue("r", durable=False)
    other.put(b"warm")
    other.get().ack()
    for one in (queue, other):
        broker.bind(one, "t")
    getters = [Getter(queue) for _ in range(2)]
    ring = fan_out._wake if several else showing._ring

    def strike(*arguments: Any) -> None:
        assert not getters[0].is_woken
        monkeypatch.undo()
        queue.put(b"handler")
        assert getters[0].is_woken
        assert getters[0].goes_on()
        assert getters[1].is_woken
        assert getters[1].goes_on()
        ring(*arguments)

    monkeypatch.setattr(*((fan_out, "_wake") if several else (showing, "_ring")), strike)
    if several:
        broker.publish("t", b"x")
    else:
        queue.put(b"x")
    assert [one.body for one in getters] == [b"x", b"handler"]
    assert not inside.left_behind(queue)


@pytest.mark.parametrize("how", ["gives up", "another notification"])
def test_a_getter_that_was_woken_for_others_hands_that_on(open_spool: Open, how: str) -> None:
    """It gives up before it has looked; or is woken once more, by what tells all who have something."""
    queue = with_room(open_spool())
    queue.put(b"held")
    held = queue.get()
    getters = [Getter(queue) for _ in range(3)]
    queue.put(b"0")
    queue.put(b"1")
    if how == "gives up":
        getters[0].give_up()
        assert [one.is_woken for one in getters] == [True, True, True]
    else:
        held.nack()
        assert [one.is_woken for one in getters] == [True, True, True]
        assert getters[0].goes_on()
    assert [one.goes_on() for one in getters[1:]] == [True, True]
    assert not inside.left_behind(queue)


@pytest.mark.parametrize("how", ["goes on", "gives up"])
def test_a_getter_woken_before_a_bell_rings_leaves_that_to_whom_it_rings(open_spool: Open, how: str) -> None:
    """It has its own message: what comes behind that is for as many others."""
    queue = with_room(open_spool())
    queue.put(b"held")
    held = queue.get()
    getters = [Getter(queue) for _ in range(4)]
    held.nack()
    queue.put(b"0")
    queue.put(b"1")
    assert [one.is_woken for one in getters] == [True, True, False, False]
    if how == "goes on":
        assert getters[0].goes_on()
        assert [one.is_woken for one in getters] == [False, True, True, False]
    else:
        getters[0].give_up()
        assert [one.is_woken for one in getters] == [False, True, True, True]
        assert getters[3].goes_on()
    assert [one.goes_on() for one in getters[1:3]] == [True, True]
    if how == "goes on":
        getters[3].give_up()
    assert not inside.left_behind(queue)


@pytest.mark.parametrize("seed", range(4))
def test_no_getter_waits_beside_a_message_that_nobody_was_woken_for(open_spool: Open, seed: int) -> None:
    """Threads and tasks in any order, messages that come and come back, getters that look or give up at any time."""
    queue, chance = with_room(open_spool()), random.Random(seed)
    for _ in range(150):
        queue.put(b"held")
        held = [queue.get()]
        getters = [Getter(queue, is_task=chance.random() < 0.4) for _ in range(4)]
        woken: list[Getter] = []

        def look(getter: Getter, getters: list[Getter] = getters) -> None:
            if getter.goes_on():
                getters.remove(getter)

        for act in chance.choices(
            ["put", "put_many", "nack", "look", "look unasked", "give up"], [6, 1, 2, 5, 1, 1], k=9
        ):
            woken = [one for one in getters if one in woken or one.is_woken]
            if act == "put":
                queue.put(b"x")
            elif act == "put_many":
                queue.put_many([b"x", b"x"])
            elif act == "nack" and held:
                held.pop().nack()
            elif act == "look" and woken:
                look(woken.pop(chance.randrange(len(woken))))
            elif act == "look unasked" and getters:
                look(getters[-1])
            elif act == "give up" and getters:
                getters.pop(0).give_up()
        while woken := [one for one in getters if one in woken or one.is_woken]:
            look(woken.pop(0))
        assert not getters or len(queue) == queue.stats().acquired_messages
        for one in getters:
            one.give_up()
        assert not inside.left_behind(queue)
        queue.purge()


def test_threads_that_wait_get_messages_by_turns(open_spool: Open) -> None:
    """Who has had one is behind those that wait."""
    queue = with_room(open_spool())
    getters = [Getter(queue) for _ in range(3)]
    order = []
    for _ in range(9):
        queue.put(b"x")
        [at] = [at for at, one in enumerate(getters) if one.is_woken]
        assert getters[at].goes_on()
        getters[at] = Getter(queue)
        order.append(at)
    assert order == [0, 1, 2] * 3
    for one in getters:
        one.give_up()
    assert not inside.left_behind(queue)


def is_told_wherever(
    monkeypatch: pytest.MonkeyPatch, queue: qflow.Queue, strikes: int, ready: Callable[[], object], at: int
) -> str | None:
    """Strike a put at a place, and perhaps once more as that is made good; return the place, if the put came so far.

    What is visible then has woken who waits for it. `ready`: what was handed over is done.
    """

    left = [Struck] * (strikes - 1)

    def strike_again(work: Callable[[], object]) -> object:
        if left:
            raise left.pop()
        return shelter(work)

    ready()
    getter, strike = Getter(queue), Strike(at)
    monkeypatch.setattr(showing, "shelter", strike_again)
    strike.run(lambda: queue.put(b"x"))
    monkeypatch.setattr(showing, "shelter", shelter)
    ready()
    assert getter.is_woken is (len(queue) == 1), strike.where
    getter.give_up()
    assert not inside.left_behind(queue)
    queue.purge()
    return strike.where


@pytest.mark.parametrize("strikes", [1, 2])
def test_an_interrupt_between_a_message_and_its_wake_up_loses_neither(
    open_spool: Open, monkeypatch: pytest.MonkeyPatch, strikes: int
) -> None:
    """Wherever a handler raises in a put, and another one as that is made good."""
    queue = with_room(open_spool())
    struck = (is_told_wherever(monkeypatch, queue, strikes, lambda: None, at) for at in itertools.count())
    places = [*itertools.takewhile(bool, struck)]
    assert any("__call__" in where for where in places)


def test_getters_without_room_are_woken_one_by_one(open_spool: Open) -> None:
    """What frees memory wakes the first; what that leaves is for the next one. Who finds none wakes nobody."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=False, capacity_bytes=4 * (1_000 + OVERHEAD_BYTES))
    queue.put_many([bytes(1_000)] * 60)
    inside.still(broker)
    held = [queue.get(0) for _ in range(3)]
    woken: list[int] = []
    getters = [parts_of(queue).gets.begin(1, None, "getter") for _ in range(40)]

    def go_on(number: int) -> float | None:
        return shelter(partial(getters[number].step, partial(woken.append, number), may_work=True))

    for number in range(40):
        assert go_on(number) is not None
        assert go_on(number) is not None
    assert (parts_of(queue).gate.starved, woken) == (40, [])
    for delivery in held[:2]:
        delivery.ack()
    assert woken == [0, 1]
    done = [go_on(number) is None for number in (0, 1)]
    assert done[0]
    assert len(woken) - len(set(woken)) == 0
    assert len(woken) <= 2 + 4 * sum(done)  # what was read, and what is taken, may each leave some room
    for getting in getters:
        shelter(getting.give_up)
    assert not parts_of(queue).gate.starved
    held[2].ack()


@pytest.mark.parametrize("durable", [True, False])
def test_a_publish_reserves_in_all_queues_that_have_room_at_once(
    open_at: Open, counted: Counter[str], durable: bool
) -> None:
    """The main thread has another work for it as often for many queues as for one; limits that are not reached, too."""
    broker = open_at()
    queues = broker.declare_queues([f"q{n}" for n in range(200)], durable=durable)
    for queue in queues:
        broker.bind(queue, "t")
    broker.alter_queue("q7", limit_messages=5)
    broker.publish("t", b"first")
    counted.clear()
    assert broker.publish("t", b"x").sequences == {queue.name: 1 for queue in queues}
    assert counted["tried"] == 0
    assert counted["hops"] <= 3
    assert not any(inside.left_behind(queue) for queue in queues)
    assert broker.check() == []


def test_a_publish_waits_at_the_queue_that_is_full_and_at_no_other(
    open_at: Open, counted: Counter[str], threads: list[threading.Thread]
) -> None:
    """What came before it in their order keeps its room meanwhile, and what comes behind takes it in one pass."""
    broker = open_at()
    queues = broker.declare_queues([f"q{n}" for n in range(100)])
    for queue in queues:
        broker.bind(queue, "t")
    broker.alter_queue("q50", limit_messages=1)
    broker.publish("t", b"first")
    counted.clear()
    publishing = threading.Thread(target=broker.publish, args=("t", b"x"))
    threads.append(publishing)
    publishing.start()
    until(lambda: len(line_of(queues[50])) == 1)
    assert parts_of(queues[49]).admission.pending_messages == 1
    assert parts_of(queues[51]).admission.pending_messages == 0
    queues[50].get().ack()
    publishing.join(LONG_S)
    assert counted["tried"] <= 6
    assert [queue.stats().messages for queue in queues] == [2] * 50 + [1] + [2] * 49
    assert not any(inside.left_behind(queue) for queue in queues)


def test_what_a_publish_reserved_is_given_back_where_one_queue_refuses(open_at: Open) -> None:
    """All or nothing: a message that is too large for the last of them, a limit, a queue that was deleted."""
    broker = open_at()
    queues = broker.declare_queues([f"q{n}" for n in range(50)])
    for queue in queues:
        broker.bind(queue, "t")
    broker.alter_queue("q40", max_message_bytes=10)
    with pytest.raises(qflow.MessageTooLarge, match="q40"):
        broker.publish("t", b"x" * 11)
    broker.alter_queue("q40", max_message_bytes=1000)
    broker.alter_queue("q45", limit_messages=1, on_overflow="reject")
    broker.publish("t", b"x")
    with pytest.raises(qflow.QueueFull, match="q45"):
        broker.publish("t", b"y")
    assert [queue.stats().messages for queue in queues] == [1] * 50
    assert not any(inside.left_behind(queue) for queue in queues)
    assert broker.check() == []


@pytest.mark.parametrize("ends", ["served", "timed_out", "given_up"])
@pytest.mark.parametrize("single", [True, False], ids=["one", "many"])
def test_who_waits_for_the_next_due_time_hands_that_on(open_at: Open, clock: Clock, ends: str, single: bool) -> None:
    """One get is woken for a delayed message, and waits until that is due; when it ends before, the next one does."""
    queue = open_at().declare_queue("q", durable=False)
    woken: list[int] = []
    gets = parts_of(queue).gets
    getters = [
        gets.begin(1, 0.25 if ends == "timed_out" and not one else None, None, single=single) for one in range(3)
    ]

    def step(number: int) -> float | None:
        return shelter(partial(getters[number].step, partial(woken.append, number), may_work=True))

    queue.put(b"first")
    held = queue.get(0)
    assert [step(number) for number in range(3)] == [0.25 if ends == "timed_out" else FOREVER, FOREVER, FOREVER]
    held.nack(delay_s=0.5)
    assert woken == [0]
    assert step(0) == pytest.approx(0.25 if ends == "timed_out" else 0.5, abs=0.01)
    if ends == "given_up":
        shelter(getters[0].give_up)
    else:
        if ends == "served":
            queue.put(b"second")
        else:
            clock.advance(0.25)
        assert step(0) is None
    assert woken[-1] == 1
    assert step(1) == pytest.approx(0.25 if ends == "timed_out" else 0.5, abs=0.01)
    clock.advance(0.6)
    assert step(1) is None
    assert woken[-1] == 1  # nothing else is to come
    for getter in getters:
        shelter(getter.give_up)
    queue.purge()
