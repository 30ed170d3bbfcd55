"""Many queues: what is done for one of them, or each second, looks at that one and at no other."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NoReturn

import attrs
import pytest

import inside
import qflow
import qflow.aio
from qflow import upkeep
from qflow.queues import looking, tending
from qflow.queues.queue import parts_of
from qflow.queues.tending import tick
from qflow.rates import WINDOWS_S
from qflow.storage.log import removal
from qflow.storage.log.keys import BLOCKS, QUEUES
from qflow.streams.topic_filter import FilterTrie
from unit.clocks import Clock

MANY = 200


class Unlisted(dict[Any, Any]):
    """Values that may be looked up, and not gone through."""

    def _refuse(self, *_: object) -> NoReturn:
        raise AssertionError("all of them are looked at")

    __iter__ = items = values = keys = copy = _refuse


def test_a_declaration_looks_at_no_other_queue(open_at: Callable[..., qflow.Broker]) -> None:
    """But at those that name it for their dead letters, or that it names."""
    broker = open_at()
    for n in range(MANY):
        broker.declare_queue(f"q{n}", durable=n < 2)
    queues = broker.engine.queues
    queues._queues = Unlisted(queues._queues)
    broker.declare_queue("new", durable=False, dead_letter="dead")
    broker.declare_queue("logged", dead_letter="dead letters")
    broker.declare_queue("dead", durable=False)
    with pytest.raises(qflow.InvalidArgument, match="'logged' is durable"):
        broker.declare_queue("dead letters", durable=False)
    with pytest.raises(qflow.InvalidArgument, match="cycle"):
        broker.alter_queue("dead", dead_letter="new")
    broker.alter_queue("logged", dead_letter=None)
    broker.declare_queue("dead letters", durable=False)
    broker.delete_queue("q7")
    queues._queues = dict(dict.items(queues._queues))


def test_who_named_a_dead_letter_queue_and_was_deleted_does_so_no_more(open_at: Callable[..., qflow.Broker]) -> None:
    """Its name is free for a queue that is not durable."""
    broker = open_at()
    broker.declare_queue("first", dead_letter="dead")
    broker.declare_queue("second", dead_letter="dead")
    broker.delete_queue("first")
    with pytest.raises(qflow.InvalidArgument, match="'second' is durable"):
        broker.declare_queue("dead", durable=False)
    broker.delete_queue("second")
    broker.declare_queue("dead", durable=False)


def test_a_binding_goes_through_no_other(open_at: Callable[..., qflow.Broker], monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue knows its own filters, in their order, also after one went and after the queue was deleted."""
    broker = open_at()
    for n in range(MANY):
        broker.bind(broker.declare_queue(f"q{n}", durable=False), f"a/{n}/+")
    queue = broker.declare_queue("queue")
    with monkeypatch.context() as patch:
        patch.setattr(FilterTrie, "__iter__", Unlisted._refuse)
        patch.setattr(FilterTrie, "_nodes", Unlisted._refuse)
        for topic_filter in ("b/#", "a/1/2", "a/+/3", "b/#"):
            broker.bind(queue, topic_filter)
        broker.unbind(queue, "a/1/2")
        broker.delete_queue("q8")
    bindings = broker.engine.routing
    assert bindings.filters_of(queue) == ["b/#", "a/+/3"]
    assert sorted(broker.publish("a/3/3", b"x").sequences) == ["q3", "queue"]
    assert broker.publish("a/8/4", b"x").sequences == {}
    broker.close()
    again = open_at()
    assert again.engine.routing.filters_of(again.queue("queue")) == ["b/#", "a/+/3"]


@pytest.fixture
def ticked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have the names of queues added to a list that time does something to."""
    names: list[str] = []

    def note(parts: Any) -> bool:
        names.append(parts.context.name)
        return tick(parts)

    monkeypatch.setattr(upkeep, "tick", note)
    return names


def rounds(broker: qflow.Broker, clock: Clock, ticked: list[str], number: int = 1) -> list[str]:
    """Let seconds pass; return which queues were looked at meanwhile, each once."""
    ticked.clear()
    steps = inside.upkeep(broker)
    for _ in range(number):
        clock.advance(1)
        for step in (steps.tick, steps.sweep, steps.remove_settled, steps.hollow):
            step()
    return sorted(set(ticked))


def test_time_takes_no_step_in_a_queue_that_only_holds_messages(
    open_at: Callable[..., qflow.Broker], clock: Clock, ticked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at without its lock, however many were put; one where time may do something is locked for that."""
    broker = open_at(capacity_bytes="1MiB")
    stepped: list[str] = []
    in_steps = tending._in_steps

    def note(parts: Any, step: Any) -> bool:
        if step is not tending._bring_down:  # which follows from an opening, or an `alter`
            stepped.append(parts.context.name)
        return in_steps(parts, step)

    monkeypatch.setattr(tending, "_in_steps", note)
    for n in range(MANY):
        broker.declare_queue(f"q{n}", durable=n < 5).put(b"x")
    names = ["held", "batch", "ttl", "later", "timed", "limit", "spilled"]
    held, batch, _, later, timed, limit, spilled = (
        broker.declare_queue(name, durable=False, **({"ttl_s": 5} if name == "ttl" else {})) for name in names
    )
    for queue in (held, batch):
        queue.put(b"x")
    kept = [held.get(), batch.get_many(1)]
    broker.queue("ttl").put(b"x")
    later.put(b"x", delay_s=9)
    timed.put(b"x", ttl_s=9)
    broker.alter_queue("limit", limit_messages=1, on_overflow=qflow.Overflow.REJECT)
    limit.put(b"x")
    with pytest.raises(qflow.QueueFull):
        limit.put(b"x", timeout_s=0)
    spilled.put_many([bytes(1000)] * 2000)
    assert len(rounds(broker, clock, ticked)) == MANY + len(names)
    assert sorted(set(stepped)) == sorted(names)
    kept[0].ack()
    stepped.clear()
    rounds(broker, clock, ticked, 3)
    assert "held" not in stepped


async def by_tasks(broker: qflow.Broker, act: Callable[[qflow.aio.AsyncBroker], Coroutine[Any, Any, object]]) -> None:
    """Do something as a task."""
    await act(qflow.aio.AsyncBroker(broker))


def test_maintenance_looks_at_queues_that_have_changed(
    open_at: Callable[..., qflow.Broker], clock: Clock, ticked: list[str]
) -> None:
    """And once more, for what was under way; not at those that rest with messages, whatever changed them."""
    broker = open_at()
    queues = [broker.declare_queue(f"q{n:03}", durable=n < 20) for n in range(MANY)]
    for queue in queues:
        queue.put_many([b"x", b"y", b"z"])
    everyone = [queue.name for queue in queues]
    assert rounds(broker, clock, ticked) == everyone
    assert rounds(broker, clock, ticked, 2) == everyone
    assert rounds(broker, clock, ticked) == []

    held = queues[31].get()
    batch = queues[32].get_many(10)
    changes: list[tuple[qflow.Queue, Callable[[], object]]] = [
        (queues[3], lambda: queues[3].put(b"durable")),
        (queues[4], lambda: queues[4].get().ack(wait=True)),
        (queues[30], lambda: queues[30].put(b"plain")),
        (queues[33], lambda: queues[33].put(b"later", delay_s=60)),
        (queues[34], lambda: queues[34].get_many(10)),
        (queues[35], lambda: queues[35].get()),
        (queues[36], lambda: queues[36].purge()),
        (queues[37], lambda: broker.alter_queue(queues[37], limit_messages=5)),
        (queues[38], lambda: queues[38].put(b"unlogged", headers={"a": 1})),
        (queues[31], held.ack),
        (queues[32], batch.ack),
        (queues[5], lambda: queues[5].put_many([b"durable"] * 9)),
        (queues[5], lambda: queues[5].get_many(9).ack()),
        (queues[39], lambda: queues[39].put_many([b"x"] * 9)),
        (queues[40], lambda: broker.publish("forty", b"x")),
        (queues[41], lambda: asyncio.run(by_tasks(broker, lambda ours: ours.queue("q041").put(b"x")))),
        (queues[42], lambda: asyncio.run(by_tasks(broker, lambda ours: ours.queue("q042").get()))),
    ]
    broker.bind(queues[40], "forty")
    rounds(broker, clock, ticked, 3)
    for queue, change in changes:
        assert rounds(broker, clock, ticked) == []
        change()
        broker.engine.log.drain()
        assert rounds(broker, clock, ticked) == [queue.name]
        assert rounds(broker, clock, ticked, 2) == [queue.name]
    for n in (6, 7, 50, 51, 52):
        broker.bind(queues[n], "durable" if n < 20 else "transient")
    rounds(broker, clock, ticked, 3)
    broker.publish("transient", b"to several")
    assert rounds(broker, clock, ticked, 3) == ["q050", "q051", "q052"]
    broker.publish("durable", b"to several")
    assert rounds(broker, clock, ticked, 3) == ["q006", "q007"]
    with broker.transaction() as together:
        together.put(queues[8], b"x")
        together.put(queues[53], b"x")
    assert rounds(broker, clock, ticked, 3) == ["q008", "q053"]

    new = broker.declare_queue("new", durable=False)
    broker.declare_queue("logged")
    broker.delete_queue("q100")
    assert rounds(broker, clock, ticked, 3) == ["logged"], "nobody has used the other one"
    new.put(b"x")
    assert rounds(broker, clock, ticked, 3) == ["new"]
    assert rounds(broker, clock, ticked) == []


def test_maintenance_looks_at_queues_that_time_does_something_to(
    open_at: Callable[..., qflow.Broker], clock: Clock, ticked: list[str]
) -> None:
    """As long as it may: until what expires, or is held for too long, is no more."""
    broker = open_at()
    expiring = broker.declare_queue("expiring", durable=False, ttl_s=60)
    leased = broker.declare_queue("leased", durable=False, ack_timeout_s=60)
    watched = broker.declare_queue("watched", durable=False)
    watched.on_slow_consumer(60)
    for queue in (expiring, leased, watched):
        queue.put(b"x")
    assert len(rounds(broker, clock, ticked, 5)) == 3
    assert rounds(broker, clock, ticked) == ["expiring"]
    late, slow = leased.get(), watched.get()
    rounds(broker, clock, ticked, 5)
    assert rounds(broker, clock, ticked) == ["expiring", "leased", "watched"]
    clock.advance(60)
    rounds(broker, clock, ticked)
    assert expiring.stats().expired_total == 1
    assert leased.stats().redelivered_total == 1
    with pytest.raises(qflow.AlreadySettled):
        late.ack()
    slow.ack()
    rounds(broker, clock, ticked, 3)
    assert rounds(broker, clock, ticked) == []


def test_blocks_that_a_commit_left_wake_a_queue_that_rests(
    open_at: Callable[..., qflow.Broker], clock: Clock, ticked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes late on a slow disk; they are removed by maintenance, though nothing else of the queue changes."""
    broker = open_at()
    queue = broker.declare_queue("q")
    queue.put(b"x")
    rounds(broker, clock, ticked, 3)
    assert rounds(broker, clock, ticked) == []
    with monkeypatch.context() as patch:
        patch.setattr(removal, "remove_settled", lambda *_: (0, True))
        log, lane = broker.engine.log, parts_of(queue).logged_lanes[0]
        lane.remove_at = 0
        log.commit(log.settle(lane, []))
    assert rounds(broker, clock, ticked) == ["q"]
    assert not lane.removing


def test_a_get_that_is_given_up_wakes_a_queue_that_rests(
    open_at: Callable[..., qflow.Broker], clock: Clock, ticked: list[str]
) -> None:
    """Who looks at figures sees it wait no more, though no message came or went."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=False)

    def shown() -> int:
        clock.advance(1)
        rounds(broker, clock, ticked, 3)
        assert rounds(broker, clock, ticked) == []
        broker.engine.figures.changes(0)
        (known,) = broker.engine.figures._shown.values()
        assert known.facts["consumers_total"] == queue.stats().consumers_total
        return queue.stats().consumers_total

    async def give_up(ours: qflow.aio.AsyncBroker) -> None:
        getting = asyncio.create_task(ours.queue("q").get())
        while not parts_of(queue).gate.getters:
            await asyncio.sleep(0)
        assert shown() == 1
        getting.cancel()
        await asyncio.wait([getting])
        assert shown() == 0

    asyncio.run(by_tasks(broker, give_up))


def test_what_rests_is_not_gone_through(open_at: Callable[..., qflow.Broker], clock: Clock, ticked: list[str]) -> None:
    """By no round of maintenance, by nothing that is written, by nobody who looks at what has changed."""
    broker = open_at()
    for n in range(MANY):
        broker.declare_queue(f"q{n}", durable=n < 2).put(b"x")
    figures, queues = broker.engine.figures, broker.engine.queues
    for _ in range(2):  # until none has rates any more, and those are told
        clock.advance(WINDOWS_S[-1] + 60)
        rounds(broker, clock, ticked, 3)
        look, found = figures.changes(0)
        assert len(found) == MANY
    before = written(broker)
    queues._queues = Unlisted(queues._queues)
    figures._shown = Shown(figures._shown)
    clock.advance(1)
    assert written(broker) == {**before, "time_s": before["time_s"] + 1}
    rounds(broker, clock, ticked, 3)
    broker.queue("q7").put(b"y")
    broker.delete_queue("q8")
    broker.declare_queue("new", durable=False)
    rounds(broker, clock, ticked)
    clock.advance(1)
    assert sorted(figures.changes(look)[1]) == ["new", "q7", "q8"]
    assert figures.summary().messages == MANY
    queues._queues = dict(dict.items(queues._queues))


class Shown(dict[Any, Any]):
    """Values that nobody goes through from the first on."""

    def values(self) -> Any:
        return Backwards(super().values())


class Backwards:
    def __init__(self, values: Any) -> None:
        self._values = values

    def __reversed__(self) -> Iterator[Any]:
        for number, value in enumerate(reversed(self._values)):
            assert number < 9
            yield value


def test_figures_list_nothing_that_is_held_under_the_lock(open_at: Callable[..., qflow.Broker]) -> None:
    """However much it is, nobody waits for the lock meanwhile."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=False)
    queue.put_many([b"x"] * 50)
    kept = [queue.get_many(10), queue.get(), queue.get_many(10)]
    kept[2][0].ack()
    parts = parts_of(queue)

    class Listed(dict[Any, Any]):
        def __iter__(self) -> Iterator[Any]:
            assert not parts.context.lock._is_owned()
            return super().__iter__()

        keys = values = items = None  # type: ignore[assignment]

    expected = queue.stats()
    for name in ("batches", "singles"):
        setattr(parts.held, name, Listed(getattr(parts.held, name)))
    assert queue.stats() == attrs.evolve(expected, rates=queue.stats().rates)
    assert (expected.acquired_messages, expected.acquired_bytes) == (20, 20)
    assert [(one.consumer, one.messages) for one in expected.holders] == [("MainThread", 20)]
    for name in ("batches", "singles"):
        setattr(parts.held, name, dict(dict.items(getattr(parts.held, name))))


def written(broker: qflow.Broker) -> dict[str, Any]:
    """Have the figures written for others; return them as they are read."""
    broker.engine.figures.write()
    facts: dict[str, Any] = json.loads((Path(broker.path) / "stats.json").read_text())
    return facts


def told(broker: qflow.Broker) -> dict[str, Any]:
    """Return the same as the broker tells it itself."""
    facts: dict[str, Any] = json.loads(json.dumps(attrs.asdict(broker.stats())))
    return facts


def test_only_the_figures_of_queues_that_have_changed_are_found_anew(
    open_at: Callable[..., qflow.Broker], clock: Clock, ticked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is written has all of them, as they are, also for how long messages have been held."""
    broker = open_at()
    queues = [broker.declare_queue(f'q{n:03} "ä"', durable=n < 3) for n in range(MANY)]
    for queue in queues:
        queue.put(b"x")
    held = [queue.get() for queue in queues[5:10]]
    rounds(broker, clock, ticked, 3)
    facts = written(broker)
    assert told(broker).items() <= facts.items()
    asked: list[str] = []
    figures = looking.figures
    with monkeypatch.context() as patch:
        patch.setattr(looking, "figures", lambda queue: (asked.append(queue.context.name), figures(queue))[1])
        rounds(broker, clock, ticked, 2)
        aged = written(broker)
        assert asked == []
        queues[7].put(b"y")
        held[1].ack()
        broker.delete_queue(queues[50].name)
        queues.append(broker.declare_queue("new", durable=False))
        queues[-1].put(b"x")
        rounds(broker, clock, ticked)
        changed = written(broker)
        assert sorted(asked) == sorted(queue.name for queue in (queues[6], queues[7], queues[-1]))
    assert aged["queues"][queues[5].name]["oldest_unacked_s"] == 5
    assert told(broker).items() <= changed.items()
    assert changed["messages"] == MANY


def test_what_a_second_keeps_of_a_queue_looks_at_nothing_that_is_held(open_at: Callable[..., qflow.Broker]) -> None:
    """A broker that many consumers take batches from would hold its queues up each second."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=False)
    queue.put_many([b"x"] * 40)
    held = [queue.get_many(10), queue.get(), queue.get_many(10)]
    held[2][0].ack()
    held[2].nack()
    table = parts_of(queue).held
    for name in ("batches", "singles"):
        setattr(table, name, Unlisted(getattr(table, name)))
    broker.engine.figures.note_changed([queue])
    for name in ("batches", "singles"):
        setattr(table, name, dict(dict.items(getattr(table, name))))
    stats = queue.stats()
    totals = stats.put_total, stats.delivered_total, stats.acked_total, stats.redelivered_total
    assert totals == (40, 21, 1, 9)
    assert looking._flow(parts_of(queue)) == totals


def test_a_change_has_the_figures_of_a_queue_figured_once(
    open_at: Callable[..., qflow.Broker], clock: Clock, ticked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not each second anew while it is awake: as one that messages may expire from is, or once more after a change."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=False, ttl_s=10_000)
    queue.put(b"x")
    asked: list[str] = []
    figures = looking.figures
    monkeypatch.setattr(looking, "figures", lambda queue: (asked.append(queue.context.name), figures(queue))[1])
    for _ in range(5):
        assert rounds(broker, clock, ticked, 3) == ["q"]
        written(broker)
    assert asked == ["q"]
    queue.get().ack()
    for _ in range(3):
        rounds(broker, clock, ticked)
        assert written(broker)["queues"]["q"]["acked_total"] == 1
    assert asked == ["q", "q"]


def test_what_changes_beside_queues_that_rest_is_written(
    open_at: Callable[..., qflow.Broker], clock: Clock, ticked: list[str]
) -> None:
    """Also where no message comes or goes."""
    broker = open_at()
    broker.declare_queue("q", durable=False)
    for act, shown in [
        (lambda: None, {"q": False}),
        (lambda: broker.declare_queue("new", durable=False), {"q": False, "new": False}),
        (lambda: broker.queue("q").pause(), {"q": True, "new": False}),
        (lambda: broker.delete_queue("new"), {"q": True}),
    ]:
        act()
        rounds(broker, clock, ticked)
        assert {name: queue["paused"] for name, queue in written(broker)["queues"].items()} == shown


def test_what_takes_long_to_write_is_written_seldom(
    open_at: Callable[..., qflow.Broker], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it takes a bounded part of the time, however many queues there are."""
    broker = open_at()
    figures = broker.engine.figures
    used_s = iter((10.0, 10.02, 20.0, 21.0))
    monkeypatch.setattr("qflow.figures.time.thread_time", lambda: next(used_s))
    figures.write()
    assert figures.due == pytest.approx(clock.monotonic() + 4)
    figures.write()
    assert figures.due == pytest.approx(clock.monotonic() + 10)


def test_a_queue_that_maintenance_failed_at_is_looked_at_again(
    open_at: Callable[..., qflow.Broker], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nothing of it changes."""
    broker = open_at()
    broker.declare_queue("q", durable=False).put(b"x")
    steps = inside.upkeep(broker)
    asked: list[str] = []

    def fail(parts: Any) -> bool:
        asked.append(parts.context.name)
        raise ValueError("a bug")

    monkeypatch.setattr(upkeep, "tick", fail)
    for _ in range(5):
        clock.advance(1)
        steps.tick(steps.attempt)
    assert asked == ["q"] * 5


def test_what_fails_now_and_then_is_reported_once_a_minute(
    open_at: Callable[..., qflow.Broker], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a disk that is nearly full; what the statistics tell comes and goes with it."""
    broker = open_at()
    steps = inside.upkeep(broker)

    def fail() -> None:
        raise OSError("no room")

    def reports(part: str) -> int:
        return sum(f"maintenance ({part}) failed" in record.getMessage() for record in caplog.records)

    for seconds in range(90):
        steps.attempt("spilling", fail if seconds % 2 else lambda: None)
        assert ("spilling" in inside.troubles(broker)) == bool(seconds % 2)
        clock.advance(1)
    assert reports("spilling") == 2
    steps.attempt("wiping", fail)
    assert reports("wiping") == 1


def test_a_report_looks_at_no_other(
    open_at: Callable[..., qflow.Broker], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each of 10,000 queues fails, the first round would take half a minute; each second forgets what is old."""
    steps = inside.upkeep(open_at())

    def fail() -> None:
        raise OSError("no room")

    steps._reported = Unlisted()
    for number in range(3):
        steps.attempt(f"queue {number}", fail)
    assert len(steps._reported) == 3
    steps._reported = dict(dict.items(steps._reported))
    clock.advance(upkeep.REPORTED_S)
    steps._look_after()
    assert not steps._reported


@pytest.mark.owner_only(reason="it counts objects of the owner")
@pytest.mark.parametrize("spill", ["files", "segments"])
def test_an_idle_queue_is_few_objects_to_the_garbage_collector(
    open_at: Callable[..., qflow.Broker], spill: str
) -> None:
    """What it goes through holds up everybody: what a queue may never need is made when it does."""
    broker = open_at(spill=spill)
    broker.declare_queue("first")
    gc.collect()
    before = len(gc.get_objects())
    broker.declare_queues([f"q{n}" for n in range(MANY)])
    gc.collect()
    assert (len(gc.get_objects()) - before) / MANY < 42


def test_many_queues_are_declared_in_one_commit(open_at: Callable[..., qflow.Broker]) -> None:
    """Those that exist are returned, too, in the order of the names; all survive."""
    broker = open_at()
    first = broker.declare_queue("q1", limit_messages=5)
    before = broker.stats().commits_total
    names = [f"q{n}" for n in range(MANY)]
    queues = broker.declare_queues(iter([*names, "q7"]), limit_messages=5)
    assert broker.stats().commits_total == before + 1
    assert [queue.name for queue in queues] == [*names, "q7"]
    assert queues[1] is first
    assert queues[-1] is queues[7]
    assert broker.declare_queues(names[:2], limit_messages=5) == queues[:2]
    assert broker.stats().commits_total == before + 1
    assert broker.declare_queues([]) == []
    transient = broker.declare_queues(["t1", "t2"], durable=False)
    assert [queue.settings.durable for queue in transient] == [False, False]
    for queue in queues[:MANY]:
        queue.put(queue.name.encode())
    broker.close()
    again = open_at()
    assert again.queues() == sorted(names)
    assert all(again.queue(name).get(0).body == name.encode() for name in names)
    assert again.queue("q8").settings.limit_messages == 5


def test_either_all_of_many_queues_are_declared_or_none(open_at: Callable[..., qflow.Broker]) -> None:
    """Names, settings and what exists are looked at before anything is made."""
    broker = open_at()
    broker.declare_queue("other", max_deliveries=3)
    broker.declare_queue("passing", durable=False)
    commits = broker.stats().commits_total
    refused: list[tuple[Any, type[Exception], dict[str, Any]]] = [
        (["a", "other"], qflow.SettingsConflict, {}),
        (["a", ""], qflow.InvalidArgument, {}),
        (["a", 5], qflow.InvalidArgument, {}),
        ("ab", qflow.InvalidArgument, {}),
        (["a", "dead"], qflow.InvalidArgument, {"dead_letter": "dead"}),
        (["a"], qflow.InvalidArgument, {"dead_letter": "passing"}),
        (["a"], qflow.InvalidArgument, {"limit_messages": -1}),
    ]
    for names, error, settings in refused:
        with pytest.raises(error):
            broker.declare_queues(names, **settings)
    assert broker.queues() == ["other", "passing"]
    assert broker.stats().commits_total == commits
    altered = broker.declare_queues(["new", "other"], max_deliveries=3, capacity_bytes="1KiB")
    assert [queue.settings.capacity_bytes for queue in altered] == [1024, 1024]


@pytest.mark.owner_only
@pytest.mark.parametrize("where", ["first", "last"])
def test_what_deleted_queues_left_goes_many_in_a_commit(open_at: Callable[..., qflow.Broker], where: str) -> None:
    """What is large goes in parts, with every other commit: neither waits for the other."""
    broker = open_at()
    inside.still(broker)
    broker.declare_queue("large")
    for _ in range(6):
        broker.queue("large").put_many([b"x" * 40_000] * 64)
    names = [f"q{n}" for n in range(MANY)]
    broker.declare_queues(names)
    for name in [*names, "large"] if where == "first" else ["large", *names]:  # the last one is taken first
        broker.delete_queue(name)
    log, commits = broker.engine.log, broker.stats().commits_total
    while inside.upkeep(broker).remove_deleted():
        pass
    with log.read() as txn, txn.cursor() as cursor:
        left = [key for key in cursor.iternext(values=False) if key[0] in (BLOCKS, QUEUES)]
    assert left == []
    assert broker.stats().commits_total - commits <= 3 + 2 * -(-MANY // upkeep.CLEARED_AT_ONCE)
