"""`qflow.doctor`: what is told of which figures, and how bad it is."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner

import qflow
from pages import ROOT
from qflow.cli.main import app
from qflow.doctor import KINDS, Finding, Letters, Look, Severity, judge, judge_each, looking
from qflow.doctor.judging import MOST
from qflow.doctor.words import harmless, size, span
from qflow.errors import CorruptionError, FormatTooNew
from qflow.stats import BrokerStats, TimeStats
from qflow.troubles import LOG_TAKES, SPOOL_THERE

GIB = 2**30


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The statistics of a broker where all is well, with a queue and a stream."""
    with qflow.open(tmp_path_factory.mktemp("doctor") / "spool", capacity_bytes="1MiB", door=False) as broker:
        broker.declare_queue("q", limit_messages=1000)
        broker.declare_stream("plant", topics=["plant/#"])
        broker.subscribe("plant", "plant/#", name="reader").close()
        return attrs.asdict(broker.stats())


def told(empty: dict[str, Any], **of_queue: Any) -> dict[str, Any]:
    """Return statistics with other figures of the queue."""
    return {**empty, "queues": {"q": {**empty["queues"]["q"], **of_queue}}}


def only(look: Look) -> Finding:
    (found,) = judge(look)
    return found


def test_nothing_is_found_where_all_is_well(empty: dict[str, Any]) -> None:
    """Neither with an owner nor without one."""
    assert judge(Look(path="spool", stats=empty, owner_pid=7)) == []
    assert judge(Look(path="spool", disk_bytes=100 * GIB, disk_free_bytes=50 * GIB)) == []


HOLDER = {"consumer": "mailer-3", "pid": 4711, "messages": 1, "oldest_s": 2400.0}


def test_who_holds_a_message_too_long_is_named(empty: dict[str, Any]) -> None:
    """With process and time; for a remedy, another than to end the owner itself."""
    stats = told(empty, holders=[HOLDER], oldest_unacked_s=2400.0)
    found = only(Look(path="sp ool", stats=stats, owner_pid=7))
    assert found.sentence == "consumer 'mailer-3' of process 4711 has held a message of queue 'q' for 40 minutes"
    assert (found.severity, found.kind, found.queue) == (Severity.URGENT, "held-too-long", "q")
    assert "`kill 4711;" in found.remedy
    assert "`qflow alter 'sp ool' q ack_timeout_s=600`" in found.remedy
    assert "`kill" not in only(Look(path="spool", stats=stats, owner_pid=4711)).remedy
    assert "`kill" not in only(Look(path="spool", stats=stats, owner_pid=0)).remedy, "it is another process here"
    assert only(Look(path="s", stats=told(empty, oldest_unacked_s=400.0))).severity is Severity.PROBLEM
    assert judge(Look(path="s", stats=told(empty, oldest_unacked_s=200.0))) == []


def test_blocked_producers_are_counted(empty: dict[str, Any]) -> None:
    """With the limit that they are blocked at, and who takes."""
    stats = told(empty, blocked_putters=5, blocked_longest_s=12.0, blocked_on="limit_messages")
    found = only(Look(path="spool", stats=stats))
    assert found.sentence == (
        "5 producers blocked for up to 12 s at limit_messages of queue 'q' (1,000); nobody takes from it"
    )
    assert (found.severity, found.kind) == (Severity.URGENT, "blocked-producers")
    assert "limit_messages=2000" in found.remedy
    growing = {"lag_messages": 500, "messages": 500, "rates": {**RATES, "put_60s": 4.0, "put_10s": 4.0}}
    assert (
        only(Look(path="spool", stats=told(stats, **{**stats["queues"]["q"], **growing}))).kind == "blocked-producers"
    )
    for by_gets in ({"acquired_messages": 1}, {"rates": {**RATES, "delivered_60s": 0.1}}):
        found = only(Look(path="spool", stats=told(stats, **{**stats["queues"]["q"], **by_gets})))
        assert found.sentence.endswith("; somebody takes now and then from it")
    by_memory = told(empty, blocked_putters=1, blocked_longest_s=2.0, blocked_on="capacity", consumers_total=2)
    found = only(Look(path="spool", stats=by_memory))
    assert found.sentence.startswith("1 producer blocked for up to 2.0 s at the capacity of memory")
    assert found.sentence.endswith("; 2 consumers take from it")


FLOWS = ("put", "delivered", "acked", "redelivered")
RATES = dict.fromkeys((f"{what}_{span}s" for what in FLOWS for span in (1, 10, 60)), 0.0)


STOPPED = {**RATES, "put_60s": 9.0}
"""What was put stopped coming ten seconds ago."""


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"rates": {**RATES, "put_60s": 4.0, "put_10s": 4.0}}, "no-consumer"),
        ({"rates": {**RATES, "put_60s": 4.0, "put_10s": 4.0}, "consumers_total": 1}, "slow-consumers"),
        ({"rates": RATES}, None),
        ({"rates": {}, "put_total": 500}, "no-consumer"),
        ({"rates": {}, "put_total": 500, "delivered_total": 1}, None),
        ({"rates": {**RATES, "put_60s": 9.0, "put_10s": 9.0, "acked_60s": 2.0, "delivered_60s": 2.0}, "consumers_total": 1}, "slow-consumers"),
        ({"rates": {**STOPPED, "acked_60s": 2.0, "delivered_60s": 2.0}, "consumers_total": 1}, None),
        ({"rates": {**RATES, "put_60s": 9.0, "put_10s": 9.0, "acked_60s": 9.0, "delivered_60s": 9.0}, "consumers_total": 1}, None),
        ({"rates": {**RATES, "put_60s": 9.0, "put_10s": 54.0, "acked_60s": 2.0, "acked_10s": 12.0, "delivered_60s": 2.0}}, None),
        ({"rates": RATES, "paused": True}, "paused"),
        ({"rates": RATES, "at_limit": True}, "no-consumer"),
        ({"rates": RATES, "at_limit": True, "consumers_total": 1}, None),
    ],
)  # fmt: skip
def test_a_queue_that_grows_is_told(empty: dict[str, Any], changes: dict[str, Any], kind: str | None) -> None:
    """By its rates, or by what its owner has counted if that has no rates; a queue of dead letters has no consumers."""
    stats = told(empty, **{"lag_messages": 500, "messages": 500, "consumers_total": 0, **changes})
    assert [finding.kind for finding in judge(Look(path="s", stats=stats))] == ([kind] if kind else [])
    as_letters = [finding.kind for finding in judge(Look(path="s", stats=stats, letters={"q": Letters(messages=0)}))]
    is_taken = bool(stats["queues"]["q"]["consumers_total"])
    assert as_letters == (([kind] if kind else []) if is_taken else ["dead-letters"]), "who takes them handles them"


def test_letters_are_as_many_as_their_owner_says(empty: dict[str, Any]) -> None:
    """The log was read a moment ago. Of AMQP they are letters where the queue is there, and nobody takes them."""
    stats = told(empty, messages=500, lag_messages=500)
    look = Look(path="s", stats=stats, letters={"q": Letters(messages=0)})
    assert only(look).sentence == "500 dead letters in queue 'q'"
    by_amqp = attrs.evolve(look, letters=dict.fromkeys(("q", "deleted"), Letters(messages=7, is_named=False)))
    assert only(by_amqp).sentence == "500 dead letters in queue 'q'"
    assert judge(attrs.evolve(by_amqp, stats=told(stats, messages=500, acquired_messages=1))) == []
    assert judge(Look(path="s", letters=by_amqp.letters)) == [], "nobody knows who takes them"


def test_what_expires_into_another_queue_needs_no_consumer(empty: dict[str, Any]) -> None:
    """By its settings, or by the times that its messages were given."""
    waits = {"lag_messages": 500, "messages": 500, "rates": {**RATES, "put_60s": 4.0, "put_10s": 4.0}}
    look = Look(path="s", stats=told(empty, **waits))
    assert only(look).kind == "no-consumer"
    assert judge(attrs.evolve(look, passing=frozenset({"q"}))) == []
    consumed = Look(path="s", stats=told(empty, **waits, delivered_total=9), passing=frozenset({"q"}))
    assert only(consumed).kind == "no-consumer", "somebody has taken from it, and is gone"
    has_left = {"expired_total": 3, "dead_lettered_total": 3}
    assert judge(Look(path="s", stats=told(empty, **waits, **has_left))) == []
    assert only(Look(path="s", stats=told(empty, **waits, **has_left, delivered_total=9))).kind == "no-consumer"


def test_a_queue_that_grows_no_more_is_not_said_to_grow(empty: dict[str, Any]) -> None:
    """Nobody consumes it all the same."""
    waits = {"lag_messages": 500, "messages": 500}
    found = only(Look(path="s", stats=told(empty, **waits, rates=STOPPED)))
    assert found.sentence == "nobody consumes queue 'q': 500 messages wait"
    found = only(Look(path="s", stats=told(empty, **waits, rates={**STOPPED, "put_10s": 8.0})))
    assert found.sentence == "nobody consumes queue 'q', and it grows: 500 messages wait, 9.0 more each second"


def test_a_queue_that_drops_or_expires_what_it_has_is_not_said_to_grow(empty: dict[str, Any]) -> None:
    """A ring at its limit, and messages that have a time to live: as many come as go."""
    waits = {"lag_messages": 500, "messages": 500, "rates": {**RATES, "put_60s": 9.0, "put_10s": 9.0}}
    found = only(Look(path="s", stats=told(empty, **waits, at_limit=True, limit_bytes=4096)))
    assert found.sentence == (
        "nobody consumes queue 'q', and it is at limit_messages (1,000) or limit_bytes (4.0 KiB): 500 messages wait, and "
        "its on_overflow decides about each further put"
    )
    found = only(Look(path="s", stats=told(empty, **waits, expired_total=7000, dropped_total=2)))
    assert found.sentence == (
        "nobody consumes queue 'q': 500 messages wait, 9.0 come each second; since its owner was started 7,000 expired "
        "and 2 were dropped"
    )


def test_an_owner_that_was_just_started_has_rates_of_what_has_passed(empty: dict[str, Any]) -> None:
    """In its first minute there are less of a minute than there were a second."""
    waits = {"lag_messages": 900, "messages": 900, "rates": {**RATES, "put_60s": 15.0, "put_10s": 90.0}}
    found = only(Look(path="s", stats=told(empty, **waits)))
    assert found.sentence == "nobody consumes queue 'q', and it grows: 900 messages wait, 90.0 more each second"
    takes = {"consumers_total": 2, "rates": {**waits["rates"], "acked_60s": 1.0, "acked_10s": 6.0}}
    found = only(Look(path="s", stats=told(empty, **{**waits, **takes})))
    assert found.sentence == (
        "2 consumers of queue 'q' fall behind: 90.0 messages a second come, 6.0 are acked, 900 wait"
    )


RETURNING = {**RATES, "delivered_60s": 12.0, "redelivered_60s": 11.9, "redelivered_10s": 12.0}


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "coming-back"),
        ({"rates": {**RETURNING, "put_60s": 4.0, "put_10s": 4.0}}, "coming-back"),
        ({"rates": {**RETURNING, "acked_60s": 1.3}}, "coming-back"),
        ({"rates": {**RETURNING, "acked_60s": 1.4}}, None),
        ({"rates": {**RETURNING, "redelivered_60s": 0.19}}, None),
        ({"rates": {**RETURNING, "redelivered_10s": 0.0}}, None),
        ({"dead_lettered_total": 300}, None),
        ({"messages": 0}, None),
        ({"rates": {}}, None),
    ],
)
def test_a_queue_whose_messages_come_back_is_told(
    empty: dict[str, Any], changes: dict[str, Any], kind: str | None
) -> None:
    """Not where some get done, where it has ended, or where what comes back becomes a dead letter."""
    of_queue = {"rates": RETURNING, "messages": 3, "lag_messages": 3, "consumers_total": 2, "redelivered_total": 500}
    found = judge(Look(path="s", stats=told(empty, **{**of_queue, **changes})))
    assert [finding.kind for finding in found] == ([kind] if kind else [])
    if not changes:
        assert found[0].sentence == (
            "what queue 'q' delivers comes back: 11.9 deliveries a second, and 0.0 messages are acked; it has 3 messages"
        )
        assert "`qflow alter s q max_deliveries=5 dead_letter=q.dead`" in found[0].remedy


@pytest.mark.parametrize(("messages", "said"), [(1, "1 message waits"), (0, "0 messages wait"), (2, "2 messages wait")])
def test_a_paused_queue_says_what_waits_and_which_key_lets_it_go_on(
    empty: dict[str, Any], messages: int, said: str
) -> None:
    found = only(Look(path="s", stats=told(empty, messages=messages, paused=True, rates=RATES)))
    assert found.sentence == f"queue 'q' is paused; {said}"
    assert found.remedy.startswith("`p` in `qflow top`, ")


def test_what_no_command_shows_is_not_to_be_peeked_at(empty: dict[str, Any]) -> None:
    """Messages of a transient queue are in its owner's memory alone; a purge reaches it, and a redrive."""
    for durable in (True, False):
        stats = told(
            empty, lag_messages=5, messages=5, rates={**RATES, "put_60s": 4.0, "put_10s": 4.0}, durable=durable
        )
        found = only(Look(path="s", stats=stats))
        assert ("`qflow peek s q` shows what waits" in found.remedy, "`qflow purge s q`" in found.remedy) == (
            durable,
            True,
        )
        found = only(Look(path="s", stats=stats, letters={"q": Letters(messages=5)}))
        assert ("`qflow peek" in found.remedy, "`qflow redrive s q`" in found.remedy) == (durable, True)


def test_who_falls_behind_may_be_nobody_who_is_there_now(empty: dict[str, Any]) -> None:
    """Gets that come and go are no consumers."""
    rates = {**RATES, "put_60s": 9.0, "put_10s": 9.0, "acked_60s": 2.0, "delivered_60s": 2.0}
    for takers, who, what in (
        (2, "2 consumers of", "fall"),
        (1, "1 consumer of", "falls"),
        (0, "those who take from", "fall"),
    ):
        stats = told(empty, rates=rates, consumers_total=takers, lag_messages=500, messages=500)
        assert only(Look(path="s", stats=stats)).sentence.startswith(f"{who} queue 'q' {what} behind: 9.0 messages ")


def test_a_remedy_is_for_what_is_lost(empty: dict[str, Any]) -> None:
    """What was in no log is named by no check, and a spool that is repaired would not have it."""
    in_no_log = only(Look(path="s", stats=told(empty, lost_total=5)))
    assert ("qflow check" in in_no_log.remedy, "nothing brings those back" in in_no_log.remedy) == (False, True)
    damaged = only(Look(path="s", stats=told(empty, quarantined_total=5)))
    assert ("qflow check s --repair" in damaged.remedy, "nothing brings" in damaged.remedy) == (True, False)
    both = only(Look(path="s", stats=told(empty, lost_total=2, quarantined_total=5)))
    assert "2 of them were spilled" in both.remedy
    assert "qflow check s --repair" in both.remedy


def test_a_process_that_is_stopped_is_ended_by_the_remedy(empty: dict[str, Any]) -> None:
    """It takes SIGTERM when it goes on."""
    held = only(Look(path="s", stats=told(empty, holders=[HOLDER]), owner_pid=7))
    for found, pid in ((held, 4711), (only(Look(path="s", readers=((99, 5000),))), 99)):
        assert f"`kill {pid}; kill -CONT {pid}`" in found.remedy


def test_why_a_batch_waits_is_told_as_a_whole() -> None:
    """After a long name, too: what to do stands at the end."""
    why = f"queue {'q' * 200!r} is at its limit: settle messages"
    assert why in only(Look(path="s", stats={"inbox": {"problem": why}})).sentence


def test_dead_letters_have_a_reason() -> None:
    """The one that is the most frequent among those that were looked at."""
    letters = Letters(messages=2000, reasons=(("card declined", 400), ("expired", 100)), looked_at=500)
    found = only(Look(path="spool", letters={"dead": letters}))
    assert found.sentence == (
        "2,000 dead letters in queue 'dead'; 400 of the first 500 for the commonest reason: 'card declined'"
    )
    assert "`qflow redrive spool dead`" in found.remedy


@pytest.mark.parametrize(
    ("look", "kind", "severity"),
    [
        ({"disk_bytes": 100 * GIB, "disk_free_bytes": 5 * GIB}, "disk-full", Severity.PROBLEM),
        ({"disk_bytes": 100 * GIB, "disk_free_bytes": GIB // 2}, "disk-full", Severity.URGENT),
        ({"disk_bytes": 10_000 * GIB, "disk_free_bytes": 20 * GIB}, None, None),
        ({"disk_inodes": 1_000_000, "disk_free_inodes": 5000}, "disk-full", Severity.PROBLEM),
        ({"disk_inodes": 40, "disk_free_inodes": 3}, "disk-full", Severity.URGENT),
        ({"disk_inodes": 40, "disk_free_inodes": 30}, None, None),
        ({"log_bytes": GIB, "log_used_bytes": GIB // 4}, "log-mostly-dead", Severity.NOTICE),
        ({"log_bytes": 2**20, "log_used_bytes": 0}, None, None),
        ({"readers": ((99, 5000),)}, "pinned-pages", Severity.PROBLEM),
        ({"readers": ((99, 5),)}, None, None),
        ({"clean": False}, "not-closed", Severity.NOTICE),
        ({"problems": ("block 7 is damaged", "more")}, "damage", Severity.URGENT),
        ({"failure": CorruptionError("pages are damaged")}, "damage", Severity.URGENT),
        ({"is_there": False}, "removed", Severity.URGENT),
        ({"is_there": False, "has_log": False}, "removed", Severity.URGENT),
        ({"has_log": False, "stats": {"troubles": {SPOOL_THERE: "removed"}}}, "removed", Severity.URGENT),
        ({"has_log": False, "owner_pid": 7, "stats": {}}, "removed", Severity.URGENT),
        ({"has_log": False}, "damage", Severity.URGENT),
        ({"has_pages": False, "stats": {"troubles": {SPOOL_THERE: "removed"}}}, "removed", Severity.URGENT),
        ({"stats": {"troubles": {LOG_TAKES: "the disk failed"}}}, "log-failed", Severity.URGENT),
        ({"failure": FormatTooNew("it has format 9")}, "newer-format", Severity.URGENT),
        ({"refused_batches": 2}, "refused-batches", Severity.PROBLEM),
        ({"last_commit": "cannot read it"}, "last-commit-unusable", Severity.PROBLEM),
        ({"stats": {"troubles": {"spilling": "no room"}}}, "maintenance", Severity.PROBLEM),
        ({"stats": {"inbox": {"problem": "the queue is full"}}}, "maintenance", Severity.PROBLEM),
        ({"stats": {"capacity_bytes": 100, "resident_bytes": 99, "queues": {}}}, "memory-full", Severity.NOTICE),
        ({"stats": {"sync_times": {"longest_s": 0.4}}}, None, None),
        ({"stats": {"sync_times": {"longest_s": 0.6}}}, "slow-syncs", Severity.NOTICE),
        ({"stats": {"sync_times": {"longest_s": 7}}}, "slow-syncs", Severity.PROBLEM),
        ({"stats": {"sync_times": {"longest_s": 0.0, "under_way_s": 0.4}}}, None, None),
        ({"stats": {"sync_times": {"longest_s": 0.0, "under_way_s": 0.6}}}, "slow-syncs", Severity.NOTICE),
        ({"stats": {"sync_times": {"longest_s": 0.0, "under_way_s": 7}}}, "slow-syncs", Severity.URGENT),
        ({"owner_pid": 7, "is_told": False, "told_s_ago": 2.0, "stats": {}}, "no-door", Severity.NOTICE),
    ],
)
def test_what_the_spool_itself_has(look: dict[str, Any], kind: str | None, severity: Severity | None) -> None:
    """Disk, log, readers, owner, damage."""
    found = [(finding.kind, finding.severity) for finding in judge(Look(path="spool", **look))]
    assert found == ([(kind, severity)] if kind else [])


@pytest.mark.parametrize(("used_bytes", "named"), [(GIB // 4, False), (GIB, True)])
def test_what_a_compaction_lacks_is_said_on_a_full_disk(used_bytes: int, named: bool) -> None:
    """It writes a copy before it gives anything back."""
    look = Look(path="s", disk_bytes=100 * GIB, disk_free_bytes=GIB // 2, log_used_bytes=used_bytes)
    assert ("`qflow compact s`, which needs 1.0 GiB for a copy before;" in only(look).remedy) is named


@pytest.mark.parametrize(
    ("disk_free_bytes", "blocked_on", "goes_on"),
    [(GIB, "", False), (50 * GIB, "capacity", False), (50 * GIB, "limit_messages", True), (50 * GIB, "", True)],
)
def test_puts_do_not_go_on_where_nothing_more_is_spilled(
    empty: dict[str, Any], disk_free_bytes: int, blocked_on: str, goes_on: bool
) -> None:
    """Memory is full, and the disk is, or puts wait for memory."""
    blocked = {"blocked_putters": 1, "blocked_longest_s": 20.0, "blocked_on": blocked_on} if blocked_on else {}
    stats = {**told(empty, **blocked), "resident_bytes": empty["capacity_bytes"]}
    found = judge(Look(path="s", stats=stats, disk_bytes=100 * GIB, disk_free_bytes=disk_free_bytes))
    assert found[-1].kind == "memory-full"
    assert ("puts go on" in found[-1].remedy) is goes_on
    assert ("puts wait" in found[-1].remedy) is not goes_on


def test_an_owner_that_tells_nothing_is_told(empty: dict[str, Any]) -> None:
    """It is stopped, or its disk is full."""
    found = judge(Look(path="s", stats=empty, owner_pid=7, is_told=False, told_s_ago=300.0))
    assert [finding.kind for finding in found] == ["silent-owner", "no-door"]
    assert found[0].severity is Severity.URGENT
    assert "wrote its figures last 5 minutes ago: " in found[0].sentence
    found = judge(Look(path="s", owner_pid=7, is_told=False))
    assert [finding.kind for finding in found] == ["silent-owner", "no-door"]
    assert found[0].severity is Severity.PROBLEM, "it may have begun just now"
    assert "process 7, has never written its figures: " in found[0].sentence


@pytest.mark.parametrize("strange", ["x", None, [], {}, -1])
@pytest.mark.parametrize("name", ["resident_bytes", "streams", "sync_times", "troubles", "inbox", "holders", "rates"])
def test_figures_that_no_owner_wrote_are_passed_over(empty: dict[str, Any], name: str, strange: Any) -> None:
    """Whoever may write `stats.json` may write anything; the rest is judged. Of an owner that tells them it is an error."""
    look = Look(path="s", owner_pid=7, is_told=False, stats={**told(empty, **{name: strange}), name: strange})
    kinds = [one.kind for one in judge(look)]
    assert {"no-door"} <= set(kinds) <= {"no-door", "silent-owner"}
    if "silent-owner" in kinds:
        with pytest.raises((AttributeError, KeyError, TypeError, ValueError)):
            judge(attrs.evolve(look, is_told=True))


@pytest.mark.parametrize("strange", ["x", {"under_way_s": "long"}, {"under_way_s": None}, 5])
def test_a_sync_that_no_owner_told_of_does_not_stand_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strange: Any
) -> None:
    """What lies in `stats.json` says nothing about the disk; the log is read."""
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_queue("q")
    monkeypatch.setattr(looking, "_told", lambda _spool, _owner: {"stats": {"sync_times": strange}, "is_told": False})
    monkeypatch.setattr(looking, "owner_of", lambda _spool: 7)
    look = looking.look_at(tmp_path / "spool")
    assert look.is_read
    assert not look.is_standing


def test_streams_are_judged(empty: dict[str, Any]) -> None:
    """Subscriptions that nobody has open, and blocks that are damaged."""
    stream = empty["streams"]["plant"]
    behind = {**stream["subscriptions"][0], "lag_messages": 5000}
    stats = {**empty, "streams": {"plant": {**stream, "subscriptions": [behind], "damaged_total": 3}}}
    found = judge(Look(path="s", stats=stats))
    assert [finding.kind for finding in found] == ["lost-messages", "stream-behind"]
    assert f"`qflow streams reset --to latest s plant {behind['name']}`" in found[1].remedy


@pytest.mark.parametrize(
    ("behind", "messages", "bytes_", "said"),
    [
        (30, 30, 150 * 2**20, "30 messages behind, about 150.0 MiB,"),
        (30, 60, 150 * 2**20, "30 messages behind, about 75.0 MiB,"),
        (5000, 60, 150, "5,000 messages behind, about 150 bytes,"),
        (30, 90, 150 * 2**20, None),
        (0, 0, 0, None),
    ],
)
def test_few_large_messages_are_far_behind(
    empty: dict[str, Any], behind: int, messages: int, bytes_: int, said: str | None
) -> None:
    """What a subscription keeps on the disk counts as well, by its share of the stream."""
    stream = empty["streams"]["plant"]
    reader = {**stream["subscriptions"][0], "lag_messages": behind}
    changed = {**stream, "subscriptions": [reader], "messages": messages, "bytes": bytes_}
    found = judge(Look(path="s", stats={**empty, "streams": {"plant": changed}}))
    assert [said in one.sentence for one in found if said] == ([True] if said else [])
    assert [one.kind for one in found] == (["stream-behind"] if said else [])


def test_of_many_subscriptions_the_furthest_behind_are_told_of(empty: dict[str, Any]) -> None:
    """Each was, with ten thousand lines for five thousand of them; a few are as ever, and so are those of other streams."""
    stream = empty["streams"]["plant"]

    def readers(count: int) -> dict[str, Any]:
        behind = [
            {**stream["subscriptions"][0], "name": f"r{lag}", "lag_messages": lag} for lag in range(2000, 2000 + count)
        ]
        return {**stream, "subscriptions": behind}

    found = judge(Look(path="s", stats={**empty, "streams": {"few": readers(MOST), "many": readers(5000)}}))
    assert [one.queue for one in found] == MOST * ["few"] + (MOST + 1) * ["many"]
    assert [one.facts["subscription"] for one in found[:MOST]] == [f"r{2000 + number}" for number in range(MOST)]
    assert [one.facts["lag_messages"] for one in found[MOST:-1]] == [6999 - number for number in range(MOST)]
    last = found[-1]
    assert (last.kind, last.severity, last.facts["count"]) == ("stream-behind", Severity.NOTICE, 5000 - MOST)
    assert last.sentence == (
        "so it is with 4,990 more subscriptions of stream 'many': 'r6989', 'r6988', 'r6987' and others"
    )
    assert last.remedy == "as for those before, which are the worst; `qflow streams s` shows all"
    assert len(last.facts["names"]) == 100


@pytest.mark.parametrize(
    ("kind", "worst", "of_queue"),
    [
        ("held-too-long", "oldest_s", {"holders": [HOLDER]}),
        ("blocked-producers", "longest_s", {"blocked_putters": 1, "blocked_longest_s": 50.0, "blocked_on": "capacity"}),
        ("lost-messages", "lost", {"lost_total": 5}),
        ("paused", "messages", {"paused": True, "messages": 50}),
        ("dead-letters", "messages", {}),
    ],
)
def test_of_many_queues_the_worst_are_told_of(
    empty: dict[str, Any], kind: str, worst: str, of_queue: dict[str, Any]
) -> None:
    """Whatever is wrong with them; the page of each has what is wrong with that one."""
    queue = {**empty["queues"]["q"], **of_queue}
    queues: dict[str, Any] = {f"q{number}": queue for number in range(MOST + 5)}
    much = {"holders": [{**HOLDER, "oldest_s": 9e9}], "blocked_longest_s": 9e9, "lost_total": 10**9, "messages": 10**9}
    queues["last"] = {**queue, **{name: value for name, value in much.items() if name in of_queue}}
    letters = {}
    if kind == "dead-letters":
        letters = {name: Letters(messages=7) for name in queues}
        queues = {name: {**queue, "messages": 10**9 if name == "last" else 7} for name in queues}
    look = Look(path="s", stats={**empty, "queues": queues}, letters=letters)
    found = judge(look)
    assert [one.kind for one in found] == (MOST + 1) * [kind]
    assert found[0].queue == "last"
    assert found[0].facts[worst] >= 10**9
    assert (found[-1].queue, found[-1].facts["count"]) == (None, 6)
    assert len(judge_each(look)) == MOST + 6


def test_of_many_jobs_that_fail_some_are_told_of(empty: dict[str, Any]) -> None:
    """They are of no queue, as far as is known."""
    troubles = {f"retention of stream {number}": "no" for number in range(MOST + 4)}
    found = judge(Look(path="s", stats={**empty, "troubles": troubles}))
    assert [one.kind for one in found] == (MOST + 1) * ["maintenance"]
    assert found[-1].sentence.startswith("so it is with 4 more jobs: 'retention of stream 10', ")
    assert found[-1].remedy == "as for those before, which are the worst"


def test_the_worst_comes_first(empty: dict[str, Any]) -> None:
    """As in a hospital."""
    stats = told(empty, holders=[HOLDER], blocked_putters=1, blocked_longest_s=2.0, blocked_on="capacity", lost_total=1)
    look = Look(path="s", stats=stats, clean=False, letters={"dead": Letters(messages=1)})
    found = judge(look)
    assert [finding.kind for finding in found] == [
        "lost-messages", "held-too-long", "blocked-producers", "dead-letters", "not-closed",
    ]  # fmt: skip
    assert [finding.severity for finding in found] == sorted((one.severity for one in found), reverse=True)


def test_hostile_names_do_nothing_to_a_terminal(empty: dict[str, Any]) -> None:
    """Nor does a command in a remedy do more in a shell than it says."""
    name = "\x1b[2J'; rm -rf ~\n"
    queue = {**empty["queues"]["q"], "holders": [{**HOLDER, "consumer": "\x07" + "x" * 1000}]}
    (found,) = judge(Look(path="a\x1bb", stats={**empty, "queues": {name: queue}}))
    assert found.sentence.isprintable()
    assert found.remedy.isprintable()
    assert len(found.sentence) < 400
    assert r"`qflow alter $'a\x1bb' $'\x1b[2J\'; rm -rf ~\x0a' ack_timeout_s=600`" in found.remedy
    assert harmless("a\x1bb\n c") == r"a b c".replace(" ", r"\x1b", 1)


SPOILED = {"rates": {**RATES, "put_60s": 4.0, "put_10s": 4.0}, "lag_messages": 1, "messages": 1}


def test_a_name_with_a_nul_has_no_command(empty: dict[str, Any]) -> None:
    """A shell would end it there, and the command be for another queue."""
    queue = {**empty["queues"]["q"], **SPOILED, "consumers_total": 0}
    found = judge(Look(path="s", stats={**empty, "queues": {"pay\0ments": queue, "pay  ments": queue}}))
    assert [one.kind for one in found] == ["no-consumer", "no-consumer"]
    assert "`qflow" not in found[0].remedy.replace("`qflow top`", "")
    assert r"`broker.queue('pay\x00ments')`" in found[0].remedy
    assert r"`qflow purge s $'pay \x20ments'`" in found[1].remedy
    (letters,) = judge(Look(path="s", letters={"a\0": Letters(messages=1)}))
    assert "`qflow" not in letters.remedy.replace("`qflow top`", "")


def test_numbers_in_words() -> None:
    """As people say them."""
    assert [span(s) for s in (0.5, 12, 119, 120, 2400, 9000, 200_000)] == [
        "0.5 s", "12 s", "119 s", "2 minutes", "40 minutes", "2.5 hours", "2.3 days",
    ]  # fmt: skip
    assert [size(n) for n in (0, 1023, 1024, 5 * 2**20, 3 * 2**40)] == [
        "0 bytes",
        "1,023 bytes",
        "1.0 KiB",
        "5.0 MiB",
        "3.0 TiB",
    ]


def test_the_runbook_has_a_section_for_each_kind() -> None:
    """In the order in which the doctor tells them."""
    page = (ROOT / "docs" / "howto" / "runbook.md").read_text()
    assert tuple(re.findall(r"^## ([a-z-]+)$", page, flags=re.M)) == KINDS


def test_a_finding_is_json(empty: dict[str, Any]) -> None:
    """With its severity as a word."""
    found = only(Look(path="s", clean=False)).to_dict()
    assert found.keys() == {"severity", "kind", "sentence", "remedy", "queue", "facts"}
    assert found["severity"] == "notice"


def test_a_log_whose_sync_stands_still_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it would wait for the same disk, and nothing would be told."""
    with qflow.open(tmp_path / "spool") as broker:
        stats = broker.stats()

    class Owner:
        def stats(self) -> BrokerStats:
            return attrs.evolve(stats, sync_times=TimeStats(under_way_s=9.0))

    monkeypatch.setattr(looking, "owner_of", lambda _spool: 7)
    monkeypatch.setattr(looking, "read_health", None)
    monkeypatch.setattr(qflow, "connect", lambda _spool, timeout_s: nullcontext(Owner()))
    found = judge(looking.look_at(tmp_path / "spool"))
    assert [(one.kind, one.severity) for one in found] == [("slow-syncs", Severity.URGENT)]
    said = CliRunner().invoke(app, ["doctor", str(tmp_path / "spool")])
    assert (said.exit_code, said.stdout.splitlines()[-1]) == (
        6,
        "the log was not read, which would wait for the same disk",
    )
