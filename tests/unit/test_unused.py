"""A queue that is not durable has no parts before something is asked of it that needs them; nobody can tell."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier, Thread, get_ident
from typing import Any

import attrs
import pytest

import inside
import qflow
import qflow.aio
from faults.strikes import Strike
from qflow.memory.changed import Changed
from qflow.memory.ledger import Ledger
from qflow.memory.waiting import _Shelter
from qflow.queues import making
from qflow.queues.making import Maker, Unused
from qflow.queues.spiller import Spiller
from unit.clocks import LONG_S

MANY = 200
USES: dict[str, Callable[[qflow.Broker, qflow.Queue], object]] = {
    "put": lambda _, queue: queue.put(b"x"),
    "put_many": lambda _, queue: queue.put_many([b"x", b"y"]),
    "submit": lambda _, queue: queue.submit(b"x"),
    "get_many": lambda _, queue: queue.get_many(10, 0),
    "ack_many": lambda _, queue: queue.ack_many([]),
    "purge": lambda _, queue: queue.purge(),
    "delete": lambda _, queue: queue.delete(0),
    "browse": lambda _, queue: list(queue.browse()),
    "pause": lambda _, queue: queue.pause(),
    "watch": lambda _, queue: queue.on_slow_consumer(10),
    "consume": lambda _, queue: queue.consume(print).close(),
    "alter": lambda broker, queue: broker.alter_queue(queue, ttl_s=60),
    "publish": lambda broker, _: broker.publish("topic", b"x"),
}


@pytest.fixture
def broker(open_at: Callable[..., qflow.Broker]) -> qflow.Broker:
    return open_at()


def declared(broker: qflow.Broker, name: str = "unused", **settings: Any) -> qflow.Queue:
    queue = broker.declare_queue(name, durable=False, **settings)
    assert type(queue) is Unused
    return queue


def test_a_queue_that_nobody_uses_is_hardly_anything(broker: qflow.Broker) -> None:
    """Neither to the garbage collector, nor to maintenance, the ledger and a check; nor is a look at figures a use."""
    declared(broker)
    gc.collect()
    before, accounts = len(gc.get_objects()), len(broker.engine.ledger._accounts)
    queues = [declared(broker, f"q{number}") for number in range(MANY)]
    gc.collect()
    assert (len(gc.get_objects()) - before) / MANY < 4.5, "with its settings"
    assert sum(len(queue) + queue.stats().messages + len(queue.name) for queue in queues)
    assert len(broker.stats().queues) == MANY + 1
    for queue in queues:
        broker.bind(queue, "topic/never")
    broker.engine.figures.write()
    assert broker.check() == []
    assert broker.queues() == sorted(["unused", *(queue.name for queue in queues)])
    assert {*map(type, queues)} == {Unused}
    assert len(broker.engine.ledger._accounts) == accounts
    told = json.loads((Path(broker.path) / "stats.json").read_bytes())["queues"]
    assert len(told) == MANY + 1


def test_the_main_thread_declares_without_another_one(broker: qflow.Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """What writes, or has to ask who names the queue for its dead letters, is left to that."""
    calls: list[None] = []
    call = _Shelter.call
    monkeypatch.setattr(_Shelter, "call", lambda self, work: [calls.append(None), call(self, work)][1])
    made = declared(broker, "q", ttl_s=60)
    assert declared(broker, "q", ttl_s=60) is made
    assert not calls
    with pytest.raises(qflow.SettingsConflict, match=r"queue 'q' has ttl_s=60.0, declared now with ttl_s=None"):
        broker.declare_queue("q", durable=False)
    logged = broker.declare_queue("logged", dead_letter="dead")
    assert len(calls) == 2
    assert broker.declare_queue("logged", dead_letter="dead") is logged
    assert len(calls) == 2
    with pytest.raises(qflow.InvalidArgument, match="'logged' is durable"):
        broker.declare_queue("dead", durable=False)


def test_threads_that_declare_one_queue_get_one(broker: qflow.Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one does it after the main thread has seen that there is none."""
    make, others = Maker.make, []

    def made_late(*given: Any) -> qflow.Queue:
        monkeypatch.undo()
        with ThreadPoolExecutor(1) as pool:
            others.append(pool.submit(declared, broker, "q").result(LONG_S))
        return make(*given)

    monkeypatch.setattr(Maker, "make", made_late)
    assert [declared(broker, "q")] == others
    assert broker.queue("q") is others[0]


@pytest.mark.parametrize("use", USES)
def test_the_first_use_makes_it_a_queue_like_any_other(use: str, broker: qflow.Broker) -> None:
    queue = declared(broker)
    broker.declare_queue("other")
    broker.bind(queue, "topic")
    USES[use](broker, queue)
    assert type(queue) is qflow.Queue
    queue.resume()
    queue.purge()
    queue.put(b"after")
    assert queue.get(0).body == b"after"
    assert broker.check() == []


def test_what_is_told_of_it_is_what_a_used_one_tells(broker: qflow.Broker) -> None:
    settings: dict[str, Any] = {"limit_messages": 5, "limit_bytes": 900, "capacity_bytes": 2**18, "priorities": 3}
    other, queue = declared(broker, "other"), declared(broker, **settings)
    told = queue.stats(), len(queue), queue.name, queue.settings, repr(queue)
    assert told[0].capacity_bytes == 2**18
    assert other.stats().limit_messages is None
    assert list(queue.browse()) == []
    assert type(queue) is qflow.Queue
    assert (queue.stats(), len(queue), queue.name, queue.settings, repr(queue)) == told
    assert attrs.asdict(declared(broker, "third", **settings).stats()) == {**attrs.asdict(told[0]), "name": "third"}


def test_threads_that_use_it_at_once_use_one_queue(broker: qflow.Broker) -> None:
    for number in range(20):
        queue, barrier = declared(broker, f"q{number}"), Barrier(8)

        def put(queue: qflow.Queue = queue, barrier: Barrier = barrier) -> None:
            barrier.wait(10)
            queue.put(b"x")

        threads = [Thread(target=put) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(queue) == 8
    assert broker.check() == []


def test_one_that_has_ended_says_so_at_its_first_use(broker: qflow.Broker) -> None:
    """And nothing else has to do with it: its name is free."""
    for use in ("put", "get_many", "purge", "browse", "consume"):
        queue = declared(broker)
        broker.delete_queue("unused")
        assert (len(queue), queue.stats().messages, repr(queue)) == (0, 0, "<Queue 'unused', ended>")
        for _ in range(2):
            with pytest.raises(qflow.QueueDeleted, match="'unused' was deleted"):
                USES[use](broker, queue)
        with pytest.raises(qflow.QueueDeleted):
            broker.bind(queue, "topic")
        assert (len(queue), queue.stats().messages) == (0, 0)
    assert broker.queues() == []
    assert broker.check() == []
    declared(broker).put(b"x")
    with pytest.raises(qflow.QueueDeleted):
        broker.delete_queue(queue)  # there is another one of its name
    assert len(broker.queue("unused")) == 1


def test_one_of_a_broker_that_is_closed_says_so(open_at: Callable[..., qflow.Broker]) -> None:
    broker = open_at()
    used, one, other = declared(broker, "used"), declared(broker, "one"), declared(broker, "other")
    used.put(b"x")
    broker.close()
    for queue in (used, one, other):
        assert repr(queue) == f"<Queue {queue.name!r}, ended>"
        with pytest.raises(qflow.BrokerClosed):
            queue.put(b"x")
        assert queue.stats().name == queue.name


def test_one_that_is_deleted_as_it_is_used_is_used_or_deleted(broker: qflow.Broker) -> None:
    for number in range(50):
        queue, barrier = declared(broker, f"q{number}"), Barrier(2)

        def delete(name: str = queue.name, barrier: Barrier = barrier) -> None:
            barrier.wait(10)
            broker.delete_queue(name)

        thread = Thread(target=delete)
        thread.start()
        barrier.wait(10)
        try:
            queue.put(b"x")
        except qflow.QueueDeleted:
            pass
        thread.join()
        with pytest.raises(qflow.QueueDeleted):
            queue.put(b"x")
    assert broker.check() == []
    accounts = broker.engine.ledger._accounts
    assert not any(account.name.startswith("q") for account in accounts.values())


@pytest.mark.parametrize("use", ["put", "len", "stats"])
def test_a_use_in_a_forked_child_is_refused(use: str, broker: qflow.Broker) -> None:
    queue = declared(broker)
    inside.still(broker)
    source, target = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            {"put": lambda: queue.put(b"x"), "len": lambda: len(queue), "stats": queue.stats}[use]()
        except BaseException as error:
            os.write(target, repr(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(target)
    with open(source, "rb") as pipe:
        assert b"ForkedProcess" in pipe.read()
    queue.put(b"x")


@pytest.mark.parametrize(("owner", "name"), [(Ledger, "open"), (Changed, "enter"), (making, "Parts")])
def test_a_first_use_that_fails_is_none(
    owner: Any, name: str, broker: qflow.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = declared(broker)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, out_of_memory)
        with pytest.raises(MemoryError):
            queue.put(b"x")
        assert type(queue) is Unused
    check_that_it_works(broker, queue)


def test_a_first_use_fails_before_its_parts_are_there(broker: qflow.Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or not at all: there are none that neither maintenance nor a deletion knows."""
    queue = declared(broker)
    with monkeypatch.context() as patch:
        patch.setattr(Spiller, "give_way", property(out_of_memory))
        with pytest.raises(MemoryError):
            queue.put(b"x")
    check_that_it_works(broker, queue)


def out_of_memory(*_: object, **__: object) -> None:
    raise MemoryError


def check_that_it_works(broker: qflow.Broker, queue: qflow.Queue) -> None:
    """And is gone without a rest when it is deleted."""
    queue.put(b"after")
    assert queue.get(0).body == b"after"
    assert type(queue) is qflow.Queue
    assert broker.check() == []
    broker.delete_queue(queue.name)
    accounts = broker.engine.ledger._accounts
    assert queue.name not in [account.name for account in accounts.values()]


def test_no_event_loop_makes_the_parts_of_what_it_declares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of thousands would hold it up for seconds."""
    makers: set[int] = set()
    make = Maker.make_parts

    def noted(*arguments: Any) -> None:
        makers.add(get_ident())
        make(*arguments)

    monkeypatch.setattr(Maker, "make_parts", noted)

    async def declare() -> None:
        async with await qflow.aio.open(tmp_path / "spool") as broker:
            await broker.declare_queue("one", durable=False)
            for queue in await broker.declare_queues(["two", "three"], durable=False):
                await queue.put(b"x")
        assert makers
        assert get_ident() not in makers

    with ThreadPoolExecutor(1) as thread:  # the main thread would have another one make them
        thread.submit(asyncio.run, declare()).result()


@pytest.mark.parametrize("uses", [False, True])
def test_a_signal_handler_strikes_the_first_use(uses: bool, broker: qflow.Broker) -> None:
    """At every place: it raises, or uses the queue itself. There is one queue all the same, with what was put."""
    place = 0
    while True:
        queue = declared(broker, f"q{place}")
        strike = Strike(place, partial(queue.put, b"handler") if uses else None)
        ended = strike.run(lambda queue=queue: queue.put(b"x"))  # type: ignore[misc]
        bodies = [entry.body for entry in queue.get_many(10, 0)]
        if uses and strike.where is not None:
            assert sorted(bodies) == [b"handler", b"x"]
        else:
            assert bodies == [b"x"] or (ended and not bodies)
        queue.put(b"after")
        assert queue.get(0).body == b"after"
        if strike.where is None:
            break
        place += 1
    assert place > 3
    assert broker.check() == []


def test_it_has_what_a_queue_has_and_nothing_else(broker: qflow.Broker) -> None:
    queue: Any = declared(broker)
    with pytest.raises(AttributeError, match="^'Queue' object has no attribute 'putt'"):
        queue.putt(b"x")
    with pytest.raises(TypeError, match="'Queue' object"):
        pickle.dumps(queue)
    assert isinstance(queue, qflow.Queue)
    assert type(queue) is Unused
