"""Operations of the wire that clients make of several calls: transactions, pages of what waits, dead letters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import qflow
from door_raw import RawDoor
from qflow.aio.loops import THREADS
from qflow.remote.server import session
from qflow.remote.server.operations import queues
from qflow.remote.wire.errors import decode_error
from qflow.remote.wire.frames import encode_frame
from unit.clocks import LONG_S, until


def test_a_transaction_is_done_whole_or_not_at_all(owner: qflow.Broker, spool: Path) -> None:
    """Puts, publishes and acks in one commit; one that fails settles nothing."""
    jobs, results = owner.declare_queue("jobs"), owner.declare_queue("results")
    owner.declare_stream("log", topics=["plant/#"])
    jobs.put_many([b"1", b"2", b"3"])
    with RawDoor(spool).greeted() as raw:
        grant = raw.ask({"op": "get", "queue": "jobs", "most": 3}).head["result"]["grant"]
        steps: list[dict[str, Any]] = [
            {"do": "put", "queue": "results", "single": True, "bodies": 1, "headers": {"a": 1}},
            {"do": "publish", "topic": "plant/1", "key": True},
            {"do": "put", "queue": "results", "bodies": 2},
            {"do": "ack", "grant": grant, "places": [[0, 2]]},
        ]
        columns = [b"single", b"published", b"one", b"two"], [b"key"]
        failed = raw.ask({"op": "transaction", "steps": [*steps, {"do": "ack", "grant": 99}]}, *columns)
        assert type(decode_error(failed.head)) is qflow.AlreadySettled
        assert (len(jobs), len(results)) == (3, 0)
        told = raw.ask({"op": "transaction", "steps": steps, "timeout_s": 10}, *columns).head["result"]
        published = {"offsets": {"log": 0}, "sequences": {}}
        assert told == [{"sequence": 0}, {"published": [[1, published]]}, {"range": [1, 3]}]
        assert raw.ask({"op": "ack", "grant": grant, "wait": True}).head == {"result": None}
    assert len(jobs) == 0
    assert results.get_many(10).bodies == [b"single", b"one", b"two"]
    assert owner.stream("log").last("plant/1")["plant/1"].key == b"key"


def test_what_waits_is_shown_in_pages_and_moved(owner: qflow.Broker, spool: Path) -> None:
    """As it was when the first page was asked for."""
    jobs = owner.declare_queue("jobs", durable=False)
    jobs.put_many([b"x"] * 2500)
    with RawDoor(spool).greeted() as raw:
        page = raw.ask({"op": "browse", "queue": "jobs"}).head["result"]
        jobs.put(b"late")
        found = page["entries"]
        while page["browse"] is not None:
            page = raw.ask({"op": "browse_next", "browse": page["browse"]}).head["result"]
            found += page["entries"]
        assert [sequence for sequence, *_ in found] == list(range(2500))
        assert found[0] == [0, 1, "resident", None]
        move = {"op": "move_entry", "queue": "jobs", "sequence": 7}
        assert raw.ask({**move, "to": "disk"}).head["result"] == "spilled"
        assert raw.ask({**move, "to": "memory"}).head["result"] == "resident"
        again = raw.ask({"op": "browse", "queue": "jobs"}).head["result"]["browse"]
        assert raw.ask({"op": "browse_close", "browse": again}).head == {"result": None}
        gone = decode_error(raw.ask({"op": "browse_next", "browse": again}).head)
        assert type(gone) is qflow.NotFound


@pytest.mark.parametrize(("kind", "source", "places"), [("browse", "queue", "entries"), ("query", "stream", "offsets")])
def test_so_many_may_be_open_whose_pages_are_to_come(
    owner: qflow.Broker, spool: Path, kind: str, source: str, places: str
) -> None:
    """Asked for at once, too: the ones beyond that are refused in a sentence, and the first ones go on."""
    owner.declare_queue("one", durable=False).put_many([b"x"] * 1500)
    owner.declare_stream("one", topics=["a"])
    owner.publish_many([("a", b"x")] * 300)
    head = {"op": kind, source: "one", "filter": "#"}
    with RawDoor(spool).greeted() as raw:
        raw.send(b"".join(b"".join(encode_frame(number, head)) for number in range(100, 105 + session.MOST_OPEN)))
        answers = [raw.frame() for _ in range(5 + session.MOST_OPEN)]
        refused = [decode_error(one.head) for one in answers if one and "error" in one.head]
        assert [type(error) for error in refused] == [qflow.InvalidArgument] * 5
        assert "end some of them" in str(refused[0])
        opened = [one.head["result"][kind] for one in answers if one and "result" in one.head]
        follows = raw.ask({"op": f"{kind}_next", kind: opened[0]}).head["result"]
        assert follows[kind] is None
        assert len(follows[places]) == {"browse": 500, "query": 1}[kind]
        assert raw.ask({"op": f"{kind}_close", kind: opened[1]}).head == {"result": None}
        assert "result" in raw.ask(head).head
        assert "result" in raw.ask(head).head
        assert "error" in raw.ask(head).head


def test_a_page_takes_no_more_from_the_disk_than_it_has(
    owner: qflow.Broker, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of large messages as many as fit in one answer."""
    stream = owner.declare_stream("s", topics=["a"])
    owner.publish_many([("a", bytes(2**20))] * 20)
    read: list[Any] = []
    query = type(stream).query

    def counted(*given: Any, **options: Any) -> Iterator[Any]:
        for message in query(*given, **options):
            read.append(message)
            yield message

    monkeypatch.setattr(type(stream), "query", counted)
    with RawDoor(spool).greeted() as raw:
        page = raw.ask({"op": "query", "stream": "s", "filter": "#"})
        assert len(page.columns[0]) == len(read) == 8


def test_dead_letters_are_moved_back(owner: qflow.Broker, spool: Path) -> None:
    """As `qflow redrive` does it."""
    jobs = owner.declare_queue("jobs", dead_letter="dead")
    jobs.put(b"x")
    jobs.get().nack(requeue=False)
    owner.engine.log.drain()
    with RawDoor(spool).greeted() as raw:
        assert raw.ask({"op": "redrive", "queue": "dead"}).head["result"] == {"moved": {"jobs": 1}, "kept": {}}
        chosen = {"op": "redrive_chosen", "queue": "dead"}
        for wrong in ({}, {"sequences": None}, {"sequences": 7}, {"sequences": ["7"]}):
            assert raw.ask(chosen | wrong).head["error"] == "InvalidArgument", "none is not all"
        assert raw.ask(chosen | {"sequences": []}).head["result"] == {"moved": {}, "kept": {}}
    assert jobs.get(60).body == b"x"


@pytest.mark.parametrize(
    ("where", "name", "ask", "answer"),
    [
        (queues, "move_back", lambda near: near.redrive("dead"), qflow.RedriveReport(moved={}, kept={})),
        (qflow.Broker, "check", lambda near: near.check(), []),
        (qflow.Broker, "compact", lambda near: near.compact(), qflow.CompactionReport(bytes_before=2, bytes_after=1)),
    ],
)
def test_what_takes_minutes_holds_up_nobody_else(
    owner: qflow.Broker,
    spool: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: object,
    name: str,
    ask: Callable[[qflow.RemoteBroker], object],
    answer: object,
) -> None:
    """Those who wait for the disk have few threads."""
    begun: list[tuple[Any, ...]] = []
    answered = threading.Event()

    def work(*given: Any, **_options: Any) -> object:
        begun.append(given)
        assert answered.wait(LONG_S), "nobody was answered"
        return answer

    def connect_and_ask() -> object:
        with qflow.connect(spool) as near:
            return ask(near)

    monkeypatch.setattr(where, name, work)
    with qflow.connect(spool) as other, ThreadPoolExecutor() as pool:
        asked = [pool.submit(connect_and_ask) for _ in range(3)]
        until(lambda: len(begun) == 2)
        other.declare_queue("other")
        answered.set()
        assert [one.result() for one in asked] == [answer] * 3


def test_figures_are_told_as_they_are(owner: qflow.Broker, spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of thousands of queues would hold the loop up that goes through them."""
    owner.declare_queue("jobs")

    def refuse(_: object) -> None:
        raise AssertionError("gone through")

    with RawDoor(spool).greeted() as raw:
        monkeypatch.setattr(session, "plain", refuse)
        _, found = raw.ask({"op": "figures", "since": 0}).head["result"]
    assert found["jobs"]["messages"] == 0


def test_copies_figures_and_events(owner: qflow.Broker, spool: Path, tmp_path: Path) -> None:
    """Of the whole broker."""
    jobs = owner.declare_queue("jobs", limit_messages=1, on_overflow=qflow.Overflow.DROP_NEWEST)
    with RawDoor(spool).greeted() as raw:
        assert raw.ask({"op": "events"}).head == {"result": None}
        jobs.put_many([b"x"])
        jobs.put(b"y")
        notice = raw.frame()
        assert notice is not None
        assert (notice.number, notice.head["event"]["kind"]) == (0, "limit_reached")
        report = raw.ask({"op": "snapshot", "path": str(tmp_path / "copy")}).head["result"]
        assert report["path"] == str(tmp_path / "copy")
        assert "error" not in raw.ask({"op": "compact"}).head
        assert raw.ask({"op": "recovery"}).head["result"]["clean"]
    with qflow.open(tmp_path / "copy") as copy:
        assert len(copy.queue("jobs")) == 1


def test_messages_are_put_as_they_were_or_one_is_named_that_is_not_taken(owner: qflow.Broker, spool: Path) -> None:
    """In one commit, and only where the request makes sense."""
    jobs = owner.declare_queue("jobs")
    item = ["queue", "jobs", 0, 0, 0, 0, ""]
    columns = [b"a", b"b"], [b'{"h":1}', b""], [b"", b""]
    with RawDoor(spool).greeted() as raw:
        told = raw.ask({"op": "restore", "items": [item, ["queue", "none", 0, 0, 0, 0, ""]]}, *columns).head["result"]
        assert (told["refused"], told["error"]) == (1, "NotFound")
        for items, sent in [
            ("x", columns),
            ([item, [*item, 1]], columns),
            ([item, ["queue", "jobs", 0, True, 0, 0, ""]], columns),
            ([item, ["queue", "jobs", -1, 0, 0, 0, ""]], columns),
            ([item, ["queue", "jobs", 0, 0, 2**64, 0, ""]], columns),
            ([item, ["table", "jobs", 0, 0, 0, 0, ""]], columns),
            ([item], columns),
            ([item, item], columns[:2]),
            ([item, item], (columns[0], [b"{", b""], columns[2])),
        ]:
            refused = decode_error(raw.ask({"op": "restore", "items": items}, *sent).head)
            assert type(refused) is qflow.InvalidArgument
        assert len(jobs) == 0
        past = ["queue", "jobs", 0, 0, 1, 0, ""]
        assert raw.ask({"op": "restore", "items": [item, past]}, *columns).head == {"result": {"expired": 1}}
    [delivery] = jobs.get_many(10)
    assert (delivery.body, delivery.headers) == (b"a", {"h": 1})


def test_statistics_wait_for_no_sync(owner: qflow.Broker, spool: Path) -> None:
    """Of a queue and of a stream, while two callers that declare queues have all threads for the disk."""
    owner.declare_queue("jobs").put(b"x")
    owner.declare_stream("log", topics=["log"])
    owner.publish("log", b"x")
    with RawDoor(spool).greeted() as declaring, RawDoor(spool).greeted() as raw:
        with owner.engine.spool.changing:  # as one has that waits for the sync of another queue
            declared = {declaring.request({"op": "declare_queues", "names": [name]}) for name in ("a", "b")}
            until(lambda: sum(one.name == "qflow-aio" for one in threading.enumerate()) == THREADS)
            assert raw.ask({"op": "queue_stats", "queue": "jobs"}).head["result"]["messages"] == 1
            assert raw.ask({"op": "stream_stats", "stream": "log"}).head["result"]["messages"] == 1
        assert {declaring.frame().number for _ in declared} == declared  # type: ignore[union-attr]
