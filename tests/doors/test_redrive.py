"""`qflow redrive`: dead letters go back, from a shell."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import qflow
from doors.command_line import CommandLine, error_line
from qflow import inspect
from qflow.cli.chosen import Chosen
from qflow.cli.main import app
from qflow.queues import redrive
from qflow.queues.assembly import Assembly
from qflow.queues.together import Together
from qflow.remote.client.queue import RemoteQueue


@pytest.fixture
def dead(cli: CommandLine) -> CommandLine:
    """A spool with three dead letters of `q`, one of a queue that is gone, and one message that is none."""
    with qflow.open(cli.spool) as broker:
        for name, bodies in (("q", [b"1", b"2", b"3"]), ("gone", [b"4"])):
            queue = broker.declare_queue(name, dead_letter="dead")
            queue.put_many(bodies)
            queue.get_many(len(bodies)).nack(requeue=False)
        broker.delete_queue("gone")
        broker.queue("dead").put(b"5")
    return cli


def test_dead_letters_go_back_and_the_rest_is_told(dead: CommandLine) -> None:
    """How many went where, how many stay and why."""
    done = dead.run("redrive", dead.spool, "dead")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode().splitlines() == [
        "messages moved from dead: 3",
        "  3 to q",
        "messages kept: 2",
        "  1: no dead letter: nothing says where it came from",
        "  1: queue 'gone', where it came from, is gone",
        "another queue gets them by --to QUEUE",
    ]
    assert dead.waiting() == [b"1", b"2", b"3"]
    assert dead.run("get", dead.spool, "dead").stdout == b"4\n5\n"


def test_facts_for_programs_a_limit_and_another_queue(dead: CommandLine) -> None:
    """--json, --limit and --to."""
    assert dead.json("redrive", dead.spool, "dead", "--limit", 2) == {"queue": "dead", "moved": {"q": 2}, "kept": {}}
    assert dead.json("redrive", dead.spool, "dead", "--to", "q")["moved"] == {"q": 3}
    assert dead.waiting() == [b"1", b"2", b"3", b"4", b"5"]


@pytest.mark.parametrize("verb", ["redrive", "move"])
def test_what_an_interrupt_came_upon_is_told_as_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """A commit goes on without whoever waits for it: those in it are not among the moved, and may have moved."""
    spool, go_on = tmp_path / "spool", Together.go_on
    with qflow.open(spool) as broker:
        queue = broker.declare_queue("q", dead_letter="dead")
        queue.put_many([b"x"] * 250)
        queue.get_many(250).nack(requeue=False)
    words = [verb, str(spool), "dead", *(["q"] if verb == "move" else [])]
    counts: list[int] = []

    def struck(together: Together, assembly: Assembly, *arguments: Any, **options: Any) -> None:
        go_on(together, assembly, *arguments, **options)
        counts.append(len(assembly.receipts))
        if len(counts) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Together, "go_on", struck)
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, done.stdout.splitlines()) == (
        130,
        [
            "messages moved from dead: 100",
            "  100 to q",
            "not known of up to 100 more: they were being committed when this ended",
        ],
    )
    assert {queue.name: queue.messages for queue in inspect.read_spool(spool).queues} == {"q": 200, "dead": 50}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("spool", "missing"), 2, "'missing'"),
        (("spool", "dead", "--to", "missing"), 2, "'missing'"),
        (("spool", "dead", "--to", "dead"), 2, "itself"),
    ],
)
def test_a_bad_queue_is_one_line(dead: CommandLine, arguments: tuple[str, ...], code: int, words: str) -> None:
    """Nothing is moved."""
    done = dead.run("redrive", *arguments)
    assert (done.returncode, done.stdout) == (code, b"")
    assert words in error_line(done)
    assert dead.run("get", dead.spool, "dead").stdout == b"1\n2\n3\n4\n5\n"


def test_bad_usage_and_a_spool_in_use(dead: CommandLine) -> None:
    """The exit codes of the other commands."""
    assert dead.run("redrive", "nowhere", "dead").returncode == 2
    assert dead.run("redrive", dead.spool, "dead", "--limit", 0).returncode == 2
    assert dead.run("redrive", dead.spool).returncode == 2
    with qflow.open(dead.spool, door=False):
        done = dead.run("redrive", dead.spool, "dead")
    assert done.returncode == 3
    said = error_line(done)
    assert (
        f"in use by process {os.getpid()}, which lets nobody in, and `qflow doctor {dead.spool}` says why: wait" in said
    )
    assert "qflow.connect" not in said


DECLINED = "dead_letter_nack_reason=card declined"


def make_reasons(spool: Path) -> qflow.Broker:
    """Open a spool with six dead letters of two reasons, by turns, of which one has expired, and one that comes later."""
    broker = qflow.open(spool)
    queue, dead = broker.declare_queue("q", dead_letter="dead"), broker.declare_queue("dead")
    for number in range(6):
        queue.put(b"%d" % number)
        queue.get(60).nack(requeue=False, reason="no such street" if number % 2 else "card declined")
    headers = {"dead_letter_nack_reason": "card declined", "dead_letter_queue": "q"}
    dead.put(b"late", headers=headers, ttl_s=0.001)
    dead.put(b"later", headers=headers, delay_s=3600)
    return broker


@pytest.mark.parametrize("is_owned", [True, False], ids=["beside an owner", "alone"])
def test_those_of_one_reason_go_and_all_others_stay(
    cli: CommandLine, is_owned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moved back, moved elsewhere, deleted; first without doing it. What a consumer holds stays, and is told."""
    owner = make_reasons(cli.spool)
    if is_owned:
        held = owner.queue("dead").get(60)
    else:
        owner.close()
    holds = int(is_owned)

    def verb(*words: str) -> Any:
        return cli.json(words[0], cli.spool, "dead", *words[1:], "--where", DECLINED)

    kept = {"not due yet": 1}
    assert verb("redrive", "--dry-run") == {"queue": "dead", "would_move": {"q": 3}, "kept": kept}
    assert verb("purge", "--dry-run") == {"queue": "dead", "would_purge": 4}
    busy = {"not waiting any more: a consumer holds them, or they are gone": 1} if is_owned else {}
    done = verb("redrive", "--limit", "1")
    assert done == {"queue": "dead", "moved": {"q": 1}, "kept": kept | busy}
    assert verb("move", "q")["moved"] == {"q": 2 - holds}
    shown = cli.run("redrive", cli.spool, "dead", "--where", DECLINED).stdout.decode().splitlines()
    assert shown == ["messages moved from dead: 0", f"messages kept: {1 + holds}", "  1: not due yet"] + [
        f"  1: {reason}" for reason in busy
    ]
    if is_owned:
        held.nack()
    assert verb("purge", "--yes") == {"queue": "dead", "purged": 1 + holds, "left": 0}
    if is_owned:
        owner.close()
    with qflow.open(cli.spool) as broker:
        assert [delivery.body for delivery in broker.queue("dead").get_many(9, 0)] == [b"1", b"3", b"5"]
        assert len(broker.queue("q")) == 3 - holds


def test_what_is_chosen_is_asked_of_an_owner_some_at_a_time(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit is kept to, also where some stay; after an interrupt it is told what is not known."""
    with make_reasons(cli.spool) as owner:
        owner.alter_queue("q", limit_messages=2)
        sequences = [entry.sequence for entry in owner.queue("dead").browse()][:6]
        for module in ("redrive", "chosen"):
            monkeypatch.setattr(f"qflow.cli.{module}.AT_ONCE", 2)
            monkeypatch.setattr(f"qflow.cli.{module}.choose", lambda *_, **__: Chosen(sequences, later=1))
        words = ["redrive", str(cli.spool), "dead", "--where", "a", "--json"]
        done = CliRunner().invoke(app, [*words, "--limit", "1"])
        assert json.loads(done.stdout) == {"queue": "dead", "moved": {"q": 1}, "kept": {"not due yet": 1}}
        kept = {"not due yet": 1, "queue 'q' is at its limit": 4, redrive.NOT_WAITING: 1}
        assert json.loads(CliRunner().invoke(app, words).stdout) == {"queue": "dead", "moved": {"q": 1}, "kept": kept}
        asked, real = [], RemoteQueue.delete_many

        def interrupted(queue: RemoteQueue, sequences: list[int]) -> list[int]:
            asked.append(sequences)
            deleted = real(queue, sequences)
            if len(asked) == 2:
                raise KeyboardInterrupt
            return deleted

        monkeypatch.setattr(RemoteQueue, "delete_many", interrupted)
        done = CliRunner().invoke(app, ["purge", *words[1:], "--yes"])
        assert (done.exit_code, json.loads(done.stdout)) == (
            130,
            {"queue": "dead", "purged": 0, "left": 4, "in_doubt": 2},
        )
        assert [entry.sequence for entry in owner.queue("dead").browse() if entry.sequence in sequences] == sequences[
            4:
        ]


def test_bad_conditions_and_a_queue_that_is_not_durable(cli: CommandLine) -> None:
    """Nothing is moved, and nothing deleted."""
    with qflow.open(cli.spool) as owner:
        owner.declare_queue("brief", durable=False).put(b"x", headers={"a": 1})
        for words in (["move", "brief", "q"], ["purge", "brief", "--yes"], ["redrive", "brief"]):
            done = cli.run(words[0], cli.spool, *words[1:], "--where", "a")
            assert (done.returncode, "no durable queue 'brief'" in error_line(done)) == (2, True)
            assert cli.run(words[0], cli.spool, *words[1:], "--where", "=a").returncode == 2
        assert len(owner.queue("brief")) == 1
